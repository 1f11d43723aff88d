"""A member of a consumer group: librdkafka's consumer, on the only thread that may call it.

Rebalances happen inside a poll. Before a partition is revoked, the member asks the engine to release the partition and
commits the offsets that are done, so the next owner starts at the right offset. Pausing a partition discards the
messages that librdkafka has fetched for it, so a partition is paused only when enough deliveries are buffered.
"""

from __future__ import annotations

import time
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, field
from operator import methodcaller
from typing import Any

from outrider.brokers.kafka.errors import MISSING
from outrider.brokers.kafka.producer import check_topic, driver, log, raise_if_permanent
from outrider.brokers.offsets import AHEAD_MAX, OffsetTracker
from outrider.errors import InvalidSetting, Transient, Unreachable
from outrider.event import UNREADABLE, Delivery

WAIT_SECONDS = 0.1

LEAVE_SECONDS_MAX = 3.0

RETRY_SECONDS = 0.05

NOT_NOW = {"_NO_OFFSET", "ILLEGAL_GENERATION", "REBALANCE_IN_PROGRESS"}
"""Commit errors that are harmless: no new offsets, or a rebalance in progress."""

PREFETCHED_MAX = 100
"""Number of deliveries of a blocked partition that are buffered before the partition is paused."""

Token = tuple[OffsetTracker, int]

Release = Callable[[frozenset[str], bool], None]
"""Asks the engine to release partitions; true if the partitions are lost already, so that waiting is of little use."""


