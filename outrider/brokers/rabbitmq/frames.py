"""A message as AMQP frames: method, header, body.

The encoder is written by hand, because it runs for every event; a test compares the result with pamqp. Every message is
persistent and mandatory. All headers travel as text in the headers table; the properties repeat the headers for which
AMQP has a property.
"""

from __future__ import annotations

import json
import math
import struct
from collections.abc import Callable, Iterator
from datetime import UTC, datetime
from decimal import Decimal
from functools import lru_cache
from typing import Any

from outrider.event import Message

METHOD, HEADER, BODY = 1, 2, 3

FRAME_END = b"\xce"

FRAME_BYTES = 8
"""Bytes that a frame adds to its payload: seven before, one after."""

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
"""The length prefix of a long text, for lengths that are ASCII characters themselves."""

UNREADABLE = "amqp_headers"
"""The header that holds the raw table of a message with an unreadable table."""

FALLBACKS = {"message_id": "message_id", "event_type": "type", "correlation_id": "correlation_id"}
"""Headers that other producers send as properties."""

TIME_SECONDS_MAX = 253_402_300_799
"""The last second of the year 9999; a larger number is not a time in seconds, and stays a number."""

_FLAGS = struct.Struct(">H")

_DECIMAL = struct.Struct(">BI")

_TIME = struct.Struct(">Q")

_SHORT, _TABLE, _OCTET, _STAMP = "short", "table", "octet", "timestamp"

# In the order of the flags, highest first.
_PROPERTIES = (
    ("content_type", _SHORT),
    ("content_encoding", _SHORT),
    ("headers", _TABLE),
    ("delivery_mode", _OCTET),
    ("priority", _OCTET),
    ("correlation_id", _SHORT),
    ("reply_to", _SHORT),
    ("expiration", _SHORT),
    ("message_id", _SHORT),
    ("timestamp", _STAMP),
    ("type", _SHORT),
)

_NUMBERS = {
    tag: struct.Struct(form)
    for tag, form in (
        (b"b", ">b"),
        (b"B", ">B"),
        (b"s", ">h"),
        (b"u", ">H"),
        (b"I", ">i"),
        (b"i", ">I"),
        (b"l", ">q"),
        (b"L", ">q"),
        (b"f", ">f"),
        (b"d", ">d"),
    )
}


class Unsendable(ValueError):
    """The message does not fit AMQP; the text has the reason."""


def encode(message: Message, channel: int, exchange: str, routing_key: str, frame_bytes_max: int) -> bytes:
    """Return the frames of a message, or raise Unsendable."""
    try:
        properties = _encode_properties(message)
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


def _encode_properties(message: Message) -> bytes:
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
    """Return the headers and the topic: AMQP has no property for the topic, and a consumer must know the stream."""
    headers = {"key": message.key, **message.headers, "topic": message.topic}
    table = _plain_table(headers) or b"".join([_name(name) + _long(value) for name, value in headers.items()])
    return _LONG.pack(len(table)) + table


def _plain_table(headers: dict[str, str]) -> bytes | None:
    """Return the headers if all are short and ASCII, the usual case: then they are one text, encoded at once."""
    try:
        text = "".join([f"{_plain_name(name)}{_LENGTHS[len(value)]}{value}" for name, value in headers.items()])
    except IndexError:
        return None
    return text.encode() if text.isascii() else None


@lru_cache(maxsize=1024)
def _plain_name(name: str) -> str:
    """Return the name of a header and the type code for text. For a name that is too long, the result is not ASCII."""
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
    """Return a property that is also a header; None if too long for a property, then only the header is sent."""
    if not text:
        return None
    raw = text.encode()
    return _BYTE[len(raw)] + raw if len(raw) <= SHORT_BYTES_MAX else None


_event_type = lru_cache(maxsize=1024)(_optional)


def _created(text: str | None) -> bytes | None:
    """Return `created_at` in whole seconds for the AMQP timestamp property, or None if the header is no valid time."""
    if text is None:
        return None
    # Without the fraction, most events have the same time as the event before.
    fraction = text[19:26]
    return _seconds(text[:19] + text[26:] if fraction[:1] == "." and fraction[1:].isdecimal() else text)


@lru_cache(maxsize=1024)
def _seconds(text: str) -> bytes | None:
    try:
        return _TIMESTAMP.pack(int(datetime.fromisoformat(text).timestamp())) if text else None
    except (ValueError, OverflowError, struct.error):
        return None


