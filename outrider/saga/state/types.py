"""Codecs of state values: one codec per annotated type.

A codec is strict in both directions. Encoding rejects a value that would decode to a different value, with the path: a
saga that cannot read its own state could neither continue nor compensate.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping, Sequence
from datetime import date, datetime
from decimal import Decimal
from enum import Enum
from functools import partial
from types import NoneType
from typing import Any, NamedTuple, get_args
from uuid import UUID

from outrider.errors import InvalidState

Convert = Callable[[Any, str], Any]
"""Takes a value and its path."""

OTHER_VERSION = "run the definition that it was written with, under its own version, until its sagas have ended"

SHOWN_CHARACTERS = 60

Complaint = Callable[[str, Any, str], InvalidState]

JSON_SCALARS = frozenset({bool, int, float, str, NoneType})
"""Types that JSON itself distinguishes."""


class Codec(NamedTuple):
    """The encoder and decoder of a type, and the classes with fields that the type contains."""

    write: Convert
    read: Convert
    inside: tuple[type, ...] = ()


def shown(value: Any) -> str:
    """Return a short text of a value for an error message."""
    try:
        text = repr(value)
    except Exception as error:
        # A number with too many digits has no text, and `__repr__` of a user class may fail.
        text = f"a {type(value).__name__} that cannot be shown ({error})"
    return text if len(text) <= SHOWN_CHARACTERS else f"{text[:SHOWN_CHARACTERS]}…"


def wrong_type(path: str, value: Any, wanted: str) -> InvalidState:
    """Return the error for a value that does not match the type of its field.

    >>> str(wrong_type("Order.amount", "12", "int"))
    "Order.amount: '12' is not int; change the value, or the type of the field"
    """
    return InvalidState(path, f"{shown(value)} is not {wanted}", "change the value, or the type of the field")


def unreadable(path: str, stored: Any, wanted: str) -> InvalidState:
    """Return the error for a stored value that no longer matches its field."""
    return InvalidState(path, f"the stored {shown(stored)} is not {wanted}", OTHER_VERSION)


def lost(path: str, value: Any, back: Any) -> InvalidState:
    """Return the error for a value that would change when decoded.

    >>> str(lost("Order.extra", (1, 2), [1, 2]))
    'Order.extra: (1, 2) would come back as [1, 2]; change the value, its type, or the code that makes it another'
    """
    problem = f"{shown(value)} would come back as {shown(back)}"
    return InvalidState(path, problem, "change the value, its type, or the code that makes it another")


def _text(value: Any, path: str) -> str:
    if not isinstance(value, str):
        raise wrong_type(path, value, "str")
    if "\0" in value or any("\ud800" <= character <= "\udfff" for character in value):
        raise InvalidState(path, "it contains a NUL character or a lone surrogate", "remove it")
    return value


def _integer(value: Any, path: str) -> int:
    if not isinstance(value, int):
        raise wrong_type(path, value, "int")
    return int(value)


def _number(value: Any, path: str) -> float:
    if not isinstance(value, float | int):
        raise wrong_type(path, value, "float")
    try:
        number = float(value)
    except OverflowError:
        raise wrong_type(path, value, "float") from None
    if isinstance(value, int) and number != value:
        raise InvalidState(path, f"{shown(value)} has more digits than a float keeps", "declare the field as int")
    if not math.isfinite(number):
        raise InvalidState(path, f"{number} is not JSON", "store None or a number")
    return number


def _moment(value: Any, path: str) -> str:
    if not isinstance(value, datetime):
        raise wrong_type(path, value, "datetime")
    if value.utcoffset() is None:
        raise InvalidState(path, "it is a naive datetime", "give it a time zone, such as datetime.now(UTC)")
    return value.isoformat()


def _decimal(value: Any, path: str) -> str:
    if not isinstance(value, Decimal):
        raise wrong_type(path, value, "Decimal")
    if not value.is_finite():
        raise InvalidState(path, f"{value} is not a number", "store None or a number")
    return str(value)


def plain(value: Any, path: str) -> Any:
    """Return a plain JSON value, or reject the value. JSON has no tuple, so a tuple would come back as a list.

    >>> plain({"tags": ["a", 1, None]}, "Order.extra")
    {'tags': ['a', 1, None]}
    """
    if isinstance(value, dict):
        return {_text(name, path): plain(item, f"{path}.{name}") for name, item in value.items()}
    if isinstance(value, list):
        return [plain(item, f"{path}[{index}]") for index, item in enumerate(value)]
    if isinstance(value, float):
        return _number(value, path)
    if isinstance(value, str) and not isinstance(value, Enum):
        return _text(value, path)
    if value is None or isinstance(value, bool) or type(value) is int:
        return value
    raise InvalidState(path, f"{shown(value)} is not plain JSON", "convert it, or give the field a type of its own")


def exactly(kind: type, *, without: tuple[type, ...] = ()) -> Convert:
    """Return a check that a value has a type. The value is stored unchanged."""

    def check(value: Any, path: str) -> Any:
        if not isinstance(value, kind) or isinstance(value, without):
            raise wrong_type(path, value, kind.__name__)
        return value

    return check


def _reading(kind: type, stored_as: type | tuple[type, ...], make: Callable[[Any], Any]) -> Convert:
    # True is an int in Python, but a different value in JSON.
    without = () if kind is bool else (bool,)

    def read(stored: Any, path: str) -> Any:
        if not isinstance(stored, stored_as) or isinstance(stored, without):
            raise unreadable(path, stored, kind.__name__)
        try:
            return make(stored)
        except (ValueError, ArithmeticError):
            raise unreadable(path, stored, kind.__name__) from None

    return read


def _as_text(kind: type, *, without: tuple[type, ...] = ()) -> Convert:
    check = exactly(kind, without=without)
    return lambda value, path: str(check(value, path))


def _as_is(value: Any, path: str) -> Any:
    return value


ANYTHING = Codec(plain, _as_is)


SCALARS: Mapping[Any, Codec] = {
    type(None): Codec(exactly(type(None)), _reading(type(None), type(None), lambda stored: stored)),
    bool: Codec(exactly(bool), _reading(bool, bool, bool)),
    int: Codec(_integer, _reading(int, int, int)),
    float: Codec(_number, _reading(float, (int, float), float)),
    str: Codec(_text, _reading(str, str, str)),
    UUID: Codec(_as_text(UUID), _reading(UUID, str, UUID)),
    datetime: Codec(_moment, _reading(datetime, str, datetime.fromisoformat)),
    date: Codec(_as_text(date, without=(datetime,)), _reading(date, str, date.fromisoformat)),
    Decimal: Codec(_decimal, _reading(Decimal, str, Decimal)),
}
"""Types with one obvious JSON form."""


def enum_codec(kind: type[Enum], path: str) -> Codec:
    """Return the codec of an enumeration, whose members are stored by value."""
    if not all(type(member.value) in (str, int) for member in kind):
        raise InvalidState(
            path, f"{kind.__name__} has values that are neither text nor whole numbers", "give it such ones"
        )
    check = exactly(kind)
    return Codec(lambda value, at: check(value, at).value, _reading(kind, (str, int), kind))


def literal_codec(values: tuple[Any, ...], path: str) -> Codec:
    """Return the codec of a Literal, which accepts only the given values."""
    if not all(type(value) in (str, int, bool, type(None)) for value in values):
        raise InvalidState(
            path, f"Literal{list(values)} has values that are not plain JSON", "use text and whole numbers"
        )
    known = [(type(value), value) for value in values]
    wanted = f"one of {', '.join(map(repr, values))}"

    def check(error: Callable[[str, Any, str], InvalidState]) -> Convert:
        def checked(value: Any, at: str) -> Any:
            if (type(value), value) not in known:
                raise error(at, value, wanted)
            return value

        return checked

    return Codec(check(wrong_type), check(unreadable))


def optional(inner: Codec) -> Codec:
    """Return the codec of `X | None`."""

    def unless_none(convert: Convert) -> Convert:
        return lambda value, path: None if value is None else convert(value, path)

    return Codec(unless_none(inner.write), unless_none(inner.read), inner.inside)


def either(kinds: frozenset[type], shown: str) -> Codec:
    """Return the codec of a union of JSON scalars.

    >>> either(frozenset({float, str}), "float | str").read(3, "Order.size")
    3.0
    """
    # A database may return a large float without a decimal point.
    numbers = float in kinds and int not in kinds

    def checked(complaint: Complaint) -> Convert:
        def check(value: Any, path: str) -> Any:
            if numbers and type(value) is int:
                return SCALARS[float].write(value, path)
            if type(value) not in kinds:
                raise complaint(path, value, shown)
            return plain(value, path)

        return check

    return Codec(checked(wrong_type), checked(unreadable))


def list_of(item: Codec) -> Codec:
    """Return the codec of a list.

    >>> list_of(SCALARS[int]).write([1, 2], "Order.lines")
    [1, 2]
    """
    return Codec(_items(item.write, list, wrong_type), _items(item.read, list, unreadable), item.inside)


def tuple_of(item: Codec) -> Codec:
    """Return the codec of a tuple of any length, which is stored as a list."""
    read = _items(item.read, list, unreadable)
    return Codec(_items(item.write, tuple, wrong_type), lambda stored, path: tuple(read(stored, path)), item.inside)


def tuple_with(items: Sequence[Codec]) -> Codec:
    """Return the codec of a tuple of fixed length, with a type per position.

    >>> tuple_with([SCALARS[int], SCALARS[str]]).read([1, "a"], "Order.pair")
    (1, 'a')
    """
    read = _places([item.read for item in items], list, unreadable)
    return Codec(
        _places([item.write for item in items], tuple, wrong_type),
        lambda stored, path: tuple(read(stored, path)),
        tuple(inner for item in items for inner in item.inside),
    )


def dict_of(item: Codec) -> Codec:
    """Return the codec of a dict with string keys."""
    key = SCALARS[str].write

    def write(value: Any, path: str) -> dict[str, Any]:
        pairs = _whole(value, dict, wrong_type, path).items()
        return {key(name, path): item.write(one, f"{path}[{name!r}]") for name, one in pairs}

    def read(stored: Any, path: str) -> dict[str, Any]:
        pairs = _whole(stored, dict, unreadable, path).items()
        return {name: item.read(one, f"{path}[{name!r}]") for name, one in pairs}

    return Codec(write, read, item.inside)


def _whole(value: Any, kind: type, complaint: Complaint, path: str) -> Any:
    # A subclass would decode as its base class, and a named tuple or a counter would lose information.
    if type(value) is not kind:
        raise complaint(path, value, kind.__name__)
    return value


def _items(convert: Convert, kind: type, complaint: Complaint) -> Convert:
    def converted(values: Any, path: str) -> list[Any]:
        whole = _whole(values, kind, complaint, path)
        return [convert(one, f"{path}[{index}]") for index, one in enumerate(whole)]

    return converted


def _places(converts: Sequence[Convert], kind: type, complaint: Complaint) -> Convert:
    def converted(values: Any, path: str) -> list[Any]:
        whole = _whole(values, kind, complaint, path)
        if len(whole) != len(converts):
            raise complaint(path, values, f"a tuple of {len(converts)}")
        pairs = zip(converts, whole, strict=True)
        return [convert(one, f"{path}[{index}]") for index, (convert, one) in enumerate(pairs)]

    return converted


def is_model(kind: Any) -> bool:
    """Tell whether a type encodes and decodes itself.

    >>> is_model(int)
    False
    """
    return all(callable(getattr(kind, name, None)) for name in ("model_dump_json", "model_validate_json"))


def model_codec(kind: Any) -> Codec:
    """Return the codec of a model."""
    return Codec(partial(_write, kind), partial(_read, kind), (kind,))


def check_model(kind: Any) -> list[Any]:
    """Reject a model that omits or masks fields. Return the nested models, which need the same check."""
    decorators = getattr(kind, "__pydantic_decorators__", None)
    custom = {name for one in getattr(decorators, "field_serializers", {}).values() for name in one.info.fields}
    inside: list[Any] = []
    for name, field in getattr(kind, "model_fields", {}).items():
        path, named = f"{kind.__name__}.{name}", list(_named(field.annotation))
        if field.exclude:
            raise InvalidState(path, "the model leaves it out when it writes itself", "take exclude=True away")
        if any(hasattr(one, "get_secret_value") for one in named) and not custom & {name, "*"}:
            remedy = "keep the secret elsewhere, and its name here; the state is JSON that others can read"
            raise InvalidState(path, "the model writes stars in its place", remedy)
        inside += [one for one in named if isinstance(one, type) and is_model(one)]
    return inside


def _named(hint: Any) -> list[Any]:
    """Return all types that an annotation names, at any depth."""
    return [hint, *(inner for arg in get_args(hint) for inner in _named(arg))]


def _write(kind: Any, value: Any, path: str) -> Any:
    if type(value) is not kind:
        raise wrong_type(path, value, kind.__name__)
    try:
        # With aliases and without computed fields: the model itself reads this form.
        return plain(json.loads(value.model_dump_json(by_alias=True, round_trip=True)), path)
    except ValueError as error:
        raise InvalidState(path, f"the model cannot be written as JSON ({error})", "change its fields") from error


def _read(kind: Any, stored: Any, path: str) -> Any:
    try:
        return kind.model_validate_json(json.dumps(stored))
    except ValueError as error:
        raise InvalidState(path, f"the model does not take what is stored ({error})", OTHER_VERSION) from error
