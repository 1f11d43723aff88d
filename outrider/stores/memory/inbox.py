"""The inbox in memory: the simplest implementation of the contract, for tests.

Locks belong to the transaction, and writes happen at commit, so a rollback leaves no trace.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager
from datetime import datetime, timedelta
from typing import Any
from uuid import UUID

from outrider.event import InboxStream, OnDeadLetter, ReceivedEvent
from outrider.handler_transactions import TransactionSource
from outrider.inbox.model import (
    Applied,
    ClaimedHeld,
    EventOutcome,
    Held,
    HeldEvent,
    InboxBlockReason,
    InboxCriteria,
    InboxDeadLettered,
    InboxPruned,
    LeftWithBroker,
    Overdue,
    Receipts,
    StreamState,
)
from outrider.inbox.store import InboxAdmin
from outrider.stores.memory.operation_log import MemoryOperationLog
from outrider.stores.memory.outbox import MemoryStore
from outrider.stores.memory.tables import DeadReceivedEvent, InboxTables, Receipt, StreamRow
from outrider.stores.memory.transaction import MemoryTransaction, MemoryTransactionSource
from outrider.stores.rows import can_drain


class MemoryInbox:
    """Receipts in the memory of the process.

    >>> MemoryInbox(MemoryStore()).tables.receipts
    {}
    """

    def __init__(self, store: MemoryStore) -> None:
        self._store = store
        self.transactions: TransactionSource = MemoryTransactionSource(self.transaction)
        self.tables = InboxTables()
        self.admin: InboxAdmin = MemoryInboxAdmin(self.tables, self.now, store.commands)

    def now(self) -> datetime:
        """Return the time by the store's clock."""
        return self._store.clock.now()

    def transaction(self) -> AbstractAsyncContextManager[MemoryTransaction]:
        return self._store.transaction()

    async def ping(self) -> bool:
        return True

    async def record_receipts(
        self, tx: MemoryTransaction, consumer: str, events: Sequence[ReceivedEvent], *, ordered: bool
    ) -> Receipts:
        waiting = {received.event_id for name, received in self.tables.waiting.values() if name == consumer}
        fresh = await self._receipts(tx, consumer, events) - waiting
        streams = sorted({received.stream for received in events})
        numbered = {received.stream for received in events if ordered and received.sequence is not None}
        for stream in streams:
            await tx.lock(("inbox", consumer, stream))
        rows = {stream: self.tables.streams.get((consumer, stream)) for stream in streams}
        known = {
            stream: row.state if row else StreamState() for stream, row in rows.items() if row or stream in numbered
        }
        return Receipts(fresh, known)

    async def record_outcomes(
        self,
        tx: MemoryTransaction,
        consumer: str,
        entries: Sequence[EventOutcome],
        states: Mapping[InboxStream, StreamState],
    ) -> Mapping[UUID, int]:
        dead_letters: dict[UUID, int] = {}
        tx.on_commit.append(lambda: dead_letters.update(self._record_outcomes(consumer, entries, states)))
        return dead_letters

    async def draining(
        self, consumer: str, limit: int, *, cause: InboxBlockReason = InboxBlockReason.DRAINING
    ) -> list[InboxStream]:
        rows = self.tables.of(consumer)
        return [stream for stream, row in rows if row.state.cause is cause][:limit]

    async def claim_held(
        self,
        tx: MemoryTransaction,
        consumer: str,
        stream: InboxStream,
        *,
        by_sequence: bool,
        limit: int,
        early: bool = False,
    ) -> ClaimedHeld | None:
        await tx.lock(("inbox", consumer, stream))
        row = self.tables.streams.get((consumer, stream))
        if row is None or not can_drain(row.state.cause, early=early):
            return None
        by_sequence = by_sequence or row.state.cause is InboxBlockReason.EARLY
        events = self.tables.waiting_of(consumer, stream, by_sequence)[:limit]
        waiting = [HeldEvent(a.waiting_id or 0, a.event_id, a.delivery, a.replayed) for a in events]
        return ClaimedHeld(row.state, waiting, await self._receipts(tx, consumer, events))

    async def overdue(self, consumer: str, seconds: float, limit: int) -> list[Overdue]:
        before = self.now() - timedelta(seconds=seconds)
        return [
            Overdue(stream, row.state.seen, row.state.waiting, row.since)
            for stream, row in self.tables.of(consumer)
            if row.state.cause is InboxBlockReason.EARLY and row.since < before
        ][:limit]

    async def prune(self, consumer: str, *, receipt_days: float, dead_letter_days: float) -> InboxPruned:
        tables, now = self.tables, self.now()
        receipts = [
            name
            for name, receipt in tables.receipts.items()
            if name[0] == consumer and receipt.received_at < now - timedelta(days=receipt_days)
        ]
        dead = [
            number
            for number, dead_letter in tables.dead.items()
            if dead_letter.consumer == consumer
            and dead_letter.outcome.policy is not OnDeadLetter.BLOCK
            and dead_letter.dead_lettered_at < now - timedelta(days=dead_letter_days)
        ]
        for name in receipts:
            del tables.receipts[name]
        for number in dead:
            del tables.dead[number]
        return InboxPruned(len(receipts), len(dead))

    async def prune_participants(self, days: float) -> int:
        return self._store.sagas.prune_participants(self.now() - timedelta(days=days))

    async def close(self) -> None:
        """Do nothing: there are no connections."""

    async def _receipts(self, tx: MemoryTransaction, consumer: str, events: Sequence[ReceivedEvent]) -> frozenset[UUID]:
        for event_id in sorted({received.event_id for received in events}):
            await tx.lock(("receipt", consumer, event_id))
        known = self.tables.receipts
        return frozenset(a.event_id for a in events if (consumer, a.event_id) not in known)

    def _record_outcomes(
        self, consumer: str, entries: Sequence[EventOutcome], states: Mapping[InboxStream, StreamState]
    ) -> dict[UUID, int]:
        now, dead_letter = self.now(), {}
        for received, outcome in entries:
            if isinstance(outcome, Held):
                self.tables.park(consumer, received)
                continue
            if isinstance(outcome, LeftWithBroker):
                continue
            self.tables.waiting.pop(received.waiting_id or 0, None)
            seconds = outcome.seconds if isinstance(outcome, Applied) else None
            self.tables.receipts.setdefault((consumer, received.event_id), Receipt(received, now, seconds))
            if isinstance(outcome, InboxDeadLettered):
                number = received.waiting_id or self.tables.next_number()
                self.tables.dead[number] = DeadReceivedEvent(consumer, received, outcome, now)
                dead_letter[received.event_id] = number
        for stream, state in states.items():
            self._save_stream(consumer, stream, state, now)
        return dead_letter

    def _save_stream(self, consumer: str, stream: InboxStream, state: StreamState, now: datetime) -> None:
        if state == StreamState():
            self.tables.streams.pop((consumer, stream), None)
            return
        known = self.tables.streams.get((consumer, stream))
        since = known.since if known and known.state.cause is state.cause else now
        self.tables.streams[consumer, stream] = StreamRow(state, since)


