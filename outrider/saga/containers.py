"""Codecs of what holds other values: lists, tuples, dicts, and `… | None`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from types import NoneType
from typing import Any

from outrider.saga.errors import BadState
from outrider.saga.values import SCALARS, Codec, Convert, plain, unfit, unreadable

Complaint = Callable[[str, Any, str], BadState]

JSON_SCALARS = frozenset({bool, int, float, str, NoneType})
"""JSON itself tells these apart."""


def optional(inner: Codec) -> Codec:
    """Return the codec of `X | None`."""

    def unless_none(convert: Convert) -> Convert:
        return lambda value, path: None if value is None else convert(value, path)

    return Codec(unless_none(inner.write), unless_none(inner.read), inner.inside)


def either(kinds: frozenset[type], shown: str) -> Codec:
    """Return the codec of a union of JSON's own scalars.

    >>> either(frozenset({float, str}), "float | str").read(3, "Order.size")
    3.0
    """
    # A database may hand a large float back without a point.
    numbers = float in kinds and int not in kinds

    def checked(complaint: Complaint) -> Convert:
        def check(value: Any, path: str) -> Any:
            if numbers and type(value) is int:
                return SCALARS[float].write(value, path)
            if type(value) not in kinds:
                raise complaint(path, value, shown)
            return plain(value, path)

        return check

    return Codec(checked(unfit), checked(unreadable))


def list_of(item: Codec) -> Codec:
    """Return the codec of a list.

    >>> list_of(SCALARS[int]).write([1, 2], "Order.lines")
    [1, 2]
    """
    return Codec(_items(item.write, list, unfit), _items(item.read, list, unreadable), item.inside)


def tuple_of(item: Codec) -> Codec:
    """Return the codec of a tuple of any length, which is stored as a list."""
    read = _items(item.read, list, unreadable)
    return Codec(_items(item.write, tuple, unfit), lambda stored, path: tuple(read(stored, path)), item.inside)


def tuple_with(items: Sequence[Codec]) -> Codec:
    """Return the codec of a tuple with a type for each place.

    >>> tuple_with([SCALARS[int], SCALARS[str]]).read([1, "a"], "Order.pair")
    (1, 'a')
    """
    read = _places([item.read for item in items], list, unreadable)
    return Codec(
        _places([item.write for item in items], tuple, unfit),
        lambda stored, path: tuple(read(stored, path)),
        tuple(inner for item in items for inner in item.inside),
    )


def dict_of(item: Codec) -> Codec:
    """Return the codec of a dict with texts as keys."""
    key = SCALARS[str].write

    def write(value: Any, path: str) -> dict[str, Any]:
        pairs = _whole(value, dict, unfit, path).items()
        return {key(name, path): item.write(one, f"{path}[{name!r}]") for name, one in pairs}

    def read(stored: Any, path: str) -> dict[str, Any]:
        pairs = _whole(stored, dict, unreadable, path).items()
        return {name: item.read(one, f"{path}[{name!r}]") for name, one in pairs}

    return Codec(write, read, item.inside)


def _whole(value: Any, kind: type, complaint: Complaint, path: str) -> Any:
    # A subclass would come back as its base, and a named tuple or a counter is more than that.
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
