"""The bench of the source contract suite: publishes messages, makes sources, and reads deliveries."""

from __future__ import annotations

import asyncio
from abc import ABC, abstractmethod
from collections import defaultdict
from collections.abc import AsyncIterator, Callable, Iterable, Sequence
from collections.abc import Set as AbstractSet
from contextlib import asynccontextmanager
from typing import ClassVar
from uuid import uuid4

from outrider.brokers.base import Source
from outrider.event import Delivery, Message

TIMEOUT_SECONDS = 30.0

POLL_SECONDS = 0.01

LOOKS = 10
"""The number of polls with which a test checks that no delivery comes."""


class SourceBench(ABC):
    """A broker to consume from. `topics` are two empty topics that are known to no other test.

    `places`: a delivery has a position, which is stable across redeliveries. `single_acks`: the broker stores every ack
    separately; other brokers store the position up to which everything is done. `shares`: sources of one consumer never
    have the same delivery at the same time; without sharing, every source receives everything.
    """

    places: ClassVar[bool] = True
    single_acks: ClassVar[bool] = False
    shares: ClassVar[bool] = True

    def __init__(self, topics: tuple[str, str]) -> None:
        self.topics = topics

    @abstractmethod
    async def publish(self, messages: Sequence[Message]) -> None:
        """Publish messages, in order, by any means; return when the broker has stored them."""

    @abstractmethod
    def source(self, consumer: str, topics: Sequence[str]) -> Source:
        """Make a source that has not been started."""

    def messages(self, count: int, *, keys: int = 5, topic: int = 0, start: int = 0) -> list[Message]:
        """Make messages whose header `n` is their number."""
        return [message(n, topic=self.topics[topic], key=f"k{n % keys}") for n in range(start, start + count)]


def message(number: int, *, topic: str, key: str, body: bytes | None = None) -> Message:
    """Make a message with a number in the header `n`.

    >>> message(3, topic="orders", key="A").headers["n"]
    '3'
    """
    name = str(uuid4())
    headers = {"message_id": name, "event_type": "order.changed", "key": key, "n": str(number), "odd": "naïve ☂"}
    return Message(name, topic, key, None, body if body is not None else b'{"n":%d}' % number, headers)


def numbers(deliveries: Iterable[Delivery]) -> list[int]:
    """Return the numbers of deliveries in order of receipt."""
    return [int(delivery.headers["n"]) for delivery in deliveries]


def by_key(deliveries: Iterable[Delivery]) -> dict[bytes | None, list[int]]:
    """Return the numbers of each key in order of receipt."""
    found: dict[bytes | None, list[int]] = defaultdict(list)
    for delivery in deliveries:
        found[delivery.key].append(int(delivery.headers["n"]))
    return found


class Reader:
    """Receives from a source and stores the deliveries, without acks.

    `held` has the deliveries that were not revoked.
    """

    def __init__(self, source: Source) -> None:
        self.source = source
        self.received: list[Delivery] = []
        self.held: list[Delivery] = []
        self.revoked: set[str] = set()
        self.may_release = asyncio.Event()
        self.may_release.set()

    async def on_revoked(self, partitions: frozenset[str]) -> None:
        """Record that partitions are revoked, and keep them until the test releases them."""
        self.revoked |= partitions
        await self.may_release.wait()
        self.held = [delivery for delivery in self.held if delivery.partition not in partitions]

    async def receive(self, limit: int = 1000, paused: AbstractSet[str] = frozenset()) -> list[Delivery]:
        """Poll once."""
        found = list(await self.source.receive(limit, paused))
        self.received += found
        self.held += found
        return found

    async def until(self, count: int, *, limit: int = 1000, paused: AbstractSet[str] = frozenset()) -> list[Delivery]:
        """Poll until a total number of deliveries is reached; return the deliveries of this call."""
        before = len(self.received)
        async with asyncio.timeout(TIMEOUT_SECONDS):
            while len(self.received) < count:
                await self.receive(limit, paused)
        return self.received[before:]

    async def looks(self, limit: int = 1000, paused: AbstractSet[str] = frozenset()) -> list[Delivery]:
        """Poll several times; return the deliveries."""
        return [delivery for _ in range(LOOKS) for delivery in await self.receive(limit, paused)]

    def ack(self, deliveries: Iterable[Delivery]) -> None:
        """Ack in the given order."""
        for delivery in deliveries:
            self.source.ack(delivery)


