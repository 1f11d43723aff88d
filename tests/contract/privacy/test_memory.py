"""The contract of the keys of subjects in memory."""

from __future__ import annotations

import pytest

from outrider.stores.memory import MemoryStore, MemorySubjectKeys
from outrider.testing import ManualClock
from outrider.testing.contracts.subjects import SubjectBench, SubjectContract
from tests.support.memory_benches import MemoryInboxBench


class TestMemorySubjects(SubjectContract):
    @pytest.fixture
    def bench(self) -> SubjectBench:
        clock, table = ManualClock(), MemorySubjectKeys()

        async def opening() -> MemorySubjectKeys:
            return table

        return SubjectBench(MemoryInboxBench(MemoryStore(clock=clock), clock), opening)
