"""The inbox's documents: to nouns and back, and how they are changed."""

from __future__ import annotations

import json
from collections.abc import Mapping
from datetime import datetime
from typing import Any
from uuid import UUID

from bson.max_key import MaxKey
from pymongo import DeleteOne, UpdateOne

from outrider.delivery import Arrival, InboxStream
from outrider.inbox_store import Buried, Standing, Waiting
from outrider.stores.inbox_rows import WaitingRow, delivery_of, failure_text, headers_of, place_of, standing_of
from outrider.stores.mongo.database import Document, Expression

_DELIVERED = ("raw_key", "body", "headers", "shard", "place")
_BURIAL = ("reason", "failure", "policy", "attempts", "buried_at")

LOCK: Document = {"$inc": {"turn": 1}, "$setOnInsert": {"waiting": 0}}
"""Changes nothing about a stream but that whoever else writes it has to give way."""


def event_identity(consumer: str, event_id: UUID) -> Document:
    """Return the `_id` of a receipt, of an event that waits, and of a dead letter.

    >>> list(event_identity("billing", UUID(int=1)))
    ['consumer', 'event_id']
    """
    return {"consumer": consumer, "event_id": event_id}


def stream_identity(consumer: str, stream: InboxStream) -> Document:
    """Return the `_id` of a stream. The server compares it field by field, so their order matters.

    >>> stream_identity("billing", InboxStream("orders", "A-1"))
    {'consumer': 'billing', 'topic': 'orders', 'key': 'A-1', 'band': 1}
    """
    return {"consumer": consumer, **place_of(stream)._asdict()}


def stream_of(identity: Mapping[str, Any]) -> InboxStream:
    """Return a stream from its `_id`.

    >>> stream_of(stream_identity("billing", InboxStream("orders", "A-1")))
    InboxStream(topic='orders', key='A-1', band=1)
    """
    return InboxStream(identity["topic"], identity["key"], identity["band"])


def all_of(consumer: str) -> Document:
    """Return the condition that an identity is one of a consumer's: all of them lie between these two.

    >>> all_of("billing")
    {'$gte': {'consumer': 'billing'}, '$lt': {'consumer': 'billing', '~': MaxKey()}}
    """
    return {"$gte": {"consumer": consumer}, "$lt": {"consumer": consumer, "~": MaxKey()}}


def standing(row: Mapping[str, Any]) -> Standing:
    """Return where a stream stands from its document."""
    return standing_of(row.get("seen"), row.get("cause"), row["waiting"])


def receive(identity: Document, facts: Document, now: Expression) -> UpdateOne:
    """Write a receipt, unless there is one; that one stays exactly as it is, which is no write at all."""
    made = {"$mergeObjects": ["$$ROOT", {"$literal": facts}, {"received_at": now}]}
    there = {"$gt": ["$received_at", None]}
    return UpdateOne({"_id": identity}, [{"$replaceWith": {"$cond": [there, "$$ROOT", made]}}], upsert=True)


def receipt_facts(event_type: str, stream: InboxStream, sequence: int | None) -> Document:
    """Return what a receipt says about its event."""
    topic, key, _ = place_of(stream)
    return {"event_type": event_type, "topic": topic, "key": key, "sequence": sequence}


def stand(identity: Document, at: Standing, now: Expression) -> UpdateOne | DeleteOne:
    """Write where a stream stands; one of which nothing is to be known any more goes."""
    if at == Standing():
        return DeleteOne({"_id": identity})
    cause = at.cause.value if at.cause else None
    same = {"$eq": [{"$ifNull": ["$cause", None]}, cause]}
    since = {"$cond": [same, {"$ifNull": ["$since", now]}, now]}
    facts = {"seen": at.seen, "waiting": at.waiting, "since": since, "cause": cause or "$$REMOVE"}
    return UpdateOne({"_id": identity}, [{"$set": facts}], upsert=True)


def parked(consumer: str, arrival: Arrival, number: int, now: datetime) -> Document:
    """Return the document of an event that waits."""
    row = WaitingRow.of(arrival)._asdict()
    facts = {name: row[name] for name in ("event_type", "sequence", *_DELIVERED, "replayed")}
    stream = {"consumer": consumer, **{name: row[name] for name in InboxStream._fields}}
    identity = event_identity(consumer, arrival.event_id)
    return {"_id": identity, "id": number, "stream": stream, **facts, "received_at": now}


def waiting_of(row: Mapping[str, Any]) -> Waiting:
    """Return an event that waits from its document."""
    delivery = delivery_of([row["stream"]["topic"], *(row[name] for name in _DELIVERED)])
    return Waiting(row["id"], row["_id"]["event_id"], delivery, row["replayed"])


def dead(row: Document, buried: Buried, now: datetime) -> Document:
    """Return the dead letter that an event which waits becomes."""
    why = {"reason": buried.reason.value, "failure": failure_text(buried.failure), "policy": buried.policy.value}
    return {**row, **why, "attempts": buried.attempts, "buried_at": now}


def brought_back(letter: Document) -> Document:
    """Return the waiting event that a dead letter becomes. One that was skipped is late by design, and marked so."""
    kept = {name: value for name, value in letter.items() if name not in _BURIAL}
    return {**kept, "replayed": letter["replayed"] or letter["policy"] == "skip"}


def letter_facts(letter: Document) -> Document:
    """Return a dead letter as it is listed."""
    stream = {name: letter["stream"][name] for name in ("topic", "key")}
    plain = ("id", "event_type", "sequence", "place", "body", "reason", "policy", "attempts", "buried_at")
    facts = {name: letter[name] for name in plain}
    read = {"headers": headers_of(letter["headers"]), "failure": json.loads(letter["failure"])}
    return {**letter["_id"], **stream, **facts, **read}
