"""Conversion between documents and records."""

from __future__ import annotations

import itertools
import json
import random
from collections.abc import Iterable, Mapping
from dataclasses import fields
from datetime import UTC, datetime, timedelta
from enum import StrEnum
from typing import Any
from uuid import UUID

from bson.int64 import Int64
from bson.max_key import MaxKey
from pymongo import DeleteOne, UpdateOne

from outrider.audit_chain import AuditAnchor, AuditHead, AuditLine
from outrider.event import InboxStream, OutboxRow, Priority, Readiness, ReceivedEvent, Stream
from outrider.inbox.model import HeldEvent, InboxDeadLettered, StreamState
from outrider.outbox import model
from outrider.outbox.model import CLAIM_SECONDS_MAX, NewEvent, State
from outrider.saga.model import (
    ENDED,
    Instance,
    JournalEntry,
    NewSaga,
    NewSagaMessage,
    Phase,
    SagaMessage,
    Status,
)
from outrider.stores.mongo.database import Document, Expression, ceiling, milliseconds
from outrider.stores.rows import (
    HeldRow,
    SagaWriteSet,
    delivery_of,
    entry_of,
    entry_row,
    failure_text,
    headers_of,
    instance_of,
    message_of,
    state_of,
    stream_key_of,
)

FETCHABLE = sorted(model.FETCHABLE)

WAITING = sorted(model.WAITING)

BAND_PRIORITIES = (Priority.HIGH, Priority.NORMAL, Priority.LOW)
"""The priority that represents a band when only the lane is known."""

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
"""Documents of foreign writers which no relay has read yet, in order of insertion; the start of outbox_position."""

_JSON = ("payload", "headers", "retry", "failure")

COPIED = (*({"event_id": "_id", "key": "stream_key"}.get(name, name) for name in _FACTS), "key")
"""The fields of an event that are copied to the archive, to the dead letters and back."""

_DELIVERED = ("raw_key", "body", "headers", "partition", "position")

_DEAD_LETTER = ("reason", "failure", "policy", "attempts", "dead_lettered_at")

LOCK: Document = {"$inc": {"turn": 1}, "$setOnInsert": {"waiting": 0}}
"""An update that leaves the stream unchanged but conflicts with every other writer of the stream."""

DEAF = [Status.COMPLETED.value, Status.COMPENSATED.value]
"""A saga in one of these states reads no messages."""

NUMBER_BITS = 20

INSTANCE = tuple(field.name for field in fields(Instance))[1:]
"""The stored fields of an instance, without its id."""

_ENTRY = tuple(field.name for field in fields(JournalEntry))

_EPOCH = datetime(1970, 1, 1, tzinfo=UTC)

# Each process starts at a random number, so two processes that post at the same moment rarely choose the same number.
_numbers = itertools.count(random.getrandbits(NUMBER_BITS))


def new_row(new: NewEvent, stream: Stream, position: int, now: datetime) -> Document:
    """Return the document of a new, pending event. Unknown fields are left out."""
    found = {name: value for name, value in new._asdict().items() if value is not None}
    event_id = found.pop("event_id")
    given = {"_id": event_id, "created_at": now, **found}
    return {**given, **inserted(stream.lane, position), "stream_key": stream.key, "attempts": 0}


def inserted(lane: int, position: int) -> Document:
    """Return the fields that make a document fetchable for a relay."""
    return {"lane": lane, "position": position, "state": State.PENDING.value, "fetchable": lane}


class RowEvent(OutboxRow):
    """An event together with its source document. The event leaves the outbox with the content of that document."""

    row: Document | None = None

    @property
    def identity(self) -> Any:
        """The id as the driver read it, which needs no conversion for a write."""
        return self.event_id if self.row is None else self.row["_id"]


def departed(event: OutboxRow, lanes: int) -> Document:
    """Return the document of a fetched event for the archive or the dead letters."""
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


CLAIM_MAX = timedelta(seconds=CLAIM_SECONDS_MAX)


