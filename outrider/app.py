"""The composition root: the only module that names adapters."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from importlib import import_module
from typing import Any
from uuid import UUID

from outrider.errors import Misuse
from outrider.event import Event
from outrider.outbox.stage import StagingRules, drafts
from outrider.store import Drafts, Hold, Placed

# Where a connection's type comes from, and the module that stages through it.
_ASYNC_DRIVERS = {"asyncpg": "outrider.drivers.asyncpg", "outrider.stores.memory": "outrider.drivers.memory"}
_SYNC_DRIVERS = {"sqlite3": "outrider.drivers.sqlite3", "_sqlite3": "outrider.drivers.sqlite3"}


@dataclass(frozen=True, slots=True)
class Outbox:
    """Staging with your own rules: another schema, another topic rule, other limits.

    >>> Outbox(schema="shop").schema
    'shop'
    """

    schema: str = "outrider"
    rules: StagingRules = field(default_factory=StagingRules)

    async def stage(self, conn: Any, *events: Event) -> list[UUID]:
        """Stage events in the caller's open transaction; return their ids. See `outrider.stage`."""
        checked = drafts(events, self.rules)
        await self.place(conn, checked, None)
        return list(checked.ids)

    def stage_sync(self, conn: Any, *events: Event) -> list[UUID]:
        """Stage events through a connection that is not asynchronous. See `outrider.stage_sync`."""
        checked = drafts(events, self.rules)
        driver = _driver(conn, _SYNC_DRIVERS)
        if driver is None:
            raise _unknown(conn)
        driver(conn, checked, None, self.schema)
        return list(checked.ids)

    async def place(self, conn: Any, checked: Drafts, hold: Hold | None) -> list[Placed]:
        """Insert drafts through whatever driver the connection belongs to."""
        if driver := _driver(conn, _ASYNC_DRIVERS):
            placing: Awaitable[list[Placed]] = driver(conn, checked, hold, self.schema)
            return await placing
        if driver := _driver(conn, _SYNC_DRIVERS):
            placed: list[Placed] = driver(conn, checked, hold, self.schema)
            return placed
        raise _unknown(conn)


_default = Outbox()


async def stage(conn: Any, *events: Event) -> list[UUID]:
    """Stage events inside the caller's own transaction; return their ids, in the order given.

    Commit, and they will be delivered. Roll back, and they never existed. Staging an `event_id` that is already known
    is a no-op. Takes an asyncpg connection, a sqlite3 connection, or a transaction of the memory store::

        async with conn.transaction():
            await conn.execute("INSERT INTO orders (id) VALUES ($1)", order_id)
            await outrider.stage(conn, Event("order.placed", {"id": order_id}, aggregate_id=order_id))
    """
    return await _default.stage(conn, *events)


def stage_sync(conn: Any, *events: Event) -> list[UUID]:
    """Stage events through a sqlite3 connection, without an event loop.

    The same promise as `stage`::

        with conn:
            conn.execute("INSERT INTO orders (id) VALUES (?)", (order_id,))
            outrider.stage_sync(conn, Event("order.placed", {"id": order_id}, aggregate_id=order_id))
    """
    return _default.stage_sync(conn, *events)


def _driver(conn: Any, drivers: dict[str, str]) -> Callable[..., Any] | None:
    for kind in type(conn).__mro__:
        for package, module in drivers.items():
            if kind.__module__ == package or kind.__module__.startswith(package + "."):
                found: Callable[..., Any] = import_module(module).stage
                return found
    return None


def _unknown(conn: Any) -> Misuse:
    kind = f"{type(conn).__module__}.{type(conn).__qualname__}"
    return Misuse(f"cannot stage through a {kind}; pass an asyncpg or sqlite3 connection that is in a transaction")

