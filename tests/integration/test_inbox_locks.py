"""Two transactions of an inbox at once on PostgreSQL: who waits for whom, and what is seen after the wait."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from functools import partial
from typing import Any
from uuid import uuid4

import asyncpg
import pytest

from outrider.stores.postgres import PostgresInbox, statements
from tests.integration.inbox_locks import (
    InboxLocks,
    Meets,
    arrival,
    dead_letter,
    draining,
    finish_draining,
    letters,
    record_receipts,
    row,
)

pytestmark = pytest.mark.postgres


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


@pytest.fixture
def meets(watcher: Any) -> Meets:
    return partial(_waits, watcher)


async def _waits(watcher: Any, count: int = 1) -> None:
    """Return once that many backends wait for a lock."""
    sql = "SELECT count(*) FROM pg_stat_activity WHERE wait_event_type = 'Lock' AND datname = current_database()"
    async with asyncio.timeout(20):
        while await watcher.fetchval(sql) < count:
            await watcher.execute("SELECT pg_stat_clear_snapshot()")


class TestLocks(InboxLocks):
    pass


async def test_two_streams_holds_written_at_once_lose_nothing_that_waits(inbox: PostgresInbox, watcher: Any) -> None:
    """Without a gate a stream has no row to lock, so both write its first one; the second adds to it."""
    async with inbox.transaction() as tx:
        await dead_letter(inbox, tx, arrival(1), arrival(2), arrival(3))

        async def another() -> None:
            async with inbox.transaction() as mine:
                await dead_letter(inbox, mine, arrival(4), arrival(5))

        second = asyncio.create_task(another())
        await _waits(watcher)
    await second
    assert await row(inbox) == (None, "dead_letter", 3)
    assert await inbox.admin.replay(await letters(inbox), "ann") == 2
    assert await row(inbox) == (None, "draining", 5)


async def test_a_waiting_event_delivered_again_does_not_stand_in_the_way_of_its_drain(inbox: PostgresInbox) -> None:
    """It takes no receipt, so it need not wait for whoever drains, and whoever drains need not wait for it."""
    [again] = await draining(inbox, 1)
    async with inbox.transaction() as tx:
        assert (await inbox.record_receipts(tx, "billing", [again], ordered=False)).fresh == frozenset()
        async with inbox.transaction() as drainer:
            await finish_draining(inbox, drainer)
    assert len(await inbox.admin.receipts("billing", [again.event_id])) == 1


async def test_two_people_who_replay_one_held_stream_at_once_let_it_go(inbox: PostgresInbox, watcher: Any) -> None:
    for number in (1, 2):
        async with inbox.transaction() as tx:
            await dead_letter(inbox, tx, arrival(number))
    first, second = await letters(inbox)
    sql = statements.load_inbox("outrider")
    stream = [["billing"], ["orders"], ["A-1"], [1]]
    async with inbox.transaction() as tx:
        # One person has locked the stream; the other has to wait, and then sees what the first did.
        await tx.execute(sql["lock_dead_letter_streams"], [first])
        replay = asyncio.create_task(inbox.admin.replay([second], "ann"))
        await _waits(watcher)
        await tx.execute(sql["replay"], [first])
        await tx.execute(sql["drain_unblocked"], *stream, [None], [1])
    assert await replay == 1
    assert await row(inbox) == (None, "draining", 2)


async def test_a_delivery_that_waited_for_a_replay_is_no_news(inbox: PostgresInbox, watcher: Any) -> None:
    head = arrival(1, event_id=uuid4())
    async with inbox.transaction() as tx:
        await dead_letter(inbox, tx, head)
    blocker = watcher.transaction()
    await blocker.start()
    # The replay has taken the receipt away, and cannot commit yet: it waits for its last row.
    await watcher.execute("LOCK TABLE outrider.outbox_operation")
    replay = asyncio.create_task(inbox.admin.replay(await letters(inbox), "ann"))
    await _waits(watcher)
    again = asyncio.create_task(record_receipts(inbox, head))
    await _waits(watcher, 2)
    await blocker.commit()
    assert await replay == 1
    assert (await again).fresh == frozenset()
    assert await inbox.admin.receipts("billing", [head.event_id]) == []