def to_event(row: Document, now: datetime) -> RowEvent:
    """Return the event of an outbox document that has a lane."""
    get, event_id = row.get, row["_id"]
    state, available_at, retry = row["state"], get("available_at"), get("retry")
    if state == "optimistic" and now < row["claimed_until"] <= now + CLAIM_MAX:
        readiness = Readiness.OPTIMISTIC
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
        row["topic"],
        row["stream_key"],
        get("routing_key"),
        row["lane"],
        str(row["schema_version"]),
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
    """Return a document in readable form: JSON is parsed and every field is present."""
    facts: Document = {name: row.get(name) for name in _FACTS}
    facts["event_id"], facts["key"] = row["_id"], row.get("stream_key")
    for name in _JSON:
        text = row.get(name)
        facts[name] = None if text is None else json.loads(text)
    facts["state"] = state or row.get("state", State.PENDING)
    return facts | {name: row[name] for name in ("sent_at", "reason", "policy", "dead_lettered_at") if name in row}


def copied(row: Mapping[str, Any], *, but: Iterable[str] = ()) -> Document:
    """Return the fields of an event that are copied to another collection."""
    return {name: row[name] for name in COPIED if name in row and name not in but}


def becoming(state: State, lane: int, **facts: Any) -> Document:
    """Return the update that moves a document to a state and to the index of that state.

    >>> becoming(State.PARKED, 3, topic="orders")
    {'$set': {'state': 'parked', 'waiting': 3, 'topic': 'orders'}, '$unset': {'fetchable': ''}}
    """
    there, removed = ("fetchable", "waiting") if state in model.FETCHABLE else ("waiting", "fetchable")
    return {"$set": {"state": state.value, there: lane, **facts}, "$unset": {removed: ""}}


def stream_id(stream: Stream) -> Document:
    """Return the `_id` of the blocked document of a stream."""
    return {"lane": stream.lane, "topic": stream.topic, "key": stream.key}


def to_stream(found: Mapping[str, Any]) -> Stream:
    """Return the stream of the `_id` of a blocked document.

    >>> to_stream({"lane": 3, "topic": "orders", "key": "A-1"})
    Stream(lane=3, topic='orders', key='A-1')
    """
    return Stream(found["lane"], found["topic"], found["key"])


def event_identity(consumer: str, event_id: UUID) -> Document:
    """Return the `_id` of a receipt, a held event or a dead letter.

    >>> list(event_identity("billing", UUID(int=1)))
    ['consumer', 'event_id']
    """
    return {"consumer": consumer, "event_id": event_id}


def stream_identity(consumer: str, stream: InboxStream) -> Document:
    """Return the `_id` of a stream. The server compares field by field, so the order of the fields matters.

    >>> stream_identity("billing", InboxStream("orders", "A-1"))
    {'consumer': 'billing', 'topic': 'orders', 'key': 'A-1', 'band': 1}
    """
    return {"consumer": consumer, **stream_key_of(stream)._asdict()}


def stream_of(identity: Mapping[str, Any]) -> InboxStream:
    """Return the stream of an `_id`.

    >>> stream_of(stream_identity("billing", InboxStream("orders", "A-1")))
    InboxStream(topic='orders', key='A-1', band=1)
    """
    return InboxStream(identity["topic"], identity["key"], identity["band"])


def all_of(consumer: str) -> Document:
    """Return the condition that selects the `_id` values of a consumer by their range.

    >>> all_of("billing")
    {'$gte': {'consumer': 'billing'}, '$lt': {'consumer': 'billing', '~': MaxKey()}}
    """
    return {"$gte": {"consumer": consumer}, "$lt": {"consumer": consumer, "~": MaxKey()}}


def state(row: Mapping[str, Any]) -> StreamState:
    """Return the stream state from a document."""
    return state_of(row.get("seen"), row.get("cause"), row["waiting"])


def receive(identity: Document, facts: Document, now: Expression) -> UpdateOne:
    """Return the write of a receipt. An existing receipt stays unchanged."""
    made = {"$mergeObjects": ["$$ROOT", {"$literal": facts}, {"received_at": now}]}
    there = {"$gt": ["$received_at", None]}
    return UpdateOne({"_id": identity}, [{"$replaceWith": {"$cond": [there, "$$ROOT", made]}}], upsert=True)


def receipt_facts(event_type: str, stream: InboxStream, sequence: int | None) -> Document:
    """Return the fields of a receipt that describe its event."""
    topic, key, _ = stream_key_of(stream)
    return {"event_type": event_type, "topic": topic, "key": key, "sequence": sequence}


