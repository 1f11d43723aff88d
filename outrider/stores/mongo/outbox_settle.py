"""Settling: writes outcomes to documents that still exist in lanes that the lease still owns.

One transaction does all writes and starts with the fence. Documents move first, and streams are blocked or released
after, so the order of outcomes within a call cannot strand an event. A stream that a call blocks stays blocked despite
other confirmed events. Only an operator releases a stream that is blocked by a dead letter.
"""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime, timedelta
from typing import Any, NamedTuple, TypeVar
from uuid import UUID

from pymongo import UpdateMany, UpdateOne
from pymongo.errors import BulkWriteError

from outrider.brokers.base import Confirmed
from outrider.event import SKIPPED_TYPE, OnDeadLetter, OutboxRow, Stream, uuid7
from outrider.outbox import model
from outrider.outbox.model import (
    BlockReason,
    DeadLettered,
    Defer,
    JournalKind,
    Lease,
    Park,
    Retry,
    Settlement,
    Settlements,
    State,
)
from outrider.retry import ATTEMPTS_MAX
from outrider.stores.mongo import journal, outbox_lanes
from outrider.stores.mongo.database import Document, MongoDatabase, Session, milliseconds
from outrider.stores.mongo.documents import CLAIM_MAX, RowEvent, becoming, copied, departed, stream_id
from outrider.stores.mongo.outbox_fetch import of_stream

SETTLEABLE = sorted(model.guard("confirm"))

_LOOKED_AT = dict.fromkeys(("lane", "state", "failure", "priority", "key", "attempts"), 1)

DUPLICATE = 11000

T = TypeVar("T")

CHUNK_BYTES_MAX = 16 * 2**20

_OWN = ("_id", "event_type", "payload", "headers", "attempts", "failure", "available_at")


@dataclass(slots=True)
class MongoWriteSet:
    """The writes of one call: changes of documents and of their streams."""

    now: datetime
    journaled: bool
    changes: list[UpdateOne | UpdateMany] = field(default_factory=list)
    parked: dict[tuple[int, str], list[UUID]] = field(default_factory=lambda: defaultdict(list))
    parked_streams: set[Stream] = field(default_factory=set)
    confirmed: list[Settlement] = field(default_factory=list)
    dead_lettered: list[tuple[Settlement, DeadLettered]] = field(default_factory=list)
    blocks: dict[Stream, MongoBlock] = field(default_factory=dict)

    def add(self, settlement: Settlement) -> None:
        """Add one settlement."""
        event, stream, outcome = settlement
        match outcome:
            case Confirmed():
                self.confirmed.append(settlement)
            case Retry(delay_seconds, failure):
                suspect = failure.get("kind") == "unknown"
                self._change(event, stream, State.FAILED, failure=json.dumps(failure), suspect=suspect, spent=1)
                self.blocks[stream] = MongoBlock(BlockReason.FAILED, event.position, self._after(delay_seconds))
            case Defer(delay_seconds):
                self._change(event, stream, State.DEFERRED)
                due = event.available_at if delay_seconds is None else self._after(delay_seconds)
                self.blocks[stream] = MongoBlock(BlockReason.DEFERRED, event.position, due or self.now)
            case Park():
                self.parked[stream.lane, stream.topic].append(event.event_id)
                self.parked_streams.add(stream)
            case DeadLettered():
                self.dead_lettered.append((settlement, outcome))

    def _after(self, delay_seconds: float) -> datetime:
        return self.now + timedelta(milliseconds=milliseconds(delay_seconds))

    def _change(self, event: OutboxRow, stream: Stream, state: State, *, spent: int = 0, **facts: Any) -> None:
        change = becoming(state, stream.lane, topic=stream.topic, **facts)
        # The number of attempts of a foreign document may be the highest that a field can have.
        spent = spent if event.attempts < ATTEMPTS_MAX else 0
        self.changes.append(UpdateOne({"_id": event.event_id}, {**change, "$inc": {"attempts": spent}}))

    def updates(self) -> list[UpdateOne | UpdateMany]:
        """Return all changes of documents. One update parks the events of a lane and topic."""
        for (lane, topic), event_ids in self.parked.items():
            change = becoming(State.PARKED, lane, topic=topic)
            self.changes.append(UpdateMany({"_id": {"$in": event_ids}}, change))
        return self.changes

    def block_dead_lettered(self, stream: Stream, block: MongoBlock) -> None:
        """Block a stream for a dead letter.

        A block overrides every other reason; a skip yields to the delay of another event.
        """
        if block.cause is BlockReason.DEAD_LETTER or stream not in self.blocks:
            self.blocks[stream] = block


