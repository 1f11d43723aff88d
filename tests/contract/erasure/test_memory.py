"""The contract of erasure in memory."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import pytest

from outrider.stores.memory import MemoryErasure, MemoryInbox, MemorySagas, MemoryStore, MemorySubjectKeys
from outrider.testing import ManualClock
from outrider.testing.contracts.erasure import ErasureBench, ErasureContract
from tests.support.memory_benches import MemoryHarness


def _texts(rows: Iterable[object]) -> list[str]:
    return sorted(repr(row) for row in rows)


class TestMemoryErasure(ErasureContract):
    @pytest.fixture
    def bench(self) -> ErasureBench:
        clock = ManualClock()
        store = MemoryStore(clock=clock)
        inbox, keys = MemoryInbox(store), MemorySubjectKeys(clock)
        erasure = MemoryErasure(store, inbox)

        async def dump() -> Mapping[str, list[str]]:
            tables, sagas = store.tables, store.sagas
            return {
                "outbox": _texts(tables.rows.values()),
                "outbox_archive": _texts(tables.archive.items()),
                "outbox_dead_letter": _texts(tables.dead.items()),
                "inbox_held": _texts(inbox.tables.waiting.items()),
                "inbox_dead_letter": _texts(inbox.tables.dead.items()),
                "saga": _texts(sagas.sagas.rows.items()),
                "saga_audit_head": _texts(sagas.heads),
                "saga_barrier": _texts(sagas.participants.rows.items()),
                "gdpr_erasure_log": _texts(erasure.log),
                "subject_key": _texts(keys.table.values()),
            }

        return ErasureBench(MemoryHarness(store, clock), erasure, keys, inbox, MemorySagas(store), dump)
