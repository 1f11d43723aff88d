"""Staging through a session of the caller, in the caller's transaction.

The functions are pure; a driver runs the steps.

All reads use the snapshot of the transaction. If another writer has meanwhile staged an event in one of the streams or
with the same id, the server rejects the write. The caller must then retry the whole transaction.
"""

from __future__ import annotations

from collections import Counter as Count
from collections.abc import Iterable, Mapping, Sequence
from datetime import datetime, timedelta
from typing import Any, NamedTuple
from uuid import UUID

from pymongo import ReturnDocument, UpdateOne

from outrider.clock import Clock
from outrider.errors import UsageError
from outrider.event import Stream, band_of, lane_of
from outrider.outbox.model import JournalKind, NewEvent, OptimisticClaim, StagedRow, StageRequest, State
from outrider.stores.mongo import journal
from outrider.stores.mongo.database import NOT_INSTALLED, Document, ceiling, floor, milliseconds, now_expression
from outrider.stores.mongo.documents import UNMET, new_row, stream_id
from outrider.stores.mongo.operations import TRANSACTION, Operations, operation

COLLECTION = "outbox_counter"


class StoreSetting(NamedTuple):
    """The settings that staging reads first: the number of lanes, the time, and whether the journal is on."""

    lanes: int
    now: datetime
    journaled: bool


class CounterEntry(NamedTuple):
    """A new event with its stream and the counter of the stream (None: the event is alone in its stream)."""

    new: NewEvent
    stream: Stream
    counter: SequenceCounter | None
    numbered: bool


def stage(
    request: StageRequest, claim: OptimisticClaim | None, clock: Clock | None = None
) -> Operations[list[StagedRow]]:
    """Stage events in the caller's open transaction. Known ids are left out; the first of two equal ids wins."""
    lanes, now, journaled = yield from read_setting(clock)
    chosen = [*request.plain, *request.numbered]
    if request.supplied:
        chosen = yield from _new_events(chosen)
    if not chosen:
        return []
    numbered = {new.event_id for new in request.numbered}
    entries = [_entry(new, lanes, new.event_id in numbered) for new in chosen]
    last = yield from advance(_wanted(entries), now_expression(clock))
    documents = _documents(entries, last, now)
    if claim:
        quiet = yield from _quiet(entries)
        for entry, document in zip(entries, documents, strict=True):
            if entry.stream in quiet:
                document.update(_claimed(claim, now))
    yield operation("outbox", "insert_many", documents)
    if journaled:
        name = yield TRANSACTION
        lines = journal.entries(JournalKind.STAGED, [document["_id"] for document in documents], name, now)
        yield operation("outbox_journal", "insert_many", lines)
    return [StagedRow(document["_id"], "claimed_by" in document) for document in documents]


def read_setting(clock: Clock | None) -> Operations[StoreSetting]:
    """Read the number of lanes, fixed at installation, the current time, and the switch of the journal."""
    wanted = {"_id": {"$in": ["lanes", journal.SWITCH]}}
    rows = yield operation("outbox_meta", "find", wanted, {"value": 1, "now": "$$NOW"})
    facts = {row["_id"]: row["value"] for row in rows}
    if "lanes" not in facts:
        raise UsageError(f"the outbox is not installed in this database; {NOT_INSTALLED}")
    now = rows[0]["now"] if clock is None else floor(clock.now())
    return StoreSetting(facts["lanes"], now, facts.get(journal.SWITCH) == 1)


def _new_events(events: Sequence[NewEvent]) -> Operations[list[NewEvent]]:
    unique: dict[UUID, NewEvent] = {}
    for new in events:
        unique.setdefault(new.event_id, new)
    for collection in ("outbox", "outbox_archive", "outbox_dead_letter"):
        known = yield operation(collection, "find", {"_id": {"$in": list(unique)}}, {"_id": 1})
        for row in known:
            del unique[row["_id"]]
    return list(unique.values())


def _entry(new: NewEvent, lanes: int, numbered: bool) -> CounterEntry:
    key = new.key or new.aggregate_id or str(new.event_id)
    stream = Stream(lane_of(key, new.priority, lanes), new.topic, key)
    counted = bool(new.key or new.aggregate_id) or numbered
    return CounterEntry(
        new, stream, SequenceCounter(new.topic, key, band_of(new.priority)) if counted else None, numbered
    )


def _wanted(entries: Iterable[CounterEntry]) -> dict[SequenceCounter, Wanted]:
    positions = Count(entry.counter for entry in entries if entry.counter)
    numbers = Count(entry.counter for entry in entries if entry.counter and entry.numbered)
    return {counter: Wanted(count, numbers[counter]) for counter, count in positions.items()}


