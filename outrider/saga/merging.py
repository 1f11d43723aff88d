"""States of steps that ran side by side, put together.

Each began with the state as it was, and changed fields of it. What one changed is kept when the other is saved; of two
that changed the same field, the later one wins, and it is told which field that was.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

ABSENT = object()


def merged(current: bytes, before: bytes, after: bytes) -> bytes:
    """Return the current state with the changes that led from `before` to `after`.

    >>> merged(b'{"hotel":"H","car":null}', b'{"hotel":null,"car":null}', b'{"hotel":null,"car":"C"}')
    b'{"hotel":"H","car":"C"}'
    """
    if current == before:
        return after
    if before == after:
        return current
    together = _merged(json.loads(current), json.loads(before), json.loads(after))
    return json.dumps(together, ensure_ascii=False, allow_nan=False, separators=(",", ":")).encode()


def overwritten(current: bytes, before: bytes, after: bytes) -> list[str]:
    """Return the fields that somebody else has changed since `before`, and that are now overwritten with another value.

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
    # As text, since True, 1 and 1.0 are equal, and not the same.
    return json.dumps(one) == json.dumps(other)
