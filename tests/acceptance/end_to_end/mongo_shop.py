"""A business on MongoDB, with writers whose transactions get in each other's way."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from typing import Any, Self
from uuid import UUID

from pymongo import AsyncMongoClient
from pymongo.read_concern import ReadConcern
from pymongo.write_concern import WriteConcern

from outrider.event import Event
from tests.acceptance.end_to_end.shop import OUTBOX, Compensated, Shop, in_two, purchases

DATABASE = "shop"
FORGETFUL = {"transactionLifetimeLimitSeconds": "5"}
"""A transaction of a killed process stays open until then, by default for a minute, and blocks other writers."""
MAJORITY: dict[str, Any] = {"read_concern": ReadConcern("snapshot"), "write_concern": WriteConcern("majority")}


class MongoShop(Shop):
    """A business on MongoDB. Its collection is in a database of its own, and the outbox in another."""

    writers = 4

    def __init__(self, url: str) -> None:
        super().__init__(url)
        self.client: AsyncMongoClient[dict[str, Any]] = AsyncMongoClient(url, appname="shop")
        self._purchase = self.client[DATABASE]["purchase"]
        # The observing client has another name, so that injected faults do not hit it.
        self._onlooker: AsyncMongoClient[dict[str, Any]] = AsyncMongoClient(url)
        self._outbox = self._onlooker["outrider"]

    @classmethod
    async def open(cls, url: str) -> Self:
        """Open for business on a server that has an outbox."""
        shop = cls(url)
        await shop.client.drop_database(DATABASE)
        await shop.client[DATABASE].create_collection("purchase")
        return shop

    async def transact(self, events: Sequence[Event], *, commits: bool = True) -> list[UUID]:
        tries: list[list[UUID]] = []

        async def sell(session: Any) -> None:
            tries.append([])
            for some in in_two(events):
                tries[-1] += await OUTBOX.stage(session, *some)
            sold = [{"_id": event_id, "key": key} for event_id, key in purchases(tries[-1], events)]
            await self._purchase.insert_many(sold, session=session)
            if not commits:
                raise Compensated

        async with self.client.start_session() as session:
            with suppress(Compensated):
                await session.with_transaction(sell, **MAJORITY)
        # A transaction that lost a write conflict was rolled back as well.
        self.compensated |= {str(event_id) for ids in tries[:-1] for event_id in ids}
        return tries[-1]

    async def count(self, table: str) -> int:
        return await self._outbox[table].count_documents({})

    async def owners(self) -> int:
        return len(set(await self._outbox["outbox_lane"].distinct("owner")) - {None})

    async def attempts(self, table: str) -> int:
        total = [{"$group": {"_id": None, "attempts": {"$sum": "$attempts"}}}]
        rows = await (await self._outbox[table].aggregate(total)).to_list()
        return int(rows[0]["attempts"]) if rows else 0

    async def purchases(self) -> dict[str, str]:
        return {row["_id"]: row["key"] for row in await self._onlooker[DATABASE]["purchase"].find().to_list()}

    async def close(self) -> None:
        await self.client.drop_database(DATABASE)
        await self.client.close()
        await self._onlooker.close()
