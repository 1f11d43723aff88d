"""Contract rules for failed events: dead letters of the consumer, blocked streams and replay."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from outrider.app import Outbox
from outrider.errors import Permanent
from outrider.event import UNREADABLE, Delivery
from outrider.inbox.model import InboxCriteria
from outrider.saga.model import Phase
from outrider.telemetry.events import ConsumerDeadLettered, InboxMaintenanceDone
from outrider.testing.harness import TOPIC, InboxBench, delivery

ORDERINGS = pytest.mark.parametrize("ordering", ["off", "monotonic", "strict"])

DAY = 86_400


async def _only_id(bench: InboxBench) -> int:
    [dead_letter] = await bench.store.admin.dead_letters(InboxCriteria(consumer="billing"))
    return int(dead_letter["id"])


def _where(dead_letter: dict[str, Any]) -> str:
    """Return the code location of a dead letter's failure, which must be the handler of the bench."""
    where: str = dead_letter["failure"]["where"]
    assert where.endswith(" in handler")
    return where


class InboxFailureRules:
    """Rules for dead letters."""

    @ORDERINGS
    async def test_after_the_last_attempt_an_event_is_dead_lettered_and_its_stream_waits(
        self, bench: InboxBench, ordering: str
    ) -> None:
        billing = bench.consumer(ordering=ordering)
        bench.fail("A-1:2", *[RuntimeError("broken")] * 3)
        await billing.deliver_all([delivery(1), delivery(2), delivery(3), delivery(1, key="B-1"), delivery(4)])
        assert await bench.effects() == ["A-1:1", "B-1:1"]
        [event] = bench.observer.of(ConsumerDeadLettered)
        assert (event.reason, event.policy) == ("max_retries_exceeded", "block")
        [dead_letter] = await bench.store.admin.dead_letters(InboxCriteria(consumer="billing"))
        assert (event.dead_letter, event.error, event.where) == (
            dead_letter["id"],
            "RuntimeError: broken",
            _where(dead_letter),
        )
        assert (dead_letter["attempts"], dead_letter["failure"]["error"]) == (3, "RuntimeError: broken")
        [stream] = await bench.store.admin.streams("billing", 10)
        assert (stream["key"], stream["cause"], stream["waiting"]) == ("A-1", "dead_letter", 2)

    @ORDERINGS
    async def test_a_held_stream_goes_on_in_order_when_its_dead_letter_is_replayed(
        self, bench: InboxBench, ordering: str
    ) -> None:
        billing = bench.consumer(ordering=ordering)
        bench.fail("A-1:2", *[RuntimeError("broken")] * 3)
        await billing.deliver_all([delivery(n) for n in range(1, 5)])
        assert await bench.store.admin.replay([await _only_id(bench)], "ann") == 1
        assert await billing.deliver(delivery(5)) == 1
        await billing.drain()
        assert await bench.effects() == [f"A-1:{n}" for n in range(1, 6)]
        assert await bench.store.admin.counts("billing") == {"waiting": 0, "blocked_streams": 0, "dead_letters": 0}

    @ORDERINGS
    async def test_a_held_stream_goes_on_behind_a_dead_letter_that_is_discarded(
        self, bench: InboxBench, ordering: str
    ) -> None:
        billing = bench.consumer(ordering=ordering)
        bench.fail("A-1:2", *[RuntimeError("broken")] * 3)
        failed = delivery(2)
        await billing.deliver_all([delivery(1), failed, delivery(3)])
        assert await bench.store.admin.discard([await _only_id(bench)], "ann") == 1
        await billing.drain()
        await billing.deliver_all([delivery(4), failed])
        assert await bench.effects() == ["A-1:1", "A-1:3", "A-1:4"]

    async def test_a_stream_that_starts_at_one_goes_on_behind_its_first_event_when_that_is_discarded(
        self, bench: InboxBench
    ) -> None:
        billing = bench.consumer(ordering="strict", first_sequence="one")
        bench.fail("A-1:1", Permanent("broken"))
        await billing.deliver_all([delivery(1), delivery(2), delivery(3)])
        assert await bench.store.admin.discard([await _only_id(bench)], "ann") == 1
        await billing.drain()
        assert await bench.effects() == ["A-1:2", "A-1:3"]

    async def test_a_late_joiner_goes_on_behind_its_first_event_when_that_is_discarded(self, bench: InboxBench) -> None:
        billing = bench.consumer(ordering="strict")
        bench.fail("A-1:5", Permanent("broken"))
        await billing.deliver_all([delivery(5), delivery(7)])
        assert await bench.store.admin.discard([await _only_id(bench)], "ann") == 1
        await billing.deliver_all([delivery(8), delivery(6)])
        assert await bench.effects() == ["A-1:6", "A-1:7", "A-1:8"]

    @pytest.mark.parametrize("held", [False, True], ids=["at once", "after it waited"])
    async def test_discarding_a_number_that_is_not_ours_does_not_move_the_sequence(
        self, bench: InboxBench, held: bool
    ) -> None:
        billing = bench.consumer(ordering="strict")
        await billing.deliver_all([delivery(1)])
        if held:
            bench.fail("A-1:2", Permanent("broken"))
            await billing.deliver_all([delivery(2), delivery(100, gapless="false")])
            await bench.store.admin.discard([await _only_id(bench)], "ann")
            await billing.drain()
        else:
            await billing.deliver_all([delivery(100, gapless="false")])
        assert await bench.store.admin.discard([await _only_id(bench)], "ann") == 1
        follower = 3 if held else 2
        await billing.deliver_all([delivery(follower)])
        assert await bench.effects() == ["A-1:1", f"A-1:{follower}"]

    async def test_a_number_that_is_not_ours_stays_with_the_broker_when_too_many_wait(self, bench: InboxBench) -> None:
        billing = bench.consumer(ordering="strict", held_per_stream_max=1)
        bench.fail("A-1:1", Permanent("broken"))
        await billing.deliver_all([delivery(1), delivery(2)])
        assert await billing.deliver(delivery(100, gapless="false")) == 0

    @ORDERINGS
    async def test_nothing_that_drains_overtakes_one_that_is_dead_lettered_with_it(
        self, bench: InboxBench, ordering: str
    ) -> None:
        billing = bench.consumer(ordering=ordering, batch_max=10)
        bench.fail("A-1:1", Permanent("broken"))
        await billing.deliver_all([delivery(1), delivery(2)._replace(body=b"{"), delivery(3), delivery(4)])
        await bench.store.admin.replay([await _only_id(bench)], "ann")
        await billing.drain()
        assert await bench.effects() == ["A-1:1"]
        [stream] = await bench.store.admin.streams("billing", 10)
        assert (stream["cause"], stream["waiting"]) == ("dead_letter", 2)
        await bench.store.admin.discard([await _only_id(bench)], "ann")
        await billing.drain()
        assert await bench.effects() == ["A-1:1", "A-1:3", "A-1:4"]

    @ORDERINGS
    async def test_a_handler_that_awaits_something_cancelled_has_failed(self, bench: InboxBench, ordering: str) -> None:
        billing = bench.consumer(ordering=ordering)
        bench.fail("A-1:1", *[asyncio.CancelledError()] * 3)
        bench.fail("A-1:2", asyncio.CancelledError())
        await billing.deliver_all([delivery(1), delivery(2)])
        assert [event.reason for event in bench.observer.of(ConsumerDeadLettered)] == ["max_retries_exceeded"]
        await bench.store.admin.replay([await _only_id(bench)], "ann")
        await billing.drain()
        assert await bench.effects() == ["A-1:1", "A-1:2"]

    @ORDERINGS
    async def test_a_replay_that_fails_again_is_dead_lettered_again_and_nothing_overtakes_it(
        self, bench: InboxBench, ordering: str
    ) -> None:
        billing = bench.consumer(ordering=ordering)
        bench.fail("A-1:1", *[RuntimeError("broken")] * 6)
        await billing.deliver_all([delivery(1), delivery(2)])
        await bench.store.admin.replay([await _only_id(bench)], "ann")
        await billing.drain()
        assert await bench.effects() == []
        await bench.store.admin.replay([await _only_id(bench)], "ann")
        await billing.drain()
        assert await bench.effects() == ["A-1:1", "A-1:2"]

    @ORDERINGS
    async def test_a_skipped_event_lets_its_stream_go_on_and_may_be_replayed_late(
        self, bench: InboxBench, ordering: str
    ) -> None:
        billing = bench.consumer(ordering=ordering, on_dead_letter="skip")
        bench.fail("A-1:2", *[RuntimeError("broken")] * 3)
        failed = delivery(2)
        await billing.deliver_all([delivery(1), failed, delivery(3), failed])
        assert await bench.effects() == ["A-1:1", "A-1:3"]
        await bench.store.admin.replay([await _only_id(bench)], "ann")
        await billing.drain()
        # Monotonic ordering has already accepted a newer event, and drops older events by design.
        late = [] if ordering == "monotonic" else ["A-1:2"]
        await billing.deliver_all([delivery(4), failed])
        assert await bench.effects() == ["A-1:1", "A-1:3", *late, "A-1:4"]

    async def test_a_permanent_error_dead_letters_at_once(self, bench: InboxBench) -> None:
        bench.fail("A-1:1", Permanent("no such customer"))
        await bench.consumer().deliver_all([delivery(1)])
        [dead_letter] = await bench.store.admin.dead_letters(InboxCriteria())
        assert (dead_letter["reason"], dead_letter["attempts"]) == ("permanent_failure", 1)

    async def test_the_traceback_of_the_last_attempt_is_kept_with_secrets_hidden(self, bench: InboxBench) -> None:
        bench.fail("A-1:1", *[ConnectionError("no answer: postgresql://shop:s3cret@db/orders \0 \ud800")] * 3)
        await bench.consumer().deliver_all([delivery(1)])
        [dead_letter] = await bench.store.admin.dead_letters(InboxCriteria())
        first, *frames, last = dead_letter["failure"]["traceback"].splitlines()
        assert first == "Traceback (most recent call last):"
        assert "in handler" in frames[-3] + frames[-2]
        assert last == "ConnectionError: no answer: postgresql://shop:***@db/orders \\0 ?"
        assert "s3cret" not in str(dead_letter["failure"])

    async def test_poison_is_kept_byte_for_byte_and_only_once(self, bench: InboxBench) -> None:
        raw = Delivery(
            TOPIC, b"\xff\x00", b"\xfe not json \x00", {"message_id": b"\xff", "x": b"\x00\xff"}, position="o/0/7"
        )
        billing = bench.consumer()
        await billing.deliver_all([raw, raw])
        [dead_letter] = await bench.store.admin.dead_letters(InboxCriteria())
        assert (dead_letter["body"], dict(dead_letter["headers"])) == (raw.body, dict(raw.headers))
        assert (dead_letter["reason"], dead_letter["position"]) == ("poison_message", "o/0/7")
        assert (await bench.store.admin.counts())["blocked_streams"] == 0

    async def test_a_held_message_whose_headers_no_source_could_read_keeps_that_reason(self, bench: InboxBench) -> None:
        billing = bench.consumer()
        bench.fail("A-1:1", Permanent("broken"))
        unreadable = Delivery(TOPIC, b"A-1", b"{}", {UNREADABLE: b"a name is not UTF-8"}, position="o/0/7")
        await billing.deliver_all([delivery(1), unreadable])
        await bench.store.admin.discard([await _only_id(bench)], "ann")
        await billing.drain()
        [dead_letter] = await bench.store.admin.dead_letters(InboxCriteria())
        assert (dead_letter["key"], dead_letter["body"]) == ("A-1", b"{}")
        assert dead_letter["failure"]["error"] == "headers: a name is not UTF-8"

    async def test_poison_with_a_key_keeps_its_place_in_its_stream(self, bench: InboxBench) -> None:
        billing = bench.consumer(ordering="strict")
        await billing.deliver_all([delivery(1), delivery(2)._replace(body=b"{"), delivery(3)])
        assert await bench.effects() == ["A-1:1"]
        await bench.store.admin.discard([await _only_id(bench)], "ann")
        await billing.drain()
        assert await bench.effects() == ["A-1:1", "A-1:3"]

    async def test_dead_letters_are_found_by_what_is_known_of_them(self, bench: InboxBench) -> None:
        bench.fail("A-1:1", Permanent("no"))
        bench.fail("B-1:1", Permanent("no"))
        await bench.consumer().deliver_all([delivery(1), delivery(1, key="B-1")])
        admin = bench.store.admin
        assert [dead_letter["key"] for dead_letter in await admin.dead_letters(InboxCriteria())] == ["A-1", "B-1"]
        assert [dead_letter["key"] for dead_letter in await admin.dead_letters(InboxCriteria(key="B-1"))] == ["B-1"]
        assert await admin.dead_letters(InboxCriteria(consumer="nobody")) == []
        assert await admin.dead_letters(InboxCriteria(reason="poison_message")) == []
        assert len(await admin.dead_letters(InboxCriteria(limit=1))) == 1


