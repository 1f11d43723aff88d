"""Two transactions of an inbox at once on PostgreSQL: who waits for whom, and what is seen after the wait."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from dataclasses import replace
from typing import Any
from uuid import uuid4

import asyncpg
import pytest

from outrider.codec.open import open_delivery
from outrider.delivery import Arrival, InboxStream
from outrider.inbox_store import Admitted, Applied, Buried, Cause, Entry, InboxCriteria, Standing, Waits
from outrider.outcome import Policy, Reason
from outrider.stores.postgres import PostgresInbox, queries
from outrider.testing.inbox_contract import delivery

pytestmark = pytest.mark.postgres

STREAM = InboxStream("orders", "A-1")
BURIED = Buried(Reason.PERMANENT_FAILURE, {"error": "no"}, Policy.HOLD, 1)
HELD = Standing(None, Cause.HELD, 0)


@pytest.fixture
async def inbox(postgres_url: str) -> AsyncIterator[PostgresInbox]:
    inbox = await PostgresInbox.open(postgres_url)
    yield inbox
    await inbox.close()


@pytest.fixture
async def watcher(postgres_url: str) -> AsyncIterator[Any]:
    conn = await asyncpg.connect(postgres_url)
    yield conn
    await conn.close()


async def _waits(watcher: Any, count: int = 1) -> None:
    """Return once that many backends wait for a lock."""
    sql = "SELECT count(*) FROM pg_stat_activity WHERE wait_event_type = 'Lock' AND datname = current_database()"
    async with asyncio.timeout(20):
        while await watcher.fetchval(sql) < count:
            await watcher.execute("SELECT pg_stat_clear_snapshot()")


def arrival(number: int | None = None, **options: Any) -> Arrival:
    return open_delivery(delivery(number, **options))


async def _admit(inbox: PostgresInbox, *arrivals: Arrival, gated: bool = False) -> Admitted:
    """Admit and conclude at once, whatever is fresh: applied."""
    async with inbox.transaction() as tx:
        admitted = await inbox.admit(tx, "billing", arrivals, gated=gated)
        fresh = [Entry(a, Applied()) for a in arrivals if a.event_id in admitted.fresh]
        await inbox.conclude(tx, "billing", fresh, {})
    return admitted


async def _bury(inbox: PostgresInbox, tx: Any, *arrivals: Arrival) -> None:
    """Bury the first, and let the others wait behind it."""
    await inbox.admit(tx, "billing", arrivals, gated=False)
    head, *others = arrivals
    entries = [Entry(head, BURIED), *(Entry(other, Waits()) for other in others)]
    await inbox.conclude(tx, "billing", entries, {STREAM: HELD._replace(waiting=len(others))})


async def _row(watcher: Any) -> tuple[Any, ...]:
    return tuple(await watcher.fetchrow("SELECT seen, cause, waiting FROM outrider.inbox_stream"))


@pytest.mark.parametrize("gated", [False, True])
@pytest.mark.parametrize("others", [0, 5], ids=["alone", "in a batch"])
async def test_a_second_delivery_waits_for_the_first_and_is_then_a_duplicate(
    inbox: PostgresInbox, watcher: Any, gated: bool, others: int
) -> None:
    once = arrival(1)
    batch = [once, *(arrival(1, key=f"k{n}") for n in range(others))]
    async with inbox.transaction() as tx:
        assert (await inbox.admit(tx, "billing", [once], gated=gated)).fresh == {once.event_id}
        second = asyncio.create_task(_admit(inbox, *batch, gated=gated))
        await _waits(watcher)
        assert not second.done()
        await inbox.conclude(tx, "billing", [Entry(once, Applied(0.5))], {})
    assert once.event_id not in (await second).fresh
    assert len((await second).fresh) == others


@pytest.mark.parametrize("gated", [False, True])
@pytest.mark.parametrize("others", [0, 5], ids=["alone", "in a batch"])
async def test_a_second_delivery_takes_over_when_the_first_is_rolled_back(
    inbox: PostgresInbox, watcher: Any, gated: bool, others: int
) -> None:
    once = arrival(1)
    batch = [once, *(arrival(1, key=f"k{n}") for n in range(others))]
    first = inbox.transaction()
    await inbox.admit(await first.__aenter__(), "billing", [once], gated=gated)
    second = asyncio.create_task(_admit(inbox, *batch, gated=gated))
    await _waits(watcher)
    assert not await first.__aexit__(RuntimeError, RuntimeError("undone"), None)
    admitted = await second
    assert admitted.fresh == {a.event_id for a in batch}
    assert admitted.standings == ({a.stream: Standing() for a in batch} if gated else {})


async def test_a_batch_that_waited_for_a_receipt_sees_the_hold_committed_meanwhile(
    inbox: PostgresInbox, watcher: Any
) -> None:
    head, follower = arrival(1), arrival(2)
    async with inbox.transaction() as tx:
        await _bury(inbox, tx, head)
        batch = asyncio.create_task(_admit(inbox, head, follower))
        await _waits(watcher)
    admitted = await batch
    assert admitted.fresh == {follower.event_id}
    assert admitted.standings == {STREAM: HELD}


@pytest.mark.parametrize("others", [0, 5], ids=["alone", "in a batch"])
async def test_an_event_that_came_to_wait_while_its_second_delivery_stood_in_line_is_no_news(
    inbox: PostgresInbox, watcher: Any, others: int
) -> None:
    early = arrival(2)
    batch = [early, *(arrival(1, key=f"k{n}") for n in range(others))]
    async with inbox.transaction() as tx:
        await inbox.admit(tx, "billing", [early], gated=True)
        second = asyncio.create_task(_admit(inbox, *batch, gated=True))
        await _waits(watcher)
        await inbox.conclude(tx, "billing", [Entry(early, Waits())], {STREAM: Standing(0, Cause.EARLY, 1)})
    admitted = await second
    assert early.event_id not in admitted.fresh
    assert len(admitted.fresh) == others
    assert await inbox.desk.receipts("billing", [early.event_id]) == []


async def test_two_streams_holds_written_at_once_lose_nothing_that_waits(inbox: PostgresInbox, watcher: Any) -> None:
    """Without a gate a stream has no row to lock, so both write its first one; the second adds to it."""
    async with inbox.transaction() as tx:
        await _bury(inbox, tx, arrival(1), arrival(2), arrival(3))

        async def another() -> None:
            async with inbox.transaction() as mine:
                await _bury(inbox, mine, arrival(4), arrival(5))

        second = asyncio.create_task(another())
        await _waits(watcher)
    await second
    assert await _row(watcher) == (None, "held", 3)
    ids = [letter["id"] for letter in await inbox.desk.dead_letters(InboxCriteria())]
    assert await inbox.desk.replay(ids, "ann") == 2
    assert await _row(watcher) == (None, "draining", 5)


async def _draining(inbox: PostgresInbox, *numbers: int) -> list[Arrival]:
    """Make a stream that drains, with such events."""
    head, *waiting = [arrival(number) for number in (0, *numbers)]
    async with inbox.transaction() as tx:
        await _bury(inbox, tx, head, *waiting)
    [letter] = await inbox.desk.dead_letters(InboxCriteria())
    assert await inbox.desk.discard([letter["id"]], "ann") == 1
    assert await inbox.draining("billing", 10) == [STREAM]
    return waiting


async def _finish_draining(inbox: PostgresInbox, tx: Any) -> None:
    """Apply everything that waits; the stream's row goes with it."""
    resumed = await inbox.resume(tx, "billing", STREAM, by_sequence=False, limit=10)
    assert resumed is not None
    back = [open_delivery(w.delivery)._replace(waiting_id=w.waiting_id) for w in resumed.waiting]
    assert {a.event_id for a in back} == resumed.fresh
    await inbox.conclude(tx, "billing", [Entry(a, Applied()) for a in back], {STREAM: Standing()})


