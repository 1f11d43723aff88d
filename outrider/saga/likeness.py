"""Whether what is read back is what was written: in every field, also in those that no comparison looks at."""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Iterable, Iterator, Mapping
from datetime import datetime
from itertools import zip_longest
from types import FunctionType
from typing import Any

from outrider.saga.models import is_model

Difference = tuple[str, Any, Any]
"""A path, what was written there, and what was read back."""


class Absent:
    """Stands where one of two has nothing."""

    def __repr__(self) -> str:
        return "nothing"


ABSENT = Absent()
PLAIN = (str, int, float, type(None))


def difference(written: Any, read: Any, path: str) -> Difference | None:
    """Return where two values differ; None if they do not.

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
    # What has no comparison of its own is never equal to what was read back; its JSON text must do.
    incomparable = vars(object)["__eq__"] is inspect.getattr_static(type(written), "__eq__")
    return None if incomparable or written == read else (path, written, read)


def derived(kind: type, name: str) -> bool:
    """Tell whether a class makes an attribute by itself when it is asked for, as a cached property does.

    >>> derived(int, "real"), derived(int, "price")
    (True, False)
    """
    found = inspect.getattr_static(kind, name, None)
    return hasattr(found, "__get__") and not isinstance(found, FunctionType | staticmethod | classmethod)


def _same_moment(one: datetime, other: datetime) -> bool:
    # Comparing across zones says no to every moment of an hour that comes twice.
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
    """Return a model's fields, and what pydantic keeps beside them: private attributes, and what was never declared."""
    kept = (getattr(model, name, None) or {} for name in ("__dict__", "__pydantic_private__", "__pydantic_extra__"))
    return {name: value for members in kept for name, value in members.items()}


def _items(one: Iterable[Any], other: Iterable[Any]) -> Iterator[tuple[str, Any, Any]]:
    for index, (written, read) in enumerate(zip_longest(one, other, fillvalue=ABSENT)):
        yield f"[{index}]", written, read
