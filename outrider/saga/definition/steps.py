"""The data of a defined step. The planner reads the data and the worker executes the step."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from enum import StrEnum
from graphlib import CycleError, TopologicalSorter
from typing import Any

from outrider.errors import UsageError
from outrider.event import default_topic
from outrider.retry import RetryPolicy
from outrider.saga.definition.children import (
    CHILD_COMPENSATED,
    CHILD_DONE,
    CHILD_REJECTED,
    PARENT_COMPENSATES,
    PARENT_COMPLETED,
    PARENT_STEP,
    ChildSpec,
)
from outrider.saga.definition.validation import (
    Function,
    check_distinct,
    check_event_type,
    check_reply,
    check_seconds,
    check_topic,
)
from outrider.saga.model import JournalEntry


class StepKind(StrEnum):
    """The way a step is executed.

    `local`: in the transaction that saves the saga. `call`: outside any transaction, with an idempotency key.
    `request`: a command to a participant, answered by an event. `wait`: for an event only. `sleep`: for a time to pass.
    `child`: another saga, which is awaited and compensated with this saga. `parent`: the last wait of a child, for the
    end of its parent. `for_each`: a step that is run for each item of a list, as the planner sees it; its items are
    steps of their own.
    """

    LOCAL = "local"
    CALL = "call"
    REQUEST = "request"
    WAIT = "wait"
    SLEEP = "sleep"
    CHILD = "child"
    PARENT = "parent"
    FOR_EACH = "for_each"


FAMILY = frozenset({StepKind.CHILD, StepKind.PARENT})
"""Kinds that another saga of the same store answers, by a message instead of an event."""

PARALLEL_MAX = 10

ITEMS_MAX = 1000
"""The largest number of items of one step. Each item is a line of the journal, which each turn reads."""

EXPANSIONS_MAX = 16
"""The number of expanded definitions that are kept."""

ITEM = re.compile(r"(.+)\[\d+\]", re.DOTALL)


@dataclass(frozen=True, slots=True)
class CommandSpec:
    """The command of a request, and the events that answer the command.

    A wait and a child send no command: type and topic are empty.
    """

    event_type: str
    topic: str
    reply: str | None
    rejection: str | None = None
    reply_topic: str | None = None
    payload: Function | None = None
    """Builds the payload from the state. Without a function, the payload is an empty object."""


CALL_RETRY = RetryPolicy(cap_seconds=300, max_attempts=50)
"""The default of calls: about three and a half hours, so that a shorter outage of a service compensates no saga."""

UNAVAILABLE_FOR_SECONDS = 86_400.0
"""The default time for which a step waits for a service that is unavailable."""


@dataclass(frozen=True, slots=True)
class StepAction:
    """One phase of a step: a function or a command, with its own retry policy.

    A sleep has neither; its duration is `timeout_seconds`. A wait without `timeout_seconds` has no deadline.
    """

    function: Function | None = None
    command: CommandSpec | None = None
    retry: RetryPolicy = field(default_factory=RetryPolicy)
    timeout_seconds: float | None = None
    unavailable_for_seconds: float = UNAVAILABLE_FOR_SECONDS


@dataclass(frozen=True, slots=True)
class Step:
    """A step of a definition. `line` is the source location, for errors."""

    name: str
    kind: StepKind
    action: StepAction
    compensation: StepAction | None = None
    after: tuple[str, ...] = ()
    pivot: bool = False
    reply_functions: Mapping[str, Function] = field(default_factory=dict)
    """The functions that apply replies to the state, by event type."""
    correlate: Function | None = None
    when: Function | None = None
    """Tells from the state whether the step runs. Without a function, the step always runs."""
    block: int | None = None
    """The number of the parallel block whose steps share the condition and its result."""
    for_each: Function | None = None
    """Computes from the state the list of items for which the step is run."""
    parallel_max: int = PARALLEL_MAX
    into: str | None = None
    """The field of the state that gets the results of all items, in order."""
    item: str | None = None
    """The item of a step that was derived from a list, as JSON text."""
    child: ChildSpec | None = None
    line: str = ""

    @property
    def replies(self) -> dict[str, str]:
        """Return the types of the events that answer this step, with their topics. A child answers without events.

        >>> Step("collected", StepKind.WAIT, StepAction(command=CommandSpec("", "", "parcel.collected"))).replies
        {'parcel.collected': 'events.parcel.collected'}
        """
        if self.kind in FAMILY:
            return {}
        commands = [action.command for action in (self.action, self.compensation) if action and action.command]
        return {
            event_type: default_topic(event_type, command.reply_topic, None)
            for command in commands
            for event_type in (command.reply, command.rejection)
            if event_type
        }


@dataclass(frozen=True, slots=True)
class Definition:
    """A saga as the planner sees it: the steps by name, in definition order."""

    saga_type: str
    version: int
    steps: Mapping[str, Step]
    set_fields: Callable[[bytes, Mapping[str, Any]], bytes] | None = None
    """Sets fields of a stored state. Raises InvalidState if the values do not fit."""
    compute: Callable[..., Any] | None = None
    """Calls a function with a stored state, and with the value of an item, if there is one.

    Raises InvalidHandler or InvalidState with the reason of a failure.
    """
    fingerprint: str = ""
    """A short form of the definition, used to detect a changed definition."""
    deadline_seconds: float | None = None
    """The deadline of sagas that start now. A running saga keeps the deadline of its start."""
    _expansions: dict[tuple[bool, tuple[tuple[str, str], ...]], Definition] = field(
        default_factory=dict, init=False, compare=False, repr=False
    )

    def find(self, name: str) -> Step | None:
        """Return a step by name, also for the name of an item, such as `reserve[3]`."""
        found = self.steps.get(base_name(name))
        return self.steps.get(name) or (found if found and found.for_each else None)

    def expanded(self, journal: Iterable[JournalEntry], *, is_child: bool = False) -> Definition:
        """Return the definition with a step for each item of the lists that the journal has frozen.

        A child also gets its last wait.
        """
        if not is_child and not any(step.for_each for step in self.steps.values()):
            return self
        lists = {name for name, step in self.steps.items() if step.for_each}
        frozen = {entry.step: entry.data for entry in journal if entry.data and entry.step in lists}
        known = is_child, tuple(sorted(frozen.items()))
        if known not in self._expansions:
            # A worker runs some sagas at a time, and each of them needs its lists in turn after turn.
            if len(self._expansions) >= EXPANSIONS_MAX:
                self._expansions.clear()
            self._expansions[known] = self._expanded(frozen, is_child=is_child)
        return self._expansions[known]

    def _expanded(self, frozen: Mapping[str, str], *, is_child: bool) -> Definition:
        steps: dict[str, Step] = {}
        for name, step in self.steps.items():
            if step.for_each is None:
                steps[name] = step
                continue
            steps[name] = replace(step, kind=StepKind.FOR_EACH, action=StepAction(), compensation=None)
            one = replace(step, for_each=None, when=None, block=None)
            for index, item in enumerate(json.loads(frozen.get(name, "[]"))):
                steps[f"{name}[{index}]"] = replace(one, name=f"{name}[{index}]", item=json.dumps(item))
        if is_child:
            action = StepAction(command=CommandSpec("", "", PARENT_COMPLETED, PARENT_COMPENSATES))
            steps[PARENT_STEP] = Step(PARENT_STEP, StepKind.PARENT, action, after=tuple(self.steps))
        return replace(self, steps=steps)

    @property
    def pivot(self) -> Step | None:
        """Return the step after which the saga no longer compensates."""
        return next((step for step in self.steps.values() if step.pivot), None)


def base_name(name: str) -> str:
    """Return the name of the step to which an item belongs. Other names are returned unchanged.

    >>> base_name("reserve[3]"), base_name("reserve")
    ('reserve', 'reserve')
    """
    found = ITEM.fullmatch(name)
    return found[1] if found else name


def budget(retry: RetryPolicy | None, line: str, default: RetryPolicy | None = None) -> RetryPolicy:
    """Return the given retry policy, or the default policy.

    >>> budget(None, "order.py:7").max_attempts
    10
    """
    if retry is not None and not isinstance(retry, RetryPolicy):
        raise UsageError(f"{line}: retry={retry!r} is no policy; use RetryPolicy(max_attempts=5)")
    return retry or default or RetryPolicy()


def function_action(
    function: Function,
    retry: RetryPolicy | None,
    line: str,
    seconds: float | None = None,
    *,
    unavailable_for_seconds: float | None = None,
    default: RetryPolicy | None = None,
) -> StepAction:
    """Return the step action of a function.

    >>> function_action(print, None, "order.py:7").timeout_seconds is None
    True
    """
    limit = None if seconds is None else check_seconds(seconds, "timeout_seconds", line)
    patience = UNAVAILABLE_FOR_SECONDS
    if unavailable_for_seconds is not None:
        patience = check_seconds(unavailable_for_seconds, "unavailable_for_seconds", line)
    return StepAction(function, None, budget(retry, line, default), limit, patience)


def wait_action(event_type: str, topic: str | None, seconds: float | None, line: str) -> StepAction:
    """Return the step action of a wait for an event.

    >>> wait_action("parcel.collected", None, 60, "order.py:7").timeout_seconds
    60.0
    """
    check_reply(event_type, topic, line)
    limit = None if seconds is None else check_seconds(seconds, "timeout_seconds", line)
    return StepAction(command=CommandSpec("", "", event_type, reply_topic=topic), timeout_seconds=limit)


def child_actions() -> tuple[StepAction, StepAction]:
    """Return the action and the compensation of a child: messages to it, and its answers.

    >>> child_actions()[1].command.reply
    'child.compensated'
    """
    action = CommandSpec("", "", CHILD_DONE, CHILD_REJECTED)
    return StepAction(command=action), StepAction(command=CommandSpec("", "", CHILD_COMPENSATED))


def request_action(command: CommandSpec, retry: RetryPolicy | None, seconds: float, line: str) -> StepAction:
    """Return the step action of a request."""
    check_event_type(command.event_type, line)
    check_topic(command.topic, line)
    check_reply(command.reply, command.reply_topic, line)
    if command.rejection is not None:
        check_reply(command.rejection, command.reply_topic, line)
    check_distinct({"reply": command.reply, "rejection": command.rejection}, line)
    limit = check_seconds(seconds, "timeout_seconds", line)
    return StepAction(command=command, retry=budget(retry, line), timeout_seconds=limit)


def compensation_action(
    action: StepAction, compensate: str | None, compensated: str | None, retry: RetryPolicy | None, line: str
) -> StepAction | None:
    """Return the compensation of a request, on the same topic, so the compensation cannot overtake the action."""
    command = action.command
    assert command
    if compensate is None and compensated is None:
        if retry is not None:
            raise UsageError(
                f"{line}: {command.event_type} has compensation_retry= without compensate=; name that command"
            )
        return None
    if compensate is None or compensated is None:
        first, second = ("compensate", "compensated") if compensate else ("compensated", "compensate")
        raise UsageError(
            f"{line}: {command.event_type} has {first}= without {second}=; name both the compensating command "
            "(compensate) and the reply to it (compensated)"
        )
    check_event_type(compensate, line)
    check_reply(compensated, command.reply_topic, line)
    check_distinct({"the command": command.event_type, "compensate": compensate}, line)
    check_distinct({"compensated": compensated, "reply": command.reply, "rejection": command.rejection}, line)
    compensation = replace(command, event_type=compensate, reply=compensated, rejection=None)
    return StepAction(command=compensation, retry=budget(retry, line), timeout_seconds=action.timeout_seconds)


def complete(step: Step) -> Step:
    """Return a step as the worker runs it: a compensating command without a payload gets the payload of the action.

    >>> from outrider.saga.definition.steps import StepKind
    >>> spec = CommandSpec("reserve", "stock", "reserved", payload=dict)
    >>> compensate = CommandSpec("release", "stock", "released")
    >>> found = complete(Step("reserve", StepKind.REQUEST, StepAction(command=spec), StepAction(command=compensate)))
    >>> found.compensation.command.payload is dict
    True
    """
    command, compensation = step.action.command, step.compensation and step.compensation.command
    if step.compensation is None or not command or not compensation or compensation.payload is not None:
        return step
    return replace(
        step, compensation=replace(step.compensation, command=replace(compensation, payload=command.payload))
    )


Steps = Mapping[str, Step]


class StepGraph:
    """The steps of a saga, in definition order.

    >>> from outrider.saga.definition.steps import StepAction
    >>> build_order = StepGraph()
    >>> build_order.put(Step("create", StepKind.LOCAL, StepAction(print)))
    >>> list(build_order.steps)
    ['create']
    """

    def __init__(self) -> None:
        self.steps: dict[str, Step] = {}
        self._order: StepOrder | None = StepOrder()
        """None while a step refers to a step that is not yet defined."""

    def put(self, step: Step) -> None:
        """Add a step, or replace the step of the same name. After a rejection, the graph is unchanged."""
        if self._order is None or not self._keeps_order(step):
            steps = {**self.steps, step.name: step}
            self._order = None if _unknown(steps) else build_order(steps)
        else:
            self._order.add(step)
        self.steps[step.name] = step

    def check(self) -> None:
        """Reject a graph in which a step refers to an unknown step."""
        for step, name in _unknown(self.steps):
            names = ", ".join(self.steps)
            raise UsageError(f"{step.line}: {step.name} comes after {name!r}, which is no step; there are: {names}")

    def has_way_back(self, step: Step) -> bool:
        """Tell whether a step is neither the pivot nor after the pivot, so that it may have to be compensated."""
        pivot = next((other for other in self.steps.values() if other.pivot), None)
        is_after = pivot is not None and self._order is not None and self._order.comes_after(step, pivot)
        return not step.pivot and not is_after

    def check_deadline(self, seconds: float) -> None:
        """Reject a sleep before the end or the pivot that lasts as long as the whole saga may."""
        pivot = next((step for step in self.steps.values() if step.pivot), None)
        for step in self.steps.values():
            is_late = pivot is not None and self._order is not None and self._order.comes_after(step, pivot)
            duration = step.action.timeout_seconds
            if step.kind is StepKind.SLEEP and step.when is None and duration and duration >= seconds and not is_late:
                raise UsageError(
                    f"{step.line}: {step.name} sleeps for {duration:g} s with deadline_seconds={seconds:g}, "
                    "so it would always compensate; sleep for less, or give the saga a later deadline"
                )

    def _keeps_order(self, step: Step) -> bool:
        """Tell whether a step leaves the order of the other steps unchanged: the step refers to known steps only."""
        known = self.steps.get(step.name)
        return known.after == step.after if known else all(name in self.steps for name in step.after)


class StepOrder:
    """The order of steps. A step is added after all steps to which `after` refers."""

    def __init__(self) -> None:
        self._steps: dict[str, Step] = {}
        self._bits: dict[str, int] = {}
        self._before: dict[str, int] = {}
        """All steps that are done before a step starts.

        A set of steps is stored as an integer with one bit per step.
        """
        self._pivot: Step | None = None
        self._waits: dict[str, list[Step]] = {}
        """The wait steps by event type."""

    def add(self, step: Step) -> None:
        """Add a step, or replace the step of the same name. After a rejection, the order is unchanged."""
        new = step.name not in self._bits
        bit = 1 << len(self._bits) if new else self._bits[step.name]
        before = 0
        for name in step.after:
            before |= self._before[name] | self._bits[name]
        self._check_pivot(step, before, bit)
        if new and step.kind is StepKind.WAIT:
            self._check_wait(step, before)
            for event_type in step.replies:
                self._waits.setdefault(event_type, []).append(step)
        self._steps[step.name], self._bits[step.name], self._before[step.name] = step, bit, before
        self._pivot = step if step.pivot else self._pivot

    def comes_after(self, step: Step, other: Step) -> bool:
        """Tell whether a step starts only after another step."""
        return bool(self._before[step.name] & self._bits[other.name])

    def _check_pivot(self, step: Step, before: int, bit: int) -> None:
        pivot = self._pivot
        if step.pivot and (pivot is None or pivot.name == step.name):
            for other in self._steps.values():
                if other.name != step.name:
                    # A step that is already known cannot come after a new step.
                    after = bool(self._before[other.name] & bit)
                    _check_pivot_side(other, step, after=after, before=bool(before & self._bits[other.name]))
            _check_pivot_side(step, step, after=False, before=True)
        elif step.pivot and pivot:
            raise UsageError(
                f"{step.line}: {step.name} is a second pivot, after {pivot.name} ({pivot.line}); there is one "
                "point of no return: take pivot=True from one of them"
            )
        elif pivot:
            after = bool(before & self._bits[pivot.name])
            _check_pivot_side(step, pivot, after=after, before=bool(self._before[pivot.name] & bit))

    def _check_wait(self, step: Step, before: int) -> None:
        for event_type in step.replies:
            for other in self._waits.get(event_type, ()):
                if not before & self._bits[other.name]:
                    raise UsageError(
                        f"{step.line}: {step.name} and {other.name} ({other.line}) may both be waiting for "
                        f"{event_type}, so the event could belong to either; put one after the other, or wait once"
                    )


def build_order(steps: Steps) -> StepOrder:
    """Return the order of a complete set of steps. Raises UsageError for steps that cannot work together.

    >>> build_order({})._before
    {}
    """
    order = StepOrder()
    try:
        names = list(TopologicalSorter({step.name: step.after for step in steps.values()}).static_order())
    except CycleError as error:
        raise _cycle_error(steps, error.args[1][1:]) from None
    for name in names:
        order.add(steps[name])
    return order


def _unknown(steps: Steps) -> list[tuple[Step, str]]:
    return [(step, name) for step in steps.values() for name in step.after if name not in steps]


def _cycle_error(steps: Steps, names: list[str]) -> UsageError:
    """Return the error for a cycle of steps. The text starts with the step that closed the cycle."""
    order = list(steps)
    backward = names[::-1]
    last = backward.index(max(backward, key=order.index))
    circle = [*backward[last:], *backward[:last], backward[last]]
    lines = ", ".join(f"{name} at {steps[name].line}" for name in circle[1:])
    return UsageError(
        f"{steps[circle[0]].line}: {' waits for '.join(circle)}, so none of them can begin; take one of these names "
        f"out of an after=[…] ({lines})"
    )


def _check_pivot_side(step: Step, pivot: Step, *, after: bool, before: bool) -> None:
    if not after and not before:
        raise UsageError(
            f"{step.line}: {step.name} is neither before nor after the pivot {pivot.name} ({pivot.line}), so it "
            f"is unclear whether it may be compensated; put it before or after {pivot.name} with after=[…]"
        )
    if step.kind is StepKind.CHILD:
        # Each child has a compensation of its own, which is left out from the pivot on.
        return
    if step.compensation and step.name == pivot.name:
        raise UsageError(
            f"{step.line}: {step.name} is the pivot and has a compensation, which would never run; remove one of them"
        )
    if step.compensation and after:
        raise UsageError(
            f"{step.line}: {step.name} has a compensation and comes after the pivot {pivot.name} ({pivot.line}), where "
            f"nothing is compensated; take the compensation away, or put {step.name} before {pivot.name}"
        )
