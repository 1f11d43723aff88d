"""The operation log in MongoDB: the lines of commands, and the removal of old ones.

A role of the relays without the right to remove keeps the log append only. All commands write the head of the chain: of
two at a time, one meets a write conflict and starts again.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from datetime import datetime
from typing import Any
from uuid import UUID

from bson import Int64
from pymongo.read_concern import ReadConcern

from outrider.audit_chain import AuditAnchor
from outrider.errors import UsageError
from outrider.operation_log import (
    LINES_MAX,
    OperationCriteria,
    OperationEnd,
    OperationHead,
    OperationLine,
    anchor_of_removed,
    lines_of,
    oldest_kept,
    removable,
    seal_operations,
)
from outrider.stores.mongo.database import NOT_INSTALLED, Document, Documents, MongoDatabase, Session, collection
from outrider.stores.mongo.documents import anchor_document, to_anchor

LOG, HEAD, ANCHORS = "outbox_operation", "outbox_operation_head", "saga_audit_anchor"

NUMBERED: Document = {"line": {"$gt": 0}}

ORDER = [("line", 1), ("_id", 1)]


async def record(
    session: Session,
    database: MongoDatabase,
    actor: str,
    verb: str,
    events: Iterable[tuple[UUID | None, str | None]] = ((None, None),),
    **detail: Any,
) -> None:
    """Write the lines of a command, as the last work of its transaction."""
    if not (chosen := list(events)):
        return
    heads = _of(session, database, HEAD)
    if (row := await heads.find_one({}, session=session)) is None:
        raise UsageError(f"the operation log is not installed in {database.where}; {NOT_INSTALLED}")
    now = await database.time(session)
    head, lines = seal_operations(_head(row), lines_of(now, actor, verb, chosen, **detail))
    moved = {"$set": {"lines": Int64(head.lines), "hash": head.hash}}
    await heads.update_one({"_id": row["_id"]}, moved, session=session)
    await _of(session, database, LOG).insert_many([_document(line) for line in lines], session=session)


class MongoOperationLog:
    """The operation log of a database."""

    def __init__(self, database: MongoDatabase) -> None:
        self._database = database

    async def find(self, criteria: OperationCriteria) -> list[OperationLine]:
        """List lines; outbox_operation_at."""
        given = {"event_id": criteria.event_id, "actor": criteria.actor}
        wanted: Document = {name: value for name, value in given.items() if value is not None}
        if criteria.since:
            wanted["at"] = {"$gte": criteria.since}
        order = [("at", -1), ("line", -1), ("_id", -1)]
        return await self._find(self._database[LOG].find(wanted).sort(order).limit(criteria.limit))

    async def record(self, actor: str, verb: str, **detail: Any) -> None:
        async def work(session: Session) -> None:
            await record(session, self._database, actor, verb, **detail)

        await self._database.transaction(work)

    async def lines(self, after: tuple[int, Any] | None, limit: int) -> list[OperationLine]:
        """Return a page; outbox_operation_line."""
        return await self._find(self._database[LOG].find(_later(after)).sort(ORDER).limit(limit))

    async def end(self, after: tuple[int, Any] | None) -> OperationEnd:
        async with self._database.snapshot() as session:
            head = await self._plain(HEAD).find_one({}, session=session)
            count: list[Document] = [{"$match": {"line": None}}, {"$count": "n"}]
            found = await (await self._plain(LOG).aggregate(count, session=session)).to_list()
            rows = await self._plain(LOG).find(_later(after), session=session).sort(ORDER).to_list()
        unchained = int(found[0]["n"]) if found else 0
        return OperationEnd(_head(head) if head else None, unchained, [_line(row) for row in rows])

    async def last_anchor(self) -> AuditAnchor | None:
        """Return the last anchor of removed lines; saga_audit_anchor_operations."""
        found = self._database[ANCHORS].find_one({"chains": 0}, sort=[("_id", -1)])
        row = await self._database.run(found)
        return to_anchor(row) if row else None

    async def remove_lines(self, days: float) -> int:
        before = oldest_kept(await self._database.run(self._database.time()), days)
        old = self._database[LOG].find_one({"at": {"$lt": before}}, {"_id": 1})
        if await self._database.run(old) is None:
            return 0
        total, removed = 0, await self._database.transaction(_remove, self._database, before)
        while removed:
            total, removed = total + removed, await self._database.transaction(_remove, self._database, before)
        return total

    def _plain(self, name: str) -> Documents:
        # The session sets the read concern: a snapshot session rejects the read concern of a collection.
        return self._database[name].with_options(read_concern=ReadConcern())

    async def _find(self, found: Any) -> list[OperationLine]:
        return [_line(row) for row in await self._database.run(found.to_list())]


async def _remove(session: Session, database: MongoDatabase, before: datetime) -> int:
    """Remove some of the oldest lines, and leave an anchor; outbox_operation_line."""
    log, anchors = _of(session, database, LOG), _of(session, database, ANCHORS)
    now = await database.time(session)
    row = await anchors.find_one({"chains": 0}, sort=[("_id", -1)], session=session)
    former = to_anchor(row) if row else None
    first = log.find({"line": None}, session=session).sort("at").limit(LINES_MAX)
    if not (lines := removable(before, former, map(_line, await first.to_list()))):
        later = {"line": {"$gt": former.lines if former else 0}}
        first = log.find(later, session=session).sort(ORDER).limit(LINES_MAX)
        lines = removable(before, former, map(_line, await first.to_list()))
    if not lines:
        return 0
    row = await anchors.find_one({}, sort=[("_id", -1)], session=session)
    anchor = anchor_of_removed(to_anchor(row) if row else None, former, lines, now)
    await anchors.insert_one(anchor_document(anchor), session=session)
    chained = lines[0].line is not None
    covered = {"line": {"$lte": anchor.lines}} if chained else {"line": None, "at": {"$lte": anchor.until}}
    removed = (await log.delete_many(covered, session=session)).deleted_count
    if not chained:
        fewer = {"$inc": {"unchained": Int64(-removed)}}
        await _of(session, database, HEAD).update_one({}, fewer, session=session)
    return removed


def _of(session: Session, database: MongoDatabase, name: str) -> Documents:
    # A session belongs to its client, which may be a client of the application.
    made: Documents = collection(session.client, database.schema, name)
    return made


def _later(after: tuple[int, Any] | None) -> Document:
    if after is None:
        return NUMBERED
    line, place = after
    return {"$or": [{"line": {"$gt": line}}, {"line": line, "_id": {"$gt": place}}]}


def _head(row: Mapping[str, Any]) -> OperationHead:
    return OperationHead(row["lines"], row["hash"], row["unchained"])


def _document(line: OperationLine) -> Document:
    facts = line._asdict()
    del facts["place"], facts["digest"]
    return {**facts, "line": Int64(line.line or 0)}


def _line(row: Mapping[str, Any]) -> OperationLine:
    columns: dict[str, Any] = {name: row.get(name) for name in OperationLine._fields}
    return OperationLine(**{**columns, "place": row["_id"], "detail": row.get("detail") or ""})
