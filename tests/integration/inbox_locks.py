"""Two transactions of an inbox at once: who gives way to whom, and what is seen after that.

A store makes the second one wait, or refuses it until it gets its turn; what comes of that is the same.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import replace
from typing import Any

import pytest

from outrider.codec.open import open_delivery
from outrider.delivery import Arrival, InboxStream
from outrider.inbox_store import Admitted, Applied, Buried, Cause, Entry, InboxCriteria, InboxStore, Standing, Waits
from outrider.outcome import Policy, Reason
from outrider.testing.inbox_contract import delivery

Meets = Callable[[], Awaitable[None]]
"""Returns once somebody has met the open transaction of somebody else."""

STREAM = InboxStream("orders", "A-1")
BURIED = Buried(Reason.PERMANENT_FAILURE, {"error": "no"}, Policy.HOLD, 1)
HELD = Standing(None, Cause.HELD, 0)


def arrival(number: int | None = None, **options: Any) -> Arrival:
    return open_delivery(delivery(number, **options))


async def admit(inbox: InboxStore, *arrivals: Arrival, gated: bool = False) -> Admitted:
    """Admit and conclude at once, whatever is fresh: applied."""
    async with inbox.transaction() as tx:
        admitted = await inbox.admit(tx, "billing", arrivals, gated=gated)
        fresh = [Entry(a, Applied()) for a in arrivals if a.event_id in admitted.fresh]
        await inbox.conclude(tx, "billing", fresh, {})
    return admitted


async def bury(inbox: InboxStore, tx: Any, *arrivals: Arrival) -> None:
    """Bury the first, and let the others wait behind it."""
    await inbox.admit(tx, "billing", arrivals, gated=False)
    head, *others = arrivals
    entries = [Entry(head, BURIED), *(Entry(other, Waits()) for other in others)]
    await inbox.conclude(tx, "billing", entries, {STREAM: HELD._replace(waiting=len(others))})


async def row(inbox: InboxStore) -> tuple[Any, ...]:
    [row] = await inbox.desk.streams(None, 10)
    return row["seen"], row["cause"], row["waiting"]


async def letters(inbox: InboxStore) -> list[int]:
    return [letter["id"] for letter in await inbox.desk.dead_letters(InboxCriteria())]


async def draining(inbox: InboxStore, *numbers: int) -> list[Arrival]:
    """Make a stream that drains, with such events."""
    head, *waiting = [arrival(number) for number in (0, *numbers)]
    async with inbox.transaction() as tx:
        await bury(inbox, tx, head, *waiting)
    assert await inbox.desk.discard(await letters(inbox), "ann") == 1
    assert await inbox.draining("billing", 10) == [STREAM]
    return waiting


async def finish_draining(inbox: InboxStore, tx: Any) -> None:
    """Apply everything that waits; the stream's row goes with it."""
    resumed = await inbox.resume(tx, "billing", STREAM, by_sequence=False, limit=10)
    assert resumed is not None
    back = [open_delivery(w.delivery)._replace(waiting_id=w.waiting_id) for w in resumed.waiting]
    assert {a.event_id for a in back} == resumed.fresh
    await inbox.conclude(tx, "billing", [Entry(a, Applied()) for a in back], {STREAM: Standing()})


