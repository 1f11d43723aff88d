"""The contract of encrypted fields on PostgreSQL."""

from __future__ import annotations

from collections.abc import AsyncIterator

import asyncpg
import pytest

from outrider.stores.postgres import PostgresStore
from outrider.testing import ManualClock
from outrider.testing.contracts.privacy import EncryptionContract
from outrider.testing.harness import Harness
from tests.support.postgres_benches import OWN_THE_CLOCK, PostgresHarness


class TestPostgresEncryption(EncryptionContract):
    @pytest.fixture
    async def harness(self, postgres_url: str) -> AsyncIterator[Harness]:
        async with asyncpg.create_pool(postgres_url, min_size=1, max_size=4) as pool:
            await pool.execute(OWN_THE_CLOCK)
            store = await PostgresStore.open(postgres_url)
            yield PostgresHarness(store, ManualClock(), pool)
            await store.close()
