"""Sagas in memory: the simplest implementation of the contract, for tests.

Locks belong to the transaction, and writes happen at commit, so a rollback leaves no trace. Operations outside of
transactions run without an `await` and skip locked rows.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import replace
from datetime import datetime, timedelta
from functools import partial
from typing import Any
from uuid import UUID

from outrider.audit_chain import first_line
from outrider.errors import ConcurrencyError
from outrider.handler_transactions import TransactionSource
from outrider.saga.model import (
    ENDED,
    Claim,
    Instance,
    NewSaga,
    NewSagaMessage,
    ParticipantEntry,
    Phase,
    SagaChange,
    SagaCriteria,
    SagaMessage,
    SagaPruned,
    SagaRecord,
    Status,
    Undelivered,
)
from outrider.saga.store import SagaAdmin
from outrider.stores.memory.audit import MemoryAudit
from outrider.stores.memory.outbox import MemoryListener, MemoryStore
from outrider.stores.memory.tables import ParticipantRow, Passages, SagaRow, SagaTables
from outrider.stores.memory.transaction import MemoryTransaction, MemoryTransactionSource
from outrider.stores.rows import AUDIT_FACTS, SagaWriteSet, in_turn


async def deliver(tx: MemoryTransaction, messages: Sequence[NewSagaMessage]) -> int:
    """Insert messages into mailboxes; return the number of new messages."""
    tables, fresh = tx.store.sagas, 0
    for message in sorted(messages, key=lambda message: (message.saga_id, message.event_id)):
        await tx.lock(("saga_mail", message.saga_id, message.event_id))
        row = tables.sagas.seen_by(tx, message.saga_id)
        if _meant(row, message) and message.event_id not in {known.event_id for known in row.messages.values()}:
            made = SagaMessage(tables.next_number(), *message[1:6], tx.store.clock.now(), message.schema_version)
            tables.sagas.write(tx, message.saga_id, partial(_deliver, made))
            fresh += 1
    if fresh:
        tx.on_commit.append(tables.wake)
    return fresh


async def save(tx: MemoryTransaction, claim: Claim, turn: SagaChange, lease_seconds: float) -> datetime:
    """Write a turn completely, or raise an error and write nothing."""
    tables, now = tx.store.sagas, tx.store.clock.now()
    await tx.lock(("saga", claim.saga_id))
    known = tables.sagas.seen_by(tx, claim.saga_id).instance
    expected = claim.worker, claim.epoch, turn.instance.version
    if known is None or (known.owner, known.epoch, known.version) != expected:
        raise ConcurrencyError(
            f"saga {claim.saga_id} has another owner or version by now; nothing was written: claim it again"
        )
    writes = SagaWriteSet.of(turn, lease_seconds)
    saved = _saved(known, writes, turn.release, now)

    def apply(row: SagaRow) -> None:
        row.instance = saved
        row.claimed_from = None if turn.release else now - timedelta(seconds=lease_seconds)
        row.journal.update({(entry.step, entry.phase): entry for entry in writes.entries})
        row.messages = {
            message_id: messages for message_id, messages in row.messages.items() if message_id not in writes.taken
        }
        row.seen |= row.messages.keys() & set(writes.seen)
        tables.add_lines(row, writes.lines)

    tables.sagas.write(tx, claim.saga_id, apply)
    return now


async def start(tx: MemoryTransaction, saga: NewSaga) -> bool:
    """Insert an instance that is due at once; return False if the saga exists."""
    tables, now = tx.store.sagas, tx.store.clock.now()
    name = saga.saga_type, saga.correlation_id
    await tx.lock(("saga_name", name))
    await tx.lock(("saga", saga.saga_id))
    if tables.names.seen_by(tx, name) or tables.sagas.seen_by(tx, saga.saga_id).instance:
        return False
    times = now, now, None, now
    instance = Instance(
        *saga[:5], Status.STARTED, None, 0, None, 0, False, saga.traceparent, *times, None, 0, saga.fingerprint
    )
    instance = replace(instance, parent_id=saga.parent_id, parent_step=saga.parent_step, subject=saga.subject)
    if saga.deadline_seconds is not None:
        instance = replace(instance, deadline_at=now + timedelta(seconds=saga.deadline_seconds))

    def insert(row: SagaRow) -> None:
        row.instance = instance
        tables.add_lines(row, [first_line(saga.saga_id, now, saga.traceparent)])

    tables.sagas.write(tx, saga.saga_id, insert)
    tables.names.write(tx, name, lambda ids: ids.add(saga.saga_id))
    tx.on_commit.append(tables.wake)
    return True


class MemorySagas:
    """Sagas in the memory of the process, beside the outbox of a memory store.

    >>> import asyncio
    >>> asyncio.run(MemorySagas(MemoryStore()).admin.counts())["running"]
    0
    """

    one_at_a_time = False

    def __init__(self, store: MemoryStore) -> None:
        self._store = store
        self.transactions: TransactionSource = MemoryTransactionSource(self.transaction)
        self.tables = store.sagas
        self.admin: SagaAdmin = MemorySagaAdmin(self.tables, self.now)
        self.audit = MemoryAudit(self.tables, self.now)

    def now(self) -> datetime:
        """Return the time by the store's clock."""
        return self._store.clock.now()

    def transaction(self) -> AbstractAsyncContextManager[MemoryTransaction]:
        return self._store.transaction()

    async def start(self, tx: MemoryTransaction, saga: NewSaga) -> bool:
        return await start(tx, saga)

    async def deliver(self, tx: MemoryTransaction, messages: Sequence[NewSagaMessage]) -> int:
        return await deliver(tx, messages)

    async def claim(
        self,
        worker: str,
        definitions: Collection[tuple[str, int]],
        *,
        limit: int,
        lease_seconds: float,
        suspects: int = 1,
    ) -> list[SagaRecord]:
        now = self.now()
        free = [
            (row, instance)
            for row, instance in self.tables.living()
            if (instance.saga_type, instance.definition_version) in definitions
            and ("saga", instance.saga_id) not in self._store.locks
        ]
        lost = [(row, saga) for row, saga in free if saga.losses]
        due = [(row, saga) for row, saga in free if not saga.losses]
        chosen = in_turn(_due(due, now), _due(lost, now)[:suspects], _mailed(free))[:limit]
        for saga_id in chosen:
            row = self.tables.sagas.rows[saga_id]
            assert row.instance is not None
            lease = timedelta(seconds=lease_seconds)
            losses = 0 if row.instance.owner is None else row.instance.losses + 1
            taken = replace(row.instance, owner=worker, epoch=row.instance.epoch + 1, losses=losses)
            row.instance, row.claimed_from = replace(taken, wake_at=now + lease), now - lease
        return [record for saga_id in chosen if (record := record_of(self.tables.sagas.rows[saga_id], now))]

    async def renew(self, claims: Sequence[Claim], lease_seconds: float) -> frozenset[UUID]:
        now, lease = self.now(), timedelta(seconds=lease_seconds)
        renewed = set()
        for claim in claims:
            row = self.tables.sagas.rows.get(claim.saga_id, SagaRow())
            if row.instance and (row.instance.owner, row.instance.epoch) == (claim.worker, claim.epoch):
                row.instance, row.claimed_from = replace(row.instance, wake_at=now + lease), now - lease
                renewed.add(claim.saga_id)
        return frozenset(renewed)

    async def load(self, tx: MemoryTransaction, saga_id: UUID, *, for_update: bool = False) -> SagaRecord | None:
        if for_update:
            await tx.lock(("saga", saga_id))
        return record_of(self.tables.sagas.seen_by(tx, saga_id), self.now())

    async def save(self, tx: MemoryTransaction, claim: Claim, turn: SagaChange, lease_seconds: float) -> datetime:
        return await save(tx, claim, turn, lease_seconds)

    async def undelivered(self, tx: MemoryTransaction, event_ids: Sequence[UUID]) -> Mapping[UUID, Undelivered]:
        outbox = self._store.tables
        waiting = {event_id: Undelivered.WAITING for event_id in event_ids if event_id in outbox.ids}
        return {event_id: Undelivered.DEAD_LETTER for event_id in event_ids if event_id in outbox.dead} | waiting

    async def prune(self, *, saga_days: float, audit_days: float, participant_memory_days: float) -> SagaPruned:
        """Remove old rows. Also remove messages that came just after the end of their saga."""
        now = self.now()
        for row in self.tables.sagas.rows.values():
            if not row.listens:
                row.messages = {
                    message_id: messages for message_id, messages in row.messages.items() if message_id in row.seen
                }
        return SagaPruned(
            self._prune_sagas(now - timedelta(days=saga_days), now),
            await self.audit.remove_lines(audit_days),
            self.tables.prune_participants(now - timedelta(days=participant_memory_days)),
        )

    def _prune_sagas(self, before: datetime, now: datetime) -> int:
        """Remove old sagas, children first: a pass for each generation."""
        parents = {instance.parent_id for _, instance in self.tables.living()}
        old = [
            (row, instance)
            for row, instance in self.tables.living()
            if instance.ended_at and instance.ended_at < before and not instance.needs_attention
            if instance.parent_id is None or not self.tables.sagas.rows.get(instance.parent_id, SagaRow()).listens
            if instance.saga_id not in parents
        ]
        self.audit.close(old, now)
        for row, instance in old:
            row.instance, row.journal, row.messages, row.seen = None, {}, {}, set()
            self.tables.names.rows.pop((instance.saga_type, instance.correlation_id), None)
        return len(old) + (self._prune_sagas(before, now) if old else 0)

    async def notify(self) -> None:
        """Wake workers now. Every relevant commit wakes workers too."""
        self.tables.wake()

    def listen(self, wake: Callable[[], None]) -> AbstractAsyncContextManager[None]:
        return MemoryListener(self.tables.listeners, wake)

    async def close(self) -> None:
        """Do nothing: there are no connections."""