async def ensure_blocked(session: Session, database: MongoDatabase, streams: Iterable[Stream], now: datetime) -> None:
    """Insert missing blocked documents of parked events, for a stream whose first event is gone."""
    changes = [
        UpdateOne(
            {"_id": stream_id(stream)},
            {"$setOnInsert": {"lane": stream.lane, "cause": BlockReason.DRAINING.value, "head": None, "until": now}},
            upsert=True,
        )
        for stream in streams
    ]
    if changes:
        await database["outbox_blocked"].bulk_write(changes, session=session)


async def write(
    session: Session,
    database: MongoDatabase,
    blocks: Mapping[Stream, MongoBlock],
    maybe_empty: Iterable[Stream],
    now: datetime,
) -> None:
    """Block streams. Then release draining and loose streams without waiting events."""
    if blocks:
        await database["outbox_blocked"].bulk_write([_block(*pair) for pair in blocks.items()], session=session)
    draining = {stream for stream, block in blocks.items() if block.cause is BlockReason.DRAINING}
    await unblock(session, database, draining | (set(maybe_empty) - blocks.keys()), now)


async def settle(
    session: Session,
    database: MongoDatabase,
    lease: Lease,
    settlements: Settlements,
    *,
    lanes: int,
    archive: bool,
) -> int:
    """Write outcomes; return the number of applied outcomes."""
    outcomes, emptied = settlements.outcomes(), settlements.emptied
    owned, now, journaled = await outbox_lanes.fence(session, database, lease.only(_lanes(outcomes, emptied)))
    rows = await _rows(session, database, outcomes, owned, now)
    live = _live(outcomes, rows)
    writes = MongoWriteSet(now, journaled)
    for settlement in live:
        writes.add(settlement)
    await _write(session, database, writes, rows, lanes=lanes, archive=archive)
    maybe_empty = {s.stream for s in writes.confirmed if s.event.state in model.WAITING}
    maybe_empty |= {stream for stream in emptied if stream.lane in owned}
    await write(session, database, writes.blocks, maybe_empty, now)
    await ensure_blocked(session, database, writes.parked_streams - writes.blocks.keys(), now)
    if values := settlements.raised_values(owned):
        changes = [
            UpdateOne({"_id": value_identity(rule, stream)}, {"$max": {"value": value}}, upsert=True)
            for rule, stream, value in values
        ]
        await database["payload_last_value"].bulk_write(changes, session=session)
    return len(live)


def value_identity(rule: str, stream: Stream) -> Document:
    """Return the `_id` of the last value of an increasing field in a stream."""
    return {"rule": rule, **stream._asdict()}


def _lanes(settlements: Sequence[Settlement], emptied: Sequence[Stream]) -> set[int]:
    return {settlement.stream.lane for settlement in settlements} | {stream.lane for stream in emptied}


async def _rows(
    session: Session, database: MongoDatabase, settlements: Sequence[Settlement], owned: frozenset[int], now: datetime
) -> dict[UUID, Document]:
    """Read the documents that may be settled: present, in an owned lane, and without a writer's claim."""
    if not settlements or not owned:
        return {}
    wanted = {
        "_id": {"$in": [settlement.event.event_id for settlement in settlements]},
        "lane": {"$in": sorted(owned)},
        "state": {"$in": SETTLEABLE},
        "$or": [
            {"state": {"$ne": State.OPTIMISTIC.value}},
            {"claimed_until": {"$lte": now}},
            {"claimed_until": {"$gt": now + CLAIM_MAX}},
        ],
    }
    return {row["_id"]: row for row in await database["outbox"].find(wanted, _LOOKED_AT, session=session).to_list()}


def _live(settlements: Sequence[Settlement], rows: Mapping[UUID, Document]) -> list[Settlement]:
    """Return the settlements to write. The first of two settlements for an event wins."""
    first: dict[UUID, Settlement] = {}
    for settlement in settlements:
        first.setdefault(settlement.event.event_id, settlement)
    return [s for event_id, s in first.items() if event_id in rows and rows[event_id]["lane"] == s.stream.lane]


