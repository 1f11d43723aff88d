"""Opening: a delivery becomes an event again, or a problem that a person can read.

The opposite of sealing. Everything is checked, because the other side may be anybody; and as much as can be read is
read even of a malformed message, so that it keeps its place in its stream.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from datetime import datetime
from typing import Any, NoReturn
from uuid import NAMESPACE_URL, UUID, uuid4, uuid5

from outrider.delivery import Arrival, Delivery, InboxStream
from outrider.event import BAND_NAMES, SKIPPED_TYPE, Event, Priority

TEXT_BYTES_MAX = {"event_type": 400, "key": 1000, "topic": 400}
NUMBER_MAX = 2**63 - 1
_DIGITS = re.compile(r"[0-9]{1,19}")
_PRIORITIES = (Priority.HIGH, Priority.NORMAL, Priority.LOW)


class Malformed(ValueError):
    """Part of a message cannot be read; the text says which and why."""


def open_delivery(delivery: Delivery) -> Arrival:
    """Read a delivery. Never raises for what is in it.

    >>> open_delivery(Delivery("orders", b"A-1", b"{}")).problem
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
    return Arrival(
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
    """Read a part; note what is wrong with it, and go on without it."""
    try:
        return read(*args)
    except Malformed as error:
        problems.append(str(error))
        return fallback


def _identity(delivery: Delivery) -> UUID:
    """Name a message that has no id of its own: by its place, so that a second delivery is recognised."""
    return uuid5(NAMESPACE_URL, delivery.place) if delivery.place else uuid4()


def _headers(raw: Mapping[str, bytes]) -> dict[str, str]:
    headers = {}
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
    """Return what orders the event: its key by the header, else by the wire; an event without one is alone."""
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
        schema_version=_number(headers, "schema_version") or 1,
        saga_id=headers.get("saga_id"),
        sequence=sequence,
        created_at=_time(headers.get("created_at")),
    )


def _payload(body: bytes) -> Any:
    try:
        return _JSON.decode(body.decode(json.detect_encoding(body), "surrogatepass"))
    except Malformed:
        raise
    except (ValueError, RecursionError) as error:
        # The text of the error may quote the payload, so only its kind is kept.
        _malformed("body", f"not JSON ({type(error).__name__})")


def _number(headers: Mapping[str, str], name: str) -> int | None:
    if (text := headers.get(name)) is None:
        return None
    if not _DIGITS.fullmatch(text) or int(text) > NUMBER_MAX:
        _malformed(f"header {name}", "not a whole number")
    return int(text)


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
"""Reads what `json.loads` would with the same option, which makes a decoder each time."""
