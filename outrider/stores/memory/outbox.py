"""The outbox in memory: the simplest implementation of the contract, for tests and for the simulation.

Every operation runs without an `await` and is therefore atomic, where the SQL stores need locks.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Hashable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from datetime import datetime, timedelta
from uuid import UUID

from outrider.checks import CheckResult, warn
from outrider.clock import Clock, SystemClock
from outrider.event import BANDS, OnDeadLetter, OutboxRow, Readiness, Stream, TopicRule, default_topic, topic_of
from outrider.operation_log import OperationLog
from outrider.outbox.model import (
    EXPIRE_ACTOR,
    EXPIRE_VERB,
    BlockReason,
    DeadRelay,
    Due,
    DueStream,
    Fetched,
    HeartbeatResult,
    JournalKind,
    Lease,
    OptimisticClaim,
    Pruned,
    Retention,
    Settlements,
    State,
)
from outrider.outbox.store import OutboxAdmin, OutboxJournal, OutboxMaintenance
from outrider.stores.memory.journal import MemoryJournal, add
from outrider.stores.memory.operation_log import MemoryOperationLog
from outrider.stores.memory.outbox_admin import MemoryOutboxAdmin
from outrider.stores.memory.outbox_settle import MemorySettlement
from outrider.stores.memory.tables import BlockRow, LaneRow, OutboxTableRow, SagaTables, Tables, has_claim, is_claimed
from outrider.stores.memory.transaction import MemoryTransaction

CHECKS = {"memory-durable": "events outlive the process"}


class MemoryStore:
    """Events in the memory of the process, lost at its end.

    >>> MemoryStore(lanes=4).lanes
    4
    """

    def __init__(
        self,
        *,
        lanes: int = 32,
        clock: Clock | None = None,
        archive: bool = True,
        topic_rule: TopicRule = default_topic,
    ) -> None:
        self.lanes = lanes
        self.clock = clock or SystemClock()
        self.archive = archive
        self.topic_rule = topic_rule
        self.tables = Tables(lanes={lane: LaneRow() for lane in range(lanes * BANDS)})
        self.sagas = SagaTables()
        self.locks: dict[Hashable, MemoryTransaction] = {}
        self.admin: OutboxAdmin = MemoryOutboxAdmin(self)
        self.maintenance: OutboxMaintenance = MemoryMaintenance(self)
        self.commands = MemoryOperationLog(self.tables.operations, self.sagas, self.clock.now)
        self.operations: OperationLog = self.commands
        self.journal: OutboxJournal = MemoryJournal(self)
        self._position = 0
        self._listeners: list[Callable[[], None]] = []

    def next_position(self) -> int:
        """Take the next position; gaps are harmless."""
        self._position += 1
        return self._position

    def begin(self) -> MemoryTransaction:
        """Open a transaction; end it with its `commit` or `rollback`."""
        return MemoryTransaction(self)

    @asynccontextmanager
    async def transaction(self) -> AsyncIterator[MemoryTransaction]:
        """Open a transaction. The block commits at its end and rolls back after an exception."""
        tx = self.begin()
        try:
            yield tx
        except BaseException:
            tx.rollback()
            raise
        tx.commit()

    async def heartbeat(self, relay: str, lease_seconds: float, *, first: bool) -> HeartbeatResult | None:
        now, lease = self.clock.now(), timedelta(seconds=lease_seconds)
        # A heartbeat from before the clock was set back may be renewed; until then, others may take the lanes.
        if not first and (relay not in self.tables.relays or self.tables.relays[relay][1] <= now):
            return None
        self.tables.relays[relay] = now - lease, now + lease
        return HeartbeatResult(sum(self.alive(other, now) for other in self.tables.relays), self._free(now))

    async def claim(self, relay: str, lanes: Sequence[int]) -> Lease:
        now = self.clock.now()
        taken = sorted(set(lanes) & set(self._free(now))) if self.alive(relay, now) else []
        for lane in taken:
            self.take_lane(lane, relay)
        return Lease(relay, {lane: self.tables.lanes[lane].epoch for lane in taken})

    def take_lane(self, lane: int, owner: str | None) -> None:
        """Give a lane a new owner. The epoch grows, so the fence rejects pending writes of the old owner."""
        row = self.tables.lanes[lane]
        row.owner, row.epoch = owner, row.epoch + 1

    async def release(self, lease: Lease) -> None:
        for lane in self.fence(lease):
            self.tables.lanes[lane].owner = None

    async def leave(self, relay: str) -> None:
        self.tables.relays.pop(relay, None)
        for row in self.tables.lanes.values():
            row.owner = None if row.owner == relay else row.owner

    def fence(self, lease: Lease) -> set[int]:
        """Return the lanes that the lease still owns."""
        lanes = self.tables.lanes
        return {
            lane
            for lane, epoch in lease.epochs.items()
            if lanes[lane].owner == lease.owner and lanes[lane].epoch == epoch
        }

    async def fetch(self, lease: Lease, quotas: Mapping[int, int]) -> Fetched:
        now, owned = self.clock.now(), self.fence(lease)
        found = [
            self._view(self.tables.rows[position], now)
            for lane in sorted(owned & set(quotas))
            for position in self.tables.fetchable[lane].first(quotas[lane])
        ]
        blocked = frozenset(stream.lane for stream in self.tables.blocked)
        return Fetched(found, frozenset(owned), blocked & owned)

    async def blocked(self, streams: Sequence[Stream]) -> set[Stream]:
        return set(streams) & self.tables.blocked.keys()

    async def due(self, lease: Lease, events_max: int) -> Due:
        now, owned = self.clock.now(), self.fence(lease)
        timed = [
            (block.until, stream, block)
            for stream, block in self.tables.blocked.items()
            if stream.lane in owned and block.until is not None
        ]
        timed.sort(key=lambda entry: entry[0])
        streams: list[DueStream] = []
        room = events_max
        for until, stream, block in timed:
            if until > now or room <= 0:
                return Due(streams, max(0.0, (until - now).total_seconds()))
            run = room if block.cause is BlockReason.DRAINING else 1
            shelf = self.tables.waiting.get(stream)
            events = [self._view(self.tables.rows[p], now) for p in shelf.first(run)] if shelf else []
            streams.append(DueStream(stream, block.cause, events))
            room -= len(events)
        return Due(streams, None)

    async def last_values(self, wanted: Sequence[tuple[str, Stream]]) -> dict[tuple[str, Stream], int]:
        return {each: self.tables.last_values[each] for each in wanted if each in self.tables.last_values}

    async def settle(self, lease: Lease, settlements: Settlements) -> int:
        owned = self.fence(lease)
        settling = MemorySettlement(self)
        applied = sum([settling.apply(s) for s in settlements.outcomes() if s.stream.lane in owned])
        for stream in settlements.emptied:
            if stream.lane in owned:
                settling.loosen(stream)
        settling.streams()
        for rule, stream, value in settlements.raised_values(owned):
            known = self.tables.last_values
            known[rule, stream] = max(value, known.get((rule, stream), value))
        return applied

    def resolve_topic(self, row: OutboxTableRow) -> None:
        """Apply the topic rule to a row without a topic."""
        event = row.event
        if not event.topic:
            row.event = event._replace(topic=topic_of(self.topic_rule, event.event_type, None, event.routing_key))
            row.stream = row.event.stream

    def insert(self, row: OutboxTableRow) -> None:
        """Insert a row outside of a business transaction: a marker, or a replayed dead letter."""
        self.tables.put(row)
        add(self, JournalKind.STAGED, [row.event.event_id])

    def depart(self, row: OutboxTableRow, now: datetime) -> None:
        """Remove a delivered event from the outbox."""
        self.tables.take(row.event.position)
        add(self, JournalKind.ARCHIVED if self.archive else JournalKind.SENT, [row.event.event_id])
        if self.archive:
            self.tables.archive[row.event.event_id] = (row, now)

    def block(self, stream: Stream, cause: BlockReason, head: int | None, until: datetime | None) -> None:
        """Block a stream, or change the reason.

        A block by a dead letter stays: only an operator may release the stream.
        """
        present = self.tables.blocked.get(stream)
        if present is None or present.cause is not BlockReason.DEAD_LETTER or cause is BlockReason.DEAD_LETTER:
            self.tables.blocked[stream] = BlockRow(cause, head, until)

    def resolve(self, stream: Stream) -> None:
        """Release a stream without waiting events; drain other streams. A stream behind a dead letter stays blocked."""
        current = self.tables.blocked.get(stream)
        if current is None or current.cause is BlockReason.DEAD_LETTER:
            return
        if stream in self.tables.waiting:
            self.block(stream, BlockReason.DRAINING, None, self.clock.now())
        else:
            del self.tables.blocked[stream]

    async def renew_claim(self, claim: OptimisticClaim, event_ids: Sequence[UUID]) -> list[OutboxRow]:
        now = self.clock.now()
        mine = [row for row in self._present(event_ids) if has_claim(row, claim, now)]
        for row in mine:
            row.claimed_until = now + timedelta(seconds=claim.seconds)
        return [row.event for row in mine]

    async def settle_claim(self, claim: OptimisticClaim, confirmed: Sequence[UUID], yielded: Sequence[UUID]) -> None:
        now = self.clock.now()
        # After the claim expires, a relay may publish the event and park other events behind it, so the writer must not
        # settle.
        for row in self._present(confirmed):
            if has_claim(row, claim, now):
                self.depart(row, now)
        for row in self._present(yielded):
            if has_claim(row, claim, now):
                self.tables.transition(row.event.position, State.PENDING)

    async def notify(self) -> None:
        for wake in self._listeners:
            wake()

    def listen(self, wake: Callable[[], None]) -> AbstractAsyncContextManager[None]:
        return MemoryListener(self._listeners, wake)

    async def check(self) -> list[CheckResult]:
        return check()

    async def close(self) -> None:
        """Do nothing: there are no connections."""

    def _present(self, event_ids: Sequence[UUID]) -> list[OutboxTableRow]:
        return [self.tables.rows[self.tables.ids[i]] for i in event_ids if i in self.tables.ids]

    def alive(self, relay: str, now: datetime) -> bool:
        """Return whether a relay has a valid heartbeat: one that has not expired, and is not far in the future."""
        since, until = self.tables.relays.get(relay, (now, now))
        return since <= now < until

    def _free(self, now: datetime) -> list[int]:
        return [lane for lane, row in self.tables.lanes.items() if row.owner is None or not self.alive(row.owner, now)]

    def _view(self, row: OutboxTableRow, now: datetime) -> OutboxRow:
        self.resolve_topic(row)
        event = row.event
        if is_claimed(row, now):
            return event._replace(readiness=Readiness.OPTIMISTIC)
        if event.available_at is not None and event.available_at > now:
            return event._replace(readiness=Readiness.EARLY)
        return event


class MemoryListener(AbstractAsyncContextManager[None]):
    """Calls `wake` on notifications while open."""

    def __init__(self, listeners: list[Callable[[], None]], wake: Callable[[], None]) -> None:
        self._listeners, self._wake = listeners, wake

    async def __aenter__(self) -> None:
        self._listeners.append(self._wake)

    async def __aexit__(self, *error: object) -> None:
        self._listeners.remove(self._wake)


class MemoryMaintenance:
    """The maintenance of the outbox: keeps the tables bounded."""

    def __init__(self, store: MemoryStore) -> None:
        self._store = store

    async def sweep(self) -> list[DeadRelay]:
        tables, now = self._store.tables, self._store.clock.now()
        dead = [relay for relay in tables.relays if not self._store.alive(relay, now)]
        for relay in dead:
            del tables.relays[relay]
        return [DeadRelay(relay, sum(row.owner == relay for row in tables.lanes.values())) for relay in dead]

    async def take_duty(self, name: str, every_seconds: float) -> bool:
        duties, now = self._store.tables.duties, self._store.clock.now()
        if name in duties and duties[name] > now:
            return False
        duties[name] = now + timedelta(seconds=every_seconds)
        return True

    async def prepare(self) -> None:
        """Do nothing: there are no partitions."""

    async def prune(self, retention: Retention) -> Pruned:
        tables, now = self._store.tables, self._store.clock.now()
        sent = [i for i, (_, at) in tables.archive.items() if at < now - timedelta(days=retention.archive_days)]
        # A dead letter that blocks its stream stays until an operator acts.
        days = retention.dead_letter_days
        limit = None if days is None else now - timedelta(days=days)
        dead = [
            event_id
            for event_id, row in tables.dead.items()
            if limit is not None and row.dead_lettered_at < limit and row.policy != OnDeadLetter.BLOCK
        ]
        journal = MemoryJournal(self._store)
        journal.note_prune(retention.archive_days)
        for event_id in sent:
            del tables.archive[event_id]
        for event_id in dead:
            del tables.dead[event_id]
        self._store.commands.write(EXPIRE_ACTOR, EXPIRE_VERB, [(event_id, None) for event_id in dead])
        add(self._store, JournalKind.EXPIRED, dead)
        removed = await self._store.commands.remove_lines(retention.operation_days)
        return Pruned(len(sent), len(dead), removed, journal.prune(retention.journal_days))


def check() -> list[CheckResult]:
    """Return the warning that the memory store is for tests.

    >>> check()[0].check
    'memory-durable'
    """
    return [warn("memory-durable", "events are lost when the process ends", "use it for tests only")]
