"""Query plans of MongoDB for sagas, most of them ended, as its profiler records them."""

from __future__ import annotations

from collections.abc import AsyncIterator
from datetime import UTC, datetime, timedelta
from typing import Any, NamedTuple
from uuid import UUID, uuid4

import pytest
from bson.int64 import Int64
from pymongo import AsyncMongoClient

from outrider.drivers import pymongo as driver
from outrider.saga.model import AuditEntry, JournalEntry, Phase, SagaChange, SagaCriteria, Status, StepStatus
from outrider.stores.mongo.database import CODEC
from outrider.stores.mongo.saga import MongoSagas
from outrider.stores.rows import AUDIT_FACTS
from outrider.testing.saga_harness import claim_of, new_saga, reply

pytestmark = pytest.mark.mongo

COUNT, MANY = 5_000, 20_000
PROFILE_BYTES = 32 * 2**20
ORDER = [("order", 1)]


class Done(NamedTuple):
    """The work of the server for one command."""

    collection: str
    plan: str
    documents: int


class Profiler:
    """Asks the server what it did for the store's own client."""

    def __init__(self, client: AsyncMongoClient[Any], schema: str) -> None:
        self._database = client[schema]

    async def forget(self) -> None:
        """Look away, and forget what was seen."""
        await self._database.command("profile", 0)
        await self._database.drop_collection("system.profile")

    async def begin(self) -> None:
        """Look on."""
        await self._database.create_collection("system.profile", capped=True, size=PROFILE_BYTES)
        await self._database.command("profile", 2)

    async def end(self) -> list[Done]:
        """Return what was done since, without what only inserts or reads on."""
        await self._database.command("profile", 0)
        ours = {"appName": "outrider", "op": {"$ne": "getmore"}, "docsExamined": {"$exists": True}}
        # The time is read from a collection of one document.
        ours["ns"] = {"$ne": f"{self._database.name}.outbox_meta"}
        rows = await self._database["system.profile"].find(ours).to_list()
        return [Done(row["ns"].partition(".")[2], row["planSummary"], row["docsExamined"]) for row in rows]


def _saga(number: int, now: datetime) -> dict[str, Any]:
    """In 100 sagas, 2 are due, 1 is owned, 10 have messages, 2 have an unknown definition; the rest ended."""
    due, foreign = number % 50 == 0, number % 50 == 9
    owned, waiting = number % 100 == 2, number % 10 == 3
    ended = not (due or foreign or owned or waiting)
    wake_at = now - timedelta(seconds=number) if due or foreign else now + timedelta(hours=1) if owned else None
    return {
        "_id": uuid4(),
        "saga_type": "other" if foreign else "order",
        "definition_version": 1,
        "correlation_id": f"A-{number}",
        "state": "{}",
        "status": "completed" if ended else "running",
        "version": 0,
        "retry_count": 0,
        "needs_attention": False,
        "started_at": now,
        "updated_at": now - timedelta(seconds=number),
        "ended_at": now - timedelta(minutes=number) if ended else None,
        "wake_at": wake_at,
        "owner": "ann" if owned else None,
        "epoch": 1,
        "losses": 0,
        "audit_lines": 1,
        "turns": 0,
        "notes": 1,
    }


def _message(number: int, saga: dict[str, Any], now: datetime) -> dict[str, Any]:
    unseen = number % 10 == 3 or number % 50 == 9
    return {
        "_id": {"saga_id": saga["_id"], "event_id": uuid4()},
        "saga_id": saga["_id"],
        "message_id": Int64(number),
        "kind": "reply",
        "name": "stock.reserved",
        "key": None,
        "body": "{}",
        "delivered_at": now,
        "saga_type": saga["saga_type"],
        "definition_version": 1,
        **({"unseen": True} if unseen else {}),
    }


