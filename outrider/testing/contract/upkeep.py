"""Upkeep: nothing grows without bound."""

from __future__ import annotations

from uuid import uuid4

from outrider.outcome import Policy, Rejected
from outrider.store import Criteria, Retention
from outrider.testing.broker import MemoryBroker
from outrider.testing.harness import Harness, numbers, order, orders

DAY = 86_400.0


class UpkeepContract:
    """What every store must do to stay bounded."""

    async def test_archive_and_prune_keep_the_tables_bounded(self, harness: Harness) -> None:
        broker = MemoryBroker()
        relay = harness.relay(broker, retention=Retention(archive_days=3))
        sizes = []
        for _ in range(12):
            await harness.store.upkeep.prepare()
            await harness.stage(*orders(20))
            await harness.works(relay)
            await harness.advance(seconds=DAY)
            await harness.works(relay)
            await relay.tend()
            counts = await harness.store.desk.counts()
            sizes.append(counts.pop("sent"))
            assert not any(counts.values())
        assert len(broker.log) == 240
        # Whole days are dropped, so one more than the retention may be there.
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

    async def test_old_dead_letters_go_but_a_held_one_stays_until_a_person_acts(self, harness: Harness) -> None:
        await harness.stage(order(1, "A", topic="held"), order(1, "A", topic="skipped"))
        broker = MemoryBroker(script=lambda _: Rejected("no"))
        policies = {"skipped": Policy.SKIP}
        relay = harness.relay(broker, dead_letter_policies=policies)
        await harness.works(relay)
        await harness.advance(seconds=31 * DAY)
        pruned = await harness.store.upkeep.prune(Retention())
        assert pruned.dead_letters == 1
        assert [row["topic"] for row in await harness.store.desk.dead_letters(Criteria())] == ["held"]

    async def test_records_of_what_people_did_are_kept_for_their_time(self, harness: Harness) -> None:
        [poison] = await harness.stage(order(1))
        await harness.store.desk.bury(poison, "me", {"error": "no"}, "skip")
        await harness.store.desk.replay([poison], "me")
        assert (await harness.store.upkeep.prune(Retention())).operations == 0
        await harness.advance(seconds=91 * DAY)
        assert (await harness.store.upkeep.prune(Retention())).operations == 2

    async def test_a_duty_is_done_by_one_relay_per_turn(self, harness: Harness) -> None:
        turns = [await harness.store.upkeep.take_duty("prune", 60) for _ in range(3)]
        await harness.advance(seconds=60)
        turns += [await harness.store.upkeep.take_duty("prune", 60) for _ in range(2)]
        assert turns == [True, False, False, True, False]

    async def test_events_are_deleted_where_no_archive_is_kept(self, harness: Harness) -> None:
        harness.store.archive = False  # type: ignore[attr-defined]
        await harness.stage(*orders(5))
        broker = MemoryBroker()
        await harness.works(harness.relay(broker))
        assert numbers(broker.log) == [1, 2, 3, 4, 5]
        assert not any((await harness.store.desk.counts()).values())
