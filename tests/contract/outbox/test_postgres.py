"""The store contract on PostgreSQL. Its time is the test's: the clock function reads a table."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from typing import Any
from uuid import UUID

import asyncpg
import pytest

from outrider.stores.postgres import PostgresStore
from outrider.testing import ManualClock
from outrider.testing.contracts import StoreContract
from outrider.testing.harness import Harness

OWN_THE_CLOCK = """
CREATE TABLE outrider.test_clock (elapsed float8 NOT NULL);
INSERT INTO outrider.test_clock VALUES (0);
CREATE OR REPLACE FUNCTION outrider.outbox_clock() RETURNS timestamptz LANGUAGE sql VOLATILE
RETURN (SELECT timestamptz '2030-01-01 00:00:00+00' + elapsed * interval '1 second' FROM outrider.test_clock);
"""


class PostgresHarness(Harness):
    """Transactions from a pool, as an application has them."""

    def __init__(self, store: PostgresStore, clock: ManualClock, pool: Any) -> None:
        super().__init__(store, clock)
        self._pool = pool

    @asynccontextmanager
    async def transaction(self) -> AsyncIterator[Any]:
        async with self._pool.acquire() as conn, conn.transaction():
            yield conn

    def savepoint(self, conn: Any) -> AbstractAsyncContextManager[Any]:
        nested: AbstractAsyncContextManager[Any] = conn.transaction()
        return nested

    async def advance(self, *, seconds: float) -> None:
        await super().advance(seconds=seconds)
        await self._pool.execute("UPDATE outrider.test_clock SET elapsed = $1", self.clock.boot_seconds())

    async def insert(self, event_id: UUID, event_type: str, payload: str, key: str) -> None:
        columns = "event_id, event_type, payload, aggregate_id"
        values = event_id, event_type, payload, key
        await self._pool.execute(f"INSERT INTO outrider.outbox ({columns}) VALUES ($1, $2, $3, $4)", *values)


@pytest.mark.postgres
class TestPostgresStore(StoreContract):
    @pytest.fixture
    async def harness(self, postgres_url: str) -> AsyncIterator[Harness]:
        async with asyncpg.create_pool(postgres_url, min_size=1, max_size=10) as pool:
            await pool.execute(OWN_THE_CLOCK)
            store = await PostgresStore.open(postgres_url)
            yield PostgresHarness(store, ManualClock(), pool)
            await store.close()
