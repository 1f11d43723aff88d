"""A saga's state as JSON text, and back: dataclasses, and models that write themselves as pydantic's do.

What is written is read back equal, or is refused with the path of the field; nothing is dropped on the way. A field
that a type has gained since is filled from its default.
"""

from __future__ import annotations

import dataclasses
import inspect
import json
from collections.abc import Mapping
from enum import Enum
from functools import lru_cache, partial
from types import NoneType, UnionType
from typing import Any, Literal, TypeVar, Union, get_args, get_origin, get_type_hints

from outrider.saga.containers import JSON_SCALARS, dict_of, either, list_of, optional, tuple_of, tuple_with
from outrider.saga.errors import BadState
from outrider.saga.values import (
    ANYTHING,
    OTHER_VERSION,
    SCALARS,
    Codec,
    enum_codec,
    literal_codec,
    plain,
    unfit,
    unreadable,
)

S = TypeVar("S")

STORABLE = (
    "use a dataclass, a pydantic model, bool, int, float, str, UUID, datetime, date, Decimal, Enum, Literal, Any, or "
    "list, tuple, dict[str, …] and … | None of these"
)


def check_type(state_type: Any) -> None:
    """Refuse a type whose values could not be stored, with the path of the field.

    >>> @dataclasses.dataclass
    ... class Order:
    ...     tags: set[str]
    >>> check_type(Order)
    Traceback (most recent call last):
    ...
    outrider.saga.errors.BadState: Order.tags: the type set[str] cannot be stored; use ...
    """
    if not isinstance(state_type, type) or not (_is_model(state_type) or dataclasses.is_dataclass(state_type)):
        shown = getattr(state_type, "__name__", repr(state_type))
        raise BadState(shown, "it is neither a dataclass nor a pydantic model", "decorate it with @dataclass")
    todo, seen = [state_type], set[type]()
    while todo:
        found = todo.pop()
        if found not in seen and not _is_model(found):
            seen.add(found)
            todo.extend(inner for codec in _fields(found).values() for inner in codec.inside)


def encode(state: Any) -> bytes:
    """Return a state as JSON text.

    >>> @dataclasses.dataclass
    ... class Order:
    ...     order_id: str
    ...     paid: bool = False
    >>> encode(Order("A-7"))
    b'{"order_id":"A-7","paid":false}'
    """
    name = type(state).__name__
    try:
        written = _codec(type(state), name).write(state, name)
        return json.dumps(written, ensure_ascii=False, allow_nan=False, separators=(",", ":")).encode()
    except (RecursionError, ValueError) as error:
        remedy = "store less: references instead of things that contain each other"
        raise BadState(name, f"it cannot be written as JSON ({error})", remedy) from error


def decode(state_type: type[S], stored: bytes) -> S:
    """Read a state back.

    >>> @dataclasses.dataclass
    ... class Order:
    ...     order_id: str
    ...     paid: bool = False
    >>> decode(Order, b'{"order_id": "A-7"}').paid
    False
    """
    name = state_type.__name__
    try:
        found = json.loads(stored)
    except ValueError as error:
        raise BadState(name, f"what is stored is not JSON ({error})", "restore the row from a backup") from error
    result: S = _codec(state_type, name).read(found, name)
    return result


def _is_model(kind: Any) -> bool:
    return all(callable(getattr(kind, name, None)) for name in ("model_dump_json", "model_validate_json"))


@lru_cache(maxsize=1024)
def _fields(kind: type) -> Mapping[str, Codec]:
    """Return the codec of each field of a dataclass, and make sure that it can be made of its fields."""
    fields = dataclasses.fields(kind)
    try:
        hints = get_type_hints(kind)
    except (NameError, TypeError, AttributeError, SyntaxError) as error:
        remedy = "define what it names in the module of the class, before the saga"
        raise BadState(kind.__name__, f"an annotation cannot be understood ({error})", remedy) from error
    try:
        inspect.signature(kind).bind(**dict.fromkeys(field.name for field in fields if field.init))
    except TypeError as error:
        remedy = "let its constructor take its fields, and nothing else that is required"
        raise BadState(kind.__name__, f"it cannot be made of its fields ({error})", remedy) from error
    return {field.name: _codec(hints[field.name], f"{kind.__name__}.{field.name}") for field in fields}