@asynccontextmanager
async def reading(bench: SourceBench, consumer: str = "billing", topics: Sequence[str] = ()) -> AsyncIterator[Reader]:
    """Start a source of a consumer, by default on the first topic; close the source at the end."""
    reader = Reader(bench.source(consumer, topics or bench.topics[:1]))
    await reader.source.start(reader.on_revoked)
    try:
        yield reader
    finally:
        await reader.source.close()


@asynccontextmanager
async def pumping(*readers: Reader) -> AsyncIterator[None]:
    """Let several sources receive concurrently until the end of the block."""
    stopping = asyncio.Event()

    async def receive_all(reader: Reader) -> None:
        while not stopping.is_set():
            await reader.receive()

    async with asyncio.TaskGroup() as group:
        for reader in readers:
            group.create_task(receive_all(reader))
        try:
            yield
        finally:
            stopping.set()


async def eventually(true: Callable[[], object]) -> None:
    """Poll until a condition is true: sources send no signal."""
    async with asyncio.timeout(TIMEOUT_SECONDS):
        while not true():  # noqa: ASYNC110
            await asyncio.sleep(POLL_SECONDS)


async def left(bench: SourceBench) -> list[int]:
    """Return the numbers that a new source still gets: all numbers before messages published just now."""
    start, count = 1_000_000, 20
    await bench.publish(bench.messages(count, keys=count, start=start))
    async with reading(bench) as reader:
        async with asyncio.timeout(TIMEOUT_SECONDS):
            while sum(n >= start for n in numbers(reader.received)) < count:
                await reader.receive()
    return sorted(n for n in numbers(reader.received) if n < start)


class MovingRules:
    """A partition is released before another process takes it."""

    async def test_a_shard_moves_only_when_revoked_has_returned(self, bench: SourceBench) -> None:
        await bench.publish(bench.messages(60, keys=30))
        async with reading(bench) as first:
            await first.until(60)
            first.may_release.clear()
            async with reading(bench) as second, pumping(first, second):
                await eventually(lambda: first.revoked)
                moved = [delivery for delivery in first.received if delivery.partition in first.revoked]
                assert 0 < len(moved) < 60
                assert second.received == []
                first.may_release.set()
                await eventually(lambda: len(second.received) >= len(moved))
                assert sorted(numbers(second.received)) == sorted(numbers(moved))
                assert sorted(numbers([*first.held, *second.held])) == list(range(60))

    async def test_acks_given_while_a_shard_is_revoked_still_count(self, bench: SourceBench) -> None:
        await bench.publish(bench.messages(60, keys=30))
        async with reading(bench) as first:
            await first.until(60)
            first.may_release.clear()
            async with reading(bench) as second, pumping(first, second):
                await eventually(lambda: first.revoked)
                first.ack(first.received)
                first.may_release.set()
                await bench.publish(bench.messages(60, keys=30, start=60))
                await eventually(lambda: len(first.received) + len(second.received) >= 120)
                assert sorted(numbers([*first.received, *second.received])) == list(range(120))
                assert numbers(second.received)

    async def test_an_ack_that_comes_after_a_shard_has_moved_is_ignored(self, bench: SourceBench) -> None:
        await bench.publish(bench.messages(60, keys=30))
        async with reading(bench) as first:
            await first.until(60)
            async with reading(bench) as second:
                async with pumping(first, second):
                    await eventually(lambda: 0 < _count(first, first.revoked) <= len(second.received))
                moved = numbers(second.received)
                first.ack(first.received)
                await first.source.close()
            async with reading(bench) as third:
                await third.until(len(moved))
                assert await third.looks() == []
        assert sorted(numbers(third.received)) == sorted(moved)

    async def test_a_shard_that_was_paused_when_it_went_is_not_when_it_comes_back(self, bench: SourceBench) -> None:
        await bench.publish(bench.messages(2000, keys=30))
        async with reading(bench) as first:
            await first.until(1)
            for _ in range(2):
                paused = {delivery.partition for delivery in first.held}
                await first.looks(0)
                await first.looks(5, paused)
            async with reading(bench) as second:
                # During the pause the first source only takes part in the rebalance.
                while not second.received:
                    await first.receive(0)
                    await second.receive()
            async with asyncio.timeout(TIMEOUT_SECONDS):
                while set(numbers(first.held)) != set(range(2000)):
                    await first.receive()


