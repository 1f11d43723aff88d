"""What a person puts into a saga's state when he settles a step by hand: declared fields only, and values that fit."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping
from typing import Any

from outrider.saga.errors import BadState
from outrider.saga.state import decode


def amended(state_type: Any, stored: bytes, fields: Mapping[str, Any]) -> bytes:
    """Return a state with other values in some fields, or raise BadState with the field to look at.

    >>> @dataclasses.dataclass
    ... class Order:
    ...     order_id: str
    ...     charge: str | None = None
    >>> amended(Order, b'{"order_id": "A-7", "charge": null}', {"charge": "C-1"})
    b'{"order_id": "A-7", "charge": "C-1"}'
    """
    known = _names(state_type)
    for name in fields:
        if name not in known:
            raise BadState(f"{state_type.__name__}.{name}", "there is no such field", f"there are {', '.join(known)}")
    try:
        changed = json.dumps({**json.loads(stored), **fields}, ensure_ascii=False, allow_nan=False).encode()
    except ValueError as error:
        raise BadState(state_type.__name__, f"{error}", "set null, a number or a whole text") from error
    decode(state_type, changed)
    return changed


def _names(state_type: Any) -> tuple[str, ...]:
    if dataclasses.is_dataclass(state_type):
        return tuple(field.name for field in dataclasses.fields(state_type))
    return tuple(getattr(state_type, "model_fields", {}))
