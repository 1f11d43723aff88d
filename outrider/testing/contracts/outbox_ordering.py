"""Contract rules for order: a waiting stream never delays other streams, and parked events are published in order."""

from __future__ import annotations

import asyncio
from contextlib import suppress
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from uuid import UUID, uuid4

import pytest

import outrider
from outrider.brokers.base import CONFIRMED, Nacked, PublishResult, Rejected
from outrider.errors import InvalidEvent
from outrider.event import Event, Message, OnDeadLetter, Priority
from outrider.outbox import lane_ownership
from outrider.outbox.model import PARK, Criteria, Settlement, Settlements
from outrider.testing.fakes import MemoryBroker, Script
from outrider.testing.harness import Harness, numbers, order, orders

FOLLOWERS = 40_000


def refusing(*message_ids: str) -> Script:
    """Reject these messages, confirm the rest."""
    bad = set(message_ids)

    def script(message: Message) -> PublishResult:
        return Nacked("not now") if message.message_id in bad else CONFIRMED

    return script


class OrderContract:
    """Rules for the order and the independence of streams."""

    async def test_a_failing_head_parks_only_its_stream(self, harness: Harness) -> None:
        [head, *_] = await harness.stage(*orders(5, "A"))
        await harness.stage(*orders(5, "B"))
        broker = MemoryBroker(script=refusing(str(head)))
        relay = harness.relay(broker)
        await harness.works(relay)
        assert numbers(broker.log, "A") == []
        assert numbers(broker.log, "B") == [1, 2, 3, 4, 5]
        counts = await harness.store.admin.counts()
        assert (counts["failed"], counts["parked"]) == (1, 4)
        await harness.stage(order(6, "A"), order(6, "B"))
        await harness.works(relay)
        assert numbers(broker.log, "B")[-1] == 6
        broker.script = refusing()
        await harness.advance(seconds=1)
        await harness.works(relay)
        assert numbers(broker.log, "A") == [1, 2, 3, 4, 5, 6]
        assert await harness.store.admin.blocked_streams(10) == []

    async def test_waves_carry_one_event_per_stream_unless_the_broker_keeps_order(self, harness: Harness) -> None:
        ids = [str(event_id) for event_id in await harness.stage(*orders(3, "A"), *orders(3, "B"))]
        broker = MemoryBroker(script=refusing(ids[1]))
        await harness.works(harness.relay(broker))
        assert all(len({call_id in ids[:3] for call_id in call}) == len(call) for call in broker.calls)
        assert numbers(broker.log, "A") == [1]
        assert numbers(broker.log, "B") == [1, 2, 3]

    async def test_an_ordered_broker_gets_whole_runs_and_a_failure_stops_the_rest(self, harness: Harness) -> None:
        ids = [str(event_id) for event_id in await harness.stage(*orders(6, "A"))]
        broker = MemoryBroker(ordered=True, script=refusing(ids[2]))
        relay = harness.relay(broker)
        await harness.works(relay)
        assert broker.calls[0] == ids
        assert numbers(broker.log) == [1, 2]
        broker.script = refusing()
        await harness.advance(seconds=1)
        await harness.works(relay)
        assert numbers(broker.log) == [1, 2, 3, 4, 5, 6]

    async def test_40_000_followers_of_a_failing_head_do_not_slow_the_others_and_drain_in_order(
        self, harness: Harness
    ) -> None:
        [head] = await harness.stage(order(0, "A"))
        for start in range(1, FOLLOWERS, 5_000):
            await harness.stage(*[order(n, "A") for n in range(start, start + 5_000)])
        broker = MemoryBroker(ordered=True, script=refusing(str(head)))
        relay = harness.relay(broker, batch_max=5_000)
        await harness.works(relay)
        assert (await harness.store.admin.counts())["parked"] == FOLLOWERS
        # Other streams now pass at once: their fetch finds them first, regardless of the events waiting in the lane.
        neighbours = [f"N{n}" for n in range(50)]
        await harness.stage(*[order(1, key) for key in neighbours])
        await relay.run_once()
        assert all(numbers(broker.log, key) == [1] for key in neighbours)
        broker.script = refusing()
        await harness.advance(seconds=1)
        await harness.works(relay)
        assert numbers(broker.log, "A") == list(range(FOLLOWERS + 1))
        assert await harness.store.admin.blocked_streams(10) == []

    async def test_an_event_parked_behind_a_head_that_vanished_is_still_found(self, harness: Harness) -> None:
        """An operator may delete a row by hand. The events parked behind the row must not wait for ever."""
        [_, second] = await harness.stage(*orders(2, "A"))
        broker = MemoryBroker()
        relay = harness.relay(broker)
        await relay.heartbeat()
        fetched = await harness.store.fetch(relay.lease, dict.fromkeys(relay.lease.epochs, 10))
        [follower] = [event for event in fetched.events if event.event_id == second]
        assert (
            await harness.store.settle(relay.lease, Settlements.of([Settlement(follower, follower.stream, PARK)])) == 1
        )
        await harness.works(relay)
        assert set(numbers(broker.log)) == {1, 2}

    async def test_arrivals_during_a_drain_wait_their_turn(self, harness: Harness) -> None:
        [head, *_] = await harness.stage(*orders(30, "A"))
        broker = MemoryBroker(script=refusing(str(head)))
        relay = harness.relay(broker, batch_max=10)
        await harness.works(relay)
        broker.script = refusing()
        await harness.advance(seconds=1)
        for late in range(31, 41):
            await relay.run_once()
            await harness.stage(order(late, "A"))
        await harness.works(relay)
        assert numbers(broker.log) == list(range(1, 41))

    async def test_a_drain_survives_a_change_of_owner(self, harness: Harness) -> None:
        [head, *_] = await harness.stage(*orders(30, "A"))
        broker = MemoryBroker(script=refusing(str(head)))
        first = harness.relay(broker, seed=1, batch_max=10)
        await harness.works(first)
        broker.script = refusing()
        await harness.advance(seconds=1)
        await first.run_once()
        await first.run_once()
        await harness.stage(order(31, "A"))
        await harness.advance(seconds=16)
        await harness.works(harness.relay(broker, seed=2, batch_max=10))
        assert numbers(broker.log) == list(range(1, 32))

    async def test_a_deferred_event_waits_for_its_time_and_holds_its_stream(self, harness: Harness) -> None:
        due = harness.clock.now() + timedelta(hours=1)
        await harness.stage(order(1, "A"), order(2, "A", available_at=due), order(3, "A"), order(1, "B"))
        broker = MemoryBroker()
        relay = harness.relay(broker)
        await harness.works(relay)
        assert (numbers(broker.log, "A"), numbers(broker.log, "B")) == ([1], [1])
        await harness.stage(order(4, "A"))
        await harness.advance(seconds=3_599)
        await harness.works(relay, relay)
        assert numbers(broker.log, "A") == [1]
        await harness.advance(seconds=1)
        await relay.heartbeat()
        await harness.works(relay)
        assert numbers(broker.log, "A") == [1, 2, 3, 4]

    async def test_keyless_events_are_streams_of_their_own(self, harness: Harness) -> None:
        async with harness.transaction() as conn:
            ids = await outrider.stage(conn, *[outrider.Event("tick", {"n": n}) for n in range(20)])
        bad = {str(event_id) for event_id in ids[:10]}
        broker = MemoryBroker(script=refusing(*bad))
        await harness.works(harness.relay(broker))
        assert {message.message_id for message in broker.log} == {str(event_id) for event_id in ids[10:]}


