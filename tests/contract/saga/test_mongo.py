"""The saga contract on MongoDB, once through a client of its own and once through the application's."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from datetime import UTC, datetime
from functools import partial
from typing import Any

import pytest
from pymongo import AsyncMongoClient

from outrider.drivers import pymongo as driver
from outrider.drivers.pymongo import OPERATIONS
from outrider.saga.store import SagaStore
from outrider.stores.mongo.handler_transactions import MongoHandlerTransaction
from outrider.stores.mongo.outbox import MongoStore
from outrider.stores.mongo.saga import MongoSagas
from outrider.testing import ManualClock
from outrider.testing.contracts import ConcurrentSagaContract, SagaBench
from outrider.testing.contracts.saga_claims import ConcurrencyRules
from outrider.testing.contracts.saga_turns import HandlerTransactionRules
from outrider.testing.saga_harness import connection_of

pytestmark = pytest.mark.mongo


class MongoBench(SagaBench):
    """Two stores on one database."""

    driver = driver

    def __init__(
        self, store: MongoSagas, other: MongoSagas, clock: ManualClock, client: AsyncMongoClient[Any], url: str
    ) -> None:
        super().__init__(store, clock)
        self._other, self._client, self._url = other, client, url

    def other(self) -> SagaStore:
        return self._other

    def outside(self) -> AbstractAsyncContextManager[Any]:
        return self._client.start_session()

    @asynccontextmanager
    async def outbox(self) -> AsyncIterator[MongoStore]:
        store = await MongoStore.open(self._url, clock=self.clock)
        yield store
        await store.close()

    async def commit(self, tx: Any) -> None:
        await tx.commit_transaction()

    async def call_driver(self, verb: str, tx: Any, *args: Any) -> Any:
        """Call a function of the driver. MongoDB waits for no lock, so an application begins its transaction anew."""
        driving = partial(super().call_driver, verb, connection_of(tx), *args)
        return await (tx.run(lambda _: driving()) if isinstance(tx, MongoHandlerTransaction) else driving())


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> ManualClock:
    """A clock that the driver goes by as well."""
    clock = ManualClock(start=datetime.now(UTC))
    for verb in ("start_saga", "deliver_messages", "participant_enter"):
        monkeypatch.setitem(OPERATIONS, verb, partial(OPERATIONS[verb], clock=clock))
    return clock


@pytest.fixture
async def client(mongo_default: str) -> AsyncIterator[AsyncMongoClient[Any]]:
    """A client as an application has one."""
    async with AsyncMongoClient[Any](mongo_default) as client:
        yield client


class TestMongoSagas(ConcurrentSagaContract):
    @pytest.fixture
    async def bench(
        self, mongo_default: str, clock: ManualClock, client: AsyncMongoClient[Any]
    ) -> AsyncIterator[SagaBench]:
        store, other = [await MongoSagas.open(mongo_default, clock=clock) for _ in range(2)]
        yield MongoBench(store, other, clock, client, mongo_default)
        await store.close()
        await other.close()


class TestMongoSagasOverAClient(HandlerTransactionRules, ConcurrencyRules):
    """The rules about transactions: the client is the application's, and all else is the same code."""

    @pytest.fixture
    async def bench(self, mongo_default: str, clock: ManualClock, client: AsyncMongoClient[Any]) -> SagaBench:
        store, other = [MongoSagas.over(client, clock=clock) for _ in range(2)]
        return MongoBench(store, other, clock, client, mongo_default)
