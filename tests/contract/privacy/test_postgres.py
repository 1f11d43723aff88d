"""The contract of encrypted fields on PostgreSQL."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator

import asyncpg
import pytest

from outrider.privacy import KeyRing
from outrider.privacy.store import CopyKind, Rewrite
from outrider.stores.postgres import PostgresInbox, PostgresSagas, PostgresStore
from outrider.stores.postgres.privacy import PostgresPrivacy
from outrider.testing import ManualClock
from outrider.testing.contracts.privacy import EncryptionContract, PrivacyBench, PrivacyContract, encrypting
from outrider.testing.contracts.subjects import SubjectBench, SubjectContract
from outrider.testing.harness import Harness
from tests.support.postgres_benches import EFFECTS, OWN_THE_CLOCK, PostgresHarness, PostgresInboxBench


class TestPostgresEncryption(EncryptionContract):
    @pytest.fixture
    async def harness(self, postgres_url: str) -> AsyncIterator[Harness]:
        async with asyncpg.create_pool(postgres_url, min_size=1, max_size=4) as pool:
            await pool.execute(OWN_THE_CLOCK)
            store = await PostgresStore.open(postgres_url)
            yield PostgresHarness(store, ManualClock(), pool)
            await store.close()


class TestPostgresPrivacy(PrivacyContract):
    @pytest.fixture
    async def bench(self, postgres_url: str) -> AsyncIterator[PrivacyBench]:
        async with asyncpg.create_pool(postgres_url, min_size=1, max_size=4) as pool:
            await pool.execute(OWN_THE_CLOCK)
            store = await PostgresStore.open(postgres_url)
            others = (
                await PostgresPrivacy.open(postgres_url),
                await PostgresInbox.open(postgres_url),
                await PostgresSagas.open(postgres_url),
            )
            yield PrivacyBench(PostgresHarness(store, ManualClock(), pool), *others)
            for each in (store, *others):
                await each.close()

    async def test_a_row_that_its_relay_has_locked_is_left_and_nothing_waits(
        self, bench: PrivacyBench, rings: tuple[KeyRing, KeyRing], postgres_url: str
    ) -> None:
        await bench.fill(encrypting(rings[0]))
        page = await bench.privacy.copies(CopyKind.EVENT, None, 5)
        rewrites = [Rewrite(copy, json.dumps({"n": 1})) for copy in page.copies]
        conn = await asyncpg.connect(postgres_url)
        async with conn.transaction():
            sql = "SELECT event_id FROM outrider.outbox WHERE event_id = $1 FOR UPDATE"
            assert await conn.fetchval(sql, page.copies[0].event_id)
            assert await bench.privacy.rewrite(CopyKind.EVENT, rewrites) == 4
        assert await bench.privacy.rewrite(CopyKind.EVENT, rewrites) == 1
        await conn.close()


class TestPostgresSubjects(SubjectContract):
    @pytest.fixture
    async def bench(self, postgres_url: str) -> AsyncIterator[SubjectBench]:
        async with asyncpg.create_pool(postgres_url, min_size=1, max_size=4) as pool:
            await pool.execute(OWN_THE_CLOCK + EFFECTS)
            store = await PostgresInbox.open(postgres_url)
            inbox = PostgresInboxBench(store, ManualClock(), pool)
            yield SubjectBench(inbox, lambda: PostgresPrivacy.open(postgres_url))
            await store.close()
