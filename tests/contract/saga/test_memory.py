"""The saga contract on the memory store."""

from __future__ import annotations

from contextlib import suppress

import pytest

from outrider.stores.memory import MemoryStore
from outrider.testing import ManualClock
from outrider.testing.contracts import ConcurrentSagaContract, SagaBench
from outrider.testing.saga_harness import new_saga
from tests.support.memory_benches import MemorySagaBench


@pytest.fixture
def bench() -> SagaBench:
    clock = ManualClock()
    return MemorySagaBench(MemoryStore(clock=clock), clock)


class TestMemorySagas(ConcurrentSagaContract):
    pass


async def test_a_commit_wakes_workers(bench: SagaBench) -> None:
    woken = []
    async with bench.store.listen(lambda: woken.append(True)):
        await bench.start(new_saga())
    assert woken


async def test_a_savepoint_that_is_rolled_back_takes_its_writes_along(bench: SagaBench) -> None:
    async with bench.store.transaction() as tx:
        with suppress(RuntimeError):
            async with tx.savepoint():
                assert await bench.store.start(tx, new_saga())
                raise RuntimeError
        assert await bench.store.load(tx, new_saga().saga_id) is None
        assert await bench.store.start(tx, new_saga())
    assert len(await bench.claim()) == 1
