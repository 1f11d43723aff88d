"""Publishing what other people's rows make difficult."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any
from uuid import UUID

import pytest

from outrider.brokers.base import CONFIRMED, Nacked, PublishResult, Unknown
from outrider.errors import Transient
from outrider.event import Event, Message, OnDeadLetter
from outrider.outbox import lane_ownership
from outrider.outbox.model import Criteria, Lease, Settlements
from outrider.outbox.publisher import TRIALS_MAX, publish
from outrider.stores.memory import MemoryStore
from outrider.telemetry.events import BreakerOpened, EventDeadLettered, PassCompleted
from outrider.testing import ManualClock, MemoryBroker
from outrider.testing.harness import Harness, numbers, order, orders
from tests.support.memory_benches import MemoryHarness


@pytest.fixture
def harness() -> Harness:
    clock = ManualClock()
    return MemoryHarness(MemoryStore(clock=clock), clock)


@pytest.mark.parametrize("ordered", [True, False])
async def test_an_event_that_cannot_be_encoded_is_dead_lettered_and_stops_no_other(
    harness: Harness, ordered: bool
) -> None:
    [_, odd, _] = await harness.stage(*orders(3, "A"))
    await harness.stage(order(1, "B"))
    assert isinstance(harness.store, MemoryStore)
    tables = harness.store.tables
    row = tables.rows[tables.ids[odd]]
    row.event = row.event._replace(headers=b"[1, 2]")
    broker = MemoryBroker(ordered=ordered)
    await harness.works(harness.relay(broker, on_dead_letter=OnDeadLetter.SKIP))
    assert numbers(broker.log, "A") == [1, 3]
    assert numbers(broker.log, "B") == [1]
    [dead] = [row.row for row in tables.dead.values()]
    assert dead.failure is not None
    assert "cannot be encoded" in dead.failure["error"]


@pytest.mark.parametrize("ordered", [True, False])
async def test_one_nack_among_events_sent_at_once_stops_its_own_stream_only(harness: Harness, ordered: bool) -> None:
    for number in (1, 2, 3):
        await harness.stage(order(number, "A"), order(number, "B"))

    def script(message: Message) -> PublishResult:
        return Nacked("no") if message.key == "A" and b"2" in message.body else CONFIRMED

    broker = MemoryBroker(ordered=ordered, script=script)
    relay = harness.relay(broker)
    await relay.heartbeat()
    await relay.run_once()
    assert (numbers(broker.log, "A"), numbers(broker.log, "B")) == ([1], [1, 2, 3])
    counts = await harness.store.admin.counts()
    assert (counts["sent"], counts["failed"], counts["parked"]) == (4, 1, 1)


async def test_the_second_of_a_stream_waits_for_the_first_however_its_topic_was_given(harness: Harness) -> None:
    named, ruled = order(1, "A", topic="events.order.changed"), order(2, "A")
    ids = [str(event_id) for event_id in await harness.stage(named, order(1, "B"), ruled, order(2, "B"), order(3, "B"))]
    assert isinstance(harness.store, MemoryStore)
    tables = harness.store.tables
    row = tables.rows[tables.ids[UUID(ids[2])]]
    row.event = row.event._replace(topic="")
    broker = MemoryBroker()
    relay = harness.relay(broker)
    await relay.heartbeat()
    assert await relay.run_once() == 5
    assert broker.calls == [[ids[0], ids[1]], [ids[2], ids[3]], [ids[4]]]


async def test_what_went_out_before_the_connection_broke_is_settled_and_the_rest_left_as_it_was(
    harness: Harness,
) -> None:
    for number in (1, 2, 3):
        await harness.stage(order(number, "A"), order(number, "B"))

    def script(message: Message) -> PublishResult:
        return Unknown("broken") if message.key == "B" and b"2" in message.body else CONFIRMED

    broker = MemoryBroker(script=script)
    relay = harness.relay(broker)
    await relay.heartbeat()
    assert await relay.run_once() == 2
    assert len(broker.calls) == 2
    assert (numbers(broker.log, "A"), numbers(broker.log, "B")) == ([1], [1])
    counts = await harness.store.admin.counts()
    assert (counts["sent"], counts["pending"]) == (2, 4)
    broker.script = lambda _: CONFIRMED
    await harness.works_for(relay, seconds=60)
    assert (numbers(broker.log, "A"), numbers(broker.log, "B")) == ([1, 2, 3], [1, 2, 3])


@pytest.mark.parametrize("ordered", [True, False])
async def test_a_nack_in_a_later_portion_stops_its_own_stream_only(harness: Harness, ordered: bool) -> None:
    for number in (1, 2, 3):
        await harness.stage(*(order(number, key) for key in "ABCDE"))

    def script(message: Message) -> PublishResult:
        return Nacked("no") if message.key == "D" and b"2" in message.body else CONFIRMED

    broker = MemoryBroker(ordered=ordered, script=script)
    relay = harness.relay(broker, in_flight_max=2)
    await relay.heartbeat()
    await relay.run_once()
    await harness.works(relay)
    assert [numbers(broker.log, key) for key in "ABCDE"] == [[1, 2, 3]] * 3 + [[1], [1, 2, 3]]
    counts = await harness.store.admin.counts()
    assert (counts["sent"], counts["failed"], counts["parked"]) == (13, 1, 1)
    assert max(map(len, broker.calls)) == 2


@pytest.mark.parametrize(("pad", "fetches"), [(0, [8, 92]), (5_000, [1, 19, 19, 19, 19, 19, 4])])
async def test_fewer_events_are_fetched_when_they_are_large(
    harness: Harness, monkeypatch: pytest.MonkeyPatch, pad: int, fetches: list[int]
) -> None:
    monkeypatch.setattr(lane_ownership, "BATCH_BYTES_MAX", 100_000)
    await harness.stage(*(Event("order.changed", {"n": n, "pad": "x" * pad}, key="A") for n in range(100)))
    await harness.works(harness.relay(MemoryBroker(ordered=True)))
    assert [passed.fetched for passed in harness.observer.of(PassCompleted)] == fetches


async def test_a_stop_waits_for_one_wave_and_not_for_a_whole_stream(harness: Harness) -> None:
    await harness.stage(*orders(50, "A"))

    def script(_: Message) -> PublishResult:
        relay.stop()
        return CONFIRMED

    broker = MemoryBroker(script=script)
    relay = harness.relay(broker)
    async with asyncio.timeout(20):
        await relay.run()
    assert numbers(broker.log, "A") == [1]
    counts = await harness.store.admin.counts()
    assert (counts["sent"], counts["pending"]) == (1, 49)


async def test_a_lease_that_runs_short_between_waves_keeps_what_was_confirmed(harness: Harness) -> None:
    await harness.stage(*orders(3, "A"))

    def script(_: Message) -> PublishResult:
        harness.clock.advance(seconds=12)
        return CONFIRMED

    broker = MemoryBroker(script=script)
    relay = harness.relay(broker)
    await relay.heartbeat()
    assert await relay.run_once() == 1
    assert numbers(broker.log, "A") == [1]
    counts = await harness.store.admin.counts()
    assert (counts["sent"], counts["pending"]) == (1, 2)


@pytest.mark.parametrize("policy", [b'{"unknown": 1}', b"[]", b'{"base_seconds": -1}', b'{"factor": "two"}'])
async def test_a_retry_policy_that_cannot_be_read_gives_way_to_the_relays(harness: Harness, policy: bytes) -> None:
    [event_id] = await harness.stage(order(1))
    assert isinstance(harness.store, MemoryStore)
    tables = harness.store.tables
    row = tables.rows[tables.ids[event_id]]
    row.event = row.event._replace(retry=policy)
    relay = harness.relay(MemoryBroker(script=lambda _: Nacked("no")))
    await harness.works(relay)
    await harness.works_for(relay, seconds=30, step_seconds=1)
    [dead] = await harness.store.admin.dead_letters(Criteria())
    assert dead["attempts"] == 3


class FailingOnce(MemoryStore):
    """A store whose next settle fails, as when its disk is full for a moment."""

    failing = False

    async def settle(self, lease: Lease, settlements: Settlements) -> int:
        if self.failing:
            self.failing = False
            raise Transient("the disk is full")
        return await super().settle(lease, settlements)


async def test_after_a_settle_that_may_still_arrive_the_lanes_are_taken_at_a_new_epoch() -> None:
    """The relay is still the owner: at the old epoch a late write would pass the fence and park what is in flight."""
    clock = ManualClock()
    store = FailingOnce(clock=clock)
    harness = MemoryHarness(store, clock)
    await harness.stage(*orders(5))
    broker = MemoryBroker(ordered=True)
    relay = harness.relay(broker)
    await relay.heartbeat()
    [lane] = {row.event.lane for row in store.tables.rows.values()}
    before = relay.lease.only([lane])
    store.failing = True
    assert await relay.run_once() == 0
    await harness.works_for(relay, seconds=2, step_seconds=0.2)
    assert relay.lease.epochs[lane] > before.epochs[lane]
    late = await store.fetch(before, {lane: 10})
    assert late.lanes == frozenset()
    assert numbers(broker.log) == [1, 2, 3, 4, 5]
    assert len(broker.log) == 5
    assert await store.admin.counts() == {"sent": 5, "dead_letter": 0}


@pytest.mark.parametrize("answer", [[], [CONFIRMED] * 3, [None, None]], ids=["too few", "too many", "no result"])
async def test_an_adapter_that_breaks_its_contract_loses_no_event(harness: Harness, answer: list[Any]) -> None:
    await harness.stage(order(1, "A"), order(1, "B"))
    broker = MemoryBroker(ordered=True)
    relay = harness.relay(broker)
    honest = broker.publish

    async def once(messages: Sequence[Message]) -> Sequence[PublishResult]:
        broker.publish = honest  # type: ignore[method-assign]
        return answer

    broker.publish = once  # type: ignore[method-assign]
    await harness.works(relay)
    await harness.works_for(relay, seconds=60, step_seconds=1)
    assert not harness.observer.of(EventDeadLettered)
    assert numbers(broker.log, "A") == numbers(broker.log, "B") == [1]


async def test_a_text_that_several_events_share_is_redacted_with_the_values_of_all(
    harness: Harness, monkeypatch: pytest.MonkeyPatch
) -> None:
    for key, name in (("A", "Ann Canary"), ("B", "Bob Canary"), ("C", "Cy")):
        await harness.stage(Event("order.placed", {"name": name}, topic="orders", key=key))
    broker = MemoryBroker()

    async def raises(messages: Sequence[Message]) -> Sequence[PublishResult]:
        raise OSError(f"broken by {messages[-1].body!r} after {messages[0].body!r} and Bob Canary")

    monkeypatch.setattr(broker, "publish", raises)
    await harness.works(harness.relay(broker))
    errors = [event.error for event in harness.observer.of(BreakerOpened)]
    assert errors
    assert all(error.startswith("OSError: broken by ") and error.endswith("and ***") for error in errors)
    assert not [error for error in errors if "Canary" in error]


async def test_a_cancelled_future_of_the_client_is_no_cancellation_of_ours() -> None:
    class Cancelling(MemoryBroker):
        async def publish(self, messages: Sequence[Message]) -> Sequence[PublishResult]:
            raise asyncio.CancelledError

    [result] = await publish(Cancelling(), [Message("1", "t", "k", None, b"{}", {})], 1)
    assert isinstance(result, Unknown)


class ApartBroker(MemoryBroker):
    """A broker with many destinations, of which the mute ones answer a trial never."""

    def __init__(self) -> None:
        super().__init__()
        self.trials: list[str] = []

    async def publish_apart(self, messages: Sequence[Message]) -> Sequence[PublishResult]:
        self.trials += [message.topic for message in messages]
        if messages[0].topic in self.mute:
            await asyncio.Event().wait()
        return await self.publish(messages)


async def test_the_number_of_trials_without_an_answer_is_limited_and_the_other_streams_wait_a_moment(
    harness: Harness,
) -> None:
    topics = [f"mute-{number:02}" for number in range(TRIALS_MAX + 4)]
    await harness.stage(*(order(1, "A", topic=topic) for topic in topics))
    broker = ApartBroker()
    broker.down = set(topics)
    relay = harness.relay(broker)
    await harness.works(relay)
    broker.mute, broker.down = set(topics), set()
    # The probes must pass for the trials to begin.
    broker.probe = MemoryBroker().probe  # type: ignore[method-assign]
    await harness.advance(seconds=1)
    await relay.probe()
    await harness.works(relay)
    assert relay.breakers.unanswered_destinations == TRIALS_MAX
    assert len(broker.trials) + len(broker.waiting) == TRIALS_MAX
    broker.mute = set()
    await harness.advance(seconds=6)
    await relay.probe()
    await harness.works_for(relay, seconds=60, step_seconds=2)
    assert sorted({message.topic for message in broker.log}) == topics
    relay.publisher.close()