def _due(free: Sequence[tuple[SagaRow, Instance]], now: datetime) -> list[UUID]:
    """Return due sagas, longest due first. A claim from before the clock was set back has ended as well."""
    waking = [
        (saga.wake_at, saga.saga_id)
        for row, saga in free
        if saga.wake_at and (saga.wake_at <= now or (row.claimed_from is not None and row.claimed_from > now))
    ]
    return [saga_id for _, saga_id in sorted(waking)]


def _mailed(free: Sequence[tuple[SagaRow, Instance]]) -> list[UUID]:
    """Return free sagas with unseen messages, oldest message first."""
    waiting = [
        (row.unseen[0].message_id, saga.saga_id)
        for row, saga in free
        if row.listens and row.unseen and saga.owner is None
    ]
    return [saga_id for _, saga_id in sorted(waiting)]


class MemorySagaAdmin:
    """The admin of sagas: lists, counts and shows."""

    def __init__(self, tables: SagaTables, now: Callable[[], datetime]) -> None:
        self._tables, self._now = tables, now

    async def find(self, criteria: SagaCriteria) -> list[Instance]:
        names = ("saga_type", "correlation_id", "status", "needs_attention", "parent_id")
        given = {name: wanted for name in names if (wanted := getattr(criteria, name)) is not None}
        found = [
            saga
            for row, saga in self._tables.living()
            if (not criteria.ids or saga.saga_id in criteria.ids)
            and all(getattr(saga, name) == wanted for name, wanted in given.items())
            and (criteria.stuck_seconds is None or self._stuck(row, saga, criteria.stuck_seconds))
        ]
        found.sort(key=lambda saga: saga.saga_id)
        found.sort(key=lambda saga: (saga.needs_attention, saga.updated_at), reverse=True)
        return found[: criteria.limit]

    async def counts(self) -> dict[str, int]:
        sagas = [saga for _, saga in self._tables.living()]
        counts = {status.value: sum(saga.status is status for saga in sagas) for status in Status}
        return {**counts, "needs_attention": sum(saga.needs_attention for saga in sagas)}

    async def show(self, saga_id: UUID) -> SagaRecord | None:
        return record_of(self._tables.sagas.rows.get(saga_id, SagaRow()), self._now())

    async def audit(self, saga_id: UUID, limit: int = 1000) -> list[dict[str, Any]]:
        audit = self._tables.sagas.rows.get(saga_id, SagaRow()).audit
        return [{name: getattr(line, name) for name in AUDIT_FACTS} for line in audit[:limit]]

    def _stuck(self, row: SagaRow, saga: Instance, seconds: float) -> bool:
        """Return whether a saga is stuck: without a worker although overdue or with unseen messages."""
        before = self._now() - timedelta(seconds=seconds)
        overdue = saga.wake_at is not None and saga.wake_at < before
        unread = saga.owner is None and any(message.delivered_at < before for message in row.unseen)
        return saga.status not in ENDED and (overdue or unread)


