"""The contract of payloads on PostgreSQL."""

from __future__ import annotations

from collections.abc import AsyncIterator

import asyncpg
import pytest

from outrider.stores.postgres import PostgresInbox, PostgresSagas, PostgresStore
from outrider.stores.postgres.payload import PostgresPayloads
from outrider.testing import ManualClock
from outrider.testing.contracts.payload import PayloadBench, PayloadContract
from tests.support.postgres_benches import OWN_THE_CLOCK, PostgresHarness


class TestPostgresPayloads(PayloadContract):
    @pytest.fixture
    async def bench(self, postgres_url: str) -> AsyncIterator[PayloadBench]:
        async with asyncpg.create_pool(postgres_url, min_size=1, max_size=4) as pool:
            await pool.execute(OWN_THE_CLOCK)
            store = await PostgresStore.open(postgres_url)
            others = (
                await PostgresPayloads.open(postgres_url),
                await PostgresInbox.open(postgres_url),
                await PostgresSagas.open(postgres_url),
            )
            yield PayloadBench(PostgresHarness(store, ManualClock(), pool), *others)
            for each in (store, *others):
                await each.close()
