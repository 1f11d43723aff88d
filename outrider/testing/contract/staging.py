"""Staging: an event exists if and only if its transaction committed."""

from __future__ import annotations

import asyncio
from contextlib import suppress
from datetime import UTC, datetime
from uuid import UUID, uuid4

import pytest

import outrider
from outrider.errors import InvalidEvent
from outrider.event import Event, Priority
from outrider.store import Criteria
from outrider.testing.broker import MemoryBroker
from outrider.testing.harness import Harness, numbers, order, orders


class Undo(Exception):
    """Raised by tests to roll back."""


class StagingContract:
    """What every store must do when events are staged."""

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
            schema_version=3,
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
        assert expected.items() <= message.headers.items()
        assert {"message_id", "trace_id", "traceparent", "causation_id", "saga_id"} <= message.headers.keys()
        assert datetime.fromisoformat(message.headers["created_at"]) == created

    async def test_a_rolled_back_event_never_existed(self, harness: Harness) -> None:
        with suppress(Undo):
            async with harness.transaction() as conn:
                await outrider.stage(conn, order(1))
                raise Undo
        broker = MemoryBroker()
        await harness.works(harness.relay(broker))
        assert broker.log == []
        assert not any((await harness.store.desk.counts()).values())

    async def test_a_savepoint_rolled_back_takes_only_its_own_events(self, harness: Harness) -> None:
        async with harness.transaction() as conn:
            await outrider.stage(conn, order(1, sequence="auto"))
            with suppress(Undo):
                async with harness.savepoint(conn):
                    await outrider.stage(conn, order(2, sequence="auto"))
                    raise Undo
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

    async def test_bad_input_is_refused_and_nothing_is_written(self, harness: Harness) -> None:
        async with harness.transaction() as conn:
            with pytest.raises(InvalidEvent, match=r"events\[1\]\.payload\.price") as refusal:
                await outrider.stage(conn, order(1), Event("x", {"price": float("nan")}))
        assert refusal.value.path == "events[1].payload.price"
        assert not any((await harness.store.desk.counts()).values())

    async def test_a_transaction_of_200_events_is_delivered_whole_and_in_order(self, harness: Harness) -> None:
        broker = MemoryBroker()
        relay = harness.relay(broker, batch_max=50)
        async with harness.transaction() as late:
            for start in range(1, 201, 20):
                await outrider.stage(late, *orders(220)[start - 1 : start + 19])
            if harness.concurrent:
                # Others commit meanwhile, with later positions in the same lane.
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
        desk = harness.store.desk
        [listed] = await desk.events(Criteria(key="A", event_type="order.changed"))
        assert (listed["event_id"], listed["state"], listed["payload"]) == (event_id, "pending", {"n": 1})
        assert await desk.events(Criteria(key="B")) == []
        await harness.works(harness.relay(MemoryBroker()))
        assert (await desk.event(event_id))["state"] == "sent"
        assert [row["event_id"] for row in await desk.events(Criteria(state="sent"))] == [event_id]
        with pytest.raises(outrider.OutriderError, match="no event"):
            await desk.event(UUID(int=0))
