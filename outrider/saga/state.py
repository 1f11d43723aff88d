"""A saga's state as JSON text, and back: dataclasses, and models that write themselves as pydantic's do.

What is written is read back equal, or is refused with the path of the field; nothing is dropped on the way. A field
that a type has gained since is filled from its default; one that it does not know is left to whoever keeps the text.
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
from outrider.saga.likeness import derived, difference
from outrider.saga.models import check_model, is_model, model_codec
from outrider.saga.values import (
    ANYTHING,
    OTHER_VERSION,
    SCALARS,
    Codec,
    enum_codec,
    literal_codec,
    lost,
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
    if not isinstance(state_type, type) or not (is_model(state_type) or dataclasses.is_dataclass(state_type)):
        shown = getattr(state_type, "__name__", repr(state_type))
        raise BadState(shown, "it is neither a dataclass nor a pydantic model", "decorate it with @dataclass")
    inside(state_type)


@lru_cache(maxsize=1024)
def inside(state_type: type) -> frozenset[type]:
    """Return the classes with fields that a state is made of, itself among them.

    >>> @dataclasses.dataclass
    ... class Order:
    ...     amount: int
    >>> inside(Order) == {Order}
    True
    """
    todo, seen = [state_type], set[type]()
    while todo:
        found = todo.pop()
        if found not in seen:
            seen.add(found)
            todo.extend(check_model(found) if is_model(found) else _held(found))
    return frozenset(seen)


def _held(kind: type) -> list[type]:
    return [inner for codec in _fields(kind).values() for inner in codec.inside]


def encode(state: Any) -> bytes:
    """Return a state as JSON text.

    >>> @dataclasses.dataclass
    ... class Order:
    ...     order_id: str
    ...     paid: bool = False
    >>> encode(Order("A-7"))
    b'{"order_id":"A-7","paid":false}'
    """
    return as_text(written(state), type(state).__name__)


def written(state: Any) -> Any:
    """Return a state as values that are JSON as they stand."""
    kind: Any = type(state)
    name = kind.__name__
    try:
        return _whole(kind).write(state, name)
    except RecursionError as error:
        raise _endless(name, error) from error


def as_text(values: Any, name: str) -> bytes:
    """Return such values as JSON text.

    >>> as_text({"order_id": "A-7"}, "Order")
    b'{"order_id":"A-7"}'
    """
    try:
        return json.dumps(values, ensure_ascii=False, allow_nan=False, separators=(",", ":")).encode()
    except (RecursionError, ValueError) as error:
        raise _endless(name, error) from error


def _endless(name: str, error: Exception) -> BadState:
    remedy = "store less: references instead of things that contain each other"
    return BadState(name, f"it cannot be written as JSON ({error})", remedy)


def decode(state_type: type[S], stored: bytes) -> S:
    """Read a state back.

    >>> @dataclasses.dataclass
    ... class Order:
    ...     order_id: str
    ...     paid: bool = False
    >>> decode(Order, b'{"order_id": "A-7"}').paid
    False
    """
    return read(state_type, parsed(state_type, stored))


def parsed(state_type: type, stored: bytes) -> Any:
    """Return what is stored as JSON values."""
    try:
        return json.loads(stored)
    except ValueError as error:
        problem = f"what is stored is not JSON ({error})"
        raise BadState(state_type.__name__, problem, "restore the row from a backup") from error


def read(state_type: type[S], values: Any) -> S:
    """Make a state of JSON values."""
    kind: Any = state_type
    result: S = _whole(kind).read(values, kind.__name__)
    return result


@lru_cache(maxsize=1024)
def _whole(kind: Any) -> Codec:
    return _codec(kind, kind.__name__)


@lru_cache(maxsize=1024)
def _own(kind: Any) -> frozenset[str]:
    """Return the fields that a constructor does not take."""
    return frozenset(field.name for field in dataclasses.fields(kind) if not field.init)


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
        if is_model(hint):
            return model_codec(hint)
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
    result = {name: codec.write(getattr(value, name), f"{path}.{name}") for name, codec in fields.items()}
    # Properties that remember their value come back by themselves.
    more = [name for name in getattr(value, "__dict__", ()) if name not in fields and not derived(kind, name)]
    if more:
        _check_undeclared(kind, value, more, _read_fields(kind, result, path), path)
    return result


def _check_undeclared(kind: Any, value: Any, names: list[str], back: Any, path: str) -> None:
    """Refuse what is no field, but for what __post_init__ keeps to itself and makes again when it is read back."""
    for name in names:
        if name not in getattr(back, "__dict__", ()):
            problem = f"{kind.__name__} declares no such field, so it would be lost"
            raise BadState(f"{path}.{name}", problem, f"add {name} to the fields of {kind.__name__}")
        if found := difference(getattr(value, name), getattr(back, name), f"{path}.{name}"):
            raise lost(*found)


def _read_fields(kind: Any, stored: Any, path: str) -> Any:
    if not isinstance(stored, dict):
        raise unreadable(path, stored, kind.__name__)
    known = [(name, codec) for name, codec in _fields(kind).items() if name in stored]
    values = {name: codec.read(stored[name], f"{path}.{name}") for name, codec in known}
    own = _own(kind)
    try:
        made = kind(**{name: value for name, value in values.items() if name not in own})
    except Exception as error:
        # The constructor is the user's, and may raise anything; what was absent and has no default raises here too.
        raise BadState(path, f"{kind.__name__} cannot be made of what is stored ({error})", OTHER_VERSION) from error
    for name in own & values.keys():
        object.__setattr__(made, name, values[name])
    return made
