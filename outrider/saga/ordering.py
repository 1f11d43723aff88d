"""Steps put in order while a saga is written, and what is wrong with that order: every error names the line to fix.

Steps refer to each other by name, also to later ones. So while a saga is being written only that is checked which no
later step can put right. A step that is added at the end is checked by itself: long sagas take no longer than short
ones, step by step.
"""

from __future__ import annotations

from collections.abc import Mapping
from graphlib import CycleError, TopologicalSorter

from outrider.errors import Misuse
from outrider.saga.steps import Kind, Step

Steps = Mapping[str, Step]


class Ordered:
    """The steps of a saga, in the order they were written.

    >>> from outrider.saga.steps import Act
    >>> ordered = Ordered()
    >>> ordered.keep(Step("create", Kind.LOCAL, Act(print)))
    >>> list(ordered.steps)
    ['create']
    """

    def __init__(self) -> None:
        self.steps: dict[str, Step] = {}
        self._order: Order | None = Order()
        """None while a step names one that is not there yet."""

    def keep(self, step: Step) -> None:
        """Add a step, or put it in the place of the one of its name; if it is refused, all stays as it was."""
        if self._order is None or not self._alone(step):
            steps = {**self.steps, step.name: step}
            self._order = None if _unknown(steps) else ordered(steps)
        else:
            self._order.add(step)
        self.steps[step.name] = step

    def check(self) -> None:
        """Refuse steps that cannot work together, now that all are there."""
        for step, name in _unknown(self.steps):
            names = ", ".join(self.steps)
            raise Misuse(f"{step.line}: {step.name} comes after {name!r}, which is no step; there are: {names}")

    def _alone(self, step: Step) -> bool:
        """Tell whether a step changes the order of no other: nobody has named it yet, and it names only those there."""
        known = self.steps.get(step.name)
        return known.after == step.after if known else all(name in self.steps for name in step.after)


class Order:
    """What comes before what, of steps of which each comes after those it names."""

    def __init__(self) -> None:
        self._steps: dict[str, Step] = {}
        self._bits: dict[str, int] = {}
        self._before: dict[str, int] = {}
        """All that is done before a step begins. A set of steps is a number here, with a bit for each of them."""
        self._pivot: Step | None = None
        self._waits: dict[str, list[Step]] = {}
        """By the type of the event."""

    def add(self, step: Step) -> None:
        """Add a step, or put it in the place of the one of its name; if it is refused, all stays as it was."""
        new = step.name not in self._bits
        bit = 1 << len(self._bits) if new else self._bits[step.name]
        before = 0
        for name in step.after:
            before |= self._before[name] | self._bits[name]
        self._check_pivot(step, before, bit)
        if new and step.kind is Kind.WAIT:
            self._check_wait(step, before)
            for event_type in step.replies:
                self._waits.setdefault(event_type, []).append(step)
        self._steps[step.name], self._bits[step.name], self._before[step.name] = step, bit, before
        self._pivot = step if step.pivot else self._pivot

    def _check_pivot(self, step: Step, before: int, bit: int) -> None:
        pivot = self._pivot
        if step.pivot and (pivot is None or pivot.name == step.name):
            for other in self._steps.values():
                if other.name != step.name:
                    # What is there already cannot come after a step that is new.
                    after = bool(self._before[other.name] & bit)
                    _check_beside(other, step, after=after, before=bool(before & self._bits[other.name]))
            _check_beside(step, step, after=False, before=True)
        elif step.pivot and pivot:
            raise Misuse(
                f"{step.line}: {step.name} is a second pivot, after {pivot.name} ({pivot.line}); there is one "
                "point of no return: take pivot=True from one of them"
            )
        elif pivot:
            after = bool(before & self._bits[pivot.name])
            _check_beside(step, pivot, after=after, before=bool(self._before[pivot.name] & bit))

    def _check_wait(self, step: Step, before: int) -> None:
        for event_type in step.replies:
            for other in self._waits.get(event_type, ()):
                if not before & self._bits[other.name]:
                    raise Misuse(
                        f"{step.line}: {step.name} and {other.name} ({other.line}) may both be waiting for "
                        f"{event_type}, and nobody could say whose it is; put one after the other, or wait once"
                    )


def ordered(steps: Steps) -> Order:
    """Return the order of steps that are all there; refuse steps that cannot work together.

    >>> ordered({})._before
    {}
    """
    order = Order()
    try:
        names = list(TopologicalSorter({step.name: step.after for step in steps.values()}).static_order())
    except CycleError as error:
        raise _circle(steps, error.args[1][1:]) from None
    for name in names:
        order.add(steps[name])
    return order


def _unknown(steps: Steps) -> list[tuple[Step, str]]:
    return [(step, name) for step in steps.values() for name in step.after if name not in steps]


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


def _check_beside(step: Step, pivot: Step, *, after: bool, before: bool) -> None:
    if not after and not before:
        raise Misuse(
            f"{step.line}: {step.name} is neither before nor after the pivot {pivot.name} ({pivot.line}), so nobody "
            f"could say whether it may be undone; put it before or after {pivot.name} with after=[…]"
        )
    if step.undo and step.name == pivot.name:
        raise Misuse(
            f"{step.line}: {step.name} is the pivot and has an undo, which would never run; take one of them away"
        )
    if step.undo and after:
        raise Misuse(
            f"{step.line}: {step.name} has an undo and comes after the pivot {pivot.name} ({pivot.line}), where "
            f"nothing is undone; take the undo away, or put {step.name} before {pivot.name}"
        )