def _documents(entries: Sequence[CounterEntry], last: dict[SequenceCounter, Last], now: datetime) -> list[Document]:
    """Assign the reserved positions and sequence numbers to the events of each stream, in order."""
    left = {counter: list(wanted) for counter, wanted in _wanted(entries).items()}
    documents = []
    for new, stream, counter, numbered in entries:
        position = time_position(now)
        sequence = new.sequence
        if counter:
            rest = left[counter]
            rest[0] -= 1
            position = last[counter].position - rest[0]
            if numbered:
                rest[1] -= 1
                sequence = last[counter].sequence - rest[1]
        ready = new._replace(sequence=sequence, available_at=ceiling(new.available_at))
        documents.append(new_row(ready, stream, position, now))
    return documents


def _quiet(entries: Sequence[CounterEntry]) -> Operations[set[Stream]]:
    """Return the streams in which no undelivered event lies before a new event.

    The transaction has already locked the counters, so no other writer can stage an event there before the commit.
    """
    streams = {entry.stream: entry.counter is None for entry in entries}
    blocked = yield operation(
        "outbox_blocked", "find", {"_id": {"$in": [stream_id(stream) for stream in streams]}}, {"_id": 1}
    )
    # A document without a lane may belong to any stream.
    laneless = yield operation("outbox", "find", UNMET, {"_id": 1}, limit=1)
    busy = {Stream(**row["_id"]) for row in blocked}
    lanes = yield from _busy_lanes({stream.lane for stream, single in streams.items() if not single})
    return {
        stream
        for stream, single in streams.items()
        if stream not in busy and (single or not (laneless or stream.lane in lanes))
    }


def _busy_lanes(lanes: set[int]) -> Operations[set[int]]:
    """Return the lanes with fetchable events; outbox_fetchable."""
    if not lanes:
        return set()
    rows = yield operation("outbox", "aggregate", leap("fetchable", sorted(lanes)))
    return {row["_id"] for row in rows}


def _claimed(claim: OptimisticClaim, now: datetime) -> Document:
    until = now + timedelta(milliseconds=milliseconds(claim.seconds))
    return {"state": State.OPTIMISTIC.value, "claimed_by": claim.owner, "claimed_until": until}


class SequenceCounter(NamedTuple):
    """The key of a counter: topic, stream key and band. Counters are locked in sorted order."""

    topic: str
    key: str
    band: int


class Wanted(NamedTuple):
    """The numbers of positions and sequence numbers that a stream needs."""

    positions: int
    numbers: int


class Last(NamedTuple):
    """The last position and the last sequence number of a stream, at the end of the reserved range."""

    position: int
    sequence: int


def advance(wanted: Mapping[SequenceCounter, Wanted], now: Any) -> Operations[dict[SequenceCounter, Last]]:
    """Reserve positions and sequence numbers. The transaction then holds the counter documents."""
    if not wanted:
        return {}
    if len(wanted) == 1:
        [(counter, need)] = wanted.items()
        options = {"upsert": True, "return_document": ReturnDocument.AFTER}
        row = yield operation(COLLECTION, "find_one_and_update", _identity(counter), _change(need, now), **options)
        return {counter: _last(row)}
    changes = [
        UpdateOne(_identity(counter), _change(need, now), upsert=True) for counter, need in sorted(wanted.items())
    ]
    yield operation(COLLECTION, "bulk_write", changes)
    rows = yield operation(COLLECTION, "find", {"_id": {"$in": [counter._asdict() for counter in wanted]}})
    return {SequenceCounter(**row["_id"]): _last(row) for row in rows}


def time_position(now: datetime) -> int:
    """Return the position of an event that is alone in its stream.

    >>> from datetime import UTC
    >>> time_position(datetime(1970, 1, 1, second=1, tzinfo=UTC))
    1000000
    """
    return int(now.timestamp() * 1_000_000)


def _identity(counter: SequenceCounter) -> dict[str, Any]:
    return {"_id": counter._asdict()}


def _change(need: Wanted, now: Any) -> list[dict[str, Any]]:
    counted = {"$add": [{"$ifNull": ["$position", 0]}, need.positions]}
    position = {"$max": [counted, {"$multiply": [{"$toLong": now}, 1000]}]}
    if need.numbers:
        sequence = {"$add": [{"$ifNull": ["$sequence", {"$toLong": 0}]}, need.numbers]}
        return [{"$set": {"position": position, "sequence": sequence, "used": "$$REMOVE"}}]
    # The day instead of the exact time, so that the index is rarely written. The day never goes back.
    used = {"$max": ["$used", {"$dateTrunc": {"date": now, "unit": "day"}}]}
    return [{"$set": {"position": position, "used": {"$cond": [{"$gt": ["$sequence", None]}, "$$REMOVE", used]}}}]


def _last(row: Mapping[str, Any]) -> Last:
    return Last(row["position"], row.get("sequence", 0))


def leap(name: str, lanes: Sequence[int]) -> list[dict[str, Any]]:
    """Return the stages that find the existing lanes among the given lanes, by an index that starts with the field."""
    return [{"$match": {name: {"$in": list(lanes)}}}, {"$sort": {name: 1}}, {"$group": {"_id": f"${name}"}}]
