"""Staging: checks events, and inserts them in the caller's open transaction through the caller's driver."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field, replace
from typing import Any
from uuid import UUID

from outrider.background import shared
from outrider.causation import count_staged
from outrider.drivers.commit_hooks import after_commit
from outrider.drivers.detect import Mode, driver, driver_of, kind_of
from outrider.errors import UsageError
from outrider.event import Event
from outrider.outbox.model import OptimisticClaim, StagedRow, StageRequest
from outrider.outbox.validation import StagingRules, load_schemas, validate_events
from outrider.payload.payloads import Payloads
from outrider.stores.queries import identifier

Stage = Callable[..., Awaitable[list[UUID]]]
"""Stages events: takes a transaction and events, and returns their ids."""

ASYNC_ONLY, SYNC_ONLY = "an asynchronous connection", "a connection that is not asynchronous"
WAKE_SECONDS = 0.02
"""Seconds between staging and waking relays, for drivers without a commit hook: most transactions have committed by
then.
"""


@dataclass(frozen=True, slots=True)
class Outbox:
    """Staging with custom rules: another schema, another topic rule, other limits.

    `payloads` checks payloads before they are written, and encrypts their sensitive fields.

    `wake`, such as a `Waker`, is called on any thread when relays have new events to fetch: after the commit with
    SQLAlchemy's sessions and Django, shortly after staging otherwise.

    >>> Outbox(schema="shop").schema
    'shop'
    """

    schema: str = "outrider"
    rules: StagingRules = field(default_factory=StagingRules)
    wake: Callable[[], object] | None = None
    payloads: Payloads | None = None

    def __post_init__(self) -> None:
        identifier(self.schema)
        if self.payloads is not None:
            object.__setattr__(self, "rules", replace(self.rules, payloads=self.payloads))

    async def stage(self, conn: Any, *events: Event) -> list[UUID]:
        """Stage events in the caller's open transaction; return their ids. See `outrider.stage`."""
        await load_schemas(self.rules, events)
        request = validate_events(events, self.rules)
        await self.insert(conn, request, None)
        count_staged(len(request.ids))
        self._wake_after(conn)
        return list(request.ids)

    def stage_sync(self, conn: Any, *events: Event) -> list[UUID]:
        """Stage events through a synchronous connection. See `outrider.stage_sync`."""
        request = validate_events(events, self.rules)
        self.insert_sync(conn, request, None)
        count_staged(len(request.ids))
        self._wake_after(conn)
        return list(request.ids)

    async def insert(self, conn: Any, request: StageRequest, claim: OptimisticClaim | None) -> list[StagedRow]:
        """Insert checked events through the driver of the connection."""
        inserted: list[StagedRow] = await self.perform(
            conn, "stage", request, claim, instead="outrider.stage_sync(conn, ...)"
        )
        return inserted

    def insert_sync(self, conn: Any, request: StageRequest, claim: OptimisticClaim | None) -> list[StagedRow]:
        """Insert checked events through a synchronous connection."""
        inserted: list[StagedRow] = self.perform_sync(
            conn, "stage", request, claim, instead="await outrider.stage(conn, ...)"
        )
        return inserted

    async def perform(self, conn: Any, operation: str, *arguments: Any, instead: str = ASYNC_ONLY) -> Any:
        """Run a driver's named operation inside the caller's open transaction; return the result.

        Drivers have `stage` and the operations of sagas. `instead` is the remedy in the error for a synchronous
        connection::

            started = await Outbox().perform(conn, "start_saga", order.new(Order("A-7"), "A-7"))
        """
        info = driver_of(conn)
        if info.mode is Mode.SYNC:
            # A blocking call would stop the event loop, with all its tasks, for the duration of the network call.
            raise UsageError(f"a {kind_of(conn)} is not asynchronous, and would block the event loop; use: {instead}")
        done = driver(info).run(conn, operation, arguments, self.schema)
        return await done if info.mode is Mode.ASYNC else done

    def perform_sync(self, conn: Any, operation: str, *arguments: Any, instead: str = SYNC_ONLY) -> Any:
        """Run a driver's named operation through a synchronous connection; return the result."""
        info = driver_of(conn)
        if info.mode is Mode.ASYNC:
            raise UsageError(f"a {kind_of(conn)} is asynchronous; use: {instead}")
        return driver(info).run(conn, operation, arguments, self.schema)

    def _wake_after(self, conn: Any) -> None:
        if self.wake is not None and not after_commit(conn, self.wake):
            _call_later(self.wake)


default = Outbox()


async def stage(conn: Any, *events: Event) -> list[UUID]:
    """Stage events inside the caller's own transaction; return the ids, in the given order.

    After a commit, the events will be delivered. After a rollback, they never existed. Staging an `event_id` that is
    already known is a no-op. Accepts connections of asyncpg, psycopg (`AsyncConnection`), aiosqlite and sqlite3,
    SQLAlchemy's `AsyncSession` and `AsyncConnection`, asynchronous sessions of pymongo, and transactions of the memory
    store::

        async with conn.transaction():
            await conn.execute("INSERT INTO orders (id) VALUES ($1)", order_id)
            await outrider.stage(conn, Event("order.placed", {"id": order_id}, aggregate_id=order_id))
    """
    return await default.stage(conn, *events)


def stage_sync(conn: Any, *events: Event) -> list[UUID]:
    """Stage events without an event loop, through psycopg, sqlite3, SQLAlchemy, Django or pymongo.

    The same guarantee as `stage`::

        with transaction.atomic():
            order.save()
            outrider.stage_sync(connection, Event("order.placed", {"id": order.id}, aggregate_id=str(order.id)))
    """
    return default.stage_sync(conn, *events)


def _call_later(call: Callable[[], object]) -> None:
    """Call a moment later, on the running event loop of the thread, or else on a background loop."""
    try:
        asyncio.get_running_loop().call_later(WAKE_SECONDS, call)
    except RuntimeError:
        loop = shared().loop
        loop.call_soon_threadsafe(loop.call_later, WAKE_SECONDS, call)