class InboxLocks:
    """Give it an `inbox`, and what `meets`."""

    @pytest.mark.parametrize("gated", [False, True])
    @pytest.mark.parametrize("others", [0, 5], ids=["alone", "in a batch"])
    async def test_a_second_delivery_waits_for_the_first_and_is_then_a_duplicate(
        self, inbox: InboxStore, meets: Meets, gated: bool, others: int
    ) -> None:
        once = arrival(1)
        batch = [once, *(arrival(1, key=f"k{n}") for n in range(others))]
        async with inbox.transaction() as tx:
            assert (await inbox.admit(tx, "billing", [once], gated=gated)).fresh == {once.event_id}
            second = asyncio.create_task(admit(inbox, *batch, gated=gated))
            await meets()
            assert not second.done()
            await inbox.conclude(tx, "billing", [Entry(once, Applied(0.5))], {})
        assert once.event_id not in (await second).fresh
        assert len((await second).fresh) == others

    @pytest.mark.parametrize("gated", [False, True])
    @pytest.mark.parametrize("others", [0, 5], ids=["alone", "in a batch"])
    async def test_a_second_delivery_takes_over_when_the_first_is_rolled_back(
        self, inbox: InboxStore, meets: Meets, gated: bool, others: int
    ) -> None:
        once = arrival(1)
        batch = [once, *(arrival(1, key=f"k{n}") for n in range(others))]
        first = inbox.transaction()
        await inbox.admit(await first.__aenter__(), "billing", [once], gated=gated)
        second = asyncio.create_task(admit(inbox, *batch, gated=gated))
        await meets()
        assert not await first.__aexit__(RuntimeError, RuntimeError("undone"), None)
        admitted = await second
        assert admitted.fresh == {a.event_id for a in batch}
        assert admitted.standings == ({a.stream: Standing() for a in batch} if gated else {})

    async def test_a_batch_that_waited_for_a_receipt_sees_the_hold_committed_meanwhile(
        self, inbox: InboxStore, meets: Meets
    ) -> None:
        head, follower = arrival(1), arrival(2)
        async with inbox.transaction() as tx:
            await bury(inbox, tx, head)
            batch = asyncio.create_task(admit(inbox, head, follower))
            await meets()
        admitted = await batch
        assert admitted.fresh == {follower.event_id}
        assert admitted.standings == {STREAM: HELD}

    @pytest.mark.parametrize("others", [0, 5], ids=["alone", "in a batch"])
    async def test_an_event_that_came_to_wait_while_its_second_delivery_stood_in_line_is_no_news(
        self, inbox: InboxStore, meets: Meets, others: int
    ) -> None:
        early = arrival(2)
        batch = [early, *(arrival(1, key=f"k{n}") for n in range(others))]
        async with inbox.transaction() as tx:
            await inbox.admit(tx, "billing", [early], gated=True)
            second = asyncio.create_task(admit(inbox, *batch, gated=True))
            await meets()
            await inbox.conclude(tx, "billing", [Entry(early, Waits())], {STREAM: Standing(0, Cause.EARLY, 1)})
        admitted = await second
        assert early.event_id not in admitted.fresh
        assert len(admitted.fresh) == others
        assert await inbox.desk.receipts("billing", [early.event_id]) == []

    async def test_of_two_drainers_one_gets_the_stream_and_the_other_does_not_wait(self, inbox: InboxStore) -> None:
        await draining(inbox, 1, 2)
        async with inbox.transaction() as one, inbox.transaction() as other:
            await finish_draining(inbox, one)
            assert await inbox.resume(other, "billing", STREAM, by_sequence=False, limit=10) is None
            # Its transaction is as good as new.
            assert (await inbox.admit(other, "billing", [arrival(1, key="B-1")], gated=True)).standings
        async with inbox.transaction() as tx:
            assert await inbox.resume(tx, "billing", STREAM, by_sequence=False, limit=10) is None

    @pytest.mark.parametrize("others", [0, 5], ids=["alone", "in a batch"])
    async def test_an_arrival_that_waited_for_the_last_of_a_drain_finds_the_stream_free(
        self, inbox: InboxStore, meets: Meets, others: int
    ) -> None:
        await draining(inbox, 1)
        late = [arrival(2), *(arrival(1, key=f"k{n}") for n in range(others))]
        async with inbox.transaction() as tx:
            await finish_draining(inbox, tx)
            waiting = asyncio.create_task(admit(inbox, *late))
            await meets()
        assert await waiting == Admitted(frozenset(a.event_id for a in late), {})

    async def test_a_replay_that_waited_for_the_last_of_a_drain_is_not_lost_from_sight(
        self, inbox: InboxStore, meets: Meets
    ) -> None:
        await draining(inbox, 1)
        skipped = arrival(2)
        async with inbox.transaction() as tx:
            await inbox.admit(tx, "billing", [skipped], gated=False)
            await inbox.conclude(tx, "billing", [Entry(skipped, replace(BURIED, policy=Policy.SKIP))], {})
        async with inbox.transaction() as tx:
            await finish_draining(inbox, tx)
            replay = asyncio.create_task(inbox.desk.replay(await letters(inbox), "ann"))
            await meets()
        assert await replay == 1
        assert await row(inbox) == (None, "draining", 1)

    async def test_an_arrival_that_comes_first_joins_the_drain_and_is_not_stranded(self, inbox: InboxStore) -> None:
        await draining(inbox, 1)
        late = arrival(2)
        async with inbox.transaction() as tx:
            admitted = await inbox.admit(tx, "billing", [late], gated=False)
            assert admitted.standings == {STREAM: Standing(None, Cause.DRAINING, 1)}
            async with inbox.transaction() as drainer:
                assert await inbox.resume(drainer, "billing", STREAM, by_sequence=False, limit=10) is None
            await inbox.conclude(tx, "billing", [Entry(late, Waits())], {STREAM: Standing(None, Cause.DRAINING, 2)})
        assert await inbox.draining("billing", 10) == [STREAM]
        async with inbox.transaction() as tx:
            await finish_draining(inbox, tx)
        assert len(await inbox.desk.receipts("billing", [late.event_id])) == 1

    async def test_batches_with_the_same_streams_in_any_order_do_not_lock_each_other_out(
        self, inbox: InboxStore
    ) -> None:
        keys = [f"k{n}" for n in range(20)]
        batches = [[arrival(1, key=key) for key in order] for order in (keys, keys[::-1]) for _ in range(4)]
        admitted = await asyncio.gather(*(admit(inbox, *batch, gated=True) for batch in batches))
        assert sum(len(one.fresh) for one in admitted) == len(batches) * len(keys)

    async def test_a_person_and_a_consumer_decide_about_a_stream_one_after_another(
        self, inbox: InboxStore, meets: Meets
    ) -> None:
        head, follower = arrival(1), arrival(2)
        async with inbox.transaction() as tx:
            await bury(inbox, tx, head)
        async with inbox.transaction() as tx:
            await inbox.admit(tx, "billing", [follower], gated=False)
            replay = asyncio.create_task(inbox.desk.replay(await letters(inbox), "ann"))
            await meets()
            await inbox.conclude(tx, "billing", [Entry(follower, Waits())], {STREAM: HELD._replace(waiting=1)})
        assert await replay == 1
        assert await row(inbox) == (None, "draining", 2)
        async with inbox.transaction() as tx:
            resumed = await inbox.resume(tx, "billing", STREAM, by_sequence=False, limit=10)
        assert resumed is not None
        assert [w.event_id for w in resumed.waiting] == [head.event_id, follower.event_id]
