"""The inbox contract on SQLite."""

from __future__ import annotations

import sqlite3
from collections.abc import AsyncIterator
from contextlib import closing
from datetime import UTC, datetime
from pathlib import Path

import pytest

from outrider.stores.sqlite import SqliteInbox
from outrider.testing import ManualClock
from outrider.testing.contracts import InboxBench, InboxContract
from tests.support.sqlite_benches import SqliteInboxBench


class TestSqliteInbox(InboxContract):
    @pytest.fixture
    async def bench(self, sqlite_path: Path) -> AsyncIterator[InboxBench]:
        with closing(sqlite3.connect(sqlite_path)) as conn:
            conn.execute("CREATE TABLE effects (id INTEGER PRIMARY KEY, what TEXT NOT NULL)")
        clock = ManualClock(start=datetime.now(UTC))
        store = SqliteInbox(sqlite_path, clock=clock)
        yield SqliteInboxBench(store, clock, sqlite_path)
        await store.close()