def record_of(row: SagaRow, now: datetime) -> SagaRecord | None:
    """Return the record of a saga: the journal by step key, the messages in order of insertion."""
    if row.instance is None:
        return None
    journal = sorted(row.journal.values(), key=lambda entry: (entry.phase, entry.position, entry.step))
    messages = [message for _, message in sorted(row.messages.items())]
    return SagaRecord(row.instance, tuple(journal), tuple(messages), now)


def _meant(row: SagaRow, message: NewSagaMessage) -> bool:
    return row.listens and row.instance is not None and message.saga_type in (None, row.instance.saga_type)


def _deliver(message: SagaMessage, row: SagaRow) -> None:
    row.messages[message.message_id] = message


def _saved(known: Instance, writes: SagaWriteSet, release: bool, now: datetime) -> Instance:
    to, due = writes.instance, writes.due_seconds
    return replace(
        known,
        state=to.state,
        status=to.status,
        current_step=to.current_step,
        version=known.version + 1,
        last_error=writes.last_error,
        retry_count=to.retry_count,
        needs_attention=to.needs_attention,
        losses=to.losses,
        audit_lines=to.audit_lines,
        audit_hash=to.audit_hash,
        updated_at=now,
        ended_at=(known.ended_at or now) if to.status in ENDED else None,
        owner=None if release else known.owner,
        wake_at=None if due is None else now + timedelta(seconds=due),
    )


async def enter(tx: MemoryTransaction, participant: str, key: str, phase: Phase) -> ParticipantEntry:
    """Register a command at a participant. A compensation first bars its action, unless the action has come."""
    table, now = tx.store.sagas.participants, tx.store.clock.now()
    await tx.lock(("saga_barrier", participant, key))
    known = table.seen_by(tx, (participant, key))
    if before := known.get(phase):
        return ParticipantEntry(False, before.barred, before.reply)
    barred = phase is Phase.COMPENSATION and Phase.ACTION not in known
    arrived = {phase: ParticipantRow(barred, now)}
    if barred:
        arrived[Phase.ACTION] = ParticipantRow(True, now)
    table.write(tx, (participant, key), lambda passages: passages.update(arrived))
    return ParticipantEntry(True, barred)


async def save_reply(tx: MemoryTransaction, participant: str, key: str, phase: Phase, reply: bytes) -> None:
    """Store the reply to a command."""

    def reply_of(passages: Passages) -> None:
        passages[phase] = passages[phase]._replace(reply=reply)

    tx.store.sagas.participants.write(tx, (participant, key), reply_of)
