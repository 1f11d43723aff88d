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
