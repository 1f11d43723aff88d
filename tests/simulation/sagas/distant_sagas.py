"""The saga store as one worker sees it: over a network that is slow and loses requests and answers."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Collection, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from datetime import datetime
from typing import Any
from uuid import UUID

import outrider
from outrider.errors import InvalidHandler, TransactionLost, Unreachable
from outrider.event import Event
from outrider.handler_transactions import TransactionSource
from outrider.saga.model import Claim, NewSaga, NewSagaMessage, SagaChange, SagaPruned, SagaRecord, Undelivered
from outrider.stores.memory import MemorySagas, MemoryStore, MemoryTransaction
from outrider.stores.memory.transaction import MemoryTransactionSource
from tests.simulation.virtual import as_actor
from tests.simulation.wire import Wire, at_once

LOST_CONNECTION_SECONDS = 60.0
"""The time in which the server notices that a worker is gone."""


class DistantTransaction(MemoryTransaction):
    """A transaction that the server rolls back when its worker is frozen for too long, or dead."""

    lost = False
    committing = False

    def end_by_server(self) -> None:
        """Roll back, unless the commit is already on its way."""
        if self.open and not self.committing:
            self.lost = True
            self.rollback()

    def check_open(self) -> None:
        """Raise the error of a lost connection if the server has ended the transaction."""
        if self.lost:
            raise Unreachable("the server has ended the transaction")

    def roll_back_if_open(self) -> None:
        """Roll back, unless the transaction has ended."""
        if self.open:
            self.rollback()

    def commit_if_open(self) -> bool:
        """Commit; False if the transaction has ended before."""
        if self.open:
            self.commit()
            return True
        return False

    async def call(self, function: Callable[..., Any], argument: Any) -> Any:
        try:
            return await super().call(function, argument)
        except InvalidHandler as error:
            if self.lost:
                raise TransactionLost("the server has ended the transaction") from error
            raise


class DistantSagas:
    """The sagas of a memory store, through the wire of one worker."""

    one_at_a_time = False

    def __init__(self, store: MemoryStore, wire: Wire, on_staged: Callable[[], None]) -> None:
        self.inner = MemorySagas(store)
        self.admin, self.audit = self.inner.admin, self.inner.audit
        self.open: list[DistantTransaction] = []
        self.transactions: TransactionSource = MemoryTransactionSource(self.transaction)
        self._store, self._wire, self._on_staged = store, wire, on_staged

    def end_transactions(self) -> None:
        """Roll back the open transactions of a worker that is dead or frozen.

        A commit that is on its way may still arrive, or is lost.
        """
        loop = asyncio.get_running_loop()
        for tx in self.open:
            tx.end_by_server()
            loop.call_later(LOST_CONNECTION_SECONDS, tx.roll_back_if_open, context=as_actor(""))

    @asynccontextmanager
    async def transaction(self) -> AsyncIterator[DistantTransaction]:
        tx = DistantTransaction(self._store)
        self.open.append(tx)
        try:
            yield tx
            tx.check_open()
            tx.committing = True
            if not await self._wire.carry("commit", tuple, tx.commit_if_open):
                raise Unreachable("the server has ended the transaction")
        except Unreachable:
            # The connection is gone, so the server rolls back if the commit has not arrived.
            tx.rollback()
            raise
        except BaseException:
            if tx.committing:
                # The worker is dead, and its commit may still arrive. Otherwise the server notices the lost connection.
                loop = asyncio.get_running_loop()
                loop.call_later(LOST_CONNECTION_SECONDS, tx.roll_back_if_open, context=as_actor(""))
            else:
                tx.rollback()
            raise
        finally:
            self.open.remove(tx)

    async def stage(self, tx: DistantTransaction, *events: Event) -> list[UUID]:
        """Stage events in a transaction, and report them after the commit."""
        await self._request("stage", tx)
        ids = await outrider.stage(tx, *events)
        tx.on_commit.append(self._on_staged)
        return ids

    async def start(self, tx: DistantTransaction, saga: NewSaga) -> bool:
        await self._request("start", tx)
        return await self.inner.start(tx, saga)

    async def deliver(self, tx: DistantTransaction, messages: Sequence[NewSagaMessage]) -> int:
        await self._request("deliver", tx)
        return await self.inner.deliver(tx, messages)

    async def load(self, tx: DistantTransaction, saga_id: UUID, *, for_update: bool = False) -> SagaRecord | None:
        await self._request("load", tx)
        record = await self.inner.load(tx, saga_id, for_update=for_update)
        tx.check_open()
        return record

    async def save(self, tx: DistantTransaction, claim: Claim, turn: SagaChange, lease_seconds: float) -> datetime:
        await self._request("save", tx)
        saved = await self.inner.save(tx, claim, turn, lease_seconds)
        tx.check_open()
        return saved

    async def undelivered(self, tx: DistantTransaction, event_ids: Sequence[UUID]) -> Mapping[UUID, Undelivered]:
        await self._request("undelivered", tx)
        return await self.inner.undelivered(tx, event_ids)

    async def claim(
        self,
        worker: str,
        definitions: Collection[tuple[str, int]],
        *,
        limit: int,
        lease_seconds: float,
        suspects: int = 1,
    ) -> list[SagaRecord]:
        def claim() -> list[SagaRecord]:
            return at_once(
                self.inner.claim(worker, definitions, limit=limit, lease_seconds=lease_seconds, suspects=suspects)
            )

        return await self._wire.carry("claim", tuple, claim)

    async def renew(self, claims: Sequence[Claim], lease_seconds: float) -> frozenset[UUID]:
        return await self._wire.carry("renew", tuple, lambda: at_once(self.inner.renew(claims, lease_seconds)))

    async def prune(self, *, saga_days: float, audit_days: float, participant_memory_days: float) -> SagaPruned:
        return await self.inner.prune(
            saga_days=saga_days, audit_days=audit_days, participant_memory_days=participant_memory_days
        )

    async def notify(self) -> None:
        await self.inner.notify()

    def listen(self, wake: Callable[[], None]) -> AbstractAsyncContextManager[None]:
        return self.inner.listen(wake)

    async def close(self) -> None:
        """Do nothing: the store outlives its workers."""

    async def _request(self, verb: str, tx: DistantTransaction) -> None:
        await self._wire.carry(verb, tuple, lambda: None)
        tx.check_open()
