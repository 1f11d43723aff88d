"""Admin queries and maintenance of sagas in MongoDB."""

from __future__ import annotations

from datetime import datetime, timedelta
from typing import Any
from uuid import UUID

from pymongo.read_concern import ReadConcern

from outrider.saga.model import ENDED, Instance, SagaCriteria, SagaRecord, Status
from outrider.stores.mongo.database import Document, Documents, Expression, MongoDatabase, translated
from outrider.stores.mongo.documents import DEAF, to_instance
from outrider.stores.mongo.saga_claims import facts, read_parts
from outrider.stores.rows import AUDIT_FACTS

_NAMES = ("saga_type", "correlation_id", "status", "needs_attention")

PRUNE_MAX = 1_000
"""The maximum of documents removed in one step."""


class MongoSagaAdmin:
    """The admin of sagas: lists, counts and shows."""

    def __init__(self, database: MongoDatabase) -> None:
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

    async def show(self, saga_id: UUID) -> SagaRecord | None:
        of = self._plain
        async with self._database.snapshot() as session:
            row = await of("saga_instance").find_one({"_id": saga_id}, facts(self._database.now), session=session)
            return (await read_parts(of, session, [saga_id])).record(row) if row else None

    def _plain(self, name: str) -> Documents:
        # The session sets the read concern: a snapshot session rejects the read concern of a collection.
        return self._database[name].with_options(read_concern=ReadConcern())

    async def audit(self, saga_id: UUID, limit: int = 1000) -> list[dict[str, Any]]:
        lines = self._database["saga_audit_log"].find({"saga_id": saga_id}).sort("number").limit(limit)
        rows = await self._database.run(lines.to_list())
        return [{name: row[name] for name in AUDIT_FACTS} for row in rows]

    async def _aggregate(self, name: str, pipeline: list[dict[str, Any]]) -> list[Document]:
        with translated(self._database.where):
            return await (await self._database[name].aggregate(pipeline)).to_list()


def find_pipeline(criteria: SagaCriteria, now: Expression) -> list[dict[str, Any]]:
    """Return the pipeline of a search, with sagas that need attention first.

    A stuck saga has no worker although it is overdue or has unseen messages.
    """
    wanted = {name: value for name in _NAMES if (value := getattr(criteria, name)) is not None}
    if criteria.parent_id:
        # The type lets the planner use the index of the children.
        wanted["parent_id"] = {"$eq": criteria.parent_id, "$type": "binData"}
    if criteria.ids:
        wanted["_id"] = {"$in": list(criteria.ids)}
    stuck = [] if criteria.stuck_seconds is None else _stuck(criteria.stuck_seconds, now)
    order = {"needs_attention": -1, "updated_at": -1, "_id": 1}
    return [{"$match": wanted}, *stuck, {"$sort": order}, {"$limit": criteria.limit}]


def _stuck(seconds: float, now: Expression) -> list[dict[str, Any]]:
    before = {"$subtract": [now, seconds * 1000]}
    old = [
        {"$match": {"unseen": True, "$expr": {"$lt": ["$delivered_at", before]}}},
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


async def drop_unread_messages(database: MongoDatabase) -> None:
    """Remove messages that came just after the end of their saga."""
    await _in_batches(database, "saga_mailbox", orphans_pipeline(), hint="saga_mailbox_unseen")


async def prune_participants(database: MongoDatabase, days: float) -> int:
    """Remove old replies of participants; return the number of removed commands."""
    before = await database.time() - timedelta(days=days)
    return await _in_batches(database, "saga_barrier", participants_pipeline(before))


async def _in_batches(database: MongoDatabase, name: str, pipeline: list[dict[str, Any]], **options: Any) -> int:
    """Remove the results of a pipeline in bounded batches."""
    total, documents = 0, database[name]
    while True:
        rows = await (await documents.aggregate(pipeline, batchSize=PRUNE_MAX, **options)).to_list()
        if rows:
            total += (await documents.delete_many({"_id": {"$in": [row["_id"] for row in rows]}})).deleted_count
        if len(rows) < PRUNE_MAX:
            return total


def orphans_pipeline() -> list[dict[str, Any]]:
    """Return the pipeline for unseen messages of ended sagas; saga_mailbox_unseen and the primary key."""
    return [{"$match": {"unseen": True}}, *_without_saga({"status": {"$nin": DEAF}})]


def participants_pipeline(before: datetime) -> list[dict[str, Any]]:
    """Return the pipeline for old commands of participants; saga_barrier_age."""
    return [{"$match": {"at": {"$lt": before}}}, {"$sort": {"at": 1}}, {"$limit": PRUNE_MAX}, {"$project": {"_id": 1}}]


def _without_saga(living: Document) -> list[dict[str, Any]]:
    one = [{"$match": living}, {"$project": {"_id": 1}}]
    saga = {"from": "saga_instance", "localField": "saga_id", "foreignField": "_id", "pipeline": one, "as": "saga"}
    ids = {"$project": {"saga_id": 1}}
    return [ids, {"$lookup": saga}, {"$match": {"saga": []}}, {"$limit": PRUNE_MAX}, {"$project": {"_id": 1}}]
