"""Wakes relays from applications, consumers and saga workers, in the background and on a separate connection.

A notification that cannot be sent is logged and dropped, because relays poll as well. Staging never waits for a
notification.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable
from contextlib import suppress
from types import TracebackType
from typing import Self

from outrider.app import open_store
from outrider.background import Background
from outrider.errors import OutriderError
from outrider.outbox.store import OutboxStore
from outrider.redaction import without_values
from outrider.telemetry.events import Handled, SagaAdvanced, TelemetryEvent

PAUSE_SECONDS = 0.005
"""Seconds between two notifications: the second covers all calls in the meantime."""
RETRY_SECONDS = 1.0
"""Seconds to wait after a notification that could not be sent."""

_log = logging.getLogger(__name__)


class StagedObserver:
    """Calls `wake` after the commit of a consumer or a saga worker that has staged events::

    Consumer(source, store, routes, observer=Observers([log_observer(), StagedObserver(waker)]))
    """

    def __init__(self, wake: Callable[[], object] | None = None) -> None:
        self.wake = wake

    def emit(self, event: TelemetryEvent) -> None:
        """Wake relays, unless the transaction has staged nothing."""
        if isinstance(event, Handled | SagaAdvanced) and event.staged and self.wake is not None:
            self.wake()


class Waker:
    """Notifies the relays of a store about new events, without blocking the caller.

    Give the `Outbox` a waker, one for the whole application::

        waker = outrider.Waker("postgresql://localhost/shop")
        outbox = outrider.Outbox(wake=waker)

    The first call opens the connection, so the waker may be created before a server forks its workers.
    """

    def __init__(self, url: str, *, schema: str = "outrider") -> None:
        self._background = Background("outrider-waker")
        self._closed = False
        self._opening = lambda: open_store(url, schema=schema)
        # A forked child has a new loop, and needs a new `_WakeLoop`: the parent's connections belong to the parent.
        self._loops: dict[asyncio.AbstractEventLoop, _WakeLoop] = {}

    def __call__(self) -> None:
        """Wake the relays soon. Safe on any thread and after a fork; never waits. Has no effect after `close`."""
        if self._closed:
            return
        loop = self._background.loop
        loop.call_soon_threadsafe(self._request, loop)

    def close(self) -> None:
        """Send pending notifications, then close connection and thread. A second call has no effect."""
        if self._closed:
            return
        # First, because another thread may still ask for a notification about events staged just now.
        self._closed = True
        self._background.run(self._close()).result()
        self._background.close()

    def _request(self, loop: asyncio.AbstractEventLoop) -> None:
        if loop not in self._loops:
            self._loops[loop] = _WakeLoop(self._opening)
        self._loops[loop].request()

    async def _close(self) -> None:
        if post := self._loops.pop(asyncio.get_running_loop(), None):
            await post.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


class _WakeLoop:
    """Sends notifications one at a time, on a single event loop."""

    def __init__(self, opening: Callable[[], Awaitable[OutboxStore]]) -> None:
        self._opening = opening
        self._store: OutboxStore | None = None
        self._sending: asyncio.Task[None] | None = None
        self._requested = False
        self._failing = False
        self._closing = asyncio.Event()

    def request(self) -> None:
        self._requested = True
        if self._sending is None:
            self._sending = asyncio.get_running_loop().create_task(self._send())

    async def close(self) -> None:
        self._closing.set()
        if self._sending is not None:
            await self._sending
        if self._store is not None:
            await self._store.close()

    async def _send(self) -> None:
        while self._requested:
            self._requested = False
            pause = PAUSE_SECONDS if await self._sent() else RETRY_SECONDS
            with suppress(TimeoutError):
                await asyncio.wait_for(self._closing.wait(), pause)
        self._sending = None

    async def _sent(self) -> bool:
        try:
            self._store = self._store or await self._opening()
            await self._store.notify()
        except OutriderError as error:
            # Once per outage: a busy application would write a record every second.
            if not self._failing:
                _log.warning("relays could not be woken", extra={"error": without_values(error)})
            self._failing = True
            return False
        self._failing = False
        return True
