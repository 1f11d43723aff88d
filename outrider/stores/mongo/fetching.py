"""Reading lanes from their start, and blocked streams whose time has come.

All that one call reads is of one moment, so no half of what another relay writes is ever seen. A first look tells which
lanes have anything; then their events come in one round trip, with a branch for each lane, because each has its quota.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from datetime import datetime
from typing import Any

from bson.binary import UuidRepresentation
from bson.codec_options import CodecOptions
from pymongo.read_concern import ReadConcern

from outrider.event import StagedEvent, Stream
from outrider.store import Cause, Due, DueStream, Fetched, Lease
from outrider.stores.mongo.database import CODEC, Database, Document, Expression, Session
from outrider.stores.mongo.documents import UNMET, stream_id, to_event, to_stream
from outrider.stores.mongo.ownership import owned

BRANCHES_MAX = 200
"""Lanes read in one pipeline; the server takes a thousand stages."""

AS_STORED = CODEC.with_options(uuid_representation=UuidRepresentation.UNSPECIFIED)
"""Ids stay what the driver reads and writes fastest: with UUIDs, three conversions take longer than all the rest."""

BATCH = 100_000
"""Rows in one reply; the server's limit of 16 MB comes first."""


async def fetch(database: Database, lease: Lease, quotas: Mapping[int, int], *, filled: bool) -> Fetched | None:
    """Read the start of each lane, up to its quota, and which of the lanes are still owned.

    None: there are documents without a lane, to be filled in first. Those that come after that have time: they will be
    placed behind whatever is read here.
    """
    async with database.snapshot() as session:
        found = await _aggregate(database, session, "outbox_lane", lanes_pipeline(lease, database.now))
        told = {
            kind: [row for row in found if row["kind"] == kind] for kind in ("owned", "blocked", "busy", "laneless")
        }
        if told["laneless"] and not filled:
            return None
        owned_lanes = frozenset(row["_id"] for row in told["owned"])
        busy = sorted(row["_id"] for row in told["busy"] if row["_id"] in owned_lanes and row["_id"] in quotas)
        rows: list[Document] = []
        for at in range(0, len(busy), BRANCHES_MAX):
            pipeline = events_pipeline(busy[at : at + BRANCHES_MAX], quotas)
            rows += await _aggregate(database, session, "outbox", pipeline, AS_STORED)
    events: list[StagedEvent] = [to_event(row, told["owned"][0]["now"]) for row in rows]
    return Fetched(events, owned_lanes, owned_lanes & {row["_id"] for row in told["blocked"]})


def lanes_pipeline(lease: Lease, now: Expression) -> list[dict[str, Any]]:
    """Return which lanes are owned, which have blocked streams, and which have something at their start.

    Each is one scan that leaps from lane to lane: outbox_blocked_lane, outbox_fetchable. Documents from elsewhere, of
    which one is enough, are at the start of outbox_position.
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


def leap(name: str, lanes: Sequence[int]) -> list[dict[str, Any]]:
    """Return the stages that name those of the lanes that are there, by an index that begins with this field."""
    return [{"$match": {name: {"$in": list(lanes)}}}, {"$sort": {name: 1}}, {"$group": {"_id": f"${name}"}}]


def events_pipeline(lanes: Sequence[int], quotas: Mapping[int, int]) -> list[dict[str, Any]]:
    """Return the pipeline that reads the start of each lane; outbox_fetchable."""
    first, *others = (_start(lane, quotas[lane]) for lane in lanes)
    return [*first, *({"$unionWith": {"coll": "outbox", "pipeline": start}} for start in others)]


def _start(lane: int, quota: int) -> list[dict[str, Any]]:
    return [{"$match": {"fetchable": lane}}, {"$sort": {"position": 1}}, {"$limit": quota}]


async def due(database: Database, lease: Lease, events_max: int) -> Due:
    """Return blocked streams whose time has come, with as many of their waiting events as there is room for."""
    async with database.snapshot() as session:
        [now, lanes] = await _owned_lanes(database, session, lease)
        timed = await _aggregate(database, session, "outbox_blocked", due_pipeline(lanes, events_max))
        ripe = [row for row in timed if row["until"] <= now][:events_max]
        events = await _waiting(database, session, ripe, events_max, now)
    streams = [DueStream(to_stream(row["_id"]), Cause(row["cause"]), events[to_stream(row["_id"])]) for row in ripe]
    later = timed[len(ripe) :]
    return Due(streams, max(0.0, (later[0]["until"] - now).total_seconds()) if later else None)


async def _owned_lanes(database: Database, session: Session, lease: Lease) -> tuple[datetime, list[int]]:
    """Return what time it is, and the lanes that are still the lease's own."""
    if not lease.epochs:
        return await database.time(), []
    pipeline: list[dict[str, Any]] = [{"$match": {"$or": owned(lease)}}, {"$project": {"now": database.now}}]
    found = await _aggregate(database, session, "outbox_lane", pipeline)
    return found[0]["now"] if found else await database.time(), [row["_id"] for row in found]


