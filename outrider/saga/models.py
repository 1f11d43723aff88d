"""Models that write and read themselves as pydantic's do, inside a saga's state.

What such a model keeps to itself when it writes itself would be lost, so a type that says that it will is refused.
"""

from __future__ import annotations

import json
from functools import partial
from typing import Any, get_args

from outrider.saga.errors import BadState
from outrider.saga.values import OTHER_VERSION, Codec, plain, unfit


def is_model(kind: Any) -> bool:
    """Tell whether a type writes and reads itself.

    >>> is_model(int)
    False
    """
    return all(callable(getattr(kind, name, None)) for name in ("model_dump_json", "model_validate_json"))


def model_codec(kind: Any) -> Codec:
    """Return the codec of a model."""
    return Codec(partial(_write, kind), partial(_read, kind), (kind,))


def check_model(kind: Any) -> list[Any]:
    """Refuse a model that leaves fields out, or masks them; return the models inside it, to be checked as well."""
    decorators = getattr(kind, "__pydantic_decorators__", None)
    custom = {name for one in getattr(decorators, "field_serializers", {}).values() for name in one.info.fields}
    inside: list[Any] = []
    for name, field in getattr(kind, "model_fields", {}).items():
        path, named = f"{kind.__name__}.{name}", list(_named(field.annotation))
        if field.exclude:
            raise BadState(path, "the model leaves it out when it writes itself", "take exclude=True away")
        if any(hasattr(one, "get_secret_value") for one in named) and not custom & {name, "*"}:
            remedy = "keep the secret elsewhere, and its name here; the state is JSON that others can read"
            raise BadState(path, "the model writes stars in its place", remedy)
        inside += [one for one in named if isinstance(one, type) and is_model(one)]
    return inside


def _named(hint: Any) -> list[Any]:
    """Return everything that an annotation names, at any depth."""
    return [hint, *(inner for arg in get_args(hint) for inner in _named(arg))]


def _write(kind: Any, value: Any, path: str) -> Any:
    if type(value) is not kind:
        raise unfit(path, value, kind.__name__)
    try:
        # By alias, and without what is computed: that is what the model itself reads back.
        return plain(json.loads(value.model_dump_json(by_alias=True, round_trip=True)), path)
    except ValueError as error:
        raise BadState(path, f"the model cannot be written as JSON ({error})", "change its fields") from error


def _read(kind: Any, stored: Any, path: str) -> Any:
    try:
        return kind.model_validate_json(json.dumps(stored))
    except ValueError as error:
        raise BadState(path, f"the model does not take what is stored ({error})", OTHER_VERSION) from error
