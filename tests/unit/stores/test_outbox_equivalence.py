"""The memory store and the SQLite store do the same, step by step, whatever happens to events."""

from __future__ import annotations

import random
from collections.abc import AsyncIterator
from datetime import timedelta
from pathlib import Path

import pytest

from outrider.stores.sqlite import SqliteSchema, SqliteStore
from tests.support.outbox_comparison import LANES, Pair, TestClock


@pytest.fixture
async def sqlite(tmp_path: Path) -> AsyncIterator[SqliteStore]:
    path = tmp_path / "outbox.db"
    await SqliteSchema(path, lanes=LANES).migrate()
    store = SqliteStore(path, clock=TestClock())
    yield store
    await store.close()


@pytest.mark.parametrize("seed", range(8))
async def test_both_stores_give_the_same_answers(sqlite: SqliteStore, seed: int) -> None:
    rng = random.Random(seed)
    assert isinstance(sqlite.clock, TestClock)
    pair = Pair(sqlite, sqlite.clock, rng)
    await pair.start()
    verbs = [pair.stage, pair.fetch_and_settle, pair.work_due, pair.run_admin_command]
    for _ in range(120):
        await rng.choice(verbs)()
        await pair.compare()
        sqlite.clock.time += timedelta(seconds=rng.choice([0, 0, 1, 4]))
