"""A field that must increase: judged by the relay of a stream, and remembered with the settled event."""

from __future__ import annotations

import json
from typing import Any
from uuid import UUID

import pytest

from outrider import Event, InvalidEvent, Outbox
from outrider.brokers.base import CONFIRMED, Nacked, PublishResult
from outrider.errors import Transient
from outrider.event import Message, OnDeadLetter
from outrider.outbox.increasing_fields import IncreasingFields
from outrider.outbox.model import Criteria, LastValue, Lease, Settlements
from outrider.outbox.optimistic import OptimisticWriter
from outrider.outbox.relay import Relay
from outrider.outbox.settings import RelaySettings
from outrider.outbox.validation import StagingRules
from outrider.payload import PayloadFacts, Payloads, strictly_increasing
from outrider.retry import RetryPolicy
from outrider.stores.memory import MemoryStore
from outrider.telemetry.events import InvalidPayloadPublished
from outrider.testing import ManualClock, MemoryBroker
from outrider.testing.fakes import RecordingObserver
from tests.support.memory_benches import MemoryHarness
from tests.support.outbox_rows import staged

RULE = strictly_increasing("order.*", "revision")
PAYLOADS = Payloads(rules=[RULE])


@pytest.fixture
def clock() -> ManualClock:
    return ManualClock()


@pytest.fixture
def store(clock: ManualClock) -> MemoryStore:
    return MemoryStore(clock=clock)


@pytest.fixture
def harness(store: MemoryStore, clock: ManualClock) -> MemoryHarness:
    return MemoryHarness(store, clock)


def relay(harness: MemoryHarness, broker: MemoryBroker, payloads: Payloads = PAYLOADS, **settings: Any) -> Relay:
    policy = {"retry": RetryPolicy(jitter=0, max_attempts=9), "on_dead_letter": OnDeadLetter.SKIP, **settings}
    made = RelaySettings(workers=1, **policy)
    return Relay(harness.store, broker, made, clock=harness.clock, observer=harness.observer, payloads=payloads)


async def stage(harness: MemoryHarness, *revisions: object, key: str = "A", **fields: Any) -> list[UUID]:
    events = [Event("order.changed", {"revision": each}, topic="orders", key=key, **fields) for each in revisions]
    return await harness.stage(*events)


def published(broker: MemoryBroker, key: str = "A") -> list[int]:
    return [json.loads(message.body)["revision"] for message in broker.log if message.key == key]


async def dead(harness: MemoryHarness) -> list[str]:
    return [row["failure"]["error"] for row in await harness.store.admin.dead_letters(Criteria())]


@pytest.mark.parametrize("ordered", [True, False])
async def test_only_values_above_the_one_before_are_published_by_key(harness: MemoryHarness, ordered: bool) -> None:
    broker = MemoryBroker(ordered=ordered)
    await stage(harness, 1, 5, 5, 3, 6)
    await stage(harness, 2, 4, key="B")
    await harness.works(relay(harness, broker))
    assert published(broker) == [1, 5, 6]
    assert published(broker, "B") == [2, 4]
    text = "payload.revision: it is not above the value before, by the rule 'order.* increasing revision'"
    assert await dead(harness) == [text, text]


@pytest.mark.parametrize("ordered", [True, False])
async def test_another_relay_knows_the_value_before(harness: MemoryHarness, ordered: bool) -> None:
    broker = MemoryBroker(ordered=ordered)
    first = relay(harness, broker)
    await stage(harness, 7)
    await harness.works(first)
    await harness.store.leave(first.name)
    await stage(harness, 7, 8)
    await harness.works(relay(harness, broker))
    assert published(broker) == [7, 8]
    assert len(await dead(harness)) == 1


class CrashedBeforeSettling(MemoryStore):
    """A store whose first settle is lost with its relay."""

    crashed = False

    async def settle(self, lease: Lease, settlements: Settlements) -> int:
        if settlements.confirmed and not self.crashed:
            self.crashed = True
            raise Transient("the connection is lost")
        return await super().settle(lease, settlements)


@pytest.mark.parametrize("ordered", [True, False])
async def test_events_that_a_crash_left_unsettled_are_published_again_and_not_dead_lettered(
    clock: ManualClock, ordered: bool
) -> None:
    store, broker = CrashedBeforeSettling(clock=clock), MemoryBroker(ordered=ordered)
    harness = MemoryHarness(store, clock)
    await stage(harness, 5, 6, 6)
    first = relay(harness, broker)
    await first.heartbeat()
    await first.run_once()
    assert published(broker) == [5, 6]
    assert store.tables.last_values == {}
    await store.leave(first.name)
    await harness.works(relay(harness, broker))
    assert published(broker) == [5, 6, 5, 6]
    assert len(await dead(harness)) == 1


