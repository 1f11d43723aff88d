"""A message as AMQP frames: method, header, body.

Written by hand, because it runs for every event; a test holds it against pamqp. Every message is persistent and
mandatory. All headers travel as text in the headers table; the properties repeat those that AMQP has a place for.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from datetime import datetime
from functools import lru_cache

from outrider.event import Message

METHOD, HEADER, BODY = 1, 2, 3
FRAME_END = b"\xce"
FRAME_BYTES = 8
"""What a frame adds to its payload: seven bytes before, one after."""
SHORT_BYTES_MAX = 255

_FRAME = struct.Struct(">BHI")
_CONTENT = struct.Struct(">HHQH")
_LONG = struct.Struct(">I")
_TIMESTAMP = struct.Struct(">Q")
_PUBLISH = struct.pack(">HHH", 60, 40, 0)
_MANDATORY = b"\x01"
_PERSISTENT = b"\x02"
_CONTENT_TYPE, _HEADERS, _DELIVERY_MODE = 1 << 15, 1 << 13, 1 << 12
_CORRELATION_ID, _MESSAGE_ID, _CREATED, _TYPE = 1 << 10, 1 << 7, 1 << 6, 1 << 5
_ALWAYS = _CONTENT_TYPE | _HEADERS | _DELIVERY_MODE | _MESSAGE_ID
_JSON = "application/json"
_BYTE = tuple(bytes((number,)) for number in range(SHORT_BYTES_MAX + 1))
_LENGTHS = tuple(f"\0\0\0{chr(number)}" for number in range(128))
"""The length of a long text, for lengths that are ASCII characters themselves."""


class Unsendable(ValueError):
    """AMQP has no room for this message; the text says why."""


def encode(message: Message, channel: int, exchange: str, routing_key: str, frame_bytes_max: int) -> bytes:
    """Return a message's frames, or raise Unsendable."""
    try:
        properties = _properties(message)
        publish = _publish(channel, exchange, routing_key)
    except UnicodeEncodeError as error:
        raise Unsendable(f"a text in it is not valid Unicode: {error.reason}") from error
    if len(properties) + FRAME_BYTES > frame_bytes_max:
        raise Unsendable(f"its headers take {len(properties)} bytes, and a frame holds {frame_bytes_max}")
    body, size = message.body, frame_bytes_max - FRAME_BYTES
    parts = [publish, _FRAME.pack(HEADER, channel, len(properties)), properties, FRAME_END]
    for piece in (body,) if 0 < len(body) <= size else _pieces(body, size):
        parts += (_FRAME.pack(BODY, channel, len(piece)), piece, FRAME_END)
    return b"".join(parts)


def _pieces(body: bytes, size: int) -> Iterator[bytes]:
    for start in range(0, len(body), size):
        yield body[start : start + size]


@lru_cache(maxsize=1024)
def _publish(channel: int, exchange: str, routing_key: str) -> bytes:
    payload = _PUBLISH + _short("exchange", exchange) + _short("routing key", routing_key) + _MANDATORY
    return _FRAME.pack(METHOD, channel, len(payload)) + payload + FRAME_END


def _properties(message: Message) -> bytes:
    """Return the payload of the header frame. The properties come in the order of their flags."""
    headers = message.headers
    flags = _ALWAYS
    parts = [_content_type(headers.get("content_type") or _JSON), _table(message), _PERSISTENT]
    if correlation_id := _optional(headers.get("correlation_id")):
        flags |= _CORRELATION_ID
        parts.append(correlation_id)
    parts.append(_short("message id", message.message_id))
    if created := _created(headers.get("created_at")):
        flags |= _CREATED
        parts.append(created)
    if event_type := _event_type(headers.get("event_type")):
        flags |= _TYPE
        parts.append(event_type)
    return _CONTENT.pack(60, 0, len(message.body), flags) + b"".join(parts)


def _table(message: Message) -> bytes:
    """Return the headers, and the topic: AMQP has no place for it, and a consumer must know the stream."""
    headers = {"key": message.key, **message.headers, "topic": message.topic}
    table = _plain_table(headers) or b"".join([_name(name) + _long(value) for name, value in headers.items()])
    return _LONG.pack(len(table)) + table


def _plain_table(headers: dict[str, str]) -> bytes | None:
    """Return the headers if all are short and ASCII, as nearly always: then they are one text, encoded at once."""
    try:
        text = "".join([f"{_plain_name(name)}{_LENGTHS[len(value)]}{value}" for name, value in headers.items()])
    except IndexError:
        return None
    return text.encode() if text.isascii() else None


@lru_cache(maxsize=1024)
def _plain_name(name: str) -> str:
    """Return a header's name and the mark for text. One that is too long begins with what is not ASCII."""
    return f"{chr(len(name))}{name}S"


def _name(name: str) -> bytes:
    return _short("header name", name) + b"S"


def _long(text: str) -> bytes:
    raw = text.encode()
    return _LONG.pack(len(raw)) + raw


def _short(what: str, text: str) -> bytes:
    raw = text.encode()
    if len(raw) > SHORT_BYTES_MAX:
        raise Unsendable(f"its {what} has {len(raw)} bytes, and AMQP allows {SHORT_BYTES_MAX}")
    return _BYTE[len(raw)] + raw


@lru_cache(maxsize=64)
def _content_type(text: str) -> bytes:
    return _short("content type", text)


def _optional(text: str | None) -> bytes | None:
    """Return a property that is also a header; if it is too long for a property, the header has to do."""
    if not text:
        return None
    raw = text.encode()
    return _BYTE[len(raw)] + raw if len(raw) <= SHORT_BYTES_MAX else None


_event_type = lru_cache(maxsize=1024)(_optional)


def _created(text: str | None) -> bytes | None:
    """Return when the event was made, in whole seconds; a foreign header that is no time is left to the headers."""
    if text is None:
        return None
    # Without its fraction, the time of most events is that of the one before.
    fraction = text[19:26]
    return _seconds(text[:19] + text[26:] if fraction[:1] == "." and fraction[1:].isdecimal() else text)


@lru_cache(maxsize=1024)
def _seconds(text: str) -> bytes | None:
    try:
        return _TIMESTAMP.pack(int(datetime.fromisoformat(text).timestamp())) if text else None
    except (ValueError, OverflowError, struct.error):
        return None
