"""Calling a handler: what it raises is its failure, unless its transaction was lost or it may never be called again."""

from __future__ import annotations

import asyncio
from typing import Any

from outrider.delivery import Arrival
from outrider.errors import OutriderError, Permanent, TransactionLost, UnfitHandler
from outrider.inbox.router import Route
from outrider.inbox_store import InboxStore
from outrider.outcome import Reason
from outrider.where import text_of


class HandlerFailed(OutriderError):
    """A handler raised; the transaction is undone."""

    def __init__(self, arrival: Arrival, error: BaseException, reason: Reason) -> None:
        super().__init__(f"{type(error).__name__}: {text_of(error)}")
        self.arrival, self.error, self.reason = arrival, error, reason

    @property
    def hopeless(self) -> bool:
        """Tell whether trying again will never help."""
        return isinstance(self.error, Permanent)


async def call(store: InboxStore, route: Route, lot: list[Arrival], tx: Any, limit_seconds: float | None) -> None:
    """Let a handler work on its events; raise HandlerFailed if it fails, and what is not its fault as it is."""
    events = [arrival.event for arrival in lot]
    limit = asyncio.timeout(limit_seconds)
    try:
        async with limit:
            await store.call(route.handler, events if route.batch else events[0], tx)
    except TransactionLost:
        raise
    except UnfitHandler as error:
        raise unfit(route, lot[0], error) from error
    except (Exception, asyncio.CancelledError) as error:
        if isinstance(error, asyncio.CancelledError) and _being_cancelled():
            raise
        if limit.expired():
            late = TimeoutError(f"took longer than handler_timeout_seconds = {limit_seconds}")
            late.__cause__ = error
            raise HandlerFailed(lot[0], late, Reason.PROCESSING_TIMEOUT) from error
        raise HandlerFailed(lot[0], error, Reason.MAX_RETRIES_EXCEEDED) from error


def unfit(route: Route, arrival: Arrival, error: UnfitHandler) -> UnfitHandler:
    """Name the handler, and the event that has to be looked at."""
    return UnfitHandler(f"the handler {route.name} {error}; the event was {arrival.event_type} {arrival.event_id}")


def _being_cancelled() -> bool:
    """Tell whether it is we who are to end. If not, the handler has awaited something that was, and simply failed."""
    task = asyncio.current_task()
    return task is not None and task.cancelling() > 0
