"""Publishing what other people's rows make difficult."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

import pytest

from outrider.errors import Transient
from outrider.event import Message, Stream
from outrider.observer import Buried
from outrider.outbox.turnstile import publish
from outrider.outcome import CONFIRMED, Policy, Refused, Unresolved, Verdict
from outrider.store import Criteria, Lease, Settlement
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


async def test_one_refusal_among_events_sent_at_once_stops_its_own_stream_only(harness: Harness) -> None:
    for number in (1, 2, 3):
        await harness.stage(order(number, "A"), order(number, "B"))

    def script(message: Message) -> Verdict:
        return Refused("no") if message.key == "A" and b"2" in message.body else CONFIRMED

    broker = MemoryBroker(ordered=True, script=script)
    relay = harness.relay(broker)
    await relay.keep()
    await relay.work()
    assert (numbers(broker.log, "A"), numbers(broker.log, "B")) == ([1], [1, 2, 3])
    counts = await harness.store.desk.counts()
    assert (counts["sent"], counts["failed"], counts["parked"]) == (4, 1, 1)


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


class FailingOnce(MemoryStore):
    """A store whose next settle fails, as when its disk is full for a moment."""

    failing = False

    async def settle(self, lease: Lease, settlements: Sequence[Settlement], emptied: Sequence[Stream] = ()) -> int:
        if self.failing:
            self.failing = False
            raise Transient("the disk is full")
        return await super().settle(lease, settlements, emptied)


async def test_after_a_settle_that_may_still_arrive_the_lanes_are_taken_at_a_new_epoch() -> None:
    """The relay is still the owner: at the old epoch a late write would pass the fence and park what is in flight."""
    clock = ManualClock()
    store = FailingOnce(clock=clock)
    harness = MemoryHarness(store, clock)
    await harness.stage(*orders(5))
    broker = MemoryBroker(ordered=True)
    relay = harness.relay(broker)
    await relay.keep()
    before = relay.lease
    store.failing = True
    with pytest.raises(Transient):
        await relay.work()
    await harness.works(relay)
    assert all(epoch > before.epochs[lane] for lane, epoch in relay.lease.epochs.items())
    late = await store.fetch(before, dict.fromkeys(before.epochs, 10))
    assert late.lanes == frozenset()
    assert numbers(broker.log) == [1, 2, 3, 4, 5]
    assert await store.desk.counts() == {"sent": 5, "dead_letter": 0}


@pytest.mark.parametrize("answer", [[], [CONFIRMED] * 3, [None, None]], ids=["too few", "too many", "no verdict"])
async def test_an_adapter_that_breaks_its_contract_costs_nobody_an_event(harness: Harness, answer: list[Any]) -> None:
    await harness.stage(order(1, "A"), order(1, "B"))
    broker = MemoryBroker(ordered=True)
    relay = harness.relay(broker)
    honest = broker.publish

    async def once(messages: Sequence[Message]) -> Sequence[Verdict]:
        broker.publish = honest  # type: ignore[method-assign]
        return answer

    broker.publish = once  # type: ignore[method-assign]
    await harness.works(relay)
    await harness.works_for(relay, seconds=60, step_seconds=1)
    assert not harness.notebook.of(Buried)
    assert numbers(broker.log, "A") == numbers(broker.log, "B") == [1]


async def test_a_cancelled_future_of_the_client_is_no_cancellation_of_ours() -> None:
    class Cancelling(MemoryBroker):
        async def publish(self, messages: Sequence[Message]) -> Sequence[Verdict]:
            raise asyncio.CancelledError

    [verdict] = await publish(Cancelling(), [Message("1", "t", "k", None, b"{}", {})], 1)
    assert isinstance(verdict, Unresolved)
