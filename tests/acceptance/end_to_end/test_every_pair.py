"""Every store with every broker: thousands of events, two relay processes, and one of them may be killed."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from tests.acceptance.end_to_end.mongo_shop import MongoShop
from tests.acceptance.end_to_end.relay_progress import (
    EMPTY,
    SHARED,
    STARTED,
    delivered,
    everything_arrived,
    until,
    until_logged,
)
from tests.acceptance.end_to_end.shop import PostgresShop, Shop, SqliteShop, deals
from tests.support.destinations import Destination, KafkaDestination, RabbitDestination
from tests.support.relay_process import RelayProcess, relays
from tests.support.sizes import sized

pytestmark = [pytest.mark.chaos, pytest.mark.timeout(180)]

EVENTS, KEYS = sized(20_000, 2_000), sized(500, 100)
FEWER = sized(6_000, 1_000)
"""For writers that take two milliseconds for each."""
SMALL_STEPS = ("--workers", "4", "--batch-max", "100", "--lease-seconds", "5", "--publish-timeout-seconds", "2")
REPEATS_MAX = 1200
"""The largest number of events in flight: a batch for each worker, and the first few events of each lane."""


async def _none_is_lost(shop: Shop, destination: Destination, folder: Path) -> None:
    """Do business while two relays deliver; in the middle of it they come to share the lanes."""
    async with relays(shop.url, destination.url, folder, 2) as processes:
        await until(shop, processes, *STARTED)
        await shop.work(deals(EVENTS, KEYS), destination.topic)
        await until(shop, processes, *SHARED)
        await until(shop, processes, *EMPTY)
        assert [await relay.stop() for relay in processes] == [0, 0]
    ledger = await destination.ledger()
    assert len(ledger.ids) == EVENTS
    assert shop.compensated
    await everything_arrived(shop, ledger)
    assert ledger.repeats == 0


async def _a_kill_only_repeats(shop: Shop, destination: Destination, folder: Path, events: int) -> None:
    """Do business while two relays deliver; one is killed in the middle, and another one replaces it."""
    async with relays(shop.url, destination.url, folder, 2, *SMALL_STEPS) as processes:
        await until(shop, processes, *SHARED)
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(shop.work(deals(events, KEYS), destination.topic))
            await until(shop, processes, *delivered(events // 4))
            await processes.pop(0).kill()
            processes.append(await RelayProcess.start(shop.url, destination.url, folder, *SMALL_STEPS))
        await until(shop, processes, *EMPTY)
        # A relay that is stopped before it runs simply ends.
        await until_logged(folder, processes, "relay started", 3)
        assert [await relay.stop() for relay in processes] == [0, 0]
    ledger = await destination.ledger()
    assert len(ledger.ids) == events
    assert shop.compensated
    await everything_arrived(shop, ledger)
    assert ledger.repeats <= REPEATS_MAX


class _Pair:
    """Two tests for a `shop` and a `destination`."""

    events = EVENTS
    """With which a relay is killed."""

    async def test_each_event_arrives_once_and_in_order(
        self, shop: Shop, destination: Destination, tmp_path: Path
    ) -> None:
        await _none_is_lost(shop, destination, tmp_path)

    async def test_a_killed_relay_loses_nothing_and_repeats_little(
        self, shop: Shop, destination: Destination, tmp_path: Path
    ) -> None:
        await _a_kill_only_repeats(shop, destination, tmp_path, self.events)


class _FromPostgres(_Pair):
    @pytest.fixture
    def shop(self, postgres_shop: PostgresShop) -> Shop:
        return postgres_shop


class _FromSqlite(_Pair):
    @pytest.fixture
    def shop(self, sqlite_shop: SqliteShop) -> Shop:
        return sqlite_shop


class _FromMongo(_Pair):
    events = FEWER

    @pytest.fixture
    def shop(self, mongo_shop: MongoShop) -> Shop:
        return mongo_shop


class _ToKafka:
    @pytest.fixture
    def destination(self, kafka_destination: KafkaDestination) -> Destination:
        return kafka_destination


class _ToRabbitMQ:
    @pytest.fixture
    def destination(self, rabbit_destination: RabbitDestination) -> Destination:
        return rabbit_destination


@pytest.mark.postgres
@pytest.mark.kafka
class TestPostgresToKafka(_FromPostgres, _ToKafka):
    pass


@pytest.mark.postgres
@pytest.mark.rabbitmq
class TestPostgresToRabbitMQ(_FromPostgres, _ToRabbitMQ):
    pass


@pytest.mark.kafka
class TestSqliteToKafka(_FromSqlite, _ToKafka):
    pass


@pytest.mark.rabbitmq
class TestSqliteToRabbitMQ(_FromSqlite, _ToRabbitMQ):
    pass


@pytest.mark.mongo
@pytest.mark.timeout(420)
@pytest.mark.kafka
class TestMongoToKafka(_FromMongo, _ToKafka):
    pass


@pytest.mark.mongo
@pytest.mark.timeout(420)
@pytest.mark.rabbitmq
class TestMongoToRabbitMQ(_FromMongo, _ToRabbitMQ):
    pass
