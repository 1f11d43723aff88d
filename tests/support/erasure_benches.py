"""The stores of one database as the contract of erasure drives them, and all their rows as text."""

from __future__ import annotations

import sqlite3
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager, closing
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import asyncpg
from pymongo import AsyncMongoClient

from outrider.stores.mongo import MongoErasure, MongoInbox, MongoPrivacy, MongoSagas, MongoStore
from outrider.stores.mongo.database import CODEC
from outrider.stores.postgres import PostgresInbox, PostgresSagas, PostgresStore
from outrider.stores.postgres.erasure import PostgresErasure
from outrider.stores.postgres.privacy import PostgresPrivacy
from outrider.stores.sqlite import SqliteErasure, SqliteInbox, SqlitePrivacy, SqliteSagas, SqliteStore
from outrider.testing import ManualClock
from outrider.testing.contracts.erasure import ErasureBench
from outrider.testing.harness import Harness
from tests.contract.outbox.test_mongo import MongoHarness
from tests.contract.outbox.test_sqlite import SqliteHarness
from tests.support.postgres_benches import OWN_THE_CLOCK, PostgresHarness

TABLES = "SELECT tablename FROM pg_tables WHERE schemaname = 'outrider' AND tablename !~ 'outbox_archive_' ORDER BY 1"


@asynccontextmanager
async def postgres_bench(url: str) -> AsyncIterator[ErasureBench]:
    """Open all stores of a PostgreSQL database."""
    async with asyncpg.create_pool(url, min_size=1, max_size=4) as pool:
        await pool.execute(OWN_THE_CLOCK)
        harness = PostgresHarness(await PostgresStore.open(url), ManualClock(), pool)
        others = (
            await PostgresErasure.open(url),
            await PostgresPrivacy.open(url),
            await PostgresInbox.open(url),
            await PostgresSagas.open(url),
        )

        async def dump() -> Mapping[str, list[str]]:
            found = {}
            for [table] in await pool.fetch(TABLES):
                rows = await pool.fetch(f"SELECT t::text FROM outrider.{table} AS t ORDER BY 1")
                found[table] = [row[0].replace('""', '"') for row in rows]
            return found

        async with _closing(harness, *others):
            yield ErasureBench(harness, *others, dump)


@asynccontextmanager
async def sqlite_bench(path: Path) -> AsyncIterator[ErasureBench]:
    """Open all stores of a SQLite file."""
    clock = ManualClock(start=datetime.now(UTC))
    harness = SqliteHarness(SqliteStore(path, clock=clock), clock, path)
    others = (
        SqliteErasure(path, clock=clock),
        SqlitePrivacy(path, clock=clock),
        SqliteInbox(path, clock=clock),
        SqliteSagas(path, clock=clock),
    )

    async def dump() -> Mapping[str, list[str]]:
        with closing(sqlite3.connect(path)) as conn:
            names = [name for (name,) in conn.execute("SELECT name FROM sqlite_schema WHERE type = 'table' ORDER BY 1")]
            every = {name: conn.execute(f"SELECT * FROM {name}").fetchall() for name in names}
        return {name: sorted(" | ".join(map(_text, row)) for row in rows) for name, rows in every.items()}

    async with _closing(harness, *others):
        yield ErasureBench(harness, *others, dump)


@asynccontextmanager
async def mongo_bench(url: str) -> AsyncIterator[ErasureBench]:
    """Open all stores of a MongoDB database."""
    clock = ManualClock(start=datetime.now(UTC))
    async with AsyncMongoClient[dict[str, Any]](url) as client:
        harness = MongoHarness(await MongoStore.open(url, clock=clock), clock, client)
        others = (
            await MongoErasure.open(url, clock=clock),
            await MongoPrivacy.open(url, clock=clock),
            await MongoInbox.open(url, clock=clock),
            await MongoSagas.open(url, clock=clock),
        )

        async def dump() -> Mapping[str, list[str]]:
            database = client.get_database("outrider", codec_options=CODEC)
            names = [name for name in await database.list_collection_names() if not name.startswith("system.")]
            return {name: sorted([_text(row) for row in await database[name].find().to_list()]) for name in names}

        async with _closing(harness, *others):
            yield ErasureBench(harness, *others, dump)


@asynccontextmanager
async def _closing(harness: Harness, *stores: Any) -> AsyncIterator[None]:
    try:
        yield
    finally:
        for store in (harness.store, *stores):
            await store.close()


def _text(value: Any) -> str:
    """Return a value as text, with bytes as hexadecimal digits."""
    if isinstance(value, dict):
        return " | ".join(f"{name}={_text(part)}" for name, part in value.items())
    return value.hex() if isinstance(value, bytes) else str(value)
