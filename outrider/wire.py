"""Encodes events as messages, with all headers on which a consumer may rely, and decodes deliveries.

Missing headers are derived from the event id and not from random numbers, so that a second publish carries the same
headers. An event without a trace has no traceparent.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Callable, Mapping
from datetime import UTC, datetime
from functools import lru_cache
from typing import Any, NoReturn
from uuid import NAMESPACE_URL, UUID, uuid4, uuid5

from outrider.event import (
    BAND_NAMES,
    GAPLESS,
    SKIPPED_TYPE,
    SUBJECT_HEADER,
    UNREADABLE,
    VERSION,
    Delivery,
    Event,
    InboxStream,
    Message,
    OutboxRow,
    Priority,
    ReceivedEvent,
)

NORMAL = BAND_NAMES[1]

GAPLESS_ONLY = json.dumps(GAPLESS).encode()
"""The headers of most numbered events, which need no parsing."""

REQUIRED_HEADERS = ("message_id", "trace_id", "causation_id", "correlation_id")

_THREE_DIGITS = tuple(f"{number:03}" for number in range(1000))

TEXT_BYTES_MAX = {"event_type": 400, "key": 1000, "topic": 400}

NUMBER_MAX = 2**63 - 1

_DIGITS = re.compile(r"[0-9]{1,19}")

_PRIORITIES = (Priority.HIGH, Priority.NORMAL, Priority.LOW)


def encode(event: OutboxRow, topic: str, band: str = NORMAL) -> Message:
    """Encode an event for the wire. The payload travels as the text from the database.

    The band is a header unless normal: sequence numbers are counted by topic, key and band.
    """
    message_id = str(event.event_id)
    # One literal with the headers of nearly every event: this code runs for every event, and each line counts.
    headers: dict[str, str] = {
        "event_type": event.event_type,
        "key": event.key,
        "schema_version": event.schema_version,
        "created_at": _written(event.created_at),
        "correlation_id": event.saga_id or message_id,
        "causation_id": message_id,
        "trace_id": event.event_id.hex,
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
    """Return `at.isoformat()` in less than half the time: neighbours in an outbox were made in the same second.

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
    """Apply the event's own headers, which win. A traceparent is never invented: it decides what a tracer records."""
    if "traceparent" in own:
        own.setdefault("trace_id", own["traceparent"][3:35])
    message_id = headers["message_id"]
    json.dumps(own, ensure_ascii=False).encode()  # Raises for a lone surrogate, which no wire can carry.
    # An INSERT by other programs may carry numbers; on the wire every header is text.
    headers.update({name: value if isinstance(value, str) else json.dumps(value) for name, value in own.items()})
    headers["message_id"] = message_id


class Malformed(ValueError):
    """Part of a message cannot be read; the text names the part and the reason."""


def decode(delivery: Delivery) -> ReceivedEvent:
    """Decode a delivery. Never raises because of the content.

    >>> decode(Delivery("orders", b"A-1", b"{}")).problem
    'header message_id: missing'
    """
    problems: list[str] = []
    headers = _try(problems, dict[str, str](), _headers, delivery.headers)
    event_id = _try(problems, None, _event_id, headers)
    key = _try(problems, None, _key, delivery, headers)
    band = _try(problems, 1, _band, headers)
    sequence = _try(problems, None, _number, headers, "sequence")
    identity = event_id or _identity(delivery)
    stream = InboxStream(delivery.topic, key or str(identity), band)
    event = None if problems else _try(problems, None, _event, delivery, headers, identity, stream, sequence)
    return ReceivedEvent(
        event_id=identity,
        event=event,
        problem=problems[0] if problems else "",
        stream=stream,
        sequence=sequence,
        delivery=delivery,
        keyed=key is not None,
        gapless=headers.get("gapless") == "true",
        replayed=headers.get("replayed") == "true",
        skipped=headers.get("event_type") == SKIPPED_TYPE,
    )


def _try(problems: list[str], fallback: Any, read: Callable[..., Any], *args: Any) -> Any:
    """Read a part; on an error, record the problem and return the fallback."""
    try:
        return read(*args)
    except Malformed as error:
        problems.append(str(error))
        return fallback


