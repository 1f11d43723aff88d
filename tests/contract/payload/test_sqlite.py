"""The contract of payloads on SQLite."""

from __future__ import annotations

from collections.abc import AsyncIterator
from datetime import UTC, datetime
from pathlib import Path

import pytest

from outrider.stores.sqlite import SqliteInbox, SqlitePayloads, SqliteSagas, SqliteSchema, SqliteStore
from outrider.testing import ManualClock
from outrider.testing.contracts.payload import PayloadBench, PayloadContract
from tests.contract.outbox.test_sqlite import SqliteHarness


class TestSqlitePayloads(PayloadContract):
    @pytest.fixture
    async def bench(self, tmp_path: Path) -> AsyncIterator[PayloadBench]:
        path = tmp_path / "shop.db"
        await SqliteSchema(path).migrate()
        clock = ManualClock(start=datetime.now(UTC))
        store = SqliteStore(path, clock=clock)
        others = SqlitePayloads(path, clock=clock), SqliteInbox(path, clock=clock), SqliteSagas(path, clock=clock)
        yield PayloadBench(SqliteHarness(store, clock, path), *others)
        for each in (store, *others):
            await each.close()
