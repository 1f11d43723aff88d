"""What keeps an inbox in MongoDB small, and what finds again what was lost from sight. All of it in bounded steps."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

from pymongo import UpdateOne

from outrider.inbox_store import Cause
from outrider.stores.mongo.database import Database, Document, Documents, Expression, Session, milliseconds
from outrider.stores.mongo.inbox_documents import all_of
from outrider.stores.mongo.lending import Lent

MEND_MAX = 100
PRUNE_MAX = 1_000

Pipeline = list[dict[str, Any]]


def draining_query(consumer: str, cause: Cause) -> Document:
    """Return the streams whose events wait for a cause; inbox_stream_cause."""
    return {"_id.consumer": consumer, "cause": cause.value}


def overdue_pipeline(consumer: str, seconds: float, limit: int, now: Expression) -> Pipeline:
    """Return the streams that have waited longest, and of those the ones that have waited too long; inbox_stream_cause.

    The limit comes before the time, so that no more are looked at than would be returned.
    """
    late = {"$lt": ["$since", {"$subtract": [now, milliseconds(seconds)]}]}
    found = draining_query(consumer, Cause.EARLY)
    return [{"$match": found}, {"$sort": {"since": 1}}, {"$limit": limit}, {"$match": {"$expr": late}}]


async def prune_receipts(database: Database, consumer: str, days: float) -> int:
    """Remove old receipts; consumer_inbox_age. One stays as long as its dead letter: the event is not done with."""
    before = await database.time() - timedelta(days=days)
    old = {"_id.consumer": consumer, "received_at": {"$lt": before}}
    total, kept, found = 0, 0, PRUNE_MAX
    while found == PRUNE_MAX:
        # Those that stay are at the front by now, in the order in which they were met.
        ids = await _oldest(database["consumer_inbox"], old, "received_at", kept)
        letters = await database["inbox_dead_letter"].find({"_id": {"$in": ids}}, {"_id": 1}).to_list()
        buried = {row["_id"]["event_id"] for row in letters}
        done_with = [identity for identity in ids if identity["event_id"] not in buried]
        total += await _remove(database["consumer_inbox"], done_with, old)
        kept, found = kept + len(buried), len(ids)
    return total


async def prune_dead_letters(database: Database, consumer: str, days: float) -> int:
    """Remove old dead letters; inbox_dead_letter_age. One that holds its stream is all that lets it go on."""
    before = await database.time() - timedelta(days=days)
    old = {"_id.consumer": consumer, "policy": "skip", "buried_at": {"$lt": before}}
    total, found = 0, PRUNE_MAX
    while found == PRUNE_MAX:
        ids = await _oldest(database["inbox_dead_letter"], old, "buried_at")
        total += await _remove(database["inbox_dead_letter"], ids, old)
        found = len(ids)
    return total


async def _oldest(documents: Documents, old: Document, age: str, kept: int = 0) -> list[Document]:
    rows = await documents.find(old, {"_id": 1}).sort(age).skip(kept).limit(PRUNE_MAX).to_list()
    return [row["_id"] for row in rows]


async def _remove(documents: Documents, ids: list[Document], old: Document) -> int:
    """Remove documents that are still old; by their ids, or the server may look at everything that is as old."""
    return (await documents.delete_many({"_id": {"$in": ids}, **old}, hint="_id_")).deleted_count if ids else 0


async def release_holds(lent: Lent, consumer: str) -> int:
    """Let streams go on that are held for a dead letter which is no longer there, deleted by hand for instance."""
    rows = await aggregate(lent.of("inbox_stream"), held_for_nothing(consumer), lent.session)
    if not rows:
        return 0
    facts = {"cause": Cause.DRAINING.value, "since": lent.now}
    ids = {"_id": {"$in": [row["_id"] for row in rows]}}
    done = await lent.of("inbox_stream").update_many(ids, [{"$set": facts}], session=lent.session)
    return done.modified_count


def held_for_nothing(consumer: str) -> Pipeline:
    """Return some streams that no dead letter holds; inbox_stream_cause and inbox_dead_letter_held."""
    letter = {"from": "inbox_dead_letter", "localField": "_id", "foreignField": "stream", "as": "letter"}
    return [
        {"$match": draining_query(consumer, Cause.HELD)},
        {"$lookup": {**letter, "pipeline": [{"$match": {"policy": "hold"}}, {"$limit": 1}, {"$project": {"_id": 1}}]}},
        {"$match": {"letter": []}},
        {"$limit": MEND_MAX},
        {"$project": {"_id": 1}},
    ]


async def adopt_orphans(lent: Lent, consumer: str) -> int:
    """Let streams drain whose events wait though nothing says so. None should ever be; if one is, it is found again."""
    rows = await aggregate(lent.of("inbox_waiting"), orphans(consumer), lent.session)
    for row in rows:
        facts = {"cause": Cause.DRAINING.value, "since": lent.now, "waiting": await _count(lent, row["_id"])}
        change = UpdateOne({"_id": row["_id"]}, [{"$set": facts}], upsert=True)
        await lent.of("inbox_stream").bulk_write([change], session=lent.session)
    return len(rows)


def orphans(consumer: str) -> Pipeline:
    """Return some streams of waiting events that say nothing of them; inbox_waiting_place, each stream once."""
    stream = {"from": "inbox_stream", "localField": "_id", "foreignField": "_id", "as": "known"}
    return [
        {"$match": {"stream": all_of(consumer)}},
        {"$group": {"_id": "$stream"}},
        {"$lookup": {**stream, "pipeline": [{"$match": {"cause": {"$exists": True}}}, {"$project": {"_id": 1}}]}},
        {"$match": {"known": []}},
        {"$limit": MEND_MAX},
        {"$project": {"_id": 1}},
    ]


async def _count(lent: Lent, stream: Document) -> int:
    return await lent.of("inbox_waiting").count_documents({"stream": stream}, session=lent.session)


async def aggregate(documents: Documents, pipeline: Pipeline, session: Session | None = None) -> list[Document]:
    """Run a pipeline, and return all that it finds."""
    return await (await documents.aggregate(pipeline, session=session)).to_list()
