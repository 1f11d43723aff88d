"""The inbox on SQLite gives the same answers as the inbox in memory, whatever is delivered and whatever fails."""

from __future__ import annotations

import sqlite3
from collections.abc import AsyncIterator
from contextlib import closing
from pathlib import Path

import pytest

from outrider.stores.sqlite import SqliteInbox
from outrider.testing import ManualClock
from outrider.testing.contracts import InboxBench
from tests.support.inbox_comparison import compare_with_memory
from tests.support.sqlite_benches import SqliteInboxBench


@pytest.fixture
async def sqlite_bench(sqlite_path: Path) -> AsyncIterator[InboxBench]:
    with closing(sqlite3.connect(sqlite_path)) as conn:
        conn.execute("CREATE TABLE effects (id INTEGER PRIMARY KEY, what TEXT NOT NULL)")
    clock = ManualClock()
    store = SqliteInbox(sqlite_path, clock=clock)
    yield SqliteInboxBench(store, clock, sqlite_path)
    await store.close()


@pytest.mark.parametrize("seed", range(12))
async def test_sqlite_gives_the_same_answers_as_memory(sqlite_bench: InboxBench, seed: int) -> None:
    await compare_with_memory(sqlite_bench, seed)
