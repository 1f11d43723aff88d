"""Two transactions of an inbox at once on MongoDB: who gives way to whom, and what is seen after that."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from dataclasses import replace
from typing import Any

import pytest
from pymongo import AsyncMongoClient, MongoClient
from pymongo.asynchronous.client_session import AsyncClientSession
from pymongo.monitoring import CommandFailedEvent, CommandListener, CommandStartedEvent, CommandSucceededEvent

from outrider.codec.open import open_delivery
from outrider.delivery import Arrival, InboxStream
from outrider.errors import Misuse, NotInTransaction, Transient
from outrider.inbox_store import Admitted, Applied, Buried, Cause, Entry, InboxCriteria, Standing, Waits
from outrider.outcome import Policy, Reason
from outrider.stores.mongo import MongoInbox
from outrider.stores.mongo.transaction import WRITE_CONFLICT
from outrider.testing.inbox_contract import delivery

pytestmark = pytest.mark.mongo

STREAM = InboxStream("orders", "A-1")
BURIED = Buried(Reason.PERMANENT_FAILURE, {"error": "no"}, Policy.HOLD, 1)
HELD = Standing(None, Cause.HELD, 0)


class Referee(CommandListener):
    """Hears of every write that the server refuses because of a transaction that is open."""

    def __init__(self) -> None:
        self._refused = asyncio.Event()

    async def refuses(self) -> None:
        """Return once another write has been refused."""
        self._refused.clear()
        async with asyncio.timeout(20):
            await self._refused.wait()

    def started(self, event: CommandStartedEvent) -> None:
        pass

    def succeeded(self, event: CommandSucceededEvent) -> None:
        pass

    def failed(self, event: CommandFailedEvent) -> None:
        if event.failure.get("code") == WRITE_CONFLICT:
            self._refused.set()


@pytest.fixture
def referee() -> Referee:
    return Referee()


@pytest.fixture
async def client(mongo_url: str, referee: Referee) -> AsyncIterator[AsyncMongoClient[dict[str, Any]]]:
    async with AsyncMongoClient[dict[str, Any]](mongo_url, event_listeners=[referee]) as client:
        yield client


@pytest.fixture
async def inbox(client: AsyncMongoClient[dict[str, Any]], mongo_schema: str) -> MongoInbox:
    return MongoInbox.over(client, schema=mongo_schema)


def arrival(number: int | None = None, **options: Any) -> Arrival:
    return open_delivery(delivery(number, **options))


async def _admit(inbox: MongoInbox, *arrivals: Arrival, gated: bool = False) -> Admitted:
    """Admit and conclude at once, whatever is fresh: applied."""
    async with inbox.transaction() as tx:
        admitted = await inbox.admit(tx, "billing", arrivals, gated=gated)
        fresh = [Entry(a, Applied()) for a in arrivals if a.event_id in admitted.fresh]
        await inbox.conclude(tx, "billing", fresh, {})
    return admitted


async def _bury(inbox: MongoInbox, tx: Any, *arrivals: Arrival) -> None:
    """Bury the first, and let the others wait behind it."""
    await inbox.admit(tx, "billing", arrivals, gated=False)
    head, *others = arrivals
    entries = [Entry(head, BURIED), *(Entry(other, Waits()) for other in others)]
    await inbox.conclude(tx, "billing", entries, {STREAM: HELD._replace(waiting=len(others))})


async def _row(inbox: MongoInbox) -> tuple[Any, ...]:
    [row] = await inbox.desk.streams(None, 10)
    return row["seen"], row["cause"], row["waiting"]


async def _letters(inbox: MongoInbox) -> list[int]:
    return [letter["id"] for letter in await inbox.desk.dead_letters(InboxCriteria())]


@pytest.mark.parametrize("gated", [False, True])
@pytest.mark.parametrize("others", [0, 5], ids=["alone", "in a batch"])
async def test_a_second_delivery_waits_for_the_first_and_is_then_a_duplicate(
    inbox: MongoInbox, referee: Referee, gated: bool, others: int
) -> None:
    once = arrival(1)
    batch = [once, *(arrival(1, key=f"k{n}") for n in range(others))]
    async with inbox.transaction() as tx:
        assert (await inbox.admit(tx, "billing", [once], gated=gated)).fresh == {once.event_id}
        second = asyncio.create_task(_admit(inbox, *batch, gated=gated))
        await referee.refuses()
        assert not second.done()
        await inbox.conclude(tx, "billing", [Entry(once, Applied(0.5))], {})
    assert once.event_id not in (await second).fresh
    assert len((await second).fresh) == others


@pytest.mark.parametrize("gated", [False, True])
@pytest.mark.parametrize("others", [0, 5], ids=["alone", "in a batch"])
async def test_a_second_delivery_takes_over_when_the_first_is_rolled_back(
    inbox: MongoInbox, referee: Referee, gated: bool, others: int
) -> None:
    once = arrival(1)
    batch = [once, *(arrival(1, key=f"k{n}") for n in range(others))]
    first = inbox.transaction()
    await inbox.admit(await first.__aenter__(), "billing", [once], gated=gated)
    second = asyncio.create_task(_admit(inbox, *batch, gated=gated))
    await referee.refuses()
    assert not await first.__aexit__(RuntimeError, RuntimeError("undone"), None)
    admitted = await second
    assert admitted.fresh == {a.event_id for a in batch}
    assert admitted.standings == ({a.stream: Standing() for a in batch} if gated else {})


async def test_a_batch_that_waited_for_a_receipt_sees_the_hold_committed_meanwhile(
    inbox: MongoInbox, referee: Referee
) -> None:
    head, follower = arrival(1), arrival(2)
    async with inbox.transaction() as tx:
        await _bury(inbox, tx, head)
        batch = asyncio.create_task(_admit(inbox, head, follower))
        await referee.refuses()
    admitted = await batch
    assert admitted.fresh == {follower.event_id}
    assert admitted.standings == {STREAM: HELD}


@pytest.mark.parametrize("others", [0, 5], ids=["alone", "in a batch"])
async def test_an_event_that_came_to_wait_while_its_second_delivery_stood_in_line_is_no_news(
    inbox: MongoInbox, referee: Referee, others: int
) -> None:
    early = arrival(2)
    batch = [early, *(arrival(1, key=f"k{n}") for n in range(others))]
    async with inbox.transaction() as tx:
        await inbox.admit(tx, "billing", [early], gated=True)
        second = asyncio.create_task(_admit(inbox, *batch, gated=True))
        await referee.refuses()
        await inbox.conclude(tx, "billing", [Entry(early, Waits())], {STREAM: Standing(0, Cause.EARLY, 1)})
    admitted = await second
    assert early.event_id not in admitted.fresh
    assert len(admitted.fresh) == others
    assert await inbox.desk.receipts("billing", [early.event_id]) == []


async def test_of_two_holds_of_a_stream_written_at_once_one_leaves_no_trace_and_may_be_tried_again(
    inbox: MongoInbox,
) -> None:
    """Without a gate a stream has no document to lock, so both make its first one."""
    async with inbox.transaction() as tx:
        await _bury(inbox, tx, arrival(1), arrival(2), arrival(3))
        with pytest.raises(Transient, match="WriteConflict"):
            async with inbox.transaction() as other:
                await _bury(inbox, other, arrival(4), arrival(5))
    assert await _row(inbox) == (None, "held", 2)
    assert await inbox.desk.replay(await _letters(inbox), "ann") == 1
    assert await _row(inbox) == (None, "draining", 3)


async def _draining(inbox: MongoInbox, *numbers: int) -> list[Arrival]:
    """Make a stream that drains, with such events."""
    head, *waiting = [arrival(number) for number in (0, *numbers)]
    async with inbox.transaction() as tx:
        await _bury(inbox, tx, head, *waiting)
    assert await inbox.desk.discard(await _letters(inbox), "ann") == 1
    assert await inbox.draining("billing", 10) == [STREAM]
    return waiting


async def _finish_draining(inbox: MongoInbox, tx: Any) -> None:
    """Apply everything that waits; the stream's document goes with it."""
    resumed = await inbox.resume(tx, "billing", STREAM, by_sequence=False, limit=10)
    assert resumed is not None
    back = [open_delivery(w.delivery)._replace(waiting_id=w.waiting_id) for w in resumed.waiting]
    assert {a.event_id for a in back} == resumed.fresh
    await inbox.conclude(tx, "billing", [Entry(a, Applied()) for a in back], {STREAM: Standing()})


