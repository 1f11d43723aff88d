"""The saga contract on PostgreSQL, once through a pool of its own and once through the application's."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from typing import Any

import asyncpg
import pytest

from outrider.drivers import asyncpg as driver
from outrider.saga.store import SagaStore
from outrider.stores.postgres import PostgresSagas, PostgresStore
from outrider.testing import ManualClock
from outrider.testing.contracts import ConcurrentSagaContract, SagaBench
from outrider.testing.contracts.saga_claims import ConcurrencyRules
from outrider.testing.contracts.saga_turns import HandlerTransactionRules
from tests.contract.outbox.test_postgres import OWN_THE_CLOCK

pytestmark = pytest.mark.postgres


class PostgresBench(SagaBench):
    """Two stores on one database."""

    driver = driver

    def __init__(self, store: PostgresSagas, other: PostgresSagas, clock: ManualClock, pool: Any, url: str) -> None:
        super().__init__(store, clock)
        self._other, self._pool, self._url = other, pool, url

    def other(self) -> SagaStore:
        return self._other

    def outside(self) -> AbstractAsyncContextManager[Any]:
        lent: AbstractAsyncContextManager[Any] = self._pool.acquire()
        return lent

    @asynccontextmanager
    async def outbox(self) -> AsyncIterator[PostgresStore]:
        store = await PostgresStore.open(self._url, connections_max=2)
        yield store
        await store.close()

    async def advance(self, *, seconds: float) -> None:
        await super().advance(seconds=seconds)
        await self._pool.execute("UPDATE outrider.test_clock SET elapsed = $1", self.clock.boot_seconds())


class TestPostgresSagas(ConcurrentSagaContract):
    @pytest.fixture
    async def bench(self, postgres_url: str) -> AsyncIterator[SagaBench]:
        async with asyncpg.create_pool(postgres_url, min_size=1, max_size=4) as pool:
            await pool.execute(OWN_THE_CLOCK)
            store, other = await PostgresSagas.open(postgres_url), await PostgresSagas.open(postgres_url)
            yield PostgresBench(store, other, ManualClock(), pool, postgres_url)
            await store.close()
            await other.close()


class TestPostgresSagasOverAPool(HandlerTransactionRules, ConcurrencyRules):
    """The rules about transactions: the pool is the application's, and all else is the same code."""

    @pytest.fixture
    async def bench(self, postgres_url: str) -> AsyncIterator[SagaBench]:
        async with asyncpg.create_pool(postgres_url, min_size=1, max_size=8) as pool:
            await pool.execute(OWN_THE_CLOCK)
            yield PostgresBench(PostgresSagas.over(pool), PostgresSagas.over(pool), ManualClock(), pool, postgres_url)
