"""Inputs of the planner and actions for the worker, as values.

The planner returns an action once. Before a delayed action runs, the worker asks `wanted`, because an operator command
may have made the action obsolete.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import NamedTuple
from uuid import UUID

from outrider.saga.model import (
    AuditEntry,
    Instance,
    JournalEntry,
    NewSaga,
    NewSagaMessage,
    Phase,
    SagaMessage,
    StepStatus,
)


def key_of(saga_id: UUID, step: str) -> str:
    """Return the idempotency key of a step: the same for all attempts and for the compensation.

    >>> key_of(UUID(int=7), "reserve")
    '00000000-0000-0000-0000-000000000007:reserve'
    """
    return f"{saga_id}:{step}"


class Claimed(NamedTuple):
    """The saga was just claimed: no step runs in this worker, even if the journal has started steps.

    `begun` has the attempts that this worker may have started, if the worker had the saga before. All other started
    steps in the journal have had no effect.
    """

    begun: frozenset[tuple[str, Phase, int]] | None = None


class Succeeded(NamedTuple):
    """A call or a local function returned. `result` is JSON text, for an item whose results are collected."""

    step: str
    phase: Phase
    result: str | None = None


class RejectedResult(NamedTuple):
    """The code reported that the effect did not happen and will not happen."""

    step: str
    phase: Phase
    error: str


class Raised(NamedTuple):
    """The code raised; with `reply`, a reply could not be applied to the state.

    The reply then stays in the mailbox for this turn. For a step that starts in the same turn, the worker repeats the
    input in the next turn, without a release in between: the planner cannot count an attempt before the step has
    started.
    """

    step: str
    phase: Phase
    error: str
    reply: bool = False


class TimedOut(NamedTuple):
    """The code did not return in time; the outcome is unknown."""

    step: str
    phase: Phase


class UnavailableResult(NamedTuple):
    """The service of the step is unavailable: the attempt had no effect, and is not counted."""

    step: str
    phase: Phase
    error: str
    retry_after_seconds: float = 0.0


class Outage(NamedTuple):
    """The service of a step is known to be unavailable: the step is not tried before `seconds` have passed.

    With `allows_probe`, one attempt is made now, and further items of the step wait.
    """

    error: str
    seconds: float
    allows_probe: bool = False


class InvalidResult(NamedTuple):
    """The result cannot be recorded or the state cannot be read. The code is at fault, and only a person can help."""

    step: str
    phase: Phase
    error: str


Result = Succeeded | RejectedResult | Raised | TimedOut | UnavailableResult | InvalidResult
Input = Claimed | Result


class CallAction(NamedTuple):
    """Call the function outside any transaction, after this turn is saved.

    `item` is the item of a list, and `result` the result of the action that is compensated, both as JSON text.
    """

    step: str
    phase: Phase
    attempt: int
    key: str
    item: str | None = None
    result: str | None = None


class LocalAction(NamedTuple):
    """Run the function in a new transaction, after this turn is saved; save the result in the same transaction."""

    step: str
    phase: Phase
    attempt: int
    key: str
    item: str | None = None
    result: str | None = None


class SendCommand(NamedTuple):
    """Stage the command in the transaction that saves this turn."""

    step: str
    phase: Phase
    attempt: int
    key: str
    item: str | None = None
    result: str | None = None


class ApplyReply(NamedTuple):
    """Apply a reply to the state, in the transaction that saves this turn and before following commands are staged."""

    step: str
    phase: Phase
    message: SagaMessage
    attempt: int = 1
    item: str | None = None


Action = CallAction | LocalAction | SendCommand | ApplyReply


@dataclass(frozen=True, slots=True)
class Plan:
    """A change to be saved and the actions to run. `instance.version` is the expected version in the store.

    `taken`, `seen`, `notes`, `release` and `wake_seconds` have the same meaning as in `SagaChange`. Without `release`,
    steps are running in this worker, and the planner is called again after `wake_seconds` or with the next input.
    `attention` has the reasons why a person must look, once per reason. `children` are started and `messages` are
    delivered to other sagas in the transaction of the turn; an empty body stands for the state after the turn.
    """

    instance: Instance
    entries: tuple[JournalEntry, ...] = ()
    taken: tuple[int, ...] = ()
    seen: tuple[int, ...] = ()
    notes: tuple[AuditEntry, ...] = ()
    actions: tuple[Action, ...] = ()
    release: bool = False
    wake_seconds: float | None = None
    attention: tuple[str, ...] = ()
    children: tuple[NewSaga, ...] = ()
    messages: tuple[NewSagaMessage, ...] = ()


def wanted(journal: Iterable[JournalEntry], action: CallAction | LocalAction | SendCommand) -> bool:
    """Tell whether an action is still valid: its step is started, in the same phase and attempt.

    >>> action = CallAction("charge", Phase.ACTION, 2, "key")
    >>> wanted([JournalEntry("charge", Phase.ACTION, StepStatus.STARTED, position=1, attempts=2)], action)
    True
    >>> wanted([JournalEntry("charge", Phase.ACTION, StepStatus.FAILED, position=1, attempts=2)], action)
    False
    """
    return any(
        (entry.step, entry.phase, entry.attempts) == (action.step, action.phase, action.attempt)
        and entry.status is StepStatus.STARTED
        for entry in journal
    )
