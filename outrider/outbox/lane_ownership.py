"""Lane ownership: the name of a relay, its lanes with their epochs, and the time until which the lease is safe.

A relay gives up every lane whose ownership is in doubt. Otherwise two relays could publish a lost lane at once; a lane
given up without need comes back with the next heartbeat.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, field
from operator import attrgetter

from outrider.clock import Clock
from outrider.errors import OutriderError
from outrider.event import BANDS
from outrider.outbox.batch import payload_bytes
from outrider.outbox.model import Fetched, Lease
from outrider.outbox.settings import LEASE_MARGIN, RelaySettings
from outrider.outbox.store import OutboxStore
from outrider.telemetry.events import LanesClaimed, LanesReleased, LeaseLost, Observer

OnDropped = Callable[[set[int]], None]
"""Called with the lanes that the relay has lost or released."""

SHARES = (0.80, 0.15, 0.05)
"""The share of each band in a pass when all bands have a backlog: urgent bands first, and no band starves."""

BATCH_BYTES_MAX = 16_000_000
"""The payload bytes of a pass, approximately; every worker of a relay may use as much memory."""

_LANE = attrgetter("lane")
assert len(SHARES) == BANDS
assert abs(sum(SHARES) - 1) < 1e-9


def rebalance(
    owned: Collection[int], free: Collection[int], *, lanes: int, relays: int, rng: random.Random
) -> Rebalance:
    """Return the lanes to claim and to release for a fair share of every band: lanes by living relays, rounded up.

    Free lanes are picked at random, so that relays that start together claim different lanes.

    >>> rebalance({0, 1, 2, 3}, (), lanes=4, relays=2, rng=random.Random(1)).release
    (2, 3)
    """
    share = -(-lanes // max(relays, 1))
    claim: list[int] = []
    release: list[int] = []
    for band in range(BANDS):
        mine = _in_band(owned, band, lanes)
        release += mine[share:]
        wanted = _in_band(free, band, lanes)
        claim += rng.sample(wanted, min(len(wanted), max(0, share - len(mine))))
    return Rebalance(tuple(sorted(claim)), tuple(release))


@dataclass(slots=True)
class LaneOwnership:
    """The lanes of a relay, under a name that is new with every start and after every loss."""

    store: OutboxStore
    settings: RelaySettings
    clock: Clock
    observer: Observer
    rng: random.Random
    on_dropped: OnDropped
    lease: Lease = field(init=False)
    _first: bool = True
    _trusted_until: float = float("-inf")
    _to_release: set[int] = field(default_factory=set)

    def __post_init__(self) -> None:
        self.lease = Lease(self._new_name())

    async def heartbeat(self) -> bool:
        """Renew the heartbeat, then move towards a fair share of the lanes; return True if lanes were claimed."""
        sent = self.clock.boot_seconds()
        result = await self.store.heartbeat(self.lease.owner, self.settings.lease_seconds, first=self._first)
        if result is None:
            self._on_lease_lost()
            return False
        self._first = False
        self._trusted_until = sent + self.settings.lease_seconds * LEASE_MARGIN
        change = rebalance(
            self.lease.epochs, result.free_lanes, lanes=self.store.lanes, relays=result.relays, rng=self.rng
        )
        self._to_release = set(change.release)
        return bool(change.claim) and await self._claim(change.claim)

    def lanes_of(self, worker: int) -> Lease:
        """Return the lanes of a worker."""
        return self.lease.only(lane for lane in self.lease.epochs if lane % self.settings.workers == worker)

    async def lease_for(self, worker: int, busy: AbstractSet[int] = frozenset()) -> Lease:
        """Return the lanes of a worker.

        Surplus lanes are released first, while the worker has nothing in flight; `busy` lanes have.
        """
        mine = self.lanes_of(worker)
        surplus = (self._to_release & mine.epochs.keys()) - busy
        if surplus:
            await self.store.release(mine.only(surplus))
            self._drop(mine.only(surplus))
            self.observer.emit(LanesReleased(self.lease.owner, tuple(sorted(surplus))))
        return mine.without(surplus)

    def covers(self, lease: Lease, seconds: float) -> bool:
        """Return whether the lease is still owned and covers work that begins now and takes `seconds`."""
        return lease.owner == self.lease.owner and self.clock.boot_seconds() + seconds < self._trusted_until

    def check(self, lease: Lease, found: AbstractSet[int]) -> None:
        """Give up the lanes that, according to the store, the relay no longer owns."""
        lost = lease.epochs.keys() - found
        if lost and lease.owner == self.lease.owner:
            self._drop(lease.only(lost))
            self.observer.emit(LeaseLost(self.lease.owner, tuple(sorted(lost))))

    async def release_after_failed_settle(self, lease: Lease) -> None:
        """Release lanes after a settle with an unknown result, for example after a connection loss during the commit.

        The write may still arrive. The fence rejects the write once the lanes have a new epoch.
        """
        try:
            await self.store.release(lease)
        except OutriderError:
            self._on_lease_lost()
        else:
            self._drop(lease)

    async def _claim(self, wanted: tuple[int, ...]) -> bool:
        try:
            claimed = await self.store.claim(self.lease.owner, wanted)
        except OutriderError:
            # The claim may have succeeded; then the lanes would have no worker as long as this name is alive.
            self._on_lease_lost()
            raise
        if claimed.epochs:
            self.lease = Lease(self.lease.owner, {**self.lease.epochs, **claimed.epochs})
            self.observer.emit(LanesClaimed(self.lease.owner, tuple(claimed.epochs)))
        return bool(claimed.epochs)

    def _drop(self, lost: Lease) -> None:
        """Give up lanes, except lanes that were claimed again at a later epoch in the meantime."""
        dropped = {lane for lane, epoch in lost.epochs.items() if self.lease.epochs.get(lane) == epoch}
        dropped = dropped if lost.owner == self.lease.owner else set()
        self.lease = self.lease.without(dropped)
        self._to_release -= dropped
        self.on_dropped(dropped)

    def _on_lease_lost(self) -> None:
        self.observer.emit(LeaseLost(self.lease.owner, tuple(self.lease.epochs)))
        self._drop(self.lease)
        self._trusted_until = float("-inf")
        self.lease = Lease(self._new_name())
        self._first = True

    def _new_name(self) -> str:
        return f"relay-{self.rng.getrandbits(48):012x}"


@dataclass(frozen=True, slots=True)
class Rebalance:
    """Lanes to claim, and lanes to release when no event is in flight."""

    claim: tuple[int, ...]
    release: tuple[int, ...]


def _in_band(chosen: Iterable[int], band: int, lanes: int) -> list[int]:
    return sorted(lane for lane in chosen if lane // lanes == band)


def quotas(
    owned: Collection[int], full: Collection[int], *, lanes: int, batch_max: int, floor: int = 8
) -> dict[int, int]:
    """Divide the events of a pass: a share per band, in equal parts for the lanes that were full last time.

    Other lanes get the floor, which is enough to notice a new backlog. A band without a backlog leaves its share to the
    other bands.

    >>> quotas([0, 1], [1], lanes=32, batch_max=1000)
    {0: 8, 1: 1000}
    """
    backlog = {lane // lanes for lane in full if lane in owned}
    weight = sum(SHARES[band] for band in backlog)
    parts: Mapping[int, float] = {band: SHARES[band] / weight for band in backlog}
    full_lanes = {band: sum(1 for lane in full if lane in owned and lane // lanes == band) for band in backlog}
    return {
        lane: max(floor, int(batch_max * parts[lane // lanes] / full_lanes[lane // lanes])) if lane in full else floor
        for lane in owned
    }


@dataclass(slots=True)
class ReadQuotas:
    """The number of events that the next pass reads, estimated from the last passes.

    As long as the size of events is unknown, one event of each lane is read: events may be large.

    >>> ReadQuotas(lanes=32, events_max=4000).quotas([0, 1])
    {0: 1, 1: 1}
    """

    lanes: int
    events_max: int
    bytes_mean: float = 0.0
    full: set[int] = field(default_factory=set)
    turns: dict[int, int] = field(default_factory=dict)

    @property
    def batch_max(self) -> int:
        """Return the number of events to fetch: fewer if the events are large, to limit memory.

        >>> ReadQuotas(lanes=32, events_max=4000, bytes_mean=100_000).batch_max
        160
        """
        return max(1, min(self.events_max, int(BATCH_BYTES_MAX / max(self.bytes_mean, 1))))

    def quotas(self, owned: Collection[int], worker: int = 0, events_max: int | None = None) -> dict[int, int]:
        """Return the number of events to fetch from each lane of a worker; together about `events_max`.

        Lanes that were full last time are together within BATCH_BYTES_MAX, and so are the other lanes. If the events
        are large, each pass leaves out some lanes, in turn.

        >>> quotas = ReadQuotas(lanes=32, events_max=4000, bytes_mean=8_000_000)
        >>> quotas.quotas([0, 1, 2]), quotas.quotas([0, 1, 2])
        ({0: 1, 1: 1, 2: 0}, {0: 1, 1: 0, 2: 1})
        """
        if not self.is_size_known:
            return dict.fromkeys(owned, 1)
        batch_max = self.batch_max if events_max is None else min(self.batch_max, events_max)
        wanted = quotas(owned, self.full, lanes=self.lanes, batch_max=batch_max)
        rows_max = max(1, int(BATCH_BYTES_MAX / self.bytes_mean))
        return wanted if sum(wanted.values()) <= rows_max else self._within(rows_max, wanted, worker)

    @property
    def is_size_known(self) -> bool:
        """Whether an event was read before."""
        return self.bytes_mean > 0

    def _within(self, rows_max: int, wanted: Mapping[int, int], worker: int) -> dict[int, int]:
        """Reduce quotas to a number of rows. The lane at the turn comes first, so that no lane is left out for ever."""
        turn = self.turns.get(worker, 0)
        lanes = sorted(wanted, key=lambda lane: (lane < turn, lane))
        full = [lane for lane in lanes if lane in self.full]
        # A lane that was not full last time is nearly always empty.
        others = [lane for lane in lanes if lane not in self.full]
        reduced = dict.fromkeys(sorted(wanted), 0) | dict.fromkeys(others[:rows_max], 1)
        room, total = rows_max, sum(wanted[lane] for lane in full)
        for lane in full:
            reduced[lane] = min(room, max(1, wanted[lane] * rows_max // total))
            room -= reduced[lane]
        self.turns[worker] = next((lane for lane in lanes if not reduced[lane]), turn)
        return reduced

    def learn(self, fetched: Fetched, quotas: Mapping[int, int]) -> None:
        """Record which lanes were full, and the size of events.

        The mean falls slowly, because lanes differ and a small batch does no harm.
        """
        if self.is_size_known:
            counts = Counter(map(_LANE, fetched.events))
            # A lane that was left out is as it was.
            self.full -= {lane for lane in fetched.lanes if quotas[lane]}
            self.full |= {lane for lane, count in counts.items() if count >= quotas[lane]}
        if fetched.events:
            mean = payload_bytes(fetched.events) / len(fetched.events)
            self.bytes_mean = max(mean, self.bytes_mean / 2)
