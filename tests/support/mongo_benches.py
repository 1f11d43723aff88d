"""The inbox on MongoDB as the contract suite drives it."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from itertools import count
from typing import Any

import pytest
from pymongo import AsyncMongoClient
from pymongo.asynchronous.client_session import AsyncClientSession

from outrider.stores.mongo import MongoInbox
from outrider.testing import ManualClock
from outrider.testing.contracts import InboxBench

SHOP = "test_shop"


class MongoInboxBench(InboxBench):
    """Effects in a collection of the application."""

    def __init__(self, store: MongoInbox, clock: ManualClock, client: AsyncMongoClient[dict[str, Any]]) -> None:
        super().__init__(store, clock)
        self._client, self._places = client, count()

    async def effect(self, tx: AsyncClientSession, text: str) -> None:
        effects = tx.client[SHOP]["effects"]
        await effects.insert_one({"_id": next(self._places), "what": text}, session=tx)

    async def effects(self) -> list[str]:
        rows = await self._client[SHOP]["effects"].find().sort("_id").to_list()
        return [row["what"] for row in rows]

    async def end(self, tx: AsyncClientSession, *, commit: bool) -> None:
        await (tx.commit_transaction() if commit else tx.abort_transaction())

    async def staged(self) -> list[dict[str, str]]:
        rows = await self._client["outrider"]["outbox"].find().sort("position").to_list()
        return [json.loads(row["headers"]) for row in rows]


@pytest.fixture
async def shop(mongo_default: str) -> AsyncIterator[AsyncMongoClient[dict[str, Any]]]:
    """A client as an application has one, with a collection that is there and empty."""
    async with AsyncMongoClient[dict[str, Any]](mongo_default) as client:
        await client[SHOP].create_collection("effects")
        yield client
        await client.drop_database(SHOP)
