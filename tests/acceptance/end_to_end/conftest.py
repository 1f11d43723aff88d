"""A business and a broker's place for each test of this folder."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from outrider.stores.mongo import MongoSchema
from outrider.stores.sqlite import SqliteSchema
from outrider.testing.servers.mongo import MongoServer
from tests.acceptance.end_to_end.mongo_shop import FORGETFUL, MongoShop
from tests.acceptance.end_to_end.shop import PostgresShop, SqliteShop
from tests.support.destinations import KafkaPost, RabbitPost


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
    """A business on MongoDB, with a server of its own that tests may trouble."""
    with MongoServer(settings=FORGETFUL) as server:
        await MongoSchema(server.url).migrate()
        async with await MongoShop.open(server.url) as shop:
            yield shop


@pytest.fixture
async def kafka_post(kafka: str) -> AsyncIterator[KafkaPost]:
    """A topic on the shared Kafka."""
    post = KafkaPost(kafka)
    yield post
    await post.remove()


@pytest.fixture
async def rabbit_post(rabbitmq_url: str) -> AsyncIterator[RabbitPost]:
    """An exchange and a queue on the shared RabbitMQ."""
    post = RabbitPost(rabbitmq_url)
    yield post
    await post.remove()
