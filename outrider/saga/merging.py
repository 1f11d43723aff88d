"""States of steps that ran side by side, put together.

Each began with the state as it was, and changed fields of it. What one changed is kept when the other is saved; of two
that changed the same field, the later one wins.
"""

from __future__ import annotations

import json
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
