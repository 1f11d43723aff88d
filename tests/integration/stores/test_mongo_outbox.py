"""The outbox on MongoDB beyond the contract: documents from any language, migrations, wake-ups, unsuitable servers."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from datetime import UTC, datetime, timedelta
from typing import Any
from uuid import UUID, uuid4

import pytest
from bson.binary import Binary
from pymongo.errors import BulkWriteError, PyMongoError, WriteError

from outrider.brokers.base import CONFIRMED
from outrider.checks import Level
from outrider.errors import InvalidSetting, Transient, Unreachable, UsageError
from outrider.event import DeadLetterReason, Event, lane_of
from outrider.outbox.model import PARK, Criteria, DeadLettered, Outcome, Retry, Settlement, Settlements
from outrider.stores.mongo import MongoSchema, MongoStore, checks, outbox_fetch, schema
from outrider.stores.mongo import outbox as storing
from outrider.stores.mongo.database import MongoDatabase, RetryBudget, transact
from outrider.stores.mongo.schema import TEXT_BYTES_MAX
from outrider.testing import ManualClock
from outrider.testing.harness import order, orders
from outrider.testing.servers.mongo import MongoServer
from tests.support.mongo_outbox import fetched, staged
from tests.support.running_relay import relaying_without_polls

pytestmark = pytest.mark.mongo


@pytest.fixture
async def store(mongo_url: str, mongo_schema: str) -> AsyncIterator[MongoStore]:
    store = await MongoStore.open(mongo_url, schema=mongo_schema)
    yield store
    await store.close()


def foreign(**fields: Any) -> dict[str, Any]:
    return {"_id": uuid4(), "event_type": "order.placed", "payload": '{"id": 1}', **fields}


async def test_a_document_with_only_what_is_required_is_fetched(store: MongoStore) -> None:
    document = foreign()
    await store.database["outbox"].insert_one(document)
    _, [settlement] = await fetched(store, "relay")
    event = settlement.event
    assert (event.event_id, event.payload, event.headers) == (document["_id"], b'{"id": 1}', b"{}")
    assert event.lane == lane_of(str(document["_id"]), 5, 32)
    assert settlement.stream.topic == "events.order.placed"
    assert abs(datetime.now(UTC) - event.created_at) < timedelta(minutes=1)


async def test_documents_of_one_key_keep_the_order_they_came_in(
    store: MongoStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    for module in (outbox_fetch, storing):
        monkeypatch.setattr(module, "FILL_MAX", 3)
    rows = [foreign(aggregate_id="A", payload=f'{{"n": {number}}}') for number in range(8)]
    await store.database["outbox"].insert_many(rows)
    _, settlements = await fetched(store, "relay")
    assert [s.event.event_id for s in settlements] == [row["_id"] for row in rows]


class BusyStore(MongoStore):
    """A store to which others write all the time: there is more whenever something was filled in."""

    async def _fill(self) -> None:
        await super()._fill()
        await self.database["outbox"].insert_one(foreign(key="A", payload="2"))


async def test_who_never_stops_writing_stops_no_fetch(mongo_url: str, mongo_schema: str) -> None:
    store = await BusyStore.open(mongo_url, schema=mongo_schema)
    await staged(store, Event("order.placed", 0, key="A"))
    await store.database["outbox"].insert_one(foreign(key="A", payload="1"))
    async with asyncio.timeout(20):
        lease, settlements = await fetched(store, "relay")
        assert [settlement.event.payload for settlement in settlements] == [b"0", b"1"]
        again = await store.fetch(lease, dict.fromkeys(lease.epochs, 10))
    assert [event.payload for event in again.events] == [b"0", b"1", b"2"]
    await store.close()


async def test_what_a_writer_said_is_kept(store: MongoStore) -> None:
    at = datetime(2030, 1, 1, tzinfo=UTC)
    said = {
        "headers": '{"tenant": "blue"}',
        "topic": "orders",
        "key": "K",
        "priority": 8,
        "saga_id": "s",
        "sequence": 7,
    }
    await store.database["outbox"].insert_one(foreign(**said, created_at=at, available_at=at, routing_key=None))
    _, [settlement] = await fetched(store, "relay")
    event = settlement.event
    assert (event.headers, event.topic, event.key) == (b'{"tenant": "blue"}', "orders", "K")
    assert (event.saga_id, event.sequence, event.created_at, event.available_at) == ("s", 7, at, at)
    assert event.lane == lane_of("K", 8, 32)


NOT_JSON = [{"payload": "{"}, {"payload": "[" * 100_000}, {"headers": "[]"}, {"retry": "x"}]


@pytest.mark.parametrize("bad", NOT_JSON, ids=lambda bad: next(iter(bad)))
async def test_a_text_that_is_not_json_is_dead_lettered_and_stops_no_other_event(
    store: MongoStore, bad: dict[str, str]
) -> None:
    document = foreign(aggregate_id="A", **bad)
    await store.database["outbox"].insert_many([document, foreign(aggregate_id="A")])
    _, settlements = await fetched(store, "relay")
    assert len(settlements) == 1
    [dead] = await store.admin.dead_letters(Criteria())
    assert (dead["event_id"], dead["reason"], dead["policy"]) == (document["_id"], "schema_validation_failed", "skip")
    assert dead["failure"]["error"].startswith(next(iter(bad)))
    assert dead["payload"] == document["payload"]
    assert await store.admin.replay([document["_id"]], "me") == 1
    assert (await store.admin.event(document["_id"]))["payload"] == document["payload"]


async def test_an_id_that_comes_again_with_a_text_that_is_not_json_replaces_its_dead_letter(store: MongoStore) -> None:
    document = foreign(payload="{")
    for text in ("{", "["):
        await store.database["outbox"].insert_one({**document, "payload": text})
        assert (await fetched(store, "relay"))[1] == []
    [dead] = await store.admin.dead_letters(Criteria())
    assert (dead["event_id"], dead["payload"]) == (document["_id"], "[")


async def test_of_a_text_that_is_not_json_as_much_is_kept_as_a_document_holds(store: MongoStore) -> None:
    large = "\x01" * 10_000_000
    await store.database["outbox"].insert_many([foreign(payload=large), foreign()])
    assert len((await fetched(store, "relay"))[1]) == 1
    [dead] = await store.admin.dead_letters(Criteria())
    assert dead["payload"] == large[: outbox_fetch.KEPT_MAX]


async def test_a_document_of_any_size_that_is_taken_can_be_settled_in_every_way(store: MongoStore) -> None:
    key, most = "\N{SNOWMAN}" * 1_000, "x" * (TEXT_BYTES_MAX - 100)
    large = foreign(payload=f'"{most}"', key=key, topic=key, event_type=key, aggregate_id=key)
    with pytest.raises(WriteError, match="validation"):
        await store.database["outbox"].insert_one({**large, "payload": f'"{most}{"y" * 100}"'})
    await store.database["outbox"].insert_one(large)
    lease, [settlement] = await fetched(store, "relay")
    failure = {"kind": "nacked", "error": "x" * 10_000}
    for outcome in (Retry(0, failure), PARK, DeadLettered(DeadLetterReason.BY_HAND, failure)):
        assert await store.settle(lease, Settlements.of([settlement._replace(outcome=outcome)])) == 1
    await store.admin.replay([large["_id"]], "me")
    assert await store.settle(lease, Settlements.of([settlement])) == 1
    assert await store.admin.counts() == {"sent": 1, "dead_letter": 0}


async def test_a_document_can_be_seen_and_dead_lettered_before_a_relay_has_met_it(store: MongoStore) -> None:
    document = foreign(key="K")
    await store.database["outbox"].insert_one(document)
    [seen] = await store.admin.events(Criteria(key="K", state="pending"))
    assert (seen["event_id"], seen["state"]) == (document["_id"], "pending")
    assert await store.admin.counts() == {"pending": 1, "sent": 0, "dead_letter": 0}
    assert await store.admin.topics(5) == ["events.order.placed"]
    assert await store.admin.dead_letter(document["_id"], "me", {"error": "no"}, "block")
    assert (await store.admin.event(document["_id"]))["state"] == "dead_letter"


MET: dict[str, Any] = {
    **{
        "lane": 3,
        "fetchable": 3,
        "position": 7,
        "attempts": 0,
        "schema_version": 1,
        "stream_key": "A",
        "headers": "{}",
    },
    **{"state": "pending", "created_at": datetime(2030, 1, 1, tzinfo=UTC)},
}
UNREADABLE: list[dict[str, Any]] = [
    {"_id": "text"},
    {"_id": Binary(b"0" * 16, 0)},
    {"_id": Binary(b"0" * 16, 3)},
    {"_id": Binary(b"0" * 15, 0)},
    {"event_type": ""},
    {"event_type": 7},
    {"payload": {"id": 1}},
    {"payload": None},
    {"headers": {"tenant": "blue"}},
    {"priority": 10},
    {"priority": 5.5},
    {"state": "sent"},
    {"created_at": "2030-01-01"},
    {"created_at": datetime(1, 1, 1, tzinfo=UTC)},
    {"available_at": datetime(9999, 1, 1, tzinfo=UTC)},
    {"key": "k" * 1001},
    {"colour": "blue"},
    {"lane": 3},
    {"position": 7},
    {**MET, "headers": None},
    {**MET, "state": None},
    {**MET, "created_at": None},
    {**MET, "state": "optimistic"},
    *({**MET, "state": "failed", "fetchable": None, "waiting": 3, "topic": topic} for topic in (None, "")),
    {name: value for name, value in MET.items() if name != "fetchable"},
]


@pytest.mark.parametrize("bad", UNREADABLE, ids=str)
async def test_the_server_rejects_documents_that_a_relay_could_not_read(store: MongoStore, bad: dict[str, Any]) -> None:
    with pytest.raises(WriteError, match="validation"):
        await store.database["outbox"].insert_one({**foreign(), **bad})
    with pytest.raises(BulkWriteError):
        await store.database["outbox"].insert_many([{**foreign(), **bad}])


async def test_a_document_with_all_that_belongs_to_a_lane_is_taken_as_it_is(store: MongoStore) -> None:
    await store.database["outbox"].insert_one(foreign(**MET))
    _, [settlement] = await fetched(store, "relay")
    assert (settlement.stream.lane, settlement.event.position) == (3, 7)


async def test_an_event_is_never_due_early_by_rounding(mongo_url: str, mongo_schema: str) -> None:
    clock = ManualClock()
    store = await MongoStore.open(mongo_url, schema=mongo_schema, clock=clock)
    due = clock.now() + timedelta(microseconds=1_500)
    await staged(store, order(1, available_at=due))
    _, [settlement] = await fetched(store, "relay")
    assert settlement.event.available_at == clock.now() + timedelta(milliseconds=2)
    assert settlement.event.readiness == "early"
    await store.close()


async def test_a_priority_and_a_failure_survive_a_delivery_after_a_retry(store: MongoStore) -> None:
    [event_id] = await staged(store, order(1, priority=9))
    await store.database["outbox"].update_one({"_id": event_id}, {"$set": {"failure": '{"kind": "nacked"}'}})
    lease, [settlement] = await fetched(store, "relay")
    assert await store.settle(lease, Settlements.of([Settlement(settlement.event, settlement.stream, CONFIRMED)])) == 1
    sent = await store.admin.event(event_id)
    assert (sent["priority"], sent["failure"], sent["state"]) == (9, {"kind": "nacked"}, "sent")


async def test_a_commit_wakes_a_listener(store: MongoStore) -> None:
    woken = asyncio.Event()
    async with store.listen(woken.set), asyncio.timeout(20):
        # The first call says that the stream is open.
        await woken.wait()
        for number in range(3):
            woken.clear()
            await staged(store, order(number))
            await woken.wait()


class OneFill(MongoStore):
    """Counts the workers that fill in documents at the same time."""

    filling = at_once = 0

    async def _fill(self) -> None:
        self.filling += 1
        self.at_once = max(self.at_once, self.filling)
        await super()._fill()
        self.filling -= 1


async def test_foreign_documents_are_found_without_a_poll_and_filled_in_by_one_worker_at_a_time(
    mongo_url: str, mongo_schema: str
) -> None:
    store = await OneFill.open(mongo_url, schema=mongo_schema)
    found: list[UUID] = []
    async with relaying_without_polls(store) as confirmed:
        for number in range(4):
            document = foreign(key=f"A-{number}")
            found.append(document["_id"])
            async with store.database.client.start_session() as session, await session.start_transaction():
                await store.database["outbox"].insert_one(document, session=session)
                await confirmed(*found[:-1])
            await confirmed(*found)
    assert isinstance(store, OneFill)
    assert store.at_once == 1
    await store.close()


async def test_listening_survives_a_lost_change_stream(store: MongoStore) -> None:
    admin = store.database.client.admin
    woken = asyncio.Event()
    lost = {"failCommands": ["getMore"], "errorCode": 280, "appName": "outrider"}
    async with store.listen(woken.set), asyncio.timeout(30):
        await woken.wait()
        woken.clear()
        await admin.command({"configureFailPoint": "failCommand", "mode": {"times": 1}, "data": lost})
        await staged(store, order(1))
        await woken.wait()
    await admin.command({"configureFailPoint": "failCommand", "mode": "off"})


async def test_interrupted_migrations_continue_and_run_once(mongo_url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    made, name = MongoSchema(mongo_url, schema=f"test_{uuid4().hex[:12]}", lanes=4), ""
    planned = await made.plan()
    name = planned[5].name
    real = schema._make

    async def failing(database: MongoDatabase, command: dict[str, Any]) -> None:
        await real(database, command)
        if name in str(command):
            raise Unreachable("gone, after the command and before its record")

    monkeypatch.setattr(schema, "_make", failing)
    with pytest.raises(Unreachable):
        await made.migrate()
    assert (await made.status())[0].state == "partial"
    monkeypatch.setattr(schema, "_make", real)
    assert len(await made.migrate()) == len(planned) - 5
    assert await made.migrate() == []
    assert {progress.state for progress in await made.status()} == {"applied"}
    store = await MongoStore.open(mongo_url, schema=made.schema)
    assert (store.lanes, await store.database["outbox_lane"].count_documents({})) == (4, 12)
    await store.database.client.drop_database(made.schema)
    await store.close()


async def test_two_migrators_at_once_do_each_other_no_harm(mongo_url: str) -> None:
    name = f"test_{uuid4().hex[:12]}"
    migrations = (MongoSchema(mongo_url, schema=name, lanes=lanes).migrate() for lanes in (2, 3, 4))
    # A migrator that wants another number than the first is rejected.
    done = await asyncio.gather(*migrations, return_exceptions=True)
    assert all(isinstance(result, UsageError | list) for result in done)
    store = await MongoStore.open(mongo_url, schema=name)
    assert await store.database["outbox_lane"].count_documents({}) == store.lanes * 3
    await store.database.client.drop_database(name)
    await store.close()


async def test_a_migration_whose_text_has_changed_is_rejected(mongo_url: str) -> None:
    name = f"test_{uuid4().hex[:12]}"
    await MongoSchema(mongo_url, schema=name).migrate()
    database = await MongoDatabase.open(mongo_url, name)
    await database["outrider_migration"].update_one({"_id.step": "outbox"}, {"$set": {"checksum": "other"}})
    with pytest.raises(UsageError, match="another text"):
        await MongoSchema(mongo_url, schema=name).plan()
    await database.client.drop_database(name)
    await database.close()


async def test_a_database_without_an_outbox_is_reported_with_the_remedy(mongo_url: str) -> None:
    with pytest.raises(UsageError, match="outrider db migrate"):
        await MongoStore.open(mongo_url, schema="absent")
    with pytest.raises(InvalidSetting, match="lanes"):
        MongoSchema(mongo_url, lanes=0)


async def test_a_server_that_does_not_answer_is_unreachable() -> None:
    with pytest.raises(Unreachable, match=r"127\.0\.0\.1:1 does not answer"):
        await MongoStore.open("mongodb://user:secret@127.0.0.1:1/?serverSelectionTimeoutMS=50")


async def test_a_server_in_no_replica_set_is_rejected() -> None:
    with MongoServer(standalone=True) as server:
        for opening in (
            MongoStore.open(server.url),
            MongoSchema(server.url).migrate(),
            MongoSchema(server.url).status(),
        ):
            with pytest.raises(UsageError, match=r"--replSet and run rs\.initiate\(\)"):
                await opening


async def test_a_transaction_is_run_again_while_it_loses_and_given_up_in_time(store: MongoStore) -> None:
    database, runs = store.database, []

    async def run_once(session: Any) -> int:
        runs.append(1)
        await database["outbox_lane"].update_one({"_id": 1}, {"$inc": {"turn": 1}}, session=session)
        return len(runs)

    failing = {"failCommands": ["update"], "errorCode": 112, "errorLabels": ["TransientTransactionError"]}
    await _failing(database, {"times": 3}, failing)
    assert await database.transaction(run_once) == 4
    await _failing(database, "alwaysOn", failing)
    async with database.session() as session:
        with pytest.raises(PyMongoError, match="failpoint") as lost:
            await transact(session, lambda: run_once(session), RetryBudget(0.05))
    assert lost.value.has_error_label("TransientTransactionError")
    await _failing(database, "off", {})


async def test_an_unknown_commit_is_committed_again_and_counts_once(store: MongoStore) -> None:
    database, runs = store.database, []

    async def run_once(session: Any) -> None:
        runs.append(1)
        await database["outbox_lane"].update_one({"_id": 1}, {"$inc": {"turn": 1}}, session=session)

    # The commit is done, and the answer says that a majority may not have it.
    unknown = {"failCommands": ["commitTransaction"], "writeConcernError": {"code": 64, "errmsg": "too slow"}}
    await _failing(database, {"times": 3}, unknown)
    await database.transaction(run_once)
    await _failing(database, "off", {})
    assert runs == [1]
    assert (await database["outbox_lane"].find_one({"_id": 1}) or {})["turn"] == 1


async def test_a_temporary_error_is_transient_and_a_missing_right_names_the_remedy(store: MongoStore) -> None:
    for code, kind in ((50, Transient), (189, Unreachable), (13, UsageError)):
        await _failing(store.database, {"times": 5}, {"failCommands": ["find", "aggregate"], "errorCode": code})
        with pytest.raises(kind, match="MongoDB at"):
            await store.admin.event(UUID(int=1))
        await _failing(store.database, "off", {})


async def _failing(database: MongoDatabase, mode: Any, data: dict[str, Any]) -> None:
    only = {**data, "appName": "outrider"} if data else data
    await database.client.admin.command({"configureFailPoint": "failCommand", "mode": mode, "data": only})


async def test_a_set_of_one_member_is_a_warning_and_everything_else_is_fine(store: MongoStore) -> None:
    found = {result.check: result for result in await store.check()}
    assert found.keys() == checks.CHECKS.keys()
    assert {check for check, result in found.items() if result.level is not Level.OK} == {"mongo-replica-set"}


async def test_dead_lettering_another_event_by_hand_does_not_unblock_a_stream(store: MongoStore) -> None:
    [first, second, third] = await staged(store, *orders(3))
    lease, settlements = await fetched(store, "relay")
    outcomes: list[Outcome] = [DeadLettered(DeadLetterReason.PERMANENT_FAILURE, {"error": "no"}), PARK, PARK]
    decided = [s._replace(outcome=outcome) for s, outcome in zip(settlements, outcomes, strict=True)]
    assert await store.settle(lease, Settlements.of(decided)) == 3
    assert await store.admin.dead_letter(second, "me", {"error": "no"}, "skip")
    [held] = await store.admin.blocked_streams(10)
    assert (held.cause, held.waiting) == ("dead_letter", 1)
    assert await store.admin.replay([first], "me") == 1
    lease = await store.claim("relay", [held.stream.lane])
    [due] = (await store.due(lease, 10)).streams
    assert (due.cause, [event.event_id for event in due.events]) == ("draining", [first, third])
