"""Two transactions of an inbox at once: which one yields, and what the other one sees.

A store makes the second transaction wait, or rejects it until the first has ended; the result is the same.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import replace
from typing import Any

import pytest

from outrider.event import DeadLetterReason, InboxStream, OnDeadLetter, ReceivedEvent
from outrider.inbox.model import (
    Applied,
    EventOutcome,
    Held,
    InboxBlockReason,
    InboxCriteria,
    InboxDeadLettered,
    Receipts,
    StreamState,
)
from outrider.inbox.store import InboxStore
from outrider.testing.contracts import delivery
from outrider.wire import decode

Meets = Callable[[], Awaitable[None]]
"""Returns once somebody has met the open transaction of somebody else."""

STREAM = InboxStream("orders", "A-1")
DEAD_LETTERED = InboxDeadLettered(DeadLetterReason.PERMANENT_FAILURE, {"error": "no"}, OnDeadLetter.BLOCK, 1)
HELD = StreamState(None, InboxBlockReason.DEAD_LETTER, 0)


def received(number: int | None = None, **options: Any) -> ReceivedEvent:
    return decode(delivery(number, **options))


async def record_receipts(inbox: InboxStore, *events: ReceivedEvent, ordered: bool = False) -> Receipts:
    """Admit and conclude at once, whatever is fresh: applied."""
    async with inbox.transaction() as tx:
        admitted = await inbox.record_receipts(tx, "billing", events, ordered=ordered)
        fresh = [EventOutcome(a, Applied()) for a in events if a.event_id in admitted.fresh]
        await inbox.record_outcomes(tx, "billing", fresh, {})
    return admitted


async def dead_letter(inbox: InboxStore, tx: Any, *events: ReceivedEvent) -> None:
    """Dead-letter the first, and let the others wait behind it."""
    await inbox.record_receipts(tx, "billing", events, ordered=False)
    head, *others = events
    entries = [EventOutcome(head, DEAD_LETTERED), *(EventOutcome(other, Held()) for other in others)]
    await inbox.record_outcomes(tx, "billing", entries, {STREAM: HELD._replace(waiting=len(others))})


async def row(inbox: InboxStore) -> tuple[Any, ...]:
    [row] = await inbox.admin.streams(None, 10)
    return row["seen"], row["cause"], row["waiting"]


async def dead_letter_ids(inbox: InboxStore) -> list[int]:
    return [letter["id"] for letter in await inbox.admin.dead_letters(InboxCriteria())]


async def draining(inbox: InboxStore, *numbers: int) -> list[ReceivedEvent]:
    """Make a stream that drains, with such events."""
    head, *waiting = [received(number) for number in (0, *numbers)]
    async with inbox.transaction() as tx:
        await dead_letter(inbox, tx, head, *waiting)
    assert await inbox.admin.discard(await dead_letter_ids(inbox), "ann") == 1
    assert await inbox.draining("billing", 10) == [STREAM]
    return waiting


async def finish_draining(inbox: InboxStore, tx: Any) -> None:
    """Apply everything that waits; the stream's row goes with it."""
    claimed = await inbox.claim_held(tx, "billing", STREAM, by_sequence=False, limit=10)
    assert claimed is not None
    back = [decode(w.delivery)._replace(waiting_id=w.waiting_id) for w in claimed.waiting]
    assert {a.event_id for a in back} == claimed.fresh
    await inbox.record_outcomes(tx, "billing", [EventOutcome(a, Applied()) for a in back], {STREAM: StreamState()})