async def test_of_two_drainers_one_gets_the_stream_and_the_other_does_not_wait(inbox: MongoInbox) -> None:
    await _draining(inbox, 1, 2)
    async with inbox.transaction() as one, inbox.transaction() as other:
        await _finish_draining(inbox, one)
        assert await inbox.resume(other, "billing", STREAM, by_sequence=False, limit=10) is None
        # Its transaction is as good as new.
        assert (await inbox.admit(other, "billing", [arrival(1, key="B-1")], gated=True)).standings
    async with inbox.transaction() as tx:
        assert await inbox.resume(tx, "billing", STREAM, by_sequence=False, limit=10) is None


@pytest.mark.parametrize("others", [0, 5], ids=["alone", "in a batch"])
async def test_an_arrival_that_waited_for_the_last_of_a_drain_finds_the_stream_free(
    inbox: MongoInbox, referee: Referee, others: int
) -> None:
    await _draining(inbox, 1)
    late = [arrival(2), *(arrival(1, key=f"k{n}") for n in range(others))]
    async with inbox.transaction() as tx:
        await _finish_draining(inbox, tx)
        waiting = asyncio.create_task(_admit(inbox, *late))
        await referee.refuses()
    assert await waiting == Admitted(frozenset(a.event_id for a in late), {})


