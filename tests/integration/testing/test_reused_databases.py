"""A database that goes from test to test is what the installation left, or it goes no further."""

from __future__ import annotations

from collections.abc import AsyncIterator

import asyncpg
import pytest

import outrider
from outrider import Event
from tests.support.postgres_benches import OWN_THE_CLOCK
from tests.support.postgres_databases import DatabasePool, Installed

pytestmark = pytest.mark.postgres

RESTORED = [
    "CREATE TABLE effects (id bigint GENERATED ALWAYS AS IDENTITY); INSERT INTO effects DEFAULT VALUES",
    "CREATE VIEW outrider.everything AS SELECT * FROM outrider.outbox",
    "CREATE FUNCTION public.now_and_then() RETURNS int LANGUAGE sql RETURN 1",
    OWN_THE_CLOCK,
    "UPDATE outrider.outbox_lane SET owner = gen_random_uuid(), epoch = 7",
    "DELETE FROM outrider.outbox_meta",
    "ANALYZE",
]
DROPPED = [
    "ALTER TABLE outrider.outbox ADD COLUMN more int",
    "DROP TABLE outrider.saga_mailbox CASCADE",
    "CREATE TYPE public.mood AS ENUM ('fine')",
    "CREATE SCHEMA elsewhere",
    "GRANT SELECT ON outrider.outbox TO PUBLIC",
    "CREATE INDEX ON outrider.outbox (topic)",
]


@pytest.fixture
async def pool(admin_url: str, installed_template: str) -> AsyncIterator[DatabasePool]:
    pool = DatabasePool(admin_url, installed_template)
    yield pool
    await pool.close()


async def _noted(url: str) -> Installed:
    conn = await asyncpg.connect(url)
    try:
        return await Installed.of(conn)
    finally:
        await conn.close()


@pytest.mark.parametrize("change", RESTORED, ids=lambda sql: " ".join(sql.split()[:3]))
async def test_changes_are_taken_back(pool: DatabasePool, change: str) -> None:
    url = await pool.take()
    installed = await _noted(url)
    conn = await asyncpg.connect(url)
    await conn.execute(change)
    async with conn.transaction():
        await outrider.stage(conn, Event("order.placed", {}, key="A", topic="orders", sequence="auto"))
    # The session that a test forgot is ended.
    await pool.give_back(url)
    assert await pool.take() == url
    assert await _noted(url) == installed
    await pool.give_back(url)
    conn.terminate()


@pytest.mark.parametrize("change", DROPPED, ids=lambda sql: " ".join(sql.split()[:3]))
async def test_a_database_that_cannot_be_restored_is_dropped(pool: DatabasePool, change: str) -> None:
    url = await pool.take()
    conn = await asyncpg.connect(url)
    await conn.execute(change)
    await conn.close()
    await pool.give_back(url)
    with pytest.raises(asyncpg.InvalidCatalogNameError):
        await asyncpg.connect(url)
