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
from typing import Any

from outrider.brokers.kafka.errors import MISSING
from outrider.brokers.kafka.producer import check_topic, driver, log, raise_if_hopeless
from outrider.brokers.offsets import AHEAD_MAX, OffsetTracker
from outrider.errors import InvalidSetting, Transient, Unreachable
from outrider.event import Delivery

WAIT_SECONDS = 0.1

LEAVE_SECONDS_MAX = 3.0

RETRY_SECONDS = 0.05

NOT_NOW = {"_NO_OFFSET", "ILLEGAL_GENERATION", "REBALANCE_IN_PROGRESS"}
"""Commit errors that are harmless: no new offsets, or a rebalance in progress."""

KEPT_MAX = 100
"""Number of deliveries of a blocked partition that are buffered before the partition is paused."""

Token = tuple[OffsetTracker, int]

LetGo = Callable[[frozenset[str], bool], None]
"""Asks the engine to release partitions; true if the partitions are lost already, so that waiting is of little use."""


class GroupMember:
    """A consumer in use. All methods except `take` run on the consumer's thread; `acked` may be filled from outside."""

    def __init__(
        self, settings: Mapping[str, Any], topics: Sequence[str], let_go: LetGo, serials: Iterator[int]
    ) -> None:
        self._driver, self._topics, self._let_go = driver(), list(topics), let_go
        self._where = settings["bootstrap.servers"]
        self.acked: deque[Token] = deque()
        self._assignment, self._kept = Assignment(serials), Prefetched()
        self._blocked: AbstractSet[str] = frozenset()
        self._leaving = self._answered = self._awaited = False
        self._fatal = ""
        self._troubles: dict[str, str] = {}
        callbacks = {"error_cb": self._troubled, "on_commit": self._told}
        try:
            self._consumer = self._driver.Consumer({**settings, **callbacks}, logger=log)
        except self._driver.KafkaException as error:
            raise InvalidSetting(f"librdkafka refuses a setting: {error.args[0].str()}") from error

    def join(self, seconds: float) -> None:
        """Look for the topics and subscribe. The assignment comes with a later poll."""
        try:
            for topic in self._topics:
                there = check_topic(self._consumer.list_topics(topic, timeout=seconds).topics[topic])
                self._awaited = self._awaited or not there
        except self._driver.KafkaException as error:
            # A poll reports connection errors.
            self._consumer.poll(0)
            why = next(iter(self._troubles.values()), error.args[0].str())
            raise Unreachable(
                f"Kafka at {self._where} does not answer ({why}); check the addresses, that a broker runs there, and "
                "the security settings"
            ) from error
        self._consumer.subscribe(self._topics, on_assign=self._assigned, on_revoke=self._revoked, on_lost=self._lost)

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
        self._note_acks()
        self._tell(self._assignment)
        counts = self._kept.counts()
        blocked = self._blocked = paused | self._far_ahead(counts) if limit > 0 else self._assignment.names
        self._hold_back(blocked, counts)
        ready = sum(count for assigned, count in counts.items() if assigned not in blocked)
        room = max(limit - ready, 1) if self._assignment.names - blocked else KEPT_MAX
        self._poll(0.0 if ready else WAIT_SECONDS, room)
        if self._fatal:
            raise Transient(f"the consumer cannot go on ({self._fatal}); start it again")

    def take(self, limit: int, paused: AbstractSet[str]) -> list[Delivery]:
        """Hand over buffered deliveries. Runs between polls, so that a cancelled poll loses no delivery."""
        return self._kept.take(limit, self._blocked | paused)

    def leave(self) -> None:
        """Commit the offsets that are done, and leave the group."""
        self._leaving = True
        self._note_acks()
        self._tell(self._assignment)
        self._commit(LEAVE_SECONDS_MAX)
        # Closing commits the stored offsets again. Without Kafka, closing would wait for a whole session timeout.
        nothing = self._driver.OFFSET_INVALID
        partitions = [
            self._driver.TopicPartition(assigned.topic, assigned.partition, nothing) for assigned in self._assignment
        ]
        if partitions:
            self._consumer.store_offsets(offsets=partitions)
        self._consumer.close()

    def _commit(self, seconds: float) -> None:
        """Commit and wait for a bounded time: Kafka rejects commits until a rebalance is over."""
        give_up = time.monotonic() + seconds
        while time.monotonic() < give_up and (offsets := self._untold(self._assignment)):
            self._answered = False
            self._consumer.commit(offsets=offsets, asynchronous=True)
            while not self._answered and time.monotonic() < give_up:
                self._consumer.poll(RETRY_SECONDS)
            if self._untold(self._assignment):
                self._consumer.poll(RETRY_SECONDS)

    def _poll(self, seconds: float, room: int) -> None:
        # A batch call would wait for its last message. So wait for the first message, then take the rest if present.
        first = self._consumer.poll(seconds)
        if first is None:
            return
        self._keep_all([first])
        if room > 1:
            self._keep_all(self._consumer.consume(room - 1, timeout=0))

    def _keep_all(self, messages: Sequence[Any]) -> None:
        errors = [message.error() for message in messages if message.error() is not None]
        for message in messages:
            if message.error() is None:
                self._keep(message)
                self._troubles.clear()
        for error in errors:
            self._troubled(error)
            raise_if_hopeless(error)

    def _keep(self, message: Any) -> None:
        topic, partition, offset = message.topic(), message.partition(), message.offset()
        assigned = self._assignment.find(topic, partition)
        if assigned is None:
            # The same poll revoked the partition; the next owner gets the message.
            return
        headers = {name: value or b"" for name, value in message.headers() or ()}
        place, token = f"{topic}/{partition}/{offset}", (assigned.progress, assigned.progress.received(offset))
        self._kept.add(Delivery(topic, message.key(), message.value() or b"", headers, assigned.name, place, token))

    def _hold_back(self, blocked: AbstractSet[str], counts: Mapping[str, int]) -> None:
        """Pause blocked partitions with enough buffered deliveries; resume unblocked ones with an empty buffer."""
        pause = [
            assigned
            for assigned in self._assignment
            if not assigned.paused and assigned.name in blocked and counts.get(assigned.name, 0) >= KEPT_MAX
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

    def _note_acks(self) -> None:
        while self.acked:
            progress, number = self.acked.popleft()
            progress.done(number)

    def _tell(self, assigned_partitions: Iterable[AssignedPartition]) -> None:
        """Store the finished offsets in librdkafka, which commits them when the state of the group allows a commit.

        An explicit commit could collide with a rebalance; Kafka would reject the commit and could revoke all
        partitions.
        """
        if offsets := self._untold(assigned_partitions):
            self._consumer.store_offsets(offsets=offsets)

    def _told(self, error: Any, partitions: Sequence[Any]) -> None:
        """Handle a commit result. After a failed commit, the next commit includes the same offsets."""
        self._answered = True
        if error is not None:
            if error.name() not in NOT_NOW:
                self._troubled(error)
            return
        for partition in partitions:
            assigned = self._assignment.find(partition.topic, partition.partition)
            # A partition without new offsets is listed too, without an offset.
            if assigned is not None and partition.error is None and partition.offset >= 0:
                assigned.progress.tell(partition.offset)

    def _untold(self, assigned_partitions: Iterable[AssignedPartition]) -> list[Any]:
        return [
            self._driver.TopicPartition(assigned.topic, assigned.partition, place)
            for assigned in assigned_partitions
            if (place := assigned.progress.untold) is not None
        ]

    def _partitions(self, assigned_partitions: Iterable[AssignedPartition]) -> list[Any]:
        return [self._driver.TopicPartition(assigned.topic, assigned.partition) for assigned in assigned_partitions]

    def _assigned(self, consumer: Any, partitions: Sequence[Any]) -> None:
        for partition in partitions:
            self._assignment.add(partition.topic, partition.partition)
        consumer.incremental_assign(partitions)
        # librdkafka remembers the paused state of a revoked partition.
        consumer.resume(partitions)

    def _revoked(self, consumer: Any, partitions: Sequence[Any]) -> None:
        assigned_partitions = self._found(partitions)
        try:
            # A leaving member has no delivery in progress and has stored all offsets.
            if not self._leaving:
                self._let_go(frozenset(assigned.name for assigned in assigned_partitions), False)
                self._note_acks()
                self._tell(assigned_partitions)
        finally:
            self._forget(assigned_partitions)
            consumer.incremental_unassign(partitions)

    def _lost(self, consumer: Any, partitions: Sequence[Any]) -> None:
        """Forget lost partitions. Another process owns them already, so no commit is possible."""
        assigned_partitions = self._found(partitions)
        self._forget(assigned_partitions)
        try:
            if not self._leaving:
                self._let_go(frozenset(assigned.name for assigned in assigned_partitions), True)
        finally:
            consumer.incremental_unassign(partitions)

    def _found(self, partitions: Sequence[Any]) -> list[AssignedPartition]:
        found = (self._assignment.find(partition.topic, partition.partition) for partition in partitions)
        return [assigned for assigned in found if assigned is not None]

    def _forget(self, assigned_partitions: Sequence[AssignedPartition]) -> None:
        self._assignment.remove(assigned_partitions)
        self._kept.drop(frozenset(assigned.name for assigned in assigned_partitions))

    def _troubled(self, error: Any) -> None:
        """End the consumer after a fatal error. librdkafka handles other errors; each is logged once until recovery."""
        name, text = error.name(), f"{error.str()} ({error.name()})"
        if error.fatal():
            self._fatal = text
        # A topic that was missing at the start has been logged then, with the consequence.
        if name not in self._troubles and not (self._awaited and name in MISSING):
            log.warning("Kafka reports trouble", extra={"error": text})
        self._troubles[name] = text


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
        taken: list[Delivery] = []
        left: list[Delivery] = []
        for delivery in self._deliveries:
            (taken if len(taken) < limit and delivery.partition not in blocked else left).append(delivery)
        self._deliveries = left
        return taken

    def drop(self, assigned_partitions: AbstractSet[str]) -> None:
        """Remove the deliveries of revoked partitions."""
        self._deliveries = [delivery for delivery in self._deliveries if delivery.partition not in assigned_partitions]
