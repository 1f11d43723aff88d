"""Contract rules for sequencing: late events are dropped, early events are held, and held events stay visible."""

from __future__ import annotations

import asyncio
from typing import Any
from uuid import uuid4

import pytest

import outrider
from outrider.errors import InvalidHandler, Permanent
from outrider.event import Event, InboxStream
from outrider.inbox.inbox import Inbox, Result
from outrider.inbox.model import InboxCriteria
from outrider.inbox.router import Route
from outrider.telemetry.events import ConsumerBroken, GapOverdue, HeldEventsFull
from outrider.testing.harness import TOPIC, TYPE, ConsumerHarness, InboxBench, delivery, marker

STREAM = InboxStream(TOPIC, "A-1")

ENDS = pytest.mark.parametrize("commit", [True, False], ids=["commit", "rollback"])

TRACEPARENT, OTHER = (f"00-{trace * 32}-b7ad6b7169203331-00" for trace in "ab")

THEN = pytest.mark.parametrize("then", ["returns", "raises", "hangs"])


class SequencingRules:
    """Rules for the order of events at the consumer."""

    async def test_a_monotonic_ordering_drops_what_is_not_newer(self, bench: InboxBench) -> None:
        billing = bench.consumer(ordering="monotonic")
        await billing.deliver_all([delivery(n) for n in (5, 3, 5, 6, 9, 8)])
        assert await bench.effects() == ["A-1:5", "A-1:6", "A-1:9"]

    async def test_orderings_are_per_stream_and_per_consumer(self, bench: InboxBench) -> None:
        for name in ("billing", "shipping"):
            consumer = bench.consumer(name, ordering="monotonic")
            await consumer.deliver_all([delivery(7), delivery(2, key="B-1"), delivery(1, band="high")])
        assert sorted(await bench.effects()) == ["A-1:1", "A-1:1", "A-1:7", "A-1:7", "B-1:2", "B-1:2"]

    async def test_a_strict_ordering_lets_early_ones_wait_and_then_go_in_order(self, bench: InboxBench) -> None:
        billing = bench.consumer(ordering="strict", first_sequence="one")
        await billing.deliver_all([delivery(n) for n in (3, 2, 5)])
        assert await bench.effects() == []
        assert (await bench.store.admin.counts("billing"))["waiting"] == 3
        await billing.deliver_all([delivery(1)])
        assert await bench.effects() == ["A-1:1", "A-1:2", "A-1:3"]
        await billing.deliver_all([delivery(4)])
        assert await bench.effects() == [f"A-1:{n}" for n in range(1, 6)]
        assert await bench.store.admin.counts("billing") == {"waiting": 0, "blocked_streams": 0, "dead_letters": 0}

    async def test_a_strict_ordering_keeps_the_order_within_a_batch(self, bench: InboxBench) -> None:
        billing = bench.consumer(ordering="strict", first_sequence="one", batch_max=100)
        assert await billing.deliver(*[delivery(n) for n in (2, 1, 4, 3, 6)]) == 5
        await billing.drain()
        assert await bench.effects() == [f"A-1:{n}" for n in range(1, 5)]

    async def test_an_early_event_delivered_again_waits_once(self, bench: InboxBench) -> None:
        billing = bench.consumer(ordering="strict", first_sequence="one")
        early = delivery(2)
        await billing.deliver_all([early, early, early])
        assert (await bench.store.admin.counts("billing"))["waiting"] == 1
        await billing.deliver_all([delivery(1), early])
        assert await bench.effects() == ["A-1:1", "A-1:2"]

    async def test_a_late_joiner_starts_with_the_first_it_sees(self, bench: InboxBench) -> None:
        billing = bench.consumer(ordering="strict")
        await billing.deliver_all([delivery(57), delivery(58), delivery(60)])
        assert await bench.effects() == ["A-1:57", "A-1:58"]

    async def test_a_replayed_event_does_not_tell_a_late_joiner_where_to_start(self, bench: InboxBench) -> None:
        billing = bench.consumer(ordering="strict")
        await billing.deliver_all([delivery(3, replayed="true"), delivery(11), delivery(12)])
        assert await bench.effects() == ["A-1:3", "A-1:11", "A-1:12"]

    async def test_a_skipped_event_is_passed_and_its_replay_has_its_effect_once(self, bench: InboxBench) -> None:
        billing = bench.consumer(ordering="strict", first_sequence="one")
        late = delivery(2, event_id=uuid4(), replayed="true")
        await billing.deliver_all([delivery(1), delivery(3), marker(2), delivery(4), late, late, delivery(5)])
        assert await bench.effects() == ["A-1:1", "A-1:3", "A-1:4", "A-1:2", "A-1:5"]

    async def test_an_event_that_comes_too_late_is_dropped(self, bench: InboxBench) -> None:
        billing = bench.consumer(ordering="strict")
        await billing.deliver_all([delivery(5), delivery(4)])
        assert await bench.effects() == ["A-1:5"]

    async def test_a_strict_ordering_refuses_numbers_that_are_not_ours(self, bench: InboxBench) -> None:
        billing = bench.consumer(ordering="strict", on_dead_letter="skip")
        await billing.deliver_all([delivery(5, gapless="false"), delivery(None, key="B-1")])
        assert await bench.effects() == []
        assert (await bench.store.admin.counts("billing"))["dead_letters"] == 2

    async def test_what_waits_is_bounded_and_the_rest_stays_with_the_broker(self, bench: InboxBench) -> None:
        billing = bench.consumer(ordering="strict", first_sequence="one", held_per_stream_max=2)
        await billing.deliver_all([delivery(2), delivery(3)])
        late = delivery(4)
        assert await billing.deliver(late) == 0
        assert bench.observer.of(HeldEventsFull)
        await billing.deliver_all([delivery(1), late])
        assert await bench.effects() == [f"A-1:{n}" for n in range(1, 5)]

    async def test_a_gap_that_lasts_is_told_and_stays_visible(self, bench: InboxBench) -> None:
        billing = bench.consumer(ordering="strict", first_sequence="one", gap_timeout_seconds=60)
        await billing.deliver_all([delivery(2)])
        assert not bench.observer.of(GapOverdue)
        await bench.advance(seconds=61)
        await billing.run_maintenance()
        await billing.run_maintenance()
        [event] = bench.observer.of(GapOverdue)
        assert (event.key, event.seen, event.waiting) == ("A-1", 0, 1)
        [stream] = await bench.store.admin.streams("billing", 10)
        assert (stream["cause"], stream["waiting"]) == ("early", 1)

    async def test_a_person_may_give_up_on_a_gap(self, bench: InboxBench) -> None:
        billing = bench.consumer(ordering="strict", first_sequence="one")
        await billing.deliver_all([delivery(4), delivery(5), delivery(7)])
        assert await bench.store.admin.skip_gap("billing", STREAM, "ann")
        assert not await bench.store.admin.skip_gap("billing", InboxStream(TOPIC, "nobody"), "ann")
        await billing.drain()
        assert await bench.effects() == ["A-1:4", "A-1:5"]
        assert (await bench.store.admin.counts("billing"))["waiting"] == 1

    async def test_a_failing_event_among_those_that_drain_keeps_its_place(self, bench: InboxBench) -> None:
        billing = bench.consumer(ordering="strict", first_sequence="one")
        await billing.deliver_all([delivery(2), delivery(3)])
        bench.fail("A-1:2", RuntimeError("once"))
        await billing.deliver_all([delivery(1)])
        assert await bench.effects() == ["A-1:1", "A-1:2", "A-1:3"]

    async def test_events_left_draining_by_a_crash_are_found_by_another_process(self, bench: InboxBench) -> None:
        crashed = bench.consumer(ordering="strict", first_sequence="one")
        await crashed.deliver_all([delivery(2), delivery(3)])
        assert await crashed.deliver(delivery(1)) == 1
        await crashed.executor.stop()
        await bench.consumer(ordering="strict", first_sequence="one").drain()
        assert await bench.effects() == ["A-1:1", "A-1:2", "A-1:3"]

    async def test_by_hand_what_waited_goes_to_the_handler_whatever_its_type(self, bench: InboxBench) -> None:
        inbox = _by_hand(bench)
        assert await inbox.process(delivery(2, event_type="order.paid"), bench.handler, consumer="billing") == "waiting"
        assert await inbox.process(delivery(1), bench.handler, consumer="billing") == "applied"
        assert await inbox.process(delivery(4), bench.handler, consumer="billing") == "waiting"
        assert await inbox.process(marker(3), bench.handler, consumer="billing") == "dropped"
        assert await bench.effects() == ["A-1:1", "A-1:2", "A-1:4"]

    async def test_by_hand_a_second_delivery_tries_what_failed_behind_the_first_again(self, bench: InboxBench) -> None:
        inbox, first = _by_hand(bench), delivery(1)
        bench.fail("A-1:2", RuntimeError("once"))
        assert await inbox.process(delivery(2), bench.handler, consumer="billing") == "waiting"
        with pytest.raises(RuntimeError, match="once"):
            await inbox.process(first, bench.handler, consumer="billing")
        assert await inbox.process(first, bench.handler, consumer="billing") == "duplicate"
        assert await bench.effects() == ["A-1:1", "A-1:2"]

    @pytest.mark.parametrize("ordering", ["off", "monotonic"])
    async def test_what_came_early_goes_in_order_when_the_ordering_is_no_longer_strict(
        self, bench: InboxBench, ordering: str
    ) -> None:
        await bench.consumer(ordering="strict", first_sequence="one").deliver_all([delivery(n) for n in (5, 3, 4)])
        billing = bench.consumer(ordering=ordering, batch_max=2)
        assert await billing.deliver(delivery(6)) == 1
        await billing.drain()
        await billing.deliver_all([delivery(7)])
        assert await bench.effects() == [f"A-1:{n}" for n in range(3, 8)]
        assert (await bench.store.admin.counts("billing"))["waiting"] == 0

    @pytest.mark.parametrize("ordering", ["off", "monotonic"])
    async def test_what_came_early_goes_by_itself_when_the_ordering_is_no_longer_strict(
        self, bench: InboxBench, ordering: str
    ) -> None:
        await bench.consumer(ordering="strict", first_sequence="one").deliver_all([delivery(n) for n in (5, 3, 4)])
        await bench.consumer(ordering=ordering).drain()
        assert await bench.effects() == ["A-1:3", "A-1:4", "A-1:5"]

    async def test_by_hand_what_came_early_goes_in_order_when_the_ordering_is_no_longer_strict(
        self, bench: InboxBench
    ) -> None:
        inbox = _by_hand(bench)
        for number in (4, 3):
            assert await inbox.process(delivery(number), bench.handler, consumer="billing") == "waiting"
        inbox.consumer("billing", ordering="off")
        await inbox.process(delivery(5), bench.handler, consumer="billing")
        assert await bench.effects() == ["A-1:3", "A-1:4", "A-1:5"]

    async def test_by_hand_what_was_released_or_replayed_goes_when_it_is_drained(self, bench: InboxBench) -> None:
        inbox = _by_hand(bench)
        await inbox.process(delivery(2), bench.handler, consumer="billing")
        await inbox.process(delivery(1, key="B-1")._replace(body=b"{"), bench.handler, consumer="billing")
        assert await inbox.process(delivery(2, key="B-1"), bench.handler, consumer="billing") == "waiting"
        assert await inbox.drain("billing", bench.handler) == 0
        assert await bench.store.admin.skip_gap("billing", STREAM, "ann")
        [dead_letter] = await bench.store.admin.dead_letters(InboxCriteria())
        await bench.store.admin.discard([dead_letter["id"]], "ann")
        assert await inbox.drain("billing", bench.handler) == 2
        assert sorted(await bench.effects()) == ["A-1:2", "B-1:2"]
        assert await inbox.drain("billing", bench.handler) == 0

    async def test_by_hand_what_fails_while_it_is_drained_is_raised_and_waits_on(self, bench: InboxBench) -> None:
        inbox = _by_hand(bench)
        await inbox.process(delivery(2), bench.handler, consumer="billing")
        await bench.store.admin.skip_gap("billing", STREAM, "ann")
        bench.fail("A-1:2", RuntimeError("once"))
        with pytest.raises(RuntimeError, match="once"):
            await inbox.drain("billing", bench.handler)
        assert await inbox.drain("billing", bench.handler) == 1
        assert await bench.effects() == ["A-1:2"]