class GroupMember:
    """A consumer in use. All methods except `take` run on the consumer's thread; `acked` may be filled from outside."""

    def __init__(
        self, settings: Mapping[str, Any], topics: Sequence[str], release: Release, serials: Iterator[int]
    ) -> None:
        self._driver, self._topics, self._release = driver(), list(topics), release
        self._servers = settings["bootstrap.servers"]
        self.acked: deque[Token] = deque()
        self._assignment, self._prefetched = Assignment(serials), Prefetched()
        self._blocked: AbstractSet[str] = frozenset()
        self._leaving = self._commit_reported = self._topic_awaited = False
        self._fatal = ""
        self._errors: dict[str, str] = {}
        callbacks = {"error_cb": self._on_error, "on_commit": self._on_commit}
        try:
            self._consumer = self._driver.Consumer({**settings, **callbacks}, logger=log)
        except self._driver.KafkaException as error:
            raise InvalidSetting(f"librdkafka rejects a setting: {error.args[0].str()}") from error

    def join(self, seconds: float) -> None:
        """Look for the topics and subscribe. The assignment comes with a later poll."""
        try:
            for topic in self._topics:
                exists = check_topic(self._consumer.list_topics(topic, timeout=seconds).topics[topic])
                self._topic_awaited = self._topic_awaited or not exists
        except self._driver.KafkaException as error:
            # A poll reports connection errors.
            self._consumer.poll(0)
            reason = next(iter(self._errors.values()), error.args[0].str())
            raise Unreachable(
                f"Kafka at {self._servers} does not answer ({reason}); check the addresses, that a broker runs there, "
                "and the security settings"
            ) from error
        self._consumer.subscribe(
            self._topics, on_assign=self._on_assign, on_revoke=self._on_revoke, on_lost=self._on_lost
        )

    def fill(self, limit: int, paused: AbstractSet[str]) -> None:
        """Store offsets, serve rebalances, and buffer deliveries; wait briefly if no delivery can be handed over."""
        if self._fatal:
            raise Transient(f"the consumer cannot go on ({self._fatal}); start it again")
        try:
            self._fill(limit, paused)
        except BaseException as error:
            # A rebalance may be half done, and the caller may have stopped waiting for this poll: so the next poll
            # reports.
            self._fatal = str(error) or repr(error)
            raise

    def _fill(self, limit: int, paused: AbstractSet[str]) -> None:
        self._apply_acks()
        self._store_offsets(self._assignment)
        counts = self._prefetched.counts()
        blocked = self._blocked = paused | self._far_ahead(counts) if limit > 0 else self._assignment.names
        self._pause_blocked(blocked, counts)
        ready = sum(count for assigned, count in counts.items() if assigned not in blocked)
        room = max(limit - ready, 1) if self._assignment.names - blocked else PREFETCHED_MAX
        self._poll(0.0 if ready else WAIT_SECONDS, room)
        if self._fatal:
            raise Transient(f"the consumer cannot go on ({self._fatal}); start it again")

    def take(self, limit: int, paused: AbstractSet[str]) -> list[Delivery]:
        """Hand over buffered deliveries. Runs between polls, so that a cancelled poll loses no delivery."""
        return self._prefetched.take(limit, self._blocked | paused)

    def leave(self) -> None:
        """Commit the offsets that are done, and leave the group."""
        self._leaving = True
        self._apply_acks()
        self._store_offsets(self._assignment)
        self._commit(LEAVE_SECONDS_MAX)
        # Closing commits the stored offsets again. Without Kafka, closing would wait for a whole session timeout.
        no_offset = self._driver.OFFSET_INVALID
        partitions = [
            self._driver.TopicPartition(assigned.topic, assigned.partition, no_offset) for assigned in self._assignment
        ]
        if partitions:
            self._consumer.store_offsets(offsets=partitions)
        self._consumer.close()

    def _commit(self, seconds: float) -> None:
        """Commit and wait for a bounded time: Kafka rejects commits until a rebalance is over."""
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline and (offsets := self._uncommitted(self._assignment)):
            self._commit_reported = False
            self._consumer.commit(offsets=offsets, asynchronous=True)
            while not self._commit_reported and time.monotonic() < deadline:
                self._consumer.poll(RETRY_SECONDS)
            if self._uncommitted(self._assignment):
                self._consumer.poll(RETRY_SECONDS)

    def _poll(self, seconds: float, room: int) -> None:
        # A batch call would wait for its last message. So wait for the first message, then take the rest if present.
        first = self._consumer.poll(seconds)
        if first is None:
            return
        self._prefetch_all([first])
        if room > 1:
            self._prefetch_all(self._consumer.consume(room - 1, timeout=0))

    def _prefetch_all(self, messages: Sequence[Any]) -> None:
        errors = [message.error() for message in messages if message.error() is not None]
        for message in messages:
            if message.error() is None:
                self._prefetch(message)
                self._errors.clear()
        for error in errors:
            self._on_error(error)
            raise_if_permanent(error)

    def _prefetch(self, message: Any) -> None:
        topic, partition, offset = message.topic(), message.partition(), message.offset()
        assigned = self._assignment.find(topic, partition)
        if assigned is None:
            # The same poll revoked the partition; the next owner gets the message.
            return
        headers = _read_headers(message)
        position, token = f"{topic}/{partition}/{offset}", (assigned.progress, assigned.progress.received(offset))
        self._prefetched.add(
            Delivery(topic, message.key(), message.value() or b"", headers, assigned.name, position, token)
        )

    def _pause_blocked(self, blocked: AbstractSet[str], counts: Mapping[str, int]) -> None:
        """Pause blocked partitions with enough buffered deliveries; resume unblocked ones with an empty buffer."""
        pause = [
            assigned
            for assigned in self._assignment
            if not assigned.paused and assigned.name in blocked and counts.get(assigned.name, 0) >= PREFETCHED_MAX
        ]
        resume = [
            assigned
            for assigned in self._assignment
            if assigned.paused and assigned.name not in blocked and not counts.get(assigned.name)
        ]
        if pause:
            self._consumer.pause(self._partitions(pause))
        if resume:
            self._consumer.resume(self._partitions(resume))
        for assigned in (*pause, *resume):
            assigned.paused = not assigned.paused

    def _far_ahead(self, counts: Mapping[str, int]) -> frozenset[str]:
        """Return the partitions with too many deliveries after an unfinished delivery: all would be delivered again."""
        return frozenset(
            assigned.name
            for assigned in self._assignment
            if len(assigned.progress) - counts.get(assigned.name, 0) >= AHEAD_MAX
        )

    def _apply_acks(self) -> None:
        while self.acked:
            progress, number = self.acked.popleft()
            progress.done(number)

    def _store_offsets(self, assigned_partitions: Iterable[AssignedPartition]) -> None:
        """Store the finished offsets in librdkafka, which commits them when the state of the group allows a commit.

        An explicit commit could collide with a rebalance; Kafka would reject the commit and could revoke all
        partitions.
        """
        if offsets := self._uncommitted(assigned_partitions):
            self._consumer.store_offsets(offsets=offsets)

    def _on_commit(self, error: Any, partitions: Sequence[Any]) -> None:
        """Handle a commit result. After a failed commit, the next commit includes the same offsets."""
        self._commit_reported = True
        if error is not None:
            if error.name() not in NOT_NOW:
                self._on_error(error)
            return
        for partition in partitions:
            assigned = self._assignment.find(partition.topic, partition.partition)
            # A partition without new offsets is listed too, without an offset.
            if assigned is not None and partition.error is None and partition.offset >= 0:
                assigned.progress.committed(partition.offset)

    def _uncommitted(self, assigned_partitions: Iterable[AssignedPartition]) -> list[Any]:
        return [
            self._driver.TopicPartition(assigned.topic, assigned.partition, position)
            for assigned in assigned_partitions
            if (position := assigned.progress.uncommitted) is not None
        ]

    def _partitions(self, assigned_partitions: Iterable[AssignedPartition]) -> list[Any]:
        return [self._driver.TopicPartition(assigned.topic, assigned.partition) for assigned in assigned_partitions]

    def _on_assign(self, consumer: Any, partitions: Sequence[Any]) -> None:
        for partition in partitions:
            self._assignment.add(partition.topic, partition.partition)
        consumer.incremental_assign(partitions)
        # librdkafka remembers the paused state of a revoked partition.
        consumer.resume(partitions)

    def _on_revoke(self, consumer: Any, partitions: Sequence[Any]) -> None:
        assigned_partitions = self._find_assigned(partitions)
        try:
            # A leaving member has no delivery in progress and has stored all offsets.
            if not self._leaving:
                self._release(frozenset(assigned.name for assigned in assigned_partitions), False)
                self._apply_acks()
                self._store_offsets(assigned_partitions)
        finally:
            self._drop(assigned_partitions)
            consumer.incremental_unassign(partitions)

    def _on_lost(self, consumer: Any, partitions: Sequence[Any]) -> None:
        """Forget lost partitions. Another process owns them already, so no commit is possible."""
        assigned_partitions = self._find_assigned(partitions)
        self._drop(assigned_partitions)
        try:
            if not self._leaving:
                self._release(frozenset(assigned.name for assigned in assigned_partitions), True)
        finally:
            consumer.incremental_unassign(partitions)

    def _find_assigned(self, partitions: Sequence[Any]) -> list[AssignedPartition]:
        found = (self._assignment.find(partition.topic, partition.partition) for partition in partitions)
        return [assigned for assigned in found if assigned is not None]

    def _drop(self, assigned_partitions: Sequence[AssignedPartition]) -> None:
        self._assignment.remove(assigned_partitions)
        self._prefetched.drop(frozenset(assigned.name for assigned in assigned_partitions))

    def _on_error(self, error: Any) -> None:
        """End the consumer after a fatal error. librdkafka handles other errors; each is logged once until recovery."""
        name, text = error.name(), f"{error.str()} ({error.name()})"
        if error.fatal():
            self._fatal = text
        # A topic that was missing at the start has been logged then, with the consequence.
        if name not in self._errors and not (self._topic_awaited and name in MISSING):
            log.warning("Kafka reports an error", extra={"error": text})
        self._errors[name] = text


