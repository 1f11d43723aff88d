"""What a step is, once defined. Plain data: the plan reads it, the worker does it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

from outrider.backoff import RetryPolicy
from outrider.event import default_topic

Function = Callable[..., Any]


class Kind(StrEnum):
    """How a step is done.

    `local`: in the transaction that saves the saga. `call`: outside any, with an idempotency key. `request`: a command
    to another service, answered by an event. `wait`: for an event alone. `sleep`: for time to pass.
    """

    LOCAL = "local"
    CALL = "call"
    REQUEST = "request"
    WAIT = "wait"
    SLEEP = "sleep"


@dataclass(frozen=True, slots=True)
class Command:
    """What a request sends, and which events answer it. A wait sends nothing: its type and topic are empty."""

    event_type: str
    topic: str
    reply: str | None
    refusal: str | None = None
    reply_topic: str | None = None
    payload: Function | None = None
    """Makes the payload of the state; none sends an empty object."""


@dataclass(frozen=True, slots=True)
class Act:
    """One phase of a step: a function, or a command, with its own budget.

    A sleep has neither; its time is `timeout_seconds`. A wait without one waits as long as it takes.
    """

    function: Function | None = None
    command: Command | None = None
    retry: RetryPolicy = field(default_factory=RetryPolicy)
    timeout_seconds: float | None = None


@dataclass(frozen=True, slots=True)
class Step:
    """A step of a definition. `line` is where it was written, for errors."""

    name: str
    kind: Kind
    action: Act
    undo: Act | None = None
    after: tuple[str, ...] = ()
    pivot: bool = False
    takes: Mapping[str, Function] = field(default_factory=dict)
    """By the type of a reply: what puts it into the state."""
    correlate: Function | None = None
    line: str = ""

    @property
    def replies(self) -> dict[str, str]:
        """Return the types of the events that answer this step, each with the topic it comes on.

        >>> Step("collected", Kind.WAIT, Act(command=Command("", "", "parcel.collected"))).replies
        {'parcel.collected': 'events.parcel.collected'}
        """
        commands = [act.command for act in (self.action, self.undo) if act and act.command]
        return {
            event_type: default_topic(event_type, command.reply_topic, None)
            for command in commands
            for event_type in (command.reply, command.refusal)
            if event_type
        }


@dataclass(frozen=True, slots=True)
class Definition:
    """A saga as the plan sees it: its steps by name, in the order they were written."""

    saga_type: str
    version: int
    steps: Mapping[str, Step]
    amend: Callable[[bytes, Mapping[str, Any]], bytes] | None = None
    """Puts other values into fields of a stored state; raises BadState if they do not fit."""
    outline: str = ""
    """The definition in short, by which a change of it is noticed."""

    @property
    def pivot(self) -> Step | None:
        """Return the step after which nothing is undone."""
        return next((step for step in self.steps.values() if step.pivot), None)
