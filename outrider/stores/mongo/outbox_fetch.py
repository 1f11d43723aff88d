"""Fetching: reads the events at the start of lanes, and the blocked streams that are due.

All reads of one call use one snapshot, so partial writes of other relays stay invisible. A first query finds the lanes
with events. A second query reads the events in one round trip, with one branch per lane, because quotas are per lane.
"""

from __future__ import annotations

import json
from collections import Counter as Count
from collections.abc import Iterable, Mapping, Sequence
from datetime import datetime
from typing import Any

from bson.binary import UuidRepresentation
from bson.codec_options import CodecOptions
from pymongo import ReplaceOne, UpdateOne
from pymongo.read_concern import ReadConcern

from outrider.event import (
    DeadLetterReason,
    OnDeadLetter,
    OutboxRow,
    Priority,
    Stream,
    TopicRule,
    band_of,
    lane_of,
    topic_of,
)
from outrider.outbox.model import BlockReason, Due, DueStream, Fetched, JournalKind, Lease
from outrider.stores.mongo import journal
from outrider.stores.mongo.database import CODEC, Document, Expression, MongoDatabase, Session
from outrider.stores.mongo.documents import UNMET, copied, inserted, stream_id, to_event, to_stream
from outrider.stores.mongo.operations import run_operations_async
from outrider.stores.mongo.outbox_lanes import owned
from outrider.stores.mongo.staging import Last, SequenceCounter, Wanted, advance, leap, time_position

BRANCHES_MAX = 200
"""The maximum of lanes in one pipeline; the server allows a thousand stages."""

AS_STORED = CODEC.with_options(uuid_representation=UuidRepresentation.UNSPECIFIED)
"""Ids stay in the form of the driver: three conversions to UUID would take longer than the rest of a fetch."""

BATCH = 100_000
"""The maximum of rows in one reply; the server's limit of 16 MB comes first."""

_STREAM = {"waiting": "lane", "topic": "topic", "stream_key": "key"}

FILL_MAX = 500
"""The maximum of foreign documents that are filled in within one transaction."""

KEPT_MAX = 2_000_000
"""The maximum of characters kept from text that is not JSON.

A character takes up to six bytes as a JSON string, and the document must not exceed its limit.
"""

_DEFAULTS: Document = {"headers": "{}", "priority": int(Priority.NORMAL), "schema_version": "1", "attempts": 0}


async def fetch(
    database: MongoDatabase, lease: Lease, quotas: Mapping[int, int], rule: TopicRule, *, filled: bool
) -> Fetched | None:
    """Read the start of each lane up to its quota, and check which lanes the lease still owns.

    The result None means that documents without a lane must be filled in first. Later documents can wait, because their
    positions will be behind all events of the fetch.
    """
    async with database.snapshot() as session:
        found = await _aggregate(database, session, "outbox_lane", lanes_pipeline(lease, database.now))
        clock = {
            kind: [row for row in found if row["kind"] == kind] for kind in ("owned", "blocked", "busy", "laneless")
        }
        if clock["laneless"] and not filled:
            return None
        owned_lanes = frozenset(row["_id"] for row in clock["owned"])
        busy = sorted(row["_id"] for row in clock["busy"] if row["_id"] in owned_lanes and quotas.get(row["_id"]))
        rows: list[Document] = []
        for at in range(0, len(busy), BRANCHES_MAX):
            pipeline = events_pipeline(busy[at : at + BRANCHES_MAX], quotas)
            rows += await _aggregate(database, session, "outbox", pipeline, AS_STORED)
    for row in rows:
        if not row.get("topic"):
            row["topic"] = topic_of(rule, row["event_type"], None, row.get("routing_key"))
    events: list[OutboxRow] = [to_event(row, clock["owned"][0]["now"]) for row in rows]
    return Fetched(events, owned_lanes, owned_lanes & {row["_id"] for row in clock["blocked"]})


def lanes_pipeline(lease: Lease, now: Expression) -> list[dict[str, Any]]:
    """Return the pipeline that finds owned lanes, lanes with blocked streams and lanes with fetchable events.

    Every branch is one scan that skips from lane to lane: outbox_blocked_lane, outbox_fetchable. Documents of foreign
    writers are at the start of outbox_position; the pipeline stops at the first.
    """
    lanes = sorted(lease.epochs)
    laneless = [{"$match": UNMET}, {"$limit": 1}, {"$project": {"kind": "laneless"}}]
    return [
        {"$match": {"$or": owned(lease)} if lanes else {"_id": None}},
        {"$project": {"kind": "owned", "now": now}},
        {"$unionWith": {"coll": "outbox_blocked", "pipeline": [*leap("lane", lanes), {"$set": {"kind": "blocked"}}]}},
        {"$unionWith": {"coll": "outbox", "pipeline": [*leap("fetchable", lanes), {"$set": {"kind": "busy"}}]}},
        {"$unionWith": {"coll": "outbox", "pipeline": laneless}},
    ]


