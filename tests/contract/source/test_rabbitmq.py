"""The source contract on RabbitMQ."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator, Sequence
from uuid import uuid4

import aio_pika
import pytest

from outrider.brokers.base import CONFIRMED
from outrider.brokers.rabbitmq import RabbitBroker, RabbitSource
from outrider.event import Message
from outrider.testing.contracts import SourceBench, SourceContract
from outrider.testing.servers.rabbitmq import rabbitmq_url


@pytest.fixture(scope="session")
def rabbit_url() -> Iterator[str]:
    """A private server, gone when the tests end; or the one that OUTRIDER_TEST_RABBITMQ names."""
    with rabbitmq_url() as url:
        yield url


class RabbitBench(SourceBench):
    """An exchange of its own, and a queue for every consumer and its topics."""

    places = False
    single_acks = True

    def __init__(self, url: str, name: str) -> None:
        super().__init__((f"{name}.orders", f"{name}.parcels"))
        self.url, self.name = url, name
        self.broker = RabbitBroker(url, exchange=name, declare=True)
        self.queues: set[str] = set()

    async def open(self) -> None:
        """Make the queues beforehand: RabbitMQ keeps nothing for a queue that is not there yet."""
        await self.broker.start()
        for consumer, topics in (("billing", self.topics[:1]), ("billing", self.topics), ("stock", self.topics[:1])):
            source = self.source(consumer, topics)
            await source.start(nobody)
            await source.close()

    async def publish(self, messages: Sequence[Message]) -> None:
        """Publish through our broker."""
        assert list(await self.broker.publish(messages)) == [CONFIRMED] * len(messages)

    def source(self, consumer: str, topics: Sequence[str]) -> RabbitSource:
        """Make a source of the queue of the consumer and its topics."""
        queue = f"{self.name}.{consumer}.{len(topics)}"
        self.queues.add(queue)
        return RabbitSource(self.url, consumer, topics, queue=queue, exchange=self.name, declare=True)

    async def remove(self) -> None:
        """Leave nothing behind."""
        await self.broker.close()
        async with await aio_pika.connect(self.url) as connection, await connection.channel() as channel:
            for queue in self.queues:
                await channel.queue_delete(queue)
            await channel.exchange_delete(self.name)


async def nobody(partitions: frozenset[str]) -> None:
    """Nothing is under way."""


@pytest.mark.rabbitmq
class TestRabbitSource(SourceContract):
    @pytest.fixture
    async def bench(self, rabbit_url: str) -> AsyncIterator[SourceBench]:
        bench = RabbitBench(rabbit_url, f"test_{uuid4().hex[:12]}")
        await bench.open()
        yield bench
        await bench.remove()
