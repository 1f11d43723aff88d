"""Conversion of payloads: pydantic models, dataclasses, msgspec structs and enums become plain JSON values.

The libraries are recognised by what their objects have, and imported only if such an object is there.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import fields, is_dataclass
from datetime import date, datetime, time
from decimal import Decimal
from enum import Enum
from types import UnionType
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints
from uuid import UUID

from outrider.errors import UsageError


def to_plain(value: Any) -> Any:
    """Convert a value that json does not know, one level deep; raise TypeError for any other value.

    A model becomes an object, an enum its value, an id text.

    >>> to_plain(UUID(int=7))
    '00000000-0000-0000-0000-000000000007'
    """
    if isinstance(value, datetime) and value.utcoffset() is None:
        raise TypeError("naive datetime")
    if isinstance(value, datetime | date | time):
        return value.isoformat()
    if isinstance(value, UUID | Decimal) and (not isinstance(value, Decimal) or value.is_finite()):
        return str(value)
    if isinstance(value, Enum):
        return value.value
    if is_model(value):
        return _fields(value)
    if is_object_id(value):
        return str(value)
    raise TypeError(type(value).__name__)


def is_object_id(value: Any) -> bool:
    """Return whether a value is an ObjectId of MongoDB."""
    kind = type(value)
    return kind.__name__ == "ObjectId" and kind.__module__.startswith("bson")


def is_model(value: Any) -> bool:
    """Return whether a value is an instance of a pydantic model, a dataclass or a msgspec struct."""
    kind = type(value)
    return hasattr(kind, "model_dump") or hasattr(kind, "__struct_fields__") or is_dataclass(kind)


def _fields(model: Any) -> Any:
    kind = type(model)
    if hasattr(kind, "model_dump"):
        return model.model_dump(mode="json", by_alias=True)
    if hasattr(kind, "__struct_fields__"):
        import msgspec

        return msgspec.to_builtins(model, enc_hook=str)
    return {field.name: getattr(model, field.name) for field in fields(model)}


def json_parser() -> Callable[[bytes | str], Any]:
    """Return the function that reads the JSON of a stored payload: msgspec's, which takes a third of the time.

    Both read the same values; where msgspec is stricter, the standard library decides.

    >>> json_parser()(b'{"total": 123456789012345678901234567890}')
    {'total': 123456789012345678901234567890}
    """
    try:
        import msgspec
    except ModuleNotFoundError:
        return json.loads
    decode, refusal = msgspec.json.decode, msgspec.MsgspecError

    def parse(text: bytes | str) -> Any:
        try:
            return decode(text)
        except refusal:
            return json.loads(text)

    return parse


def json_writer() -> Callable[[Any], str]:
    """Return the function that writes values which were read from JSON: msgspec's, which takes a tenth of the time.

    Both write the same values, except NaN, which no JSON text has; the standard library writes what msgspec rejects.

    >>> json_writer()({"total": 123456789012345678901234567890, "name": "Zoë"})
    '{"total":123456789012345678901234567890,"name":"Zoë"}'
    """
    standard = json.JSONEncoder(ensure_ascii=False, allow_nan=False, separators=(",", ":")).encode
    try:
        import msgspec
    except ModuleNotFoundError:
        return standard
    encode = msgspec.json.encode

    def write(value: Any) -> str:
        try:
            return encode(value).decode()
        except (TypeError, ValueError, OverflowError):
            return standard(value)

    return write


def json_schema_of(kind: type) -> Any:
    """Return the JSON Schema of a type of payloads, as staging writes its values.

    >>> from dataclasses import dataclass
    >>> @dataclass
    ... class Paid:
    ...     total: int
    ...     note: str | None = None
    >>> json_schema_of(Paid)["required"]
    ['total', 'note']
    """
    if hasattr(kind, "model_json_schema"):
        return kind.model_json_schema(by_alias=True, mode="serialization")
    if hasattr(kind, "__struct_fields__"):
        import msgspec

        return msgspec.json.schema(kind)
    if is_dataclass(kind) or issubclass(kind, Enum):
        return _described(kind, ())
    raise UsageError(f"{kind!r} has no schema; use a pydantic model, a dataclass, a msgspec struct or an enum")


_PLAIN: Mapping[Any, Mapping[str, Any]] = {
    str: {"type": "string"},
    bool: {"type": "boolean"},
    int: {"type": "integer"},
    float: {"type": "number"},
    type(None): {"type": "null"},
    datetime: {"type": "string", "format": "date-time"},
    date: {"type": "string", "format": "date"},
    time: {"type": "string", "format": "time"},
    UUID: {"type": "string", "format": "uuid"},
    Decimal: {"type": "string"},
}


def _described(kind: Any, above: tuple[Any, ...]) -> dict[str, Any]:
    """Return the schema of a type of a dataclass's field."""
    if kind in _PLAIN:
        return dict(_PLAIN[kind])
    if isinstance(kind, type) and issubclass(kind, Enum):
        return {"enum": [member.value for member in kind]}
    if isinstance(kind, type) and is_dataclass(kind):
        if kind in above:
            raise UsageError(f"{kind.__name__} contains itself; write its schema as a document")
        hints = get_type_hints(kind)
        named = {field.name: _described(hints[field.name], (*above, kind)) for field in fields(kind)}
        return {"type": "object", "properties": named, "required": list(named)}
    if isinstance(kind, type) and (hasattr(kind, "model_json_schema") or hasattr(kind, "__struct_fields__")):
        raise UsageError(f"a dataclass with {kind.__name__} in it has no schema here; write its schema as a document")
    return _described_container(kind, above)


def _described_container(kind: Any, above: tuple[Any, ...]) -> dict[str, Any]:
    origin, inner = get_origin(kind) or kind, get_args(kind)
    found: dict[str, Any] = {}
    if origin in (Union, UnionType):
        found = {"anyOf": [_described(each, above) for each in inner]}
    elif origin is Literal:
        found = {"enum": list(inner)}
    elif origin in (list, tuple):
        found = {"type": "array"}
        if origin is tuple and inner and inner[-1] is not Ellipsis:
            found |= {"prefixItems": [_described(each, above) for each in inner], "items": False}
        elif inner:
            found["items"] = _described(inner[0], above)
    elif origin is dict:
        found = {"type": "object"}
        if inner and inner[0] is str:
            found["additionalProperties"] = _described(inner[1], above)
    return found
