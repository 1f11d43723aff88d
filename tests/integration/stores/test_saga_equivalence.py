"""The saga store on PostgreSQL gives the same answers as the one in memory, whatever is started and saved."""

from __future__ import annotations

from collections.abc import AsyncIterator

import asyncpg
import pytest

from outrider.stores.postgres import PostgresSagas
from outrider.testing import ManualClock
from outrider.testing.contracts import SagaBench
from tests.support.postgres_benches import OWN_THE_CLOCK, PostgresSagaBench
from tests.support.saga_comparison import compare_with_memory


@pytest.fixture
async def postgres_bench(postgres_url: str) -> AsyncIterator[SagaBench]:
    async with asyncpg.create_pool(postgres_url, min_size=1, max_size=4) as pool:
        await pool.execute(OWN_THE_CLOCK)
        sagas = PostgresSagas.over(pool)
        yield PostgresSagaBench(sagas, sagas, ManualClock(), pool, postgres_url)


@pytest.mark.postgres
@pytest.mark.parametrize("seed", range(6))
async def test_postgresql_gives_the_same_answers_as_memory(postgres_bench: SagaBench, seed: int) -> None:
    await compare_with_memory(postgres_bench, seed)
