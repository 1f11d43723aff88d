"""What a member of a group has at the moment: its shards, and the deliveries it has not handed over yet. Pure.

A partition that comes back after it was taken away is another shard, with another name: acks of the old one must not
count for the new one.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, field

from outrider.brokers.progress import Progress
from outrider.delivery import Delivery


@dataclass(slots=True, eq=False)
class Shard:
    """A partition, for as long as this member has it. `paused` says that librdkafka was told to leave it alone."""

    name: str
    topic: str
    partition: int
    progress: Progress = field(default_factory=Progress)
    paused: bool = False


class Assignment:
    """The shards of a member. `serials` are numbers that no shard of this source has had.

    >>> Assignment(iter([7])).add("orders", 0).name
    'orders/0#7'
    """

    def __init__(self, serials: Iterator[int]) -> None:
        self._shards: dict[tuple[str, int], Shard] = {}
        self._serials = serials

    def __iter__(self) -> Iterator[Shard]:
        return iter(self._shards.values())

    @property
    def names(self) -> frozenset[str]:
        """Return the names of all shards."""
        return frozenset(shard.name for shard in self)

    def add(self, topic: str, partition: int) -> Shard:
        """Take a partition; it begins anew, whatever was known of it before."""
        shard = Shard(f"{topic}/{partition}#{next(self._serials)}", topic, partition)
        self._shards[topic, partition] = shard
        return shard

    def find(self, topic: str, partition: int) -> Shard | None:
        """Return the shard of a partition, if this member has it."""
        return self._shards.get((topic, partition))

    def remove(self, shards: Iterable[Shard]) -> None:
        """Forget shards."""
        for shard in shards:
            self._shards.pop((shard.topic, shard.partition), None)


class Kept:
    """Deliveries that came and were not handed over: more than asked for, or of a shard that is blocked."""

    def __init__(self) -> None:
        self._deliveries: list[Delivery] = []

    def __len__(self) -> int:
        return len(self._deliveries)

    def add(self, delivery: Delivery) -> None:
        """Keep a delivery behind the others."""
        self._deliveries.append(delivery)

    def counts(self) -> Counter[str]:
        """Count them by shard."""
        return Counter(delivery.shard for delivery in self._deliveries)

    def take(self, limit: int, blocked: AbstractSet[str]) -> list[Delivery]:
        """Hand over the first ones of shards that are not blocked."""
        taken: list[Delivery] = []
        left: list[Delivery] = []
        for delivery in self._deliveries:
            (taken if len(taken) < limit and delivery.shard not in blocked else left).append(delivery)
        self._deliveries = left
        return taken

    def drop(self, shards: AbstractSet[str]) -> None:
        """Forget those of shards that are gone."""
        self._deliveries = [delivery for delivery in self._deliveries if delivery.shard not in shards]
