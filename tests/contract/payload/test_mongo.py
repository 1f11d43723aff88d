"""The contract of payloads on MongoDB."""

from __future__ import annotations

from collections.abc import AsyncIterator
from datetime import UTC, datetime
from typing import Any

import pytest
from pymongo import AsyncMongoClient

from outrider.stores.mongo import MongoInbox, MongoPayloads, MongoSagas, MongoStore
from outrider.testing import ManualClock
from outrider.testing.contracts.payload import PayloadBench, PayloadContract
from tests.contract.outbox.test_mongo import MongoHarness


@pytest.mark.mongo
class TestMongoPayloads(PayloadContract):
    @pytest.fixture
    async def bench(self, mongo_default: str) -> AsyncIterator[PayloadBench]:
        clock = ManualClock(start=datetime.now(UTC))
        async with AsyncMongoClient[dict[str, Any]](mongo_default) as client:
            store = await MongoStore.open(mongo_default, clock=clock)
            others = (
                await MongoPayloads.open(mongo_default),
                await MongoInbox.open(mongo_default, clock=clock),
                await MongoSagas.open(mongo_default, clock=clock),
            )
            yield PayloadBench(MongoHarness(store, clock, client), *others)
            for each in (store, *others):
                await each.close()
