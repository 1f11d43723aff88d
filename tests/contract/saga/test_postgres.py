"""The saga contract on PostgreSQL, once through a pool of its own and once through the application's."""

from __future__ import annotations

from collections.abc import AsyncIterator

import asyncpg
import pytest

from outrider.stores.postgres import PostgresSagas
from outrider.testing import ManualClock
from outrider.testing.contracts import ConcurrentSagaContract, SagaBench
from outrider.testing.contracts.saga_claims import ConcurrencyRules
from outrider.testing.contracts.saga_turns import HandlerTransactionRules
from tests.support.postgres_benches import OWN_THE_CLOCK, PostgresSagaBench

pytestmark = pytest.mark.postgres


class TestPostgresSagas(ConcurrentSagaContract):
    @pytest.fixture
    async def bench(self, postgres_url: str) -> AsyncIterator[SagaBench]:
        async with asyncpg.create_pool(postgres_url, min_size=1, max_size=4) as pool:
            await pool.execute(OWN_THE_CLOCK)
            store, other = await PostgresSagas.open(postgres_url), await PostgresSagas.open(postgres_url)
            yield PostgresSagaBench(store, other, ManualClock(), pool, postgres_url)
            await store.close()
            await other.close()


class TestPostgresSagasOverAPool(HandlerTransactionRules, ConcurrencyRules):
    """The rules about transactions: the pool is the application's, and all else is the same code."""

    @pytest.fixture
    async def bench(self, postgres_url: str) -> AsyncIterator[SagaBench]:
        async with asyncpg.create_pool(postgres_url, min_size=1, max_size=8) as pool:
            await pool.execute(OWN_THE_CLOCK)
            yield PostgresSagaBench(
                PostgresSagas.over(pool), PostgresSagas.over(pool), ManualClock(), pool, postgres_url
            )