def stream_row(identity: Document, at: StreamState, now: Expression) -> UpdateOne | DeleteOne:
    """Return the write of a stream state. The document of an empty state is deleted."""
    if at == StreamState():
        return DeleteOne({"_id": identity})
    cause = at.cause.value if at.cause else None
    same = {"$eq": [{"$ifNull": ["$cause", None]}, cause]}
    since = {"$cond": [same, {"$ifNull": ["$since", now]}, now]}
    facts = {"seen": at.seen, "waiting": at.waiting, "since": since, "cause": cause or "$$REMOVE"}
    return UpdateOne({"_id": identity}, [{"$set": facts}], upsert=True)


def parked(consumer: str, received: ReceivedEvent, number: int, now: datetime) -> Document:
    """Return the document of a held event."""
    row = HeldRow.of(received)._asdict()
    facts = {name: row[name] for name in ("event_type", "sequence", *_DELIVERED, "replayed")}
    stream = {"consumer": consumer, **{name: row[name] for name in InboxStream._fields}}
    identity = event_identity(consumer, received.event_id)
    return {"_id": identity, "id": number, "stream": stream, **facts, "received_at": now}


def waiting_of(row: Mapping[str, Any]) -> HeldEvent:
    """Return the held event of a document."""
    delivery = delivery_of([row["stream"]["topic"], *(row[name] for name in _DELIVERED)])
    return HeldEvent(row["id"], row["_id"]["event_id"], delivery, row["replayed"])


def dead(row: Document, dead_letter: InboxDeadLettered, now: datetime) -> Document:
    """Return the dead letter of a held event."""
    reason = {
        "reason": dead_letter.reason.value,
        "failure": failure_text(dead_letter.failure),
        "policy": dead_letter.policy.value,
    }
    return {**row, **reason, "attempts": dead_letter.attempts, "dead_lettered_at": now}


def replayed_row(dead_letter: Document) -> Document:
    """Return the held event of a replayed dead letter. A skipped dead letter is late by design and marked as late."""
    stored = {name: value for name, value in dead_letter.items() if name not in _DEAD_LETTER}
    return {**stored, "replayed": dead_letter["replayed"] or dead_letter["policy"] == "skip"}


def letter_facts(dead_letter: Document) -> Document:
    """Return a dead letter as the admin lists it."""
    stream = {name: dead_letter["stream"][name] for name in ("topic", "key")}
    plain = ("id", "event_type", "sequence", "position", "body", "reason", "policy", "attempts", "dead_lettered_at")
    facts = {name: dead_letter[name] for name in plain}
    read = {"headers": headers_of(dead_letter["headers"]), "failure": json.loads(dead_letter["failure"])}
    return {**dead_letter["_id"], **stream, **facts, **read}


def first_number(moment: datetime) -> int:
    """Return a number above all numbers of earlier moments, with room for a million numbers per millisecond.

    >>> first_number(datetime(1970, 1, 1, second=1, tzinfo=UTC)) == 1000 * 2**20
    True
    """
    return (moment - _EPOCH) // timedelta(milliseconds=1) << NUMBER_BITS


def started(saga: NewSaga, now: datetime) -> Document:
    """Return the document of a new saga, due at once, with one entry in its audit log."""
    fresh = {"status": Status.STARTED.value, "version": 0, "retry_count": 0, "needs_attention": False, "epoch": 0}
    fresh |= {"losses": 0}
    known = {name: value for name, value in saga._asdict().items() if name not in ("saga_id", "deadline_seconds")}
    known["state"] = saga.state.decode()
    times = {"started_at": now, "updated_at": now, "wake_at": now}
    if saga.deadline_seconds is not None:
        times["deadline_at"] = now + timedelta(milliseconds=milliseconds(saga.deadline_seconds))
    chain = {"notes": first_number(now), "audit_lines": 1}
    return {"_id": saga.saga_id, **known, **fresh, **times, "owner": None, "turns": 0, **chain}


def message_identity(saga_id: UUID, event_id: UUID) -> Document:
    """Return the `_id` of a saga message. One event is one message of a saga."""
    return {"saga_id": saga_id, "event_id": event_id}


def message_row(message: NewSagaMessage, saga: Mapping[str, Any], now: datetime) -> Document:
    """Return the document of a saga message."""
    number = first_number(now) + next(_numbers) % 2**NUMBER_BITS
    return {
        "_id": message_identity(message.saga_id, message.event_id),
        "saga_id": message.saga_id,
        "message_id": Int64(number),
        "kind": message.kind.value,
        "name": message.name,
        "key": message.key,
        "body": message.body.decode(),
        "delivered_at": now,
        "unseen": True,
        "schema_version": message.schema_version,
        "saga_type": saga["saga_type"],
        "definition_version": saga["definition_version"],
    }