@dataclass(slots=True, eq=False)
class AssignedPartition:
    """A partition during one assignment to the member. `paused`: librdkafka fetches no messages of the partition."""

    name: str
    topic: str
    partition: int
    progress: OffsetTracker = field(default_factory=OffsetTracker)
    paused: bool = False


class Assignment:
    """The partitions of a member. `serials` yields numbers that no partition of the source has used.

    >>> Assignment(iter([7])).add("orders", 0).name
    'orders/0#7'
    """

    def __init__(self, serials: Iterator[int]) -> None:
        self._assigned_partitions: dict[tuple[str, int], AssignedPartition] = {}
        self._serials = serials

    def __iter__(self) -> Iterator[AssignedPartition]:
        return iter(self._assigned_partitions.values())

    @property
    def names(self) -> frozenset[str]:
        """Return the names of all partitions."""
        return frozenset(assigned.name for assigned in self)

    def add(self, topic: str, partition: int) -> AssignedPartition:
        """Add a partition, with a new state even if the partition was assigned before."""
        assigned = AssignedPartition(f"{topic}/{partition}#{next(self._serials)}", topic, partition)
        self._assigned_partitions[topic, partition] = assigned
        return assigned

    def find(self, topic: str, partition: int) -> AssignedPartition | None:
        """Return the record of a partition, if assigned to the member."""
        return self._assigned_partitions.get((topic, partition))

    def remove(self, assigned_partitions: Iterable[AssignedPartition]) -> None:
        """Remove partitions."""
        for assigned in assigned_partitions:
            self._assigned_partitions.pop((assigned.topic, assigned.partition), None)


class Prefetched:
    """Received deliveries that are not handed over yet: more than requested, or of a blocked partition."""

    def __init__(self) -> None:
        self._deliveries: list[Delivery] = []

    def __len__(self) -> int:
        return len(self._deliveries)

    def add(self, delivery: Delivery) -> None:
        """Append a delivery."""
        self._deliveries.append(delivery)

    def counts(self) -> Counter[str]:
        """Return the number of deliveries by partition."""
        return Counter(delivery.partition for delivery in self._deliveries)

    def take(self, limit: int, blocked: AbstractSet[str]) -> list[Delivery]:
        """Hand over the first deliveries of partitions that are not blocked."""
        accepted: list[Delivery] = []
        left: list[Delivery] = []
        for delivery in self._deliveries:
            (accepted if len(accepted) < limit and delivery.partition not in blocked else left).append(delivery)
        self._deliveries = left
        return accepted

    def drop(self, assigned_partitions: AbstractSet[str]) -> None:
        """Remove the deliveries of revoked partitions."""
        self._deliveries = [delivery for delivery in self._deliveries if delivery.partition not in assigned_partitions]


# confluent-kafka's list for a name that is not UTF-8 has a hole, and reading the hole ends the process. The list comes
# with an exception: a call from C always finds it, but CPython optimises a plain call that runs often, and misses it.
_headers_of = methodcaller("headers")


def _read_headers(message: Any) -> dict[str, bytes]:
    try:
        found = _headers_of(message)
    except (UnicodeDecodeError, SystemError):
        # A second call would return the list.
        return {UNREADABLE: b"a name is not UTF-8"}
    return {name: value or b"" for name, value in found or ()}
