"""Staging through a caller's session, in the caller's transaction. Pure: the steps are carried out by a driver.

Everything is read in the transaction's own snapshot. If somebody else has since placed an event in one of the streams,
or one with the same id, the server refuses the write, and the caller's transaction has to be run again as a whole.
"""

from __future__ import annotations

from collections import Counter as Count
from collections.abc import Iterable, Sequence
from datetime import datetime, timedelta
from typing import NamedTuple
from uuid import UUID

from outrider.clock import Clock
from outrider.errors import Misuse
from outrider.event import Stream, band_of, lane_of
from outrider.lifecycle import State
from outrider.store import Draft, Drafts, Hold, Placed
from outrider.stores.mongo.counters import Counter, Last, Wanted, advance, time_position
from outrider.stores.mongo.database import ceiling, floor, milliseconds, now_expression
from outrider.stores.mongo.documents import UNMET, Document, drafted, stream_id
from outrider.stores.mongo.errors import NOT_INSTALLED
from outrider.stores.mongo.fetching import leap
from outrider.stores.mongo.steps import Steps, step


class Setting(NamedTuple):
    """What is read before anything is placed: the number of lanes, and the time."""

    lanes: int
    now: datetime


class Entry(NamedTuple):
    """A draft on its way: its stream, and the counter of it (None: it is alone in its stream)."""

    draft: Draft
    stream: Stream
    counter: Counter | None
    numbered: bool


def stage(drafts: Drafts, hold: Hold | None, clock: Clock | None = None) -> Steps[list[Placed]]:
    """Place drafts in the caller's open transaction; known ids are left out, and the first of two equal ones wins."""
    lanes, now = yield from read_setting(clock)
    chosen = [*drafts.plain, *drafts.numbered]
    if drafts.supplied:
        chosen = yield from _fresh(chosen)
    if not chosen:
        return []
    numbered = {draft.event_id for draft in drafts.numbered}
    entries = [_entry(draft, lanes, draft.event_id in numbered) for draft in chosen]
    last = yield from advance(_wanted(entries), now_expression(clock))
    documents = _documents(entries, last, now)
    if hold:
        quiet = yield from _quiet(entries)
        for entry, document in zip(entries, documents, strict=True):
            if entry.stream in quiet:
                document.update(_held(hold, now))
    yield step("outbox", "insert_many", documents)
    return [Placed(document["_id"], "held_by" in document) for document in documents]


def read_setting(clock: Clock | None) -> Steps[Setting]:
    """Read the number of lanes, as fixed at install, and what time it is."""
    rows = yield step("outbox_meta", "find", {"_id": "lanes"}, {"value": 1, "now": "$$NOW"})
    if not rows:
        raise Misuse(f"the outbox is not installed in this database; {NOT_INSTALLED}")
    return Setting(rows[0]["value"], rows[0]["now"] if clock is None else floor(clock.now()))


def _fresh(drafts: Sequence[Draft]) -> Steps[list[Draft]]:
    unique: dict[UUID, Draft] = {}
    for draft in drafts:
        unique.setdefault(draft.event_id, draft)
    for collection in ("outbox", "outbox_archive", "outbox_dead_letter"):
        known = yield step(collection, "find", {"_id": {"$in": list(unique)}}, {"_id": 1})
        for row in known:
            del unique[row["_id"]]
    return list(unique.values())


def _entry(draft: Draft, lanes: int, numbered: bool) -> Entry:
    key = draft.key or draft.aggregate_id or str(draft.event_id)
    stream = Stream(lane_of(key, draft.priority, lanes), draft.topic, key)
    counted = bool(draft.key or draft.aggregate_id) or numbered
    return Entry(draft, stream, Counter(draft.topic, key, band_of(draft.priority)) if counted else None, numbered)


def _wanted(entries: Iterable[Entry]) -> dict[Counter, Wanted]:
    positions = Count(entry.counter for entry in entries if entry.counter)
    numbers = Count(entry.counter for entry in entries if entry.counter and entry.numbered)
    return {counter: Wanted(count, numbers[counter]) for counter, count in positions.items()}


def _documents(entries: Sequence[Entry], last: dict[Counter, Last], now: datetime) -> list[Document]:
    """Give the events of each stream the positions and numbers that were taken for them, in order."""
    left = {counter: list(wanted) for counter, wanted in _wanted(entries).items()}
    documents = []
    for draft, stream, counter, numbered in entries:
        position = time_position(now)
        sequence = draft.sequence
        if counter:
            rest = left[counter]
            rest[0] -= 1
            position = last[counter].position - rest[0]
            if numbered:
                rest[1] -= 1
                sequence = last[counter].sequence - rest[1]
        ready = draft._replace(sequence=sequence, available_at=ceiling(draft.available_at))
        documents.append(drafted(ready, stream, position, now))
    return documents


def _quiet(entries: Sequence[Entry]) -> Steps[set[Stream]]:
    """Return the streams in which nothing undelivered lies before a new event.

    Their counters are ours by now, so that nobody can place one there before we commit.
    """
    streams = {entry.stream: entry.counter is None for entry in entries}
    blocked = yield step(
        "outbox_blocked", "find", {"_id": {"$in": [stream_id(stream) for stream in streams]}}, {"_id": 1}
    )
    # A document without a lane could be of any stream.
    laneless = yield step("outbox", "find", UNMET, {"_id": 1}, limit=1)
    busy = {Stream(**row["_id"]) for row in blocked}
    lanes = yield from _busy_lanes({stream.lane for stream, alone in streams.items() if not alone})
    return {
        stream
        for stream, alone in streams.items()
        if stream not in busy and (alone or not (laneless or stream.lane in lanes))
    }


def _busy_lanes(lanes: set[int]) -> Steps[set[int]]:
    """Return the lanes at whose start something lies; outbox_fetchable."""
    if not lanes:
        return set()
    rows = yield step("outbox", "aggregate", leap("fetchable", sorted(lanes)))
    return {row["_id"] for row in rows}


def _held(hold: Hold, now: datetime) -> Document:
    until = now + timedelta(milliseconds=milliseconds(hold.seconds))
    return {"state": State.OPTIMISTIC.value, "held_by": hold.owner, "held_until": until}
