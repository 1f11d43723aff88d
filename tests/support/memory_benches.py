"""The memory stores as the contract suites drive them."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from typing import Any
from uuid import UUID

from outrider.drivers import memory
from outrider.event import Event
from outrider.saga.store import SagaStore
from outrider.stores.memory import MemoryInbox, MemorySagas, MemoryStore, MemoryTransaction
from outrider.testing import ManualClock
from outrider.testing.contracts import InboxBench, SagaBench
from outrider.testing.harness import Harness


class MemoryHarness(Harness):
    """The memory store's own transactions."""

    store: MemoryStore

    def transaction(self) -> AbstractAsyncContextManager[Any]:
        return self.store.transaction()

    def savepoint(self, conn: MemoryTransaction) -> AbstractAsyncContextManager[Any]:
        return conn.savepoint()

    async def insert(self, event_id: UUID, event_type: str, payload: str, key: str, attempts: int = 0) -> None:
        await self.stage(Event(event_type, json.loads(payload), aggregate_id=key, event_id=event_id))
        row = self.store.tables.rows[self.store.tables.ids[event_id]]
        row.event = row.event._replace(topic="", attempts=attempts)
        row.stream = row.event.stream

    async def remove(self, place: str, event_id: UUID, *, kind: str | None = None) -> None:
        tables = self.store.tables
        if place == "outbox":
            tables.take(tables.ids[event_id])
        elif place == "archive":
            del tables.archive[event_id]
        elif place == "dead_letters":
            del tables.dead[event_id]
        else:
            tables.journal[:] = [
                row for row in tables.journal if row.event_id != event_id or kind not in (None, row.kind)
            ]


class MemoryInboxBench(InboxBench):
    """Effects in a list that is written to at commit."""

    def __init__(self, beside: MemoryStore, clock: ManualClock) -> None:
        super().__init__(MemoryInbox(beside), clock)
        self._beside = beside
        self._effects: list[str] = []

    async def effect(self, tx: MemoryTransaction, text: str) -> None:
        tx.on_commit.append(lambda: self._effects.append(text))

    async def effects(self) -> list[str]:
        return self._effects

    async def end(self, tx: MemoryTransaction, *, commit: bool) -> None:
        tx.commit() if commit else tx.rollback()

    async def staged(self) -> list[dict[str, str]]:
        return [json.loads(row.event.headers) for row in self._beside.tables.rows.values()]


class MemorySagaBench(SagaBench):
    """Several stores over the same tables."""

    driver = memory

    def __init__(self, beside: MemoryStore, clock: ManualClock) -> None:
        super().__init__(MemorySagas(beside), clock)
        self._beside = beside

    def other(self) -> SagaStore:
        return MemorySagas(self._beside)

    @asynccontextmanager
    async def outside(self) -> AsyncIterator[MemoryTransaction]:
        tx = self._beside.begin()
        tx.commit()
        yield tx

    @asynccontextmanager
    async def outbox(self) -> AsyncIterator[MemoryStore]:
        yield self._beside