async def test_of_two_drainers_one_gets_the_stream_and_the_other_does_not_wait(inbox: PostgresInbox) -> None:
    await _draining(inbox, 1, 2)
    async with inbox.transaction() as one, inbox.transaction() as other:
        await _finish_draining(inbox, one)
        assert await inbox.resume(other, "billing", STREAM, by_sequence=False, limit=10) is None
    async with inbox.transaction() as tx:
        assert await inbox.resume(tx, "billing", STREAM, by_sequence=False, limit=10) is None


@pytest.mark.parametrize("others", [0, 5], ids=["alone", "in a batch"])
async def test_an_arrival_that_waited_for_the_last_of_a_drain_finds_the_stream_free(
    inbox: PostgresInbox, watcher: Any, others: int
) -> None:
    await _draining(inbox, 1)
    late = [arrival(2), *(arrival(1, key=f"k{n}") for n in range(others))]
    async with inbox.transaction() as tx:
        await _finish_draining(inbox, tx)
        waiting = asyncio.create_task(_admit(inbox, *late))
        await _waits(watcher)
    assert await waiting == Admitted(frozenset(a.event_id for a in late), {})


async def test_a_replay_that_waited_for_the_last_of_a_drain_is_not_lost_from_sight(
    inbox: PostgresInbox, watcher: Any
) -> None:
    await _draining(inbox, 1)
    skipped = arrival(2)
    async with inbox.transaction() as tx:
        await inbox.admit(tx, "billing", [skipped], gated=False)
        await inbox.conclude(tx, "billing", [Entry(skipped, replace(BURIED, policy=Policy.SKIP))], {})
    [letter] = await inbox.desk.dead_letters(InboxCriteria())
    async with inbox.transaction() as tx:
        # The row is there and locked when the replay begins, and gone when it gets its turn.
        await tx.execute("SELECT FROM outrider.inbox_stream FOR UPDATE")
        replay = asyncio.create_task(inbox.desk.replay([letter["id"]], "ann"))
        await _waits(watcher)
        await _finish_draining(inbox, tx)
    assert await replay == 1
    assert await _row(watcher) == (None, "draining", 1)


