"""Publishing from memory: our adapters, and the clients that people would use without us.

Each is prepared first and then measured: connected, warm, its messages built as it wants them. All give the same
guarantee: every message is confirmed, on every replica in sync or on the disk of a quorum queue.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from datetime import datetime
from typing import Any

import aio_pika
import confluent_kafka

from outrider.brokers.base import CONFIRMED, Broker
from outrider.brokers.kafka import settings as kafka_settings
from outrider.event import Message

WAVE = 2_000
CALLS = 4
"""As many at a time as a relay has workers; a wave is what its passes come to with some thousands of keys."""
FULL_SECONDS = 0.01
ANSWER_SECONDS_MAX = 10.0

Publish = Callable[[], Awaitable[None]]


@asynccontextmanager
async def adapter(broker: Broker, messages: Sequence[Message]) -> AsyncIterator[Publish]:
    """Our adapter, without a relay and without a database."""
    await broker.start()
    waves = [messages[start : start + WAVE] for start in range(0, len(messages), WAVE)]

    async def publish() -> None:
        waiting = iter(waves)

        async def run_once() -> None:
            for wave in waiting:
                results = await broker.publish(wave)
                assert list(results).count(CONFIRMED) == len(wave), "a message was not confirmed"

        await asyncio.gather(*(run_once() for _ in range(CALLS)))

    try:
        yield publish
    finally:
        await broker.close()


@asynccontextmanager
async def librdkafka(bootstrap: str, messages: Sequence[Message]) -> AsyncIterator[Publish]:
    """confluent-kafka with our settings, and a delivery callback for every message."""
    producer = confluent_kafka.Producer(kafka_settings.complete(bootstrap, {}))
    producer.list_topics(timeout=ANSWER_SECONDS_MAX)
    yield lambda: _produce(producer, messages)


async def _produce(producer: Any, messages: Sequence[Message]) -> None:
    confirmed = 0

    def delivered(error: Any, _: Any) -> None:
        nonlocal confirmed
        assert error is None, error
        confirmed += 1

    produce, poll = producer.produce, producer.poll
    for message in messages:
        while True:
            try:
                produce(message.topic, message.body, message.key, on_delivery=delivered, headers=message.headers)
                break
            except BufferError:
                poll(FULL_SECONDS)
        poll(0)
    while confirmed < len(messages):
        poll(FULL_SECONDS)


@asynccontextmanager
async def pika(url: str, exchange: str, messages: Sequence[Message]) -> AsyncIterator[Publish]:
    """aio-pika with confirms, persistent and mandatory, a wave of publishes at a time."""
    connection = await aio_pika.connect(url)
    channel = await connection.channel(publisher_confirms=True, on_return_raises=True)
    target = await channel.get_exchange(exchange)
    ready = [(_as_pika(message), message.topic) for message in messages]

    async def publish() -> None:
        for start in range(0, len(ready), WAVE):
            wave = ready[start : start + WAVE]
            await asyncio.gather(*(target.publish(message, topic, mandatory=True) for message, topic in wave))

    try:
        yield publish
    finally:
        await connection.close()


def _as_pika(message: Message) -> aio_pika.Message:
    headers = message.headers
    return aio_pika.Message(
        message.body,
        headers=dict(headers),
        content_type="application/json",
        delivery_mode=aio_pika.DeliveryMode.PERSISTENT,
        correlation_id=headers["correlation_id"],
        message_id=message.message_id,
        timestamp=datetime.fromisoformat(headers["created_at"]),
        type=headers["event_type"],
    )
