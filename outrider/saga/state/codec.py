"""Encodes the state of a saga as JSON text and decodes it: dataclasses, and pydantic-style models.

An encoded state decodes to an equal state, or encoding fails with the path of the field; no value is dropped. A field
that was added to a type later gets its default. Unknown fields are ignored here, and the round-trip module preserves
them.
"""

from __future__ import annotations

import dataclasses
import inspect
import json
from collections.abc import Iterable, Iterator, Mapping
from datetime import datetime
from enum import Enum
from functools import lru_cache, partial
from itertools import zip_longest
from types import FunctionType, NoneType, UnionType
from typing import Any, Literal, TypeVar, Union, get_args, get_origin, get_type_hints

from outrider.errors import InvalidState
from outrider.saga.state.types import (
    ANYTHING,
    JSON_SCALARS,
    OTHER_VERSION,
    SCALARS,
    Codec,
    check_model,
    dict_of,
    either,
    enum_codec,
    is_model,
    list_of,
    literal_codec,
    lost,
    model_codec,
    optional,
    tuple_of,
    tuple_with,
    unreadable,
    wrong_type,
)

S = TypeVar("S")

STORABLE = (
    "use a dataclass, a pydantic model, bool, int, float, str, UUID, datetime, date, Decimal, Enum, Literal, Any, or "
    "list, tuple, dict[str, …] and … | None of these"
)

Difference = tuple[str, Any, Any]
"""A path, the value that was written, and the value that was read back."""

PLAIN = (str, int, float, type(None))


def check_type(state_type: Any) -> None:
    """Reject a type whose values cannot be stored, with the path of the field.

    >>> @dataclasses.dataclass
    ... class Order:
    ...     tags: set[str]
    >>> check_type(Order)
    Traceback (most recent call last):
    ...
    outrider.errors.InvalidState: Order.tags: the type set[str] cannot be stored; use ...
    """
    if not isinstance(state_type, type) or not (is_model(state_type) or dataclasses.is_dataclass(state_type)):
        shown = getattr(state_type, "__name__", repr(state_type))
        raise InvalidState(shown, "it is neither a dataclass nor a pydantic model", "decorate it with @dataclass")
    inside(state_type)


