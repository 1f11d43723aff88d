"""The contract of encrypted fields on SQLite."""

from __future__ import annotations

import shutil
import sqlite3
from collections.abc import AsyncIterator
from contextlib import closing
from datetime import UTC, datetime
from pathlib import Path

import pytest

from outrider.stores.sqlite import SqliteInbox, SqlitePrivacy, SqliteSagas, SqliteStore
from outrider.testing import ManualClock
from outrider.testing.contracts.privacy import EncryptionContract, PrivacyBench, PrivacyContract
from outrider.testing.contracts.subjects import SubjectBench, SubjectContract
from outrider.testing.harness import Harness
from tests.contract.outbox.test_sqlite import SqliteHarness
from tests.support.sqlite_benches import SqliteInboxBench


class TestSqliteEncryption(EncryptionContract):
    @pytest.fixture
    async def harness(self, sqlite_path: Path) -> AsyncIterator[Harness]:
        clock = ManualClock(start=datetime.now(UTC))
        store = SqliteStore(sqlite_path, clock=clock)
        yield SqliteHarness(store, clock, sqlite_path)
        await store.close()


class TestSqlitePrivacy(PrivacyContract):
    @pytest.fixture
    async def bench(self, sqlite_path: Path) -> AsyncIterator[PrivacyBench]:
        clock = ManualClock(start=datetime.now(UTC))
        store = SqliteStore(sqlite_path, clock=clock)
        others = (
            SqlitePrivacy(sqlite_path, clock=clock),
            SqliteInbox(sqlite_path, clock=clock),
            SqliteSagas(sqlite_path, clock=clock),
        )
        yield PrivacyBench(SqliteHarness(store, clock, sqlite_path), *others)
        for each in (store, *others):
            await each.close()


class TestSqliteSubjects(SubjectContract):
    @pytest.fixture
    async def bench(self, sqlite_path: Path) -> AsyncIterator[SubjectBench]:
        keys = Path(shutil.copy(sqlite_path, sqlite_path.with_name("keys.db")))
        with closing(sqlite3.connect(sqlite_path)) as conn:
            conn.execute("CREATE TABLE effects (id INTEGER PRIMARY KEY, what TEXT NOT NULL)")
        clock = ManualClock(start=datetime.now(UTC))
        store = SqliteInbox(sqlite_path, clock=clock)

        async def opening() -> SqlitePrivacy:
            return SqlitePrivacy(keys)

        yield SubjectBench(SqliteInboxBench(store, clock, sqlite_path), opening)
        await store.close()
