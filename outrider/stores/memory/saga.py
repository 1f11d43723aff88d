"""Sagas in memory: the contract in its plainest form, for tests.

Locks are the transaction's own, and writes happen when it commits, so a rollback leaves no trace. What has no
transaction runs without a pause, and passes over what is locked.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, AbstractContextManager, nullcontext
from dataclasses import replace
from datetime import datetime, timedelta
from typing import Any
from uuid import UUID

from outrider.errors import UnfitHandler
from outrider.saga_store import Claim, Instance, NewMail, NewSaga, Record, SagaDesk, SagaPruned, Turn, Undelivered
from outrider.stores.lending import ENDED, GENERATOR, lazy, objection
from outrider.stores.memory import saga_writing
from outrider.stores.memory.saga_desk import MemorySagaDesk, record_of
from outrider.stores.memory.saga_tables import SagaRow
from outrider.stores.memory.store import Listening, MemoryStore
from outrider.stores.memory.transaction import MemoryTransaction
from outrider.stores.saga_rows import in_turn


class MemorySagas:
    """Sagas in this process's memory, beside the outbox of a memory store.

    >>> import asyncio
    >>> asyncio.run(MemorySagas(MemoryStore()).desk.counts())["running"]
    0
    """

    one_at_a_time = False

    def __init__(self, store: MemoryStore) -> None:
        self._store = store
        self.tables = store.sagas
        self.desk: SagaDesk = MemorySagaDesk(self.tables, self.now)

    def now(self) -> datetime:
        """Return the time by the store's clock."""
        return self._store.clock.now()

    def transaction(self) -> AbstractAsyncContextManager[MemoryTransaction]:
        return self._store.transaction()

    def lend(self) -> AbstractAsyncContextManager[MemoryTransaction]:
        return self.transaction()

    def objection(self, function: Callable[..., Any]) -> str | None:
        return objection(function)

    async def call(self, function: Callable[..., Any], argument: Any, tx: Any) -> Any:
        try:
            result = function(argument, tx)
            if lazy(result):
                raise UnfitHandler(GENERATOR)
            return await result if inspect.isawaitable(result) else result
        finally:
            if not tx.open:
                raise UnfitHandler(ENDED)

    def sever(self, tx: MemoryTransaction) -> None:
        tx.rollback()

    def telling(self, tx: MemoryTransaction) -> AbstractContextManager[None]:
        return nullcontext()

    async def start(self, tx: MemoryTransaction, saga: NewSaga) -> bool:
        return await saga_writing.start(tx, saga)

    async def post(self, tx: MemoryTransaction, mail: Sequence[NewMail]) -> int:
        return await saga_writing.post(tx, mail)

    async def claim(
        self, worker: str, definitions: Collection[tuple[str, int]], *, limit: int, lease_seconds: float
    ) -> list[Record]:
        now = self.now()
        free = [
            (row, instance)
            for row, instance in self.tables.living()
            if (instance.saga_type, instance.definition_version) in definitions
            and ("saga", instance.saga_id) not in self._store.locks
        ]
        chosen = in_turn(_due(free, now), _mailed(free))[:limit]
        for saga_id in chosen:
            row = self.tables.sagas.rows[saga_id]
            assert row.instance is not None
            until = now + timedelta(seconds=lease_seconds)
            row.instance = replace(row.instance, owner=worker, epoch=row.instance.epoch + 1, wake_at=until)
        return [record for saga_id in chosen if (record := record_of(self.tables.sagas.rows[saga_id], now))]

    async def renew(self, claims: Sequence[Claim], lease_seconds: float) -> frozenset[UUID]:
        until = self.now() + timedelta(seconds=lease_seconds)
        held = set()
        for claim in claims:
            row = self.tables.sagas.rows.get(claim.saga_id, SagaRow())
            if row.instance and (row.instance.owner, row.instance.epoch) == (claim.worker, claim.epoch):
                row.instance = replace(row.instance, wake_at=until)
                held.add(claim.saga_id)
        return frozenset(held)

    async def load(self, tx: MemoryTransaction, saga_id: UUID, *, for_update: bool = False) -> Record | None:
        if for_update:
            await tx.lock(("saga", saga_id))
        return record_of(self.tables.sagas.seen_by(tx, saga_id), self.now())

    async def save(self, tx: MemoryTransaction, claim: Claim, turn: Turn, lease_seconds: float) -> datetime:
        return await saga_writing.save(tx, claim, turn, lease_seconds)

    async def undelivered(self, tx: MemoryTransaction, event_ids: Sequence[UUID]) -> Mapping[UUID, Undelivered]:
        outbox = self._store.tables
        waiting = {event_id: Undelivered.WAITING for event_id in event_ids if event_id in outbox.ids}
        return {event_id: Undelivered.BURIED for event_id in event_ids if event_id in outbox.dead} | waiting

    async def prune(self, *, saga_days: float, audit_days: float, barrier_days: float) -> SagaPruned:
        """Remove what is older; also mail that came when its saga had just ended."""
        now = self.now()
        for row in self.tables.sagas.rows.values():
            if not row.listens:
                row.mail = {mail_id: mail for mail_id, mail in row.mail.items() if mail_id in row.seen}
        return SagaPruned(
            self._prune_sagas(now - timedelta(days=saga_days)),
            self._prune_notes(now - timedelta(days=audit_days)),
            self.tables.prune_barriers(now - timedelta(days=barrier_days)),
        )

    def _prune_sagas(self, before: datetime) -> int:
        old = [
            (row, instance)
            for row, instance in self.tables.living()
            if instance.ended_at and instance.ended_at < before and not instance.needs_attention
        ]
        for row, instance in old:
            row.instance, row.journal, row.mail, row.seen = None, {}, {}, set()
            self.tables.names.rows.pop((instance.saga_type, instance.correlation_id), None)
        return len(old)

    def _prune_notes(self, before: datetime) -> int:
        removed = 0
        for saga_id, row in list(self.tables.sagas.rows.items()):
            if row.instance is None:
                kept = [line for line in row.trail if line["at"] >= before]
                removed += len(row.trail) - len(kept)
                row.trail = kept
                if not kept:
                    del self.tables.sagas.rows[saga_id]
        return removed

    async def hint(self) -> None:
        """Wake workers now; every commit that they may care for does so too."""
        self.tables.wake()

    def wakeups(self, wake: Callable[[], None]) -> AbstractAsyncContextManager[None]:
        return Listening(self.tables.listeners, wake)

    async def close(self) -> None:
        """There is nothing to let go of."""


def _due(free: Sequence[tuple[SagaRow, Instance]], now: datetime) -> list[UUID]:
    """Return what is due, longest first."""
    waking = [(saga.wake_at, saga.saga_id) for _, saga in free if saga.wake_at and saga.wake_at <= now]
    return [saga_id for _, saga_id in sorted(waking)]


def _mailed(free: Sequence[tuple[SagaRow, Instance]]) -> list[UUID]:
    """Return those that have unseen mail and no owner, the oldest mail first."""
    waiting = [
        (row.unseen[0].mail_id, saga.saga_id) for row, saga in free if row.listens and row.unseen and saga.owner is None
    ]
    return [saga_id for _, saga_id in sorted(waiting)]
