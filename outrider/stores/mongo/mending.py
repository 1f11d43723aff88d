"""Streams whose record and events do not agree, as nothing of ours leaves them: they are found, and go on.

Somebody may have deleted a dead letter by hand, or a blocked stream. Each step is one bounded transaction, so that a
relay that settles the same stream at that moment either comes first or starts anew.
"""

from __future__ import annotations

from typing import Any

from outrider.outcome import Policy
from outrider.store import Cause
from outrider.stores.mongo import streams
from outrider.stores.mongo.database import Database, Session
from outrider.stores.mongo.documents import to_stream

MEND_MAX = 100
"""Streams mended in one step; the next one comes with the next upkeep."""

Pipeline = list[dict[str, Any]]


async def release_holds(session: Session, database: Database) -> int:
    """Let streams go on that are held for a dead letter which is no longer there."""
    rows = await (await database["outbox_blocked"].aggregate(held_for_nothing(), session=session)).to_list()
    if rows:
        drain = {"cause": Cause.DRAINING.value, "head": None, "until": database.now}
        mine = {"_id": {"$in": [row["_id"] for row in rows]}}
        await database["outbox_blocked"].update_many(mine, [{"$set": drain}], session=session)
    return len(rows)


def held_for_nothing() -> Pipeline:
    """Return some held streams that no dead letter holds; outbox_dead_letter_held."""
    same = {"lane": "lane", "topic": "topic", "stream_key": "key"}
    mine = {"$and": [{"$eq": [f"${ours}", f"$${theirs}"]} for ours, theirs in same.items()]}
    rest: Pipeline = [{"$match": {"policy": Policy.HOLD.value, "$expr": mine}}, {"$limit": 1}, {"$project": {"_id": 1}}]
    let = {theirs: f"$_id.{theirs}" for theirs in same.values()}
    return [
        {"$match": {"cause": Cause.HELD.value}},
        {"$lookup": {"from": "outbox_dead_letter", "let": let, "pipeline": rest, "as": "letter"}},
        {"$match": {"letter": []}},
        {"$limit": MEND_MAX},
        {"$project": {"_id": 1}},
    ]


async def adopt_orphans(session: Session, database: Database) -> int:
    """Block streams whose events wait though nothing says so: a waiting event is found through its blocked stream."""
    rows = await (await database["outbox"].aggregate(orphans(), session=session)).to_list()
    if rows:
        now = await database.time(session)
        await streams.ensure_blocked(session, database, [to_stream(row["_id"]) for row in rows], now)
    return len(rows)


def orphans() -> Pipeline:
    """Return some streams of waiting events that are not blocked; outbox_waiting, without the documents."""
    stream = {"lane": "$waiting", "topic": "$topic", "key": "$stream_key"}
    known = {"from": "outbox_blocked", "localField": "_id", "foreignField": "_id", "as": "known"}
    return [
        {"$match": {"waiting": {"$gte": 0}, "topic": {"$gte": ""}}},
        {"$group": {"_id": stream}},
        {"$lookup": {**known, "pipeline": [{"$project": {"_id": 1}}]}},
        {"$match": {"known": []}},
        {"$limit": MEND_MAX},
        {"$project": {"_id": 1}},
    ]
