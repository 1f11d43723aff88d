"""The contract of encrypted fields on MongoDB."""

from __future__ import annotations

from collections.abc import AsyncIterator
from datetime import UTC, datetime
from typing import Any

import pytest
from pymongo import AsyncMongoClient

from outrider.stores.mongo import MongoInbox, MongoPrivacy, MongoSagas, MongoStore
from outrider.testing import ManualClock
from outrider.testing.contracts.privacy import EncryptionContract, PrivacyBench, PrivacyContract
from outrider.testing.contracts.subjects import SubjectBench, SubjectContract
from outrider.testing.harness import Harness
from tests.contract.outbox.test_mongo import MongoHarness
from tests.support.mongo_benches import MongoInboxBench, shop

__all__ = ["shop"]


@pytest.mark.mongo
class TestMongoEncryption(EncryptionContract):
    @pytest.fixture
    async def harness(self, mongo_default: str) -> AsyncIterator[Harness]:
        clock = ManualClock(start=datetime.now(UTC))
        async with AsyncMongoClient[dict[str, Any]](mongo_default) as client:
            store = await MongoStore.open(mongo_default, clock=clock)
            yield MongoHarness(store, clock, client)
            await store.close()


@pytest.mark.mongo
class TestMongoPrivacy(PrivacyContract):
    @pytest.fixture
    async def bench(self, mongo_default: str) -> AsyncIterator[PrivacyBench]:
        clock = ManualClock(start=datetime.now(UTC))
        async with AsyncMongoClient[dict[str, Any]](mongo_default) as client:
            store = await MongoStore.open(mongo_default, clock=clock)
            others = (
                await MongoPrivacy.open(mongo_default, clock=clock),
                await MongoInbox.open(mongo_default, clock=clock),
                await MongoSagas.open(mongo_default, clock=clock),
            )
            yield PrivacyBench(MongoHarness(store, clock, client), *others)
            for each in (store, *others):
                await each.close()


@pytest.mark.mongo
class TestMongoSubjects(SubjectContract):
    @pytest.fixture
    async def bench(self, shop: AsyncMongoClient[dict[str, Any]], mongo_default: str) -> AsyncIterator[SubjectBench]:
        clock = ManualClock(start=datetime.now(UTC))
        store = await MongoInbox.open(mongo_default, clock=clock)
        yield SubjectBench(MongoInboxBench(store, clock, shop), lambda: MongoPrivacy.open(mongo_default))
        await store.close()
