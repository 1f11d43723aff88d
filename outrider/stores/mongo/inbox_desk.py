"""What people do with a consumer's trouble in MongoDB.

Whoever decides about a stream writes its document first, as consumers do.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from datetime import datetime
from typing import Any, NamedTuple
from uuid import UUID

from pymongo import ReplaceOne, UpdateOne

from outrider.delivery import InboxStream
from outrider.inbox_store import Cause, InboxCriteria, Standing
from outrider.outcome import Policy
from outrider.stores.mongo.database import Database, Document
from outrider.stores.mongo.inbox_documents import (
    LOCK,
    all_of,
    brought_back,
    event_identity,
    letter_facts,
    stand,
    standing,
    stream_identity,
)
from outrider.stores.mongo.inbox_upkeep import Pipeline, aggregate
from outrider.stores.mongo.lending import Lent

Write = Callable[..., Awaitable[Any]]
"""Does something in a transaction of its own."""

Key = tuple[Any, ...]


class Change(NamedTuple):
    """What happens to a stream: the highest number that counts as passed, and how many more wait."""

    identity: Document
    passed: int | None = None
    added: int = 0


class MongoInboxDesk:
    """Listing, replaying, discarding and releasing."""

    def __init__(self, database: Database, write: Write) -> None:
        self._database, self._write = database, write

    async def counts(self, consumer: str | None = None) -> dict[str, int]:
        letters = {} if consumer is None else {"_id": all_of(consumer)}
        rows = await self._aggregate("inbox_stream", counts_pipeline(consumer))
        dead = await self._database.run(self._database["inbox_dead_letter"].count_documents(letters))
        waiting, streams = (rows[0]["waiting"], rows[0]["streams"]) if rows else (0, 0)
        return {"waiting": waiting, "blocked_streams": streams, "dead_letters": dead}

    async def receipts(self, consumer: str, event_ids: Sequence[UUID]) -> list[dict[str, Any]]:
        wanted = {"_id": {"$in": [event_identity(consumer, event_id) for event_id in event_ids]}}
        found = self._database["consumer_inbox"].find(wanted).sort(["received_at", "_id"])
        return [_receipt(row) for row in await self._database.run(found.to_list())]

    async def dead_letters(self, criteria: InboxCriteria) -> list[dict[str, Any]]:
        found = self._database["inbox_dead_letter"].find(_wanted(criteria)).sort("id").limit(criteria.limit)
        return [letter_facts(letter) for letter in await self._database.run(found.to_list())]

    async def streams(self, consumer: str | None, limit: int) -> list[dict[str, Any]]:
        rows = await self._aggregate("inbox_stream", streams_pipeline(consumer, limit))
        return [{**row["_id"], **standing(row)._asdict(), "since": row["since"]} for row in rows]

    async def replay(self, ids: Sequence[int], actor: str) -> int:
        count: int = await self._write(_replay, ids, actor)
        return count

    async def discard(self, ids: Sequence[int], actor: str) -> int:
        count: int = await self._write(_discard, ids, actor)
        return count

    async def release(self, consumer: str, stream: InboxStream, actor: str) -> bool:
        released: bool = await self._write(_release, consumer, stream, actor)
        return released

    async def _aggregate(self, name: str, pipeline: Pipeline) -> list[Document]:
        return await self._database.run(aggregate(self._database[name], pipeline))


def _waiting(consumer: str | None) -> Document:
    waits: Document = {"cause": {"$exists": True}}
    return waits if consumer is None else {"_id.consumer": consumer, **waits}


def counts_pipeline(consumer: str | None) -> Pipeline:
    """Count the streams that wait, and their events; inbox_stream_cause."""
    sums = {"_id": None, "waiting": {"$sum": "$waiting"}, "streams": {"$sum": 1}}
    return [{"$match": _waiting(consumer)}, {"$group": sums}]


def streams_pipeline(consumer: str | None, limit: int) -> Pipeline:
    """Return streams that wait, held ones first, because they wait for a person; inbox_stream_cause."""
    last = {"$ne": ["$cause", Cause.HELD.value]}
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


async def _replay(lent: Lent, ids: Sequence[int], actor: str) -> int:
    """Put dead letters back to their places, without receipts. A stream that has no document gets one."""
    letters = await _take(lent, ids)
    changes = _changes(letters, added=1)
    await _lock(lent, changes, make=True)
    back = [ReplaceOne({"_id": row["_id"]}, row, upsert=True) for row in map(brought_back, letters)]
    if back:
        await lent.of("inbox_waiting").bulk_write(back, session=lent.session)
        gone = {"_id": {"$in": [letter["_id"] for letter in letters]}}
        await lent.of("consumer_inbox").delete_many(gone, session=lent.session)
    await _go_on(lent, changes)
    return await _record(lent, actor, "inbox_replay", letters)


async def _discard(lent: Lent, ids: Sequence[int], actor: str) -> int:
    """Give dead letters up for good. Their receipts stay; the number of one that held its stream counts as passed."""
    letters = await _take(lent, ids)
    changes = _changes([letter for letter in letters if letter["policy"] == Policy.HOLD], added=0)
    await _lock(lent, changes, make=False)
    await _go_on(lent, changes)
    return await _record(lent, actor, "inbox_discard", letters)


async def _release(lent: Lent, consumer: str, stream: InboxStream, actor: str) -> bool:
    """Go on as if everything before the first event behind the gap had been seen; inbox_waiting_sequence."""
    identity = stream_identity(consumer, stream)
    row = await lent.of("inbox_stream").find_one_and_update({"_id": identity}, LOCK, session=lent.session)
    at = standing(row) if row else Standing()
    if at.cause is not Cause.EARLY:
        return False
    behind = {"stream": identity, "sequence": {"$gt": -1 if at.seen is None else at.seen}}
    found = lent.of("inbox_waiting").find(behind, {"sequence": 1}, session=lent.session)
    first = await found.sort(["sequence", "id"]).limit(1).to_list()
    for waiting in first:
        on = at._replace(seen=waiting["sequence"] - 1, cause=Cause.DRAINING)
        await lent.of("inbox_stream").bulk_write([stand(identity, on, lent.now)], session=lent.session)
    return bool(await _record(lent, actor, "inbox_release", first))


async def _take(lent: Lent, ids: Sequence[int]) -> list[Document]:
    """Remove dead letters, and return them in the order of their places; inbox_dead_letter_id."""
    wanted = {"id": {"$in": list(ids)}}
    letters = await lent.of("inbox_dead_letter").find(wanted, session=lent.session).sort("id").to_list()
    gone = {"_id": {"$in": [letter["_id"] for letter in letters]}}
    await lent.of("inbox_dead_letter").delete_many(gone, session=lent.session)
    return letters


def _changes(letters: Sequence[Document], *, added: int) -> dict[Key, Change]:
    changes: dict[Key, Change] = {}
    for letter in letters:
        key = tuple(letter["stream"].values())
        known = changes.get(key, Change(letter["stream"]))
        passed = [number for number in (known.passed, letter["sequence"]) if number is not None and not added]
        changes[key] = known._replace(passed=max(passed, default=None), added=known.added + added)
    return changes


async def _lock(lent: Lent, changes: dict[Key, Change], *, make: bool) -> None:
    locks = [UpdateOne({"_id": change.identity}, LOCK, upsert=make) for _, change in sorted(changes.items())]
    if locks:
        await lent.of("inbox_stream").bulk_write(locks, session=lent.session)


async def _go_on(lent: Lent, changes: dict[Key, Change]) -> None:
    """Let streams drain that no dead letter holds any more; forget those of which nothing is left."""
    ids = [change.identity for change in changes.values()]
    if not ids:
        return
    rows = await lent.of("inbox_stream").find({"_id": {"$in": ids}}, session=lent.session).to_list()
    held = {"stream": {"$in": ids}, "policy": "hold"}
    holders = await lent.of("inbox_dead_letter").find(held, {"stream": 1}, session=lent.session).to_list()
    taken = {tuple(letter["stream"].values()) for letter in holders}
    moves = [_move(lent, row, changes[key], key in taken) for row in rows if (key := tuple(row["_id"].values()))]
    if moves:
        await lent.of("inbox_stream").bulk_write(moves, session=lent.session)


def _move(lent: Lent, row: Document, change: Change, held: bool) -> Any:
    at = standing(row)
    waiting = at.waiting + change.added
    seen = at.seen if at.seen is None or change.passed is None else max(at.seen, change.passed)
    cause = Cause.HELD if held else Cause.DRAINING if waiting else None
    return stand(row["_id"], Standing(seen, cause, waiting), lent.now)


async def _record(lent: Lent, actor: str, verb: str, rows: Sequence[Document]) -> int:
    """Write down what a person did; return to how many."""
    if rows:
        now: datetime = await lent.database.time(lent.session)
        facts = {"at": now, "actor": actor, "verb": verb}
        noted = [{**facts, "event_id": row["_id"]["event_id"], "consumer": row["_id"]["consumer"]} for row in rows]
        await lent.of("outbox_operation").insert_many(noted, session=lent.session)
    return len(rows)
