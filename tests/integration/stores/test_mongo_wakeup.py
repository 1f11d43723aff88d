"""Change streams cost the server as much as it has to look through, so there is none while a relay has a backlog."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import pytest

from outrider.stores.mongo import MongoStore, wakeup
from outrider.testing.harness import order
from tests.support.mongo_outbox import staged

pytestmark = pytest.mark.mongo

PATIENCE_SECONDS = 20.0
CURSORS: list[dict[str, Any]] = [
    {"$currentOp": {"allUsers": True, "idleCursors": True}},
    {"$match": {"cursor.originatingCommand.pipeline.$changeStream": {"$exists": True}}},
]


@pytest.fixture
async def store(mongo_url: str, mongo_schema: str) -> AsyncIterator[MongoStore]:
    store = await MongoStore.open(mongo_url, schema=mongo_schema)
    yield store
    await store.close()


async def _streams(store: MongoStore) -> int:
    """Count the change streams on the outbox that the server has open."""
    found = await (await store.database.client.admin.aggregate(CURSORS)).to_list()
    return sum(1 for each in found if each["ns"] == f"{store.database.schema}.outbox")


async def _until(store: MongoStore, streams: int) -> None:
    clock = asyncio.get_running_loop()
    deadline = clock.time() + PATIENCE_SECONDS
    while (found := await _streams(store)) != streams:
        assert clock.time() < deadline, f"there are {found} change streams, not {streams}"
        await asyncio.sleep(0.05)


async def test_a_backlog_closes_the_stream_and_its_end_opens_it_again(
    store: MongoStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(wakeup, "BACKLOG_SECONDS", 3600.0)
    backlog, woken = wakeup.Backlog(), asyncio.Event()
    async with wakeup.listening(store.database, woken.set, backlog=backlog):
        await _until(store, 1)
        backlog.fetched(wakeup.BACKLOG_EVENTS - 1)
        assert backlog.seconds_left() == 0
        backlog.fetched(wakeup.BACKLOG_EVENTS)
        await _until(store, 0)

    over, woken = wakeup.Backlog(), asyncio.Event()
    monkeypatch.setattr(wakeup, "BACKLOG_SECONDS", 0.2)
    over.fetched(wakeup.BACKLOG_EVENTS)
    async with wakeup.listening(store.database, woken.set, backlog=over), asyncio.timeout(PATIENCE_SECONDS):
        await _until(store, 1)
        woken.clear()
        await staged(store, order(1))
        await woken.wait()
