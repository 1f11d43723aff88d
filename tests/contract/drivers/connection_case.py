"""A kind of connection under test: how an application begins, writes, stages and ends through it.

Everything is awaited, so that one suite serves all. What is not asynchronous runs on a thread of its own, always the
same one, as in an application without an event loop.
"""

from __future__ import annotations

import asyncio
from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractAsyncContextManager, AbstractContextManager, asynccontextmanager
from typing import Any, ParamSpec, TypeVar
from uuid import UUID

from outrider import Event, Outbox
from outrider.outbox.model import OptimisticClaim, StagedRow
from outrider.outbox.validation import StagingRules, validate_events
from outrider.saga.model import NewSaga, NewSagaMessage, ParticipantEntry, Phase
from tests.contract.drivers.databases import Database

P = ParamSpec("P")
T = TypeVar("T")

BLOCK = OptimisticClaim("writer-1", 30.0)


class RollBack(Exception):
    """Raised by tests to roll back."""


def placed(name: str = "order.placed", **fields: Any) -> Event:
    """Make an event of one stream."""
    return Event(name, {"text": "naïve ☂", "price": 12}, **{"aggregate_id": "A", "topic": "orders", **fields})


class Case(ABC):
    """One kind of connection."""

    hooked = False
    """Whether it can tell that a transaction has committed."""

    def __init__(self, database: Database) -> None:
        self.database = database

    @abstractmethod
    def transaction(self) -> AbstractAsyncContextManager[Any]:
        """Open a transaction; its value is what is staged through. It commits, or rolls back if the block raises."""

    @abstractmethod
    def savepoint(self, conn: Any) -> AbstractAsyncContextManager[Any]:
        """Open a savepoint in it."""

    @abstractmethod
    def idle(self) -> AbstractAsyncContextManager[Any]:
        """Open a connection that would commit every statement by itself."""

    @abstractmethod
    async def write(self, conn: Any, what: str) -> None:
        """Write a row of the application's."""

    @abstractmethod
    async def close(self) -> None:
        """Let go of everything."""

    @abstractmethod
    async def call(self, outbox: Outbox, verb: str, conn: Any, *args: Any) -> Any:
        """Call a method of an outbox, awaited or not."""

    async def run(self, job: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        """Run a plain function where the connection lives."""
        return job(*args, **kwargs)

    async def stage(self, conn: Any, *events: Event, outbox: Outbox | None = None) -> list[UUID]:
        ids: list[UUID] = await self.call(outbox or Outbox(), "stage", conn, *events)
        return ids

    async def claim(self, conn: Any, *events: Event) -> list[StagedRow]:
        placed: list[StagedRow] = await self.call(
            Outbox(), "insert", conn, validate_events(events, StagingRules()), BLOCK
        )
        return placed

    async def start(self, conn: Any, new: NewSaga) -> bool:
        return bool(await self.call(Outbox(), "perform", conn, "start_saga", new))

    async def deliver(self, conn: Any, messages: Sequence[NewSagaMessage]) -> int:
        return int(await self.call(Outbox(), "perform", conn, "deliver_messages", messages))

    async def enter(self, conn: Any, key: str, phase: Phase) -> ParticipantEntry:
        entered: ParticipantEntry = await self.call(Outbox(), "perform", conn, "participant_enter", "stock", key, phase)
        return entered

    async def keep(self, conn: Any, key: str, phase: Phase, reply: bytes) -> None:
        await self.call(Outbox(), "perform", conn, "participant_save_reply", "stock", key, phase, reply)


class AsyncCase(Case):
    """Asynchronous kinds."""

    async def call(self, outbox: Outbox, verb: str, conn: Any, *args: Any) -> Any:
        return await getattr(outbox, verb)(conn, *args)


class SyncCase(Case):
    """Kinds that are not; a subclass writes plain context managers."""

    def __init__(self, database: Database) -> None:
        super().__init__(database)
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="application")

    @abstractmethod
    def begun(self) -> AbstractContextManager[Any]:
        """Open a transaction."""

    @abstractmethod
    def nested(self, conn: Any) -> AbstractContextManager[Any]:
        """Open a savepoint in it."""

    @abstractmethod
    def unbegun(self) -> AbstractContextManager[Any]:
        """Open a connection that would commit every statement by itself."""

    @abstractmethod
    def insert(self, conn: Any, what: str) -> None:
        """Write a row of the application's."""

    @abstractmethod
    def end(self) -> None:
        """Let go of everything."""

    def transaction(self) -> AbstractAsyncContextManager[Any]:
        return self._there(self.begun())

    def savepoint(self, conn: Any) -> AbstractAsyncContextManager[Any]:
        return self._there(self.nested(conn))

    def idle(self) -> AbstractAsyncContextManager[Any]:
        return self._there(self.unbegun())

    async def write(self, conn: Any, what: str) -> None:
        await self.run(self.insert, conn, what)

    async def close(self) -> None:
        await self.run(self.end)
        self._thread.shutdown()

    async def call(self, outbox: Outbox, verb: str, conn: Any, *args: Any) -> Any:
        return await self.run(getattr(outbox, f"{verb}_sync"), conn, *args)

    async def run(self, job: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        return await asyncio.get_running_loop().run_in_executor(self._thread, lambda: job(*args, **kwargs))

    @asynccontextmanager
    async def _there(self, block: AbstractContextManager[Any]) -> AsyncIterator[Any]:
        value = await self.run(block.__enter__)
        try:
            yield value
        except BaseException as error:
            if not await self.run(block.__exit__, type(error), error, error.__traceback__):
                raise
        else:
            await self.run(block.__exit__, None, None, None)
