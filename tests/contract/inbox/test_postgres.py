"""The inbox contract on PostgreSQL, once through a pool of its own and once through the application's."""

from __future__ import annotations

from collections.abc import AsyncIterator

import asyncpg
import pytest

from outrider.stores.postgres import PostgresInbox
from outrider.testing import ManualClock
from outrider.testing.contracts import InboxBench, InboxContract
from outrider.testing.contracts.inbox_sequencing import HandlerRules, ReceiptRules
from tests.support.postgres_benches import EFFECTS, OWN_THE_CLOCK, PostgresInboxBench


@pytest.mark.postgres
class TestPostgresInbox(InboxContract):
    @pytest.fixture
    async def bench(self, postgres_url: str) -> AsyncIterator[InboxBench]:
        async with asyncpg.create_pool(postgres_url, min_size=1, max_size=4) as pool:
            await pool.execute(OWN_THE_CLOCK + EFFECTS)
            store = await PostgresInbox.open(postgres_url)
            yield PostgresInboxBench(store, ManualClock(), pool)
            await store.close()


@pytest.mark.postgres
class TestPostgresInboxOverAPool(ReceiptRules, HandlerRules):
    """The rules about transactions: the pool is the application's, and all else is the same code."""

    @pytest.fixture
    async def bench(self, postgres_url: str) -> AsyncIterator[InboxBench]:
        async with asyncpg.create_pool(postgres_url, min_size=1, max_size=4) as pool:
            await pool.execute(OWN_THE_CLOCK + EFFECTS)
            yield PostgresInboxBench(PostgresInbox.over(pool), ManualClock(), pool)
