"""The consumer's engine over a scripted source: what runs side by side, what waits, and what is acked when."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from typing import Any

import pytest

from outrider.errors import InvalidHandler, Transient, Unreachable, UsageError
from outrider.event import ReceivedEvent
from outrider.inbox.model import Receipts
from outrider.inbox.router import Route
from outrider.retry import RetryPolicy
from outrider.stores.memory import MemoryInbox, MemoryStore
from outrider.telemetry.events import (
    ConsumerBroken,
    ConsumerDeadLettered,
    ConsumerRecovered,
    ConsumerStopped,
    ConsumerUnavailable,
    Handled,
    HandlerRetried,
    HandlerTimedOut,
    HeldEventsFull,
    NoHandler,
    PartitionsRevoked,
)
from tests.support.scripted_source import Rig, delivery, running

NEVER = RetryPolicy(base_seconds=3600, cap_seconds=3600, jitter=0)


def names(keys: str, count: int) -> list[str]:
    return [f"{key}:{number}" for number in range(1, count + 1) for key in keys]


async def test_keys_are_handled_side_by_side_and_each_in_order() -> None:
    async with running() as rig:
        rig.hold("A:1")
        rig.source.put("A:1", "A:2", "B:1", "B:2", "C:1")
        await rig.until(lambda: {"B:1", "B:2", "C:1"} <= set(rig.source.acked))
        assert "A:2" not in rig.begun
        rig.let_go("A:1")
        await rig.until(lambda: "A:2" in rig.source.acked)
    assert [name for name in rig.effects if name.startswith("A")] == ["A:1", "A:2"]


async def test_many_keys_keep_their_order_and_never_overlap_with_themselves() -> None:
    async with running(concurrency=4, batch_max=3) as rig:
        rig.source.put(*names("ABCDE", 40))
        await rig.until(lambda: len(rig.source.acked) == 200)
    for key in "ABCDE":
        assert [name for name in rig.effects if name.startswith(key)] == names(key, 40)


async def test_no_more_handlers_run_at_once_than_allowed() -> None:
    async with running(concurrency=2) as rig:
        rig.hold(*names("ABC", 1))
        rig.source.put(*names("ABC", 1))
        await rig.until(lambda: len(rig.source.given) == 3 and len(rig.begun) == 2)
        rig.let_go("A:1")
        await rig.until(lambda: "C:1" in rig.begun)
        assert rig.under_way.total() == 2


async def test_a_failing_key_is_delayed_while_others_go_on() -> None:
    async with running(retry=NEVER) as rig:
        rig.failing["A:1"].append(ValueError("not yet"))
        rig.source.put("A:1", "A:2", *names("BC", 30))
        await rig.until(lambda: len(rig.source.acked) == 60)
        assert rig.begun.count("A:1") == 1
        assert "A:2" not in rig.begun
    assert [fact.error for fact in rig.observer.of(HandlerRetried)] == ["ValueError: not yet"]


async def test_a_delayed_key_goes_on_in_its_order() -> None:
    async with running() as rig:
        rig.failing["A:1"] += [ValueError("once"), ValueError("twice")]
        rig.source.put("A:1", "A:2")
        await rig.until(lambda: len(rig.source.acked) == 2)
    assert rig.begun == ["A:1", "A:1", "A:1", "A:2"]
    assert rig.effects == ["A:1", "A:2"]


async def test_an_event_without_attempts_left_is_dead_lettered_and_acked() -> None:
    async with running() as rig:
        rig.failing["A:1"] += [ValueError("no")] * 3
        rig.source.put("A:1", "B:1")
        await rig.until(lambda: len(rig.source.acked) == 2)
    assert [fact.error for fact in rig.observer.of(ConsumerDeadLettered)] == ["ValueError: no"]
    assert rig.effects == ["B:1"]


async def test_a_failing_event_of_a_batch_does_not_delay_the_others() -> None:
    async with running(batch_max=10, concurrency=1, retry=NEVER) as rig:
        rig.failing["B:1"] += [ValueError("no")] * 2
        rig.source.put(*names("ABC", 2))
        await rig.until(lambda: len(rig.source.acked) == 4)
    assert sorted(rig.effects) == ["A:1", "A:2", "C:1", "C:2"]


async def test_a_batch_is_one_transaction() -> None:
    async with running(batch_max=50, concurrency=1) as rig:
        rig.hold("Z:1")
        rig.source.put("Z:1")
        await rig.until(lambda: rig.begun == ["Z:1"])
        rig.source.put(*names("ABCDE", 10))
        await rig.until(lambda: len(rig.source.given) == 51)
        rig.let_go("Z:1")
        await rig.until(lambda: len(rig.source.acked) == 51)
    assert [fact.applied for fact in rig.observer.of(Handled)] == [1, 50]


async def test_a_delivery_is_acked_only_when_its_effects_are_committed() -> None:
    async with running() as rig:
        committed: list[bool] = []
        rig.source.on_ack = lambda name: committed.append(name in rig.effects)
        rig.source.put(*names("AB", 20))
        await rig.until(lambda: len(rig.source.acked) == 40)
    assert committed == [True] * 40


async def test_no_more_is_in_flight_than_allowed() -> None:
    async with running(in_flight_max=8, concurrency=2) as rig:
        rig.hold("A:1", "B:1")
        rig.source.put(*names("ABC", 40))
        looks = rig.source.looks
        await rig.until(lambda: rig.source.looks > looks + 20)
        assert rig.source.in_flight_most <= 8
        rig.let_go()
        await rig.until(lambda: len(rig.source.acked) == 120)
    assert rig.source.in_flight_most <= 8


async def test_a_slow_partition_leaves_room_for_the_others() -> None:
    async with running(in_flight_max=16, concurrency=2) as rig:
        rig.hold("A:1")
        rig.source.put(*(delivery(name, partition="slow") for name in names("A", 100)))
        await rig.until(lambda: "A:1" in rig.begun)
        rig.source.put(*(delivery(name, partition="quick") for name in names("BC", 50)))
        await rig.until(lambda: len(rig.source.acked) == 100)
        assert rig.effects == names("BC", 50)


async def test_revoked_waits_for_what_is_being_handled_and_drops_the_rest() -> None:
    async with running() as rig:
        rig.hold("A:1")
        rig.source.put("A:1", "A:2", delivery("B:1", partition="s2"))
        await rig.until(lambda: len(rig.source.given) == 3 and "A:1" in rig.begun)
        assert rig.source.revoked is not None
        revoked = asyncio.ensure_future(rig.source.revoked(frozenset(["s1"])))
        await rig.until(lambda: "B:1" in rig.source.acked)
        assert not revoked.done()
        rig.let_go("A:1")
        await revoked
        # It is acked by now: the next owner of the partition begins behind it.
        assert rig.source.acked == ["B:1", "A:1"]
        rig.source.put(delivery("A:2", partition="s3"))
        await rig.until(lambda: "A:2" in rig.source.acked)
    assert rig.effects == ["B:1", "A:1", "A:2"]
    assert rig.begun.count("A:2") == 1
    assert [fact.partitions for fact in rig.observer.of(PartitionsRevoked)] == [("s1",)]


async def test_revoked_does_not_wait_for_a_key_that_rests() -> None:
    async with running(retry=NEVER) as rig:
        rig.failing["A:1"].append(ValueError("no"))
        rig.source.put("A:1")
        await rig.until(lambda: rig.observer.of(HandlerRetried))
        assert rig.source.revoked is not None
        await asyncio.wait_for(rig.source.revoked(frozenset(["s1"])), 5)
    assert rig.source.acked == []


async def test_a_handler_that_fails_while_its_partition_is_revoked_is_not_tried_again() -> None:
    async with running() as rig:
        rig.hold("A:1")
        rig.failing["A:1"].append(ValueError("no"))
        rig.source.put("A:1")
        await rig.until(lambda: rig.begun)
        assert rig.source.revoked is not None
        revoked = asyncio.ensure_future(rig.source.revoked(frozenset(["s1"])))
        await rig.until(lambda: rig.observer.of(PartitionsRevoked))
        rig.let_go("A:1")
        await revoked
        rig.source.put("B:1")
        await rig.until(lambda: "B:1" in rig.source.acked)
    assert rig.begun == ["A:1", "B:1"]


async def test_a_clean_stop_finishes_what_is_being_handled_and_acks_it() -> None:
    async with running(concurrency=2) as rig:
        rig.hold("A:1", "B:1")
        rig.source.put(*names("ABC", 2))
        await rig.until(lambda: len(rig.begun) == 2 and len(rig.source.given) == 6)
        rig.consumer.stop()
        rig.let_go()
    assert sorted(rig.source.acked) == ["A:1", "B:1"]
    assert rig.source.closes == 1
    assert len(rig.observer.of(ConsumerStopped)) == 1


async def test_a_handler_that_takes_too_long_at_a_stop_is_rolled_back_and_not_acked() -> None:
    rig = Rig(shutdown_timeout_seconds=0.05)
    rig.hold("A:1")
    rig.source.put("A:1")
    task = asyncio.create_task(rig.consumer.run())
    await rig.until(lambda: rig.begun)
    rig.consumer.stop()
    await task
    assert rig.source.acked == rig.effects == []
    assert rig.source.closes == 1
    assert rig.under_way.total() == 0


async def test_nothing_goes_on_after_a_stop() -> None:
    """The last event handled lets others go that waited for it; even so, nothing is left running."""
    async with running(ordering="strict", first_sequence="one") as rig:
        rig.source.put("A:2", "A:3")
        await rig.until(lambda: len(rig.source.acked) == 2)
        rig.hold("A:1", "A:2", "A:3")
        rig.source.put("A:1")
        await rig.until(lambda: rig.begun == ["A:1"])
        rig.consumer.stop()
        rig.let_go("A:1")
        await rig.until(lambda: rig.source.closes)
        await asyncio.sleep(0)
        begun = list(rig.begun)
        rig.let_go()
    assert asyncio.all_tasks() == {asyncio.current_task()}
    assert rig.begun == begun
    assert rig.effects == ["A:1"]


async def test_a_lost_connection_is_made_again_and_what_was_not_begun_is_forgotten() -> None:
    async with running(concurrency=1) as rig:
        rig.hold("A:1")
        rig.source.put("A:1", "B:1")
        await rig.until(lambda: rig.begun == ["A:1"])
        rig.source.put(Transient("gone"))
        await rig.until(lambda: rig.source.starts == 2)
        rig.source.put(delivery("B:1", partition="s2"), delivery("C:1", partition="s2"))
        await rig.until(lambda: len(rig.source.given) == 4)
        rig.let_go("A:1")
        await rig.until(lambda: "C:1" in rig.source.acked)
    assert rig.effects == ["A:1", "B:1", "C:1"]
    assert rig.begun == ["A:1", "B:1", "C:1"]
    assert [fact.error for fact in rig.observer.of(ConsumerUnavailable)] == ["gone"]
    assert len(rig.observer.of(ConsumerRecovered)) == 1


async def test_a_broker_that_stays_away_is_tried_again_and_again_and_logged_once() -> None:
    async with running() as rig:
        await rig.until(lambda: rig.source.looks)
        rig.source.start_errors += [Unreachable("away"), Unreachable("still away")]
        rig.source.put(Transient("gone"), "A:1")
        await rig.until(lambda: "A:1" in rig.source.acked)
    assert rig.source.starts == 4
    assert len(rig.observer.of(ConsumerUnavailable)) == 1


async def test_a_source_that_cannot_work_ends_the_consumer() -> None:
    rig = Rig()
    rig.source.put("A:1", UsageError("not allowed"))
    with pytest.raises(ExceptionGroup) as raised:
        await rig.consumer.run()
    assert [str(error) for error in raised.value.exceptions] == ["not allowed"]
    assert rig.source.closes == 1


class Deaf(MemoryInbox):
    """Loses its connection at the moment of its cancellation, as a driver may, and raises only that error."""

    @asynccontextmanager
    async def transaction(self) -> AsyncIterator[Any]:
        try:
            async with super().transaction() as tx:
                yield tx
        except asyncio.CancelledError:
            raise Unreachable("the connection is lost") from None


@pytest.mark.parametrize("drains", [False, True], ids=["a worker", "a drain"])
async def test_a_consumer_ends_even_if_one_of_its_hands_misses_that_it_is_cancelled(drains: bool) -> None:
    rig = Rig(Deaf(MemoryStore()), ordering="strict", first_sequence="one", concurrency=1)
    rig.hold("A:2" if drains else "A:1")
    rig.source.put("A:2", "A:1")
    task = asyncio.create_task(rig.consumer.run())
    await rig.until(lambda: rig.begun == (["A:1", "A:2"] if drains else ["A:1"]))
    rig.source.put(UsageError("not allowed"))
    async with asyncio.timeout(10):
        with pytest.raises(ExceptionGroup, match="unhandled errors"):
            await task
    assert rig.source.closes == 1
    assert asyncio.all_tasks() == {asyncio.current_task()}


async def test_a_store_that_is_away_counts_no_attempt() -> None:
    class Absent(MemoryInbox):
        times = 3

        async def record_receipts(
            self, tx: Any, consumer: str, events: Sequence[ReceivedEvent], *, ordered: bool
        ) -> Receipts:
            if self.times:
                self.times -= 1
                raise Unreachable("the database is away")
            return await super().record_receipts(tx, consumer, events, ordered=ordered)

    async with running(Absent(MemoryStore()), concurrency=1) as rig:
        rig.source.put("A:1")
        await rig.until(lambda: "A:1" in rig.source.acked)
    assert rig.observer.of(HandlerRetried) == []
    assert [fact.error for fact in rig.observer.of(ConsumerUnavailable)] == ["the database is away"]
    assert len(rig.observer.of(ConsumerRecovered)) == 1


async def test_a_second_delivery_of_the_same_event_is_acked_and_has_no_effect() -> None:
    async with running() as rig:
        first = delivery("A:1")
        rig.source.put(first, first._replace(partition="s2"), "A:2")
        await rig.until(lambda: len(rig.source.acked) == 3)
    assert rig.effects == ["A:1", "A:2"]
    assert sum(fact.duplicates for fact in rig.observer.of(Handled)) == 1


async def test_an_event_that_others_wait_for_is_not_stuck_behind_those_that_found_no_room() -> None:
    async with running(ordering="strict", held_per_stream_max=2) as rig:
        rig.source.put(*(f"A:{number}" for number in (1, 3, 4, 5, 6, 2)))
        await rig.until(lambda: len(rig.source.acked) == 6)
    assert rig.effects == names("A", 6)


async def test_a_handler_that_awaits_something_cancelled_costs_no_worker() -> None:
    async with running(concurrency=1) as rig:
        rig.failing["A:1"].append(asyncio.CancelledError())
        rig.source.put("A:1", "B:1")
        await rig.until(lambda: len(rig.source.acked) == 2)
    assert sorted(rig.effects) == ["A:1", "B:1"]


class Speechless(Exception):
    """An error that has no text."""

    def __str__(self) -> str:
        raise TypeError("no text")


async def test_an_error_whose_text_cannot_be_made_counts_an_attempt_like_any_other() -> None:
    async with running() as rig:
        rig.failing["A:1"] += [Speechless()] * 3
        rig.source.put("A:1", "B:1")
        await rig.until(lambda: len(rig.source.acked) == 2)
    assert [fact.error for fact in rig.observer.of(ConsumerDeadLettered)] == [
        "Speechless: (its text cannot be read: TypeError)"
    ]
    assert rig.effects == ["B:1"]


async def test_attempts_are_counted_anew_when_a_partition_comes_back() -> None:
    async with running(retry=RetryPolicy(base_seconds=0.2, jitter=0)) as rig:
        rig.failing["A:1"] += [ValueError("here"), ValueError("and when it is back")]
        again = delivery("A:1")
        rig.source.put(again)
        await rig.until(lambda: rig.observer.of(HandlerRetried))
        assert rig.source.revoked is not None
        await rig.source.revoked(frozenset(["s1"]))
        rig.source.put(again._replace(partition="s2"))
        await rig.until(lambda: rig.source.acked)
    assert [fact.attempt for fact in rig.observer.of(HandlerRetried)] == [1, 1]


async def test_an_event_whose_last_attempt_was_lost_with_its_partition_is_tried_before_it_is_dead_lettered() -> None:
    async with running(retry=RetryPolicy(max_attempts=1)) as rig:
        rig.hold("A:1")
        rig.failing["A:1"].append(ValueError("no"))
        again = delivery("A:1")
        rig.source.put(again)
        await rig.until(lambda: rig.begun)
        assert rig.source.revoked is not None
        revoked = asyncio.ensure_future(rig.source.revoked(frozenset(["s1"])))
        await rig.until(lambda: rig.observer.of(PartitionsRevoked))
        rig.let_go("A:1")
        await revoked
        rig.source.put(again._replace(partition="s2"))
        await rig.until(lambda: rig.source.acked)
    assert rig.effects == ["A:1"]
    assert rig.observer.of(ConsumerDeadLettered) == []


async def test_a_consumer_is_busy_while_something_is_handled_or_due_again() -> None:
    async with running(retry=NEVER) as rig:
        busy = [rig.consumer.busy]
        rig.hold("A:1")
        rig.failing["A:1"].append(ValueError("later"))
        rig.source.put("A:1")
        await rig.until(lambda: rig.begun)
        busy.append(rig.consumer.busy)
        rig.let_go("A:1")
        await rig.until(lambda: rig.observer.of(HandlerRetried))
        busy.append(rig.consumer.busy)
    assert busy == [False, True, True]
    assert [fact.unhandled for fact in rig.observer.of(ConsumerStopped)] == [1]


async def test_a_consumer_is_not_busy_with_what_finds_no_room_to_wait_in() -> None:
    async with running(ordering="strict", first_sequence="one", held_per_stream_max=1) as rig:
        rig.source.put("A:3", "A:4")
        await rig.until(lambda: rig.observer.of(HeldEventsFull))
        await rig.until(lambda: not rig.consumer.busy)
    assert [fact.unhandled for fact in rig.observer.of(ConsumerStopped)] == [1]


async def test_a_handler_that_is_cancelled_at_a_stop_is_logged_and_counted() -> None:
    async with running(shutdown_timeout_seconds=0.05, concurrency=1) as rig:
        rig.hold("A:1")
        rig.source.put("A:1", "A:2")
        await rig.until(lambda: rig.begun and len(rig.source.given) == 2)
        rig.consumer.stop()
        await rig.until(lambda: rig.source.closes)
    [fact] = rig.observer.of(HandlerTimedOut)
    assert (fact.topic, fact.key, fact.shutdown_timeout_seconds) == ("orders", "A", 0.05)
    assert [fact.unhandled for fact in rig.observer.of(ConsumerStopped)] == [2]


async def test_a_type_without_a_handler_is_logged_once_and_counted() -> None:
    async with running() as rig:
        rig.source.put(*(delivery(f"A:{n}", event_type="order.cancelled") for n in (1, 2)), "B:1")
        await rig.until(lambda: len(rig.source.acked) == 3)
    assert [(fact.topic, fact.event_type) for fact in rig.observer.of(NoHandler)] == [("orders", "order.cancelled")]
    handled = rig.observer.of(Handled)
    assert (sum(fact.no_handler for fact in handled), sum(fact.dropped for fact in handled)) == (2, 0)


async def test_a_handler_that_takes_too_long_is_logged_with_the_limit_and_its_line() -> None:
    async with running(handler_timeout_seconds=0.02, retry=RetryPolicy(max_attempts=1)) as rig:
        rig.hold("A:1")
        rig.source.put("A:1")
        await rig.until(lambda: rig.source.acked)
    [fact] = rig.observer.of(ConsumerDeadLettered)
    assert fact.error == "TimeoutError: took longer than handler_timeout_seconds = 0.02"
    assert fact.where is not None
    assert fact.where.startswith("tests/support/scripted_source.py:")
    assert fact.where.endswith(" in handle")


async def test_a_handler_that_ends_its_transaction_ends_the_consumer() -> None:
    rig = Rig()

    async def end(event: Any, tx: Any) -> None:
        tx.commit()

    rig.consumer._routes.handlers["orders", "t"] = Route(end)
    rig.source.put("A:1", "B:1")
    async with asyncio.timeout(10):
        with pytest.raises(ExceptionGroup) as raised:
            await rig.consumer.run()
    assert all(isinstance(error, InvalidHandler) for error in raised.value.exceptions)
    assert rig.source.acked == []
    assert rig.source.closes == 1
    assert rig.observer.of(ConsumerBroken)


async def test_a_handler_that_ends_its_transaction_in_a_stream_that_drains_ends_the_consumer() -> None:
    rig = Rig(ordering="strict", first_sequence="one")

    async def end(event: Any, tx: Any) -> None:
        if event.sequence == 2:
            tx.rollback()

    rig.consumer._routes.handlers["orders", "t"] = Route(end)
    rig.source.put("A:2", "A:1")
    async with asyncio.timeout(10):
        with pytest.raises(ExceptionGroup) as raised:
            await rig.consumer.run()
    assert [type(error) for error in raised.value.exceptions] == [InvalidHandler]
    assert rig.source.closes == 1
