"""Servers that go away while relay processes publish: nothing is lost, order is kept, and no attempt is spent."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from outrider.stores.postgres import PostgresSchema
from outrider.testing.servers.kafka import KafkaCluster, KafkaServer
from outrider.testing.servers.postgres import PostgresServer
from outrider.testing.servers.rabbitmq import RabbitServer
from tests.acceptance.end_to_end.relay_progress import (
    EMPTY,
    PACE,
    SHARED,
    SMALL_STEPS,
    STARTED,
    delivered,
    everything_arrived,
    until,
    until_logged,
)
from tests.acceptance.end_to_end.shop import Deal, PostgresShop, Shop, deals
from tests.support.destinations import KafkaDestination, RabbitDestination
from tests.support.relay_process import QUICK, RelayProcess, relays
from tests.support.sizes import sized

pytestmark = [pytest.mark.chaos, pytest.mark.postgres, pytest.mark.timeout(240)]

EVENTS = sized(10_000, 5_000)
BACKLOG = deals(EVENTS, 100)
MORE = deals(sized(2_000, 1_000), 100, seed=8)
OUTAGE_SECONDS = sized(30, 5)


@pytest.fixture(scope="module")
def rabbit() -> Iterator[RabbitServer]:
    """A private server that tests may break and must repair."""
    with RabbitServer() as server:
        yield server


@asynccontextmanager
async def _business_goes_on(shop: Shop, processes: list[RelayProcess], topic: str) -> AsyncIterator[None]:
    """Do deals until the block ends, which begins when both relays deliver them: however quick they are, they are busy.

    A relay whose servers are gone when it starts would say so, and end.
    """
    over = False

    def endless() -> Iterator[Deal]:
        for seed in itertools.count(100):
            for deal in deals(100, 100, seed=seed):
                if over:
                    return
                yield deal

    async with asyncio.TaskGroup() as tasks:
        tasks.create_task(shop.work(endless(), topic))
        await until(shop, processes, *SHARED)
        await until(shop, processes, *delivered(500))
        yield
        over = True


@pytest.mark.kafka
async def test_kafka_killed_and_restarted_during_a_drain_costs_nothing(
    postgres_shop: PostgresShop, tmp_path: Path
) -> None:
    with KafkaServer() as server:
        destination = KafkaDestination(server.bootstrap)
        await postgres_shop.work(BACKLOG, destination.topic)
        async with relays(postgres_shop.url, destination.url, tmp_path, 2, *SMALL_STEPS) as processes:
            async with _business_goes_on(postgres_shop, processes, destination.topic):
                await asyncio.to_thread(server.kill)
            await postgres_shop.work(MORE, destination.topic)
            await until_logged(tmp_path, processes, "breaker opened", 2)
            assert await postgres_shop.failed_attempts() == 0
            await asyncio.to_thread(server.start)
            await until(postgres_shop, processes, *EMPTY)
        await everything_arrived(postgres_shop, await destination.ledger())


@pytest.mark.kafka
async def test_the_leader_of_three_brokers_killed_during_a_drain_costs_nothing(
    postgres_shop: PostgresShop, tmp_path: Path
) -> None:
    with KafkaCluster(brokers=3, settings={"min.insync.replicas": "2"}) as cluster:
        destination = KafkaDestination(cluster.bootstrap)
        leader = cluster.leader(destination.topic)
        await postgres_shop.work(BACKLOG, destination.topic)
        async with relays(postgres_shop.url, destination.url, tmp_path, 2, *SMALL_STEPS) as processes:
            async with _business_goes_on(postgres_shop, processes, destination.topic):
                await asyncio.to_thread(leader.kill)
            await postgres_shop.work(MORE, destination.topic)
            await until(postgres_shop, processes, *EMPTY)
        await everything_arrived(postgres_shop, await destination.ledger())


@pytest.mark.rabbitmq
async def test_rabbitmq_stopped_for_a_while_costs_nothing(
    postgres_shop: PostgresShop, rabbit: RabbitServer, tmp_path: Path
) -> None:
    destination = RabbitDestination(rabbit.url)
    await postgres_shop.work(BACKLOG, destination.topic)
    async with relays(postgres_shop.url, destination.url, tmp_path, 2, *SMALL_STEPS) as processes:
        async with _business_goes_on(postgres_shop, processes, destination.topic):
            await asyncio.to_thread(rabbit.halt)
        try:
            await _do_business_during_the_outage(postgres_shop, processes, destination.topic)
        finally:
            await asyncio.to_thread(rabbit.start)
        await until(postgres_shop, processes, *EMPTY)
    await everything_arrived(postgres_shop, await destination.ledger())


async def _do_business_during_the_outage(shop: PostgresShop, processes: list[RelayProcess], topic: str) -> None:
    """Let real time pass; no event counts an attempt, and no relay ends."""
    clock = asyncio.get_running_loop()
    begun, number = clock.time(), 0
    while clock.time() < begun + OUTAGE_SECONDS:
        number += 1
        await shop.work(deals(100, 100, seed=number), topic)
        assert await shop.failed_attempts() == 0
        assert await shop.count("outbox_dead_letter") == 0
        assert all(relay.running for relay in processes)
        await asyncio.sleep(0.5)


@pytest.mark.rabbitmq
async def test_a_memory_alarm_costs_nothing(postgres_shop: PostgresShop, rabbit: RabbitServer, tmp_path: Path) -> None:
    destination = RabbitDestination(rabbit.url)
    async with relays(postgres_shop.url, destination.url, tmp_path, 2, *PACE) as processes:
        await until(postgres_shop, processes, *STARTED)
        await postgres_shop.work(MORE, destination.topic)
        await until(postgres_shop, processes, *delivered(500))
        await asyncio.to_thread(rabbit.memory_alarm, True)
        try:
            await postgres_shop.work(BACKLOG, destination.topic)
            await until_logged(tmp_path, processes, "breaker opened", 4)
            assert await postgres_shop.count("outbox") >= EVENTS
            assert await postgres_shop.failed_attempts() == 0
        finally:
            await asyncio.to_thread(rabbit.memory_alarm, False)
        await until(postgres_shop, processes, *EMPTY)
    await everything_arrived(postgres_shop, await destination.ledger())


@pytest.mark.kafka
async def test_postgresql_killed_and_restarted_during_a_drain_costs_nothing(
    kafka_destination: KafkaDestination, tmp_path: Path
) -> None:
    with PostgresServer() as server:
        await PostgresSchema(server.url).migrate()
        async with await PostgresShop.open(server.url) as shop:
            await shop.work(BACKLOG, kafka_destination.topic)
        # An unknown settle after the crash costs a relay its lease, so a short lease ends the test sooner.
        async with relays(server.url, kafka_destination.url, tmp_path, 2, *SMALL_STEPS, *QUICK) as processes:
            async with await PostgresShop.open(server.url) as shop:
                with pytest.raises(ExceptionGroup) as lost:
                    async with _business_goes_on(shop, processes, kafka_destination.topic):
                        # Not in a thread: the business ends with the server, and must not cancel the kill.
                        server.kill()
                assert not lost.group_contains(AssertionError)
            await asyncio.to_thread(server.start)
            async with await PostgresShop.open(server.url) as shop:
                await shop.work(MORE, kafka_destination.topic)
                await until(shop, processes, *EMPTY)
                await everything_arrived(shop, await kafka_destination.ledger())
