"""What the source contract suite needs around a broker: how to publish, how to make a source, and a reader."""

from __future__ import annotations

import asyncio
from abc import ABC, abstractmethod
from collections import defaultdict
from collections.abc import AsyncIterator, Callable, Iterable, Sequence
from collections.abc import Set as AbstractSet
from contextlib import asynccontextmanager
from typing import ClassVar
from uuid import uuid4

from outrider.delivery import Delivery
from outrider.event import Message
from outrider.source import Source

PATIENCE_SECONDS = 30.0
POLL_SECONDS = 0.01
LOOKS = 10
"""How often a test looks for what must not come."""


class SourceBench(ABC):
    """A broker to consume from. `topics` are two that are there, empty, and known to no other test.

    `places`: a delivery has a place, the same each time. `single_acks`: the broker remembers every ack by itself; the
    others remember how far everything is done. `shares`: sources of one consumer never have the same delivery at the
    same time; where they do not share, each receives everything.
    """

    places: ClassVar[bool] = True
    single_acks: ClassVar[bool] = False
    shares: ClassVar[bool] = True

    def __init__(self, topics: tuple[str, str]) -> None:
        self.topics = topics

    @abstractmethod
    async def publish(self, messages: Sequence[Message]) -> None:
        """Publish messages, in order, by any means; return when the broker has them."""

    @abstractmethod
    def source(self, consumer: str, topics: Sequence[str]) -> Source:
        """Make a source that has not been started."""

    def messages(self, count: int, *, keys: int = 5, topic: int = 0, start: int = 0) -> list[Message]:
        """Make messages whose header `n` says their number."""
        return [message(n, topic=self.topics[topic], key=f"k{n % keys}") for n in range(start, start + count)]


def message(number: int, *, topic: str, key: str, body: bytes | None = None) -> Message:
    """Make a message that says its number.

    >>> message(3, topic="orders", key="A").headers["n"]
    '3'
    """
    name = str(uuid4())
    headers = {"message_id": name, "event_type": "order.changed", "key": key, "n": str(number), "odd": "naïve ☂"}
    return Message(name, topic, key, None, body if body is not None else b'{"n":%d}' % number, headers)


def numbers(deliveries: Iterable[Delivery]) -> list[int]:
    """Return the numbers of deliveries in the order they came."""
    return [int(delivery.headers["n"]) for delivery in deliveries]


def by_key(deliveries: Iterable[Delivery]) -> dict[bytes | None, list[int]]:
    """Return the numbers of each key in the order they came."""
    found: dict[bytes | None, list[int]] = defaultdict(list)
    for delivery in deliveries:
        found[delivery.key].append(int(delivery.headers["n"]))
    return found


class Reader:
    """Receives from a source and keeps what came; acks nothing by itself. `held` is what was not taken away again."""

    def __init__(self, source: Source) -> None:
        self.source = source
        self.received: list[Delivery] = []
        self.held: list[Delivery] = []
        self.revoked: set[str] = set()
        self.may_go = asyncio.Event()
        self.may_go.set()

    async def on_revoked(self, shards: frozenset[str]) -> None:
        """Note that shards are taken away, and keep them until the test lets go."""
        self.revoked |= shards
        await self.may_go.wait()
        self.held = [delivery for delivery in self.held if delivery.shard not in shards]

    async def receive(self, limit: int = 1000, paused: AbstractSet[str] = frozenset()) -> list[Delivery]:
        """Look once."""
        found = list(await self.source.receive(limit, paused))
        self.received += found
        self.held += found
        return found

    async def until(self, count: int, *, limit: int = 1000, paused: AbstractSet[str] = frozenset()) -> list[Delivery]:
        """Look until so many have come in all; return those that came during this call."""
        before = len(self.received)
        async with asyncio.timeout(PATIENCE_SECONDS):
            while len(self.received) < count:
                await self.receive(limit, paused)
        return self.received[before:]

    async def looks(self, limit: int = 1000, paused: AbstractSet[str] = frozenset()) -> list[Delivery]:
        """Look several times; return what came."""
        return [delivery for _ in range(LOOKS) for delivery in await self.receive(limit, paused)]

    def ack(self, deliveries: Iterable[Delivery]) -> None:
        """Ack in the order given."""
        for delivery in deliveries:
            self.source.ack(delivery)


@asynccontextmanager
async def reading(bench: SourceBench, consumer: str = "billing", topics: Sequence[str] = ()) -> AsyncIterator[Reader]:
    """Start a source of a consumer, on the first topic unless told otherwise, and close it at the end."""
    reader = Reader(bench.source(consumer, topics or bench.topics[:1]))
    await reader.source.start(reader.on_revoked)
    try:
        yield reader
    finally:
        await reader.source.close()


@asynccontextmanager
async def pumping(*readers: Reader) -> AsyncIterator[None]:
    """Let several sources receive at once, until the end of the block."""
    stopping = asyncio.Event()

    async def pump(reader: Reader) -> None:
        while not stopping.is_set():
            await reader.receive()

    async with asyncio.TaskGroup() as group:
        for reader in readers:
            group.create_task(pump(reader))
        try:
            yield
        finally:
            stopping.set()


async def eventually(true: Callable[[], object]) -> None:
    """Wait until something is so: the sources tell nobody."""
    async with asyncio.timeout(PATIENCE_SECONDS):
        while not true():  # noqa: ASYNC110
            await asyncio.sleep(POLL_SECONDS)


async def left(bench: SourceBench) -> list[int]:
    """Return the numbers that a new source still gets: all that come before messages published just now."""
    start, count = 1_000_000, 20
    await bench.publish(bench.messages(count, keys=count, start=start))
    async with reading(bench) as reader:
        async with asyncio.timeout(PATIENCE_SECONDS):
            while sum(n >= start for n in numbers(reader.received)) < count:
                await reader.receive()
    return sorted(n for n in numbers(reader.received) if n < start)
