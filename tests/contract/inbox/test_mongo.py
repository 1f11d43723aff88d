"""The inbox contract on MongoDB, once through a client of its own and once through the application's."""

from __future__ import annotations

from collections.abc import AsyncIterator
from datetime import UTC, datetime
from typing import Any

import pytest
from pymongo import AsyncMongoClient

from outrider.stores.mongo import MongoInbox
from outrider.testing import ManualClock
from outrider.testing.contracts import InboxBench, InboxContract
from outrider.testing.contracts.inbox_sequencing import HandlerRules, ReceiptRules
from tests.support.mongo_benches import MongoInboxBench, shop

__all__ = ["shop"]


@pytest.mark.mongo
class TestMongoInbox(InboxContract):
    @pytest.fixture
    async def bench(self, shop: AsyncMongoClient[dict[str, Any]], mongo_default: str) -> AsyncIterator[InboxBench]:
        clock = ManualClock(start=datetime.now(UTC))
        store = await MongoInbox.open(mongo_default, clock=clock)
        yield MongoInboxBench(store, clock, shop)
        await store.close()


@pytest.mark.mongo
class TestMongoInboxOverAClient(ReceiptRules, HandlerRules):
    """The rules about transactions: the client is the application's, and all else is the same code."""

    @pytest.fixture
    async def bench(self, shop: AsyncMongoClient[dict[str, Any]]) -> InboxBench:
        clock = ManualClock(start=datetime.now(UTC))
        return MongoInboxBench(MongoInbox.over(shop, clock=clock), clock, shop)