async def _fill(database: Any, count: int) -> None:
    now = datetime.now(UTC)
    sagas = [_saga(number, now) for number in range(count)]
    ages = [now - timedelta(minutes=number) for number in range(count)]
    lines = [{"saga_id": saga["_id"], "step": "reserve", "phase": "action", "status": "done"} for saga in sagas]
    messages = [
        _message(number, saga, now) for number, saga in enumerate(sagas) if number % 50 < 10 or number % 10 == 3
    ]
    # Every second entry of the audit log is of a saga that is gone.
    facts: dict[str, Any] = dict.fromkeys(AUDIT_FACTS)
    gone = [sagas[n]["_id"] if n % 2 else uuid4() for n in range(count)]
    facts |= {"number": 1, "line": 1}
    audit_log = [{**facts, "saga_id": saga_id, "at": at} for saga_id, at in zip(gone, ages, strict=True)]
    keys = ({"participant": "stock", "key": str(number), "phase": "action"} for number in range(count))
    entries = [{"_id": key, "barred": False, "at": at} for key, at in zip(keys, ages, strict=True)]
    await database["saga_instance"].insert_many(sagas)
    await database["saga_step"].insert_many([{**line, "position": 1, "attempts": 1} for line in lines])
    await database["saga_mailbox"].insert_many(messages)
    await database["saga_audit_log"].insert_many(audit_log)
    await database["saga_barrier"].insert_many(entries)


@pytest.fixture
async def client(mongo_url: str) -> AsyncIterator[AsyncMongoClient[Any]]:
    async with AsyncMongoClient[Any](mongo_url) as client:
        yield client


@pytest.fixture
async def sagas(mongo_url: str, mongo_schema: str, client: AsyncMongoClient[Any]) -> AsyncIterator[MongoSagas]:
    await _fill(client.get_database(mongo_schema, codec_options=CODEC), COUNT)
    sagas = await MongoSagas.open(mongo_url, schema=mongo_schema)
    yield sagas
    await sagas.close()


@pytest.fixture
async def many_sagas(mongo_url: str, mongo_schema: str, client: AsyncMongoClient[Any]) -> AsyncIterator[MongoSagas]:
    """Enough sagas that pruning takes many steps."""
    await _fill(client.get_database(mongo_schema, codec_options=CODEC), MANY)
    sagas = await MongoSagas.open(mongo_url, schema=mongo_schema)
    yield sagas
    await sagas.close()


@pytest.fixture
async def profiler(client: AsyncMongoClient[Any], mongo_schema: str) -> AsyncIterator[Profiler]:
    profiler = Profiler(client, mongo_schema)
    yield profiler
    await profiler.forget()


def _check(done: list[Done], documents_max: int) -> None:
    """No command reads a whole collection, or more documents than what it is about."""
    assert done
    for one in done:
        assert "COLLSCAN" not in one.plan, one
        assert one.documents <= documents_max, one


async def test_a_claim_reads_what_it_takes_and_nothing_else(sagas: MongoSagas, profiler: Profiler) -> None:
    await profiler.begin()
    assert len(await sagas.claim("bob", ORDER, limit=64, lease_seconds=15)) == 64
    # The due sagas, four times as many messages, and the sagas of these.
    _check(await profiler.end(), 9 * 64)


async def test_a_worker_for_whom_there_is_nothing_asks_once_and_reads_nothing(
    sagas: MongoSagas, profiler: Profiler
) -> None:
    await profiler.begin()
    assert await sagas.claim("bob", [("order", 2), ("refund", 1)], limit=64, lease_seconds=15) == []
    [only] = await profiler.end()
    assert (only.documents, "COLLSCAN" in only.plan) == (0, False)


async def test_a_saga_is_found_behind_any_number_of_messages_for_owned_sagas(
    sagas: MongoSagas, client: AsyncMongoClient[Any], mongo_schema: str
) -> None:
    database = client.get_database(mongo_schema, codec_options=CODEC)
    await database["saga_instance"].update_many({"saga_type": "order", "wake_at": None}, {"$set": {"owner": "ann"}})
    async with sagas.transaction() as tx:
        assert await sagas.start(tx, new_saga("last"))
    later = {"$set": {"wake_at": datetime.now(UTC) + timedelta(hours=1)}}
    await database["saga_instance"].update_many({"saga_type": "order", "wake_at": {"$ne": None}}, later)
    async with sagas.transaction() as tx:
        assert await sagas.deliver(tx, [reply(new_saga("last").saga_id)]) == 1
    [record] = await sagas.claim("bob", ORDER, limit=2, lease_seconds=15)
    assert record.instance.correlation_id == "last"


async def test_renewing_reads_what_is_claimed_and_nothing_else(sagas: MongoSagas, profiler: Profiler) -> None:
    claims = [claim_of(record) for record in await sagas.claim("bob", ORDER, limit=64, lease_seconds=15)]
    await profiler.begin()
    assert len(await sagas.renew(claims, 15)) == 64
    _check(await profiler.end(), 64)