class TopicContract:
    """Rules for a row that was inserted without a topic."""

    @pytest.fixture(params=["default rule", "replaced rule"])
    def topic(self, harness: Harness, request: pytest.FixtureRequest) -> str:
        if request.param == "replaced rule":
            harness.store.topic_rule = lambda event_type, *_: f"mine.{event_type}"
            return "mine.order.changed"
        return "events.order.changed"

    async def test_a_row_without_a_topic_is_published_and_archived_under_the_topic_of_the_rule(
        self, harness: Harness, topic: str
    ) -> None:
        event_id = await _insert(harness, "A")
        assert await harness.store.admin.topics(10) == [topic]
        broker = MemoryBroker()
        await harness.works(harness.relay(broker))
        assert [message.topic for message in broker.log] == [topic]
        assert (await harness.store.admin.event(event_id))["topic"] == topic

    async def test_a_row_without_a_topic_is_blocked_retried_and_dead_lettered_under_the_topic_of_the_rule(
        self, harness: Harness, topic: str
    ) -> None:
        first, second = [await _insert(harness, "A") for _ in range(2)]
        broker = MemoryBroker(script=lambda message: Nacked("no"))
        relay = harness.relay(broker)
        await harness.works(relay)
        assert [held.stream.topic for held in await harness.store.admin.blocked_streams(10)] == [topic]
        await harness.works_for(relay, seconds=60, step_seconds=1)
        [dead] = await harness.store.admin.dead_letters(Criteria())
        assert (dead["event_id"], dead["topic"], dead["attempts"]) == (first, topic, 3)
        broker.script = lambda message: CONFIRMED
        await harness.store.admin.replay([first], "me")
        await harness.works(relay)
        assert [(message.message_id, message.topic) for message in broker.log] == [
            (str(first), topic),
            (str(second), topic),
        ]
        sent = await harness.store.admin.events(Criteria(state="sent"))
        assert [row["topic"] for row in sent] == [topic, topic]

    @pytest.mark.parametrize("policy", list(OnDeadLetter))
    async def test_rows_without_a_topic_keep_the_topic_of_the_rule_when_their_outcomes_differ(
        self, harness: Harness, topic: str, policy: OnDeadLetter
    ) -> None:
        confirmed, rejected, nacked = [await _insert(harness, key) for key in "ABC"]
        results: dict[str, PublishResult] = {str(rejected): Rejected("no"), str(nacked): Nacked("not now")}
        broker = MemoryBroker(script=lambda message: results.get(message.message_id, CONFIRMED))
        # One pass, whose outcomes are written together.
        await harness.works(harness.relay(broker, on_dead_letter=policy))
        [sent] = await harness.store.admin.events(Criteria(state="sent"))
        [dead] = await harness.store.admin.dead_letters(Criteria())
        [failed] = await harness.store.admin.events(Criteria())
        found = [(row["event_id"], row["topic"]) for row in (sent, dead, failed)]
        assert found == [(confirmed, topic), (rejected, topic), (nacked, topic)]
        assert (dead["policy"], failed["state"]) == (policy, "failed")

    async def test_a_row_without_a_topic_that_a_person_dead_letters_keeps_the_topic_of_the_rule(
        self, harness: Harness, topic: str
    ) -> None:
        event_id = await _insert(harness, "A")
        assert await harness.store.admin.dead_letter(event_id, "me", {"error": "no"}, "block")
        [dead] = await harness.store.admin.dead_letters(Criteria())
        assert dead["topic"] == topic
        assert [held.stream.topic for held in await harness.store.admin.blocked_streams(10)] == [topic]

    async def test_a_row_without_a_topic_is_in_the_stream_of_events_that_name_the_same_topic(
        self, harness: Harness, topic: str
    ) -> None:
        named = await harness.stage(order(1, "A", topic=topic))
        unnamed = await _insert(harness, "A")
        broker = MemoryBroker(script=lambda message: Nacked("no"))
        await harness.works(harness.relay(broker))
        found = await harness.store.admin.events(Criteria())
        assert [(row["event_id"], row["state"]) for row in found] == [(named[0], "failed"), (unnamed, "parked")]

    async def test_a_topic_of_its_own_comes_before_the_rule(self, harness: Harness, topic: str) -> None:
        await harness.stage(order(1, "A", topic="own"))
        broker = MemoryBroker()
        await harness.works(harness.relay(broker))
        assert [message.topic for message in broker.log] == ["own"]


