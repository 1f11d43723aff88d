"""Rules about what is kept, and for how long."""

from __future__ import annotations

from outrider.app import Outbox
from outrider.errors import Permanent
from outrider.observer import InboxUpkeepDone
from outrider.saga_store import Phase
from outrider.testing.inbox_contract.bench import InboxBench, delivery

DAY = 86_400


class UpkeepRules:
    """Nothing grows without bound."""

    async def test_old_receipts_are_removed_and_young_ones_stay(self, bench: InboxBench) -> None:
        billing = bench.consumer()
        old, young = delivery(1), delivery(2)
        await billing.deliver(old)
        await bench.advance(seconds=10 * DAY)
        await billing.deliver(young)
        pruned = await bench.store.prune("billing", receipt_days=9, dead_letter_days=30)
        assert pruned == (1, 0)
        await billing.deliver_all([old, young])
        assert await bench.effects() == ["A-1:1", "A-1:2", "A-1:1"]

    async def test_another_consumers_receipts_are_left_alone(self, bench: InboxBench) -> None:
        await bench.consumer("billing").deliver(delivery(1))
        await bench.advance(seconds=10 * DAY)
        assert await bench.store.prune("shipping", receipt_days=1, dead_letter_days=1) == (0, 0)
        assert await bench.store.prune("billing", receipt_days=1, dead_letter_days=1) == (1, 0)

    async def test_old_dead_letters_go_unless_they_hold_a_stream(self, bench: InboxBench) -> None:
        for policy in ("hold", "skip"):
            bench.fail(f"{policy}:1", Permanent("no"))
            await bench.consumer(dead_letter_policy=policy).deliver_all([delivery(1, key=policy)])
        await bench.advance(seconds=40 * DAY)
        pruned = await bench.store.prune("billing", receipt_days=90, dead_letter_days=30)
        assert pruned.dead_letters == 1
        assert (await bench.store.desk.counts("billing"))["dead_letters"] == 1

    async def test_old_barriers_of_participants_are_removed_and_young_ones_stay(self, bench: InboxBench) -> None:
        async with bench.store.transaction() as tx:
            assert (await Outbox().barrier_enter(tx, "stock", "saga-1:reserve", Phase.ACTION)).fresh
        assert await bench.store.prune_barriers(days=10_000) == 0
        await bench.advance(seconds=91 * DAY)
        assert await bench.store.prune_barriers(days=90) == 1
        assert await bench.store.prune_barriers(days=90) == 0

    async def test_the_upkeep_of_a_consumer_removes_old_barriers_too(self, bench: InboxBench) -> None:
        async with bench.store.transaction() as tx:
            await Outbox().barrier_enter(tx, "stock", "saga-1:reserve", Phase.ACTION)
        await bench.advance(seconds=91 * DAY)
        await bench.consumer(barrier_days=None).tend()
        await bench.consumer().tend()
        assert await bench.store.prune_barriers(days=1) == 0
        [done] = bench.notebook.of(InboxUpkeepDone)
        assert done.barriers == 1
