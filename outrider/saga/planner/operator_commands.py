"""Operator commands to a saga. The audit log records the answer, with a reason if a command is ignored."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from typing import Any, NamedTuple

from outrider.errors import InvalidState
from outrider.saga.definition.children import CALL_OFF
from outrider.saga.definition.steps import StepKind
from outrider.saga.model import JournalEntry, MessageKind, Phase, SagaMessage, Status, StepStatus
from outrider.saga.planner import children, compensation
from outrider.saga.planner.journal import ANSWERED, OPEN, OUTSIDE, Journal


class CommandApplied(NamedTuple):
    """The command was executed."""

    detail: str


class CommandIgnored(NamedTuple):
    """The command was ignored, with the reason."""

    reason: str


class CommandDeferred(NamedTuple):
    """The command stays in the mailbox until a decision is possible."""


CommandResult = CommandApplied | CommandIgnored | CommandDeferred


def apply_commands(journal: Journal) -> None:
    """Apply the operator commands in the mailbox, in order of arrival."""
    for message in journal.unread:
        if message.kind is not MessageKind.OPERATOR:
            continue
        match _apply(journal, message):
            case CommandApplied(detail=detail):
                _reply(journal, message, detail)
            case CommandIgnored(reason=reason):
                _reply(journal, message, f"ignored, because {reason}")


def ignore(journal: Journal, reason: str) -> None:
    """Ignore all commands of operators in the mailbox, with the same reason."""
    for message in journal.unread:
        # A parent calls off only once, so that command is kept until the saga can be run again.
        if message.kind is MessageKind.OPERATOR and message.name != CALL_OFF:
            _reply(journal, message, f"ignored, because {reason}")


def _apply(journal: Journal, message: SagaMessage) -> CommandResult:
    command = COMMANDS.get(message.name)
    if command is None:
        known = ", ".join(name for name in COMMANDS if name != CALL_OFF)
        return CommandIgnored(f"there is no such command; there are {known}")
    if journal.status in (Status.COMPLETED, Status.COMPENSATED):
        return CommandIgnored(f"the saga is {journal.status}")
    return command(journal, message)


def _reply(journal: Journal, message: SagaMessage, detail: str) -> None:
    journal.taken[message.message_id] = None
    journal.note(f"operator {message.name}", None, detail, actor=actor_of(message))


def actor_of(message: SagaMessage) -> str:
    """Return the actor of an operator command.

    >>> from datetime import UTC, datetime
    >>> from uuid import UUID
    >>> body = b'{"actor": "ann"}'
    >>> actor_of(SagaMessage(1, MessageKind.OPERATOR, "retry", None, body, UUID(int=1), datetime.now(UTC)))
    'ann'
    """
    return str(_body(message).get("actor", "unknown"))


def fields_of(message: SagaMessage) -> dict[str, Any]:
    """Return the state fields that an operator command sets.

    >>> from datetime import UTC, datetime
    >>> from uuid import UUID
    >>> body = b'{"actor": "ann", "set": {"charge": "C-1"}}'
    >>> fields_of(SagaMessage(1, MessageKind.OPERATOR, "mark_done", None, body, UUID(int=1), datetime.now(UTC)))
    {'charge': 'C-1'}
    """
    fields = _body(message).get("set")
    return fields if isinstance(fields, dict) else {}


def _body(message: SagaMessage) -> dict[str, Any]:
    try:
        body = json.loads(message.body)
    except ValueError:
        return {}
    return body if isinstance(body, dict) else {}


def retry(journal: Journal, message: SagaMessage) -> CommandResult:
    """Give failed steps a new retry budget, and make waiting retries due now. Awaited children get the same command."""
    all_failed = journal.entries(journal.phase, (StepStatus.FAILED,))
    failed = [entry for entry in all_failed if not children.has_ended(journal, entry)]
    if all_failed and not failed:
        return CommandIgnored(_names("the child has compensated itself; settle by hand, then mark-done", all_failed))
    waiting = journal.entries(journal.phase, (StepStatus.RETRYING,))
    passed_on = children.pass_on(journal, message)
    if not failed and not waiting and journal.status is not Status.FAILED:
        if passed_on:
            return CommandApplied(_names("passed on to the child of", passed_on))
        return CommandIgnored("no step has failed, and no step waits for another attempt")
    _leave_failed(journal)
    for entry in failed:
        _renew(journal, entry)
    for entry in waiting:
        # The wait for an unavailable service begins anew, with short pauses.
        journal.write(replace(entry, due_at=journal.now, unavailable_since=None), "due now")
    return CommandApplied(
        _names("tries again", failed + waiting) if failed or waiting else "continues where it stopped"
    )


def _renew(journal: Journal, entry: JournalEntry) -> None:
    fresh = replace(entry, attempts=0, ended_at=None)
    if entry.phase is Phase.COMPENSATION:
        # Another compensation may be running; this step keeps its position in the order.
        return journal.write(replace(fresh, status=StepStatus.PLANNED), "new budget")
    step = journal.step(entry)
    if entry.started_at is None and (step.when or step.for_each or step.child):
        return journal.write(replace(fresh, status=StepStatus.PLANNED, error=None), "its condition is computed again")
    return journal.write(replace(fresh, status=StepStatus.RETRYING, due_at=journal.now), "new budget")


def compensate(journal: Journal, message: SagaMessage) -> CommandResult:
    """Compensate all steps that are done or may have happened. Running children are called off first."""
    if reason := _reason_against_compensation(journal, message):
        return CommandIgnored(reason)
    if children.call_off(journal, _latest_compensate(journal)):
        return CommandDeferred()
    if journal.status is Status.FAILED and _pivot_is_out(journal):
        return CommandIgnored("the pivot is not settled, and the saga is stopped; use retry, then compensate again")
    if _pivot_is_out(journal) or _is_calling(journal):
        # A pivot that succeeds during compensation would leave a saga that is neither done nor compensated. A running
        # call may take effect after its compensation: cancellation is only a request.
        return CommandDeferred()
    compensation.begin(journal)
    return CommandApplied("compensates all steps that are done or may have happened")


def _latest_compensate(journal: Journal) -> SagaMessage | None:
    """Return the command that is passed on to children.

    Of several, the latest is enough. An earlier one may have been ignored by a child whose pivot was under way.
    """
    return next((message for message in reversed(journal.unread) if message.name == "compensate"), None)


def call_off(journal: Journal, _: SagaMessage) -> CommandResult:
    """Compensate because the parent is going to compensate, as after a deadline: when no step is under way."""
    if journal.is_compensating:
        return CommandApplied("compensates, because its parent is going to")
    if journal.is_relied_on or journal.past_pivot:
        return CommandIgnored("its steps are done, or its pivot is; its parent waits for its outcome")
    return CommandDeferred()


def _reason_against_compensation(journal: Journal, message: SagaMessage) -> str | None:
    if journal.is_relied_on:
        return f"its steps are done, and its parent relies on them; command {journal.record.instance.parent_id}"
    if journal.is_compensating:
        return "compensation has begun already; use retry for its failed steps"
    if journal.past_pivot:
        return "the pivot is done, and nothing is compensated after it; use retry or mark_done"
    if _pivot_failed_since(journal, message):
        return "the pivot's outcome is unknown; find out, then retry, mark_done or compensate again"
    return None


def _pivot_is_out(journal: Journal) -> bool:
    pivot = journal.pivot
    entry = journal.lines.get((pivot.name, Phase.ACTION)) if pivot else None
    return entry is not None and entry.status in OPEN and compensation.may_have_happened(journal.kind(entry), entry)


def _pivot_failed_since(journal: Journal, message: SagaMessage) -> bool:
    """Tell whether the operator sent the command before the pivot failed with an unknown outcome."""
    pivot = journal.pivot
    if (
        pivot is None
        or pivot.kind not in OUTSIDE
        or not journal.has_status((pivot.name, Phase.ACTION), StepStatus.FAILED)
    ):
        return False
    ended_at = journal.lines[pivot.name, Phase.ACTION].ended_at
    before = {entry.step: entry.status for entry in journal.record.journal if entry.phase is Phase.ACTION}
    return before.get(pivot.name) is not StepStatus.FAILED or (ended_at is not None and message.delivered_at < ended_at)


def _is_calling(journal: Journal) -> bool:
    """Tell whether this worker runs a call. Calls of a lost worker or of a stopped saga do not count."""
    if journal.lost or journal.status is Status.FAILED:
        return False
    return any(journal.kind(entry) is StepKind.CALL for entry in journal.entries(Phase.ACTION, (StepStatus.STARTED,)))


def mark_done(journal: Journal, message: SagaMessage) -> CommandResult:
    """Mark failed steps as done, because a person has resolved them; without a failed step, mark the awaited steps.

    The fields of the command are set in the state. If a value does not fit, the command is ignored.
    """
    settled = journal.entries(journal.phase, (StepStatus.FAILED,))
    if not settled and journal.record.instance.status is Status.FAILED:
        # The awaited steps are not the steps that the operator meant: those were answered, or no step of the saga had
        # failed.
        return CommandIgnored("no step is failed any more")
    settled = settled or _awaited(journal)
    if not settled:
        if journal.awaits_parent or children.awaited(journal):
            return CommandIgnored("it waits for another saga, its child or its parent; command that saga")
        return CommandIgnored("no step has failed, and no step is waited for")
    fields = fields_of(message)
    try:
        journal.set_fields(fields)
    except InvalidState as error:
        return CommandIgnored(f"the values to set do not fit: {error}")
    _leave_failed(journal)
    for entry in settled:
        # No event has settled the step, so the compensating command must not say that the action was confirmed.
        journal.settle(replace(entry, reply_event_id=None), StepStatus.DONE, "settled by an operator")
    suffix = f"; set: {', '.join(fields)}" if fields else ""
    return CommandApplied(_names("counts as done", settled) + suffix)


def _awaited(journal: Journal) -> list[JournalEntry]:
    kinds = ANSWERED | {StepKind.SLEEP}
    return [entry for entry in journal.entries(journal.phase, OPEN) if journal.kind(entry) in kinds]


def _leave_failed(journal: Journal) -> None:
    if journal.status is Status.FAILED:
        journal.set_status(Status.COMPENSATING if journal.is_compensating else Status.RUNNING)


def _names(what: str, entries: list[JournalEntry]) -> str:
    return f"{what}: {', '.join(entry.step for entry in entries)}"


COMMANDS: dict[str, Callable[[Journal, SagaMessage], CommandResult]] = {
    "retry": retry,
    "compensate": compensate,
    "mark_done": mark_done,
    CALL_OFF: call_off,
}
