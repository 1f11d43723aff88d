"""The queues of keys: decide which received events may be handled now. Keys run concurrently, each key in order.

The module does no I/O. A key is free, busy (some of its events are being handled) or resting (its first event failed
and is due later). Only events at the head of a free key are given out.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Iterable, Sequence
from collections.abc import Set as AbstractSet

from outrider.event import InboxStream, ReceivedEvent


class KeyQueues:
    """Received events that are not settled yet, in one queue per stream."""

    def __init__(self) -> None:
        self._lines: dict[InboxStream, deque[ReceivedEvent]] = {}
        self._free: dict[InboxStream, None] = {}
        self._busy: set[InboxStream] = set()
        self._shards: Counter[str] = Counter()
        self._gone: set[str] = set()

    def __len__(self) -> int:
        return self._shards.total()

    @property
    def ready(self) -> bool:
        """Return whether an event may be handled now."""
        return bool(self._free)

    @property
    def partitions(self) -> frozenset[str]:
        """Return the partitions with unsettled events."""
        return frozenset(self._shards)

    @property
    def lines(self) -> AbstractSet[InboxStream]:
        """Return the streams with unsettled events."""
        return self._lines.keys()

    def count(self, partition: str) -> int:
        """Return the number of unsettled events of a partition."""
        return self._shards[partition]

    def full(self, per_shard: int) -> frozenset[str]:
        """Return the partitions with at least `per_shard` unsettled events."""
        return frozenset(partition for partition, count in self._shards.items() if count >= per_shard)

    def add(self, received: ReceivedEvent) -> None:
        """Append an event to the queue of its stream."""
        line = received.stream
        if line not in self._lines:
            self._lines[line] = deque()
            self._free[line] = None
        self._lines[line].append(received)
        self._shards[received.delivery.partition] += 1

    def take(self, limit: int) -> list[ReceivedEvent]:
        """Give out events from the heads of free queues; the queues are busy until `free`."""
        taken: list[ReceivedEvent] = []
        while self._free and len(taken) < limit:
            line = next(iter(self._free))
            del self._free[line]
            self._busy.add(line)
            queue = self._lines[line]
            taken += [queue.popleft() for _ in range(min(len(queue), limit - len(taken)))]
        return taken

    def done(self, events: Iterable[ReceivedEvent]) -> None:
        """Remove events that were given out."""
        for received in events:
            self._leave(received)

    def put_back(self, events: Sequence[ReceivedEvent]) -> list[ReceivedEvent]:
        """Put events that were given out back to the heads of their queues, in order.

        Events of a partition that was revoked meanwhile are removed and returned.
        """
        gone = [received for received in events if received.delivery.partition in self._gone]
        for received in reversed(events):
            if received.delivery.partition not in self._gone:
                self._lines[received.stream].appendleft(received)
        self.done(gone)
        return gone

    def sort(self, lines: Iterable[InboxStream]) -> None:
        """Sort queues by sequence: the event for which the rest of a queue waits may have been received last."""
        for line in lines:
            if queue := self._lines.get(line):
                self._lines[line] = deque(sorted(queue, key=lambda received: received.sequence or 0))

    def free(self, lines: Iterable[InboxStream]) -> None:
        """Free queues and remove empty queues."""
        for line in lines:
            self._busy.discard(line)
            if self._lines.get(line):
                self._free[line] = None
            else:
                self._lines.pop(line, None)

    def drop(self, partitions: AbstractSet[str]) -> list[ReceivedEvent]:
        """Remove and return the events of partitions that were not given out. The next owner gets the events."""
        self._gone |= {partition for partition in partitions if self._shards[partition]}
        dropped: list[ReceivedEvent] = []
        for line, queue in list(self._lines.items()):
            self._lines[line] = deque(received for received in queue if received.delivery.partition not in partitions)
            dropped += [received for received in queue if received.delivery.partition in partitions]
            if not self._lines[line] and line not in self._busy:
                del self._lines[line]
                self._free.pop(line, None)
        self.done(dropped)
        return dropped

    def _leave(self, received: ReceivedEvent) -> None:
        partition = received.delivery.partition
        self._shards[partition] -= 1
        if self._shards[partition] <= 0:
            del self._shards[partition]
            self._gone.discard(partition)
