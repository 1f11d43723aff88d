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
from tests.support.inbox_locks import (
    InboxLocks,
    Meets,
    dead_letter,
    dead_letter_ids,
    draining,
    finish_draining,
    received,
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


async def test_two_transactions_that_block_a_stream_at_once_lose_no_held_event(
    inbox: PostgresInbox, watcher: Any
) -> None:
    """Without ordering a stream has no row to lock, so both write the first one; the second adds to it."""
    async with inbox.transaction() as tx:
        await dead_letter(inbox, tx, received(1), received(2), received(3))

        async def another() -> None:
            async with inbox.transaction() as mine:
                await dead_letter(inbox, mine, received(4), received(5))

        second = asyncio.create_task(another())
        await _waits(watcher)
    await second
    assert await row(inbox) == (None, "dead_letter", 3)
    assert await inbox.admin.replay(await dead_letter_ids(inbox), "ann") == 2
    assert await row(inbox) == (None, "draining", 5)


async def test_a_waiting_event_delivered_again_does_not_stand_in_the_way_of_its_drain(inbox: PostgresInbox) -> None:
    """It takes no receipt, so neither it nor the draining transaction waits for the other."""
    [again] = await draining(inbox, 1)
    async with inbox.transaction() as tx:
        assert (await inbox.record_receipts(tx, "billing", [again], ordered=False)).fresh == frozenset()
        async with inbox.transaction() as drainer:
            await finish_draining(inbox, drainer)
    assert len(await inbox.admin.receipts("billing", [again.event_id])) == 1


async def test_two_replays_of_one_blocked_stream_at_once_unblock_it(inbox: PostgresInbox, watcher: Any) -> None:
    for number in (1, 2):
        async with inbox.transaction() as tx:
            await dead_letter(inbox, tx, received(number))
    first, second = await dead_letter_ids(inbox)
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


async def test_a_delivery_that_waited_for_a_replay_is_a_duplicate(inbox: PostgresInbox, watcher: Any) -> None:
    head = received(1, event_id=uuid4())
    async with inbox.transaction() as tx:
        await dead_letter(inbox, tx, head)
    blocker = watcher.transaction()
    await blocker.start()
    # The replay has taken the receipt away, and cannot commit yet: it waits for its last row.
    await watcher.execute("LOCK TABLE outrider.outbox_operation")
    replay = asyncio.create_task(inbox.admin.replay(await dead_letter_ids(inbox), "ann"))
    await _waits(watcher)
    again = asyncio.create_task(record_receipts(inbox, head))
    await _waits(watcher, 2)
    await blocker.commit()
    assert await replay == 1
    assert (await again).fresh == frozenset()
    assert await inbox.admin.receipts("billing", [head.event_id]) == []