def _identity(delivery: Delivery) -> UUID:
    """Return an id for a message without one, so that a second delivery is recognised.

    The id comes from position, key and body: a topic that is created anew has other messages at the same offsets.
    """
    if not delivery.position:
        return uuid4()
    key, body = (hashlib.sha256(part or b"").hexdigest() for part in (delivery.key, delivery.body))
    return uuid5(NAMESPACE_URL, f"{delivery.position} {key} {body}")


def _headers(raw: Mapping[str, bytes]) -> dict[str, str]:
    headers = {}
    if UNREADABLE in raw:
        _malformed("headers", raw[UNREADABLE].decode(errors="replace"))
    for name, value in raw.items():
        try:
            headers[name] = value.decode()
        except UnicodeDecodeError:
            _malformed(f"header {name!r}", "not UTF-8")
    return headers


def _event_id(headers: Mapping[str, str]) -> UUID:
    text = headers.get("message_id") or _malformed("header message_id", "missing")
    try:
        return UUID(text)
    except ValueError:
        _malformed("header message_id", "not a UUID")


def _key(delivery: Delivery, headers: Mapping[str, str]) -> str | None:
    """Return the ordering key: from the header, else from the wire; None for an event without a key."""
    if (key := headers.get("key")) is None and delivery.key is not None:
        try:
            key = delivery.key.decode()
        except UnicodeDecodeError:
            _malformed("key", "not UTF-8")
    return _text("key", key) if key else None


def _band(headers: Mapping[str, str]) -> int:
    name = headers.get("band", "normal")
    return (
        BAND_NAMES.index(name) if name in BAND_NAMES else _malformed("header band", f"none of {', '.join(BAND_NAMES)}")
    )


def _event(
    delivery: Delivery, headers: Mapping[str, str], event_id: UUID, stream: InboxStream, sequence: int | None
) -> Event:
    return Event(
        _text("event_type", headers.get("event_type") or _malformed("header event_type", "missing")),
        _payload(delivery.body),
        aggregate_type=headers.get("aggregate_type"),
        aggregate_id=headers.get("aggregate_id"),
        event_id=event_id,
        headers=headers,
        topic=_text("topic", delivery.topic),
        key=stream.key,
        priority=_PRIORITIES[stream.band],
        schema_version=_version(headers.get("schema_version", "1")),
        saga_id=headers.get("saga_id"),
        sequence=sequence,
        created_at=_time(headers.get("created_at")),
        subject=headers.get(SUBJECT_HEADER) or None,
    )


def _payload(body: bytes) -> Any:
    try:
        return _JSON.decode(body.decode(json.detect_encoding(body), "surrogatepass"))
    except Malformed:
        raise
    except (ValueError, RecursionError) as error:
        # The error text may quote the payload, so only the error type is kept.
        _malformed("body", f"not JSON ({type(error).__name__})")


def _number(headers: Mapping[str, str], name: str) -> int | None:
    if (text := headers.get(name)) is None:
        return None
    if not _DIGITS.fullmatch(text) or int(text) > NUMBER_MAX:
        _malformed(f"header {name}", "not a whole number")
    return int(text)


def _version(text: str) -> int | str:
    if VERSION.fullmatch(text) and not text.isdecimal():
        return text
    return _number({"schema_version": text}, "schema_version") or 1


def _time(text: str | None) -> datetime | None:
    if text is None:
        return None
    try:
        moment = datetime.fromisoformat(text)
    except ValueError:
        _malformed("header created_at", "not a time")
    return moment if moment.utcoffset() is not None else _malformed("header created_at", "without a time zone")


def _text(name: str, text: str) -> str:
    if "\0" in text:
        _malformed(name, "holds a NUL character")
    try:
        size = len(text) if text.isascii() else len(text.encode())
    except UnicodeEncodeError:
        _malformed(name, "not valid Unicode")
    if size > TEXT_BYTES_MAX[name]:
        _malformed(name, f"longer than {TEXT_BYTES_MAX[name]} bytes")
    return text


def _malformed(what: str, problem: str) -> NoReturn:
    raise Malformed(f"{what}: {problem}")


def _not_json(constant: str) -> NoReturn:
    _malformed("body", f"{constant} is not JSON")


_JSON = json.JSONDecoder(parse_constant=_not_json)
"""Decodes like `json.loads` with the same option, which would create a decoder for every call."""
