"""The store contract on SQLite."""

from __future__ import annotations

import asyncio
import sqlite3
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, closing
from datetime import UTC, datetime
from pathlib import Path
from uuid import UUID

import pytest

from outrider.stores.sqlite import SqliteStore
from outrider.testing import ManualClock
from outrider.testing.contracts import StoreContract
from outrider.testing.harness import Harness


class SqliteHarness(Harness):
    """Transactions one after another: SQLite has one writer at a time."""

    concurrent = False

    def __init__(self, store: SqliteStore, clock: ManualClock, path: Path) -> None:
        super().__init__(store, clock)
        self._path = path
        self._turn = asyncio.Lock()

    @asynccontextmanager
    async def transaction(self) -> AsyncIterator[sqlite3.Connection]:
        async with self._turn:
            with closing(sqlite3.connect(self._path, isolation_level=None)) as conn:
                conn.execute("BEGIN IMMEDIATE")
                try:
                    yield conn
                except BaseException:
                    conn.rollback()
                    raise
                conn.commit()

    @asynccontextmanager
    async def savepoint(self, conn: sqlite3.Connection) -> AsyncIterator[None]:
        conn.execute("SAVEPOINT inner_block")
        try:
            yield
        except BaseException:
            conn.execute("ROLLBACK TO inner_block")
            raise
        finally:
            conn.execute("RELEASE inner_block")

    async def insert(self, event_id: UUID, event_type: str, payload: str, key: str, attempts: int = 0) -> None:
        async with self.transaction() as conn:
            columns = "event_id, event_type, payload, aggregate_id, attempts"
            values = (str(event_id), event_type, payload, key, attempts)
            conn.execute(f"INSERT INTO outbox ({columns}) VALUES (?, ?, ?, ?, ?)", values)

    async def remove(self, place: str, event_id: UUID, *, kind: str | None = None) -> None:
        table = {"dead_letters": "outbox_dead_letter", "outbox": "outbox"}.get(place, f"outbox_{place}")
        chosen = "event_id = ?" if kind is None else f"event_id = ? AND kind = '{kind}'"
        async with self.transaction() as conn:
            assert conn.execute(f"DELETE FROM {table} WHERE {chosen}", (str(event_id),)).rowcount


class TestSqliteStore(StoreContract):
    @pytest.fixture
    async def harness(self, sqlite_path: Path) -> AsyncIterator[Harness]:
        # Staging through the caller's connection reads the machine's clock, so the test's starts there.
        clock = ManualClock(start=datetime.now(UTC))
        store = SqliteStore(sqlite_path, clock=clock)
        yield SqliteHarness(store, clock, sqlite_path)
        await store.close()