async def test_a_turn_reads_what_it_is_about_and_nothing_else(
    sagas: MongoSagas, profiler: Profiler, mongo_schema: str
) -> None:
    records = await sagas.claim("bob", ORDER, limit=64, lease_seconds=15)
    record = next(record for record in records if record.messages)
    entries = [JournalEntry(f"step{n}", Phase.ACTION, StepStatus.DONE, n) for n in range(5)]
    note = AuditEntry(Status.RUNNING, Status.RUNNING, None, "started", "bob")
    numbers = [message.message_id for message in record.messages]
    await profiler.begin()
    for taken, seen in (([], numbers), (numbers, [])):
        async with sagas.transaction() as tx:
            loaded = await sagas.load(tx, record.instance.saga_id)
            assert loaded is not None
            turn = SagaChange(loaded.instance, entries=entries, notes=[note], taken=taken, seen=seen)
            await sagas.save(tx, claim_of(record), turn, 15)
    async with sagas.transaction() as tx:
        assert await sagas.start(tx, new_saga("new"))
        assert await sagas.deliver(tx, [reply(new_saga("new").saga_id), reply(record.instance.saga_id)]) == 2
        assert (
            await driver.run(tx.session, "participant_enter", ("stock", "k", Phase.COMPENSATION), mongo_schema)
        ).barred
        await driver.run(tx.session, "participant_save_reply", ("stock", "k", Phase.COMPENSATION, b"{}"), mongo_schema)
    _check(await profiler.end(), 6)


async def test_a_person_who_names_a_saga_is_answered_from_an_index(sagas: MongoSagas, profiler: Profiler) -> None:
    [saga] = await sagas.admin.find(SagaCriteria(saga_type="order", correlation_id="A-5"))
    await profiler.begin()
    await sagas.admin.find(SagaCriteria(saga_type="order", correlation_id="A-5"))
    await sagas.admin.find(SagaCriteria(ids=(saga.saga_id,)))
    await sagas.admin.show(saga.saga_id)
    await sagas.admin.audit(saga.saga_id)
    _check(await profiler.end(), 1)


async def test_pruning_reads_the_oldest_and_nothing_else(many_sagas: MongoSagas, profiler: Profiler) -> None:
    await profiler.begin()
    pruned = await many_sagas.prune(saga_days=13, audit_days=0.1, participant_memory_days=13)
    done = await profiler.end()
    assert pruned.sagas > 1_000
    assert (pruned.notes > 400, pruned.participants > 1_000) == (True, True)
    # 13 of nearly 14 days stay. Entries of the audit log are read with their sagas, and unseen messages are all read.
    _check(done, 4_800)
    largest = {name: max(one.documents for one in done if one.collection == name) for name, *_ in done}
    assert largest["saga_instance"] <= 200
    assert largest["saga_barrier"] == 1_000


async def test_children_are_found_by_their_parent(many_sagas: MongoSagas, profiler: Profiler) -> None:
    await profiler.begin()
    assert await many_sagas.admin.find(SagaCriteria(parent_id=uuid4())) == []
    [found] = [one for one in await profiler.end() if one.collection == "saga_instance"]
    assert (found.plan, found.documents) == ("IXSCAN { parent_id: 1 }", 0)


async def test_a_saga_that_somebody_writes_keeps_no_other_from_being_pruned(
    many_sagas: MongoSagas, profiler: Profiler, client: AsyncMongoClient[Any], mongo_schema: str
) -> None:
    """It is among the first, so these are removed in parts; no part looks through all that is old."""
    instances = client.get_database(mongo_schema, codec_options=CODEC)["saga_instance"]
    oldest = await instances.find({"ended_at": {"$ne": None}}).sort("ended_at").limit(1).to_list()
    locked: UUID = oldest[0]["_id"]
    await profiler.begin()
    async with many_sagas.transaction() as tx:
        assert await many_sagas.load(tx, locked, for_update=True)
        pruned = await many_sagas.prune(saga_days=1, audit_days=365, participant_memory_days=365)
    reads = [one for one in await profiler.end() if one.collection == "saga_instance"]
    assert pruned.sagas > 10_000
    _check(reads, 200)
    assert await many_sagas.admin.show(locked) is not None
