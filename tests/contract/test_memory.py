"""The store contract on the memory store."""

from __future__ import annotations

from contextlib import AbstractAsyncContextManager
from typing import Any

import pytest

from outrider.stores.memory import MemoryStore, MemoryTransaction
from outrider.testing import ManualClock
from outrider.testing.contract import StoreContract
from outrider.testing.harness import Harness


class MemoryHarness(Harness):
    """The memory store's own transactions."""

    store: MemoryStore

    def transaction(self) -> AbstractAsyncContextManager[Any]:
        return self.store.transaction()

    def savepoint(self, conn: MemoryTransaction) -> AbstractAsyncContextManager[Any]:
        return conn.savepoint()


class TestMemoryStore(StoreContract):
    @pytest.fixture
    def harness(self) -> Harness:
        clock = ManualClock()
        return MemoryHarness(MemoryStore(clock=clock), clock)
