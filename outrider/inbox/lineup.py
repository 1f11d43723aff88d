"""The line-up, purely: which received arrivals may be handled now, so that keys run side by side and each in order.

A key is free, busy (some of its arrivals are being handled) or resting (its head failed and is due later). Only the
arrivals at the head of a free key are given out.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Iterable, Sequence
from collections.abc import Set as AbstractSet

from outrider.delivery import Arrival, InboxStream


class Lineup:
    """What has been received and is not done."""

    def __init__(self) -> None:
        self._lines: dict[InboxStream, deque[Arrival]] = {}
        self._free: dict[InboxStream, None] = {}
        self._busy: set[InboxStream] = set()
        self._shards: Counter[str] = Counter()
        self._gone: set[str] = set()

    def __len__(self) -> int:
        return self._shards.total()

    @property
    def ready(self) -> bool:
        """Tell whether something may be handled now."""
        return bool(self._free)

    @property
    def shards(self) -> frozenset[str]:
        """Return the shards of which something is not done."""
        return frozenset(self._shards)

    @property
    def lines(self) -> AbstractSet[InboxStream]:
        """Return the streams of which something is not done."""
        return self._lines.keys()

    def count(self, shard: str) -> int:
        """Return how many arrivals of a shard are not done."""
        return self._shards[shard]

    def full(self, per_shard: int) -> frozenset[str]:
        """Return the shards of which that many are not done."""
        return frozenset(shard for shard, count in self._shards.items() if count >= per_shard)

    def add(self, arrival: Arrival) -> None:
        """Let an arrival stand at the end of its line."""
        line = arrival.stream
        if line not in self._lines:
            self._lines[line] = deque()
            self._free[line] = None
        self._lines[line].append(arrival)
        self._shards[arrival.delivery.shard] += 1

    def take(self, limit: int) -> list[Arrival]:
        """Give out arrivals from the heads of free lines; those lines are busy until they are given back."""
        taken: list[Arrival] = []
        while self._free and len(taken) < limit:
            line = next(iter(self._free))
            del self._free[line]
            self._busy.add(line)
            queue = self._lines[line]
            taken += [queue.popleft() for _ in range(min(len(queue), limit - len(taken)))]
        return taken

    def done(self, arrivals: Iterable[Arrival]) -> None:
        """Forget arrivals that were given out."""
        for arrival in arrivals:
            self._leave(arrival)

    def put_back(self, arrivals: Sequence[Arrival]) -> list[Arrival]:
        """Put arrivals that were given out back to the heads of their lines, in their order.

        Those whose shard has gone meanwhile are forgotten, and returned.
        """
        gone = [arrival for arrival in arrivals if arrival.delivery.shard in self._gone]
        for arrival in reversed(arrivals):
            if arrival.delivery.shard not in self._gone:
                self._lines[arrival.stream].appendleft(arrival)
        self.done(gone)
        return gone

    def sort(self, lines: Iterable[InboxStream]) -> None:
        """Put lines in the order of their numbers: the one that the others came too early for may have come last."""
        for line in lines:
            if queue := self._lines.get(line):
                self._lines[line] = deque(sorted(queue, key=lambda arrival: arrival.sequence or 0))

    def free(self, lines: Iterable[InboxStream]) -> None:
        """Let lines go on; those with nothing left disappear."""
        for line in lines:
            self._busy.discard(line)
            if self._lines.get(line):
                self._free[line] = None
            else:
                self._lines.pop(line, None)

    def drop(self, shards: AbstractSet[str]) -> list[Arrival]:
        """Forget what has not been given out of these shards, and return it: somebody else will get it."""
        self._gone |= {shard for shard in shards if self._shards[shard]}
        dropped: list[Arrival] = []
        for line, queue in list(self._lines.items()):
            self._lines[line] = deque(arrival for arrival in queue if arrival.delivery.shard not in shards)
            dropped += [arrival for arrival in queue if arrival.delivery.shard in shards]
            if not self._lines[line] and line not in self._busy:
                del self._lines[line]
                self._free.pop(line, None)
        self.done(dropped)
        return dropped

    def _leave(self, arrival: Arrival) -> None:
        shard = arrival.delivery.shard
        self._shards[shard] -= 1
        if self._shards[shard] <= 0:
            del self._shards[shard]
            self._gone.discard(shard)
