"""Publishing what other people's rows make difficult."""

from __future__ import annotations

import pytest

from outrider.outcome import Policy, Refused
from outrider.store import Criteria
from outrider.stores.memory import MemoryStore
from outrider.testing import ManualClock, MemoryBroker
from outrider.testing.harness import Harness, numbers, order, orders
from tests.contract.test_memory import MemoryHarness


@pytest.fixture
def harness() -> Harness:
    clock = ManualClock()
    return MemoryHarness(MemoryStore(clock=clock), clock)


@pytest.mark.parametrize("ordered", [True, False])
async def test_an_event_that_cannot_be_encoded_is_buried_and_stops_nobody_else(harness: Harness, ordered: bool) -> None:
    [_, odd, _] = await harness.stage(*orders(3, "A"))
    await harness.stage(order(1, "B"))
    assert isinstance(harness.store, MemoryStore)
    tables = harness.store.tables
    row = tables.rows[tables.ids[odd]]
    row.event = row.event._replace(headers=b"[1, 2]")
    broker = MemoryBroker(ordered=ordered)
    await harness.works(harness.relay(broker, dead_letter_policy=Policy.SKIP))
    assert numbers(broker.log, "A") == [1, 3]
    assert numbers(broker.log, "B") == [1]
    [dead] = [row.row for row in tables.dead.values()]
    assert dead.failure is not None
    assert "cannot be encoded" in dead.failure["error"]


@pytest.mark.parametrize("policy", [b'{"unknown": 1}', b"[]", b'{"base_seconds": -1}', b'{"factor": "two"}'])
async def test_a_retry_policy_that_cannot_be_read_gives_way_to_the_relays(harness: Harness, policy: bytes) -> None:
    [event_id] = await harness.stage(order(1))
    assert isinstance(harness.store, MemoryStore)
    tables = harness.store.tables
    row = tables.rows[tables.ids[event_id]]
    row.event = row.event._replace(retry=policy)
    relay = harness.relay(MemoryBroker(script=lambda _: Refused("no")))
    await harness.works(relay)
    await harness.works_for(relay, seconds=30, step_seconds=1)
    [dead] = await harness.store.desk.dead_letters(Criteria())
    assert dead["attempts"] == 3