@lru_cache(maxsize=1024)
def inside(state_type: type) -> frozenset[type]:
    """Return all classes with fields in a state type, including the type itself.

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
            todo.extend(check_model(found) if is_model(found) else _field_types(found))
    return frozenset(seen)


def _field_types(kind: type) -> list[type]:
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
    """Return a state as JSON values."""
    kind: Any = type(state)
    name = kind.__name__
    try:
        return _whole(kind).write(state, name)
    except RecursionError as error:
        raise _endless(name, error) from error


def as_text(values: Any, name: str) -> bytes:
    """Return JSON values as JSON text.

    >>> as_text({"order_id": "A-7"}, "Order")
    b'{"order_id":"A-7"}'
    """
    try:
        return json.dumps(values, ensure_ascii=False, allow_nan=False, separators=(",", ":")).encode()
    except (RecursionError, ValueError) as error:
        raise _endless(name, error) from error


def _endless(name: str, error: Exception) -> InvalidState:
    remedy = "store less: references instead of things that contain each other"
    return InvalidState(name, f"it cannot be written as JSON ({error})", remedy)


def decode(state_type: type[S], stored: bytes) -> S:
    """Decode a state.

    >>> @dataclasses.dataclass
    ... class Order:
    ...     order_id: str
    ...     paid: bool = False
    >>> decode(Order, b'{"order_id": "A-7"}').paid
    False
    """
    return read(state_type, parsed(state_type, stored))


def parsed(state_type: type, stored: bytes) -> Any:
    """Parse a stored state into JSON values."""
    try:
        return json.loads(stored)
    except ValueError as error:
        problem = f"what is stored is not JSON ({error})"
        raise InvalidState(state_type.__name__, problem, "restore the row from a backup") from error


def read(state_type: type[S], values: Any) -> S:
    """Build a state from JSON values."""
    kind: Any = state_type
    result: S = _whole(kind).read(values, kind.__name__)
    return result


@lru_cache(maxsize=1024)
def _whole(kind: Any) -> Codec:
    return _codec(kind, kind.__name__)


@lru_cache(maxsize=1024)
def _own(kind: Any) -> frozenset[str]:
    """Return the fields that the constructor does not take."""
    return frozenset(field.name for field in dataclasses.fields(kind) if not field.init)


@lru_cache(maxsize=1024)
def _fields(kind: type) -> Mapping[str, Codec]:
    """Return the codecs of the fields of a dataclass, and check that the constructor takes the fields."""
    fields = dataclasses.fields(kind)
    try:
        hints = get_type_hints(kind)
    except (NameError, TypeError, AttributeError, SyntaxError) as error:
        remedy = "define what it names in the module of the class, before the saga"
        raise InvalidState(kind.__name__, f"an annotation cannot be understood ({error})", remedy) from error
    try:
        inspect.signature(kind).bind(**dict.fromkeys(field.name for field in fields if field.init))
    except TypeError as error:
        remedy = "let its constructor take its fields, and nothing else that is required"
        raise InvalidState(kind.__name__, f"it cannot be made of its fields ({error})", remedy) from error
    return {field.name: _codec(hints[field.name], f"{kind.__name__}.{field.name}") for field in fields}


def _codec(hint: Any, path: str) -> Codec:
    """Return the codec of an annotation.

    A class with fields is resolved on first use, because the class may contain itself.
    """
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
    """Resolve a NewType or a `type` alias."""
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
    raise InvalidState(path, f"the type {name} cannot be stored", STORABLE)


def _union(hint: Any, args: tuple[Any, ...], path: str) -> Codec:
    kinds = [_meant(arg) for arg in args]
    others = [kind for kind in kinds if kind is not NoneType]
    if len(others) == 1:
        return optional(_codec(others[0], path))
    if all(kind in JSON_SCALARS for kind in kinds):
        return either(frozenset(kinds), str(hint))
    raise InvalidState(path, f"the type {hint} cannot be told apart when it is read back", "use a field for each")


def _write_fields(kind: Any, value: Any, path: str) -> dict[str, Any]:
    fields = _fields(kind)
    if type(value) is not kind:
        raise wrong_type(path, value, kind.__name__)
    result = {name: codec.write(getattr(value, name), f"{path}.{name}") for name, codec in fields.items()}
    # Cached properties are computed again after decoding.
    more = [name for name in getattr(value, "__dict__", ()) if name not in fields and not derived(kind, name)]
    if more:
        _check_undeclared(kind, value, more, _read_fields(kind, result, path), path)
    return result


def _check_undeclared(kind: Any, value: Any, names: list[str], back: Any, path: str) -> None:
    """Reject undeclared attributes, except attributes that __post_init__ restores when the state is decoded."""
    for name in names:
        if name not in getattr(back, "__dict__", ()):
            problem = f"{kind.__name__} declares no such field, so it would be lost"
            raise InvalidState(f"{path}.{name}", problem, f"add {name} to the fields of {kind.__name__}")
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
        # The constructor is user code and may raise any exception; a missing value without a default raises here too.
        raise InvalidState(
            path, f"{kind.__name__} cannot be made of what is stored ({error})", OTHER_VERSION
        ) from error
    for name in own & values.keys():
        object.__setattr__(made, name, values[name])
    return made


class Absent:
    """The placeholder for a missing value in a comparison."""

    def __repr__(self) -> str:
        return "nothing"


ABSENT = Absent()


def difference(written: Any, read: Any, path: str) -> Difference | None:
    """Return the first difference of two values, or None.

    >>> difference({"tags": ["a"]}, {"tags": ("a",)}, "Order.extra")
    ("Order.extra['tags']", ['a'], ('a',))
    """
    if isinstance(written, PLAIN):
        return None if written == read else (path, written, read)
    if type(written) is not type(read):
        return path, written, read
    if isinstance(written, datetime):
        return None if _same_moment(written, read) else (path, written, read)
    if (parts := _parts(written, read)) is not None:
        return next((found for name, one, other in parts if (found := difference(one, other, f"{path}{name}"))), None)
    # A value without its own comparison never equals the decoded value; its JSON text must be sufficient.
    incomparable = vars(object)["__eq__"] is inspect.getattr_static(type(written), "__eq__")
    return None if incomparable or written == read else (path, written, read)


def derived(kind: type, name: str) -> bool:
    """Tell whether a class computes an attribute on access, as a cached property does.

    >>> derived(int, "real"), derived(int, "price")
    (True, False)
    """
    found = inspect.getattr_static(kind, name, None)
    return hasattr(found, "__get__") and not isinstance(found, FunctionType | staticmethod | classmethod)


def _same_moment(one: datetime, other: datetime) -> bool:
    # A comparison across time zones is always False for the hour that occurs twice at the end of summer time.
    return (one.utcoffset() is None) is (other.utcoffset() is None) and one.isoformat() == other.isoformat()


def _parts(one: Any, other: Any) -> Iterator[tuple[str, Any, Any]] | None:
    if is_model(type(one)):
        return _members(_all(one), _all(other), type(one))
    if dataclasses.is_dataclass(one):
        names = [field.name for field in dataclasses.fields(one)]
        return ((f".{name}", getattr(one, name), getattr(other, name)) for name in names)
    if isinstance(one, Mapping):
        keys = dict.fromkeys([*one, *other])
        return ((f"[{key!r}]", one.get(key, ABSENT), other.get(key, ABSENT)) for key in keys)
    if isinstance(one, list | tuple):
        return _items(one, other)
    return None


def _members(one: Mapping[str, Any], other: Mapping[str, Any], kind: type) -> Iterator[tuple[str, Any, Any]]:
    for name in dict.fromkeys([*one, *other]):
        if not derived(kind, name):
            yield f".{name}", one.get(name, ABSENT), other.get(name, ABSENT)


def _all(model: Any) -> Mapping[str, Any]:
    """Return the fields of a model, its private attributes and its undeclared extra values."""
    kept = (getattr(model, name, None) or {} for name in ("__dict__", "__pydantic_private__", "__pydantic_extra__"))
    return {name: value for members in kept for name, value in members.items()}


def _items(one: Iterable[Any], other: Iterable[Any]) -> Iterator[tuple[str, Any, Any]]:
    for index, (written, read) in enumerate(zip_longest(one, other, fillvalue=ABSENT)):
        yield f"[{index}]", written, read
