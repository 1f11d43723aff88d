"""The fence on MongoDB where it is hardest: lanes that change hands while a settle is on its way."""

from __future__ import annotations

import asyncio
import math
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any
from uuid import uuid4

import pytest
from pymongo.errors import PyMongoError

from outrider.brokers.base import CONFIRMED
from outrider.errors import Transient
from outrider.event import DeadLetterReason
from outrider.outbox.model import PARK, Criteria, DeadLettered, Defer, Lease, Outcome, Retry, Settlements
from outrider.stores.mongo import MongoSchema, MongoStore, outbox_admin, outbox_lanes, outbox_settle
from outrider.stores.mongo.database import RetryBudget, Session, begin, is_transient, transact
from outrider.testing import ManualClock
from outrider.testing.harness import order, orders
from outrider.testing.servers.mongo import MongoServer
from tests.support.mongo_outbox import fetched, staged

pytestmark = pytest.mark.mongo

FAILURE = {"kind": "nacked", "error": "no"}
OUTCOMES: list[Outcome] = [
    CONFIRMED,
    Retry(1, FAILURE),
    Defer(1),
    PARK,
    DeadLettered(DeadLetterReason.PERMANENT_FAILURE, FAILURE),
]
UNTOUCHED = {"pending": 3, "sent": 0, "dead_letter": 0}


@pytest.fixture
async def store(mongo_url: str, mongo_schema: str) -> AsyncIterator[MongoStore]:
    store = await MongoStore.open(mongo_url, schema=mongo_schema)
    yield store
    await store.close()


async def _take_over(store: MongoStore, session: Any = None) -> None:
    await store.database["outbox_lane"].update_many(
        {}, {"$set": {"owner": "new"}, "$inc": {"epoch": 1}}, session=session
    )


@pytest.mark.parametrize("outcome", OUTCOMES, ids=lambda outcome: type(outcome).__name__)
async def test_a_late_relay_cannot_settle_after_a_takeover(store: MongoStore, outcome: Outcome) -> None:
    await staged(store, *orders(3))
    lease, settlements = await fetched(store, "old", outcome)
    await _take_over(store)
    assert await store.settle(lease, Settlements.of(settlements)) == 0
    assert await store.settle(lease, Settlements([settlement.event for settlement in settlements])) == 0
    assert await store.admin.counts() == UNTOUCHED
    assert await store.admin.blocked_streams(10) == []


@pytest.mark.parametrize("outcome", OUTCOMES, ids=lambda outcome: type(outcome).__name__)
async def test_a_settle_that_met_an_open_takeover_changes_nothing(
    store: MongoStore, conflicted: asyncio.Event, outcome: Outcome
) -> None:
    await staged(store, *orders(3))
    lease, settlements = await fetched(store, "old", outcome)
    async with store.database.session() as session:
        await begin(session)
        # The next owner has claimed every lane and not yet committed: the old owner's settle conflicts, and is retried.
        await _take_over(store, session)
        late = asyncio.create_task(store.settle(lease, Settlements.of(settlements)))
        await asyncio.wait_for(conflicted.wait(), 20)
        await session.commit_transaction()
    assert await late == 0
    assert await store.admin.counts() == UNTOUCHED
    assert await store.admin.blocked_streams(10) == []


async def test_a_lane_is_claimed_only_after_a_settle_that_is_under_way(
    store: MongoStore, conflicted: asyncio.Event
) -> None:
    await staged(store, order(1))
    lease, [settlement] = await fetched(store, "old")
    await store.database["outbox_relay"].delete_many({})
    await store.heartbeat("new", 60, first=True)
    lane = settlement.stream.lane
    async with store.database.session() as session:
        await begin(session)
        assert (await outbox_lanes.fence(session, store.database, lease.only([lane]))).owned == {lane}
        claiming = asyncio.create_task(store.claim("new", [lane]))
        await asyncio.wait_for(conflicted.wait(), 20)
        assert await store.database["outbox_lane"].count_documents({"_id": lane, "owner": "new"}) == 0
        await session.commit_transaction()
    # A claim that has waited for its longest gives up, and the next one takes the lane.
    epochs = (await claiming).epochs or (await store.claim("new", [lane])).epochs
    assert epochs == {lane: lease.epochs[lane] + 1}
    assert await store.settle(lease, Settlements.of([settlement])) == 0


