"""What people ask about sagas in MongoDB."""

from __future__ import annotations

from typing import Any
from uuid import UUID

from pymongo.read_concern import ReadConcern

from outrider.saga_store import ENDED, Instance, Record, SagaCriteria, Status
from outrider.stores.mongo.database import Database, Document, Documents, Expression
from outrider.stores.mongo.errors import translated
from outrider.stores.mongo.saga_documents import to_instance
from outrider.stores.mongo.saga_reading import facts, read_parts
from outrider.stores.saga_rows import AUDIT_FACTS

_NAMES = ("saga_type", "correlation_id", "status", "needs_attention")


class MongoSagaDesk:
    """Listing, counting and showing."""

    def __init__(self, database: Database) -> None:
        self._database = database

    async def find(self, criteria: SagaCriteria) -> list[Instance]:
        pipeline = find_pipeline(criteria, self._database.now)
        return [to_instance(row) for row in await self._aggregate("saga_instance", pipeline)]

    async def counts(self) -> dict[str, int]:
        needing = {"$sum": {"$cond": ["$needs_attention", 1, 0]}}
        pipeline = [{"$group": {"_id": "$status", "sagas": {"$sum": 1}, "needing": needing}}]
        rows = await self._aggregate("saga_instance", pipeline)
        counts = {status.value: 0 for status in Status} | {row["_id"]: row["sagas"] for row in rows}
        return {**counts, "needs_attention": sum(row["needing"] for row in rows)}

    async def show(self, saga_id: UUID) -> Record | None:
        of = self._plain
        async with self._database.snapshot() as session:
            row = await of("saga_instance").find_one({"_id": saga_id}, facts(self._database.now), session=session)
            return (await read_parts(of, session, [saga_id])).record(row) if row else None

    def _plain(self, name: str) -> Documents:
        # The session says how to read: one of a single moment refuses a collection's own read concern.
        return self._database[name].with_options(read_concern=ReadConcern())

    async def audit(self, saga_id: UUID, limit: int = 1000) -> list[dict[str, Any]]:
        lines = self._database["saga_audit_log"].find({"saga_id": saga_id}).sort("number").limit(limit)
        rows = await self._database.run(lines.to_list())
        return [{name: row[name] for name in AUDIT_FACTS} for row in rows]

    async def _aggregate(self, name: str, pipeline: list[dict[str, Any]]) -> list[Document]:
        with translated(self._database.where):
            return await (await self._database[name].aggregate(pipeline)).to_list()


def find_pipeline(criteria: SagaCriteria, now: Expression) -> list[dict[str, Any]]:
    """Those that need attention first. Stuck are those that nobody works on: overdue, or with mail nobody has seen."""
    wanted = {name: value for name in _NAMES if (value := getattr(criteria, name)) is not None}
    if criteria.ids:
        wanted["_id"] = {"$in": list(criteria.ids)}
    stuck = [] if criteria.stuck_seconds is None else _stuck(criteria.stuck_seconds, now)
    order = {"needs_attention": -1, "updated_at": -1, "_id": 1}
    return [{"$match": wanted}, *stuck, {"$sort": order}, {"$limit": criteria.limit}]


def _stuck(seconds: float, now: Expression) -> list[dict[str, Any]]:
    before = {"$subtract": [now, seconds * 1000]}
    old = [
        {"$match": {"unseen": True, "$expr": {"$lt": ["$posted_at", before]}}},
        {"$limit": 1},
        {"$project": {"_id": 1}},
    ]
    unread = {"from": "saga_mailbox", "localField": "_id", "foreignField": "saga_id", "pipeline": old, "as": "unread"}
    overdue = {"wake_at": {"$type": "date"}, "$expr": {"$lt": ["$wake_at", before]}}
    return [
        {"$match": {"status": {"$nin": sorted(ENDED)}}},
        {"$lookup": unread},
        {"$match": {"$or": [overdue, {"owner": None, "unread": {"$ne": []}}]}},
        {"$unset": "unread"},
    ]
