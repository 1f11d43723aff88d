"""What is wrong with a definition, told when it is imported: every error names the line to fix, and how.

Steps refer to each other by name, also to later ones. So while a saga is being written only that is checked which no
later step can put right.
"""

from __future__ import annotations

import inspect
import math
import sys
from collections.abc import Mapping
from graphlib import CycleError, TopologicalSorter
from itertools import combinations
from typing import Any

from outrider.errors import Misuse
from outrider.saga.steps import Function, Kind, Step

NAME_CHARACTERS_MAX = 200
SECONDS_MAX = 3650 * 86_400
VERSION_MAX = 2**31 - 1

Steps = Mapping[str, Step]


def where() -> str:
    """Name the line that calls into this package.

    >>> where().count(":") > 0
    True
    """
    frame = sys._getframe(1)
    # A `with` enters through contextlib.
    while frame.f_back and frame.f_globals.get("__name__", "").startswith(("outrider.saga.", "contextlib")):
        frame = frame.f_back
    return f"{frame.f_code.co_filename}:{frame.f_lineno}"


def check_steps(steps: Steps, *, complete: bool) -> None:
    """Refuse steps that cannot work together. If they are not complete, what a later step may cure is let pass."""
    unknown = [(step, name) for step in steps.values() for name in step.after if name not in steps]
    if unknown and not complete:
        return
    for step, name in unknown:
        names = ", ".join(steps)
        raise Misuse(f"{step.line}: {step.name} comes after {name!r}, which is no step; there are: {names}")
    before = _before(steps)
    _check_pivot(steps, before)
    _check_waits(steps, before)


def _before(steps: Steps) -> dict[str, frozenset[str]]:
    """Return, for each step, all that are done before it begins."""
    try:
        order = list(TopologicalSorter({step.name: step.after for step in steps.values()}).static_order())
    except CycleError as error:
        raise _circle(steps, error.args[1][1:]) from None
    before: dict[str, frozenset[str]] = {}
    for name in order:
        direct = steps[name].after
        before[name] = frozenset(direct).union(*(before[earlier] for earlier in direct))
    return before


def _circle(steps: Steps, names: list[str]) -> Misuse:
    """Make the error of steps that wait for each other; it begins with the one that closed the circle."""
    written = list(steps)
    backward = names[::-1]
    last = backward.index(max(backward, key=written.index))
    circle = [*backward[last:], *backward[:last], backward[last]]
    lines = ", ".join(f"{name} at {steps[name].line}" for name in circle[1:])
    return Misuse(
        f"{steps[circle[0]].line}: {' waits for '.join(circle)}, so none of them can begin; take one of these names "
        f"out of an after=[…] ({lines})"
    )


def _check_pivot(steps: Steps, before: Mapping[str, frozenset[str]]) -> None:
    pivots = [step for step in steps.values() if step.pivot]
    if not pivots:
        return
    pivot, *more = pivots
    if more:
        raise Misuse(
            f"{more[0].line}: {more[0].name} is a second pivot, after {pivot.name} ({pivot.line}); there is one "
            "point of no return: take pivot=True from one of them"
        )
    for step in steps.values():
        _check_beside_pivot(step, pivot, before)


def _check_beside_pivot(step: Step, pivot: Step, before: Mapping[str, frozenset[str]]) -> None:
    after = pivot.name in before[step.name]
    if step is not pivot and not after and step.name not in before[pivot.name]:
        raise Misuse(
            f"{step.line}: {step.name} is neither before nor after the pivot {pivot.name} ({pivot.line}), so nobody "
            f"could say whether it may be undone; put it before or after {pivot.name} with after=[…]"
        )
    if step.undo and step is pivot:
        raise Misuse(
            f"{step.line}: {step.name} is the pivot and has an undo, which would never run; take one of them away"
        )
    if step.undo and after:
        raise Misuse(
            f"{step.line}: {step.name} has an undo and comes after the pivot {pivot.name} ({pivot.line}), where "
            f"nothing is undone; take the undo away, or put {step.name} before {pivot.name}"
        )


def _check_waits(steps: Steps, before: Mapping[str, frozenset[str]]) -> None:
    for one, other in combinations([step for step in steps.values() if step.kind is Kind.WAIT], 2):
        together = one.name not in before[other.name] and other.name not in before[one.name]
        if together and (shared := one.replies.keys() & other.replies.keys()):
            raise Misuse(
                f"{other.line}: {other.name} and {one.name} ({one.line}) may both be waiting for {min(shared)}, and "
                "nobody could say whose it is; put one after the other, or wait once"
            )


def check_name(name: Any, what: str, line: str) -> str:
    """Refuse a name that could not be stored, or read by people.

    >>> check_name("stock.reserve", "a step", "order.py:7")
    'stock.reserve'
    """
    fine = isinstance(name, str) and name.strip() == name and name.isprintable()
    if not fine or not 1 <= len(name) <= NAME_CHARACTERS_MAX:
        raise Misuse(
            f"{line}: {name!r:.80} cannot name {what}; use 1 to {NAME_CHARACTERS_MAX} printable characters without "
            "spaces around them"
        )
    return str(name)


def check_version(version: Any, line: str) -> int:
    """Refuse what is no version.

    >>> check_version(2, "order.py:7")
    2
    """
    if type(version) is not int or not 1 <= version <= VERSION_MAX:
        raise Misuse(f"{line}: version={version!r} cannot work; count versions from 1, in whole numbers")
    return version


def check_seconds(seconds: Any, name: str, line: str) -> float:
    """Refuse a time that is none.

    >>> check_seconds(30, "timeout_seconds", "order.py:7")
    30.0
    """
    number = isinstance(seconds, int | float) and not isinstance(seconds, bool)
    if not number or not math.isfinite(seconds) or not 0 < seconds <= SECONDS_MAX:
        raise Misuse(f"{line}: {name}={seconds!r} cannot work; use a number above 0, at most {SECONDS_MAX} (ten years)")
    return float(seconds)


def check_function(function: Function, arguments: str, line: str, *, waits: bool | None = None) -> None:
    """Refuse a function that cannot take these arguments; `waits` says that it must be `async def`, or must not be."""
    name = getattr(function, "__qualname__", repr(function))
    if not callable(function):
        raise Misuse(f"{line}: {name} is not a function; give one that takes ({arguments})")
    try:
        inspect.signature(function).bind(*arguments.split(", "))
    except TypeError as error:
        raise Misuse(f"{line}: {name} cannot be called with ({arguments}): {error}; let it take these") from None
    asynchronous = inspect.iscoroutinefunction(inspect.unwrap(function))
    if waits is False and asynchronous:
        raise Misuse(f"{line}: {name} is async, and may only compute; write def, and put what takes time into a step")
    if waits and inspect.isfunction(function) and not asynchronous:
        raise Misuse(
            f"{line}: {name} would stop all other sagas while it runs; write async def, and call what blocks with "
            "await asyncio.to_thread(…)"
        )


def distinct(names: Mapping[str, str | None], line: str) -> None:
    """Refuse types of replies that are the same: they could not be told apart, as they carry one key.

    >>> distinct({"reply": "stock.reserved", "refusal": None}, "order.py:7")
    """
    for (one, first), (other, second) in combinations(names.items(), 2):
        if first is not None and first == second:
            raise Misuse(f"{line}: {one} and {other} are both {first!r}; use a type of event for each")
