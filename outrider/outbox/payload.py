"""Payloads as JSON text, and what is wrong with those that are not."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping
from datetime import date, datetime
from decimal import Decimal
from typing import Any
from uuid import UUID

from outrider.errors import InvalidEvent

_DEPTH_MAX = 200


def bad_characters(text: str) -> str | None:
    """Say which character no database or broker will take, if there is one."""
    if "\0" in text:
        return "it contains a NUL character"
    if any("\ud800" <= character <= "\udfff" for character in text):
        return "it contains a lone surrogate"
    return None


def payload_text(payload: Any, bytes_max: int, path: str) -> str:
    """Return the payload as JSON text, or refuse it with the path of what is wrong.

    >>> payload_text({"total": 12}, 100, "payload")
    '{"total":12}'
    """
    try:
        text = json.dumps(payload, ensure_ascii=False, allow_nan=False, default=_plain, separators=(",", ":"))
        size = len(text.encode())
    except (TypeError, ValueError, RecursionError) as error:
        raise next(
            _findings(payload, path), InvalidEvent(path, f"it is not JSON ({error})", "pass JSON values")
        ) from error
    if "\\u0000" in text:
        for finding in _findings(payload, path):
            raise finding
    if size > bytes_max:
        raise InvalidEvent(
            path, f"it has {size} bytes, the destination takes {bytes_max}", "stage a reference to it instead"
        )
    return text


def _plain(value: Any) -> str:
    """Write the few types that have one obvious text; json refuses everything else."""
    if isinstance(value, datetime) and value.utcoffset() is None:
        raise TypeError("naive datetime")
    if isinstance(value, datetime | date):
        return value.isoformat()
    if isinstance(value, UUID | Decimal) and (not isinstance(value, Decimal) or value.is_finite()):
        return str(value)
    raise TypeError(type(value).__name__)


def _findings(value: Any, path: str, depth: int = 0) -> Iterator[InvalidEvent]:
    """Walk a payload that was refused, to say where and why. Only failures pay for it."""
    if depth > _DEPTH_MAX:
        yield InvalidEvent(path, "it is nested too deeply or contains itself", "flatten it")
    elif isinstance(value, Mapping):
        for name, item in value.items():
            yield from _findings_in_key(name, path)
            yield from _findings(item, f"{path}.{name}", depth + 1)
    elif isinstance(value, list | tuple):
        for index, item in enumerate(value):
            yield from _findings(item, f"{path}[{index}]", depth + 1)
    elif problem := _problem(value):
        yield InvalidEvent(path, *problem)


def _problem(value: Any) -> tuple[str, str] | None:
    """Say what is wrong with a single value, and what to do."""
    if isinstance(value, str):
        bad = bad_characters(value)
        return (bad, "remove it") if bad else None
    if isinstance(value, float | Decimal):
        finite = value.is_finite() if isinstance(value, Decimal) else math.isfinite(value)
        return None if finite else (f"{value} is not JSON", "send null or a number")
    if isinstance(value, datetime) and value.utcoffset() is None:
        return "it is a naive datetime", "give it a time zone, such as datetime.now(UTC)"
    if isinstance(value, bool | int | None | date | UUID):
        return None
    return f"a {type(value).__name__} is not JSON", "convert it to text, number, list or object"


def _findings_in_key(name: Any, path: str) -> Iterator[InvalidEvent]:
    if not isinstance(name, str):
        yield InvalidEvent(path, f"the key {name!r} is not a text", "use strings as keys")
    elif problem := bad_characters(name):
        yield InvalidEvent(f"{path}.{name!a}", problem, "remove it")
