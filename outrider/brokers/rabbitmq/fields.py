"""What an AMQP message says about itself, as headers of bytes.

Read by hand, because anybody may publish anything, and no message may stop a consumer: a time beyond the year 9999 or
a name that is not UTF-8 would make a general codec give up, and the connection with it, each time it is delivered. Text
and bytes stay as they are; every other type becomes its text, tables and arrays become JSON.
"""

from __future__ import annotations

import json
import math
import struct
from collections.abc import Callable
from datetime import UTC, datetime
from decimal import Decimal
from typing import Any

UNREADABLE = "amqp_headers"
"""The header that holds the table of a message whose table cannot be read."""

FALLBACKS = {"message_id": "message_id", "event_type": "type", "correlation_id": "correlation_id"}
"""Headers that producers other than ours say as properties."""

TIME_SECONDS_MAX = 253_402_300_799
"""The last second of the year 9999; a larger number is no time in seconds, and stays a number."""

_CONTENT = struct.Struct(">HHQH")
_FLAGS = struct.Struct(">H")
_LONG = struct.Struct(">I")
_DECIMAL = struct.Struct(">BI")
_TIME = struct.Struct(">Q")
_SHORT, _TABLE, _OCTET, _TIMESTAMP = "short", "table", "octet", "timestamp"
# In the order of their flags, the highest first.
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
    ("timestamp", _TIMESTAMP),
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
    raw = _properties(payload, at, flags)
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
    """A table holds what AMQP does not know."""


def _properties(payload: bytes, at: int, flags: int) -> dict[str, bytes]:
    """Return what is there, as it lies on the wire, without its length."""
    found: dict[str, bytes] = {}
    for place, (name, kind) in enumerate(_PROPERTIES):
        if not flags & 1 << 15 - place:
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
    """Reads the fields of a table or an array, one after the other. A text or bytes is not decoded."""

    def __init__(self, data: bytes) -> None:
        self._data, self._at = data, 0

    def items(self) -> list[tuple[str, bytes, Any]]:
        """Return the names, types and values of a table."""
        found = []
        while self._at < len(self._data):
            name = self._take(self._data[self._at] + 1)[1:].decode(errors="backslashreplace")
            found.append((name, *self.value()))
        return found

    def values(self) -> list[Any]:
        """Return the values of an array, fit for JSON."""
        found = []
        while self._at < len(self._data):
            tag, value = self.value()
            found.append(_as_json(tag, value))
        return found

    def value(self) -> tuple[bytes, Any]:
        """Return the type of a field, and its value."""
        tag = self._take(1)
        if tag in b"Sx":
            return tag, self._block()
        if number := _NUMBERS.get(tag):
            return tag, number.unpack(self._take(number.size))[0]
        if read := _OTHERS.get(tag):
            return tag, read(self)
        raise Unreadable(f"unknown type {tag!r}")

    def boolean(self) -> bool:
        """Read a truth."""
        return self._take(1) != b"\0"

    def decimal(self) -> str:
        """Read a decimal number."""
        places, digits = _DECIMAL.unpack(self._take(_DECIMAL.size))
        return str(Decimal(digits).scaleb(-places))

    def timestamp(self) -> str:
        """Read a time, which is a number of seconds unless the producer thought otherwise."""
        (seconds,) = _TIME.unpack(self._take(_TIME.size))
        return datetime.fromtimestamp(seconds, UTC).isoformat() if seconds <= TIME_SECONDS_MAX else str(seconds)

    def table(self) -> dict[str, Any]:
        """Read a table in a table."""
        return {name: _as_json(tag, value) for name, tag, value in _Cursor(self._block()).items()}

    def array(self) -> list[Any]:
        """Read an array."""
        return _Cursor(self._block()).values()

    def nothing(self) -> None:
        """Read a void."""

    def _block(self) -> bytes:
        return self._take(_LONG.unpack(self._take(_LONG.size))[0])

    def _take(self, count: int) -> bytes:
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
    """Return a value that JSON has; what it has not becomes text."""
    if isinstance(value, bytes):
        return value.decode(errors="backslashreplace")
    return str(value) if tag in b"fd" and not math.isfinite(value) else value
