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
        self._queues: dict[InboxStream, deque[ReceivedEvent]] = {}
        self._free: dict[InboxStream, None] = {}
        self._busy: set[InboxStream] = set()
        self._counts: Counter[str] = Counter()
        self._revoked: set[str] = set()

    def __len__(self) -> int:
        return self._counts.total()

    @property
    def ready(self) -> bool:
        """Return whether an event may be handled now."""
        return bool(self._free)

    @property
    def partitions(self) -> frozenset[str]:
        """Return the partitions with unsettled events."""
        return frozenset(self._counts)

    @property
    def streams(self) -> AbstractSet[InboxStream]:
        """Return the streams with unsettled events."""
        return self._queues.keys()

    def count(self, partition: str) -> int:
        """Return the number of unsettled events of a partition."""
        return self._counts[partition]

    def full(self, limit: int) -> frozenset[str]:
        """Return the partitions with at least `limit` unsettled events."""
        return frozenset(partition for partition, count in self._counts.items() if count >= limit)

    def add(self, received: ReceivedEvent) -> None:
        """Append an event to the queue of its stream."""
        stream = received.stream
        if stream not in self._queues:
            self._queues[stream] = deque()
            self._free[stream] = None
        self._queues[stream].append(received)
        self._counts[received.delivery.partition] += 1

    def take(self, limit: int) -> list[ReceivedEvent]:
        """Give out events from the heads of free queues; the queues are busy until `free`."""
        taken: list[ReceivedEvent] = []
        while self._free and len(taken) < limit:
            stream = next(iter(self._free))
            del self._free[stream]
            self._busy.add(stream)
            queue = self._queues[stream]
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
        revoked = [received for received in events if received.delivery.partition in self._revoked]
        for received in reversed(events):
            if received.delivery.partition not in self._revoked:
                self._queues[received.stream].appendleft(received)
        self.done(revoked)
        return revoked

    def sort(self, streams: Iterable[InboxStream]) -> None:
        """Sort queues by sequence: the event for which the rest of a queue waits may have been received last."""
        for stream in streams:
            if queue := self._queues.get(stream):
                self._queues[stream] = deque(sorted(queue, key=lambda received: received.sequence or 0))

    def free(self, streams: Iterable[InboxStream]) -> None:
        """Free queues and remove empty queues."""
        for stream in streams:
            self._busy.discard(stream)
            if self._queues.get(stream):
                self._free[stream] = None
            else:
                self._queues.pop(stream, None)

    def drop(self, partitions: AbstractSet[str]) -> list[ReceivedEvent]:
        """Remove and return the events of partitions that were not given out. The next owner gets the events."""
        self._revoked |= {partition for partition in partitions if self._counts[partition]}
        dropped: list[ReceivedEvent] = []
        for stream, queue in list(self._queues.items()):
            self._queues[stream] = deque(
                received for received in queue if received.delivery.partition not in partitions
            )
            dropped += [received for received in queue if received.delivery.partition in partitions]
            if not self._queues[stream] and stream not in self._busy:
                del self._queues[stream]
                self._free.pop(stream, None)
        self.done(dropped)
        return dropped

    def _leave(self, received: ReceivedEvent) -> None:
        partition = received.delivery.partition
        self._counts[partition] -= 1
        if self._counts[partition] <= 0:
            del self._counts[partition]
            self._revoked.discard(partition)
