"""Contract rules for ownership: a lane has one owner, and a relay without the lease cannot write to the lane."""

from __future__ import annotations

import asyncio
from uuid import uuid4

from outrider.brokers.base import CONFIRMED, Confirmed, Nacked, Rejected
from outrider.checks import Level
from outrider.event import DeadLetterReason, OnDeadLetter, Stream
from outrider.outbox.model import (
    PARK,
    Criteria,
    DeadLettered,
    Defer,
    Lease,
    Outcome,
    Retention,
    Retry,
    Settlement,
    Settlements,
)
from outrider.outbox.relay import Relay
from outrider.telemetry.events import DeadLettersExpired, LeaseLost, RelaySwept
from outrider.testing.fakes import MemoryBroker
from outrider.testing.harness import Harness, numbers, order, orders

FAILURE = {"kind": "nacked", "error": "no"}

OUTCOMES: list[Outcome] = [
    Confirmed(),
    Retry(1.0, FAILURE),
    Defer(1.0),
    PARK,
    DeadLettered(DeadLetterReason.PERMANENT_FAILURE, FAILURE, OnDeadLetter.BLOCK),
    DeadLettered(DeadLetterReason.PERMANENT_FAILURE, FAILURE, OnDeadLetter.SKIP),
]

DAY = 86_400.0


