"""What the saga contract suite needs around a store: sagas, mail, and turns made by hand."""

from __future__ import annotations

import inspect
from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Collection
from contextlib import AbstractAsyncContextManager, asynccontextmanager, suppress
from dataclasses import replace
from datetime import datetime
from types import ModuleType
from typing import Any
from uuid import NAMESPACE_OID, UUID, uuid4, uuid5

from outrider.saga_store import Claim, MailKind, NewMail, NewSaga, Record, SagaStore, Turn
from outrider.store import Store
from outrider.testing.clock import ManualClock

LEASE_SECONDS = 15.0
ORDER = ("order", 1)
OUTLINE = '[["reserve","request","u",[]]]'
TRACE = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"


def new_saga(correlation_id: str = "A-7", saga_type: str = "order", version: int = 1) -> NewSaga:
    """Make a saga that is to be started; its id comes from its type and correlation id.

    >>> new_saga("A-7").saga_id == new_saga("A-7").saga_id
    True
    """
    saga_id = uuid5(NAMESPACE_OID, f"{saga_type}:{correlation_id}")
    return NewSaga(saga_id, saga_type, version, correlation_id, b'{"amount": 12}', TRACE, OUTLINE)


def reply(saga_id: UUID, name: str = "stock.reserved", event_id: UUID | None = None) -> NewMail:
    """Make a reply to a saga."""
    return NewMail(saga_id, MailKind.REPLY, name, f"{saga_id}:reserve", b'{"ok": true}', event_id or uuid4())


def claim_of(record: Record) -> Claim:
    """Return the claim that a record was read under."""
    assert record.instance.owner is not None
    return Claim(record.instance.owner, record.instance.saga_id, record.instance.epoch)


class _Changed(Exception):
    """A change of mind at the end of a transaction."""


class SagaBench(ABC):
    """A saga store under test. Third parties implement the abstract methods and subclass `SagaContract`.

    `driver` is the module of the driver through which applications reach the same tables.
    """

    driver: ModuleType

    def __init__(self, store: SagaStore, clock: ManualClock) -> None:
        self.store, self.clock = store, clock

    @abstractmethod
    def other(self) -> SagaStore:
        """Return a store of another process on the same database."""

    @abstractmethod
    def outside(self) -> AbstractAsyncContextManager[Any]:
        """Lend what the driver takes, with no transaction open."""

    @abstractmethod
    def outbox(self) -> AbstractAsyncContextManager[Store]:
        """Lend the store of the outbox beside the sagas."""

    async def advance(self, *, seconds: float) -> None:
        """Let time pass, for the database too."""
        self.clock.advance(seconds=seconds)

    async def commit(self, tx: Any) -> None:
        """Commit by hand, which no function may do with a transaction that it was lent."""
        ended = tx.commit() if hasattr(tx, "commit") else tx.execute("COMMIT")
        if inspect.isawaitable(ended):
            await ended

    async def drive(self, verb: str, tx: Any, *args: Any) -> Any:
        """Call a function of the driver."""
        result = getattr(self.driver, verb)(tx, *args, "outrider")
        return await result if inspect.isawaitable(result) else result

    @asynccontextmanager
    async def rolled_back(self) -> AsyncIterator[Any]:
        """Open a transaction that comes to nothing."""
        with suppress(_Changed):
            async with self.store.transaction() as tx:
                yield tx
                raise _Changed

    async def start(self, *sagas: NewSaga) -> list[UUID]:
        """Start sagas in one transaction; return their ids."""
        async with self.store.transaction() as tx:
            for saga in sagas:
                assert await self.store.start(tx, saga)
        return [saga.saga_id for saga in sagas]

    async def post(self, *mail: NewMail) -> int:
        """Post mail in a transaction of its own."""
        async with self.store.transaction() as tx:
            return await self.store.post(tx, mail)

    async def claim(
        self, worker: str = "ann", definitions: Collection[tuple[str, int]] = (ORDER,), limit: int = 10
    ) -> list[Record]:
        """Claim sagas."""
        return await self.store.claim(worker, definitions, limit=limit, lease_seconds=LEASE_SECONDS)

    async def take(self, worker: str = "ann") -> Record:
        """Claim the only saga there is to claim."""
        [record] = await self.claim(worker)
        return record

    async def taken(self, correlation_id: str = "A-7") -> Record:
        """Start a saga and claim it."""
        await self.start(new_saga(correlation_id))
        return await self.take()

    async def save(self, record: Record, *, claim: Claim | None = None, **turn: Any) -> datetime:
        """Save a turn in a transaction of its own; fields of the instance and of the turn may be given by name."""
        async with self.store.transaction() as tx:
            return await self.save_in(tx, record, claim=claim, **turn)

    async def save_in(self, tx: Any, record: Record, *, claim: Claim | None = None, **turn: Any) -> datetime:
        """Save a turn in a transaction."""
        parts = {name: turn.pop(name) for name in list(turn) if name in Turn.__slots__}
        made = Turn(replace(record.instance, **turn), **parts)
        return await self.store.save(tx, claim or claim_of(record), made, LEASE_SECONDS)

    async def release(self, record: Record, **turn: Any) -> datetime:
        """Save a turn that gives the saga back."""
        return await self.save(record, release=True, **turn)

    async def shown(self, saga_id: UUID) -> Record:
        """Return a saga that must be there."""
        record = await self.store.desk.show(saga_id)
        assert record is not None
        return record
