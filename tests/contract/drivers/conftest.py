"""Databases for the drivers' suite: an application's own table beside the outbox."""

from __future__ import annotations

import asyncio
import shutil
import sqlite3
from collections.abc import AsyncIterator, Iterator
from contextlib import closing
from pathlib import Path
from uuid import uuid4

import asyncpg
import pytest

from tests.contract.drivers.connection_case import Case
from tests.contract.drivers.connection_kinds import Chosen
from tests.contract.drivers.databases import NOTES, PostgresDatabase, SqliteDatabase
from tests.support.postgres_databases import create_database, drop_database

TABLES = (
    *("notes", "outrider.outbox", "outrider.outbox_counter"),
    *("outrider.saga_instance", "outrider.saga_mailbox", "outrider.saga_barrier"),
)
# To truncate is to write new files, one for each index too: many times the cost of deleting a few rows.
EMPTY = "SET session_replication_role = replica; " + "; ".join(f"DELETE FROM {table}" for table in TABLES)


@pytest.fixture(scope="session")
def shop_url(admin_url: str, installed_template: str) -> Iterator[str]:
    """A database in PostgreSQL for the whole suite, which would take long if each test made one."""
    name = f"drivers_{uuid4().hex[:12]}"
    url = asyncio.run(create_database(admin_url, name, installed_template))
    asyncio.run(execute(url, NOTES))
    yield url
    asyncio.run(drop_database(admin_url, name))


@pytest.fixture
async def postgres_database(shop_url: str) -> PostgresDatabase:
    """That database, empty."""
    await execute(shop_url, EMPTY)
    return PostgresDatabase(shop_url)


async def execute(url: str, sql: str) -> None:
    conn = await asyncpg.connect(url)
    await conn.execute(sql)
    await conn.close()


@pytest.fixture
def pooled_database(postgres_database: PostgresDatabase, pgbouncer_url: str) -> PostgresDatabase:
    """The same, behind a pooler that gives every transaction another session."""
    return PostgresDatabase(postgres_database.url, pgbouncer_url)


@pytest.fixture(scope="session")
def sqlite_template(installed_sqlite: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A file with everything installed, to be copied."""
    path = Path(shutil.copy(installed_sqlite, tmp_path_factory.mktemp("drivers") / "installed.db"))
    with closing(sqlite3.connect(path)) as conn:
        conn.execute(NOTES)
    return path


@pytest.fixture
def sqlite_database(sqlite_template: Path, tmp_path: Path) -> SqliteDatabase:
    """A fresh file."""
    return SqliteDatabase(Path(shutil.copy(sqlite_template, tmp_path / "shop.db")))


@pytest.fixture
async def case(chosen: Chosen) -> AsyncIterator[Case]:
    """The kind of connection under test; a module says which with a fixture `chosen`."""
    made = chosen.kind(chosen.database)
    yield made
    await made.close()
