"""Kafka as a source: a member of the group that has the consumer's name, with partitions as shards.

Kafka that is away for a while is no loss of connection here: librdkafka reconnects, and nothing comes meanwhile.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from collections.abc import Set as AbstractSet
from concurrent.futures import ThreadPoolExecutor
from itertools import count
from typing import ParamSpec, Self, TypeVar

from outrider.brokers.kafka import consumer_settings
from outrider.brokers.kafka.member import Member
from outrider.brokers.kafka.session import driver, log
from outrider.brokers.kafka.settings import parse
from outrider.delivery import Delivery
from outrider.errors import Transient
from outrider.source import Revoked

START_SECONDS_MAX = 5.0
LET_GO_SECONDS_MAX = 10.0
LOST_SECONDS_MAX = 1.0

P = ParamSpec("P")
T = TypeVar("T")


class KafkaSource:
    """Receives a consumer's deliveries from Kafka. `settings` are librdkafka's.

    A place is `topic/partition/offset`, and a shard is a partition for as long as it is assigned to this process::

        source = KafkaSource("localhost:9092", "billing", ["orders"])
    """

    def __init__(
        self, bootstrap: str, consumer: str, topics: Sequence[str], settings: Mapping[str, str] | None = None
    ) -> None:
        self._settings = consumer_settings.complete(bootstrap, consumer, settings or {})
        self._topics = list(topics)
        # Past the poll interval the group would not wait for this member any more.
        poll_seconds = consumer_settings.milliseconds(self._settings, "max.poll.interval.ms") / 1000
        self._let_go_seconds = min(LET_GO_SECONDS_MAX, poll_seconds / 2)
        self._serials = count(1)
        self._member: Member | None = None
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
        """Return where its deliveries come from."""
        return list(self._topics)

    async def start(self, revoked: Revoked) -> None:
        """Connect and join the group."""
        await self.close()
        self._ended = ""
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="outrider-kafka-source")
        loop = asyncio.get_running_loop()

        def let_go(shards: frozenset[str], lost: bool) -> None:
            _wait_for(loop, revoked, shards, LOST_SECONDS_MAX if lost else self._let_go_seconds)

        self._member = await self._run(Member, self._settings, self._topics, let_go, self._serials)
        try:
            await self._run(self._member.join, START_SECONDS_MAX)
        except BaseException:
            await self.close()
            raise

    async def receive(self, limit: int, paused: AbstractSet[str]) -> Sequence[Delivery]:
        """Return what has come, and let librdkafka do its duties."""
        if (member := self._member) is None:
            raise Transient(self._ended or "the source is not started, or was closed; start it")
        try:
            await self._run(member.fill, limit, paused)
        except Transient as error:
            # Whoever looked may look away while it closes: then the next look tells why.
            self._ended = str(error)
            await self.close()
            raise
        return member.take(limit, paused)

    def ack(self, delivery: Delivery) -> None:
        """Note that a delivery is done. If its shard is gone, nobody asks for it any more."""
        if self._member is not None:
            self._member.acked.append(delivery.token)

    async def close(self) -> None:
        """Commit what is done, and leave the group, so that others need not wait for the session to end."""
        member, self._member = self._member, None
        try:
            if member is not None:
                await self._run(member.leave)
        finally:
            thread, self._thread = self._thread, None
            if thread is not None:
                thread.shutdown(wait=False)

    async def _run(self, work: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        """Run on the thread that the consumer belongs to."""
        try:
            return await asyncio.get_running_loop().run_in_executor(self._thread, lambda: work(*args, **kwargs))
        except driver().KafkaException as error:
            raise Transient(f"the consumer is in trouble: {error.args[0].str()}; start it again") from error


def _wait_for(loop: asyncio.AbstractEventLoop, revoked: Revoked, shards: frozenset[str], seconds: float) -> None:
    """Ask the engine, from the consumer's thread, to let go of shards; wait until it has, but not for ever."""

    async def let_go() -> None:
        await revoked(shards)

    asked = asyncio.run_coroutine_threadsafe(let_go(), loop)
    try:
        asked.result(seconds)
    except TimeoutError:
        asked.cancel()
        log.warning("shards are given up while something of them is being handled", extra={"shards": sorted(shards)})
