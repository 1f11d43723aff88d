"""The inboxes on PostgreSQL and MongoDB give the same answers as the one in memory, whatever is delivered or fails."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any

import asyncpg
import pytest
from pymongo import AsyncMongoClient

from outrider.stores.mongo import MongoInbox
from outrider.stores.postgres import PostgresInbox
from outrider.testing import ManualClock
from outrider.testing.contracts import InboxBench
from tests.support.inbox_comparison import compare_with_memory
from tests.support.mongo_benches import MongoInboxBench, shop
from tests.support.postgres_benches import EFFECTS, OWN_THE_CLOCK, PostgresInboxBench

__all__ = ["shop"]


@pytest.fixture
async def postgres_bench(postgres_url: str) -> AsyncIterator[InboxBench]:
    async with asyncpg.create_pool(postgres_url, min_size=1, max_size=4) as pool:
        await pool.execute(OWN_THE_CLOCK + EFFECTS)
        yield PostgresInboxBench(PostgresInbox.over(pool), ManualClock(), pool)


@pytest.fixture
async def mongo_bench(shop: AsyncMongoClient[dict[str, Any]]) -> InboxBench:
    clock = ManualClock()
    return MongoInboxBench(MongoInbox.over(shop, clock=clock), clock, shop)


@pytest.mark.postgres
@pytest.mark.parametrize("seed", range(12))
async def test_postgresql_gives_the_same_answers_as_memory(postgres_bench: InboxBench, seed: int) -> None:
    await compare_with_memory(postgres_bench, seed)


@pytest.mark.mongo
@pytest.mark.parametrize("seed", range(12))
async def test_mongodb_gives_the_same_answers_as_memory(mongo_bench: InboxBench, seed: int) -> None:
    await compare_with_memory(mongo_bench, seed)
