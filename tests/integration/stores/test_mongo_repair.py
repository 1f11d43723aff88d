"""Repairs by maintenance in MongoDB: streams and events that were changed by hand."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any

import pytest

from outrider.brokers.base import CONFIRMED
from outrider.event import DeadLetterReason, Event
from outrider.outbox.model import PARK, Criteria, DeadLettered, Lease, Retention, Settlements
from outrider.stores.mongo import MongoStore
from outrider.stores.mongo.outbox_admin import blocked_without_dead_letter, orphans
from outrider.testing.harness import order, orders
from tests.support.mongo_outbox import each, explained, fetched, staged

pytestmark = pytest.mark.mongo


@pytest.fixture
async def store(mongo_url: str, mongo_schema: str) -> AsyncIterator[MongoStore]:
    store = await MongoStore.open(mongo_url, schema=mongo_schema)
    yield store
    await store.close()


async def _due(store: MongoStore, lease: Lease) -> list[Any]:
    found = await store.due(lease, 10)
    return [event.event_id for stream in found.streams for event in stream.events]


async def test_a_stream_blocked_by_a_dead_letter_that_is_gone_goes_on(store: MongoStore) -> None:
    ids = await staged(store, *orders(2), *orders(2, "B"))
    lease, settlements = await fetched(store, "relay", PARK)
    rejected = {ids[0], ids[2]}
    await store.settle(
        lease,
        Settlements.of(
            [
                settlement._replace(outcome=DeadLettered(DeadLetterReason.BY_HAND, {}))
                if settlement.event.event_id in rejected
                else settlement
                for settlement in settlements
            ]
        ),
    )
    assert await _due(store, lease) == []
    await store.database["outbox_dead_letter"].delete_one({"_id": ids[0]})
    await store.maintenance.prune(Retention())
    # The other one is still held for a reason.
    assert await _due(store, lease) == [ids[1]]


async def test_waiting_events_whose_stream_is_not_blocked_are_found_again(store: MongoStore) -> None:
    ids = await staged(store, *orders(2))
    lease, settlements = await fetched(store, "relay", PARK)
    await store.settle(lease, Settlements.of(settlements))
    await store.database["outbox_blocked"].delete_many({})
    assert await _due(store, lease) == []
    await store.maintenance.prune(Retention())
    assert await _due(store, lease) == ids
    found = (await store.due(lease, 10)).streams
    rest = [settlement._replace(outcome=CONFIRMED) for settlement in settlements]
    assert await store.settle(lease, Settlements.of(rest, [stream.stream for stream in found])) == 2
    assert await store.database["outbox_blocked"].count_documents({}) == 0


async def test_rows_to_repair_are_found_by_indexes(store: MongoStore) -> None:
    client, schema = store.database.client, store.database.schema
    await staged(store, *orders(2))
    lease, settlements = await fetched(store, "relay", PARK)
    await store.settle(lease, Settlements.of(settlements))
    plan = await explained(client, schema, "outbox", orphans())
    assert "outbox_waiting" in each(plan, lambda part: part.get("indexName"))
    assert "FETCH" not in each(plan, lambda part: part.get("stage"))
    plan = await explained(client, schema, "outbox_blocked", blocked_without_dead_letter())
    assert not any(each(plan, lambda part: part.get("collectionScans")))


async def test_the_archive_keeps_the_key_and_the_priority_that_were_given(store: MongoStore) -> None:
    [first, second] = await staged(
        store, Event("a", 1, aggregate_id="A", key="K", priority=9), order(1, "B", priority=4)
    )
    lease, settlements = await fetched(store, "relay")
    assert await store.settle(lease, Settlements([settlement.event for settlement in settlements])) == 2
    rows = {row["_id"]: row async for row in store.database["outbox_archive"].find()}
    assert (rows[first]["key"], rows[first]["stream_key"], rows[first]["priority"]) == ("K", "K", 9)
    assert ("key" in rows[second], rows[second]["stream_key"], rows[second]["priority"]) == (False, "B", 4)
    assert {"state", "fetchable"}.isdisjoint(rows[first])
    facts = {row["event_id"]: row["priority"] for row in await store.admin.events(Criteria(state="sent"))}
    assert facts == {first: 9, second: 4}
