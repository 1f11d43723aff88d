"""Fixtures shared by all tests: servers are started once per worker, databases are made per test."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator
from itertools import count
from typing import Any

import asyncpg
import pytest

from outrider.stores.postgres import PostgresSchema, PostgresStore
from outrider.testing.servers import PostgresServer

pytest.register_assert_rewrite("outrider.testing.contract")

_numbers = count(1)


@pytest.fixture(scope="session")
def postgres_server() -> Iterator[PostgresServer]:
    """A private server, gone when the tests end."""
    with PostgresServer(fsync=False) as server:
        yield server


@pytest.fixture(scope="session")
def installed_template(postgres_server: PostgresServer) -> str:
    """A database with the outbox installed, to be copied."""
    url = postgres_server.database("installed")
    asyncio.run(PostgresSchema(url).migrate())
    return "installed"


@pytest.fixture
async def postgres_url(postgres_server: PostgresServer, installed_template: str) -> AsyncIterator[str]:
    """A fresh database with the outbox installed."""
    name = f"test_{next(_numbers)}"
    admin = await asyncpg.connect(postgres_server.url)
    try:
        await admin.execute(f"CREATE DATABASE {name} TEMPLATE {installed_template}")
        yield postgres_server.url.rsplit("/", 1)[0] + f"/{name}"
        await admin.execute(f"DROP DATABASE {name} WITH (FORCE)")
    finally:
        await admin.close()


@pytest.fixture
async def conn(postgres_url: str) -> AsyncIterator[Any]:
    """A connection as an application has one."""
    conn = await asyncpg.connect(postgres_url)
    yield conn
    await conn.close()


@pytest.fixture
async def store(postgres_url: str) -> AsyncIterator[PostgresStore]:
    """An open store on PostgreSQL."""
    store = await PostgresStore.open(postgres_url)
    yield store
    await store.close()