async def _write(
    session: Session,
    database: MongoDatabase,
    writes: MongoWriteSet,
    rows: Mapping[UUID, Document],
    *,
    lanes: int,
    archive: bool,
) -> None:
    if changes := writes.updates():
        await database["outbox"].bulk_write(changes, session=session)
    removed = [_leaving(settlement, rows, lanes) for settlement in writes.confirmed]
    await depart(session, database, removed, writes.now, archive=archive, journaled=writes.journaled)
    for settlement, outcome in writes.dead_lettered:
        document = _leaving(settlement, rows, lanes)
        document["attempts"] = min(document["attempts"] + 1, ATTEMPTS_MAX)
        stream = settlement.stream
        block = await dead_letter(session, database, document, stream, outcome, writes.now, journaled=writes.journaled)
        writes.block_dead_lettered(stream, block)


def _leaving(settlement: Settlement, rows: Mapping[UUID, Document], lanes: int) -> Document:
    """Return the document of a leaving event with the topic that the relay resolved."""
    document = departed(settlement.event, lanes)
    row = rows[settlement.event.event_id]
    return {**document, **copied(row, but=("_id",)), "topic": settlement.stream.topic}


async def depart(
    session: Session,
    database: MongoDatabase,
    removed: Sequence[Document],
    now: datetime,
    *,
    archive: bool,
    journaled: bool,
) -> None:
    """Remove delivered events from the outbox. An archived event with the same id is replaced."""
    if not removed:
        return
    mine = {"_id": {"$in": [row["_id"] for row in removed]}}
    if archive:
        await database["outbox_archive"].delete_many(mine, session=session)
        await database["outbox_archive"].insert_many([{**row, "sent_at": now} for row in removed], session=session)
    await database["outbox"].delete_many(mine, session=session)
    if journaled:
        await journal.add(session, database, _delivered(archive), [row["_id"] for row in removed], now)


def _delivered(archive: bool) -> JournalKind:
    return JournalKind.ARCHIVED if archive else JournalKind.SENT


async def dead_letter(  # noqa: PLR0917 - a transition needs all of these
    session: Session,
    database: MongoDatabase,
    row: Document,
    stream: Stream,
    outcome: DeadLettered,
    now: datetime,
    *,
    journaled: bool,
) -> MongoBlock:
    """Move an event to the dead letters; return the block of its stream.

    Under `skip`, a numbered event leaves a marker in its position.
    """
    details = {"reason": outcome.reason.value, "policy": outcome.policy.value, "failure": json.dumps(outcome.failure)}
    dead = {**row, "topic": stream.topic, **details, "dead_lettered_at": now}
    await database["outbox_dead_letter"].replace_one({"_id": row["_id"]}, dead, upsert=True, session=session)
    await database["outbox"].delete_one({"_id": row["_id"]}, session=session)
    if journaled:
        await journal.add(session, database, JournalKind.DEAD_LETTER, [row["_id"]], now)
    if outcome.policy is OnDeadLetter.BLOCK:
        return MongoBlock(BlockReason.DEAD_LETTER, row["position"], None)
    if marker := skip_marker(dead, State.FAILED):
        await database["outbox"].insert_one(marker, session=session)
        if journaled:
            await journal.add(session, database, JournalKind.STAGED, [marker["_id"]], now)
        return MongoBlock(BlockReason.FAILED, row["position"], now)
    return MongoBlock(BlockReason.DRAINING, None, now)


class Uneven(Exception):
    """Signals that an event has changed since the fetch; the caller must then settle event by event."""


def fit(events: Sequence[OutboxRow]) -> bool:
    """Return whether events may be confirmed without a read: no optimistic claim and no duplicate."""
    optimistic = any(event.state == State.OPTIMISTIC for event in events)
    return not optimistic and len({event.event_id for event in events}) == len(events)


async def confirm(
    session: Session, database: MongoDatabase, lease: Lease, events: Sequence[OutboxRow], *, lanes: int, archive: bool
) -> int:
    """Confirm all of the events, or raise Uneven."""
    mine = lease.only({event.lane for event in events})
    owned, now, journaled = await outbox_lanes.fence(session, database, mine)
    if not owned >= {event.lane for event in events}:
        raise Uneven
    ids = [event.identity if isinstance(event, RowEvent) else event.event_id for event in events]
    done = await database["outbox"].delete_many({"_id": {"$in": ids}, "lane": {"$in": sorted(owned)}}, session=session)
    if done.deleted_count != len(ids):
        raise Uneven
    if archive:
        removed = [
            {**departed(event, lanes), "_id": event_id, "topic": event.topic, "sent_at": now}
            for event, event_id in zip(events, ids, strict=True)
        ]
        try:
            await database["outbox_archive"].insert_many(removed, session=session)
        except BulkWriteError as error:
            if not any(error_text["code"] == DUPLICATE for error_text in error.details["writeErrors"]):
                raise
            raise Uneven from error
    if journaled:
        await journal.add(session, database, _delivered(archive), ids, now)
    return len(ids)


