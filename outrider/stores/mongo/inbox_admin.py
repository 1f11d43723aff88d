"""Admin operations and maintenance of the inbox in MongoDB.

Every operation on a stream writes the stream document first, as consumers do.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from datetime import timedelta
from typing import Any, NamedTuple
from uuid import UUID

from pymongo import ReplaceOne, UpdateOne

from outrider.event import InboxStream, OnDeadLetter
from outrider.inbox.model import InboxBlockReason, InboxCriteria, StreamState
from outrider.stores.mongo.database import Document, Documents, Expression, MongoDatabase, Session, milliseconds
from outrider.stores.mongo.documents import (
    LOCK,
    all_of,
    event_identity,
    letter_facts,
    replayed_row,
    state,
    stream_identity,
    stream_row,
)
from outrider.stores.mongo.handler_transactions import MongoHandlerTransaction
from outrider.stores.mongo.operation_log import record

Write = Callable[..., Awaitable[Any]]
"""Runs work in a separate transaction."""

Key = tuple[Any, ...]

MEND_MAX = 100

PRUNE_MAX = 1_000

Pipeline = list[dict[str, Any]]


class StreamChange(NamedTuple):
    """The change of a stream: the highest sequence number to count as passed, and the number of added held events."""

    identity: Document
    passed: int | None = None
    added: int = 0


class MongoInboxAdmin:
    """The admin of the inbox: lists, replays, discards and releases."""

    def __init__(self, database: MongoDatabase, write: Write) -> None:
        self._database, self._write = database, write

    async def counts(self, consumer: str | None = None) -> dict[str, int]:
        dead_letters = {} if consumer is None else {"_id": all_of(consumer)}
        rows = await self._aggregate("inbox_stream", counts_pipeline(consumer))
        dead = await self._database.run(self._database["inbox_dead_letter"].count_documents(dead_letters))
        waiting, streams = (rows[0]["waiting"], rows[0]["streams"]) if rows else (0, 0)
        return {"waiting": waiting, "blocked_streams": streams, "dead_letters": dead}

    async def receipts(self, consumer: str, event_ids: Sequence[UUID]) -> list[dict[str, Any]]:
        wanted = {"_id": {"$in": [event_identity(consumer, event_id) for event_id in event_ids]}}
        found = self._database["consumer_inbox"].find(wanted).sort(["received_at", "_id"])
        return [_receipt(row) for row in await self._database.run(found.to_list())]

    async def dead_letters(self, criteria: InboxCriteria) -> list[dict[str, Any]]:
        found = self._database["inbox_dead_letter"].find(_wanted(criteria)).sort("id").limit(criteria.limit)
        return [letter_facts(dead_letter) for dead_letter in await self._database.run(found.to_list())]

    async def streams(self, consumer: str | None, limit: int) -> list[dict[str, Any]]:
        rows = await self._aggregate("inbox_stream", streams_pipeline(consumer, limit))
        return [{**row["_id"], **state(row)._asdict(), "since": row["since"]} for row in rows]

    async def replay(self, ids: Sequence[int], actor: str) -> int:
        count: int = await self._write(_replay, ids, actor)
        return count

    async def discard(self, ids: Sequence[int], actor: str) -> int:
        count: int = await self._write(_discard, ids, actor)
        return count

    async def skip_gap(self, consumer: str, stream: InboxStream, actor: str) -> bool:
        skipped: bool = await self._write(_skip_gap, consumer, stream, actor)
        return skipped

    async def _aggregate(self, name: str, pipeline: Pipeline) -> list[Document]:
        return await self._database.run(aggregate(self._database[name], pipeline))


def _waiting(consumer: str | None) -> Document:
    waits: Document = {"cause": {"$exists": True}}
    return waits if consumer is None else {"_id.consumer": consumer, **waits}


def counts_pipeline(consumer: str | None) -> Pipeline:
    """Count the blocked streams and their held events; inbox_stream_cause."""
    sums = {"_id": None, "waiting": {"$sum": "$waiting"}, "streams": {"$sum": 1}}
    return [{"$match": _waiting(consumer)}, {"$group": sums}]


def streams_pipeline(consumer: str | None, limit: int) -> Pipeline:
    """Return blocked streams; inbox_stream_cause.

    Streams behind a dead letter come first: they wait for an operator.
    """
    last = {"$ne": ["$cause", InboxBlockReason.DEAD_LETTER.value]}
    order = {"last": 1, "since": 1}
    return [{"$match": _waiting(consumer)}, {"$set": {"last": last}}, {"$sort": order}, {"$limit": limit}]


def _wanted(criteria: InboxCriteria) -> Document:
    names = {"consumer": "_id.consumer", "topic": "stream.topic", "key": "stream.key", "reason": "reason"}
    given = {path: getattr(criteria, name) for name, path in names.items()}
    ids = {"id": {"$in": list(criteria.ids)}} if criteria.ids else {}
    return {**ids, **{path: value for path, value in given.items() if value is not None}}


def _receipt(row: Document) -> dict[str, Any]:
    plain = {name: row[name] for name in ("event_type", "topic", "key", "sequence", "received_at")}
    return {"event_id": row["_id"]["event_id"], **plain, "processing_seconds": row.get("processing_seconds")}


async def _replay(tx: MongoHandlerTransaction, ids: Sequence[int], actor: str) -> int:
    """Return dead letters to their old positions without receipts. A stream without a document gets a new document."""
    dead_letters = await _take(tx, ids)
    changes = _changes(dead_letters, added=1)
    await _lock(tx, changes, make=True)
    restored = [ReplaceOne({"_id": row["_id"]}, row, upsert=True) for row in map(replayed_row, dead_letters)]
    if restored:
        await tx.of("inbox_held").bulk_write(restored, session=tx.session)
        removed = {"_id": {"$in": [dead_letter["_id"] for dead_letter in dead_letters]}}
        await tx.of("consumer_inbox").delete_many(removed, session=tx.session)
    await _drain_unblocked(tx, changes)
    return await _record(tx, actor, "inbox_replay", dead_letters)


async def _discard(tx: MongoHandlerTransaction, ids: Sequence[int], actor: str) -> int:
    """Delete dead letters and keep their receipts.

    The number of a dead letter that blocked its stream counts as passed.
    """
    dead_letters = await _take(tx, ids)
    changes = _changes(
        [dead_letter for dead_letter in dead_letters if dead_letter["policy"] == OnDeadLetter.BLOCK], added=0
    )
    await _lock(tx, changes, make=False)
    await _drain_unblocked(tx, changes)
    return await _record(tx, actor, "inbox_discard", dead_letters)


async def _skip_gap(tx: MongoHandlerTransaction, consumer: str, stream: InboxStream, actor: str) -> bool:
    """Count all numbers before the first event behind the gap as passed; inbox_held_sequence."""
    identity = stream_identity(consumer, stream)
    row = await tx.of("inbox_stream").find_one_and_update({"_id": identity}, LOCK, session=tx.session)
    at = state(row) if row else StreamState()
    if at.cause is not InboxBlockReason.EARLY:
        return False
    behind = {"stream": identity, "sequence": {"$gt": -1 if at.seen is None else at.seen}}
    found = tx.of("inbox_held").find(behind, {"sequence": 1}, session=tx.session)
    first = await found.sort(["sequence", "id"]).limit(1).to_list()
    for waiting in first:
        on = at._replace(seen=waiting["sequence"] - 1, cause=InboxBlockReason.DRAINING)
        await tx.of("inbox_stream").bulk_write([stream_row(identity, on, tx.now)], session=tx.session)
    return bool(await _record(tx, actor, "inbox_skip_gap", first, topic=stream.topic, band=stream.band))


async def _take(tx: MongoHandlerTransaction, ids: Sequence[int]) -> list[Document]:
    """Remove dead letters and return them in order of position; inbox_dead_letter_id."""
    wanted = {"id": {"$in": list(ids)}}
    dead_letters = await tx.of("inbox_dead_letter").find(wanted, session=tx.session).sort("id").to_list()
    removed = {"_id": {"$in": [dead_letter["_id"] for dead_letter in dead_letters]}}
    await tx.of("inbox_dead_letter").delete_many(removed, session=tx.session)
    return dead_letters


def _changes(dead_letters: Sequence[Document], *, added: int) -> dict[Key, StreamChange]:
    changes: dict[Key, StreamChange] = {}
    for dead_letter in dead_letters:
        key = tuple(dead_letter["stream"].values())
        known = changes.get(key, StreamChange(dead_letter["stream"]))
        passed = [number for number in (known.passed, dead_letter["sequence"]) if number is not None and not added]
        changes[key] = known._replace(passed=max(passed, default=None), added=known.added + added)
    return changes


async def _lock(tx: MongoHandlerTransaction, changes: dict[Key, StreamChange], *, make: bool) -> None:
    locks = [UpdateOne({"_id": change.identity}, LOCK, upsert=make) for _, change in sorted(changes.items())]
    if locks:
        await tx.of("inbox_stream").bulk_write(locks, session=tx.session)


async def _drain_unblocked(tx: MongoHandlerTransaction, changes: dict[Key, StreamChange]) -> None:
    """Drain streams without a blocking dead letter; delete the documents of empty streams."""
    ids = [change.identity for change in changes.values()]
    if not ids:
        return
    rows = await tx.of("inbox_stream").find({"_id": {"$in": ids}}, session=tx.session).to_list()
    blocking = {"stream": {"$in": ids}, "policy": "block"}
    holders = await tx.of("inbox_dead_letter").find(blocking, {"stream": 1}, session=tx.session).to_list()
    taken = {tuple(dead_letter["stream"].values()) for dead_letter in holders}
    writes = [_save_change(tx, row, changes[key], key in taken) for row in rows if (key := tuple(row["_id"].values()))]
    if writes:
        await tx.of("inbox_stream").bulk_write(writes, session=tx.session)


def _save_change(tx: MongoHandlerTransaction, row: Document, change: StreamChange, blocked: bool) -> Any:
    at = state(row)
    waiting = at.waiting + change.added
    seen = at.seen if at.seen is None or change.passed is None else max(at.seen, change.passed)
    cause = InboxBlockReason.DEAD_LETTER if blocked else InboxBlockReason.DRAINING if waiting else None
    return stream_row(row["_id"], StreamState(seen, cause, waiting), tx.now)


async def _record(tx: MongoHandlerTransaction, actor: str, verb: str, rows: Sequence[Document], **detail: Any) -> int:
    """Record the action of an operator; return the number of rows."""
    events = [(row["_id"]["event_id"], row["_id"]["consumer"]) for row in rows]
    await record(tx.session, tx.database, actor, verb, events, **detail)
    return len(rows)


def draining_query(consumer: str, cause: InboxBlockReason) -> Document:
    """Return the query for streams that are blocked for a given reason; inbox_stream_cause."""
    return {"_id.consumer": consumer, "cause": cause.value}


def overdue_pipeline(consumer: str, seconds: float, limit: int, now: Expression) -> Pipeline:
    """Return the streams that have waited longest, if they exceed the time; inbox_stream_cause.

    The limit comes before the time, so the server reads no more streams than the limit.
    """
    late = {"$lt": ["$since", {"$subtract": [now, milliseconds(seconds)]}]}
    found = draining_query(consumer, InboxBlockReason.EARLY)
    return [{"$match": found}, {"$sort": {"since": 1}}, {"$limit": limit}, {"$match": {"$expr": late}}]


async def prune_receipts(database: MongoDatabase, consumer: str, days: float) -> int:
    """Remove old receipts; consumer_inbox_age. A receipt stays as long as its dead letter, which may be replayed."""
    before = await database.time() - timedelta(days=days)
    old = {"_id.consumer": consumer, "received_at": {"$lt": before}}
    total, stored, found = 0, 0, PRUNE_MAX
    while found == PRUNE_MAX:
        # The receipts that stay are first by now, in order of age.
        ids = await _oldest(database["consumer_inbox"], old, "received_at", stored)
        dead_letters = await database["inbox_dead_letter"].find({"_id": {"$in": ids}}, {"_id": 1}).to_list()
        dead_letter = {row["_id"]["event_id"] for row in dead_letters}
        done_with = [identity for identity in ids if identity["event_id"] not in dead_letter]
        total += await _remove(database["consumer_inbox"], done_with, old)
        stored, found = stored + len(dead_letter), len(ids)
    return total


async def prune_dead_letters(database: MongoDatabase, consumer: str, days: float) -> int:
    """Remove old dead letters; inbox_dead_letter_age. A dead letter that blocks its stream stays for an operator."""
    before = await database.time() - timedelta(days=days)
    old = {"_id.consumer": consumer, "policy": "skip", "dead_lettered_at": {"$lt": before}}
    total, found = 0, PRUNE_MAX
    while found == PRUNE_MAX:
        ids = await _oldest(database["inbox_dead_letter"], old, "dead_lettered_at")
        total += await _remove(database["inbox_dead_letter"], ids, old)
        found = len(ids)
    return total


async def _oldest(documents: Documents, old: Document, age: str, stored: int = 0) -> list[Document]:
    rows = await documents.find(old, {"_id": 1}).sort(age).skip(stored).limit(PRUNE_MAX).to_list()
    return [row["_id"] for row in rows]


async def _remove(documents: Documents, ids: list[Document], old: Document) -> int:
    """Remove documents that are still old. The ids limit the search; the age alone could match too many documents."""
    return (await documents.delete_many({"_id": {"$in": ids}, **old}, hint="_id_")).deleted_count if ids else 0


async def unblock_without_dead_letter(tx: MongoHandlerTransaction, consumer: str) -> int:
    """Release streams whose blocking dead letter is gone, for instance deleted by hand."""
    rows = await aggregate(tx.of("inbox_stream"), blocked_without_dead_letter(consumer), tx.session)
    if not rows:
        return 0
    facts = {"cause": InboxBlockReason.DRAINING.value, "since": tx.now}
    ids = {"_id": {"$in": [row["_id"] for row in rows]}}
    done = await tx.of("inbox_stream").update_many(ids, [{"$set": facts}], session=tx.session)
    return done.modified_count


def blocked_without_dead_letter(consumer: str) -> Pipeline:
    """Return some streams without a blocking dead letter; inbox_stream_cause and inbox_dead_letter_blocking."""
    dead_letter = {"from": "inbox_dead_letter", "localField": "_id", "foreignField": "stream", "as": "dead_letter"}
    return [
        {"$match": draining_query(consumer, InboxBlockReason.DEAD_LETTER)},
        {
            "$lookup": {
                **dead_letter,
                "pipeline": [{"$match": {"policy": "block"}}, {"$limit": 1}, {"$project": {"_id": 1}}],
            }
        },
        {"$match": {"dead_letter": []}},
        {"$limit": MEND_MAX},
        {"$project": {"_id": 1}},
    ]


async def adopt_orphans(tx: MongoHandlerTransaction, consumer: str) -> int:
    """Drain streams with held events whose document has no block reason.

    This state should never occur; the repair is a precaution.
    """
    rows = await aggregate(tx.of("inbox_held"), orphans(consumer), tx.session)
    for row in rows:
        facts = {"cause": InboxBlockReason.DRAINING.value, "since": tx.now, "waiting": await _count(tx, row["_id"])}
        change = UpdateOne({"_id": row["_id"]}, [{"$set": facts}], upsert=True)
        await tx.of("inbox_stream").bulk_write([change], session=tx.session)
    return len(rows)


def orphans(consumer: str) -> Pipeline:
    """Return some streams with held events but without a block reason; inbox_held_place, one entry per stream."""
    stream = {"from": "inbox_stream", "localField": "_id", "foreignField": "_id", "as": "known"}
    return [
        {"$match": {"stream": all_of(consumer)}},
        {"$group": {"_id": "$stream"}},
        {"$lookup": {**stream, "pipeline": [{"$match": {"cause": {"$exists": True}}}, {"$project": {"_id": 1}}]}},
        {"$match": {"known": []}},
        {"$limit": MEND_MAX},
        {"$project": {"_id": 1}},
    ]


async def _count(tx: MongoHandlerTransaction, stream: Document) -> int:
    return await tx.of("inbox_held").count_documents({"stream": stream}, session=tx.session)


async def aggregate(documents: Documents, pipeline: Pipeline, session: Session | None = None) -> list[Document]:
    """Run a pipeline and return all results."""
    return await (await documents.aggregate(pipeline, session=session)).to_list()
