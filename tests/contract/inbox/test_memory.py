"""The inbox contract on the memory store."""

from __future__ import annotations

import pytest

from outrider.stores.memory import MemoryInbox, MemoryStore, MemoryTransaction
from outrider.testing import ManualClock
from outrider.testing.contracts import InboxBench, InboxContract


class MemoryBench(InboxBench):
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

    async def staged(self) -> int:
        return len(self._beside.tables.rows)


class TestMemoryInbox(InboxContract):
    @pytest.fixture
    def bench(self) -> InboxBench:
        clock = ManualClock()
        return MemoryBench(MemoryStore(clock=clock), clock)