def _codec(hint: Any, path: str) -> Codec:
    """Return the codec of an annotation; a class with fields is looked into when it is used, as it may hold itself."""
    hint = _meant(hint)
    if hint is Any:
        return ANYTHING
    if hint in SCALARS:
        return SCALARS[hint]
    if isinstance(hint, type) and get_origin(hint) is None:
        if issubclass(hint, Enum):
            return enum_codec(hint, path)
        if _is_model(hint):
            return Codec(partial(_write_model, hint), partial(_read_model, hint))
        if dataclasses.is_dataclass(hint):
            return Codec(partial(_write_fields, hint), partial(_read_fields, hint), (hint,))
    return _composed(hint, path)


def _meant(hint: Any) -> Any:
    """Look through a NewType or a `type` alias."""
    while (inner := getattr(hint, "__supertype__", None) or getattr(hint, "__value__", None)) is not None:
        hint = inner
    return hint


def _composed(hint: Any, path: str) -> Codec:
    origin, args = get_origin(hint) or hint, get_args(hint)
    if origin is Literal:
        return literal_codec(args, path)
    if origin in (Union, UnionType):
        return _union(hint, args, path)
    if origin is list:
        return list_of(_codec(args[0] if args else Any, path))
    if origin is dict and (not args or _meant(args[0]) is str):
        return dict_of(_codec(args[1] if args else Any, path))
    if origin is tuple and (not args or args[-1] is Ellipsis):
        return tuple_of(_codec(args[0] if args else Any, path))
    if origin is tuple:
        return tuple_with([_codec(arg, path) for arg in args])
    name = hint.__name__ if isinstance(hint, type) and not args else str(hint)
    raise BadState(path, f"the type {name} cannot be stored", STORABLE)


def _union(hint: Any, args: tuple[Any, ...], path: str) -> Codec:
    kinds = [_meant(arg) for arg in args]
    others = [kind for kind in kinds if kind is not NoneType]
    if len(others) == 1:
        return optional(_codec(others[0], path))
    if all(kind in JSON_SCALARS for kind in kinds):
        return either(frozenset(kinds), str(hint))
    raise BadState(path, f"the type {hint} cannot be told apart when it is read back", "use a field for each")


def _write_fields(kind: Any, value: Any, path: str) -> dict[str, Any]:
    fields = _fields(kind)
    if type(value) is not kind:
        raise unfit(path, value, kind.__name__)
    for name in getattr(value, "__dict__", ()):
        # Properties that remember their value, and what __post_init__ keeps to itself, come back by themselves.
        if name not in fields and not name.startswith("_") and not hasattr(kind, name):
            problem = f"{kind.__name__} declares no such field, so it would be lost"
            raise BadState(f"{path}.{name}", problem, f"add {name} to the fields of {kind.__name__}")
    return {name: codec.write(getattr(value, name), f"{path}.{name}") for name, codec in fields.items()}


def _read_fields(kind: Any, stored: Any, path: str) -> Any:
    if not isinstance(stored, dict):
        raise unreadable(path, stored, kind.__name__)
    codecs = _fields(kind)
    if unknown := [name for name in stored if name not in codecs]:
        raise BadState(f"{path}.{unknown[0]}", f"it is stored, and {kind.__name__} has no such field", OTHER_VERSION)
    values = {name: codecs[name].read(one, f"{path}.{name}") for name, one in stored.items()}
    own = {field.name for field in dataclasses.fields(kind) if not field.init}
    try:
        made = kind(**{name: value for name, value in values.items() if name not in own})
    except Exception as error:
        # The constructor is the user's, and may raise anything; what was absent and has no default raises here too.
        raise BadState(path, f"{kind.__name__} cannot be made of what is stored ({error})", OTHER_VERSION) from error
    for name in own & values.keys():
        object.__setattr__(made, name, values[name])
    return made


def _write_model(kind: Any, value: Any, path: str) -> Any:
    if type(value) is not kind:
        raise unfit(path, value, kind.__name__)
    try:
        # By alias, and without what is computed: that is what the model itself reads back.
        return plain(json.loads(value.model_dump_json(by_alias=True, round_trip=True)), path)
    except ValueError as error:
        raise BadState(path, f"the model cannot be written as JSON ({error})", "change its fields") from error


def _read_model(kind: Any, stored: Any, path: str) -> Any:
    try:
        return kind.model_validate_json(json.dumps(stored))
    except ValueError as error:
        raise BadState(path, f"the model does not take what is stored ({error})", OTHER_VERSION) from error
