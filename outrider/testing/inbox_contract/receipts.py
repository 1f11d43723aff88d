"""Rules about receipts: the effect and its receipt share one fate."""

from __future__ import annotations

import asyncio
from typing import Any
from uuid import uuid4

import pytest

import outrider
from outrider.event import Event
from outrider.inbox.inbox import Inbox, Result
from outrider.inbox.router import Route
from outrider.testing.inbox_contract.bench import TOPIC, TYPE, InboxBench, delivery


class ReceiptRules:
    """Exactly once."""

    async def test_an_event_delivered_twice_has_one_effect(self, bench: InboxBench) -> None:
        billing = bench.consumer()
        once = delivery(1)
        assert await billing.deliver(once) == 1
        assert await billing.deliver(once) == 1
        assert await bench.effects() == ["A-1:1"]

    async def test_a_failed_handler_leaves_no_trace_and_the_next_delivery_passes(self, bench: InboxBench) -> None:
        billing = bench.consumer()
        bench.fail("A-1:1", RuntimeError("no"), RuntimeError("no"))
        once = delivery(1)
        assert [await billing.deliver(once) for _ in range(3)] == [0, 0, 1]
        assert await bench.effects() == ["A-1:1"]

    async def test_two_consumers_both_see_every_event(self, bench: InboxBench) -> None:
        billing, shipping = bench.consumer("billing"), bench.consumer("shipping")
        for number in (1, 2):
            once = delivery(number)
            assert await billing.deliver(once) == await shipping.deliver(once) == 1
        assert sorted(await bench.effects()) == ["A-1:1", "A-1:1", "A-1:2", "A-1:2"]

    async def test_what_a_handler_stages_goes_out_with_its_commit_or_not_at_all(self, bench: InboxBench) -> None:
        failing = [True]

        async def stage(event: Event, tx: Any) -> None:
            await outrider.stage(tx, Event("invoice.made", {}, aggregate_id=event.key))
            if failing.pop():
                failing.append(False)
                raise RuntimeError("after staging")
            failing.append(False)

        billing = bench.consumer()
        billing.routes.handlers[TOPIC, TYPE] = Route(stage)
        once = delivery(1)
        assert await billing.deliver(once) == 0
        assert await bench.staged() == 0
        assert await billing.deliver(once) == 1
        assert await billing.deliver(once) == 1
        assert await bench.staged() == 1

    async def test_the_same_event_in_two_transactions_at_once_has_one_effect(self, bench: InboxBench) -> None:
        billing, again = bench.consumer(), bench.consumer()
        once = delivery(1)
        assert sum(await asyncio.gather(billing.deliver(once), again.deliver(once))) == 2
        assert await bench.effects() == ["A-1:1"]

    async def test_the_second_of_two_at_once_has_the_effect_if_the_first_fails(self, bench: InboxBench) -> None:
        bench.fail("A-1:1", RuntimeError("the first one fails"))
        once = delivery(1)
        done = await asyncio.gather(bench.consumer().deliver(once), bench.consumer().deliver(once))
        assert sorted(done) == [0, 1]
        assert await bench.effects() == ["A-1:1"]

    async def test_a_batch_is_one_transaction_and_duplicates_in_it_count_once(self, bench: InboxBench) -> None:
        billing = bench.consumer(batch_max=100)
        batch = [delivery(n, key=f"k{n % 7}") for n in range(50)]
        assert await billing.deliver(batch[3]) == 1
        assert await billing.deliver(*batch, *batch[:10]) == 60
        assert sorted(await bench.effects()) == sorted(f"k{n % 7}:{n}" for n in range(50))

    async def test_one_bad_event_in_a_batch_costs_the_others_nothing(self, bench: InboxBench) -> None:
        billing = bench.consumer(batch_max=100)
        bench.fail("B:1", RuntimeError("in the batch"), RuntimeError("and alone"))
        batch = [delivery(1, key="A"), delivery(1, key="B"), delivery(2, key="B"), delivery(2, key="A")]
        assert await billing.deliver(*batch) == 2
        assert await bench.effects() == ["A:1", "A:2"]
        assert await billing.deliver(batch[1], batch[2]) == 2
        assert await bench.effects() == ["A:1", "A:2", "B:1", "B:2"]

    async def test_an_event_without_a_handler_is_done_with_and_does_nothing(self, bench: InboxBench) -> None:
        assert await bench.consumer().deliver(delivery(1, event_type="order.paid")) == 1
        assert await bench.effects() == []

    async def test_the_plain_call_says_what_became_of_a_delivery(self, bench: InboxBench) -> None:
        inbox = Inbox(bench.store)
        once = delivery(1)
        assert await inbox.process(once, bench.handler, consumer="billing") is Result.APPLIED
        assert await inbox.process(once, bench.handler, consumer="billing") is Result.DUPLICATE
        bench.fail("A-1:2", RuntimeError("as it was"))
        with pytest.raises(RuntimeError, match="as it was"):
            await inbox.process(delivery(2), bench.handler, consumer="billing")
        malformed = delivery(3)._replace(body=b"{")
        assert await inbox.process(malformed, bench.handler, consumer="billing") is Result.BURIED
        assert await bench.effects() == ["A-1:1"]

    async def test_time_spent_is_kept_with_the_receipt(self, bench: InboxBench) -> None:
        event_id = uuid4()
        await bench.consumer().deliver(delivery(1, event_id=event_id))
        [receipt] = await bench.store.desk.receipts("billing", [event_id])
        assert receipt["event_type"] == TYPE
        assert receipt["processing_seconds"] >= 0
