"""Rules about gates: what is late is dropped, what is early waits, and nothing waits for ever without being seen."""

from __future__ import annotations

from uuid import uuid4

import pytest

from outrider.delivery import InboxStream
from outrider.inbox.inbox import Inbox
from outrider.inbox_store import InboxCriteria
from outrider.observer import GapOverdue, WaitingFull
from outrider.testing.inbox_contract.bench import TOPIC, InboxBench, delivery, marker

STREAM = InboxStream(TOPIC, "A-1")


class GateRules:
    """Order at the consumer."""

    async def test_a_monotonic_gate_drops_what_is_not_newer(self, bench: InboxBench) -> None:
        billing = bench.consumer(gate="monotonic")
        await billing.deliver_all([delivery(n) for n in (5, 3, 5, 6, 9, 8)])
        assert await bench.effects() == ["A-1:5", "A-1:6", "A-1:9"]

    async def test_gates_are_per_stream_and_per_consumer(self, bench: InboxBench) -> None:
        for name in ("billing", "shipping"):
            consumer = bench.consumer(name, gate="monotonic")
            await consumer.deliver_all([delivery(7), delivery(2, key="B-1"), delivery(1, band="high")])
        assert sorted(await bench.effects()) == ["A-1:1", "A-1:1", "A-1:7", "A-1:7", "B-1:2", "B-1:2"]

    async def test_a_strict_gate_lets_early_ones_wait_and_then_go_in_order(self, bench: InboxBench) -> None:
        billing = bench.consumer(gate="strict", start="one")
        await billing.deliver_all([delivery(n) for n in (3, 2, 5)])
        assert await bench.effects() == []
        assert (await bench.store.desk.counts("billing"))["waiting"] == 3
        await billing.deliver_all([delivery(1)])
        assert await bench.effects() == ["A-1:1", "A-1:2", "A-1:3"]
        await billing.deliver_all([delivery(4)])
        assert await bench.effects() == [f"A-1:{n}" for n in range(1, 6)]
        assert await bench.store.desk.counts("billing") == {"waiting": 0, "blocked_streams": 0, "dead_letters": 0}

    async def test_a_strict_gate_keeps_the_order_within_a_batch(self, bench: InboxBench) -> None:
        billing = bench.consumer(gate="strict", start="one", batch_max=100)
        assert await billing.deliver(*[delivery(n) for n in (2, 1, 4, 3, 6)]) == 5
        await billing.drain()
        assert await bench.effects() == [f"A-1:{n}" for n in range(1, 5)]

    async def test_an_early_event_delivered_again_waits_once(self, bench: InboxBench) -> None:
        billing = bench.consumer(gate="strict", start="one")
        early = delivery(2)
        await billing.deliver_all([early, early, early])
        assert (await bench.store.desk.counts("billing"))["waiting"] == 1
        await billing.deliver_all([delivery(1), early])
        assert await bench.effects() == ["A-1:1", "A-1:2"]

    async def test_a_late_joiner_starts_with_the_first_it_sees(self, bench: InboxBench) -> None:
        billing = bench.consumer(gate="strict")
        await billing.deliver_all([delivery(57), delivery(58), delivery(60)])
        assert await bench.effects() == ["A-1:57", "A-1:58"]

    async def test_a_replayed_event_does_not_tell_a_late_joiner_where_to_start(self, bench: InboxBench) -> None:
        billing = bench.consumer(gate="strict")
        await billing.deliver_all([delivery(3, replayed="true"), delivery(11), delivery(12)])
        assert await bench.effects() == ["A-1:3", "A-1:11", "A-1:12"]

    async def test_a_skipped_event_is_passed_and_its_replay_has_its_effect_once(self, bench: InboxBench) -> None:
        billing = bench.consumer(gate="strict", start="one")
        late = delivery(2, event_id=uuid4(), replayed="true")
        await billing.deliver_all([delivery(1), delivery(3), marker(2), delivery(4), late, late, delivery(5)])
        assert await bench.effects() == ["A-1:1", "A-1:3", "A-1:4", "A-1:2", "A-1:5"]

    async def test_an_event_that_comes_too_late_is_dropped(self, bench: InboxBench) -> None:
        billing = bench.consumer(gate="strict")
        await billing.deliver_all([delivery(5), delivery(4)])
        assert await bench.effects() == ["A-1:5"]

    async def test_a_strict_gate_refuses_numbers_that_are_not_ours(self, bench: InboxBench) -> None:
        billing = bench.consumer(gate="strict", dead_letter_policy="skip")
        await billing.deliver_all([delivery(5, gapless="false"), delivery(None, key="B-1")])
        assert await bench.effects() == []
        assert (await bench.store.desk.counts("billing"))["dead_letters"] == 2

    async def test_what_waits_is_bounded_and_the_rest_stays_with_the_broker(self, bench: InboxBench) -> None:
        billing = bench.consumer(gate="strict", start="one", waiting_max=2)
        await billing.deliver_all([delivery(2), delivery(3)])
        late = delivery(4)
        assert await billing.deliver(late) == 0
        assert bench.notebook.of(WaitingFull)
        await billing.deliver_all([delivery(1), late])
        assert await bench.effects() == [f"A-1:{n}" for n in range(1, 5)]

    async def test_a_gap_that_lasts_is_told_and_stays_visible(self, bench: InboxBench) -> None:
        billing = bench.consumer(gate="strict", start="one", gap_timeout_seconds=60)
        await billing.deliver_all([delivery(2)])
        assert not bench.notebook.of(GapOverdue)
        await bench.advance(seconds=61)
        await billing.tend()
        await billing.tend()
        [fact] = bench.notebook.of(GapOverdue)
        assert (fact.key, fact.seen, fact.waiting) == ("A-1", 0, 1)
        [stream] = await bench.store.desk.streams("billing", 10)
        assert (stream["cause"], stream["waiting"]) == ("early", 1)

    async def test_a_person_may_give_up_on_a_gap(self, bench: InboxBench) -> None:
        billing = bench.consumer(gate="strict", start="one")
        await billing.deliver_all([delivery(4), delivery(5), delivery(7)])
        assert await bench.store.desk.release("billing", STREAM, "ann")
        assert not await bench.store.desk.release("billing", InboxStream(TOPIC, "nobody"), "ann")
        await billing.drain()
        assert await bench.effects() == ["A-1:4", "A-1:5"]
        assert (await bench.store.desk.counts("billing"))["waiting"] == 1

    async def test_a_failing_event_among_those_that_drain_keeps_its_place(self, bench: InboxBench) -> None:
        billing = bench.consumer(gate="strict", start="one")
        await billing.deliver_all([delivery(2), delivery(3)])
        bench.fail("A-1:2", RuntimeError("once"))
        await billing.deliver_all([delivery(1)])
        assert await bench.effects() == ["A-1:1", "A-1:2", "A-1:3"]

    async def test_events_left_draining_by_a_crash_are_found_by_another_process(self, bench: InboxBench) -> None:
        crashed = bench.consumer(gate="strict", start="one")
        await crashed.deliver_all([delivery(2), delivery(3)])
        assert await crashed.deliver(delivery(1)) == 1
        await crashed.handling.stop()
        await bench.consumer(gate="strict", start="one").drain()
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

    @pytest.mark.parametrize("gate", ["off", "monotonic"])
    async def test_what_came_early_goes_in_order_when_the_gate_is_no_longer_strict(
        self, bench: InboxBench, gate: str
    ) -> None:
        await bench.consumer(gate="strict", start="one").deliver_all([delivery(n) for n in (5, 3, 4)])
        billing = bench.consumer(gate=gate, batch_max=2)
        assert await billing.deliver(delivery(6)) == 1
        await billing.drain()
        await billing.deliver_all([delivery(7)])
        assert await bench.effects() == [f"A-1:{n}" for n in range(3, 8)]
        assert (await bench.store.desk.counts("billing"))["waiting"] == 0

    @pytest.mark.parametrize("gate", ["off", "monotonic"])
    async def test_what_came_early_goes_by_itself_when_the_gate_is_no_longer_strict(
        self, bench: InboxBench, gate: str
    ) -> None:
        await bench.consumer(gate="strict", start="one").deliver_all([delivery(n) for n in (5, 3, 4)])
        await bench.consumer(gate=gate).drain()
        assert await bench.effects() == ["A-1:3", "A-1:4", "A-1:5"]

    async def test_by_hand_what_came_early_goes_in_order_when_the_gate_is_no_longer_strict(
        self, bench: InboxBench
    ) -> None:
        inbox = _by_hand(bench)
        for number in (4, 3):
            assert await inbox.process(delivery(number), bench.handler, consumer="billing") == "waiting"
        inbox.consumer("billing", gate="off")
        await inbox.process(delivery(5), bench.handler, consumer="billing")
        assert await bench.effects() == ["A-1:3", "A-1:4", "A-1:5"]

    async def test_by_hand_what_was_released_or_replayed_goes_when_it_is_drained(self, bench: InboxBench) -> None:
        inbox = _by_hand(bench)
        await inbox.process(delivery(2), bench.handler, consumer="billing")
        await inbox.process(delivery(1, key="B-1")._replace(body=b"{"), bench.handler, consumer="billing")
        assert await inbox.process(delivery(2, key="B-1"), bench.handler, consumer="billing") == "waiting"
        assert await inbox.drain("billing", bench.handler) == 0
        assert await bench.store.desk.release("billing", STREAM, "ann")
        [letter] = await bench.store.desk.dead_letters(InboxCriteria())
        await bench.store.desk.discard([letter["id"]], "ann")
        assert await inbox.drain("billing", bench.handler) == 2
        assert sorted(await bench.effects()) == ["A-1:2", "B-1:2"]
        assert await inbox.drain("billing", bench.handler) == 0

    async def test_by_hand_what_fails_while_it_is_drained_is_raised_and_waits_on(self, bench: InboxBench) -> None:
        inbox = _by_hand(bench)
        await inbox.process(delivery(2), bench.handler, consumer="billing")
        await bench.store.desk.release("billing", STREAM, "ann")
        bench.fail("A-1:2", RuntimeError("once"))
        with pytest.raises(RuntimeError, match="once"):
            await inbox.drain("billing", bench.handler)
        assert await inbox.drain("billing", bench.handler) == 1
        assert await bench.effects() == ["A-1:2"]


def _by_hand(bench: InboxBench) -> Inbox:
    inbox = Inbox(bench.store)
    inbox.consumer("billing", gate="strict", start="one")
    return inbox