class OwnershipContract:
    """Rules for lanes and leases."""

    async def test_two_relays_never_own_the_same_lane_and_share_fairly(self, harness: Harness) -> None:
        relays = [harness.relay(MemoryBroker(), seed=seed) for seed in range(3)]
        for _ in range(6):
            await asyncio.gather(*(relay.heartbeat() for relay in relays))
            await harness.works(*relays)
            owned = [lane for relay in relays for lane in relay.lease.epochs]
            assert len(owned) == len(set(owned))
            await harness.advance(seconds=5)
        total = harness.store.lanes * 3
        shares = sorted(len(relay.lease.epochs) for relay in relays)
        assert sum(shares) == total
        assert shares[-1] <= -(-harness.store.lanes // 3) * 3

    async def test_relays_are_counted_as_long_as_they_are_alive(self, harness: Harness) -> None:
        assert await harness.store.admin.relays() == 0
        first, second = (harness.relay(MemoryBroker(), seed=seed) for seed in range(2))
        await first.heartbeat()
        await second.heartbeat()
        assert await harness.store.admin.relays() == 2
        await harness.advance(seconds=3600)
        await second.heartbeat()
        await second.heartbeat()
        assert await harness.store.admin.relays() == 1

    async def test_a_lane_is_owned_by_a_relay_as_long_as_that_is_alive(self, harness: Harness) -> None:
        assert await harness.store.admin.lane_owner(0) is None
        relay = harness.relay(MemoryBroker())
        await relay.heartbeat()
        assert await harness.store.admin.lane_owner(0) == relay.name
        assert await harness.store.admin.lane_owner(10_000) is None
        await harness.advance(seconds=3600)
        assert await harness.store.admin.lane_owner(0) is None

    async def test_lanes_of_a_relay_that_died_are_taken_over_and_the_watchdog_says_so(self, harness: Harness) -> None:
        dead, heir = harness.relay(MemoryBroker(), seed=1), harness.relay(MemoryBroker(), seed=2)
        await dead.heartbeat()
        lanes = set(dead.lease.epochs)
        await harness.advance(seconds=14)
        await heir.heartbeat()
        assert not heir.lease.epochs
        await harness.advance(seconds=2)
        await heir.run_maintenance()
        await heir.heartbeat()
        assert set(heir.lease.epochs) == lanes
        assert [(event.relay, event.lanes) for event in harness.observer.of(RelaySwept)] == [(dead.name, len(lanes))]

    async def test_a_clock_set_back_does_not_keep_the_lanes_of_a_dead_relay(self, harness: Harness) -> None:
        dead, heir = harness.relay(MemoryBroker(), seed=1), harness.relay(MemoryBroker(), seed=2, lease_seconds=40)
        await dead.heartbeat()
        lanes = set(dead.lease.epochs)
        # Less than a lease may be a correction of the clock, and the relay may live.
        await harness.advance(seconds=-10)
        await heir.heartbeat()
        assert not heir.lease.epochs
        await harness.advance(seconds=-3600)
        assert await harness.store.admin.relays() == 0
        assert await harness.store.admin.lane_owner(0) is None
        await heir.heartbeat()
        assert set(heir.lease.epochs) == lanes
        await heir.run_maintenance()
        assert [event.relay for event in harness.observer.of(RelaySwept)] == [dead.name]

    async def test_a_clock_set_back_does_not_cost_a_living_relay_its_lanes(self, harness: Harness) -> None:
        broker = MemoryBroker()
        relay = harness.relay(broker)
        await relay.heartbeat()
        owned = relay.lease
        await harness.advance(seconds=-3600)
        await relay.heartbeat()
        assert relay.lease == owned
        await harness.stage(order(1))
        await harness.works(relay)
        assert numbers(broker.log) == [1]

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
        await heir.heartbeat()
        before = await harness.store.admin.counts()
        # All writes that the paused relay could still try, with its old lease.
        assert await harness.store.settle(lease, Settlements.of(settlements)) == 0
        assert await harness.store.settle(lease, Settlements([settlement.event for settlement in settlements])) == 0
        assert await harness.store.settle(lease, Settlements.of([], [settlements[0].stream])) == 0
        assert (await harness.store.fetch(lease, dict.fromkeys(lease.epochs, 10))).events == []
        assert (await harness.store.due(lease, 10)).streams == []
        await harness.store.release(lease)
        assert await harness.store.admin.counts() == before
        assert await harness.store.admin.blocked_streams(10) == []
        await paused.run_once()
        assert harness.observer.of(LeaseLost)
        await harness.works(heir)
        assert numbers(broker.log) == [1, 2]
        await harness.store.leave(heir.name)

    async def _fetched(self, harness: Harness, relay: Relay, outcome: Outcome) -> tuple[Lease, list[Settlement]]:
        await relay.heartbeat()
        lease = relay.lease
        fetched = await harness.store.fetch(lease, dict.fromkeys(lease.epochs, 10))
        assert len(fetched.events) == 2
        return lease, [Settlement(event, event.stream, outcome) for event in fetched.events]

    async def test_a_relay_whose_heartbeat_lapsed_starts_anew_under_another_name(self, harness: Harness) -> None:
        relay = harness.relay(MemoryBroker())
        await relay.heartbeat()
        first = relay.name
        await harness.advance(seconds=16)
        await relay.heartbeat()
        assert not relay.lease.epochs
        await relay.heartbeat()
        assert relay.lease.epochs
        assert relay.name != first

    async def test_a_relay_does_not_publish_when_its_lease_may_end_first(self, harness: Harness) -> None:
        broker = MemoryBroker()
        relay = harness.relay(broker)
        await relay.heartbeat()
        await harness.stage(order(1))
        # On the clock of the relay: 90 % of 15 s, minus the 5 s that a publish may take.
        await harness.advance(seconds=8.6)
        await relay.run_once()
        assert broker.log == []
        await relay.heartbeat()
        await relay.run_once()
        assert numbers(broker.log) == [1]

    async def test_a_clean_stop_frees_every_lane_at_once_and_repeats_nothing(self, harness: Harness) -> None:
        await harness.stage(*orders(50))
        broker = MemoryBroker()
        first = harness.relay(broker, seed=1, batch_max=10)
        await first.heartbeat()
        await first.run_once()
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
        assert await harness.store.admin.dead_letter(event_id, "me", FAILURE, "block")
        assert await harness.store.settle(lease, Settlements.of([settlement])) == 0
        assert [row["event_id"] for row in await harness.store.admin.dead_letters(Criteria())] == [event_id]
        await relay.run_once()
        await relay.heartbeat()
        assert len(relay.lease.epochs) == harness.store.lanes * 3
        assert await harness.store.blocked([settlement.stream]) == {settlement.stream}

    async def _one(self, harness: Harness, relay: Relay) -> tuple[Lease, list[Settlement]]:
        await relay.heartbeat()
        fetched = await harness.store.fetch(relay.lease, dict.fromkeys(relay.lease.epochs, 10))
        stream: Stream = fetched.events[0].stream
        return relay.lease, [Settlement(event, stream, CONFIRMED) for event in fetched.events]


class MaintenanceContract:
    """Rules that keep the tables bounded."""

    async def test_archive_and_prune_keep_the_tables_bounded(self, harness: Harness) -> None:
        broker = MemoryBroker()
        relay = harness.relay(broker, retention=Retention(archive_days=3))
        sizes = []
        for _ in range(12):
            await harness.store.maintenance.prepare()
            await harness.stage(*orders(20))
            await harness.works(relay)
            await harness.advance(seconds=DAY)
            await harness.works(relay)
            await relay.run_maintenance()
            counts = await harness.store.admin.counts()
            sizes.append(counts.pop("sent"))
            assert not any(counts.values())
        assert len(broker.log) == 240
        # Maintenance drops whole days: one day more than the retention may remain.
        assert max(sizes) <= 20 * 5
        assert sizes[-1] == sizes[-2] > 0

    async def test_an_id_is_known_as_long_as_its_event_is_kept(self, harness: Harness) -> None:
        known = uuid4()
        broker = MemoryBroker()
        relay = harness.relay(broker)
        await harness.stage(order(1, event_id=known))
        await harness.works(relay)
        await harness.advance(seconds=2 * DAY)
        await harness.stage(order(1, event_id=known))
        await harness.works(relay)
        assert len(broker.log) == 1

    async def test_a_dead_letter_is_kept_for_ever_unless_a_setting_limits_its_retention(self, harness: Harness) -> None:
        await harness.stage(order(1, "A"))
        broker = MemoryBroker(script=lambda _: Rejected("no"))
        relay = harness.relay(broker, on_dead_letter=OnDeadLetter.SKIP)
        await harness.works(relay)
        await harness.advance(seconds=3650 * DAY)
        assert (await harness.store.maintenance.prune(Retention())).dead_letters == 0
        assert len(await harness.store.admin.dead_letters(Criteria())) == 1

    async def test_a_dead_letter_whose_retention_is_over_leaves_a_record_and_is_reported(
        self, harness: Harness
    ) -> None:
        await harness.stage(*(order(1, f"A{n}") for n in range(5)))
        broker = MemoryBroker(script=lambda _: Rejected("no"))
        relay = harness.relay(broker, on_dead_letter=OnDeadLetter.SKIP, retention=Retention(dead_letter_days=30))
        await harness.works(relay)
        await harness.advance(seconds=31 * DAY)
        await relay.run_maintenance()
        [expired] = harness.observer.of(DeadLettersExpired)
        assert (expired.dead_letters, expired.days) == (5, 30)
        assert await harness.store.admin.dead_letters(Criteria()) == []
        # The records are counted when they go in their turn.
        await harness.advance(seconds=91 * DAY)
        assert (await harness.store.maintenance.prune(Retention())).operations == 5

    async def test_old_dead_letters_go_but_a_blocking_one_stays_until_an_operator_acts(self, harness: Harness) -> None:
        await harness.stage(order(1, "A", topic="held"), order(1, "A", topic="skipped"))
        broker = MemoryBroker(script=lambda _: Rejected("no"))
        policies = {"skipped": OnDeadLetter.SKIP}
        relay = harness.relay(broker, dead_letter_policies=policies)
        await harness.works(relay)
        await harness.advance(seconds=31 * DAY)
        pruned = await harness.store.maintenance.prune(Retention(dead_letter_days=30))
        assert pruned.dead_letters == 1
        assert [row["topic"] for row in await harness.store.admin.dead_letters(Criteria())] == ["held"]

    async def test_records_of_what_people_did_are_kept_for_their_time(self, harness: Harness) -> None:
        [poison] = await harness.stage(order(1))
        await harness.store.admin.dead_letter(poison, "me", {"error": "no"}, "skip")
        await harness.store.admin.replay([poison], "me")
        assert (await harness.store.maintenance.prune(Retention())).operations == 0
        await harness.advance(seconds=91 * DAY)
        assert (await harness.store.maintenance.prune(Retention())).operations == 2

    async def test_a_duty_is_done_by_one_relay_per_turn(self, harness: Harness) -> None:
        turns = [await harness.store.maintenance.take_duty("prune", 60) for _ in range(3)]
        await harness.advance(seconds=60)
        turns += [await harness.store.maintenance.take_duty("prune", 60) for _ in range(2)]
        assert turns == [True, False, False, True, False]

    async def test_events_are_deleted_where_no_archive_is_kept(self, harness: Harness) -> None:
        harness.store.archive = False  # type: ignore[attr-defined]
        await harness.stage(*orders(5))
        broker = MemoryBroker()
        await harness.works(harness.relay(broker))
        assert numbers(broker.log) == [1, 2, 3, 4, 5]
        assert not any((await harness.store.admin.counts()).values())


class CheckContract:
    """Rules for the checks of a store."""

    async def test_checks_have_results_and_a_remedy_for_each_that_is_not_fine(self, harness: Harness) -> None:
        found = await harness.store.check()
        assert found
        assert all(result.check and result.text for result in found)
        assert all(bool(result.remedy) == (result.level is not Level.OK) for result in found)

    async def test_checks_change_nothing(self, harness: Harness) -> None:
        await harness.stage(order(1))
        before = await harness.store.admin.counts()
        await harness.store.check()
        assert await harness.store.admin.counts() == before

    async def test_topics_of_undelivered_events_are_named_once_waiting_ones_too(self, harness: Harness) -> None:
        relay = harness.relay(MemoryBroker(script=lambda message: Nacked("not now")))
        await harness.stage(order(1, "A", topic="late"), order(2, "A", topic="late"))
        await harness.works(relay)
        await harness.stage(order(1, "B", topic="new"), order(1, "C", topic="new"), order(1, "D", topic=None))
        names = await harness.store.admin.topics(10)
        assert names == sorted({"late", "new", names[0]})
        assert await harness.store.admin.topics(2) == names[:2]

    async def test_delivered_events_have_no_say_in_topics(self, harness: Harness) -> None:
        await harness.stage(order(1, topic="gone"))
        await harness.works(harness.relay(MemoryBroker()))
        assert await harness.store.admin.topics(10) == []
