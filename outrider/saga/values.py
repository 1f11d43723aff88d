"""Values of a state as JSON, and back: one codec for each type that can be annotated.

A codec is strict both ways. What would come back as something else is refused when it is written, with its path:
a saga that cannot read its own state could neither go on nor be undone.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from datetime import date, datetime
from decimal import Decimal
from enum import Enum
from typing import Any, NamedTuple
from uuid import UUID

from outrider.saga.errors import BadState

Convert = Callable[[Any, str], Any]
"""Takes a value and its path."""

OTHER_VERSION = "run the definition that it was written with, under its own version, until its sagas have ended"
SHOWN_CHARACTERS = 60


class Codec(NamedTuple):
    """How a type is written and read, and which classes with fields are inside it."""

    write: Convert
    read: Convert
    inside: tuple[type, ...] = ()


def shown(value: Any) -> str:
    """Show a value in an error, in short."""
    try:
        text = repr(value)
    except Exception as error:
        # A number of too many digits has no text, and a class of somebody's may fail at it.
        text = f"a {type(value).__name__} that cannot be shown ({error})"
    return text if len(text) <= SHOWN_CHARACTERS else f"{text[:SHOWN_CHARACTERS]}…"


def unfit(path: str, value: Any, wanted: str) -> BadState:
    """Make the error of a value that is not what its field says.

    >>> str(unfit("Order.amount", "12", "int"))
    "Order.amount: '12' is not int; change the value, or the type of the field"
    """
    return BadState(path, f"{shown(value)} is not {wanted}", "change the value, or the type of the field")


def unreadable(path: str, stored: Any, wanted: str) -> BadState:
    """Make the error of something stored that does not fit the field any more."""
    return BadState(path, f"the stored {shown(stored)} is not {wanted}", OTHER_VERSION)


def lost(path: str, value: Any, back: Any) -> BadState:
    """Make the error of a value that would not be the same any more when it is read back.

    >>> str(lost("Order.extra", (1, 2), [1, 2]))
    'Order.extra: (1, 2) would come back as [1, 2]; change the value, its type, or the code that makes it another'
    """
    problem = f"{shown(value)} would come back as {shown(back)}"
    return BadState(path, problem, "change the value, its type, or the code that makes it another")


def _text(value: Any, path: str) -> str:
    if not isinstance(value, str):
        raise unfit(path, value, "str")
    if "\0" in value or any("\ud800" <= character <= "\udfff" for character in value):
        raise BadState(path, "it contains a NUL character or a lone surrogate", "remove it")
    return value


def _integer(value: Any, path: str) -> int:
    if not isinstance(value, int):
        raise unfit(path, value, "int")
    return int(value)


def _number(value: Any, path: str) -> float:
    if not isinstance(value, float | int):
        raise unfit(path, value, "float")
    try:
        number = float(value)
    except OverflowError:
        raise unfit(path, value, "float") from None
    if isinstance(value, int) and number != value:
        raise BadState(path, f"{shown(value)} has more digits than a float keeps", "declare the field as int")
    if not math.isfinite(number):
        raise BadState(path, f"{number} is not JSON", "store None or a number")
    return number


def _moment(value: Any, path: str) -> str:
    if not isinstance(value, datetime):
        raise unfit(path, value, "datetime")
    if value.utcoffset() is None:
        raise BadState(path, "it is a naive datetime", "give it a time zone, such as datetime.now(UTC)")
    return value.isoformat()


def _decimal(value: Any, path: str) -> str:
    if not isinstance(value, Decimal):
        raise unfit(path, value, "Decimal")
    if not value.is_finite():
        raise BadState(path, f"{value} is not a number", "store None or a number")
    return str(value)


def plain(value: Any, path: str) -> Any:
    """Return a value that is JSON as it stands, or refuse it; JSON has no tuple, so a tuple would not come back.

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
    raise BadState(path, f"{shown(value)} is not plain JSON", "convert it, or give the field a type of its own")


def exactly(kind: type, *, without: tuple[type, ...] = ()) -> Convert:
    """Return a check that a value is of a type, and is stored as it stands."""

    def check(value: Any, path: str) -> Any:
        if not isinstance(value, kind) or isinstance(value, without):
            raise unfit(path, value, kind.__name__)
        return value

    return check


def _reading(kind: type, stored_as: type | tuple[type, ...], make: Callable[[Any], Any]) -> Convert:
    # True is an int to Python, and a different thing in JSON.
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
    """Return the codec of an enumeration: its members are stored by value."""
    if not all(type(member.value) in (str, int) for member in kind):
        raise BadState(path, f"{kind.__name__} has values that are neither text nor whole numbers", "give it such ones")
    check = exactly(kind)
    return Codec(lambda value, at: check(value, at).value, _reading(kind, (str, int), kind))


def literal_codec(values: tuple[Any, ...], path: str) -> Codec:
    """Return the codec of a Literal: one of these, and nothing else."""
    if not all(type(value) in (str, int, bool, type(None)) for value in values):
        raise BadState(path, f"Literal{list(values)} has values that are not plain JSON", "use text and whole numbers")
    known = [(type(value), value) for value in values]
    wanted = f"one of {', '.join(map(repr, values))}"

    def check(error: Callable[[str, Any, str], BadState]) -> Convert:
        def checked(value: Any, at: str) -> Any:
            if (type(value), value) not in known:
                raise error(at, value, wanted)
            return value

        return checked

    return Codec(check(unfit), check(unreadable))