def events_pipeline(lanes: Sequence[int], quotas: Mapping[int, int]) -> list[dict[str, Any]]:
    """Return the pipeline that reads the start of each lane; outbox_fetchable."""
    first, *others = (_start(lane, quotas[lane]) for lane in lanes)
    return [*first, *({"$unionWith": {"coll": "outbox", "pipeline": start}} for start in others)]


def _start(lane: int, quota: int) -> list[dict[str, Any]]:
    return [{"$match": {"fetchable": lane}}, {"$sort": {"position": 1}}, {"$limit": quota}]


async def due(database: MongoDatabase, lease: Lease, events_max: int) -> Due:
    """Return due blocked streams, with their waiting events up to the given maximum."""
    async with database.snapshot() as session:
        [now, lanes] = await _owned_lanes(database, session, lease)
        timed = await _aggregate(database, session, "outbox_blocked", due_pipeline(lanes, events_max))
        ripe = [row for row in timed if row["until"] <= now][:events_max]
        events = await _waiting(database, session, ripe, events_max, now)
    streams = [
        DueStream(to_stream(row["_id"]), BlockReason(row["cause"]), events[to_stream(row["_id"])]) for row in ripe
    ]
    later = timed[len(ripe) :]
    return Due(streams, max(0.0, (later[0]["until"] - now).total_seconds()) if later else None)


async def _owned_lanes(database: MongoDatabase, session: Session, lease: Lease) -> tuple[datetime, list[int]]:
    """Return the current time and the lanes that the lease still owns."""
    if not lease.epochs:
        return await database.time(), []
    pipeline: list[dict[str, Any]] = [{"$match": {"$or": owned(lease)}}, {"$project": {"now": database.now}}]
    found = await _aggregate(database, session, "outbox_lane", pipeline)
    return found[0]["now"] if found else await database.time(), [row["_id"] for row in found]


def due_pipeline(lanes: Sequence[int], events_max: int) -> list[dict[str, Any]]:
    """Return the pipeline for blocked streams with a due time, longest due first; outbox_blocked_due.

    The result may include streams that are not yet due; the first of them gives the next due time.
    """
    timed = {"until": {"$type": "date"}, "lane": {"$in": list(lanes)}}
    return [{"$match": timed}, {"$sort": {"until": 1}}, {"$limit": events_max + 1}]


