"""Order: one stream waiting never holds up another, and what waits goes out in its turn."""

from __future__ import annotations

from datetime import timedelta

import outrider
from outrider.event import Message
from outrider.outbox.streams import stream_of
from outrider.outcome import CONFIRMED, PARK, Refused, Verdict
from outrider.store import Settlement
from outrider.testing.broker import MemoryBroker, Script
from outrider.testing.harness import Harness, numbers, order, orders

FOLLOWERS = 40_000


def refusing(*message_ids: str) -> Script:
    """Refuse these messages, confirm the others."""
    bad = set(message_ids)

    def script(message: Message) -> Verdict:
        return Refused("not now") if message.message_id in bad else CONFIRMED

    return script


class OrderContract:
    """What every store must do to keep streams in order and apart."""

    async def test_a_failing_head_parks_only_its_stream(self, harness: Harness) -> None:
        [head, *_] = await harness.stage(*orders(5, "A"))
        await harness.stage(*orders(5, "B"))
        broker = MemoryBroker(script=refusing(str(head)))
        relay = harness.relay(broker)
        await harness.works(relay)
        assert numbers(broker.log, "A") == []
        assert numbers(broker.log, "B") == [1, 2, 3, 4, 5]
        counts = await harness.store.desk.counts()
        assert (counts["failed"], counts["parked"]) == (1, 4)
        await harness.stage(order(6, "A"), order(6, "B"))
        await harness.works(relay)
        assert numbers(broker.log, "B")[-1] == 6
        broker.script = refusing()
        await harness.advance(seconds=1)
        await harness.works(relay)
        assert numbers(broker.log, "A") == [1, 2, 3, 4, 5, 6]
        assert await harness.store.desk.blocked_streams(10) == []

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
        assert (await harness.store.desk.counts())["parked"] == FOLLOWERS
        # Others now pass at once: their fetch finds them first, whatever waits in the lane.
        neighbours = [f"N{n}" for n in range(50)]
        await harness.stage(*[order(1, key) for key in neighbours])
        await relay.work()
        assert all(numbers(broker.log, key) == [1] for key in neighbours)
        broker.script = refusing()
        await harness.advance(seconds=1)
        await harness.works(relay)
        assert numbers(broker.log, "A") == list(range(FOLLOWERS + 1))
        assert await harness.store.desk.blocked_streams(10) == []

    async def test_an_event_parked_behind_a_head_that_vanished_is_still_found(self, harness: Harness) -> None:
        """Somebody may delete a row by hand. What was parked behind it must not wait for ever."""
        [_, second] = await harness.stage(*orders(2, "A"))
        broker = MemoryBroker()
        relay = harness.relay(broker)
        await relay.keep()
        fetched = await harness.store.fetch(relay.lease, dict.fromkeys(relay.lease.epochs, 10))
        [follower] = [event for event in fetched.events if event.event_id == second]
        assert (
            await harness.store.settle(relay.lease, [Settlement(follower, stream_of(follower, relay.rule), PARK)]) == 1
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
            await relay.work()
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
        await first.work()
        await first.work()
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
        await relay.keep()
        await harness.works(relay)
        assert numbers(broker.log, "A") == [1, 2, 3, 4]

    async def test_keyless_events_are_streams_of_their_own(self, harness: Harness) -> None:
        async with harness.transaction() as conn:
            ids = await outrider.stage(conn, *[outrider.Event("tick", {"n": n}) for n in range(20)])
        bad = {str(event_id) for event_id in ids[:10]}
        broker = MemoryBroker(script=refusing(*bad))
        await harness.works(harness.relay(broker))
        assert {message.message_id for message in broker.log} == {str(event_id) for event_id in ids[10:]}
