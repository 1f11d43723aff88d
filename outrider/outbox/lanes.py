"""Which lanes a relay should own, and how much to read from each. Pure."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field
from operator import attrgetter

from outrider.event import BANDS
from outrider.outbox.waves import payload_bytes
from outrider.store import Fetched

SHARES = (0.80, 0.15, 0.05)
"""What each band gets of a pass when all have a backlog: urgent first, and nothing starves."""

BATCH_BYTES_MAX = 16_000_000
"""About how much payload a pass may hold; a relay's workers each hold so much."""

_LANE = attrgetter("lane")

assert len(SHARES) == BANDS
assert abs(sum(SHARES) - 1) < 1e-9


@dataclass(frozen=True, slots=True)
class Change:
    """Lanes to claim, and lanes to hand over once they have nothing in flight."""

    claim: tuple[int, ...]
    surrender: tuple[int, ...]


def rebalance(
    owned: Collection[int], free: Collection[int], *, lanes: int, relays: int, chance: random.Random
) -> Change:
    """Decide how to come to a fair share of every band: at most its lanes divided by the living relays, rounded up.

    Free lanes are picked at random, so that relays which start together do not all reach for the same ones.

    >>> rebalance({0, 1, 2, 3}, (), lanes=4, relays=2, chance=random.Random(1)).surrender
    (2, 3)
    """
    share = -(-lanes // max(relays, 1))
    claim: list[int] = []
    surrender: list[int] = []
    for band in range(BANDS):
        mine = _in_band(owned, band, lanes)
        surrender += mine[share:]
        wanted = _in_band(free, band, lanes)
        claim += chance.sample(wanted, min(len(wanted), max(0, share - len(mine))))
    return Change(tuple(sorted(claim)), tuple(surrender))


def _in_band(lanes_given: Iterable[int], band: int, lanes: int) -> list[int]:
    return sorted(lane for lane in lanes_given if lane // lanes == band)


def quotas(
    owned: Collection[int], full: Collection[int], *, lanes: int, batch_max: int, floor: int = 8
) -> dict[int, int]:
    """Divide a pass's budget: each band its share, each lane that was full last time an equal part of it.

    A lane that was not full gets the floor: enough to notice that it has filled. A band without a backlog leaves its
    share to the others.

    >>> quotas([0, 1], [1], lanes=32, batch_max=1000)
    {0: 8, 1: 1000}
    """
    backlog = {lane // lanes for lane in full if lane in owned}
    weight = sum(SHARES[band] for band in backlog)
    parts: Mapping[int, float] = {band: SHARES[band] / weight for band in backlog}
    crowd = {band: sum(1 for lane in full if lane in owned and lane // lanes == band) for band in backlog}
    return {
        lane: max(floor, int(batch_max * parts[lane // lanes] / crowd[lane // lanes])) if lane in full else floor
        for lane in owned
    }


@dataclass(slots=True)
class Budget:
    """How much the next pass reads, judging by the last ones.

    >>> Budget(lanes=32, events_max=4000).quotas([0, 1])
    {0: 8, 1: 8}
    """

    lanes: int
    events_max: int
    bytes_mean: float = 0.0
    full: set[int] = field(default_factory=set)

    @property
    def batch_max(self) -> int:
        """Return how many events to fetch: fewer of those that would fill the memory.

        >>> Budget(lanes=32, events_max=4000, bytes_mean=100_000).batch_max
        160
        """
        return max(1, min(self.events_max, int(BATCH_BYTES_MAX / max(self.bytes_mean, 1))))

    def quotas(self, owned: Collection[int]) -> dict[int, int]:
        """Return how many events to fetch from each lane."""
        return quotas(owned, self.full, lanes=self.lanes, batch_max=self.batch_max)

    def notice(self, fetched: Fetched, quotas: Mapping[int, int]) -> None:
        """Remember which lanes were full, and how large events are.

        Sizes are slow to be forgotten, because lanes differ, and too small a batch harms nobody.
        """
        counts = Counter(map(_LANE, fetched.events))
        self.full -= fetched.lanes
        self.full |= {lane for lane, count in counts.items() if count >= quotas[lane]}
        if fetched.events:
            mean = payload_bytes(fetched.events) / len(fetched.events)
            self.bytes_mean = max(mean, self.bytes_mean / 2)
