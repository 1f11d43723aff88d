"""Sealing: an event becomes a message, with every header a consumer may rely on.

What is missing is derived from the event id, not drawn at random, so that a second publish carries the same headers.
"""

from __future__ import annotations

import json
from datetime import UTC, datetime
from functools import lru_cache
from typing import Any

from outrider.event import BAND_NAMES, GAPLESS, Message, StagedEvent

NORMAL = BAND_NAMES[1]
GAPLESS_ONLY = json.dumps(GAPLESS).encode()
"""The headers of most numbered events; they need not be parsed."""

REQUIRED_HEADERS = ("message_id", "trace_id", "traceparent", "causation_id", "correlation_id")
_THREE_DIGITS = tuple(f"{number:03}" for number in range(1000))


def seal(event: StagedEvent, topic: str, band: str = NORMAL) -> Message:
    """Encode an event for the wire. The payload travels as the text the database holds.

    The band is told where it is not the normal one: numbers are counted by topic, key and band.
    """
    message_id = str(event.event_id)
    hex_id = event.event_id.hex
    # One literal with what nearly every event needs: this runs for every event, and each line counts.
    headers: dict[str, str] = {
        "event_type": event.event_type,
        "key": event.key,
        "schema_version": str(event.schema_version),
        "created_at": _written(event.created_at),
        "correlation_id": event.saga_id or message_id,
        "causation_id": message_id,
        "trace_id": hex_id,
        "traceparent": f"00-{hex_id}-{hex_id[16:]}-01",
        "message_id": message_id,
    }
    if event.sequence is not None:
        headers["sequence"] = str(event.sequence)
    if event.aggregate_type is not None:
        headers["aggregate_type"] = event.aggregate_type
    if event.aggregate_id is not None:
        headers["aggregate_id"] = event.aggregate_id
    if event.saga_id is not None:
        headers["saga_id"] = event.saga_id
    if band != NORMAL:
        headers["band"] = band
    if event.headers == GAPLESS_ONLY:
        headers["gapless"] = "true"
    elif event.headers != b"{}":
        _add_own(headers, json.loads(event.headers))
    return Message(message_id, topic, event.key, event.routing_key, event.payload, headers)


def _written(at: datetime) -> str:
    """Return `at.isoformat()`, in less than half its time: neighbours in an outbox were made in the same second.

    >>> _written(datetime(2030, 1, 2, 3, 4, 5, 60, tzinfo=UTC))
    '2030-01-02T03:04:05.000060+00:00'
    """
    microsecond = at.microsecond
    if at.tzinfo is not UTC or not microsecond:
        return at.isoformat()
    second = _second((at.year, at.month, at.day, at.hour, at.minute, at.second))
    return second + _THREE_DIGITS[microsecond // 1000] + _THREE_DIGITS[microsecond % 1000] + "+00:00"


@lru_cache(maxsize=1024)
def _second(parts: tuple[int, ...]) -> str:
    return "{:04}-{:02}-{:02}T{:02}:{:02}:{:02}.".format(*parts)


def _add_own(headers: dict[str, str], own: dict[str, Any]) -> None:
    """Let the event's own headers win; trace id and traceparent must agree, whichever of them was given."""
    if "traceparent" in own:
        own.setdefault("trace_id", own["traceparent"][3:35])
    elif "trace_id" in own:
        own["traceparent"] = f"00-{own['trace_id']}-{headers['trace_id'][16:]}-01"
    message_id = headers["message_id"]
    json.dumps(own, ensure_ascii=False).encode()  # Raises for a lone surrogate, which no wire can carry.
    # A foreign INSERT may carry numbers; on the wire every header is text.
    headers.update({name: value if isinstance(value, str) else json.dumps(value) for name, value in own.items()})
    headers["message_id"] = message_id
