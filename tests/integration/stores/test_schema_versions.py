"""Tables of another version than the code knows, on every store: each program refuses to start and says what helps."""

from __future__ import annotations

import asyncio
import sqlite3
from collections.abc import Awaitable, Callable, Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import asyncpg
import pytest
from pymongo import MongoClient

from outrider import app
from outrider.errors import UsageError
from outrider.stores.migrations import SCHEMA_VERSION
from outrider.stores.sqlite import SqliteSchema

OPENERS: list[Callable[..., Awaitable[Any]]] = [app.open_store, app.open_inbox, app.open_sagas]
STORES = [
    "sqlite",
    pytest.param("postgres", marks=pytest.mark.postgres),
    pytest.param("mongo", marks=pytest.mark.mongo),
]


class InstalledStore:
    """An installed store, whose recorded version a test changes."""

    def __init__(self, url: str, schema: str, record: Callable[[str, int], None]) -> None:
        self.url, self.schema, self.record = url, schema, record

    def open_and_close(self, opener: Callable[..., Awaitable[Any]]) -> None:
        """Open a store as a program does at its start."""
        asyncio.run(self._open_and_close(opener))

    def migrate(self, lanes: int | None) -> None:
        """Migrate as the command line does."""
        asyncio.run(app.open_schema(self.url, schema=self.schema, lanes=lanes).migrate())

    async def _open_and_close(self, opener: Callable[..., Awaitable[Any]]) -> None:
        store = await opener(self.url, schema=self.schema)
        await store.close()


def _in_postgres(url: str) -> InstalledStore:
    async def update(name: str, value: int) -> None:
        conn = await asyncpg.connect(url)
        await conn.execute("UPDATE outrider.outbox_meta SET value = $2 WHERE name = $1", name, str(value))
        await conn.close()

    return InstalledStore(url, "outrider", lambda name, value: asyncio.run(update(name, value)))


def _in_mongo(url: str, schema: str) -> InstalledStore:
    def update(name: str, value: int) -> None:
        with MongoClient[dict[str, Any]](url) as client:
            client[schema].outbox_meta.update_one({"_id": name}, {"$set": {"value": value}})

    return InstalledStore(url, schema, update)


def _in_sqlite(path: Path) -> InstalledStore:
    asyncio.run(SqliteSchema(path).migrate())

    def update(name: str, value: int) -> None:
        with closing(sqlite3.connect(path)) as conn, conn:
            conn.execute("UPDATE outbox_meta SET value = ? WHERE name = ?", (value, name))

    return InstalledStore(f"sqlite:///{path}", "outrider", update)


@pytest.fixture(params=STORES)
def installed(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[InstalledStore]:
    """A store with everything installed; the versions are as they were after the test."""
    if request.param == "postgres":
        made = _in_postgres(request.getfixturevalue("postgres_url"))
    elif request.param == "mongo":
        made = _in_mongo(request.getfixturevalue("mongo_url"), request.getfixturevalue("installed_mongo"))
    else:
        made = _in_sqlite(tmp_path / "shop.db")
    yield made
    for name in ("version", "code_min"):
        made.record(name, SCHEMA_VERSION)


@pytest.mark.parametrize("opener", OPENERS)
def test_tables_that_need_newer_code_are_rejected_with_the_command_that_helps(
    installed: InstalledStore, opener: Callable[..., Awaitable[Any]]
) -> None:
    installed.open_and_close(opener)
    # Newer tables that this code may use.
    installed.record("version", SCHEMA_VERSION + 1)
    installed.open_and_close(opener)
    installed.record("code_min", SCHEMA_VERSION + 1)
    with pytest.raises(UsageError, match=f"version {SCHEMA_VERSION + 1}.*pip install --upgrade outrider"):
        installed.open_and_close(opener)


@pytest.mark.parametrize("opener", OPENERS)
def test_tables_that_are_too_old_are_rejected_with_the_command_that_helps(
    installed: InstalledStore, opener: Callable[..., Awaitable[Any]]
) -> None:
    installed.record("version", 0)
    with pytest.raises(UsageError, match=r"version 0.*outrider db migrate"):
        installed.open_and_close(opener)


def test_another_number_of_lanes_than_the_installed_one_is_rejected(installed: InstalledStore) -> None:
    for lanes in (None, 32):
        installed.migrate(lanes)
    with pytest.raises(UsageError, match="installed with 32 lanes per band, and 8 are wanted"):
        installed.migrate(8)
