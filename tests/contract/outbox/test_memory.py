"""The store contract on the memory store."""

from __future__ import annotations

import pytest

from outrider.stores.memory import MemoryStore
from outrider.testing import ManualClock
from outrider.testing.contracts import StoreContract
from outrider.testing.harness import Harness
from tests.support.memory_benches import MemoryHarness


class TestMemoryStore(StoreContract):
    @pytest.fixture
    def harness(self) -> Harness:
        clock = ManualClock()
        return MemoryHarness(MemoryStore(clock=clock), clock)