async def _waiting(
    database: MongoDatabase, session: Session, ripe: Sequence[Document], events_max: int, now: datetime
) -> dict[Stream, list[OutboxRow]]:
    """Read the first event of each due stream, and an equal share of further events for every draining stream."""
    found: dict[Stream, list[OutboxRow]] = {to_stream(row["_id"]): [] for row in ripe}
    draining = [row["_id"] for row in ripe if row["cause"] == BlockReason.DRAINING]
    heads = [row["_id"] for row in ripe if row["cause"] != BlockReason.DRAINING]
    share = max(1, (events_max - len(heads)) // max(1, len(draining)))
    for streams, limit in ((heads, 1), (draining, share)):
        if streams:
            rows = await _aggregate(database, session, "outbox_blocked", waiting_pipeline(streams, limit))
            for row in rows:
                found[to_stream(row["_id"])].append(to_event(row["event"], now))
    return found


def waiting_pipeline(streams: Iterable[Document], limit: int) -> list[dict[str, Any]]:
    """Return the pipeline for the first waiting events of each stream; outbox_waiting."""
    return [
        {"$match": {"_id": {"$in": list(streams)}}},
        {"$lookup": of_stream([{"$sort": {"position": 1}}, {"$limit": limit}], "event")},
        {"$unwind": "$event"},
        {"$project": {"event": 1}},
    ]


def of_stream(rest: list[dict[str, Any]], name: str) -> dict[str, Any]:
    """Return the lookup from a blocked stream to its waiting events; outbox_waiting."""
    same = [{"$eq": [f"${ours}", f"$${theirs}"]} for ours, theirs in _STREAM.items()]
    # The planner cannot infer from the expression that the field exists, and would not use the partial index.
    mine = {"$match": {"waiting": {"$exists": True}, "$expr": {"$and": same}}}
    let = {theirs: f"$_id.{theirs}" for theirs in _STREAM.values()}
    return {"from": "outbox", "let": let, "pipeline": [mine, *rest], "as": name}


async def blocked(database: MongoDatabase, streams: Sequence[Stream]) -> set[Stream]:
    """Return the blocked streams among the given streams."""
    ids = [stream_id(stream) for stream in streams]
    rows = await database["outbox_blocked"].find({"_id": {"$in": ids}}, {"_id": 1}).to_list()
    return {to_stream(row["_id"]) for row in rows}


async def _aggregate(
    database: MongoDatabase,
    session: Session,
    name: str,
    pipeline: list[dict[str, Any]],
    codec: CodecOptions[Document] = CODEC,
) -> list[Document]:
    # The session sets the read concern: a snapshot session rejects the read concern of a collection.
    plain = database[name].with_options(codec_options=codec, read_concern=ReadConcern())
    return await (await plain.aggregate(pipeline, session=session, batchSize=BATCH)).to_list()


async def fill(session: Session, database: MongoDatabase, lanes: int, rule: TopicRule) -> int:
    """Fill in documents without a lane, in order of insertion. Return their number, at most FILL_MAX."""
    found = database["outbox"].find(UNMET, session=session).hint("outbox_position").limit(FILL_MAX)
    rows = await found.to_list()
    if not rows:
        return 0
    now, journaled = await journal.read_switch(session, database)
    bad = {row["_id"]: error_text for row in rows if (error_text := unreadable(row))}
    good = [{**_DEFAULTS, "created_at": now, **_reported(row)} for row in rows if row["_id"] not in bad]
    last = await run_operations_async(advance(_wanted(good, rule), database.now), session, database.schema)
    if changes := _changes(good, last, now, lanes, rule):
        await database["outbox"].bulk_write(changes, session=session)
    if bad:
        dead = [
            _dead({**_DEFAULTS, "created_at": now, **_reported(row)}, bad[row["_id"]], now, lanes, rule)
            for row in rows
            if row["_id"] in bad
        ]
        # A writer may have reused the id of an earlier dead letter.
        replaced = [ReplaceOne({"_id": dead_letter["_id"]}, dead_letter, upsert=True) for dead_letter in dead]
        await database["outbox_dead_letter"].bulk_write(replaced, session=session)
        await database["outbox"].delete_many({"_id": {"$in": list(bad)}}, session=session)
    if journaled:
        await journal.add(session, database, JournalKind.STAGED, [row["_id"] for row in rows], now)
        await journal.add(session, database, JournalKind.DEAD_LETTER, list(bad), now)
    return len(rows)


def unreadable(row: Mapping[str, Any]) -> str | None:
    """Return the reason why a foreign document is unreadable; None for a readable document.

    >>> unreadable({"payload": "{}", "headers": "[]"})
    'headers: not a JSON object'
    """
    for name in ("payload", "headers", "retry"):
        try:
            value = None if row.get(name) is None else json.loads(row[name])
        except (ValueError, RecursionError) as error:
            return f"{name}: not JSON ({error})"
        if name != "payload" and not isinstance(value, dict | None):
            return f"{name}: not a JSON object"
    return None


def _reported(row: Mapping[str, Any]) -> Document:
    """Return the fields of the writer, with the key of the stream."""
    text = {name: value for name, value in row.items() if value is not None}
    text["stream_key"] = row.get("key") or row.get("aggregate_id") or str(row["_id"])
    return text


def _counter(row: Mapping[str, Any], rule: TopicRule) -> SequenceCounter | None:
    if row["stream_key"] == str(row["_id"]):
        return None
    topic = topic_of(rule, row["event_type"], row.get("topic"), row.get("routing_key"))
    return SequenceCounter(topic, row["stream_key"], band_of(row["priority"]))


def _wanted(rows: Sequence[Document], rule: TopicRule) -> dict[SequenceCounter, Wanted]:
    counts = Count(counter for row in rows if (counter := _counter(row, rule)))
    return {counter: Wanted(count, 0) for counter, count in counts.items()}


def _changes(
    rows: Sequence[Document], last: dict[SequenceCounter, Last], now: datetime, lanes: int, rule: TopicRule
) -> list[UpdateOne]:
    left = {counter: wanted.positions for counter, wanted in _wanted(rows, rule).items()}
    changes = []
    for row in rows:
        position = time_position(now)
        if counter := _counter(row, rule):
            left[counter] -= 1
            position = last[counter].position - left[counter]
        lane = lane_of(row["stream_key"], row["priority"], lanes)
        given = {name: row[name] for name in (*_DEFAULTS, "created_at", "stream_key")}
        change = {
            "$set": {**given, **inserted(lane, position)},
            "$unset": {"waiting": "", "claimed_by": "", "claimed_until": ""},
        }
        changes.append(UpdateOne({"_id": row["_id"]}, change))
    return changes


def _dead(row: Document, error_text: str, now: datetime, lanes: int, rule: TopicRule) -> Document:
    """Return the dead letter of an unreadable document. The dead letter blocks no stream and can be listed."""
    stored = {**copied(row, but=("retry",)), "payload": _text(row["payload"]), "headers": "{}"}
    location = {"lane": lane_of(row["stream_key"], row["priority"], lanes), "position": time_position(now)}
    details = {
        "reason": DeadLetterReason.SCHEMA_VALIDATION_FAILED.value,
        "policy": OnDeadLetter.SKIP.value,
        "dead_lettered_at": now,
    }
    topic = topic_of(rule, row["event_type"], row.get("topic"), row.get("routing_key"))
    failure = json.dumps({"kind": "unreadable", "error": error_text})
    return {**stored, **location, **details, "topic": topic, "failure": failure}


def _text(payload: str) -> str:
    return json.dumps(payload[:KEPT_MAX], ensure_ascii=False)
