"""Consumers that come and go all the time: partitions move, and every effect still happens once and in order."""

from __future__ import annotations

import asyncio
import itertools
from pathlib import Path
from typing import Any
from uuid import UUID, uuid4

import pytest

from outrider.brokers.kafka import KafkaBroker
from outrider.testing.servers.kafka import create_topic, delete_topics
from tests.support.consumer_process import ConsumerProcess, Work, exactly_once_in_order, relaying, stage
from tests.support.crashing_consumer import TABLE
from tests.support.relay_process import PATIENCE_SECONDS
from tests.support.sizes import sized

pytestmark = [pytest.mark.postgres, pytest.mark.kafka, pytest.mark.chaos, pytest.mark.timeout(300)]

EVENTS, PARTITIONS, CONSUMERS = sized(20_000, 4_000), 6, 3
KEYS = [f"k{number:03}" for number in range(sized(500, 100))]
TURN_SECONDS = 3.0
TURNS = sized(8, 4)
"""The load comes in as many parts, so that there is something to do whenever partitions move."""
TURNS_MAX = 40
SETTINGS = {"batch_max": 20, "concurrency": 4}


async def _swap(work: Work, crew: list[ConsumerProcess], turn: int, *, clean: bool) -> None:
    """Let the consumer that is there longest go, with or without a word, and another one come."""
    await work.until_started(CONSUMERS + turn)
    leaving = crew.pop(0)
    crew.append(await work.start())
    if clean:
        assert await leaving.stop() == 0
    else:
        await leaving.kill()


async def _turn(conn: Any, count: int) -> bool:
    """Let some time pass, during which partitions settle; tell whether so many effects are there."""
    for _ in range(int(TURN_SECONDS / 0.25)):
        if await conn.fetchval("SELECT count(*) >= $1 FROM effects", count):
            return True
        await conn.execute("SELECT pg_sleep(0.25)")
    return False


@pytest.fixture
def work(kafka: str, postgres_url: str, tmp_path: Path) -> Any:
    topic = f"orders-{uuid4().hex[:8]}"
    create_topic(kafka, topic, partitions=PARTITIONS)
    yield Work(postgres_url, f"kafka://{kafka}?session.timeout.ms=1500", topic, tmp_path, SETTINGS)
    delete_topics(kafka, topic)


async def test_consumers_that_come_and_go_every_three_seconds_repeat_lose_and_swap_nothing(
    conn: Any, kafka: str, work: Work
) -> None:
    await conn.execute(TABLE)
    staged: list[UUID] = []
    crew = [await work.start() for _ in range(CONSUMERS)]
    try:
        async with relaying(work.store, KafkaBroker(kafka)):
            for turn in itertools.count():
                assert turn < TURNS_MAX, f"after {TURNS_MAX} turns some effects are still not there"
                if turn < TURNS:
                    staged += await stage(conn, work.topic, KEYS, EVENTS // len(KEYS) // TURNS)
                await _swap(work, crew, turn, clean=turn % 2 == 0)
                if await _turn(conn, EVENTS):
                    break
        await work.until_started(CONSUMERS + turn + 1)
        async with asyncio.timeout(PATIENCE_SECONDS):
            assert [await consumer.stop() for consumer in crew] == [0] * CONSUMERS
    except BaseException:
        print((work.folder / "consumers.log").read_text())
        raise
    finally:
        for consumer in crew:
            await consumer.kill()
    await exactly_once_in_order(conn, staged, dict.fromkeys(KEYS, EVENTS // len(KEYS)))