def _by_hand(bench: InboxBench) -> Inbox:
    inbox = Inbox(bench.store)
    inbox.consumer("billing", ordering="strict", first_sequence="one")
    return inbox


class ReceiptRules:
    """Each event has its effect exactly once."""

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
        assert await bench.staged() == []
        assert await billing.deliver(once) == 1
        assert await billing.deliver(once) == 1
        assert len(await bench.staged()) == 1

    async def test_an_event_staged_in_a_handler_continues_the_trace_and_the_correlation_of_the_handled_event(
        self, bench: InboxBench
    ) -> None:
        async def stage(event: Event, tx: Any) -> None:
            await outrider.stage(tx, Event("invoice.made", {}))
            await outrider.stage(tx, Event("invoice.made", {}, headers={"traceparent": OTHER, "causation_id": "mine"}))

        billing = bench.consumer()
        billing.routes.handlers[TOPIC, TYPE] = Route(stage)
        traced, untraced = uuid4(), uuid4()
        trace: dict[str, Any] = {"traceparent": TRACEPARENT, "tracestate": "shop=1"}
        await billing.deliver(delivery(1, event_id=traced, correlation_id="cart-3", **trace))
        await billing.deliver(delivery(2, event_id=untraced, traceparent="00-not-one"))
        assert await bench.staged() == [
            {**trace, "correlation_id": "cart-3", "causation_id": str(traced)},
            {"traceparent": OTHER, "correlation_id": "cart-3", "causation_id": "mine"},
            {"correlation_id": str(untraced), "causation_id": str(untraced)},
            {"traceparent": OTHER, "correlation_id": str(untraced), "causation_id": "mine"},
        ]

    async def test_a_batch_gives_the_headers_in_which_its_events_agree(self, bench: InboxBench) -> None:
        async def stage(events: list[Event], tx: Any) -> None:
            await outrider.stage(tx, Event("invoices.made", {}))

        billing = bench.consumer(batch_max=10)
        billing.routes.handlers[TOPIC, TYPE] = Route(stage, batch=True)
        parents = TRACEPARENT, OTHER
        await billing.deliver(*[delivery(correlation_id="cart-3", traceparent=parent) for parent in parents])
        assert await bench.staged() == [{"correlation_id": "cart-3"}]

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
        assert await inbox.process(malformed, bench.handler, consumer="billing") is Result.DEAD_LETTERED
        assert await bench.effects() == ["A-1:1"]

    async def test_time_spent_is_kept_with_the_receipt(self, bench: InboxBench) -> None:
        event_id = uuid4()
        await bench.consumer().deliver(delivery(1, event_id=event_id))
        [receipt] = await bench.store.admin.receipts("billing", [event_id])
        assert receipt["event_type"] == TYPE
        assert receipt["processing_seconds"] >= 0