@pytest.fixture
def conflicted(monkeypatch: pytest.MonkeyPatch) -> asyncio.Event:
    """Set once the server has rejected a transaction because of a conflict, and before the retry."""
    conflicted, pause = asyncio.Event(), RetryBudget.pause

    async def signalling_pause(budget: RetryBudget, error: BaseException) -> None:
        conflicted.set()
        await pause(budget, error)

    monkeypatch.setattr(RetryBudget, "pause", signalling_pause)
    return conflicted


async def test_a_fetch_reads_nothing_of_lanes_that_were_taken_over(store: MongoStore) -> None:
    await staged(store, *orders(3))
    lease, _ = await fetched(store, "old")
    await _take_over(store)
    found = await store.fetch(lease, dict.fromkeys(lease.epochs, 10))
    assert (found.events, found.lanes) == ([], frozenset())


async def test_a_claim_does_not_overlook_a_heartbeat_that_came_after_its_snapshot(
    mongo_url: str, mongo_schema: str
) -> None:
    clocks = ManualClock(), ManualClock()
    old, new = [await MongoStore.open(mongo_url, schema=mongo_schema, clock=clock) for clock in clocks]
    await old.heartbeat("old", 15, first=True)
    await old.claim("old", [1])
    clocks[1].advance(seconds=16)
    await new.heartbeat("new", 15, first=True)
    async with new.database.session() as session:
        await begin(session)
        assert await outbox_lanes.living_relays(new.database, session) == {"new"}
        # By its own clock it is in time, and its lanes are not claimed yet.
        clocks[0].advance(seconds=14)
        assert await old.heartbeat("old", 15, first=False) is not None
        rejected: Any = None
        try:
            await outbox_lanes.take(session, new.database, "new", [1])
        except PyMongoError as error:
            rejected = error
        assert is_transient(rejected)
        await session.abort_transaction()
    for store in (old, new):
        await store.close()


async def test_a_heartbeat_that_lapsed_never_revives(mongo_url: str, mongo_schema: str) -> None:
    clock = ManualClock()
    store = await MongoStore.open(mongo_url, schema=mongo_schema, clock=clock)
    await store.heartbeat("relay", 15, first=True)
    clock.advance(seconds=14.999)
    assert await store.heartbeat("relay", 15, first=False) is not None
    clock.advance(seconds=15)
    assert await store.heartbeat("relay", 15, first=False) is None
    await store.close()


async def test_of_two_relays_that_claim_at_once_each_lane_goes_to_one(store: MongoStore) -> None:
    names = [f"relay-{number}" for number in range(4)]
    for name in names:
        await store.heartbeat(name, 60, first=True)
    leases = await asyncio.gather(*(store.claim(name, range(96)) for name in names))
    assert sorted(lane for lease in leases for lane in lease.epochs) == list(range(96))


async def test_two_operators_who_take_the_last_dead_letters_of_a_stream_at_once_unblock_it(
    store: MongoStore, conflicted: asyncio.Event
) -> None:
    ids = await staged(store, *orders(3))
    for event_id in ids[:2]:
        assert await store.admin.dead_letter(event_id, "ann", {}, "block")
    async with store.database.session() as session:
        await begin(session)
        assert await outbox_admin.discard(session, store.database, ids[:1], "ann") == 1
        other = asyncio.create_task(store.admin.discard(ids[1:2], "bob"))
        await asyncio.wait_for(conflicted.wait(), 20)
        await session.commit_transaction()
    assert await other == 1
    assert [stream.cause for stream in await store.admin.blocked_streams(10)] == ["draining"]


