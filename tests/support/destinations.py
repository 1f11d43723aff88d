"""Destinations of events, read by clients that know nothing of Outrider."""

from __future__ import annotations

import asyncio
from abc import ABC, abstractmethod
from collections import Counter, defaultdict
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from importlib import import_module
from typing import Any, NamedTuple
from uuid import uuid4

import aio_pika
from confluent_kafka import Consumer, KafkaError, TopicPartition

from outrider.testing.servers.kafka import create_topic, delete_topics

ANSWER_SECONDS_MAX = 30.0
READ_SECONDS_MAX = 90.0
PARTITIONS = 4
END = "the end"


class ReceivedMessage(NamedTuple):
    """A message as a consumer sees it."""

    message_id: str
    key: str
    sequence: int


class Ledger:
    """The received messages, as first deliveries and repeats."""

    def __init__(self, messages: Sequence[ReceivedMessage]) -> None:
        times = Counter(message.message_id for message in messages)
        self.ids = set(times)
        self.repeats = sum(count - 1 for count in times.values())
        self.order: dict[str, list[int]] = defaultdict(list)
        for message in dict.fromkeys(messages):
            self.order[message.key].append(message.sequence)


class Destination(ABC):
    """A broker with a topic or a queue of its own for each test."""

    url: str
    topic: str

    @abstractmethod
    async def read(self) -> list[ReceivedMessage]:
        """Return all messages received so far; those of a key in the order in which they came."""

    @abstractmethod
    async def remove(self) -> None:
        """Remove topic or queue: the server may belong to the user."""

    async def ledger(self) -> Ledger:
        """Return the messages received so far as a ledger."""
        return Ledger(await self.read())


class KafkaDestination(Destination):
    """A topic with several partitions."""

    def __init__(self, bootstrap: str, **config: str) -> None:
        self.topic = f"test-{uuid4().hex[:8]}"
        self.bootstrap, self.url = bootstrap, f"kafka://{bootstrap}"
        self.topics = {self.topic}
        settings = {name.replace("_", "."): value for name, value in config.items()}
        create_topic(bootstrap, self.topic, partitions=PARTITIONS, config=settings)

    def add(self, topic: str) -> None:
        """Make another topic, to be read as well."""
        create_topic(self.bootstrap, topic, partitions=PARTITIONS)
        self.topics.add(topic)

    def configure(self, name: str, value: str) -> None:
        """Change a setting of the topic."""
        kafka: Any = import_module("confluent_kafka.admin")
        admin = kafka.AdminClient({"bootstrap.servers": self.bootstrap})
        entry = kafka.ConfigEntry(name, value, incremental_operation=kafka.AlterConfigOpType.SET)
        wanted = kafka.ConfigResource(kafka.ConfigResource.Type.TOPIC, self.topic, incremental_configs=[entry])
        admin.incremental_alter_configs([wanted])[wanted].result(ANSWER_SECONDS_MAX)

    async def read(self) -> list[ReceivedMessage]:
        parts = [await asyncio.to_thread(read_topic, self.bootstrap, topic) for topic in self.topics]
        return [message for part in parts for message in part]

    async def remove(self) -> None:
        await asyncio.to_thread(delete_topics, self.bootstrap, self.topic)


class RabbitDestination(Destination):
    """An exchange, and a queue that takes what comes by certain topics."""

    topic = "purchases"

    def __init__(self, server_url: str, *others: str) -> None:
        self.name = f"test_{uuid4().hex[:8]}"
        self.server_url = server_url
        queues = ",".join(f"{self.name}:{topic}" for topic in (self.topic, *others))
        self.url = f"{server_url}?exchange={self.name}&declare={queues}"
        self._arrived: list[ReceivedMessage] = []

    async def read(self) -> list[ReceivedMessage]:
        async with self.channel() as channel:
            self._arrived += await read_queue(channel, self.name)
        return self._arrived

    async def remove(self) -> None:
        async with self.channel() as channel:
            await channel.queue_delete(self.name)
            await channel.exchange_delete(self.name)

    @asynccontextmanager
    async def channel(self) -> AsyncIterator[aio_pika.abc.AbstractChannel]:
        """Open a channel as any client would."""
        async with await aio_pika.connect(self.server_url) as connection, await connection.channel() as channel:
            yield channel


def read_topic(bootstrap: str, topic: str) -> list[ReceivedMessage]:
    """Read a topic from its start to its end, partition by partition."""
    options = {"bootstrap.servers": bootstrap, "group.id": uuid4().hex, "log_level": 0, "fetch.wait.max.ms": 50}
    consumer: Any = Consumer({**options, "enable.auto.commit": False, "enable.partition.eof": True})
    unread = set(consumer.list_topics(topic, timeout=ANSWER_SECONDS_MAX).topics[topic].partitions)
    consumer.assign([TopicPartition(topic, number, 0) for number in unread])
    found: list[ReceivedMessage] = []
    while unread:
        taken = consumer.consume(1000, timeout=0.2)
        for message in taken:
            if message.error() is None:
                headers = {name: value.decode() for name, value in message.headers()}
                found.append(ReceivedMessage(headers["message_id"], message.key().decode(), int(headers["sequence"])))
            else:
                assert message.error().code() == KafkaError._PARTITION_EOF
                unread.discard(message.partition())
    consumer.close()
    return found


async def read_queue(channel: aio_pika.abc.AbstractChannel, name: str) -> list[ReceivedMessage]:
    """Take everything out of a queue. A message of our own, put in last, shows where the end is."""
    found: list[ReceivedMessage] = []
    ended = asyncio.Event()

    async def take(message: aio_pika.abc.AbstractIncomingMessage) -> None:
        if message.message_id == END:
            ended.set()
            return
        headers = {name: str(value) for name, value in message.headers.items()}
        found.append(ReceivedMessage(str(message.message_id), headers["key"], int(headers["sequence"])))

    queue = await channel.get_queue(name)
    await channel.default_exchange.publish(aio_pika.Message(b"", message_id=END), routing_key=name)
    await queue.consume(take, no_ack=True)
    # Tens of thousands of messages, one by one, by a client that is not in a hurry.
    async with asyncio.timeout(READ_SECONDS_MAX):
        await ended.wait()
    return found
