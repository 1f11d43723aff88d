"""The store contract on MongoDB."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from functools import partial
from typing import Any, TypeVar
from uuid import UUID

import pytest
from pymongo import AsyncMongoClient

from outrider.drivers.pymongo import OPERATIONS
from outrider.stores.mongo import MongoStore, staging
from outrider.testing import ManualClock
from outrider.testing.contracts import StoreContract
from outrider.testing.harness import Harness

T = TypeVar("T")


class MongoHarness(Harness):
    """Sessions of the application's own client."""

    savepoints = False

    def __init__(self, store: MongoStore, clock: ManualClock, client: AsyncMongoClient[Any]) -> None:
        super().__init__(store, clock)
        self._client = client

    @asynccontextmanager
    async def transaction(self) -> AsyncIterator[Any]:
        async with self._client.start_session() as session, await session.start_transaction():
            yield session

    async def transact(self, work: Callable[[Any], Awaitable[T]]) -> T:
        async with self._client.start_session() as session:
            return await session.with_transaction(work)

    def savepoint(self, conn: Any) -> AbstractAsyncContextManager[Any]:
        raise NotImplementedError("MongoDB has no savepoints")

    async def insert(self, event_id: UUID, event_type: str, payload: str, key: str, attempts: int = 0) -> None:
        assert isinstance(self.store, MongoStore)
        document = {"_id": event_id, "event_type": event_type, "payload": payload, "aggregate_id": key}
        document |= {"attempts": attempts} if attempts else {}
        await self.store.database["outbox"].insert_one(document)

    async def remove(self, place: str, event_id: UUID, *, kind: str | None = None) -> None:
        assert isinstance(self.store, MongoStore)
        name = {"dead_letters": "outbox_dead_letter", "outbox": "outbox"}.get(place, f"outbox_{place}")
        chosen: dict[str, Any] = {"event_id": event_id} if place == "journal" else {"_id": event_id}
        chosen |= {} if kind is None else {"kind": kind}
        assert (await self.store.database[name].delete_many(chosen)).deleted_count


@pytest.mark.mongo
class TestMongoStore(StoreContract):
    # There are none in MongoDB.
    test_a_savepoint_rolled_back_takes_only_its_own_events = None  # type: ignore[assignment]

    @pytest.fixture
    async def harness(self, mongo_default: str, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Harness]:
        clock = ManualClock()
        # Staging asks the server what time it is, and here the server's time is the test's.
        monkeypatch.setitem(OPERATIONS, "stage", partial(staging.stage, clock=clock))
        store = await MongoStore.open(mongo_default, clock=clock)
        client: AsyncMongoClient[Any] = AsyncMongoClient(mongo_default)
        async with client:
            yield MongoHarness(store, clock, client)
        await store.close()
