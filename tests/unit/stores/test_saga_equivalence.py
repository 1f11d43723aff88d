"""The saga store on SQLite gives the same answers as the one in memory, whatever is started and saved."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from outrider.stores.sqlite import SqliteSagas
from outrider.testing import ManualClock
from outrider.testing.contracts import SagaBench
from tests.support.saga_comparison import compare_with_memory
from tests.support.sqlite_benches import SqliteSagaBench


@pytest.fixture
async def sqlite_bench(sqlite_path: Path) -> AsyncIterator[SagaBench]:
    clock = ManualClock()
    store = SqliteSagas(sqlite_path, clock=clock)
    yield SqliteSagaBench(store, store, clock, sqlite_path)
    await store.close()


@pytest.mark.parametrize("seed", range(12))
async def test_sqlite_gives_the_same_answers_as_memory(sqlite_bench: SagaBench, seed: int) -> None:
    await compare_with_memory(sqlite_bench, seed)