async def _insert(harness: Harness, key: str) -> UUID:
    event_id = uuid4()
    await harness.insert(event_id, "order.changed", '{"n": 1}', key)
    return event_id


class RollBack(Exception):
    """Raised by tests to roll back."""


class SizeContract:
    """Rules for large events."""

    async def test_the_bytes_of_a_pass_are_bounded_and_no_lane_starves(
        self, harness: Harness, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        bytes_max, event_bytes, keys = 400_000, 20_000, 150
        monkeypatch.setattr(lane_ownership, "BATCH_BYTES_MAX", bytes_max)
        broker = MemoryBroker()
        relay = harness.relay(broker)
        await relay.heartbeat()
        events = [order(1, f"K{n}") for n in range(keys)]
        await harness.stage(*(replace(event, payload={"n": 1, "pad": "x" * event_bytes}) for event in events))
        sizes = []
        while await harness.store.admin.has_due():
            before = len(broker.log)
            await relay.run_once()
            sizes.append(sum(len(message.body) for message in broker.log[before:]))
        assert {message.key for message in broker.log} == {f"K{n}" for n in range(keys)}
        # Lanes with a backlog and the other lanes have a budget each.
        assert max(sizes) <= 2 * bytes_max
        assert len(sizes) <= 6 * keys * event_bytes / bytes_max


class StagingContract:
    """Rules for staging events."""

    async def test_a_committed_event_is_delivered_with_everything_it_carries(self, harness: Harness) -> None:
        created = datetime(2029, 5, 4, 3, 2, 1, tzinfo=UTC)
        event = Event(
            "order.placed",
            {"text": "naïve ☂", "list": [1, 2.5, None, True]},
            aggregate_type="order",
            aggregate_id="A-1",
            headers={"tenant": "blue", "correlation_id": "request-7"},
            topic="orders",
            key="customer-9",
            routing_key="eu.orders",
            priority=Priority.HIGH,
            schema_version="2.1.0",
            saga_id="saga-1",
            sequence=12,
            created_at=created,
        )
        [event_id] = await harness.stage(event)
        broker = MemoryBroker()
        await harness.works(harness.relay(broker))
        [message] = broker.log
        assert (message.message_id, message.topic, message.key) == (str(event_id), "orders", "customer-9")
        assert message.routing_key == "eu.orders"
        assert message.body.decode() == '{"text":"naïve ☂","list":[1,2.5,null,true]}'
        expected = {"tenant": "blue", "correlation_id": "request-7", "event_type": "order.placed", "sequence": "12"}
        expected |= {"schema_version": "2.1.0"}
        assert expected.items() <= message.headers.items()
        assert {"message_id", "trace_id", "causation_id", "saga_id"} <= message.headers.keys()
        assert datetime.fromisoformat(message.headers["created_at"]) == created

    async def test_a_rolled_back_event_never_existed(self, harness: Harness) -> None:
        with suppress(RollBack):
            async with harness.transaction() as conn:
                await outrider.stage(conn, order(1))
                raise RollBack
        broker = MemoryBroker()
        await harness.works(harness.relay(broker))
        assert broker.log == []
        assert not any((await harness.store.admin.counts()).values())

    async def test_a_savepoint_rolled_back_takes_only_its_own_events(self, harness: Harness) -> None:
        async with harness.transaction() as conn:
            await outrider.stage(conn, order(1, sequence="auto"))
            with suppress(RollBack):
                async with harness.savepoint(conn):
                    await outrider.stage(conn, order(2, sequence="auto"))
                    raise RollBack
            await outrider.stage(conn, order(3, sequence="auto"))
        broker = MemoryBroker()
        await harness.works(harness.relay(broker))
        assert numbers(broker.log) == [1, 3]
        assert [message.headers["sequence"] for message in broker.log] == ["1", "2"]

    async def test_staging_an_id_twice_is_a_no_op_wherever_the_first_one_is(self, harness: Harness) -> None:
        known = uuid4()
        broker = MemoryBroker()
        relay = harness.relay(broker)
        for _ in ("new", "pending", "in the archive"):
            await harness.stage(order(1, event_id=known))
            await harness.stage(order(1, event_id=known))
            await harness.works(relay)
        assert [message.message_id for message in broker.log] == [str(known)]

    async def test_the_first_of_two_events_with_one_id_wins(self, harness: Harness) -> None:
        known = uuid4()
        await harness.stage(order(1, event_id=known), order(2, event_id=known))
        broker = MemoryBroker()
        await harness.works(harness.relay(broker))
        assert numbers(broker.log) == [1]

    async def test_eight_writers_on_one_stream_number_it_without_gaps_duplicates_among_them(
        self, harness: Harness
    ) -> None:
        shared = [uuid4() for _ in range(10)]

        async def writer(name: int) -> None:
            for turn in range(10):
                own = order(name * 100 + turn, sequence="auto")
                again = order(turn, sequence="auto", event_id=shared[turn])
                await harness.stage(*([own, again] if name % 2 else [again, own]))

        await asyncio.gather(*(writer(name) for name in range(8)))
        broker = MemoryBroker()
        await harness.works(harness.relay(broker))
        sequences = [int(message.headers["sequence"]) for message in broker.log]
        assert sequences == list(range(1, 8 * 10 + 10 + 1))
        assert len({message.message_id for message in broker.log}) == 90

    async def test_bad_input_is_rejected_and_nothing_is_written(self, harness: Harness) -> None:
        async with harness.transaction() as conn:
            with pytest.raises(InvalidEvent, match=r"events\[1\]\.payload\.price") as rejection:
                await outrider.stage(conn, order(1), Event("x", {"price": float("nan")}))
        assert rejection.value.path == "events[1].payload.price"
        assert not any((await harness.store.admin.counts()).values())

    async def test_a_transaction_of_200_events_is_delivered_whole_and_in_order(self, harness: Harness) -> None:
        broker = MemoryBroker()
        relay = harness.relay(broker, batch_max=50)
        async with harness.transaction() as late:
            for start in range(1, 201, 20):
                await outrider.stage(late, *orders(220)[start - 1 : start + 19])
            if harness.concurrent:
                # Other transactions commit meanwhile, with later positions in the same lane.
                await harness.stage(*orders(5, "B"), *orders(5, "C"))
                await harness.works(relay)
                assert numbers(broker.log) == []
        await harness.works(relay)
        assert numbers(broker.log) == list(range(1, 201))

    async def test_urgent_events_go_first_and_each_band_keeps_its_own_order(self, harness: Harness) -> None:
        await harness.stage(
            *orders(3, "L", priority=Priority.LOW),
            *orders(3, "N", priority=Priority.NORMAL),
            *orders(3, "H", priority=Priority.HIGH),
        )
        broker = MemoryBroker(ordered=True)
        await harness.works(harness.relay(broker))
        assert [message.key for message in broker.log] == ["H"] * 3 + ["N"] * 3 + ["L"] * 3
        assert all(numbers(broker.log, key) == [1, 2, 3] for key in "HNL")

    async def test_a_person_can_see_an_event_at_every_stage_of_its_life(self, harness: Harness) -> None:
        [event_id] = await harness.stage(order(1))
        admin = harness.store.admin
        [listed] = await admin.events(Criteria(key="A", event_type="order.changed"))
        assert (listed["event_id"], listed["state"], listed["payload"]) == (event_id, "pending", {"n": 1})
        assert await admin.events(Criteria(key="B")) == []
        await harness.works(harness.relay(MemoryBroker()))
        assert (await admin.event(event_id))["state"] == "sent"
        assert [row["event_id"] for row in await admin.events(Criteria(state="sent"))] == [event_id]
        with pytest.raises(outrider.OutriderError, match="no event"):
            await admin.event(UUID(int=0))
