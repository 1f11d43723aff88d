"""Blocked streams: written and let go inside a settling transaction."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from datetime import datetime
from typing import Any, NamedTuple

from pymongo import UpdateOne

from outrider.event import Stream
from outrider.store import Cause
from outrider.stores.mongo.database import Database, Document, Session
from outrider.stores.mongo.documents import stream_id
from outrider.stores.mongo.fetching import of_stream


class Block(NamedTuple):
    """Why a stream waits, behind which event, and until when (None: until a person acts)."""

    cause: Cause
    head: int | None
    until: datetime | None


async def write(
    session: Session, database: Database, blocks: Mapping[Stream, Block], loose: Iterable[Stream], now: datetime
) -> None:
    """Block streams; then let go of the loose ones, and of those that only drain, if nothing of them waits."""
    if blocks:
        await database["outbox_blocked"].bulk_write([_block(*pair) for pair in blocks.items()], session=session)
    draining = {stream for stream, block in blocks.items() if block.cause is Cause.DRAINING}
    await let_go(session, database, draining | (set(loose) - blocks.keys()), now)


def _block(stream: Stream, block: Block) -> UpdateOne:
    """Block a stream, or change why it is blocked; only a person lifts a hold."""
    facts = {"lane": stream.lane, "cause": block.cause.value, "head": block.head, "until": block.until}
    identity = stream_id(stream)
    if block.cause is Cause.HELD:
        return UpdateOne({"_id": identity}, [{"$set": facts}], upsert=True)
    kept = {"$eq": ["$cause", Cause.HELD.value]}
    unless_held = {name: {"$cond": [kept, f"${name}", value]} for name, value in facts.items()}
    return UpdateOne({"_id": identity}, [{"$set": unless_held}], upsert=True)


async def ensure_blocked(session: Session, database: Database, streams: Iterable[Stream], now: datetime) -> None:
    """See to it that parked events can be found, even if the head they were parked behind has vanished."""
    changes = [
        UpdateOne(
            {"_id": stream_id(stream)},
            {"$setOnInsert": {"lane": stream.lane, "cause": Cause.DRAINING.value, "head": None, "until": now}},
            upsert=True,
        )
        for stream in streams
    ]
    if changes:
        await database["outbox_blocked"].bulk_write(changes, session=session)


async def let_go(session: Session, database: Database, streams: Iterable[Stream], now: datetime) -> None:
    """Let streams of which nothing waits go; the others drain. A held one stays held."""
    ids = [stream_id(stream) for stream in streams]
    if not ids:
        return
    blocked = database["outbox_blocked"]
    found = await (await blocked.aggregate(loose_pipeline(ids), session=session)).to_list()
    waiting = [row["_id"] for row in found if row["waiting"]]
    empty = [row["_id"] for row in found if not row["waiting"]]
    drain = {"$set": {"cause": Cause.DRAINING.value, "head": None, "until": now}}
    if waiting:
        await blocked.update_many({"_id": {"$in": waiting}}, drain, session=session)
    if empty:
        await blocked.delete_many({"_id": {"$in": empty}}, session=session)


def loose_pipeline(ids: list[Document]) -> list[dict[str, Any]]:
    """Say of each blocked stream that no person holds whether anything of it waits; outbox_waiting."""
    return [
        {"$match": {"_id": {"$in": ids}, "cause": {"$ne": Cause.HELD.value}}},
        {"$lookup": of_stream([{"$limit": 1}, {"$project": {"_id": 1}}], "waiting")},
        {"$project": {"waiting": {"$ne": ["$waiting", []]}}},
    ]
