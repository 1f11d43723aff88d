"""Kafka as a source: a member of the consumer group with the consumer's name.

An outage of Kafka does not count as a lost connection: librdkafka reconnects, and no deliveries arrive meanwhile.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from collections.abc import Set as AbstractSet
from concurrent.futures import ThreadPoolExecutor
from itertools import count
from typing import ParamSpec, Self, TypeVar

from outrider.brokers.base import Revoked
from outrider.brokers.kafka.group_member import GroupMember
from outrider.brokers.kafka.producer import driver, log
from outrider.brokers.kafka.settings import complete_consumer, milliseconds, parse
from outrider.errors import Transient
from outrider.event import Delivery

START_SECONDS_MAX = 5.0
RELEASE_SECONDS_MAX = 10.0
LOST_SECONDS_MAX = 1.0

P = ParamSpec("P")
T = TypeVar("T")


class KafkaSource:
    """Receives a consumer's deliveries from Kafka. `settings` are librdkafka's.

    A position is `topic/partition/offset`. A partition gets a new name with each assignment to the process::

        source = KafkaSource("localhost:9092", "billing", ["orders"])
    """

    def __init__(
        self, bootstrap: str, consumer: str, topics: Sequence[str], settings: Mapping[str, str] | None = None
    ) -> None:
        self._settings = complete_consumer(bootstrap, consumer, settings or {})
        self._topics = list(topics)
        # After the poll interval the group no longer waits for this member.
        poll_seconds = milliseconds(self._settings, "max.poll.interval.ms") / 1000
        self._release_seconds = min(RELEASE_SECONDS_MAX, poll_seconds / 2)
        self._serials = count(1)
        self._member: GroupMember | None = None
        self._thread: ThreadPoolExecutor | None = None
        self._ended = ""

    @classmethod
    def from_url(cls, url: str, consumer: str, topics: Sequence[str]) -> Self:
        """Make a source from `kafka://host:port,host:port?setting=value`.

        >>> KafkaSource.from_url("kafka://localhost:9092?session.timeout.ms=6000", "billing", ["orders"]).topics
        ['orders']
        """
        bootstrap, settings = parse(url)
        return cls(bootstrap, consumer, topics, settings)

    @property
    def topics(self) -> list[str]:
        """Return the topics of the source."""
        return list(self._topics)

    async def start(self, revoked: Revoked) -> None:
        """Connect and join the group."""
        await self.close()
        self._ended = ""
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="outrider-kafka-source")
        loop = asyncio.get_running_loop()

        def release(partitions: frozenset[str], lost: bool) -> None:
            _wait_for(loop, revoked, partitions, LOST_SECONDS_MAX if lost else self._release_seconds)

        self._member = await self._run(GroupMember, self._settings, self._topics, release, self._serials)
        try:
            await self._run(self._member.join, START_SECONDS_MAX)
        except BaseException:
            await self.close()
            raise

    async def receive(self, limit: int, paused: AbstractSet[str]) -> Sequence[Delivery]:
        """Return the received deliveries, and serve librdkafka's callbacks."""
        if (member := self._member) is None:
            raise Transient(self._ended or "the source is not started, or was closed; start it")
        try:
            await self._run(member.fill, limit, paused)
        except Transient as error:
            # The member may close during the poll; then the next poll reports the reason.
            self._ended = str(error)
            await self.close()
            raise
        return member.take(limit, paused)

    def ack(self, delivery: Delivery) -> None:
        """Mark a delivery as done. The ack is ignored if the partition has been revoked."""
        if self._member is not None:
            self._member.acked.append(delivery.token)

    async def close(self) -> None:
        """Commit the positions and leave the group, so that other members need not wait for the session to expire."""
        member, self._member = self._member, None
        try:
            if member is not None:
                await self._run(member.leave)
        finally:
            thread, self._thread = self._thread, None
            if thread is not None:
                thread.shutdown(wait=False)

    async def _run(self, work: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        """Run work on the thread that owns the consumer."""
        try:
            return await asyncio.get_running_loop().run_in_executor(self._thread, lambda: work(*args, **kwargs))
        except driver().KafkaException as error:
            raise Transient(f"the consumer failed: {error.args[0].str()}; start it again") from error


def _wait_for(loop: asyncio.AbstractEventLoop, revoked: Revoked, partitions: frozenset[str], seconds: float) -> None:
    """Ask the engine, from the consumer's thread, to release partitions; wait for a bounded time."""

    async def release() -> None:
        await revoked(partitions)

    released = asyncio.run_coroutine_threadsafe(release(), loop)
    try:
        released.result(seconds)
    except TimeoutError:
        released.cancel()
        log.warning(
            "partitions were revoked while their events are being handled", extra={"partitions": sorted(partitions)}
        )