def _count(reader: Reader, partitions: AbstractSet[str]) -> int:
    return sum(delivery.partition in partitions for delivery in reader.received)


class ReceivingRules:
    """Published messages are received."""

    async def test_a_message_is_received_as_it_was_sent(self, bench: SourceBench) -> None:
        [sent] = bench.messages(1)
        await bench.publish([sent])
        async with reading(bench) as reader:
            [found] = await reader.until(1)
        assert (found.topic, found.key, found.body) == (sent.topic, sent.key.encode(), sent.body)
        assert found.headers.items() >= {name: text.encode() for name, text in sent.headers.items()}.items()
        assert found.partition

    async def test_everything_is_received_once_and_in_order_per_key(self, bench: SourceBench) -> None:
        async with reading(bench) as reader:
            await bench.publish(bench.messages(500))
            await reader.until(500)
            await bench.publish(bench.messages(100, start=500))
            await reader.until(600)
            assert await reader.looks() == []
        assert by_key(reader.received) == {b"k%d" % k: list(range(k, 600, 5)) for k in range(5)}

    async def test_an_empty_body_and_a_large_one_arrive(self, bench: SourceBench) -> None:
        topic, large = bench.topics[0], b"x" * 500_000
        await bench.publish([message(1, topic=topic, key="A", body=b""), message(2, topic=topic, key="A", body=large)])
        async with reading(bench) as reader:
            assert [delivery.body for delivery in await reader.until(2)] == [b"", large]

    async def test_several_topics_are_received_by_one_source(self, bench: SourceBench) -> None:
        await bench.publish([*bench.messages(20), *bench.messages(20, topic=1, start=100)])
        async with reading(bench, topics=bench.topics) as reader:
            await reader.until(40)
        for topic, start in zip(bench.topics, (0, 100), strict=True):
            found = numbers(delivery for delivery in reader.received if delivery.topic == topic)
            assert sorted(found) == list(range(start, start + 20))

    async def test_another_topic_is_left_alone(self, bench: SourceBench) -> None:
        await bench.publish([*bench.messages(5, topic=1, start=100), *bench.messages(5)])
        async with reading(bench) as reader:
            await reader.until(5)
            assert await reader.looks() == []
        assert sorted(numbers(reader.received)) == list(range(5))

    async def test_no_more_are_received_than_asked_for(self, bench: SourceBench) -> None:
        await bench.publish(bench.messages(100))
        async with reading(bench) as reader:
            assert await reader.looks(0) == []
            while len(reader.received) < 100:
                assert len(await reader.receive(7)) <= 7
            assert await reader.looks(7) == []
        assert by_key(reader.received) == {b"k%d" % k: list(range(k, 100, 5)) for k in range(5)}

    async def test_a_paused_shard_delivers_nothing_until_it_goes_on(self, bench: SourceBench) -> None:
        await bench.publish(bench.messages(100, keys=20))
        async with reading(bench) as reader:
            await reader.until(100, limit=10)
            paused = frozenset(delivery.partition for delivery in reader.received)
            await bench.publish(bench.messages(100, keys=20, start=100))
            assert await reader.looks(10, paused) == []
            await reader.until(200, limit=10)
            assert await reader.looks() == []
        assert by_key(reader.received) == {b"k%d" % k: list(range(k, 200, 20)) for k in range(20)}

    async def test_a_paused_shard_does_not_stop_the_others(self, bench: SourceBench) -> None:
        """A source with both topics in one partition pauses both; the test then proves little."""
        both = [*bench.messages(40, keys=20), *bench.messages(40, keys=20, topic=1)]
        await bench.publish(both)
        async with reading(bench, topics=bench.topics) as reader:
            await reader.until(80)
            paused = frozenset([reader.received[0].partition])
            share = sum(delivery.partition in paused for delivery in reader.received)
            await bench.publish(both)
            await reader.until(160 - share, paused=paused)
            assert paused.isdisjoint(delivery.partition for delivery in reader.received[80:])
            resumed = await reader.until(160)
            assert {delivery.partition for delivery in resumed} == paused


