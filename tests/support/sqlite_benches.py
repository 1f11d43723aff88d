"""The inbox and the sagas on SQLite as the contract suites drive them."""

from __future__ import annotations

import json
import sqlite3
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, closing
from pathlib import Path
from typing import Any

from outrider.drivers import sqlite as driver
from outrider.saga.store import SagaStore
from outrider.stores.sqlite import SqliteInbox, SqliteSagas, SqliteStore
from outrider.testing import ManualClock
from outrider.testing.contracts import InboxBench, SagaBench
from outrider.testing.saga_harness import connection_of


class SqliteInboxBench(InboxBench):
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

    async def staged(self) -> list[dict[str, str]]:
        return [json.loads(headers) for (headers,) in self._read("SELECT headers FROM outbox ORDER BY id")]

    def _read(self, sql: str) -> list[tuple[str]]:
        with closing(sqlite3.connect(self._path)) as conn:
            return conn.execute(sql).fetchall()


class SqliteSagaBench(SagaBench):
    """Two connections to one file."""

    driver = driver

    def __init__(self, store: SqliteSagas, other: SqliteSagas, clock: ManualClock, path: Path) -> None:
        super().__init__(store, clock)
        self._other, self._path = other, path

    def other(self) -> SagaStore:
        return self._other

    @asynccontextmanager
    async def outside(self) -> AsyncIterator[sqlite3.Connection]:
        with closing(sqlite3.connect(self._path)) as conn:
            yield conn

    @asynccontextmanager
    async def outbox(self) -> AsyncIterator[SqliteStore]:
        store = SqliteStore(self._path, clock=self.clock)
        yield store
        await store.close()

    async def call_driver(self, verb: str, tx: Any, *args: Any) -> Any:
        timed = {} if verb == "participant_save_reply" else {"clock": self.clock}
        return driver.OPERATIONS[verb](connection_of(tx), *args, **timed)
