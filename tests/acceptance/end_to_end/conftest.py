"""A shop and a destination at the broker for each test of this folder."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from outrider.stores.mongo import MongoSchema
from outrider.stores.sqlite import SqliteSchema
from outrider.testing.servers.mongo import MongoServer
from tests.acceptance.end_to_end.mongo_shop import FORGETFUL, MongoShop
from tests.acceptance.end_to_end.shop import PostgresShop, SqliteShop
from tests.support.destinations import KafkaDestination, RabbitDestination


@pytest.fixture
async def postgres_shop(postgres_url: str) -> AsyncIterator[PostgresShop]:
    """A business on PostgreSQL."""
    async with await PostgresShop.open(postgres_url) as shop:
        yield shop


@pytest.fixture
async def sqlite_shop(tmp_path: Path) -> AsyncIterator[SqliteShop]:
    """A business on SQLite."""
    path = tmp_path / "shop.db"
    await SqliteSchema(path).migrate()
    async with SqliteShop(path) as shop:
        yield shop


@pytest.fixture
async def mongo_shop() -> AsyncIterator[MongoShop]:
    """A business on MongoDB, with a server of its own in which tests may inject faults."""
    with MongoServer(settings=FORGETFUL) as server:
        await MongoSchema(server.url).migrate()
        async with await MongoShop.open(server.url) as shop:
            yield shop


@pytest.fixture
async def kafka_destination(kafka: str) -> AsyncIterator[KafkaDestination]:
    """A topic on the shared Kafka."""
    destination = KafkaDestination(kafka)
    yield destination
    await destination.remove()


@pytest.fixture
async def rabbit_destination(rabbitmq_url: str) -> AsyncIterator[RabbitDestination]:
    """An exchange and a queue on the shared RabbitMQ."""
    destination = RabbitDestination(rabbitmq_url)
    yield destination
    await destination.remove()
