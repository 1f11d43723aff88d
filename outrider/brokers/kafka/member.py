"""A member of a consumer group: librdkafka's consumer, on the one thread that may call it.

Rebalances happen inside a poll. Before a partition goes, the engine is asked to let go of it, and what is done of it is
committed; so the next owner begins where this one ended. A paused partition loses what librdkafka has fetched of it, so
pausing is put off until enough of it has been kept.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from collections.abc import Set as AbstractSet
from typing import Any

from outrider.brokers.kafka.assignment import Assignment, Kept, Shard
from outrider.brokers.kafka.session import driver, log
from outrider.brokers.kafka.trouble import check_topic, raise_if_hopeless
from outrider.brokers.kafka.verdicts import MISSING
from outrider.brokers.progress import AHEAD_MAX, Progress
from outrider.delivery import Delivery
from outrider.errors import BadSetting, Transient, Unreachable

WAIT_SECONDS = 0.1
LEAVE_SECONDS_MAX = 3.0
RETRY_SECONDS = 0.05
NOT_NOW = {"_NO_OFFSET", "ILLEGAL_GENERATION", "REBALANCE_IN_PROGRESS"}
"""A commit that came to nothing, and no trouble: there was nothing new, or a rebalance was under way."""
KEPT_MAX = 100
"""How many deliveries of a blocked shard are kept before it is paused."""

Token = tuple[Progress, int]
LetGo = Callable[[frozenset[str], bool], None]
"""Asks the engine to let go of shards; true if they are lost already, so that there is little use in waiting."""


class Member:
    """One consumer in use. Everything but `take` and what is added to `acked` happens on its own thread."""

    def __init__(
        self, settings: Mapping[str, Any], topics: Sequence[str], let_go: LetGo, serials: Iterator[int]
    ) -> None:
        self._driver, self._topics, self._let_go = driver(), list(topics), let_go
        self._where = settings["bootstrap.servers"]
        self.acked: deque[Token] = deque()
        self._assignment, self._kept = Assignment(serials), Kept()
        self._blocked: AbstractSet[str] = frozenset()
        self._leaving = self._answered = self._awaited = False
        self._fatal = ""
        self._troubles: dict[str, str] = {}
        callbacks = {"error_cb": self._troubled, "on_commit": self._told}
        try:
            self._consumer = self._driver.Consumer({**settings, **callbacks}, logger=log)
        except self._driver.KafkaException as error:
            raise BadSetting(f"librdkafka refuses a setting: {error.args[0].str()}") from error

    def join(self, seconds: float) -> None:
        """Look for the topics, and ask for a share of them. The share comes with a later poll."""
        try:
            for topic in self._topics:
                there = check_topic(self._consumer.list_topics(topic, timeout=seconds).topics[topic])
                self._awaited = self._awaited or not there
        except self._driver.KafkaException as error:
            # A poll brings what went wrong with the connection.
            self._consumer.poll(0)
            why = next(iter(self._troubles.values()), error.args[0].str())
            raise Unreachable(
                f"Kafka at {self._where} does not answer ({why}); check the addresses, that a broker runs there, and "
                "the security settings"
            ) from error
        self._consumer.subscribe(self._topics, on_assign=self._assigned, on_revoke=self._revoked, on_lost=self._lost)

    def fill(self, limit: int, paused: AbstractSet[str]) -> None:
        """Tell what is due, serve rebalances, and keep what has come; wait a moment if nothing can be handed over."""
        if self._fatal:
            raise Transient(f"the consumer cannot go on ({self._fatal}); start it again")
        try:
            self._fill(limit, paused)
        except BaseException as error:
            # A rebalance may be half done, and nobody may be waiting for this poll any more: so the next one tells.
            self._fatal = str(error) or repr(error)
            raise

    def _fill(self, limit: int, paused: AbstractSet[str]) -> None:
        self._note_acks()
        self._tell(self._assignment)
        counts = self._kept.counts()
        blocked = self._blocked = paused | self._far_ahead(counts) if limit > 0 else self._assignment.names
        self._hold_back(blocked, counts)
        ready = sum(count for shard, count in counts.items() if shard not in blocked)
        room = max(limit - ready, 1) if self._assignment.names - blocked else KEPT_MAX
        self._poll(0.0 if ready else WAIT_SECONDS, room)
        if self._fatal:
            raise Transient(f"the consumer cannot go on ({self._fatal}); start it again")

    def take(self, limit: int, paused: AbstractSet[str]) -> list[Delivery]:
        """Hand over what was kept. Called between polls, so that a poll nobody waits for any more loses nothing."""
        return self._kept.take(limit, self._blocked | paused)

    def leave(self) -> None:
        """Commit what is done, and leave the group."""
        self._leaving = True
        self._note_acks()
        self._tell(self._assignment)
        self._commit(LEAVE_SECONDS_MAX)
        # Closing commits what is stored once more, and if Kafka is away it would wait as long as a session lasts.
        nothing = self._driver.OFFSET_INVALID
        partitions = [self._driver.TopicPartition(shard.topic, shard.partition, nothing) for shard in self._assignment]
        if partitions:
            self._consumer.store_offsets(offsets=partitions)
        self._consumer.close()

    def _commit(self, seconds: float) -> None:
        """Commit and wait for it, for a while: in the middle of a rebalance it is refused until that is over."""
        give_up = time.monotonic() + seconds
        while time.monotonic() < give_up and (offsets := self._untold(self._assignment)):
            self._answered = False
            self._consumer.commit(offsets=offsets, asynchronous=True)
            while not self._answered and time.monotonic() < give_up:
                self._consumer.poll(RETRY_SECONDS)
            if self._untold(self._assignment):
                self._consumer.poll(RETRY_SECONDS)

    def _poll(self, seconds: float, room: int) -> None:
        # A batch would wait for its last message; so the first one is waited for, and then the others are there or not.
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
        shard = self._assignment.find(topic, partition)
        if shard is None:
            # Its partition was taken away by the same poll, and the next owner gets it.
            return
        headers = {name: value or b"" for name, value in message.headers() or ()}
        place, token = f"{topic}/{partition}/{offset}", (shard.progress, shard.progress.received(offset))
        self._kept.add(Delivery(topic, message.key(), message.value() or b"", headers, shard.name, place, token))

    def _hold_back(self, blocked: AbstractSet[str], counts: Mapping[str, int]) -> None:
        """Pause what is blocked and has enough kept; let go on what is not blocked and has been handed over."""
        pause = [
            shard
            for shard in self._assignment
            if not shard.paused and shard.name in blocked and counts.get(shard.name, 0) >= KEPT_MAX
        ]
        resume = [
            shard
            for shard in self._assignment
            if shard.paused and shard.name not in blocked and not counts.get(shard.name)
        ]
        if pause:
            self._consumer.pause(self._partitions(pause))
        if resume:
            self._consumer.resume(self._partitions(resume))
        for shard in (*pause, *resume):
            shard.paused = not shard.paused

    def _far_ahead(self, counts: Mapping[str, int]) -> frozenset[str]:
        """Name the shards with too much behind something undone: it is all remembered, and would all come again."""
        return frozenset(
            shard.name for shard in self._assignment if len(shard.progress) - counts.get(shard.name, 0) >= AHEAD_MAX
        )

    def _note_acks(self) -> None:
        while self.acked:
            progress, number = self.acked.popleft()
            progress.done(number)

    def _tell(self, shards: Iterable[Shard]) -> None:
        """Let librdkafka know how far shards are done. It commits that by itself, when the group's state allows it.

        A commit of our own might meet a rebalance under way; it would be refused, and could cost us all we have.
        """
        if offsets := self._untold(shards):
            self._consumer.store_offsets(offsets=offsets)

    def _told(self, error: Any, partitions: Sequence[Any]) -> None:
        """Hear of a commit. After one that failed, the same and more is committed the next time."""
        self._answered = True
        if error is not None:
            if error.name() not in NOT_NOW:
                self._troubled(error)
            return
        for partition in partitions:
            shard = self._assignment.find(partition.topic, partition.partition)
            # A partition with nothing new is listed too, without an offset.
            if shard is not None and partition.error is None and partition.offset >= 0:
                shard.progress.tell(partition.offset)

    def _untold(self, shards: Iterable[Shard]) -> list[Any]:
        return [
            self._driver.TopicPartition(shard.topic, shard.partition, place)
            for shard in shards
            if (place := shard.progress.untold) is not None
        ]

    def _partitions(self, shards: Iterable[Shard]) -> list[Any]:
        return [self._driver.TopicPartition(shard.topic, shard.partition) for shard in shards]

    def _assigned(self, consumer: Any, partitions: Sequence[Any]) -> None:
        for partition in partitions:
            self._assignment.add(partition.topic, partition.partition)
        consumer.incremental_assign(partitions)
        # librdkafka remembers that a partition was paused when it went.
        consumer.resume(partitions)

    def _revoked(self, consumer: Any, partitions: Sequence[Any]) -> None:
        shards = self._found(partitions)
        try:
            # Who leaves has nothing under way, and has told everything.
            if not self._leaving:
                self._let_go(frozenset(shard.name for shard in shards), False)
                self._note_acks()
                self._tell(shards)
        finally:
            self._forget(shards)
            consumer.incremental_unassign(partitions)

    def _lost(self, consumer: Any, partitions: Sequence[Any]) -> None:
        """Another process has them by now: there is nothing left to commit."""
        shards = self._found(partitions)
        self._forget(shards)
        try:
            if not self._leaving:
                self._let_go(frozenset(shard.name for shard in shards), True)
        finally:
            consumer.incremental_unassign(partitions)

    def _found(self, partitions: Sequence[Any]) -> list[Shard]:
        found = (self._assignment.find(partition.topic, partition.partition) for partition in partitions)
        return [shard for shard in found if shard is not None]

    def _forget(self, shards: Sequence[Shard]) -> None:
        self._assignment.remove(shards)
        self._kept.drop(frozenset(shard.name for shard in shards))

    def _troubled(self, error: Any) -> None:
        """Only a fatal error ends a consumer. librdkafka deals with the others; each is told once, till all is well."""
        name, text = error.name(), f"{error.str()} ({error.name()})"
        if error.fatal():
            self._fatal = text
        # A topic that was missing at the start has been told about then, with what we do about it.
        if name not in self._troubles and not (self._awaited and name in MISSING):
            log.warning("Kafka reports trouble", extra={"error": text})
        self._troubles[name] = text
