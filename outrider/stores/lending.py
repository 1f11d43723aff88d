"""What every store that lends its transactions to other people's code says about them, and about that code."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

ENDED = (
    "ended the transaction that it was lent, so that only a part of what belongs together may be committed; leave "
    "commit and rollback to outrider"
)
"""A handler, or a step's function, has committed or rolled back by itself."""

GENERATOR = "has a yield in it, so that a call of it runs nothing; take the yield out"


def objection(function: Callable[..., Any]) -> str | None:
    """Say why no store can run a function; None if one can.

    >>> def create(run, tx): yield
    >>> objection(create)
    'has a yield in it, so that a call of it runs nothing; take the yield out'
    """
    shapes = (function, inspect.unwrap(function), type(function).__call__)
    found = any(inspect.isgeneratorfunction(shape) or inspect.isasyncgenfunction(shape) for shape in shapes)
    return GENERATOR if found else None


def lazy(result: Any) -> bool:
    """Tell whether a function has returned something that would run only when asked for more.

    >>> lazy(number for number in range(3))
    True
    """
    return inspect.isgenerator(result) or inspect.isasyncgen(result)


_PROMISES = ("Awaitable", "Coroutine", "Future", "Task")


def promises_to_wait(handler: Callable[..., Any]) -> bool:
    """Tell whether a handler can be waited for, or only a call can tell, as with a lambda.

    >>> promises_to_wait(print)
    False
    """
    shapes = (handler, inspect.unwrap(handler), type(handler).__call__)
    return any(inspect.iscoroutinefunction(shape) for shape in shapes) or _says_so(handler)


def _says_so(handler: Callable[..., Any]) -> bool:
    """Tell whether a plain function is declared to return something to wait for. A lambda returns what it calls."""
    if getattr(handler, "__name__", "") == "<lambda>":
        return True
    try:
        returned = str(inspect.signature(handler).return_annotation)
    except (TypeError, ValueError):
        return False
    return any(promise in returned for promise in _PROMISES)