def read_content(payload: bytes) -> tuple[int, dict[str, bytes]]:
    """Return the size of the body and the headers, from the payload of a header frame.

    >>> read_content(struct.pack(">HHQH", 60, 0, 12, 1 << 7) + b"\\x03A-1")
    (12, {'message_id': b'A-1'})
    """
    _, _, size, flags = _CONTENT.unpack_from(payload)
    at, more = _CONTENT.size, flags
    while more & 1:
        (more,) = _FLAGS.unpack_from(payload, at)
        at += _FLAGS.size
    raw = _decode_properties(payload, at, flags)
    table = raw.get("headers", b"")
    try:
        headers = {name: _as_bytes(tag, value) for name, tag, value in _Cursor(table).items()}
    except (struct.error, Unreadable, RecursionError):
        return size, {UNREADABLE: table}
    for name, origin in FALLBACKS.items():
        if origin in raw and name not in headers:
            headers[name] = raw[origin]
    return size, headers


class Unreadable(ValueError):
    """A table contains a type that AMQP does not define."""


def _decode_properties(payload: bytes, at: int, flags: int) -> dict[str, bytes]:
    """Return the properties that are present, in wire format without the length."""
    found: dict[str, bytes] = {}
    for index, (name, kind) in enumerate(_PROPERTIES):
        if not flags & 1 << 15 - index:
            continue
        if kind is _SHORT:
            start, end = at + 1, at + 1 + payload[at]
        elif kind is _TABLE:
            start, end = at + 4, at + 4 + _LONG.unpack_from(payload, at)[0]
        else:
            start, end = at, at + (1 if kind is _OCTET else 8)
        found[name], at = payload[start:end], end
    return found


class _Cursor:
    """Reads the fields of a table or an array in order. Text and bytes are not decoded."""

    def __init__(self, data: bytes) -> None:
        self._data, self._at = data, 0

    def items(self) -> list[tuple[str, bytes, Any]]:
        found = []
        while self._at < len(self._data):
            name = self._read_frames(self._data[self._at] + 1)[1:].decode(errors="backslashreplace")
            found.append((name, *self.value()))
        return found

    def values(self) -> list[Any]:
        found = []
        while self._at < len(self._data):
            tag, value = self.value()
            found.append(_as_json(tag, value))
        return found

    def value(self) -> tuple[bytes, Any]:
        tag = self._read_frames(1)
        if tag in b"Sx":
            return tag, self._block()
        if number := _NUMBERS.get(tag):
            return tag, number.unpack(self._read_frames(number.size))[0]
        if read := _OTHERS.get(tag):
            return tag, read(self)
        raise Unreadable(f"unknown type {tag!r}")

    def boolean(self) -> bool:
        return self._read_frames(1) != b"\0"

    def decimal(self) -> str:
        places, digits = _DECIMAL.unpack(self._read_frames(_DECIMAL.size))
        return str(Decimal(digits).scaleb(-places))

    def timestamp(self) -> str:
        """Read a time: a number of seconds, although some producers use another unit."""
        (seconds,) = _TIME.unpack(self._read_frames(_TIME.size))
        return datetime.fromtimestamp(seconds, UTC).isoformat() if seconds <= TIME_SECONDS_MAX else str(seconds)

    def table(self) -> dict[str, Any]:
        return {name: _as_json(tag, value) for name, tag, value in _Cursor(self._block()).items()}

    def array(self) -> list[Any]:
        return _Cursor(self._block()).values()

    def nothing(self) -> None:
        """Read a void."""

    def _block(self) -> bytes:
        return self._read_frames(_LONG.unpack(self._read_frames(_LONG.size))[0])

    def _read_frames(self, count: int) -> bytes:
        start, self._at = self._at, self._at + count
        if self._at > len(self._data):
            raise Unreadable("it ends too early")
        return self._data[start : self._at]


_OTHERS: dict[bytes, Callable[[_Cursor], Any]] = {
    b"t": _Cursor.boolean,
    b"D": _Cursor.decimal,
    b"T": _Cursor.timestamp,
    b"F": _Cursor.table,
    b"A": _Cursor.array,
    b"V": _Cursor.nothing,
}


def _as_bytes(tag: bytes, value: Any) -> bytes:
    if isinstance(value, bytes):
        return value
    plain = _as_json(tag, value)
    return (plain if isinstance(plain, str) else json.dumps(plain, ensure_ascii=False)).encode()


def _as_json(tag: bytes, value: Any) -> Any:
    """Return the value as JSON has it; values without a JSON type become text."""
    if isinstance(value, bytes):
        return value.decode(errors="backslashreplace")
    return str(value) if tag in b"fd" and not math.isfinite(value) else value
