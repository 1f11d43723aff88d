"""Query plans of MongoDB: every operation of a relay uses an index, and reads no more than it needs."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator
from datetime import UTC, datetime
from typing import Any
from uuid import uuid4

import pytest
from pymongo import MongoClient

from outrider.event import Stream, lane_of
from outrider.stores.mongo import MongoSchema, MongoStore, outbox_fetch, outbox_settle
from outrider.stores.mongo.documents import UNMET, inserted, stream_id
from outrider.stores.mongo.outbox_admin import blocked_pipeline
from outrider.stores.mongo.staging import leap
from tests.support.mongo_outbox import each, explained

pytestmark = pytest.mark.mongo

PARKED = 40_000
NEIGHBOURS = 2_000
BUSY = Stream(lane_of("busy", 5, 32), "orders", "busy")


@pytest.fixture(scope="module")
def crowded(mongo_url: str) -> Iterator[str]:
    """A database with a stream that has a long queue behind its head, others that may go, and many that wait."""
    name = f"test_{uuid4().hex[:12]}"
    asyncio.run(MongoSchema(mongo_url, schema=name).migrate())
    waiting = [_document("busy", number) for number in range(PARKED)]
    for document in waiting:
        del document["fetchable"]
        document |= {"state": "parked", "waiting": document["lane"]}
    blocked = [BUSY, *(Stream(number % 96, "other", f"b{number}") for number in range(5_000))]
    client: MongoClient[Any] = MongoClient(mongo_url, uuidRepresentation="standard")
    with client:
        client[name]["outbox"].insert_many([*waiting, *(_document(f"k{n % 500}", n) for n in range(NEIGHBOURS))])
        client[name]["outbox_blocked"].insert_many(_blocked(stream) for stream in blocked)
        yield name
        client.drop_database(name)


@pytest.fixture
async def store(mongo_url: str, crowded: str) -> AsyncIterator[MongoStore]:
    store = await MongoStore.open(mongo_url, schema=crowded)
    yield store
    await store.close()


def _blocked(stream: Stream) -> dict[str, Any]:
    now = datetime.now(UTC)
    return {"_id": stream_id(stream), "lane": stream.lane, "cause": "draining", "head": None, "until": now}


def _document(key: str, position: int) -> dict[str, Any]:
    fields = {"event_type": "order.changed", "payload": "{}", "headers": "{}", "topic": "orders", "stream_key": key}
    numbers = {"schema_version": 1, "attempts": 0, "priority": 5}
    return {
        "_id": uuid4(),
        **fields,
        **numbers,
        "created_at": datetime.now(UTC),
        **inserted(lane_of(key, 5, 32), position),
    }


def _indexes(plan: Any) -> set[str]:
    named = each(plan, lambda part: part.get("indexName"))
    used = each(plan, lambda part: part.get("indexesUsed"))
    return {*named, *(name for names in used for name in names)}


def _scanned(plan: Any) -> bool:
    whole = each(plan, lambda part: True if part.get("stage") == "COLLSCAN" else None)
    return bool(whole) or any(each(plan, lambda part: part.get("collectionScans")))


def _keys(plan: Any) -> int:
    return max(each(plan, lambda part: part.get("totalKeysExamined")), default=0)


async def _plan(store: MongoStore, name: str, pipeline: list[Any]) -> Any:
    return await explained(store.database.client, store.database.schema, name, pipeline)


@pytest.mark.parametrize(
    ("name", "field", "index"),
    [("outbox", "fetchable", "outbox_fetchable"), ("outbox_blocked", "lane", "outbox_blocked_lane")],
)
async def test_the_first_look_leaps_from_lane_to_lane(store: MongoStore, name: str, field: str, index: str) -> None:
    plan = await _plan(store, name, leap(field, range(96)))
    assert "DISTINCT_SCAN" in each(plan, lambda part: part.get("stage"))
    assert _indexes(plan) == {index}
    assert _keys(plan) <= 2 * 96


async def test_documents_that_no_relay_has_met_are_detected_with_one_index_key(store: MongoStore) -> None:
    plan = await _plan(store, "outbox", [{"$match": UNMET}, {"$limit": 1}])
    assert _indexes(plan) == {"outbox_position"}
    assert _keys(plan) <= 1


async def test_a_fetch_reads_the_start_of_each_lane_and_nothing_that_waits(store: MongoStore) -> None:
    lanes = range(32, 64)
    plan = await _plan(store, "outbox", outbox_fetch.events_pipeline(lanes, dict.fromkeys(lanes, 5)))
    assert not _scanned(plan)
    assert _indexes(plan) == {"outbox_fetchable"}
    assert "SORT" not in each(plan, lambda part: part.get("stage"))
    assert sum(each(plan, lambda part: part.get("totalKeysExamined"))) <= 5 * len(lanes)


async def test_due_streams_are_read_by_their_time(store: MongoStore) -> None:
    plan = await _plan(store, "outbox_blocked", outbox_fetch.due_pipeline(range(96), 100))
    assert _indexes(plan) == {"outbox_blocked_due"}
    assert _keys(plan) <= 102
    assert "SORT" not in each(plan, lambda part: part.get("stage"))


@pytest.mark.parametrize("limit", [1, 50])
async def test_the_first_of_40_000_waiting_events_are_found_at_once(store: MongoStore, limit: int) -> None:
    pipeline = outbox_fetch.waiting_pipeline([stream_id(BUSY)], limit)
    assert list(pipeline[2]) == ["$unwind"]
    # The server counts nothing for a lookup that it unwinds at once.
    plan = await _plan(store, "outbox_blocked", pipeline[:2])
    assert not _scanned(plan)
    assert _indexes(plan) == {"_id_", "outbox_waiting"}
    assert _keys(plan) <= limit + 1


async def test_a_waiting_event_of_a_stream_is_detected_with_one_index_key(store: MongoStore) -> None:
    plan = await _plan(store, "outbox_blocked", outbox_settle.maybe_empty_pipeline([stream_id(BUSY)]))
    assert not _scanned(plan)
    assert _indexes(plan) == {"_id_", "outbox_waiting"}
    assert _keys(plan) <= 2


async def test_waiting_events_are_counted_in_their_index(store: MongoStore) -> None:
    plan = await _plan(store, "outbox_blocked", blocked_pipeline(10))
    assert "outbox_waiting" in _indexes(plan)


@pytest.mark.parametrize(
    ("name", "order", "index"),
    [
        ("outbox", {"position": 1}, "outbox_position"),
        ("outbox_archive", {"sent_at": -1}, "outbox_archive_sent"),
        ("outbox_dead_letter", {"position": 1}, "outbox_dead_letter_position"),
    ],
)
async def test_lists_for_people_go_by_an_index(store: MongoStore, name: str, order: dict[str, int], index: str) -> None:
    plan = await _plan(store, name, [{"$sort": order}, {"$limit": 50}])
    assert _indexes(plan) == {index}
    assert "SORT" not in each(plan, lambda part: part.get("stage"))


@pytest.mark.parametrize(
    ("name", "age", "only", "index"),
    [
        ("outbox_archive", "sent_at", {}, "outbox_archive_sent"),
        ("outbox_dead_letter", "dead_lettered_at", {"policy": "skip"}, "outbox_dead_letter_skipped"),
        ("outbox_operation", "at", {}, "outbox_operation_at"),
        ("outbox_counter", "used", {}, "outbox_counter_used"),
    ],
)
async def test_what_is_old_is_found_by_its_age(
    store: MongoStore, name: str, age: str, only: dict[str, Any], index: str
) -> None:
    old = {age: {"$lt": datetime.now(UTC)}, **only}
    plan = await _plan(store, name, [{"$match": old}, {"$sort": {age: 1}}, {"$limit": 1_000}])
    assert _indexes(plan) == {index}
