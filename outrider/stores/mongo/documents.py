"""Documents to nouns and back."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from datetime import datetime
from typing import Any
from uuid import UUID

from outrider import lifecycle
from outrider.event import Priority, Readiness, StagedEvent, Stream
from outrider.lifecycle import State
from outrider.store import Draft

Document = dict[str, Any]

FETCHABLE = sorted(lifecycle.FETCHABLE)
WAITING = sorted(lifecycle.WAITING)

BAND_PRIORITIES = (Priority.HIGH, Priority.NORMAL, Priority.LOW)
"""The priority that stands for a band, where only the lane is known."""

_KEPT = (
    *("event_type", "aggregate_type", "aggregate_id", "topic", "routing_key", "lane", "schema_version", "saga_id"),
    *("sequence", "max_attempts", "attempts", "created_at", "available_at", "position"),
)
_FACTS = (
    *("position", "event_id", "event_type", "aggregate_type", "aggregate_id", "payload", "headers", "topic", "key"),
    *("routing_key", "priority", "schema_version", "saga_id", "sequence", "max_attempts", "retry", "created_at"),
    *("available_at", "lane", "attempts", "failure"),
)
UNMET: Document = {"position": None}
"""Documents from elsewhere that no relay has met yet, as they came; outbox_position, at its start."""

_JSON = ("payload", "headers", "retry", "failure")

COPIED = (*({"event_id": "_id", "key": "stream_key"}.get(name, name) for name in _FACTS), "key")
"""What an event takes along to the archive, to the dead letters and back."""


def drafted(draft: Draft, stream: Stream, position: int, now: datetime) -> Document:
    """Return the document of a draft, pending; what is not known is left out."""
    found = {name: value for name, value in draft._asdict().items() if value is not None}
    event_id = found.pop("event_id")
    given = {"_id": event_id, "created_at": now, **found}
    return {**given, **placed(stream.lane, position), "stream_key": stream.key, "attempts": 0}


def placed(lane: int, position: int) -> Document:
    """Return what makes a document one that a relay can fetch."""
    return {"lane": lane, "position": position, "state": State.PENDING.value, "fetchable": lane}


class RowEvent(StagedEvent):
    """An event together with the document it was read from, which is what it leaves the outbox as."""

    row: Document | None = None

    @property
    def identity(self) -> Any:
        """The id as the driver read it, so that it need not be converted to be written again."""
        return self.event_id if self.row is None else self.row["_id"]


def departed(event: StagedEvent, lanes: int) -> Document:
    """Return the document of an event in hand, for where it goes when it leaves the outbox."""
    if isinstance(event, RowEvent) and event.row is not None:
        return {**copied(event.row), "_id": event.event_id}
    document: Document = {"_id": event.event_id, "stream_key": event.key}
    for name in _KEPT:
        if (value := getattr(event, name)) is not None:
            document[name] = value
    document["payload"], document["headers"] = event.payload.decode(), event.headers.decode()
    if event.retry is not None:
        document["retry"] = event.retry.decode()
    document["priority"] = int(BAND_PRIORITIES[event.lane // lanes])
    return document


def to_event(row: Document, now: datetime) -> RowEvent:
    """Return the event of a document of the outbox that has its lane."""
    get, event_id = row.get, row["_id"]
    state, available_at, retry = row["state"], get("available_at"), get("retry")
    if state == "optimistic" and row["held_until"] > now:
        readiness = Readiness.HELD
    elif available_at is not None and available_at > now:
        readiness = Readiness.EARLY
    else:
        readiness = Readiness.READY
    event = RowEvent(
        row["position"],
        event_id if type(event_id) is UUID else UUID(bytes=bytes(event_id)),
        row["event_type"],
        get("aggregate_type"),
        get("aggregate_id"),
        row["payload"].encode(),
        row["headers"].encode(),
        get("topic"),
        row["stream_key"],
        get("routing_key"),
        row["lane"],
        row["schema_version"],
        get("saga_id"),
        get("sequence"),
        get("max_attempts"),
        None if retry is None else retry.encode(),
        row["attempts"],
        state,
        row["created_at"],
        available_at,
        readiness,
        get("suspect", False),
    )
    event.row = row
    return event


def to_facts(row: Mapping[str, Any], state: str | None = None) -> Document:
    """Return a document as a person reads it: JSON parsed, every field there."""
    facts: Document = {name: row.get(name) for name in _FACTS}
    facts["event_id"], facts["key"] = row["_id"], row.get("stream_key")
    for name in _JSON:
        text = row.get(name)
        facts[name] = None if text is None else json.loads(text)
    facts["state"] = state or row.get("state", State.PENDING)
    return facts | {name: row[name] for name in ("sent_at", "reason", "policy", "buried_at") if name in row}


def copied(row: Mapping[str, Any], *, but: Iterable[str] = ()) -> Document:
    """Return what an event takes along to another collection."""
    return {name: row[name] for name in COPIED if name in row and name not in but}


def becoming(state: State, lane: int, **facts: Any) -> Document:
    """Return the update that brings a document into a state, and into the index of that state.

    >>> becoming(State.PARKED, 3, topic="orders")
    {'$set': {'state': 'parked', 'waiting': 3, 'topic': 'orders'}, '$unset': {'fetchable': ''}}
    """
    there, gone = ("fetchable", "waiting") if state in lifecycle.FETCHABLE else ("waiting", "fetchable")
    return {"$set": {"state": state.value, there: lane, **facts}, "$unset": {gone: ""}}


def stream_id(stream: Stream) -> Document:
    """Return a stream as the identity of its blocked document."""
    return {"lane": stream.lane, "topic": stream.topic, "key": stream.key}


def to_stream(found: Mapping[str, Any]) -> Stream:
    """Return the stream of such an identity.

    >>> to_stream({"lane": 3, "topic": "orders", "key": "A-1"})
    Stream(lane=3, topic='orders', key='A-1')
    """
    return Stream(found["lane"], found["topic"], found["key"])