def due_pipeline(lanes: Sequence[int], events_max: int) -> list[dict[str, Any]]:
    """Blocked streams with a time, longest due first, and the next one; outbox_blocked_due."""
    timed = {"until": {"$type": "date"}, "lane": {"$in": list(lanes)}}
    return [{"$match": timed}, {"$sort": {"until": 1}}, {"$limit": events_max + 1}]


async def _waiting(
    database: Database, session: Session, ripe: Sequence[Document], events_max: int, now: datetime
) -> dict[Stream, list[StagedEvent]]:
    """Read the head of each stream, and of those that drain as many as fits if all of them get their share."""
    found: dict[Stream, list[StagedEvent]] = {to_stream(row["_id"]): [] for row in ripe}
    draining = [row["_id"] for row in ripe if row["cause"] == Cause.DRAINING]
    heads = [row["_id"] for row in ripe if row["cause"] != Cause.DRAINING]
    share = max(1, (events_max - len(heads)) // max(1, len(draining)))
    for streams, limit in ((heads, 1), (draining, share)):
        if streams:
            rows = await _aggregate(database, session, "outbox_blocked", waiting_pipeline(streams, limit))
            for row in rows:
                found[to_stream(row["_id"])].append(to_event(row["event"], now))
    return found


def waiting_pipeline(streams: Iterable[Document], limit: int) -> list[dict[str, Any]]:
    """The first waiting events of each stream; outbox_waiting."""
    return [
        {"$match": {"_id": {"$in": list(streams)}}},
        {"$lookup": of_stream([{"$sort": {"position": 1}}, {"$limit": limit}], "event")},
        {"$unwind": "$event"},
        {"$project": {"event": 1}},
    ]


def of_stream(rest: list[dict[str, Any]], name: str) -> dict[str, Any]:
    """Return the lookup, from a blocked stream, of its waiting events; outbox_waiting."""
    same = [{"$eq": [f"${ours}", f"$${theirs}"]} for ours, theirs in _STREAM.items()]
    # The planner does not see by the expression that the field is there, and would not use the partial index.
    mine = {"$match": {"waiting": {"$exists": True}, "$expr": {"$and": same}}}
    let = {theirs: f"$_id.{theirs}" for theirs in _STREAM.values()}
    return {"from": "outbox", "let": let, "pipeline": [mine, *rest], "as": name}


_STREAM = {"waiting": "lane", "topic": "topic", "stream_key": "key"}


async def blocked(database: Database, streams: Sequence[Stream]) -> set[Stream]:
    """Return which of the streams are blocked."""
    ids = [stream_id(stream) for stream in streams]
    rows = await database["outbox_blocked"].find({"_id": {"$in": ids}}, {"_id": 1}).to_list()
    return {to_stream(row["_id"]) for row in rows}


async def _aggregate(
    database: Database,
    session: Session,
    name: str,
    pipeline: list[dict[str, Any]],
    codec: CodecOptions[Document] = CODEC,
) -> list[Document]:
    # The session says how to read: a snapshot session refuses a collection's own read concern.
    plain = database[name].with_options(codec_options=codec, read_concern=ReadConcern())
    return await (await plain.aggregate(pipeline, session=session, batchSize=BATCH)).to_list()
