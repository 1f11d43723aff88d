"""Every store with every broker: twenty thousand events, two relay processes, and one of them may be killed."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from tests.acceptance.end_to_end.crew import (
    EMPTY,
    SHARED,
    STARTED,
    delivered,
    everything_arrived,
    until,
    until_told,
)
from tests.acceptance.end_to_end.mongo_shop import MongoShop
from tests.acceptance.end_to_end.post import KafkaPost, Post, RabbitPost
from tests.acceptance.end_to_end.shop import PostgresShop, Shop, SqliteShop, deals
from tests.chaos.relays import RelayProcess, relays

pytestmark = [pytest.mark.chaos, pytest.mark.timeout(180)]

EVENTS, KEYS = 20_000, 500
FEWER = 6_000
"""For writers that take two milliseconds for each."""
SMALL_STEPS = ("--workers", "4", "--batch-max", "100", "--lease-seconds", "5", "--publish-timeout-seconds", "2")
REPEATS_MAX = 1200
"""What such a relay can have in flight: for each worker a batch, and the first few events of each lane besides."""


async def _none_is_lost(shop: Shop, post: Post, folder: Path) -> None:
    """Do business while two relays deliver; in the middle of it they come to share the lanes."""
    async with relays(shop.url, post.url, folder, 2) as crew:
        await until(shop, crew, *STARTED)
        await shop.work(deals(EVENTS, KEYS), post.topic)
        await until(shop, crew, *SHARED)
        await until(shop, crew, *EMPTY)
        assert [await relay.stop() for relay in crew] == [0, 0]
    ledger = await post.ledger()
    assert len(ledger.ids) == EVENTS
    assert shop.undone
    await everything_arrived(shop, ledger)
    assert ledger.repeats == 0


async def _a_kill_only_repeats(shop: Shop, post: Post, folder: Path, events: int = EVENTS) -> None:
    """Do business while two relays deliver; one dies in the middle of it, and another takes its place."""
    async with relays(shop.url, post.url, folder, 2, *SMALL_STEPS) as crew:
        await until(shop, crew, *SHARED)
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(shop.work(deals(events, KEYS), post.topic))
            await until(shop, crew, *delivered(events // 4))
            await crew.pop(0).kill()
            crew.append(await RelayProcess.start(shop.url, post.url, folder, *SMALL_STEPS))
        await until(shop, crew, *EMPTY)
        # Who is told to stop before it runs is simply ended.
        await until_told(folder, crew, "relay started", 3)
        assert [await relay.stop() for relay in crew] == [0, 0]
    ledger = await post.ledger()
    assert len(ledger.ids) == events
    assert shop.undone
    await everything_arrived(shop, ledger)
    assert ledger.repeats <= REPEATS_MAX


@pytest.mark.postgres
@pytest.mark.kafka
class TestPostgresToKafka:
    async def test_each_event_arrives_once_and_in_order(
        self, postgres_shop: PostgresShop, kafka_post: KafkaPost, tmp_path: Path
    ) -> None:
        await _none_is_lost(postgres_shop, kafka_post, tmp_path)

    async def test_a_killed_relay_loses_nothing_and_repeats_little(
        self, postgres_shop: PostgresShop, kafka_post: KafkaPost, tmp_path: Path
    ) -> None:
        await _a_kill_only_repeats(postgres_shop, kafka_post, tmp_path)


@pytest.mark.postgres
@pytest.mark.rabbitmq
class TestPostgresToRabbitMQ:
    async def test_each_event_arrives_once_and_in_order(
        self, postgres_shop: PostgresShop, rabbit_post: RabbitPost, tmp_path: Path
    ) -> None:
        await _none_is_lost(postgres_shop, rabbit_post, tmp_path)

    async def test_a_killed_relay_loses_nothing_and_repeats_little(
        self, postgres_shop: PostgresShop, rabbit_post: RabbitPost, tmp_path: Path
    ) -> None:
        await _a_kill_only_repeats(postgres_shop, rabbit_post, tmp_path)


@pytest.mark.kafka
class TestSqliteToKafka:
    async def test_each_event_arrives_once_and_in_order(
        self, sqlite_shop: SqliteShop, kafka_post: KafkaPost, tmp_path: Path
    ) -> None:
        await _none_is_lost(sqlite_shop, kafka_post, tmp_path)

    async def test_a_killed_relay_loses_nothing_and_repeats_little(
        self, sqlite_shop: SqliteShop, kafka_post: KafkaPost, tmp_path: Path
    ) -> None:
        await _a_kill_only_repeats(sqlite_shop, kafka_post, tmp_path)


@pytest.mark.rabbitmq
class TestSqliteToRabbitMQ:
    async def test_each_event_arrives_once_and_in_order(
        self, sqlite_shop: SqliteShop, rabbit_post: RabbitPost, tmp_path: Path
    ) -> None:
        await _none_is_lost(sqlite_shop, rabbit_post, tmp_path)

    async def test_a_killed_relay_loses_nothing_and_repeats_little(
        self, sqlite_shop: SqliteShop, rabbit_post: RabbitPost, tmp_path: Path
    ) -> None:
        await _a_kill_only_repeats(sqlite_shop, rabbit_post, tmp_path)


@pytest.mark.mongo
@pytest.mark.timeout(420)
@pytest.mark.kafka
class TestMongoToKafka:
    async def test_each_event_arrives_once_and_in_order(
        self, mongo_shop: MongoShop, kafka_post: KafkaPost, tmp_path: Path
    ) -> None:
        await _none_is_lost(mongo_shop, kafka_post, tmp_path)

    async def test_a_killed_relay_loses_nothing_and_repeats_little(
        self, mongo_shop: MongoShop, kafka_post: KafkaPost, tmp_path: Path
    ) -> None:
        await _a_kill_only_repeats(mongo_shop, kafka_post, tmp_path, FEWER)


@pytest.mark.mongo
@pytest.mark.timeout(420)
@pytest.mark.rabbitmq
class TestMongoToRabbitMQ:
    async def test_each_event_arrives_once_and_in_order(
        self, mongo_shop: MongoShop, rabbit_post: RabbitPost, tmp_path: Path
    ) -> None:
        await _none_is_lost(mongo_shop, rabbit_post, tmp_path)

    async def test_a_killed_relay_loses_nothing_and_repeats_little(
        self, mongo_shop: MongoShop, rabbit_post: RabbitPost, tmp_path: Path
    ) -> None:
        await _a_kill_only_repeats(mongo_shop, rabbit_post, tmp_path, FEWER)
