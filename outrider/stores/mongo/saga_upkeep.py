"""What sagas leave behind, removed in small batches, the oldest first."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Any
from uuid import UUID

from outrider.saga_store import SagaPruned
from outrider.stores.mongo.database import Database, Document
from outrider.stores.mongo.lending import Lending, Lent
from outrider.stores.mongo.saga_documents import DEAF
from outrider.stores.mongo.saga_sparing import sparing

PRUNE_MAX = 1_000
"""Documents removed in one step."""

SAGAS_MAX = 200
"""Sagas removed in one transaction, each with its journal and mail."""


async def prune(
    store: Lending, database: Database, *, saga_days: float, audit_days: float, barrier_days: float
) -> SagaPruned:
    """Remove what is older; also mail that came when its saga had just ended."""
    await _in_batches(database, "saga_mailbox", strays_pipeline(), hint="saga_mailbox_unseen")
    now = await database.time()
    return SagaPruned(
        await _prune_sagas(store, database, now - timedelta(days=saga_days)),
        await _in_batches(database, "saga_audit_log", notes_pipeline(now - timedelta(days=audit_days))),
        await prune_barriers(database, barrier_days),
    )


async def prune_barriers(database: Database, days: float) -> int:
    """Forget what participants answered longer ago; return how many commands that were."""
    before = await database.time() - timedelta(days=days)
    return await _in_batches(database, "saga_barrier", barriers_pipeline(before))


async def _prune_sagas(store: Lending, database: Database, before: datetime) -> int:
    total, spared = 0, set[UUID]()
    while True:
        # Those that somebody is writing stay, and must not be found for ever.
        old = {"_id": {"$nin": list(spared)}, **ended_before(before)}
        rows = await database["saga_instance"].find(old, {"_id": 1}).sort("ended_at").limit(SAGAS_MAX).to_list()
        ids = [row["_id"] for row in rows]
        removed = await sparing(store, _Removing(before), ids)
        spared |= set(ids).difference(removed)
        total += len(removed)
        if len(ids) < SAGAS_MAX:
            return total


def ended_before(moment: datetime) -> Document:
    """Return the condition of sagas that ended long ago; saga_instance_age."""
    return {"ended_at": {"$type": "date", "$lt": moment}, "needs_attention": False}


@dataclass(frozen=True, slots=True)
class _Removing:
    """Removes sagas with their journals and mail."""

    before: datetime

    async def __call__(self, lent: Lent, ids: Sequence[UUID]) -> list[UUID]:
        still = {"_id": {"$in": list(ids)}, **ended_before(self.before)}
        # Left to itself, the server would look through all that is old to find a few.
        rows = lent.of("saga_instance").find(still, {"_id": 1}, session=lent.session).hint("_id_")
        old = [row["_id"] for row in await rows.to_list()]
        # The instance first: whoever is writing it makes the rest needless.
        for name, key in (("saga_instance", "_id"), ("saga_step", "saga_id"), ("saga_mailbox", "saga_id")):
            await lent.of(name).delete_many({key: {"$in": old}}, session=lent.session)
        return old


async def _in_batches(database: Database, name: str, pipeline: list[dict[str, Any]], **options: Any) -> int:
    """Remove what a pipeline finds, a bounded number at a time."""
    total, documents = 0, database[name]
    while True:
        rows = await (await documents.aggregate(pipeline, batchSize=PRUNE_MAX, **options)).to_list()
        if rows:
            total += (await documents.delete_many({"_id": {"$in": [row["_id"] for row in rows]}})).deleted_count
        if len(rows) < PRUNE_MAX:
            return total


def strays_pipeline() -> list[dict[str, Any]]:
    """Unseen mail of sagas that have ended: nobody will read it. saga_mailbox_unseen and the primary key."""
    return [{"$match": {"unseen": True}}, *_without_saga({"status": {"$nin": DEAF}})]


def notes_pipeline(before: datetime) -> list[dict[str, Any]]:
    """Old lines of the trail, once their saga is gone; saga_audit_age and the primary key."""
    return [{"$match": {"at": {"$lt": before}}}, {"$sort": {"at": 1}}, *_without_saga({})]


def barriers_pipeline(before: datetime) -> list[dict[str, Any]]:
    """Old commands; saga_barrier_age."""
    return [{"$match": {"at": {"$lt": before}}}, {"$sort": {"at": 1}}, {"$limit": PRUNE_MAX}, {"$project": {"_id": 1}}]


def _without_saga(living: Document) -> list[dict[str, Any]]:
    one = [{"$match": living}, {"$project": {"_id": 1}}]
    saga = {"from": "saga_instance", "localField": "saga_id", "foreignField": "_id", "pipeline": one, "as": "saga"}
    ids = {"$project": {"saga_id": 1}}
    return [ids, {"$lookup": saga}, {"$match": {"saga": []}}, {"$limit": PRUNE_MAX}, {"$project": {"_id": 1}}]
