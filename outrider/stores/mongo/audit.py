"""The audit log of sagas in MongoDB: lines, anchors, and the removal of old sagas and lines.

A role of the workers without the right to remove keeps the audit log append only. Anchors are a chain: of two
transactions that write the same anchor, one fails with a write conflict and leaves its sagas for the next time.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Any
from uuid import UUID

from pymongo.read_concern import ReadConcern

from outrider.audit_chain import AuditAnchor, AuditHead, AuditLine, prune_anchor
from outrider.saga.model import AuditCriteria
from outrider.stores.mongo.database import Document, Documents, MongoDatabase, translated
from outrider.stores.mongo.documents import (
    DEAF,
    anchor_document,
    head_document,
    to_anchor,
    to_audit_line,
    to_head,
    to_instance,
)
from outrider.stores.mongo.handler_transactions import MongoHandlerTransaction, MongoTransactionSource
from outrider.stores.mongo.saga_claims import skip_locked
from outrider.stores.rows import close_sagas, head_of

SAGAS_MAX = 200
"""The most sagas that are removed together, and whose lines are removed together later."""


class MongoAudit:
    """The audit log of all sagas."""

    def __init__(self, transactions: MongoTransactionSource, database: MongoDatabase) -> None:
        self._transactions, self._database = transactions, database

    async def find(self, criteria: AuditCriteria) -> list[AuditLine]:
        """List lines; saga_audit_age."""
        wanted: Document = {}
        if criteria.saga_id:
            wanted["saga_id"] = criteria.saga_id
        if criteria.actor is not None:
            wanted["actor"] = criteria.actor
        if criteria.since:
            wanted["at"] = {"$gte": criteria.since}
        order = [("at", -1), ("saga_id", -1), ("number", -1)]
        found = self._database["saga_audit_log"].find(wanted).sort(order).limit(criteria.limit)
        return [to_audit_line(row) for row in await self._database.run(found.to_list())]

    async def lines(self, after: tuple[UUID, int], limit: int) -> list[AuditLine]:
        """Return a page of all lines; saga_audit_saga."""
        saga_id, place = after
        later = [{"saga_id": saga_id, "number": {"$gt": place}}, {"saga_id": {"$gt": saga_id}}]
        rows: list[AuditLine] = []
        for condition in later:
            if len(rows) < limit:
                order = [("saga_id", 1), ("number", 1)]
                found = self._database["saga_audit_log"].find(condition).sort(order).limit(limit - len(rows))
                rows += [to_audit_line(row) for row in await self._database.run(found.to_list())]
        return rows

    async def heads(self, saga_ids: Collection[UUID]) -> list[AuditHead]:
        return await self._heads(self._database.__getitem__, saga_ids)

    async def chain(self, saga_id: UUID) -> tuple[list[AuditHead], list[AuditLine]]:
        async with self._database.snapshot() as session:
            heads = await self._heads(self._plain, [saga_id], session)
            lines = self._plain("saga_audit_log").find({"saga_id": saga_id}, session=session).sort("number")
            return heads, [to_audit_line(row) for row in await lines.to_list()]

    def _plain(self, name: str) -> Documents:
        # The session sets the read concern: a snapshot session rejects the read concern of a collection.
        return self._database[name].with_options(read_concern=ReadConcern())

    async def _heads(self, of: Any, saga_ids: Collection[UUID], session: Any = None) -> list[AuditHead]:
        with translated(self._database.where):
            wanted = {"$in": list(saga_ids)}
            closed = await of("saga_audit_head").find({"saga_id": wanted}, session=session).to_list()
            living = await of("saga_instance").find({"_id": wanted}, session=session).to_list()
        heads = [*map(to_head, closed), *(head_of(to_instance(row)) for row in living)]
        return sorted(heads, key=lambda head: (head.saga_id, head.anchor is None, head.anchor or 0))

    async def missing(self, limit: int) -> list[UUID]:
        lookup = {"from": "saga_audit_log", "localField": "id", "foreignField": "saga_id", "as": "lines"}
        one: Document = {**lookup, "pipeline": [{"$limit": 1}, {"$project": {"_id": 1}}]}
        heads = {"coll": "saga_audit_head", "pipeline": [{"$project": {"_id": 0, "id": "$saga_id"}}]}
        pipeline: list[Document] = [{"$project": {"_id": 0, "id": "$_id"}}, {"$unionWith": heads}]
        pipeline += [{"$lookup": one}, {"$match": {"lines": []}}, {"$limit": limit}]
        with translated(self._database.where):
            rows = await (await self._database["saga_instance"].aggregate(pipeline)).to_list()
        return [row["id"] for row in rows]

    async def anchors(self, after: int, limit: int) -> list[AuditAnchor]:
        found = self._database["saga_audit_anchor"].find({"_id": {"$gt": after}}).sort("_id").limit(limit)
        return [to_anchor(row) for row in await self._database.run(found.to_list())]

    async def anchor_heads(self, number: int) -> list[AuditHead] | None:
        # The heads are read first: if they are removed in between, the second query sees it.
        found = self._database["saga_audit_head"].find({"anchor": number})
        rows = await self._database.run(found.to_list())
        pruned = await self._database.run(self._database["saga_audit_anchor"].find_one({"covers": number}))
        return None if pruned else [to_head(row) for row in rows]

    async def remove_sagas(self, days: float) -> int:
        """Remove ended sagas, children first: a pass for each generation, and each pass from the oldest."""
        now = await self._database.time()
        total = 0
        while count := await self._remove_generation(now - timedelta(days=days), now):
            total += count
        return total

    async def _remove_generation(self, before: datetime, now: datetime) -> int:
        """Remove ended sagas without children. Sagas that another transaction is writing stay until the next time."""
        total = 0
        ended = self._database["saga_instance"].find(ended_before(before), {"parent_id": 1}).sort("ended_at")
        async with ended.batch_size(SAGAS_MAX) as rows:
            while found := await rows.to_list(SAGAS_MAX):
                ids = await _removable(self._database, found)
                total += len(await skip_locked(self._transactions, _Closing(before, now), ids))
        return total

    async def remove_lines(self, days: float) -> int:
        """Remove the lines of sagas that were removed together, once all are old; return the number of lines."""
        now = await self._database.time()
        total = 0
        while numbers := await self._oldest():
            removed = await skip_locked(self._transactions, _Pruning(now - timedelta(days=days), now), numbers)
            total += sum(removed)
            if not removed:
                break
        return total

    async def _oldest(self) -> list[int]:
        """Return the oldest anchor whose lines are still there. Later anchors cover later sagas."""
        found = self._database["saga_audit_head"].find({}, {"anchor": 1}).sort("anchor").limit(1)
        return [row["anchor"] for row in await found.to_list()]


def ended_before(moment: datetime) -> Document:
    """Return the condition for sagas that ended before a time; saga_instance_age."""
    return {"ended_at": {"$type": "date", "$lt": moment}, "needs_attention": False}


async def _removable(database: MongoDatabase, rows: Sequence[Document]) -> list[UUID]:
    """Return the ids of sagas, without the children of sagas that have not ended and without those that have children.

    A new saga of the name of a parent would start the same children. Indexes: the primary key, saga_instance_parent.
    """
    sagas, parents = database["saga_instance"], [row["parent_id"] for row in rows if row.get("parent_id")]
    living = set[UUID]()
    if parents:
        found = sagas.find({"_id": {"$in": parents}, "status": {"$nin": DEAF}}, {"_id": 1})
        living = {row["_id"] for row in await found.to_list()}
    ids = [row["_id"] for row in rows if row.get("parent_id") not in living]
    # The type is named because the index has no sagas without a parent.
    having = set(await sagas.distinct("parent_id", {"parent_id": {"$in": ids, "$type": "binData"}}))
    return [saga_id for saga_id in ids if saga_id not in having]


async def _last_anchor(tx: MongoHandlerTransaction) -> AuditAnchor | None:
    row = await tx.of("saga_audit_anchor").find_one({}, sort=[("_id", -1)], session=tx.session)
    return to_anchor(row) if row else None


@dataclass(frozen=True, slots=True)
class _Closing:
    before: datetime
    now: datetime

    async def __call__(self, tx: MongoHandlerTransaction, ids: Sequence[UUID]) -> list[UUID]:
        still = {"_id": {"$in": list(ids)}, **ended_before(self.before)}
        # Without the hint the server would scan all old sagas to find a few.
        found = tx.of("saga_instance").find(still, session=tx.session).hint("_id_")
        old = [to_instance(row) for row in await found.to_list()]
        if not old:
            return []
        removed = [instance.saga_id for instance in old]
        # The instance comes first: if another transaction is writing the instance, the other deletes are skipped.
        for name, key in (("saga_instance", "_id"), ("saga_step", "saga_id"), ("saga_mailbox", "saga_id")):
            await tx.of(name).delete_many({key: {"$in": removed}}, session=tx.session)
        last: Document = {"$group": {"_id": "$saga_id", "last": {"$max": "$number"}}}
        group: list[Document] = [{"$match": {"saga_id": {"$in": removed}}}, last]
        lasts = await (await tx.of("saga_audit_log").aggregate(group, session=tx.session)).to_list()
        places = {row["_id"]: row["last"] for row in lasts}
        closed = [(instance, places.get(instance.saga_id)) for instance in old]
        anchor, heads = close_sagas(await _last_anchor(tx), closed, self.now)
        await tx.of("saga_audit_anchor").insert_one(anchor_document(anchor), session=tx.session)
        documents = [head_document(head, anchor.number) for head in heads]
        await tx.of("saga_audit_head").insert_many(documents, session=tx.session)
        return removed


@dataclass(frozen=True, slots=True)
class _Pruning:
    before: datetime
    now: datetime

    async def __call__(self, tx: MongoHandlerTransaction, numbers: Sequence[int]) -> list[int]:
        """Return the number of removed lines; nothing if they are not old enough."""
        row = await tx.of("saga_audit_anchor").find_one({"_id": numbers[0]}, session=tx.session)
        heads = await tx.of("saga_audit_head").find({"anchor": numbers[0]}, session=tx.session).to_list()
        last = await _last_anchor(tx)
        if row is None or last is None or not heads or (closed := to_anchor(row)).until >= self.before:
            return []
        pruned = anchor_document(prune_anchor(last, closed, self.now))
        await tx.of("saga_audit_anchor").insert_one(pruned, session=tx.session)
        removed = 0
        for head in map(to_head, heads):
            up_to = {"saga_id": head.saga_id, "number": {"$lte": head.place}}
            removed += (await tx.of("saga_audit_log").delete_many(up_to, session=tx.session)).deleted_count
        await tx.of("saga_audit_head").delete_many({"anchor": numbers[0]}, session=tx.session)
        return [removed]
