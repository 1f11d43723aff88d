"""Staging: events are checked, and go into the caller's open transaction through whatever driver it belongs to."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any
from uuid import UUID

from outrider.background import shared
from outrider.drivers.hooks import after_commit
from outrider.drivers.recognise import Manner, driver, kind_of, way_of
from outrider.errors import Misuse
from outrider.event import Event
from outrider.outbox.stage import StagingRules, drafts
from outrider.saga_store import Entered, NewMail, NewSaga, Phase
from outrider.store import Drafts, Hold, Placed
from outrider.stores.queries import identifier

WAKE_SECONDS = 0.02
"""How long after staging relays are woken where nobody tells of the commit: most have committed by then."""


@dataclass(frozen=True, slots=True)
class Outbox:
    """Staging with your own rules: another schema, another topic rule, other limits.

    `wake` is called when there is something for relays to fetch, on any thread, such as a `Waker`: after the commit
    with SQLAlchemy's sessions and Django, shortly after staging otherwise.

    >>> Outbox(schema="shop").schema
    'shop'
    """

    schema: str = "outrider"
    rules: StagingRules = field(default_factory=StagingRules)
    wake: Callable[[], object] | None = None

    def __post_init__(self) -> None:
        identifier(self.schema)

    async def stage(self, conn: Any, *events: Event) -> list[UUID]:
        """Stage events in the caller's open transaction; return their ids. See `outrider.stage`."""
        checked = drafts(events, self.rules)
        await self.place(conn, checked, None)
        self._wake_after(conn)
        return list(checked.ids)

    def stage_sync(self, conn: Any, *events: Event) -> list[UUID]:
        """Stage events through a connection that is not asynchronous. See `outrider.stage_sync`."""
        checked = drafts(events, self.rules)
        self.place_sync(conn, checked, None)
        self._wake_after(conn)
        return list(checked.ids)

    async def place(self, conn: Any, checked: Drafts, hold: Hold | None) -> list[Placed]:
        """Insert drafts through whatever driver the connection belongs to."""
        placed: list[Placed] = await _through(conn, "stage", checked, hold, self.schema)
        return placed

    def place_sync(self, conn: Any, checked: Drafts, hold: Hold | None) -> list[Placed]:
        """Insert drafts through a connection that is not asynchronous."""
        placed: list[Placed] = _through_sync(conn, "stage", checked, hold, self.schema)
        return placed

    async def start_saga(self, conn: Any, saga: NewSaga) -> bool:
        """Start a saga in the caller's open transaction. See `Saga.start`, which is what you want."""
        return bool(await _through(conn, "start_saga", saga, self.schema))

    def start_saga_sync(self, conn: Any, saga: NewSaga) -> bool:
        """Start a saga through a connection that is not asynchronous; False if it is there already::

        with transaction.atomic():
            Outbox().start_saga_sync(connection, order.new(Order("A-7"), "A-7"))
        """
        return bool(_through_sync(conn, "start_saga", saga, self.schema))

    async def post_mail(self, conn: Any, mail: Sequence[NewMail]) -> int:
        """Post mail to sagas in the caller's open transaction; return how many were new."""
        posted: int = await _through(conn, "post_mail", mail, self.schema)
        return posted

    def post_mail_sync(self, conn: Any, mail: Sequence[NewMail]) -> int:
        """Post mail to sagas through a connection that is not asynchronous; return how many were new."""
        posted: int = _through_sync(conn, "post_mail", mail, self.schema)
        return posted

    async def barrier_enter(self, conn: Any, participant: str, key: str, phase: Phase) -> Entered:
        """Let a command through a participant's barrier. See `Barrier`, which is what you want."""
        entered: Entered = await _through(conn, "barrier_enter", participant, key, phase, self.schema)
        return entered

    def barrier_enter_sync(self, conn: Any, participant: str, key: str, phase: Phase) -> Entered:
        """Let a command through a barrier, through a connection that is not asynchronous."""
        entered: Entered = _through_sync(conn, "barrier_enter", participant, key, phase, self.schema)
        return entered

    async def barrier_keep(self, conn: Any, participant: str, key: str, phase: Phase, reply: bytes) -> None:
        """Keep what a participant has answered. See `Barrier`, which is what you want."""
        await _through(conn, "barrier_keep", participant, key, phase, reply, self.schema)

    def barrier_keep_sync(self, conn: Any, participant: str, key: str, phase: Phase, reply: bytes) -> None:
        """Keep what a participant has answered, through a connection that is not asynchronous."""
        _through_sync(conn, "barrier_keep", participant, key, phase, reply, self.schema)

    def _wake_after(self, conn: Any) -> None:
        if self.wake is not None and not after_commit(conn, self.wake):
            _later(self.wake)


default = Outbox()


async def stage(conn: Any, *events: Event) -> list[UUID]:
    """Stage events inside the caller's own transaction; return their ids, in the order given.

    Commit, and they will be delivered. Roll back, and they never existed. Staging an `event_id` that is already known
    is a no-op. Takes connections of asyncpg, psycopg (`AsyncConnection`), aiosqlite and sqlite3, SQLAlchemy's
    `AsyncSession` and `AsyncConnection`, asynchronous sessions of pymongo, and transactions of the memory store::

        async with conn.transaction():
            await conn.execute("INSERT INTO orders (id) VALUES ($1)", order_id)
            await outrider.stage(conn, Event("order.placed", {"id": order_id}, aggregate_id=order_id))
    """
    return await default.stage(conn, *events)


def stage_sync(conn: Any, *events: Event) -> list[UUID]:
    """Stage events without an event loop, through psycopg, sqlite3, SQLAlchemy, Django or pymongo.

    The same promise as `stage`::

        with transaction.atomic():
            order.save()
            outrider.stage_sync(connection, Event("order.placed", {"id": order.id}, aggregate_id=str(order.id)))
    """
    return default.stage_sync(conn, *events)


async def _through(conn: Any, verb: str, *args: Any) -> Any:
    """Do something through whatever driver the connection belongs to."""
    way = way_of(conn)
    if way.manner is Manner.SYNC:
        # It would keep the event loop, and everybody on it, waiting for the network.
        raise Misuse(f"a {kind_of(conn)} is not asynchronous, and would block the event loop; use: {_plain(verb)}")
    done = getattr(driver(way), verb)(conn, *args)
    return await done if way.manner is Manner.ASYNC else done


def _through_sync(conn: Any, verb: str, *args: Any) -> Any:
    way = way_of(conn)
    if way.manner is Manner.ASYNC:
        raise Misuse(f"a {kind_of(conn)} is asynchronous; use: {_awaited(verb)}")
    return getattr(driver(way), verb)(conn, *args)


def _plain(verb: str) -> str:
    return "outrider.stage_sync(conn, ...)" if verb == "stage" else f"Outbox.{verb}_sync(conn, ...)"


def _awaited(verb: str) -> str:
    return "await outrider.stage(conn, ...)" if verb == "stage" else f"await Outbox.{verb}(conn, ...)"


def _later(call: Callable[[], object]) -> None:
    """Call a moment from now, on the event loop of this thread if one is running, or else on one in the background."""
    try:
        asyncio.get_running_loop().call_later(WAKE_SECONDS, call)
    except RuntimeError:
        loop = shared().loop
        loop.call_soon_threadsafe(loop.call_later, WAKE_SECONDS, call)
