"""The inbox in memory: the contract in its plainest form, for tests.

Locks are the transaction's own, and writes happen when it commits, so a rollback leaves no trace.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager
from datetime import datetime, timedelta
from typing import Any
from uuid import UUID

from outrider.delivery import Arrival, InboxStream
from outrider.errors import UnfitHandler
from outrider.inbox_store import (
    Admitted,
    Applied,
    Buried,
    Cause,
    Entry,
    InboxDesk,
    InboxPruned,
    Overdue,
    Resumed,
    Stalled,
    Standing,
    Waiting,
    Waits,
)
from outrider.outcome import Policy
from outrider.stores.inbox_rows import may_go
from outrider.stores.lending import ENDED
from outrider.stores.memory.inbox_desk import MemoryInboxDesk
from outrider.stores.memory.inbox_tables import DeadArrival, InboxTables, Receipt, StreamRow
from outrider.stores.memory.store import MemoryStore
from outrider.stores.memory.transaction import MemoryTransaction


class MemoryInbox:
    """Receipts in this process's memory.

    >>> MemoryInbox(MemoryStore()).tables.receipts
    {}
    """

    def __init__(self, store: MemoryStore) -> None:
        self._store = store
        self.tables = InboxTables()
        self.desk: InboxDesk = MemoryInboxDesk(self.tables, self.now)

    def now(self) -> datetime:
        """Return the time by the store's clock."""
        return self._store.clock.now()

    def transaction(self) -> AbstractAsyncContextManager[MemoryTransaction]:
        return self._store.transaction()

    def objection(self, handler: Callable[..., Any]) -> str | None:
        return None

    async def call(self, handler: Callable[..., Any], argument: Any, tx: Any) -> None:
        try:
            result = handler(argument, tx)
            if inspect.isawaitable(result):
                await result
        finally:
            if not tx.open:
                raise UnfitHandler(ENDED)

    async def answers(self) -> bool:
        return True

    async def admit(
        self, tx: MemoryTransaction, consumer: str, arrivals: Sequence[Arrival], *, gated: bool
    ) -> Admitted:
        waiting = {arrival.event_id for name, arrival in self.tables.waiting.values() if name == consumer}
        fresh = await self._receipts(tx, consumer, arrivals) - waiting
        streams = sorted({arrival.stream for arrival in arrivals})
        numbered = {arrival.stream for arrival in arrivals if gated and arrival.sequence is not None}
        for stream in streams:
            await tx.lock(("inbox", consumer, stream))
        rows = {stream: self.tables.streams.get((consumer, stream)) for stream in streams}
        known = {
            stream: row.standing if row else Standing() for stream, row in rows.items() if row or stream in numbered
        }
        return Admitted(fresh, known)

    async def conclude(
        self,
        tx: MemoryTransaction,
        consumer: str,
        entries: Sequence[Entry],
        standings: Mapping[InboxStream, Standing],
    ) -> Mapping[UUID, int]:
        dead_letters: dict[UUID, int] = {}
        tx.on_commit.append(lambda: dead_letters.update(self._conclude(consumer, entries, standings)))
        return dead_letters

    async def draining(self, consumer: str, limit: int, *, cause: Cause = Cause.DRAINING) -> list[InboxStream]:
        rows = self.tables.of(consumer)
        return [stream for stream, row in rows if row.standing.cause is cause][:limit]

    async def resume(
        self,
        tx: MemoryTransaction,
        consumer: str,
        stream: InboxStream,
        *,
        by_sequence: bool,
        limit: int,
        early: bool = False,
    ) -> Resumed | None:
        await tx.lock(("inbox", consumer, stream))
        row = self.tables.streams.get((consumer, stream))
        if row is None or not may_go(row.standing.cause, early=early):
            return None
        by_sequence = by_sequence or row.standing.cause is Cause.EARLY
        arrivals = self.tables.waiting_of(consumer, stream, by_sequence)[:limit]
        waiting = [Waiting(a.waiting_id or 0, a.event_id, a.delivery, a.replayed) for a in arrivals]
        return Resumed(row.standing, waiting, await self._receipts(tx, consumer, arrivals))

    async def overdue(self, consumer: str, seconds: float, limit: int) -> list[Overdue]:
        before = self.now() - timedelta(seconds=seconds)
        return [
            Overdue(stream, row.standing.seen, row.standing.waiting, row.since)
            for stream, row in self.tables.of(consumer)
            if row.standing.cause is Cause.EARLY and row.since < before
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
            for number, letter in tables.dead.items()
            if letter.consumer == consumer
            and letter.conclusion.policy is not Policy.HOLD
            and letter.buried_at < now - timedelta(days=dead_letter_days)
        ]
        for name in receipts:
            del tables.receipts[name]
        for number in dead:
            del tables.dead[number]
        return InboxPruned(len(receipts), len(dead))

    async def prune_barriers(self, days: float) -> int:
        return self._store.sagas.prune_barriers(self.now() - timedelta(days=days))

    async def close(self) -> None:
        """There is nothing to let go of."""

    async def _receipts(self, tx: MemoryTransaction, consumer: str, arrivals: Sequence[Arrival]) -> frozenset[UUID]:
        for event_id in sorted({arrival.event_id for arrival in arrivals}):
            await tx.lock(("receipt", consumer, event_id))
        known = self.tables.receipts
        return frozenset(a.event_id for a in arrivals if (consumer, a.event_id) not in known)

    def _conclude(
        self, consumer: str, entries: Sequence[Entry], standings: Mapping[InboxStream, Standing]
    ) -> dict[UUID, int]:
        now, buried = self.now(), {}
        for arrival, conclusion in entries:
            if isinstance(conclusion, Waits):
                self.tables.park(consumer, arrival)
                continue
            if isinstance(conclusion, Stalled):
                continue
            self.tables.waiting.pop(arrival.waiting_id or 0, None)
            seconds = conclusion.seconds if isinstance(conclusion, Applied) else None
            self.tables.receipts.setdefault((consumer, arrival.event_id), Receipt(arrival, now, seconds))
            if isinstance(conclusion, Buried):
                number = arrival.waiting_id or self.tables.next_number()
                self.tables.dead[number] = DeadArrival(consumer, arrival, conclusion, now)
                buried[arrival.event_id] = number
        for stream, standing in standings.items():
            self._stand(consumer, stream, standing, now)
        return buried

    def _stand(self, consumer: str, stream: InboxStream, standing: Standing, now: datetime) -> None:
        if standing == Standing():
            self.tables.streams.pop((consumer, stream), None)
            return
        known = self.tables.streams.get((consumer, stream))
        since = known.since if known and known.standing.cause is standing.cause else now
        self.tables.streams[consumer, stream] = StreamRow(standing, since)