class MemoryInboxAdmin:
    """The admin of the inbox: lists, replays and discards."""

    def __init__(self, tables: InboxTables, now: Callable[[], datetime], operations: MemoryOperationLog) -> None:
        self._tables, self._now, self._operations = tables, now, operations

    async def counts(self, consumer: str | None = None) -> dict[str, int]:
        mine = [row for (name, _), row in self._tables.streams.items() if consumer in (None, name)]
        return {
            "waiting": sum(row.state.waiting for row in mine),
            "blocked_streams": sum(row.state.cause is not None for row in mine),
            "dead_letters": sum(consumer in (None, dead_letter.consumer) for dead_letter in self._tables.dead.values()),
        }

    async def receipts(self, consumer: str, event_ids: Sequence[UUID]) -> list[dict[str, Any]]:
        found = ((event_id, self._tables.receipts.get((consumer, event_id))) for event_id in event_ids)
        return [
            {
                "event_id": event_id,
                "event_type": receipt.received.event_type,
                "topic": receipt.received.stream.topic,
                "key": receipt.received.stream.key,
                "sequence": receipt.received.sequence,
                "received_at": receipt.received_at,
                "processing_seconds": receipt.seconds,
            }
            for event_id, receipt in found
            if receipt
        ]

    async def dead_letters(self, criteria: InboxCriteria) -> list[dict[str, Any]]:
        found = (
            _facts(number, dead_letter)
            for number, dead_letter in sorted(self._tables.dead.items())
            if number in criteria.ids
        )
        if not criteria.ids:
            found = (_facts(number, dead_letter) for number, dead_letter in sorted(self._tables.dead.items()))
        wanted = {name: getattr(criteria, name) for name in ("consumer", "topic", "key", "reason")}
        given = {name: value for name, value in wanted.items() if value is not None}
        return [facts for facts in found if given.items() <= facts.items()][: criteria.limit]

    async def streams(self, consumer: str | None, limit: int) -> list[dict[str, Any]]:
        found = [
            {"consumer": name, **stream._asdict(), **row.state._asdict(), "since": row.since}
            for (name, stream), row in self._tables.streams.items()
            if consumer in (None, name) and row.state.cause
        ]
        return sorted(found, key=lambda facts: (facts["cause"] != InboxBlockReason.DEAD_LETTER, facts["since"]))[:limit]

    async def replay(self, ids: Sequence[int], actor: str) -> int:
        dead_letters = self._take(ids)
        for number, dead_letter in dead_letters:
            received = dead_letter.received._replace(waiting_id=number)
            if dead_letter.outcome.policy is OnDeadLetter.SKIP:
                received = received._replace(replayed=True)
            self._tables.waiting[number] = (dead_letter.consumer, received)
            self._tables.receipts.pop((dead_letter.consumer, received.event_id), None)
            self._drain_unblocked(dead_letter, added=1, seen=None)
        self._record("inbox_replay", actor, dead_letters)
        return len(dead_letters)

    async def discard(self, ids: Sequence[int], actor: str) -> int:
        dead_letters = self._take(ids)
        for _, dead_letter in dead_letters:
            if dead_letter.outcome.policy is OnDeadLetter.BLOCK:
                self._drain_unblocked(dead_letter, added=0, seen=dead_letter.received.sequence)
        self._record("inbox_discard", actor, dead_letters)
        return len(dead_letters)

    async def skip_gap(self, consumer: str, stream: InboxStream, actor: str) -> bool:
        row = self._tables.streams.get((consumer, stream))
        if row is None or row.state.cause is not InboxBlockReason.EARLY:
            return False
        first = self._tables.waiting_of(consumer, stream, by_sequence=True)[0]
        assert first.sequence is not None
        state = row.state._replace(seen=first.sequence - 1, cause=InboxBlockReason.DRAINING)
        self._save_stream(consumer, stream, state)
        events = [(first.event_id, consumer)]
        self._operations.write(actor, "inbox_skip_gap", events, topic=stream.topic, band=stream.band)
        return True

    def _record(self, verb: str, actor: str, dead_letters: Sequence[tuple[int, DeadReceivedEvent]]) -> None:
        self._operations.write(actor, verb, [(dead.received.event_id, dead.consumer) for _, dead in dead_letters])

    def _take(self, ids: Sequence[int]) -> list[tuple[int, DeadReceivedEvent]]:
        return [(number, self._tables.dead.pop(number)) for number in sorted(set(ids)) if number in self._tables.dead]

    def _drain_unblocked(self, dead_letter: DeadReceivedEvent, *, added: int, seen: int | None) -> None:
        """Drain the stream, unless another dead letter blocks it."""
        stream = dead_letter.received.stream
        known = self._tables.streams.get((dead_letter.consumer, stream))
        at = known.state if known else StreamState()
        if seen is not None and at.seen is not None:
            at = at._replace(seen=max(at.seen, seen))
        blocked = any(
            other.consumer == dead_letter.consumer
            and other.received.stream == stream
            and other.outcome.policy is OnDeadLetter.BLOCK
            for other in self._tables.dead.values()
        )
        at = at._replace(waiting=at.waiting + added)
        self._save_stream(dead_letter.consumer, stream, at._replace(cause=_cause(blocked, at.waiting)))

    def _save_stream(self, consumer: str, stream: InboxStream, state: StreamState) -> None:
        if state == StreamState():
            self._tables.streams.pop((consumer, stream), None)
        else:
            self._tables.streams[consumer, stream] = StreamRow(state, self._now())


def _cause(blocked: bool, waiting: int) -> InboxBlockReason | None:
    if blocked:
        return InboxBlockReason.DEAD_LETTER
    return InboxBlockReason.DRAINING if waiting else None


def _facts(number: int, dead_letter: DeadReceivedEvent) -> dict[str, Any]:
    received = dead_letter.received
    return {
        "id": number,
        "consumer": dead_letter.consumer,
        "event_id": received.event_id,
        "event_type": received.event_type,
        "topic": received.delivery.topic,
        "key": received.stream.key,
        "sequence": received.sequence,
        "position": received.delivery.position,
        "headers": dict(received.delivery.headers),
        "body": received.delivery.body,
        "reason": dead_letter.outcome.reason,
        "failure": dead_letter.outcome.failure,
        "policy": dead_letter.outcome.policy,
        "attempts": dead_letter.outcome.attempts,
        "dead_lettered_at": dead_letter.dead_lettered_at,
    }
