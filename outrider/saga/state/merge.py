"""Merges the states of parallel steps.

Parallel steps start with the same state and change different fields. The merge keeps the changes of all steps. If two
steps change the same field, the later step wins, and the overwritten field is reported.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterator, Mapping
from typing import Any

from outrider.errors import InvalidState
from outrider.saga.state.codec import decode

ABSENT = object()


def merged(current: bytes, before: bytes, after: bytes) -> bytes:
    """Return the current state with the changes from `before` to `after`.

    >>> merged(b'{"hotel":"H","car":null}', b'{"hotel":null,"car":null}', b'{"hotel":null,"car":"C"}')
    b'{"hotel":"H","car":"C"}'
    """
    if current == before:
        return after
    if before == after:
        return current
    merged_values = _merged(json.loads(current), json.loads(before), json.loads(after))
    return json.dumps(merged_values, ensure_ascii=False, allow_nan=False, separators=(",", ":")).encode()


def overwritten(current: bytes, before: bytes, after: bytes) -> list[str]:
    """Return the fields that a parallel step has changed since `before` and that `after` overwrites.

    >>> overwritten(b'{"total":1,"car":null}', b'{"total":0,"car":null}', b'{"total":2,"car":"C"}')
    ['total']
    """
    if before in (current, after):
        return []
    return list(_overwritten(json.loads(current), json.loads(before), json.loads(after), ""))


def _overwritten(current: Any, before: Any, after: Any, path: str) -> Iterator[str]:
    if _same(before, after) or _same(current, before) or _same(current, after):
        return
    if not all(isinstance(one, dict) for one in (current, before, after)):
        yield path
        return
    for name in dict.fromkeys([*after, *before]):
        now, old, new = (one.get(name, ABSENT) for one in (current, before, after))
        yield from _overwritten(now, old, new, f"{path}.{name}" if path else name)


def _merged(current: Any, before: Any, after: Any) -> Any:
    if not all(isinstance(one, dict) for one in (current, before, after)):
        return after
    result = dict(current)
    for name in [*after, *(name for name in before if name not in after)]:
        old, new = before.get(name, ABSENT), after.get(name, ABSENT)
        if _same(old, new):
            continue
        if new is ABSENT:
            result.pop(name, None)
        else:
            result[name] = _merged(current.get(name), old, new)
    return result


def _same(one: Any, other: Any) -> bool:
    if one is ABSENT or other is ABSENT:
        return one is other
    # Compare as text: True, 1 and 1.0 are equal in Python but differ in JSON.
    return json.dumps(one) == json.dumps(other)


def set_state_fields(state_type: Any, stored: bytes, fields: Mapping[str, Any]) -> bytes:
    """Return a state with new values in some fields. Raises InvalidState with the path of a wrong field.

    >>> @dataclasses.dataclass
    ... class Order:
    ...     order_id: str
    ...     charge: str | None = None
    >>> set_state_fields(Order, b'{"order_id": "A-7", "charge": null}', {"charge": "C-1"})
    b'{"order_id": "A-7", "charge": "C-1"}'
    """
    known = field_names(state_type)
    for name in fields:
        if name not in known:
            raise InvalidState(
                f"{state_type.__name__}.{name}", "there is no such field", f"there are {', '.join(known)}"
            )
    try:
        changed = json.dumps({**json.loads(stored), **fields}, ensure_ascii=False, allow_nan=False).encode()
    except ValueError as error:
        raise InvalidState(state_type.__name__, f"{error}", "set null, a number or a whole text") from error
    decode(state_type, changed)
    return changed


def field_names(state_type: Any) -> tuple[str, ...]:
    """Return the names of the fields of a state."""
    if dataclasses.is_dataclass(state_type):
        return tuple(field.name for field in dataclasses.fields(state_type))
    return tuple(getattr(state_type, "model_fields", {}))