class InboxMaintenanceRules:
    """The tables of the inbox stay bounded."""

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

    async def test_old_dead_letters_go_unless_they_block_a_stream(self, bench: InboxBench) -> None:
        for policy in ("block", "skip"):
            bench.fail(f"{policy}:1", Permanent("no"))
            await bench.consumer(on_dead_letter=policy).deliver_all([delivery(1, key=policy)])
        await bench.advance(seconds=40 * DAY)
        pruned = await bench.store.prune("billing", receipt_days=90, dead_letter_days=30)
        assert pruned.dead_letters == 1
        assert (await bench.store.admin.counts("billing"))["dead_letters"] == 1

    async def test_old_entries_of_participants_are_removed_and_young_ones_stay(self, bench: InboxBench) -> None:
        async with bench.store.transaction() as tx:
            assert (await Outbox().perform(tx, "participant_enter", "stock", "saga-1:reserve", Phase.ACTION)).fresh
        assert await bench.store.prune_participants(days=10_000) == 0
        await bench.advance(seconds=91 * DAY)
        assert await bench.store.prune_participants(days=90) == 1
        assert await bench.store.prune_participants(days=90) == 0

    async def test_the_maintenance_of_a_consumer_removes_old_entries_too(self, bench: InboxBench) -> None:
        async with bench.store.transaction() as tx:
            await Outbox().perform(tx, "participant_enter", "stock", "saga-1:reserve", Phase.ACTION)
        await bench.advance(seconds=91 * DAY)
        await bench.consumer(participant_memory_days=None).run_maintenance()
        await bench.consumer().run_maintenance()
        assert await bench.store.prune_participants(days=1) == 0
        [done] = bench.observer.of(InboxMaintenanceDone)
        assert done.participants == 1
