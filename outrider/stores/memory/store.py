"""The store in memory: the contract in its plainest form, for tests and for the simulation.

Every verb runs without a pause, so each is atomic; what the SQL stores do with locks is true here by construction.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Hashable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from datetime import datetime, timedelta
from uuid import UUID

from outrider.clock import Clock, SystemClock
from outrider.event import BANDS, Readiness, StagedEvent, Stream
from outrider.finding import Finding
from outrider.lifecycle import State
from outrider.outcome import CONFIRMED
from outrider.store import Cause, Desk, Due, DueStream, Fetched, Hold, Lease, Pulse, Settlement, Upkeep
from outrider.stores.memory.desk import MemoryDesk
from outrider.stores.memory.examine import examine
from outrider.stores.memory.saga_tables import SagaTables
from outrider.stores.memory.settling import Settling
from outrider.stores.memory.tables import Block, LaneRow, Row, Tables, holds
from outrider.stores.memory.transaction import MemoryTransaction
from outrider.stores.memory.upkeep import MemoryUpkeep


class MemoryStore:
    """Events in this process's memory, gone with it.

    >>> MemoryStore(lanes=4).lanes
    4
    """

    def __init__(self, *, lanes: int = 32, clock: Clock | None = None, archive: bool = True) -> None:
        self.lanes = lanes
        self.clock = clock or SystemClock()
        self.archive = archive
        self.tables = Tables(lanes={lane: LaneRow() for lane in range(lanes * BANDS)})
        self.sagas = SagaTables()
        self.locks: dict[Hashable, MemoryTransaction] = {}
        self.desk: Desk = MemoryDesk(self)
        self.upkeep: Upkeep = MemoryUpkeep(self)
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
        """Commit when the block ends, roll back when it raises."""
        tx = self.begin()
        try:
            yield tx
        except BaseException:
            tx.rollback()
            raise
        tx.commit()

    async def beat(self, relay: str, lease_seconds: float, *, joining: bool) -> Pulse | None:
        now = self.clock.now()
        if not joining and not self._alive(relay, now):
            return None
        self.tables.relays[relay] = now + timedelta(seconds=lease_seconds)
        return Pulse(sum(until > now for until in self.tables.relays.values()), self._free(now))

    async def claim(self, relay: str, lanes: Sequence[int]) -> Lease:
        now = self.clock.now()
        taken = sorted(set(lanes) & set(self._free(now))) if self._alive(relay, now) else []
        for lane in taken:
            self.take_lane(lane, relay)
        return Lease(relay, {lane: self.tables.lanes[lane].epoch for lane in taken})

    def take_lane(self, lane: int, owner: str | None) -> None:
        """Give a lane a new owner. The epoch goes up, so nothing decided before can be written after."""
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
        """Return the lanes that are still the lease's own."""
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
            run = room if block.cause is Cause.DRAINING else 1
            shelf = self.tables.waiting.get(stream)
            events = [self._view(self.tables.rows[p], now) for p in shelf.first(run)] if shelf else []
            streams.append(DueStream(stream, block.cause, events))
            room -= len(events)
        return Due(streams, None)

    async def confirm(self, lease: Lease, events: Sequence[StagedEvent]) -> int:
        rows = [self.tables.rows[event.position] for event in events if event.position in self.tables.rows]
        return await self.settle(lease, [Settlement(row.event, row.stream, CONFIRMED) for row in rows])

    async def settle(self, lease: Lease, settlements: Sequence[Settlement], emptied: Sequence[Stream] = ()) -> int:
        owned = self.fence(lease)
        settling = Settling(self)
        applied = sum([settling.apply(s) for s in settlements if s.stream.lane in owned])
        for stream in emptied:
            if stream.lane in owned:
                settling.loosen(stream)
        settling.streams()
        return applied

    def depart(self, row: Row, now: datetime) -> None:
        """Take a delivered event out of the outbox."""
        self.tables.take(row.event.position)
        if self.archive:
            self.tables.archive[row.event.event_id] = (row, now)

    def block(self, stream: Stream, cause: Cause, head: int | None, until: datetime | None) -> None:
        """Block a stream, or change why it is blocked. Only a person lifts a hold."""
        present = self.tables.blocked.get(stream)
        if present is None or present.cause is not Cause.HELD or cause is Cause.HELD:
            self.tables.blocked[stream] = Block(cause, head, until)

    def resolve(self, stream: Stream) -> None:
        """Let a stream go if nothing of it waits; otherwise it drains. A held one stays held."""
        current = self.tables.blocked.get(stream)
        if current is None or current.cause is Cause.HELD:
            return
        if stream in self.tables.waiting:
            self.block(stream, Cause.DRAINING, None, self.clock.now())
        else:
            del self.tables.blocked[stream]

    async def renew_hold(self, hold: Hold, event_ids: Sequence[UUID]) -> list[StagedEvent]:
        now = self.clock.now()
        mine = [row for row in self._present(event_ids) if holds(row, hold, now)]
        for row in mine:
            row.held_until = now + timedelta(seconds=hold.seconds)
        return [row.event for row in mine]

    async def settle_hold(self, hold: Hold, confirmed: Sequence[UUID], yielded: Sequence[UUID]) -> None:
        now = self.clock.now()
        # Once a hold has lapsed, a relay may have the event in flight and park others behind it: hands off.
        for row in self._present(confirmed):
            if holds(row, hold, now):
                self.depart(row, now)
        for row in self._present(yielded):
            if holds(row, hold, now):
                self.tables.move(row.event.position, State.PENDING)

    async def hint(self) -> None:
        for wake in self._listeners:
            wake()

    def wakeups(self, wake: Callable[[], None]) -> AbstractAsyncContextManager[None]:
        return Listening(self._listeners, wake)

    async def examine(self) -> list[Finding]:
        return examine()

    async def close(self) -> None:
        """Nothing to let go of."""

    def _present(self, event_ids: Sequence[UUID]) -> list[Row]:
        return [self.tables.rows[self.tables.ids[i]] for i in event_ids if i in self.tables.ids]

    def _alive(self, relay: str, now: datetime) -> bool:
        until = self.tables.relays.get(relay)
        return until is not None and until > now

    def _free(self, now: datetime) -> list[int]:
        return [lane for lane, row in self.tables.lanes.items() if row.owner is None or not self._alive(row.owner, now)]

    def _view(self, row: Row, now: datetime) -> StagedEvent:
        event = row.event
        if event.state == State.OPTIMISTIC and row.held_until is not None and row.held_until > now:
            return event._replace(readiness=Readiness.HELD)
        if event.available_at is not None and event.available_at > now:
            return event._replace(readiness=Readiness.EARLY)
        return event


class Listening(AbstractAsyncContextManager[None]):
    """Calls `wake` on hints, while it is open."""

    def __init__(self, listeners: list[Callable[[], None]], wake: Callable[[], None]) -> None:
        self._listeners, self._wake = listeners, wake

    async def __aenter__(self) -> None:
        self._listeners.append(self._wake)

    async def __aexit__(self, *error: object) -> None:
        self._listeners.remove(self._wake)