@pytest.mark.parametrize("confirming", [True, False], ids=["confirm", "settle"])
async def test_more_than_the_server_can_hold_in_one_transaction_is_settled(
    store: MongoStore, monkeypatch: pytest.MonkeyPatch, confirming: bool
) -> None:
    """It would answer with a conflict each time, so there are several transactions."""
    monkeypatch.setattr(outbox_settle, "CHUNK_BYTES_MAX", 25)
    ids = await staged(store, *(order(number, f"key-{number}") for number in range(10)))
    lease, settlements = await fetched(store, "relay")
    begun: list[int] = []
    run = store.database.transaction

    async def counted(*args: Any, **kwargs: Any) -> Any:
        begun.append(1)
        return await run(*args, **kwargs)

    monkeypatch.setattr(store.database, "transaction", counted)
    events = [settlement.event for settlement in settlements]
    settled = (
        store.settle(lease, Settlements(events)) if confirming else store.settle(lease, Settlements.of(settlements))
    )
    assert await settled == len(ids) == 10
    assert len(begun) == math.ceil(10 / (25 // len(events[0].payload)))
    assert await store.admin.counts() == {"sent": 10, "dead_letter": 0}


async def test_an_event_whose_id_was_archived_before_is_settled_like_any_other(store: MongoStore) -> None:
    """Nothing keeps a foreign writer from using an id again after its event was delivered."""
    known = uuid4()
    await staged(store, order(1, event_id=known))
    lease, settlements = await fetched(store, "relay")
    assert await store.settle(lease, Settlements([settlements[0].event])) == 1
    again = {"_id": known, "event_type": "order.changed", "payload": '{"n": 2}', "aggregate_id": "A"}
    await store.database["outbox"].insert_one(again)
    found = await store.fetch(lease, dict.fromkeys(lease.epochs, 10))
    assert await store.settle(lease, Settlements(found.events)) == 1
    [sent] = await store.admin.events(Criteria(state="sent"))
    assert sent["payload"] == {"n": 2}


async def test_a_confirm_of_which_one_event_is_gone_applies_to_the_others(store: MongoStore) -> None:
    ids = await staged(store, *orders(3))
    lease, settlements = await fetched(store, "relay")
    await store.database["outbox"].delete_one({"_id": ids[1]})
    assert await store.settle(lease, Settlements([settlement.event for settlement in settlements])) == 2
    assert await store.admin.counts() == {"sent": 2, "dead_letter": 0}


async def test_a_stream_that_only_looks_like_an_expression_is_blocked_by_its_name(store: MongoStore) -> None:
    """Texts of other people must never be taken for a part of a query."""
    document = {"event_type": "x", "payload": "1", "topic": "$cause", "key": "$$NOW"}
    await store.database["outbox"].insert_one({"_id": uuid4(), **document})
    lease, [settlement] = await fetched(store, "relay", Retry(60, FAILURE))
    assert await store.settle(lease, Settlements.of([settlement])) == 1
    [held] = await store.admin.blocked_streams(10)
    assert (held.stream.topic, held.stream.key, held.waiting) == ("$cause", "$$NOW", 1)


async def test_lanes_that_a_killed_relay_was_writing_do_not_keep_the_others_from_being_claimed(
    store: MongoStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    # The result does not depend on the speed of this machine.
    monkeypatch.setattr(outbox_lanes, "CLAIM_SECONDS", 60.0)
    lanes = range(3 * store.lanes)
    await store.heartbeat("new", 60, first=True)
    async with store.database.session() as session:
        await begin(session)
        written = {"_id": {"$in": [5, 60]}}
        await store.database["outbox_lane"].update_many(written, {"$inc": {"turn": 1}}, session=session)
        lease = await store.claim("new", lanes)
        assert set(lanes) - lease.epochs.keys() == {5, 60}
        await session.abort_transaction()
    rest = await store.claim("new", [5, 60])
    assert rest.epochs.keys() == {5, 60}
    assert not (await store.claim("new", lanes)).epochs


async def test_a_claim_that_took_its_time_looks_no_further(store: MongoStore, monkeypatch: pytest.MonkeyPatch) -> None:
    tried: list[object] = []

    async def counted(session: Session, work: Callable[[], Awaitable[Lease]], budget: RetryBudget) -> Lease:
        tried.append(work)
        return await transact(session, work, budget)

    monkeypatch.setattr(outbox_lanes, "transact", counted)
    monkeypatch.setattr(outbox_lanes, "CLAIM_SECONDS", 0.0)
    await store.heartbeat("new", 60, first=True)
    async with store.database.session() as session:
        await begin(session)
        await store.database["outbox_lane"].update_many({}, {"$inc": {"turn": 1}}, session=session)
        assert not (await store.claim("new", range(store.lanes))).epochs
        await session.abort_transaction()
    assert len(tried) == 1


async def test_a_claim_whose_commit_is_unknown_is_reported(mongo_schema: str) -> None:
    with MongoServer() as server:
        await MongoSchema(server.url, schema=mongo_schema).migrate()
        store = await MongoStore.open(server.url, schema=mongo_schema)
        await store.heartbeat("new", 60, first=True)
        gone = {"failCommands": ["commitTransaction"], "closeConnection": True}
        point = {"configureFailPoint": "failCommand", "mode": "alwaysOn", "data": gone}
        await store.database.client.admin.command(point)
        with pytest.raises(Transient):
            await store.claim("new", [1, 2])
        await store.database.client.admin.command({"configureFailPoint": "failCommand", "mode": "off"})
        await store.close()
