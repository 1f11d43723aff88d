"""Fixtures shared by all tests: servers are started once per worker, databases are made per test."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator
from typing import Any
from uuid import uuid4

import asyncpg
import pytest

from outrider.stores.postgres import PostgresSchema, PostgresStore
from outrider.testing import servers

pytest.register_assert_rewrite("outrider.testing.contract")


@pytest.fixture(scope="session")
def admin_url() -> Iterator[str]:
    """A private server, gone when the tests end; or the one that OUTRIDER_TEST_POSTGRES names."""
    with servers.postgres_url() as url:
        yield url


@pytest.fixture(scope="session")
def installed_template(admin_url: str) -> str:
    """A database with the outbox installed, to be copied."""
    name = f"installed_{uuid4().hex[:12]}"
    url = asyncio.run(_create(admin_url, name))
    asyncio.run(PostgresSchema(url).migrate())
    return name


@pytest.fixture
async def empty_database(admin_url: str) -> AsyncIterator[str]:
    """A fresh database with nothing in it."""
    name = f"test_{uuid4().hex[:12]}"
    yield await _create(admin_url, name)
    await _drop(admin_url, name)


@pytest.fixture
async def postgres_url(admin_url: str, installed_template: str) -> AsyncIterator[str]:
    """A fresh database with the outbox installed."""
    name = f"test_{uuid4().hex[:12]}"
    yield await _create(admin_url, name, f"TEMPLATE {installed_template}")
    await _drop(admin_url, name)


async def _create(admin_url: str, name: str, options: str = "") -> str:
    admin = await asyncpg.connect(admin_url)
    await admin.execute(f"CREATE DATABASE {name} {options}")
    await admin.close()
    return admin_url.rsplit("/", 1)[0] + f"/{name}"


async def _drop(admin_url: str, name: str) -> None:
    admin = await asyncpg.connect(admin_url)
    await admin.execute(f"DROP DATABASE {name} WITH (FORCE)")
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