class InboxLocks:
    """Give it an `inbox`, and what `meets`."""

    @pytest.mark.parametrize("ordered", [False, True])
    @pytest.mark.parametrize("others", [0, 5], ids=["alone", "in a batch"])
    async def test_a_second_delivery_waits_for_the_first_and_is_then_a_duplicate(
        self, inbox: InboxStore, meets: Meets, ordered: bool, others: int
    ) -> None:
        once = received(1)
        batch = [once, *(received(1, key=f"k{n}") for n in range(others))]
        async with inbox.transaction() as tx:
            assert (await inbox.record_receipts(tx, "billing", [once], ordered=ordered)).fresh == {once.event_id}
            second = asyncio.create_task(record_receipts(inbox, *batch, ordered=ordered))
            await meets()
            assert not second.done()
            await inbox.record_outcomes(tx, "billing", [EventOutcome(once, Applied(0.5))], {})
        assert once.event_id not in (await second).fresh
        assert len((await second).fresh) == others

    @pytest.mark.parametrize("ordered", [False, True])
    @pytest.mark.parametrize("others", [0, 5], ids=["alone", "in a batch"])
    async def test_a_second_delivery_takes_over_when_the_first_is_rolled_back(
        self, inbox: InboxStore, meets: Meets, ordered: bool, others: int
    ) -> None:
        once = received(1)
        batch = [once, *(received(1, key=f"k{n}") for n in range(others))]
        first = inbox.transaction()
        await inbox.record_receipts(await first.__aenter__(), "billing", [once], ordered=ordered)
        second = asyncio.create_task(record_receipts(inbox, *batch, ordered=ordered))
        await meets()
        assert not await first.__aexit__(RuntimeError, RuntimeError("rolled back"), None)
        admitted = await second
        assert admitted.fresh == {a.event_id for a in batch}
        assert admitted.states == ({a.stream: StreamState() for a in batch} if ordered else {})

    async def test_a_batch_that_waited_for_a_receipt_sees_the_block_committed_meanwhile(
        self, inbox: InboxStore, meets: Meets
    ) -> None:
        head, follower = received(1), received(2)
        async with inbox.transaction() as tx:
            await dead_letter(inbox, tx, head)
            batch = asyncio.create_task(record_receipts(inbox, head, follower))
            await meets()
        admitted = await batch
        assert admitted.fresh == {follower.event_id}
        assert admitted.states == {STREAM: HELD}

    @pytest.mark.parametrize("others", [0, 5], ids=["alone", "in a batch"])
    async def test_an_event_that_was_held_while_its_second_delivery_waited_is_a_duplicate(
        self, inbox: InboxStore, meets: Meets, others: int
    ) -> None:
        early = received(2)
        batch = [early, *(received(1, key=f"k{n}") for n in range(others))]
        async with inbox.transaction() as tx:
            await inbox.record_receipts(tx, "billing", [early], ordered=True)
            second = asyncio.create_task(record_receipts(inbox, *batch, ordered=True))
            await meets()
            await inbox.record_outcomes(
                tx, "billing", [EventOutcome(early, Held())], {STREAM: StreamState(0, InboxBlockReason.EARLY, 1)}
            )
        admitted = await second
        assert early.event_id not in admitted.fresh
        assert len(admitted.fresh) == others
        assert await inbox.admin.receipts("billing", [early.event_id]) == []

    async def test_of_two_drainers_one_gets_the_stream_and_the_other_does_not_wait(self, inbox: InboxStore) -> None:
        await draining(inbox, 1, 2)
        async with inbox.transaction() as one, inbox.transaction() as other:
            await finish_draining(inbox, one)
            assert await inbox.claim_held(other, "billing", STREAM, by_sequence=False, limit=10) is None
            # Its transaction is as good as new.
            assert (await inbox.record_receipts(other, "billing", [received(1, key="B-1")], ordered=True)).states
        async with inbox.transaction() as tx:
            assert await inbox.claim_held(tx, "billing", STREAM, by_sequence=False, limit=10) is None

    @pytest.mark.parametrize("others", [0, 5], ids=["alone", "in a batch"])
    async def test_an_event_that_waited_for_the_end_of_a_drain_finds_the_stream_free(
        self, inbox: InboxStore, meets: Meets, others: int
    ) -> None:
        await draining(inbox, 1)
        late = [received(2), *(received(1, key=f"k{n}") for n in range(others))]
        async with inbox.transaction() as tx:
            await finish_draining(inbox, tx)
            waiting = asyncio.create_task(record_receipts(inbox, *late))
            await meets()
        assert await waiting == Receipts(frozenset(a.event_id for a in late), {})

    async def test_a_replay_that_waited_for_the_last_of_a_drain_is_not_lost_from_sight(
        self, inbox: InboxStore, meets: Meets
    ) -> None:
        await draining(inbox, 1)
        skipped = received(2)
        async with inbox.transaction() as tx:
            await inbox.record_receipts(tx, "billing", [skipped], ordered=False)
            await inbox.record_outcomes(
                tx, "billing", [EventOutcome(skipped, replace(DEAD_LETTERED, policy=OnDeadLetter.SKIP))], {}
            )
        async with inbox.transaction() as tx:
            await finish_draining(inbox, tx)
            replay = asyncio.create_task(inbox.admin.replay(await dead_letter_ids(inbox), "ann"))
            await meets()
        assert await replay == 1
        assert await row(inbox) == (None, "draining", 1)

    async def test_an_event_that_comes_first_joins_the_drain_and_is_not_stranded(self, inbox: InboxStore) -> None:
        await draining(inbox, 1)
        late = received(2)
        async with inbox.transaction() as tx:
            admitted = await inbox.record_receipts(tx, "billing", [late], ordered=False)
            assert admitted.states == {STREAM: StreamState(None, InboxBlockReason.DRAINING, 1)}
            async with inbox.transaction() as drainer:
                assert await inbox.claim_held(drainer, "billing", STREAM, by_sequence=False, limit=10) is None
            await inbox.record_outcomes(
                tx, "billing", [EventOutcome(late, Held())], {STREAM: StreamState(None, InboxBlockReason.DRAINING, 2)}
            )
        assert await inbox.draining("billing", 10) == [STREAM]
        async with inbox.transaction() as tx:
            await finish_draining(inbox, tx)
        assert len(await inbox.admin.receipts("billing", [late.event_id])) == 1

    async def test_batches_with_the_same_streams_in_any_order_do_not_lock_each_other_out(
        self, inbox: InboxStore
    ) -> None:
        keys = [f"k{n}" for n in range(20)]
        batches = [[received(1, key=key) for key in order] for order in (keys, keys[::-1]) for _ in range(4)]
        admitted = await asyncio.gather(*(record_receipts(inbox, *batch, ordered=True) for batch in batches))
        assert sum(len(one.fresh) for one in admitted) == len(batches) * len(keys)

    async def test_a_person_and_a_consumer_decide_about_a_stream_one_after_another(
        self, inbox: InboxStore, meets: Meets
    ) -> None:
        head, follower = received(1), received(2)
        async with inbox.transaction() as tx:
            await dead_letter(inbox, tx, head)
        async with inbox.transaction() as tx:
            await inbox.record_receipts(tx, "billing", [follower], ordered=False)
            replay = asyncio.create_task(inbox.admin.replay(await dead_letter_ids(inbox), "ann"))
            await meets()
            await inbox.record_outcomes(
                tx, "billing", [EventOutcome(follower, Held())], {STREAM: HELD._replace(waiting=1)}
            )
        assert await replay == 1
        assert await row(inbox) == (None, "draining", 2)
        async with inbox.transaction() as tx:
            claimed = await inbox.claim_held(tx, "billing", STREAM, by_sequence=False, limit=10)
        assert claimed is not None
        assert [w.event_id for w in claimed.waiting] == [head.event_id, follower.event_id]
