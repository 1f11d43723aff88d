"""The store, inbox and saga contracts on PostgreSQL through a PgBouncer that shares its sessions by transaction.

The application goes through it as well; only the table that the tests' clock reads is written directly.
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any
from urllib.parse import urlsplit

import asyncpg
import pytest

from outrider.stores.postgres import PostgresInbox, PostgresSagas, PostgresStore
from outrider.testing import ManualClock
from outrider.testing.contracts import ConcurrentSagaContract, InboxBench, InboxContract, SagaBench, StoreContract
from outrider.testing.harness import Harness
from tests.support.postgres_benches import (
    EFFECTS,
    OWN_THE_CLOCK,
    PostgresHarness,
    PostgresInboxBench,
    PostgresSagaBench,
)

pytestmark = [pytest.mark.postgres, pytest.mark.pgbouncer]


@pytest.fixture
async def through(postgres_url: str, pgbouncer_url: str) -> str:
    """The URL of a fresh database through the pooler."""
    admin = await asyncpg.connect(postgres_url)
    await admin.execute(OWN_THE_CLOCK + EFFECTS)
    await admin.close()
    return urlsplit(pgbouncer_url)._replace(path=urlsplit(postgres_url).path).geturl()


@pytest.fixture
async def pool(through: str) -> AsyncIterator[Any]:
    """The application's pool."""
    async with asyncpg.create_pool(through, min_size=1, max_size=8, statement_cache_size=0) as pool:
        yield pool


class TestPostgresStoreThroughAPooler(StoreContract):
    @pytest.fixture
    async def harness(self, through: str, pool: Any) -> AsyncIterator[Harness]:
        store = await PostgresStore.open(through, pooled=True)
        yield PostgresHarness(store, ManualClock(), pool)
        await store.close()


class TestPostgresInboxThroughAPooler(InboxContract):
    @pytest.fixture
    async def bench(self, through: str, pool: Any) -> AsyncIterator[InboxBench]:
        store = await PostgresInbox.open(through, pooled=True)
        yield PostgresInboxBench(store, ManualClock(), pool)
        await store.close()


class TestPostgresSagasThroughAPooler(ConcurrentSagaContract):
    @pytest.fixture
    async def bench(self, through: str, pool: Any, postgres_url: str) -> AsyncIterator[SagaBench]:
        store, other = [await PostgresSagas.open(through, pooled=True) for _ in range(2)]
        yield PostgresSagaBench(store, other, ManualClock(), pool, postgres_url)
        await store.close()
        await other.close()