class RememberingRules:
    """Only acked deliveries are recorded at the broker."""

    async def test_nothing_is_acked_before_the_engine_says_so(self, bench: SourceBench) -> None:
        await bench.publish(bench.messages(50))
        for _ in range(3):
            async with reading(bench) as reader:
                await reader.until(50)
            assert by_key(reader.received) == {b"k%d" % k: list(range(k, 50, 5)) for k in range(5)}

    async def test_what_is_acked_does_not_come_again(self, bench: SourceBench) -> None:
        await bench.publish(bench.messages(50))
        async with reading(bench) as reader:
            reader.ack(await reader.until(50))
        assert await left(bench) == []

    async def test_a_closed_source_may_be_started_again_and_goes_on(self, bench: SourceBench) -> None:
        await bench.publish(bench.messages(30))
        async with reading(bench) as reader:
            await reader.until(30)
            await reader.source.close()
            await reader.source.close()
            await reader.source.start(reader.on_revoked)
            reader.ack(await reader.until(60))
        assert sorted(numbers(reader.received[30:])) == list(range(30))
        # A returned partition is a new partition: the engine may still handle deliveries of the old one.
        before, after = (
            {delivery.partition for delivery in half} for half in (reader.received[:30], reader.received[30:])
        )
        assert before.isdisjoint(after)
        assert await left(bench) == []

    async def test_acks_in_any_order_are_remembered_up_to_the_first_gap(self, bench: SourceBench) -> None:
        await bench.publish(bench.messages(40, keys=1))
        async with reading(bench) as reader:
            found = await reader.until(40)
            reader.ack([*reversed(found[:10]), *found[12:30], found[11]])
            await reader.looks(0)
        kept = [10, *range(30, 40)] if bench.single_acks else list(range(10, 40))
        async with reading(bench) as reader:
            await reader.until(len(kept))
            assert await reader.looks() == []
        assert numbers(reader.received) == kept

    async def test_an_ack_of_a_shard_that_is_gone_is_ignored(self, bench: SourceBench) -> None:
        await bench.publish(bench.messages(10, keys=1))
        async with reading(bench) as reader:
            old = await reader.until(10)
            await reader.source.close()
            await reader.source.start(reader.on_revoked)
            new = await reader.until(20)
            reader.ack(old)
            reader.ack(new[:4])
        reader.ack(new)
        assert await left(bench) == list(range(4, 10))

    async def test_another_consumer_receives_everything_too(self, bench: SourceBench) -> None:
        async with reading(bench, "billing") as billing, reading(bench, "stock") as stock:
            await bench.publish(bench.messages(30))
            billing.ack(await billing.until(30))
            assert sorted(numbers(await stock.until(30))) == list(range(30))

    async def test_a_place_is_the_same_each_time_and_no_other_message_has_it(self, bench: SourceBench) -> None:
        await bench.publish([*bench.messages(20), *bench.messages(20, topic=1, start=20)])
        places = []
        for _ in range(2):
            async with reading(bench, topics=bench.topics) as reader:
                await reader.until(40)
            places.append({delivery.headers["n"]: delivery.position for delivery in reader.received})
        if bench.places:
            assert places[0] == places[1]
            assert len(set(places[0].values())) == 40
        else:
            assert set(places[0].values()) == {""}

    async def test_what_one_source_leaves_behind_another_gets(self, bench: SourceBench) -> None:
        async with reading(bench) as first, reading(bench) as second:
            async with pumping(first, second):
                await bench.publish(bench.messages(60, keys=30))
                await eventually(lambda: len(_seen(first) | _seen(second)) == 60)
            assert not bench.shares or not _seen(first) & _seen(second)
            second.ack(second.held)
            await first.source.close()
            async with asyncio.timeout(TIMEOUT_SECONDS):
                while len(_seen(second)) < 60:
                    await second.receive()
            assert await second.looks() == []
            assert len(second.held) == 60
            second.ack(second.held)
        assert await left(bench) == []


def _seen(reader: Reader) -> set[int]:
    """Return the numbers that a reader has received and that were not revoked."""
    return set(numbers(reader.held))