class MongoBlock(NamedTuple):
    """The reason of a block, the position of the blocking event, and the due time (None: until an operator acts)."""

    cause: BlockReason
    head: int | None
    until: datetime | None


def _block(stream: Stream, block: MongoBlock) -> UpdateOne:
    """Block a stream, or change the reason. A block by a dead letter stays, because only an operator may release it."""
    facts = {"lane": stream.lane, "cause": block.cause.value, "head": block.head, "until": block.until}
    identity = stream_id(stream)
    if block.cause is BlockReason.DEAD_LETTER:
        return UpdateOne({"_id": identity}, [{"$set": facts}], upsert=True)
    stored = {"$eq": ["$cause", BlockReason.DEAD_LETTER.value]}
    unless_held = {name: {"$cond": [stored, f"${name}", value]} for name, value in facts.items()}
    return UpdateOne({"_id": identity}, [{"$set": unless_held}], upsert=True)


async def unblock(session: Session, database: MongoDatabase, streams: Iterable[Stream], now: datetime) -> None:
    """Release streams without waiting events and drain the others. Streams behind a dead letter stay blocked."""
    ids = [stream_id(stream) for stream in streams]
    if not ids:
        return
    blocked = database["outbox_blocked"]
    found = await (await blocked.aggregate(maybe_empty_pipeline(ids), session=session)).to_list()
    waiting = [row["_id"] for row in found if row["waiting"]]
    empty = [row["_id"] for row in found if not row["waiting"]]
    drain = {"$set": {"cause": BlockReason.DRAINING.value, "head": None, "until": now}}
    if waiting:
        await blocked.update_many({"_id": {"$in": waiting}}, drain, session=session)
    if empty:
        await blocked.delete_many({"_id": {"$in": empty}}, session=session)


def maybe_empty_pipeline(ids: list[Document]) -> list[dict[str, Any]]:
    """Return the pipeline that shows which streams have waiting events; outbox_waiting.

    It omits streams behind a dead letter.
    """
    return [
        {"$match": {"_id": {"$in": ids}, "cause": {"$ne": BlockReason.DEAD_LETTER.value}}},
        {"$lookup": of_stream([{"$limit": 1}, {"$project": {"_id": 1}}], "waiting")},
        {"$project": {"waiting": {"$ne": ["$waiting", []]}}},
    ]


def of_events(events: Sequence[OutboxRow]) -> Iterator[list[OutboxRow]]:
    """Divide confirmed events into batches, in order."""
    return _filled(([event], len(event.payload)) for event in events)


def of_settlements(settlements: Iterable[Settlement]) -> Iterator[list[Settlement]]:
    """Divide settlements into batches, with all settlements of a stream in one batch."""
    streams: dict[Stream, list[Settlement]] = defaultdict(list)
    for settlement in settlements:
        streams[settlement.stream].append(settlement)
    return _filled((group, sum(len(each.event.payload) for each in group)) for group in streams.values())


def _filled(groups: Iterable[tuple[list[T], int]]) -> Iterator[list[T]]:
    chunk: list[T] = []
    total = 0
    for group, size in groups:
        if chunk and total + size > CHUNK_BYTES_MAX:
            yield chunk
            chunk, total = [], 0
        chunk += group
        total += size
    if chunk:
        yield chunk


def skip_marker(dead: Mapping[str, Any], state: State) -> Document | None:
    """Return a marker with the position and sequence number of a dead letter; None without a sequence number.

    >>> skip_marker({"_id": 1, "event_type": "order.placed"}, State.FAILED) is None
    True
    """
    if dead.get("sequence") is None or dead["event_type"] == SKIPPED_TYPE:
        return None
    content = {"payload": "null", "headers": json.dumps({"skipped": str(dead["_id"])}), "attempts": 0}
    return {
        "_id": uuid7(),
        "event_type": SKIPPED_TYPE,
        **content,
        **copied(dead, but=_OWN),
        **becoming(state, dead["lane"])["$set"],
    }
