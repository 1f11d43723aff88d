"""The inbox contract on SQLite."""

from __future__ import annotations

import sqlite3
from collections.abc import AsyncIterator
from contextlib import closing
from datetime import UTC, datetime
from pathlib import Path

import pytest

from outrider.stores.sqlite import SqliteInbox, SqliteSchema
from outrider.testing import ManualClock
from outrider.testing.contracts import InboxBench, InboxContract


class SqliteBench(InboxBench):
    """Effects in a table of the application."""

    concurrent = False

    def __init__(self, store: SqliteInbox, clock: ManualClock, path: Path) -> None:
        super().__init__(store, clock)
        self._path = path

    async def effect(self, tx: sqlite3.Connection, text: str) -> None:
        tx.execute("INSERT INTO effects (what) VALUES (?)", (text,))

    async def effects(self) -> list[str]:
        return [what for (what,) in self._read("SELECT what FROM effects ORDER BY id")]

    async def end(self, tx: sqlite3.Connection, *, commit: bool) -> None:
        tx.commit() if commit else tx.rollback()

    async def staged(self) -> int:
        [(count,)] = self._read("SELECT count(*) FROM outbox")
        return int(count)

    def _read(self, sql: str) -> list[tuple[str]]:
        with closing(sqlite3.connect(self._path)) as conn:
            return conn.execute(sql).fetchall()


class TestSqliteInbox(InboxContract):
    @pytest.fixture
    async def bench(self, tmp_path: Path) -> AsyncIterator[InboxBench]:
        path = tmp_path / "shop.db"
        await SqliteSchema(path).migrate()
        with closing(sqlite3.connect(path)) as conn:
            conn.execute("CREATE TABLE effects (id INTEGER PRIMARY KEY, what TEXT NOT NULL)")
        clock = ManualClock(start=datetime.now(UTC))
        store = SqliteInbox(path, clock=clock)
        yield SqliteBench(store, clock, path)
        await store.close()
