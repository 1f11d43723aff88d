"""The inbox contract on the memory store."""

from __future__ import annotations

import pytest

from outrider.stores.memory import MemoryStore
from outrider.testing import ManualClock
from outrider.testing.contracts import InboxBench, InboxContract
from tests.support.memory_benches import MemoryInboxBench


class TestMemoryInbox(InboxContract):
    @pytest.fixture
    def bench(self) -> InboxBench:
        clock = ManualClock()
        return MemoryInboxBench(MemoryStore(clock=clock), clock)