def line(saga_id: UUID, entry: JournalEntry) -> Document:
    """Return the document of a journal entry. Due times are rounded up, never down."""
    plain = (cell.value if isinstance(cell, StrEnum) else cell for cell in entry_row(entry))
    facts = dict(zip(_ENTRY, plain, strict=True))
    return {"saga_id": saga_id, **facts, "due_at": ceiling(entry.due_at)}


def audit_document(line: AuditLine, number: int) -> Document:
    """Return the document of an audit line. The number is its place among the lines of the saga."""
    facts = line._asdict()
    return {"saga_id": facts.pop("saga_id"), "number": Int64(number), **{k: facts[k] for k in facts if k != "place"}}


def to_audit_line(row: Mapping[str, Any]) -> AuditLine:
    """Return the audit line of a document."""
    columns: list[Any] = [row.get(name) for name in AuditLine._fields[2:]]
    return AuditLine(row["saga_id"], row["number"], *columns)


def anchor_document(anchor: AuditAnchor) -> Document:
    """Return the document of an anchor; `_id` is its number."""
    facts = anchor._asdict()
    facts["covers"] = None if anchor.covers is None else Int64(anchor.covers)
    return {"_id": Int64(facts.pop("number")), **facts}


def to_anchor(row: Mapping[str, Any]) -> AuditAnchor:
    """Return the anchor of a document."""
    columns: list[Any] = [row.get(name) for name in AuditAnchor._fields[1:]]
    return AuditAnchor(row["_id"], *columns)


def head_document(head: AuditHead, anchor: int) -> Document:
    """Return the document of the head of a chain whose saga was removed."""
    place = None if head.place is None else Int64(head.place)
    identity = {"_id": {"saga_id": head.saga_id, "anchor": Int64(anchor)}, "saga_id": head.saga_id}
    facts = {"anchor": Int64(anchor), "lines": head.lines, "hash": head.hash, "place": place}
    return {**identity, **facts, "subject_hash": head.subject_hash}


def to_head(row: Mapping[str, Any]) -> AuditHead:
    """Return the head of a document."""
    columns: list[Any] = [row.get(name) for name in AuditHead._fields]
    return AuditHead(*columns)


def saved(writes: SagaWriteSet, now: Any, due_at: Any, claimed_from: Any) -> list[Document]:
    """Return the update of an instance after a turn. Without `claimed_from`, the instance is released.

    All values are literals, so the server evaluates no expression.
    """
    to = writes.instance
    given: Document = {"state": to.state.decode(), "status": to.status.value, "last_error": writes.last_error}
    given |= {name: getattr(to, name) for name in ("current_step", "retry_count", "needs_attention", "losses")}
    given |= {"audit_lines": to.audit_lines, "audit_hash": to.audit_hash}
    change: Document = {name: {"$literal": value} for name, value in given.items()}
    change |= {"version": {"$add": ["$version", 1]}, "notes": {"$add": ["$notes", len(writes.lines)]}}
    change |= {"updated_at": now, "wake_at": due_at, "claimed_from": claimed_from}
    change["ended_at"] = {"$ifNull": ["$ended_at", now]} if to.status in ENDED else None
    if claimed_from is None:
        change["owner"] = None
    return [{"$set": change}]


def participant_id(participant: str, key: str, phase: Phase) -> Document:
    """Return the `_id` of a command at a participant."""
    return {"participant": participant, "key": key, "phase": phase.value}


def to_instance(row: Mapping[str, Any]) -> Instance:
    """Return the instance of a document."""
    return instance_of([row["_id"], *(row.get(name) for name in INSTANCE)])


def to_entry(row: Mapping[str, Any]) -> JournalEntry:
    """Return the journal entry of a document."""
    return entry_of([row.get(name) for name in _ENTRY])


def to_message(row: Mapping[str, Any]) -> SagaMessage:
    """Return the saga message of a document."""
    known = [row[name] for name in ("message_id", "kind", "name", "key", "body")]
    return message_of([*known, row["_id"]["event_id"], row["delivered_at"], row.get("schema_version", "1")])
