"""The collections of the outbox.

`outbox` is a public contract: anybody may insert a document with an `event_type` and a `payload`, and a relay fills in
the rest. One document that cannot be read would stop its whole lane, so what cannot be read is refused by the server.
"""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Any

from bson.binary import UUID_SUBTYPE, Binary

from outrider import lifecycle
from outrider.lifecycle import State
from outrider.stores.mongo.collections import Collection, Index, optional, texts

FIRST_ID = Binary(b"\x00" * 16, UUID_SUBTYPE)
LAST_ID = Binary(b"\xff" * 16, UUID_SUBTYPE)
FIRST_TIME = datetime(1900, 1, 1, tzinfo=UTC)
LAST_TIME = datetime(9000, 1, 1, tzinfo=UTC)

_NUMBER = ["int", "long"]

_TEXTS = ("payload", "headers", "retry")
TEXT_BYTES_MAX = 15 * 2**20
"""How large the payload, the headers and the retry policy of an event may be together."""

_MET: dict[str, Any] = {
    **{name: {"bsonType": _NUMBER} for name in ("lane", "position", "attempts", "schema_version")},
    **{name: {"bsonType": "string"} for name in ("stream_key", "headers")},
    "state": {"enum": sorted(lifecycle.STORED)},
    "created_at": {"bsonType": "date"},
}


def _readable_time(name: str) -> dict[str, Any]:
    return {"$or": [{name: None}, {name: {"$gte": FIRST_TIME, "$lt": LAST_TIME}}]}


OUTBOX_RULES = {
    "$jsonSchema": {
        "required": ["event_type", "payload"],
        "additionalProperties": False,
        # Who gives a lane must give all that a relay reads of an event which has one.
        "anyOf": [
            {"properties": {"lane": {"bsonType": "null"}}},
            {"properties": _MET, "required": list(_MET)},
        ],
        "properties": {
            "_id": {"bsonType": "binData"},
            "event_type": {"bsonType": "string", "minLength": 1, "maxLength": 1000},
            "payload": {"bsonType": "string"},
            "headers": {"bsonType": ["string", "null"]},
            **texts("aggregate_type", "aggregate_id", "topic", "key", "stream_key", "routing_key", "saga_id"),
            "priority": {"bsonType": [*_NUMBER, "null"], "minimum": 0, "maximum": 9},
            "state": {"enum": [*sorted(lifecycle.STORED), None]},
            **optional(_NUMBER, "schema_version", "sequence", "max_attempts", "position", "attempts"),
            **optional(_NUMBER, "lane", "fetchable", "waiting"),
            **optional("string", "retry", "failure", "held_by"),
            **optional("date", "created_at", "available_at", "held_until"),
            **optional("bool", "suspect"),
        },
    },
    # The server orders binary values by length, then by kind: between these two lie the UUIDs, and nothing else.
    "_id": {"$gte": FIRST_ID, "$lte": LAST_ID},
    "$and": [
        *(_readable_time(name) for name in ("created_at", "available_at", "held_until")),
        # And where it is to be found, or nobody would ever find it.
        {"$or": [{"lane": None}, {"fetchable": {"$type": "number"}}, {"waiting": {"$type": "number"}}]},
        # Without a lane there is no place in it; and what has no position is what a relay has not met yet.
        {"$or": [{"position": None}, {"lane": {"$type": "number"}}]},
        {"$or": [{"lane": None}, {"state": {"$ne": State.OPTIMISTIC.value}}, {"held_until": {"$type": "date"}}]},
    ],
    # A document holds 16 MB. What comes to it on its way, such as a failure, must find room, or it would never leave.
    "$expr": {"$lte": [{"$bsonSize": {name: f"${name}" for name in _TEXTS}}, TEXT_BYTES_MAX]},
}

COLLECTIONS = (
    # What is not yet delivered. `fetchable` holds the lane while the event is at the start of it, `waiting` while its
    # stream is blocked; so each document is in the one index that finds it.
    Collection(
        "outbox",
        validator=OUTBOX_RULES,
        indexes=(
            # The start of each lane.
            Index("outbox_fetchable", ("fetchable", "position"), only={"fetchable": {"$exists": True}}),
            # The events of each blocked stream, in order.
            Index(
                "outbox_waiting", ("waiting", "topic", "stream_key", "position"), only={"waiting": {"$exists": True}}
            ),
            # Documents from elsewhere that no relay has met yet, as they came: they have no position. Behind them all
            # the others, oldest first, for people who list events.
            Index("outbox_position", ("position",)),
        ),
    ),
    # Who owns a lane, how often it has changed hands, and how often its owner wrote.
    Collection("outbox_meta"),
    Collection("outbox_lane", seeded=True),
    # One heartbeat per relay.
    Collection("outbox_relay"),
    # Streams that wait: why, behind which event, and until when (null: until a person acts).
    Collection(
        "outbox_blocked",
        indexes=(
            Index("outbox_blocked_lane", ("lane",)),
            Index("outbox_blocked_due", ("until", "lane"), only={"until": {"$type": "date"}}),
        ),
    ),
    # The last position, and the last number, given out in each stream. Without numbers there is the day it was used.
    Collection("outbox_counter", indexes=(Index("outbox_counter_used", ("used",), only={"used": {"$exists": True}}),)),
    # What was delivered.
    Collection("outbox_archive", indexes=(Index("outbox_archive_sent", ("sent_at",)),)),
    # What could not be delivered, and why.
    Collection(
        "outbox_dead_letter",
        indexes=(
            Index("outbox_dead_letter_position", ("position",)),
            Index("outbox_dead_letter_held", ("lane", "topic", "stream_key"), only={"policy": "hold"}),
            Index("outbox_dead_letter_buried", ("buried_at",), only={"policy": "skip"}),
        ),
    ),
    # What people did, to which event.
    Collection("outbox_operation", indexes=(Index("outbox_operation_at", ("at",)),)),
    # When each upkeep duty is due again.
    Collection("outbox_duty"),
)