async def test_a_replay_that_waited_for_the_last_of_a_drain_is_not_lost_from_sight(
    inbox: MongoInbox, referee: Referee
) -> None:
    await _draining(inbox, 1)
    skipped = arrival(2)
    async with inbox.transaction() as tx:
        await inbox.admit(tx, "billing", [skipped], gated=False)
        await inbox.conclude(tx, "billing", [Entry(skipped, replace(BURIED, policy=Policy.SKIP))], {})
    async with inbox.transaction() as tx:
        await _finish_draining(inbox, tx)
        replay = asyncio.create_task(inbox.desk.replay(await _letters(inbox), "ann"))
        await referee.refuses()
    assert await replay == 1
    assert await _row(inbox) == (None, "draining", 1)


async def test_an_arrival_that_comes_first_joins_the_drain_and_is_not_stranded(inbox: MongoInbox) -> None:
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


async def test_batches_with_the_same_streams_in_any_order_do_not_lock_each_other_out(inbox: MongoInbox) -> None:
    keys = [f"k{n}" for n in range(20)]
    batches = [[arrival(1, key=key) for key in order] for order in (keys, keys[::-1]) for _ in range(4)]
    admitted = await asyncio.gather(*(_admit(inbox, *batch, gated=True) for batch in batches))
    assert sum(len(one.fresh) for one in admitted) == len(batches) * len(keys)


async def test_a_person_and_a_consumer_decide_about_a_stream_one_after_another(
    inbox: MongoInbox, referee: Referee
) -> None:
    head, follower = arrival(1), arrival(2)
    async with inbox.transaction() as tx:
        await _bury(inbox, tx, head)
    async with inbox.transaction() as tx:
        await inbox.admit(tx, "billing", [follower], gated=False)
        replay = asyncio.create_task(inbox.desk.replay(await _letters(inbox), "ann"))
        await referee.refuses()
        await inbox.conclude(tx, "billing", [Entry(follower, Waits())], {STREAM: HELD._replace(waiting=1)})
    assert await replay == 1
    assert await _row(inbox) == (None, "draining", 2)
    async with inbox.transaction() as tx:
        resumed = await inbox.resume(tx, "billing", STREAM, by_sequence=False, limit=10)
    assert resumed is not None
    assert [w.event_id for w in resumed.waiting] == [head.event_id, follower.event_id]


async def test_people_who_replay_and_discard_one_held_stream_at_once_let_it_go(inbox: MongoInbox) -> None:
    for number in range(6):
        async with inbox.transaction() as tx:
            await _bury(inbox, tx, arrival(number))
    desk, ids = inbox.desk, await _letters(inbox)
    people = [*(desk.replay([id_], "ann") for id_ in ids[:4]), *(desk.discard([id_], "bob") for id_ in ids[4:])]
    assert await asyncio.gather(*people) == [1] * 6
    assert await _row(inbox) == (None, "draining", 4)


async def test_in_a_transaction_of_the_applications_own_the_servers_wish_to_repeat_it_is_passed_on(
    inbox: MongoInbox, client: AsyncMongoClient[dict[str, Any]], referee: Referee
) -> None:
    once = arrival(1)

    async def admit(session: AsyncClientSession) -> Admitted:
        return await inbox.admit(session, "billing", [once], gated=False)

    async with client.start_session() as mine:
        async with inbox.transaction() as tx:
            await inbox.admit(tx, "billing", [once], gated=False)
            work = asyncio.create_task(mine.with_transaction(admit))
            await referee.refuses()
            assert not work.done()
        assert (await work).fresh == frozenset()


async def test_a_session_without_a_transaction_is_refused_with_the_remedy(
    inbox: MongoInbox, client: AsyncMongoClient[dict[str, Any]]
) -> None:
    async with client.start_session() as session:
        with pytest.raises(NotInTransaction, match=r"await session.start_transaction\(\)"):
            await inbox.admit(session, "billing", [arrival(1)], gated=False)


async def test_a_synchronous_session_is_refused_with_the_remedy(inbox: MongoInbox, mongo_url: str) -> None:
    with MongoClient[dict[str, Any]](mongo_url) as client, client.start_session() as session:
        refused = inbox.admit(session, "billing", [arrival(1)], gated=False)  # type: ignore[arg-type]
        with pytest.raises(Misuse, match="no session of an AsyncMongoClient"):
            await refused