@pytest.mark.parametrize("ordered", [True, False])
async def test_a_settle_that_is_repeated_keeps_the_values(clock: ManualClock, ordered: bool) -> None:
    store, broker = CrashedBeforeSettling(clock=clock), MemoryBroker(ordered=ordered)
    harness = MemoryHarness(store, clock)
    await stage(harness, 5, 6)
    runs = relay(harness, broker)
    await harness.works(runs)
    await harness.works_for(runs, seconds=60, step_seconds=5)
    await stage(harness, 6, 7)
    await harness.works_for(runs, seconds=60, step_seconds=5)
    assert published(broker) == [5, 6, 7]


async def test_an_event_that_is_not_published_does_not_count(harness: MemoryHarness) -> None:
    refusing = [True]

    def script(message: Message) -> PublishResult:
        return Nacked("no") if b"9" in message.body and refusing[0] else CONFIRMED

    broker = MemoryBroker(ordered=True, script=script)
    [first] = await stage(harness, 9)
    runs = relay(harness, broker, retry=RetryPolicy(jitter=0, max_attempts=1))
    await harness.works(runs)
    await stage(harness, 3)
    await harness.works(runs)
    assert published(broker) == [3]
    refusing[0] = False
    await harness.store.admin.replay([first], "ann")
    await harness.works(runs)
    assert published(broker) == [3, 9]


async def test_a_replayed_event_is_judged_again(harness: MemoryHarness) -> None:
    broker = MemoryBroker(ordered=True)
    _, bad = await stage(harness, 5, 5)
    runs = relay(harness, broker)
    await harness.works(runs)
    await harness.store.admin.replay([bad], "ann")
    await harness.works(runs)
    assert published(broker) == [5]
    assert len(await dead(harness)) == 1


async def test_with_warn_every_value_is_published_and_the_highest_counts(harness: MemoryHarness) -> None:
    broker, observer = MemoryBroker(ordered=True), RecordingObserver()
    rule = strictly_increasing("order.*", "revision", on_invalid="warn")
    runs = relay(harness, broker, Payloads(rules=[rule], observer=observer))
    await stage(harness, 5, 3)
    await harness.works(runs)
    await stage(harness, 4)
    await harness.works(runs)
    assert published(broker) == [5, 3, 4]
    assert len(observer.of(InvalidPayloadPublished)) == 2


@pytest.mark.parametrize("value", ['"7"', "7.5", "true", "null", str(2**63)])
async def test_a_value_that_is_no_whole_number_is_refused_at_staging_and_dead_lettered(
    harness: MemoryHarness, value: str
) -> None:
    with pytest.raises(InvalidEvent, match=r"payload\.revision: it is not a whole number"):
        PAYLOADS.stage(PayloadFacts(None, "order.changed", 1, "orders", "A"), f'{{"revision": {value}}}')
    broker = MemoryBroker()
    await stage(harness, json.loads(value))
    await harness.works(relay(harness, broker))
    assert not broker.log
    assert await dead(harness) == ["payload.revision: it is not a whole number"]


async def test_the_markers_of_skipped_events_have_no_value(harness: MemoryHarness) -> None:
    broker = MemoryBroker(ordered=True)
    payloads = Payloads(rules=[strictly_increasing("*", "revision")])
    await stage(harness, 5, 5, 6, sequence="auto")
    await harness.works(relay(harness, broker, payloads))
    assert [message.headers["event_type"] for message in broker.log] == [
        "order.changed",
        "outrider.skipped",
        "order.changed",
    ]


async def test_the_optimistic_writer_leaves_increasing_fields_to_the_relay(harness: MemoryHarness) -> None:
    broker, rules = MemoryBroker(), StagingRules(payloads=PAYLOADS)
    writer = OptimisticWriter(harness.store, broker, Outbox().insert, clock=harness.clock, rules=rules)
    for revision in (2, 1):
        batch = writer.batch()
        async with harness.transaction() as conn:
            await batch.stage(conn, Event("order.changed", {"revision": revision}, topic="orders", key="A"))
        await writer.send(batch)
    assert not broker.log
    await harness.works(relay(harness, broker))
    assert published(broker) == [2]


async def test_the_value_of_an_event_is_kept_for_a_late_answer_until_the_lane_is_lost(store: MemoryStore) -> None:
    event = staged(1, "A", event_type="order.changed", payload=b'{"revision": 7}')
    for lost, expected in ((False, [LastValue(RULE.name, event.stream, 7)]), (True, None)):
        increases = IncreasingFields(PAYLOADS, store)
        increases.check(event)
        increases.begin(Lease("relay", {event.lane: 1}))
        if lost:
            increases.drop({event.lane})
        assert increases.values_of(Settlements([event])).get(event.event_id) == expected
        assert increases.values_of(Settlements([event])) == {}