class HandlerRules:
    """Rules for the handler transaction."""

    @ENDS
    @THEN
    async def test_a_handler_that_ends_the_transaction_breaks_the_consumer(
        self, bench: InboxBench, commit: bool, then: str
    ) -> None:
        billing = _ending(bench, commit=commit, then=then)
        with pytest.raises(InvalidHandler, match=r"_ending.*leave commit and rollback to outrider"):
            await billing.deliver(delivery(1))
        [event] = bench.observer.of(ConsumerBroken)
        assert "_ending" in event.error
        assert await bench.store.admin.dead_letters(InboxCriteria()) == []

    async def test_a_handler_that_ends_the_transaction_of_a_batch_breaks_the_consumer(self, bench: InboxBench) -> None:
        billing = _ending(bench, commit=True, then="raises", batch_max=10)
        with pytest.raises(InvalidHandler):
            await billing.deliver(delivery(1), delivery(1, key="B-1"))

    async def test_a_handler_that_ends_the_transaction_while_its_stream_drains_breaks_the_consumer(
        self, bench: InboxBench
    ) -> None:
        billing = bench.consumer()
        bench.fail("A-1:1", Permanent("broken"))
        await billing.deliver_all([delivery(1), delivery(2)])
        [dead_letter] = await bench.store.admin.dead_letters(InboxCriteria())
        await bench.store.admin.discard([dead_letter["id"]], "ann")
        ending = _ending(bench, commit=True, then="raises")
        await ending.run_maintenance()
        async with asyncio.timeout(10):
            with pytest.raises(InvalidHandler, match="leave commit and rollback to outrider"):
                await ending.executor.wait_for_failure()

    @THEN
    async def test_by_hand_a_handler_that_ends_the_transaction_is_told(self, bench: InboxBench, then: str) -> None:
        inbox = Inbox(bench.store)
        inbox.consumer("billing", handler_timeout_seconds=_timeout_seconds(then))
        handler = _ending(bench, commit=True, then=then).routes.handlers[TOPIC, TYPE].handler
        with pytest.raises(InvalidHandler, match="leave commit and rollback to outrider"):
            await inbox.process(delivery(1), handler, consumer="billing")


def _ending(bench: InboxBench, *, commit: bool, then: str, **settings: Any) -> ConsumerHarness:
    """Make a consumer whose handler ends the transaction, and then returns or raises as given."""

    async def end(event: Event, tx: Any) -> None:
        await bench.effect(tx, "half")
        await bench.end(tx, commit=commit)
        if then == "raises":
            raise RuntimeError("and failed")
        if then == "hangs":
            await asyncio.Event().wait()

    consumer_harness = bench.consumer(handler_timeout_seconds=_timeout_seconds(then), **settings)
    consumer_harness.routes.handlers[TOPIC, TYPE] = Route(end)
    return consumer_harness


def _timeout_seconds(then: str) -> float | None:
    """Limit only the handler that hangs, and leave it time to end the transaction first on a busy machine."""
    return 2.0 if then == "hangs" else None
