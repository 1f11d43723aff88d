"""Ownership: a lane has one owner, and a relay that lost it can change nothing in it."""

from __future__ import annotations

import asyncio

from outrider.event import Stream
from outrider.observer import LeaseLost, RelaySwept
from outrider.outbox.relay import Relay
from outrider.outbox.streams import stream_of
from outrider.outcome import CONFIRMED, PARK, Bury, Confirmed, Defer, Outcome, Policy, Reason, Retry
from outrider.store import Criteria, Lease, Settlement
from outrider.testing.broker import MemoryBroker
from outrider.testing.harness import Harness, numbers, order, orders

FAILURE = {"kind": "refused", "error": "no"}
OUTCOMES: list[Outcome] = [
    Confirmed(),
    Retry(1.0, FAILURE),
    Defer(1.0),
    PARK,
    Bury(Reason.PERMANENT_FAILURE, FAILURE, Policy.HOLD),
    Bury(Reason.PERMANENT_FAILURE, FAILURE, Policy.SKIP),
]


class OwnershipContract:
    """What every store must do about lanes and leases."""

    async def test_two_relays_never_own_the_same_lane_and_share_fairly(self, harness: Harness) -> None:
        relays = [harness.relay(MemoryBroker(), seed=seed) for seed in range(3)]
        for _ in range(6):
            await asyncio.gather(*(relay.keep() for relay in relays))
            await harness.works(*relays)
            owned = [lane for relay in relays for lane in relay.lease.epochs]
            assert len(owned) == len(set(owned))
            await harness.advance(seconds=5)
        total = harness.store.lanes * 3
        shares = sorted(len(relay.lease.epochs) for relay in relays)
        assert sum(shares) == total
        assert shares[-1] <= -(-harness.store.lanes // 3) * 3

    async def test_relays_are_counted_as_long_as_they_are_alive(self, harness: Harness) -> None:
        assert await harness.store.desk.relays() == 0
        first, second = (harness.relay(MemoryBroker(), seed=seed) for seed in range(2))
        await first.keep()
        await second.keep()
        assert await harness.store.desk.relays() == 2
        await harness.advance(seconds=3600)
        await second.keep()
        await second.keep()
        assert await harness.store.desk.relays() == 1

    async def test_lanes_of_a_relay_that_died_are_taken_over_and_the_watchdog_says_so(self, harness: Harness) -> None:
        dead, heir = harness.relay(MemoryBroker(), seed=1), harness.relay(MemoryBroker(), seed=2)
        await dead.keep()
        lanes = set(dead.lease.epochs)
        await harness.advance(seconds=14)
        await heir.keep()
        assert not heir.lease.epochs
        await harness.advance(seconds=2)
        await heir.tend()
        await heir.keep()
        assert set(heir.lease.epochs) == lanes
        assert [(fact.relay, fact.lanes) for fact in harness.notebook.of(RelaySwept)] == [(dead.name, len(lanes))]

    async def test_a_relay_paused_past_its_lease_changes_nothing_when_it_wakes(self, harness: Harness) -> None:
        for seed, outcome in enumerate(OUTCOMES):
            await self._pause_and_wake(harness, outcome, seed)

    async def _pause_and_wake(self, harness: Harness, outcome: Outcome, seed: int) -> None:
        await harness.stage(*orders(2, "A"))
        paused = harness.relay(MemoryBroker(), seed=2 * seed)
        lease, settlements = await self._fetched(harness, paused, outcome)
        await harness.advance(seconds=16)
        broker = MemoryBroker()
        heir = harness.relay(broker, seed=2 * seed + 1)
        await heir.keep()
        before = await harness.store.desk.counts()
        # Everything the paused relay could still try, with what it knew.
        assert await harness.store.settle(lease, settlements) == 0
        assert await harness.store.confirm(lease, [settlement.event for settlement in settlements]) == 0
        assert await harness.store.settle(lease, [], [settlements[0].stream]) == 0
        assert (await harness.store.fetch(lease, dict.fromkeys(lease.epochs, 10))).events == []
        assert (await harness.store.due(lease, 10)).streams == []
        await harness.store.release(lease)
        assert await harness.store.desk.counts() == before
        assert await harness.store.desk.blocked_streams(10) == []
        await paused.work()
        assert harness.notebook.of(LeaseLost)
        await harness.works(heir)
        assert numbers(broker.log) == [1, 2]
        await harness.store.leave(heir.name)

    async def _fetched(self, harness: Harness, relay: Relay, outcome: Outcome) -> tuple[Lease, list[Settlement]]:
        await relay.keep()
        lease = relay.lease
        fetched = await harness.store.fetch(lease, dict.fromkeys(lease.epochs, 10))
        assert len(fetched.events) == 2
        return lease, [Settlement(event, stream_of(event, relay.rule), outcome) for event in fetched.events]

    async def test_a_relay_whose_heartbeat_lapsed_starts_anew_under_another_name(self, harness: Harness) -> None:
        relay = harness.relay(MemoryBroker())
        await relay.keep()
        first = relay.name
        await harness.advance(seconds=16)
        await relay.keep()
        assert not relay.lease.epochs
        await relay.keep()
        assert relay.lease.epochs
        assert relay.name != first

    async def test_a_relay_does_not_publish_when_its_lease_may_end_first(self, harness: Harness) -> None:
        broker = MemoryBroker()
        relay = harness.relay(broker)
        await relay.keep()
        await harness.stage(order(1))
        # By its own clock: 90 % of 15 s, less the 5 s a publish may take.
        await harness.advance(seconds=8.6)
        await relay.work()
        assert broker.log == []
        await relay.keep()
        await relay.work()
        assert numbers(broker.log) == [1]

    async def test_a_clean_stop_frees_every_lane_at_once_and_repeats_nothing(self, harness: Harness) -> None:
        await harness.stage(*orders(50))
        broker = MemoryBroker()
        first = harness.relay(broker, seed=1, batch_max=10)
        await first.keep()
        await first.work()
        await harness.store.leave(first.name)
        second = harness.relay(broker, seed=2)
        await harness.works(second)
        assert len(second.lease.epochs) == harness.store.lanes * 3
        assert len(broker.log) == 50
        assert numbers(broker.log) == list(range(1, 51))

    async def test_a_lane_taken_by_a_person_is_lost_to_its_relay_and_claimed_again(self, harness: Harness) -> None:
        [event_id] = await harness.stage(order(1))
        relay = harness.relay(MemoryBroker())
        lease, [settlement] = await self._one(harness, relay)
        assert await harness.store.desk.bury(event_id, "me", FAILURE, "hold")
        assert await harness.store.settle(lease, [settlement]) == 0
        assert [row["event_id"] for row in await harness.store.desk.dead_letters(Criteria())] == [event_id]
        await relay.work()
        await relay.keep()
        assert len(relay.lease.epochs) == harness.store.lanes * 3
        assert await harness.store.blocked([settlement.stream]) == {settlement.stream}

    async def _one(self, harness: Harness, relay: Relay) -> tuple[Lease, list[Settlement]]:
        await relay.keep()
        fetched = await harness.store.fetch(relay.lease, dict.fromkeys(relay.lease.epochs, 10))
        stream: Stream = stream_of(fetched.events[0], relay.rule)
        return relay.lease, [Settlement(event, stream, CONFIRMED) for event in fetched.events]
