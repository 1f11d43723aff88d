"""The store contract on the memory store."""

from __future__ import annotations

import json
from contextlib import AbstractAsyncContextManager
from typing import Any
from uuid import UUID

import pytest

from outrider.event import Event
from outrider.stores.memory import MemoryStore, MemoryTransaction
from outrider.testing import ManualClock
from outrider.testing.contracts import StoreContract
from outrider.testing.harness import Harness


class MemoryHarness(Harness):
    """The memory store's own transactions."""

    store: MemoryStore

    def transaction(self) -> AbstractAsyncContextManager[Any]:
        return self.store.transaction()

    def savepoint(self, conn: MemoryTransaction) -> AbstractAsyncContextManager[Any]:
        return conn.savepoint()

    async def insert(self, event_id: UUID, event_type: str, payload: str, key: str) -> None:
        await self.stage(Event(event_type, json.loads(payload), aggregate_id=key, event_id=event_id))
        row = self.store.tables.rows[self.store.tables.ids[event_id]]
        row.event = row.event._replace(topic="")
        row.stream = row.event.stream


class TestMemoryStore(StoreContract):
    @pytest.fixture
    def harness(self) -> Harness:
        clock = ManualClock()
        return MemoryHarness(MemoryStore(clock=clock), clock)
