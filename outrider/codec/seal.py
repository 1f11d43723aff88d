"""Sealing: an event becomes a message, with every header a consumer may rely on.

What is missing is derived from the event id, not drawn at random, so that a second publish carries the same headers.
"""

from __future__ import annotations

import json

from outrider.event import Message, StagedEvent, Stream

REQUIRED_HEADERS = ("message_id", "trace_id", "traceparent", "causation_id", "correlation_id")


def seal(event: StagedEvent, stream: Stream) -> Message:
    """Encode an event for the wire. The payload travels as the text the database holds."""
    message_id = str(event.event_id)
    headers: dict[str, str] = {
        "event_type": event.event_type,
        "key": event.key,
        "schema_version": str(event.schema_version),
        "created_at": event.created_at.isoformat(),
    }
    if event.sequence is not None:
        headers["sequence"] = str(event.sequence)
    if event.aggregate_type is not None:
        headers["aggregate_type"] = event.aggregate_type
    if event.aggregate_id is not None:
        headers["aggregate_id"] = event.aggregate_id
    if event.saga_id is not None:
        headers["saga_id"] = event.saga_id
    if event.headers != b"{}":
        headers.update(json.loads(event.headers))
    _fill(headers, message_id, event.event_id.hex, event.saga_id)
    return Message(message_id, stream.topic, event.key, event.routing_key, event.payload, headers)


def _fill(headers: dict[str, str], message_id: str, hex_id: str, saga_id: str | None) -> None:
    headers["message_id"] = message_id
    headers.setdefault("correlation_id", saga_id or message_id)
    headers.setdefault("causation_id", message_id)
    traceparent = headers.get("traceparent")
    if traceparent is None:
        headers.setdefault("trace_id", hex_id)
        headers["traceparent"] = f"00-{headers['trace_id']}-{hex_id[16:]}-01"
    else:
        headers.setdefault("trace_id", traceparent[3:35])
