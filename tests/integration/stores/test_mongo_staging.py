"""Staging through sessions of pymongo, synchronous or not, beside the application's own writes."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator
from datetime import UTC, datetime, timedelta
from typing import Any
from uuid import uuid4

import pytest
from pymongo import AsyncMongoClient, MongoClient
from pymongo.asynchronous.client_session import AsyncClientSession
from pymongo.client_session import ClientSession
from pymongo.errors import PyMongoError

from outrider import Outbox
from outrider.errors import NotInTransaction, UsageError
from outrider.outbox.model import Criteria, Retention, Settlements
from outrider.stores.mongo import MongoStore
from outrider.stores.mongo.outbox_admin import COUNTER_DAYS
from outrider.testing import ManualClock
from outrider.testing.harness import order, orders
from tests.support.mongo_outbox import fetched, staged

pytestmark = pytest.mark.mongo


@pytest.fixture
async def store(mongo_url: str, mongo_schema: str) -> AsyncIterator[MongoStore]:
    store = await MongoStore.open(mongo_url, schema=mongo_schema)
    yield store
    await store.close()


@pytest.fixture
def outbox(mongo_schema: str) -> Outbox:
    return Outbox(schema=mongo_schema)


@pytest.fixture
async def client(mongo_url: str, mongo_schema: str) -> AsyncIterator[AsyncMongoClient[Any]]:
    """A client as an application has one, with settings that are not ours."""
    client: AsyncMongoClient[Any] = AsyncMongoClient(mongo_url, tz_aware=False)
    async with client:
        yield client
        await client.drop_database(f"{mongo_schema}_shop")


@pytest.fixture
def plain(mongo_url: str) -> Iterator[MongoClient[Any]]:
    client: MongoClient[Any] = MongoClient(mongo_url, tz_aware=False)
    with client:
        yield client


async def _numbers(store: MongoStore) -> list[int]:
    return [row["payload"]["n"] for row in await store.admin.events(Criteria(limit=1_000))]


async def test_an_event_and_a_row_in_another_database_are_committed_or_rolled_back_together(
    store: MongoStore, client: AsyncMongoClient[Any], outbox: Outbox
) -> None:
    rows = client[f"{outbox.schema}_shop"]["orders"]
    await rows.insert_one({"_id": 0})

    async def place(session: AsyncClientSession, number: int) -> None:
        await rows.insert_one({"_id": number}, session=session)
        await outbox.stage(session, order(number))
        if number == 2:
            raise ValueError("changed my mind")

    async with client.start_session() as session:
        await session.with_transaction(lambda session: place(session, 1))
        with pytest.raises(ValueError, match="changed my mind"):
            await session.with_transaction(lambda session: place(session, 2))
    assert await _numbers(store) == [1]
    assert [row["_id"] async for row in rows.find().sort("_id")] == [0, 1]


async def test_a_synchronous_session_stages_the_same(
    store: MongoStore, plain: MongoClient[Any], outbox: Outbox
) -> None:
    known = uuid4()

    def run_once(session: ClientSession) -> None:
        outbox.stage_sync(session, *orders(3, "A", sequence="auto"), order(4, "B", event_id=known))
        outbox.stage_sync(session, order(5, "A", sequence="auto"), order(6, "C", event_id=known))

    with plain.start_session() as session:
        session.with_transaction(run_once)
    rows = await store.admin.events(Criteria())
    assert {row["payload"]["n"]: row["sequence"] for row in rows} == {1: 1, 2: 2, 3: 3, 4: None, 5: 4}
    _, settlements = await fetched(store, "relay")
    assert [s.event.sequence for s in settlements if s.stream.key == "A"] == [1, 2, 3, 4]


async def test_staging_outside_a_transaction_is_rejected_with_the_remedy(
    client: AsyncMongoClient[Any], plain: MongoClient[Any], outbox: Outbox
) -> None:
    async with client.start_session() as session:
        with pytest.raises(NotInTransaction, match="with_transaction"):
            await outbox.stage(session, order(1))
    with plain.start_session() as session, pytest.raises(NotInTransaction, match="with_transaction"):
        outbox.stage_sync(session, order(1))


async def test_an_outbox_that_is_not_installed_is_named_and_nothing_is_made(client: AsyncMongoClient[Any]) -> None:
    absent = Outbox(schema="absent")
    async with client.start_session() as session, await session.start_transaction():
        with pytest.raises(UsageError, match="outrider db migrate"):
            await absent.stage(session, order(1))
    assert "absent" not in await client.list_database_names()


async def test_a_conflict_in_one_stream_reaches_the_caller_with_its_label(
    client: AsyncMongoClient[Any], outbox: Outbox
) -> None:
    async with client.start_session() as first, client.start_session() as second:
        await first.start_transaction()
        await second.start_transaction()
        await outbox.stage(first, order(1, "A"))
        with pytest.raises(PyMongoError) as rejected:
            await outbox.stage(second, order(2, "A"))
        assert rejected.value.has_error_label("TransientTransactionError")
        await first.commit_transaction()


async def test_positions_of_a_stream_follow_the_order_of_commits(
    store: MongoStore, client: AsyncMongoClient[Any], outbox: Outbox
) -> None:
    """The second transaction began first and commits last; it is run again, and gets its position then."""
    met: list[int] = []

    async def late(session: AsyncClientSession) -> None:
        await client[f"{outbox.schema}_shop"]["orders"].find_one({}, session=session)
        if not met:
            async with client.start_session() as other:
                await other.with_transaction(lambda other: outbox.stage(other, order(1, "A")))
        met.append(1)
        await outbox.stage(session, order(2, "A"))

    async with client.start_session() as session:
        await session.with_transaction(late)
    assert len(met) == 2
    assert await _numbers(store) == [1, 2]


async def test_streams_that_share_a_lane_do_not_disturb_each_other(
    client: AsyncMongoClient[Any], outbox: Outbox, store: MongoStore
) -> None:
    async with client.start_session() as first, client.start_session() as second:
        await first.start_transaction()
        await second.start_transaction()
        await outbox.stage(first, *[order(n, f"k{n}") for n in range(200)])
        await outbox.stage(second, *[order(n, f"m{n}") for n in range(200)], order(200, topic="free"))
        await second.commit_transaction()
        await first.commit_transaction()
    assert (await store.admin.counts())["pending"] == 401


async def test_an_id_staged_and_delivered_meanwhile_is_not_staged_again(
    store: MongoStore, client: AsyncMongoClient[Any], outbox: Outbox
) -> None:
    known = uuid4()
    met: list[int] = []

    async def late(session: AsyncClientSession) -> None:
        # The snapshot is taken here, before the event is staged, delivered and archived by others.
        await client[outbox.schema]["outbox_meta"].find_one({}, session=session)
        if not met:
            async with client.start_session() as other:
                await other.with_transaction(lambda other: outbox.stage(other, order(1, "A", event_id=known)))
            lease, settlements = await fetched(store, "relay")
            assert await store.settle(lease, Settlements([settlement.event for settlement in settlements])) == 1
        met.append(1)
        await outbox.stage(session, order(1, "B", event_id=known))

    async with client.start_session() as session:
        await session.with_transaction(late)
    assert len(met) == 2
    assert await store.admin.counts() == {"sent": 1, "dead_letter": 0}


async def test_numbers_have_no_gaps_after_a_transaction_that_was_given_up(
    store: MongoStore, client: AsyncMongoClient[Any], outbox: Outbox
) -> None:
    async with client.start_session() as session:
        for keep in (True, False, True):
            await session.start_transaction()
            await outbox.stage(session, *orders(2, "A", sequence="auto"))
            await (session.commit_transaction() if keep else session.abort_transaction())
    assert [row["sequence"] for row in await store.admin.events(Criteria())] == [1, 2, 3, 4]


async def _counted(store: MongoStore) -> dict[str, int | None]:
    """Return the keys that are counted, each with its last number."""
    return {row["_id"]["key"]: row.get("sequence") for row in await store.database["outbox_counter"].find().to_list()}


async def test_the_counter_of_an_idle_stream_is_forgotten_unless_it_has_given_out_numbers(
    store: MongoStore, mongo_url: str, mongo_schema: str
) -> None:
    await staged(store, order(1, "plain"), *orders(2, "numbered", sequence="auto"))
    await staged(store, order(1, "both"))
    await staged(store, *orders(2, "both", sequence="auto"))
    await staged(store, order(3, "both"))
    await store.maintenance.prune(Retention())
    assert await _counted(store) == {"plain": None, "numbered": 2, "both": 2}
    clock = ManualClock(datetime.now(UTC) + timedelta(days=COUNTER_DAYS + 1))
    later = await MongoStore.open(mongo_url, schema=mongo_schema, clock=clock)
    await later.maintenance.prune(Retention())
    await later.close()
    assert await _counted(store) == {"numbered": 2, "both": 2}
    await staged(store, order(4, "plain"))
    assert [row["payload"]["n"] for row in await store.admin.events(Criteria(key="plain"))] == [1, 4]
