"""The inbox contract on PostgreSQL, once through a pool of its own and once through the application's."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any

import asyncpg
import pytest

from outrider.stores.postgres import PostgresInbox
from outrider.testing import ManualClock
from outrider.testing.contracts import InboxBench, InboxContract
from outrider.testing.contracts.inbox_sequencing import HandlerRules, ReceiptRules
from tests.contract.outbox.test_postgres import OWN_THE_CLOCK

EFFECTS = "CREATE TABLE effects (id bigint GENERATED ALWAYS AS IDENTITY, what text NOT NULL)"


class PostgresBench(InboxBench):
    """Effects in a table of the application."""

    def __init__(self, store: PostgresInbox, clock: ManualClock, pool: Any) -> None:
        super().__init__(store, clock)
        self._pool = pool

    async def effect(self, tx: Any, text: str) -> None:
        await tx.execute("INSERT INTO effects (what) VALUES ($1)", text)

    async def effects(self) -> list[str]:
        return [row["what"] for row in await self._pool.fetch("SELECT what FROM effects ORDER BY id")]

    async def end(self, tx: Any, *, commit: bool) -> None:
        await tx.execute("COMMIT" if commit else "ROLLBACK")

    async def staged(self) -> int:
        count: int = await self._pool.fetchval("SELECT count(*) FROM outrider.outbox")
        return count

    async def advance(self, *, seconds: float) -> None:
        await super().advance(seconds=seconds)
        await self._pool.execute("UPDATE outrider.test_clock SET elapsed = $1", self.clock.boot_seconds())


@pytest.mark.postgres
class TestPostgresInbox(InboxContract):
    @pytest.fixture
    async def bench(self, postgres_url: str) -> AsyncIterator[InboxBench]:
        async with asyncpg.create_pool(postgres_url, min_size=1, max_size=4) as pool:
            await pool.execute(OWN_THE_CLOCK + EFFECTS)
            store = await PostgresInbox.open(postgres_url)
            yield PostgresBench(store, ManualClock(), pool)
            await store.close()


@pytest.mark.postgres
class TestPostgresInboxOverAPool(ReceiptRules, HandlerRules):
    """The rules about transactions: the pool is the application's, and all else is the same code."""

    @pytest.fixture
    async def bench(self, postgres_url: str) -> AsyncIterator[InboxBench]:
        async with asyncpg.create_pool(postgres_url, min_size=1, max_size=4) as pool:
            await pool.execute(OWN_THE_CLOCK + EFFECTS)
            yield PostgresBench(PostgresInbox.over(pool), ManualClock(), pool)
