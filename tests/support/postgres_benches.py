"""The stores on PostgreSQL as the contract suites drive them. The clock function of the database reads a table."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from typing import Any
from uuid import UUID

from outrider.drivers import asyncpg as driver
from outrider.saga.store import SagaStore
from outrider.stores.postgres import PostgresInbox, PostgresSagas, PostgresStore
from outrider.testing import ManualClock
from outrider.testing.contracts import InboxBench, SagaBench
from outrider.testing.harness import Harness

OWN_THE_CLOCK = """
CREATE TABLE outrider.test_clock (elapsed float8 NOT NULL);
INSERT INTO outrider.test_clock VALUES (0);
CREATE OR REPLACE FUNCTION outrider.outbox_clock() RETURNS timestamptz LANGUAGE sql VOLATILE
RETURN (SELECT timestamptz '2030-01-01 00:00:00+00' + elapsed * interval '1 second' FROM outrider.test_clock);
"""


class PostgresHarness(Harness):
    """Transactions from a pool, as an application has them."""

    def __init__(self, store: PostgresStore, clock: ManualClock, pool: Any) -> None:
        super().__init__(store, clock)
        self._pool = pool

    @asynccontextmanager
    async def transaction(self) -> AsyncIterator[Any]:
        async with self._pool.acquire() as conn, conn.transaction():
            yield conn

    def savepoint(self, conn: Any) -> AbstractAsyncContextManager[Any]:
        nested: AbstractAsyncContextManager[Any] = conn.transaction()
        return nested

    async def advance(self, *, seconds: float) -> None:
        await super().advance(seconds=seconds)
        await self._pool.execute("UPDATE outrider.test_clock SET elapsed = $1", self.clock.boot_seconds())

    async def insert(self, event_id: UUID, event_type: str, payload: str, key: str, attempts: int = 0) -> None:
        columns = "event_id, event_type, payload, aggregate_id, attempts"
        values = event_id, event_type, payload, key, attempts
        await self._pool.execute(f"INSERT INTO outrider.outbox ({columns}) VALUES ($1, $2, $3, $4, $5)", *values)

    async def remove(self, place: str, event_id: UUID, *, kind: str | None = None) -> None:
        table = {"dead_letters": "outbox_dead_letter", "outbox": "outbox"}.get(place, f"outbox_{place}")
        chosen = "event_id = $1" if kind is None else f"event_id = $1 AND kind = '{kind}'"
        assert await self._pool.execute(f"DELETE FROM outrider.{table} WHERE {chosen}", event_id) != "DELETE 0"


EFFECTS = "CREATE TABLE effects (id bigint GENERATED ALWAYS AS IDENTITY, what text NOT NULL)"


class PostgresInboxBench(InboxBench):
    """Effects in a table of the application."""

    def __init__(self, store: PostgresInbox, clock: ManualClock, pool: Any) -> None:
        super().__init__(store, clock)
        self._pool = pool

    async def effect(self, tx: Any, text: str) -> None:
        await tx.execute("INSERT INTO effects (what) VALUES ($1)", text)

    async def effects(self) -> list[str]:
        return [row["what"] for row in await self._pool.fetch("SELECT what FROM effects ORDER BY id")]

    async def end(self, tx: Any, *, commit: bool) -> None:
        await tx.execute("COMMIT" if commit else "ROLLBACK")

    async def staged(self) -> list[dict[str, str]]:
        rows = await self._pool.fetch("SELECT headers::text FROM outrider.outbox ORDER BY id")
        return [json.loads(row[0]) for row in rows]

    async def advance(self, *, seconds: float) -> None:
        await super().advance(seconds=seconds)
        await self._pool.execute("UPDATE outrider.test_clock SET elapsed = $1", self.clock.boot_seconds())


class PostgresSagaBench(SagaBench):
    """Two stores on one database."""

    driver = driver

    def __init__(self, store: PostgresSagas, other: PostgresSagas, clock: ManualClock, pool: Any, url: str) -> None:
        super().__init__(store, clock)
        self._other, self._pool, self._url = other, pool, url

    def other(self) -> SagaStore:
        return self._other

    def outside(self) -> AbstractAsyncContextManager[Any]:
        connection: AbstractAsyncContextManager[Any] = self._pool.acquire()
        return connection

    @asynccontextmanager
    async def outbox(self) -> AsyncIterator[PostgresStore]:
        store = await PostgresStore.open(self._url, connections_max=2)
        yield store
        await store.close()

    async def advance(self, *, seconds: float) -> None:
        await super().advance(seconds=seconds)
        await self._pool.execute("UPDATE outrider.test_clock SET elapsed = $1", self.clock.boot_seconds())