async def test_an_arrival_that_comes_first_joins_the_drain_and_is_not_stranded(inbox: PostgresInbox) -> None:
    await _draining(inbox, 1)
    late = arrival(2)
    async with inbox.transaction() as tx:
        admitted = await inbox.admit(tx, "billing", [late], gated=False)
        assert admitted.standings == {STREAM: Standing(None, Cause.DRAINING, 1)}
        async with inbox.transaction() as drainer:
            assert await inbox.resume(drainer, "billing", STREAM, by_sequence=False, limit=10) is None
        await inbox.conclude(tx, "billing", [Entry(late, Waits())], {STREAM: Standing(None, Cause.DRAINING, 2)})
    assert await inbox.draining("billing", 10) == [STREAM]
    async with inbox.transaction() as tx:
        await _finish_draining(inbox, tx)
    assert len(await inbox.desk.receipts("billing", [late.event_id])) == 1


async def test_a_waiting_event_delivered_again_does_not_stand_in_the_way_of_its_drain(inbox: PostgresInbox) -> None:
    """It takes no receipt, so it need not wait for whoever drains, and whoever drains need not wait for it."""
    [again] = await _draining(inbox, 1)
    async with inbox.transaction() as tx:
        assert (await inbox.admit(tx, "billing", [again], gated=False)).fresh == frozenset()
        async with inbox.transaction() as drainer:
            await _finish_draining(inbox, drainer)
    assert len(await inbox.desk.receipts("billing", [again.event_id])) == 1


async def test_batches_with_the_same_streams_in_any_order_do_not_lock_each_other_out(inbox: PostgresInbox) -> None:
    keys = [f"k{n}" for n in range(20)]
    batches = [[arrival(1, key=key) for key in order] for order in (keys, keys[::-1]) for _ in range(4)]
    admitted = await asyncio.gather(*(_admit(inbox, *batch, gated=True) for batch in batches))
    assert sum(len(one.fresh) for one in admitted) == len(batches) * len(keys)


async def test_a_person_and_a_consumer_decide_about_a_stream_one_after_another(
    inbox: PostgresInbox, watcher: Any
) -> None:
    head, follower = arrival(1), arrival(2)
    async with inbox.transaction() as tx:
        await _bury(inbox, tx, head)
    [letter] = await inbox.desk.dead_letters(InboxCriteria())
    async with inbox.transaction() as tx:
        await inbox.admit(tx, "billing", [follower], gated=False)
        replay = asyncio.create_task(inbox.desk.replay([letter["id"]], "ann"))
        await _waits(watcher)
        await inbox.conclude(tx, "billing", [Entry(follower, Waits())], {STREAM: HELD._replace(waiting=1)})
    assert await replay == 1
    assert await _row(watcher) == (None, "draining", 2)
    async with inbox.transaction() as tx:
        resumed = await inbox.resume(tx, "billing", STREAM, by_sequence=False, limit=10)
    assert resumed is not None
    assert [w.event_id for w in resumed.waiting] == [head.event_id, follower.event_id]


async def test_two_people_who_replay_one_held_stream_at_once_let_it_go(inbox: PostgresInbox, watcher: Any) -> None:
    for number in (1, 2):
        async with inbox.transaction() as tx:
            await _bury(inbox, tx, arrival(number))
    first, second = [letter["id"] for letter in await inbox.desk.dead_letters(InboxCriteria())]
    sql = queries.load_inbox("outrider", "inbox_desk")
    stream = [["billing"], ["orders"], ["A-1"], [1]]
    async with inbox.transaction() as tx:
        # One person has locked the stream; the other has to wait, and then sees what the first did.
        await tx.execute(sql["lock_streams"], [first])
        replay = asyncio.create_task(inbox.desk.replay([second], "ann"))
        await _waits(watcher)
        await tx.execute(sql["replay"], [first])
        await tx.execute(sql["go_on"], *stream, [None], [1])
    assert await replay == 1
    assert await _row(watcher) == (None, "draining", 2)


async def test_a_delivery_that_waited_for_a_replay_is_no_news(inbox: PostgresInbox, watcher: Any) -> None:
    head = arrival(1, event_id=uuid4())
    async with inbox.transaction() as tx:
        await _bury(inbox, tx, head)
    blocker = watcher.transaction()
    await blocker.start()
    # The replay has taken the receipt away, and cannot commit yet: it waits for its last row.
    await watcher.execute("LOCK TABLE outrider.outbox_operation")
    [letter] = await inbox.desk.dead_letters(InboxCriteria())
    replay = asyncio.create_task(inbox.desk.replay([letter["id"]], "ann"))
    await _waits(watcher)
    again = asyncio.create_task(_admit(inbox, head))
    await _waits(watcher, 2)
    await blocker.commit()
    assert await replay == 1
    assert (await again).fresh == frozenset()
    assert await inbox.desk.receipts("billing", [head.event_id]) == []
