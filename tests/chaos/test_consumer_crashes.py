"""Consumers that are killed at every point of their work, on real servers: every effect happens once, in order."""

from __future__ import annotations

import signal
from pathlib import Path
from typing import Any
from uuid import uuid4

import aio_pika
import pytest

from outrider import app
from outrider.testing.servers.kafka import create_topic, delete_topics
from tests.support.consumer_process import EMPTY, Work, exactly_once_in_order, relaying, stage
from tests.support.crashing_consumer import NEVER, POINTS, TABLE, Fuse, build, consumer_of
from tests.support.relay_process import until
from tests.support.sizes import sized

pytestmark = [pytest.mark.postgres, pytest.mark.chaos, pytest.mark.timeout(300)]

KEYS = [f"k{number:02}" for number in range(40)]
PARTITIONS = 4
ONE_BY_ONE = {"concurrency": 4}
IN_BATCHES = {"concurrency": 2, "ordering": "strict", "first_sequence": "one", "batch_max": 20}


async def _crash_everywhere(conn: Any, work: Work, *, rounds: int, per_key: int) -> None:
    """Publish, let consumers die at every point several times, and let a last one finish."""
    await conn.execute(TABLE)
    staged = await stage(conn, work.topic, KEYS, per_key)
    async with relaying(work.store, await app.open_broker(work.broker)):
        await until("everything to be published", conn, EMPTY)
    for turn in range(rounds):
        for point in POINTS:
            await _crash(conn, work, point, 1 + 3 * turn)
    async with work.running() as last:
        await until("every effect", conn, "SELECT count(*) >= $1 FROM effects", len(staged))
        assert await last.stop() == 0
    await exactly_once_in_order(conn, staged, dict.fromkeys(KEYS, per_key))


async def _crash(conn: Any, work: Work, point: str, count: int) -> None:
    before = await conn.fetchval("SELECT count(*) FROM effects")
    async with work.running(point, count) as consumer:
        assert await consumer.end() == -signal.SIGKILL, f"the consumer did not die at {point}, pass {count}"
    if point == "committed_not_acked":
        assert await conn.fetchval("SELECT count(*) FROM effects") > before
    elif point == "commit_sent":
        # The answer was not read, but the server has read the commit.
        await until("the commit to be heard", conn, "SELECT count(*) > $1 FROM effects", before)


@pytest.fixture
def topic() -> str:
    """A name for the topic, the queue and the consumer, since the brokers are shared."""
    return f"orders-{uuid4().hex[:8]}"


@pytest.fixture
def kafka_work(kafka: str, postgres_url: str, topic: str, tmp_path: Path) -> Any:
    """A topic whose group notices soon that a member was killed."""
    create_topic(kafka, topic, partitions=PARTITIONS)
    yield Work(postgres_url, f"kafka://{kafka}?session.timeout.ms=1000", topic, tmp_path, ONE_BY_ONE)
    delete_topics(kafka, topic)


@pytest.fixture
async def rabbit_work(rabbitmq_url: str, postgres_url: str, topic: str, tmp_path: Path) -> Any:
    """A queue that its consumer has made before anything is published."""
    queue = consumer_of(topic)
    url = f"{rabbitmq_url}?exchange={topic}&declare="
    source = app.open_source(url, build(topic, Fuse(NEVER, 0)).consumers[queue])
    await source.start(_nobody)
    await source.close()
    yield Work(postgres_url, url, topic, tmp_path, ONE_BY_ONE)
    async with await aio_pika.connect(rabbitmq_url) as connection, await connection.channel() as channel:
        await channel.queue_delete(queue)
        await channel.exchange_delete(topic)


async def _nobody(partitions: frozenset[str]) -> None:
    """Nothing is under way."""


def _in_batches(work: Work) -> Work:
    return Work(work.store, work.broker, work.topic, work.folder, IN_BATCHES)


@pytest.mark.kafka
async def test_consumers_killed_at_every_point_repeat_no_effect_from_kafka(conn: Any, kafka_work: Work) -> None:
    await _crash_everywhere(conn, kafka_work, rounds=sized(5, 1), per_key=sized(25, 5))


@pytest.mark.rabbitmq
async def test_consumers_killed_at_every_point_repeat_no_effect_from_rabbitmq(conn: Any, rabbit_work: Work) -> None:
    await _crash_everywhere(conn, rabbit_work, rounds=sized(5, 1), per_key=sized(25, 5))


@pytest.mark.kafka
async def test_consumers_in_batches_with_strict_ordering_repeat_no_effect_from_kafka(
    conn: Any, kafka_work: Work
) -> None:
    await _crash_everywhere(conn, _in_batches(kafka_work), rounds=sized(2, 1), per_key=sized(50, 25))


@pytest.mark.rabbitmq
async def test_consumers_in_batches_with_strict_ordering_repeat_no_effect_from_rabbitmq(
    conn: Any, rabbit_work: Work
) -> None:
    await _crash_everywhere(conn, _in_batches(rabbit_work), rounds=sized(2, 1), per_key=sized(50, 25))
