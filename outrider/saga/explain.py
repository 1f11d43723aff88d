"""Explains the current status of a saga in plain words: reasons, owner, next action and helpful commands.

The functions are pure: all facts come from a record of one moment. Only the definition knows the kinds of steps;
without a definition the text is less precise but still correct.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime, timedelta
from typing import NamedTuple
from uuid import UUID

from outrider.saga.definition.children import CALL_OFF, PARENT_STEP
from outrider.saga.definition.steps import FAMILY, Definition, Step, StepAction, StepKind, base_name
from outrider.saga.diagram import span
from outrider.saga.model import (
    PASSED,
    Instance,
    JournalEntry,
    MessageKind,
    Phase,
    SagaMessage,
    SagaRecord,
    Status,
    StepStatus,
    Uncertainty,
)
from outrider.saga.planner.compensation import may_have_happened
from outrider.saga.planner.operator_commands import actor_of

RUN = "outrider saga run module:sagas"

GRACE_SECONDS = 5.0
"""A worker polls every second, so a saga that is overdue for longer has no worker."""

OPEN = (StepStatus.STARTED, StepStatus.RETRYING)


class Explanation(NamedTuple):
    """The reasons, most important first, and the commands that help."""

    reasons: tuple[str, ...]
    helps: tuple[Suggestion, ...] = ()


def explain(record: SagaRecord, definition: Definition | None = None, children: Sequence[Instance] = ()) -> Explanation:
    """Explain why a saga is in its current status.

    With the definition of the same version, the explanation also says why each step waits; with the children, also
    the status of the children for which it waits::

        record = await store.admin.show(saga_id)
        print("\\n".join(explain(record, order.definition).reasons))
    """
    is_child = record.instance.parent_id is not None
    by_step = {child.parent_step: child for child in children if child.parent_step}
    view = SagaSnapshot(record, definition and definition.expanded(record.journal, is_child=is_child), by_step)
    if record.instance.status in (Status.COMPLETED, Status.COMPENSATED):
        return Explanation(tuple(_ended_reasons(view)))
    if record.instance.status is Status.FAILED:
        reasons = (*_failed(view), *_operator_commands(view), *_unread_replies(view), *_unattended(view))
        return Explanation(reasons, (*worker(view), *suggest_for_failed(view)))
    return Explanation(
        (*_open(view), *_operator_commands(view), *_unread_replies(view), _owner(view)),
        (*worker(view), *suggest_for_open(view)),
    )


def _ended_reasons(view: SagaSnapshot) -> Iterator[str]:
    instance = view.record.instance
    yield from _skipped(view)
    yield from _deadline(view)
    for entry in view.entries(Phase.ACTION, StepStatus.REJECTED, StepStatus.FAILED):
        yield f"step {entry.step} {_ended(entry)}"
    what = "everything is done" if instance.status is Status.COMPLETED else "the steps done before are compensated"
    yield f"{instance.status} at {view.at(instance.ended_at)}: {what}, and no more steps will run"


def _failed(view: SagaSnapshot) -> Iterator[str]:
    failed = view.entries(view.phase, StepStatus.FAILED)
    for entry in failed:
        yield f"{_named(entry)} has failed after {_attempts(entry)}: {entry.error or 'no reason was given'}"
        if entry.is_unresolved and (action := view.action(entry)) and action.command:
            which = "another reply" if _not_applied(entry) else "the reply"
            yield f"if {which} to {_named(entry)} arrives late, it settles the step"
    yield from _parent(view)
    if not failed:
        yield view.record.instance.last_error or "it has failed, and no reason was given"
    yield f"it is stopped since {view.at(view.record.instance.ended_at)}, until an operator decides"


def _open(view: SagaSnapshot) -> Iterator[str]:
    waiting = view.entries(view.phase, *OPEN)
    for entry in waiting:
        yield _retrying(view, entry) if entry.status is StepStatus.RETRYING else _started(view, entry)
    for entry in view.entries(view.phase, StepStatus.FAILED):
        yield f"{_named(entry)} has failed after {_attempts(entry)}: {entry.error or 'no reason was given'}"
    if view.phase is Phase.COMPENSATION and (planned := view.entries(view.phase, StepStatus.PLANNED)):
        yield f"still to be compensated: {', '.join(entry.step for entry in planned)}"
    yield from _parent(view)
    yield from _skipped(view)
    yield from _deadline(view)
    if not waiting:
        yield "no step has begun yet" if not view.record.journal else "the next step is to begin"


def _parent(view: SagaSnapshot) -> Iterator[str]:
    instance = view.record.instance
    if instance.parent_id and not view.has_status(PARENT_STEP, StepStatus.STARTED):
        parent = f"step {instance.parent_step} of saga {instance.parent_id}"
        yield f"it is the child of {parent}, which waits for its outcome"


def _deadline(view: SagaSnapshot) -> Iterator[str]:
    instance = view.record.instance
    deadline_at, is_forward = instance.deadline_at, instance.status in (Status.STARTED, Status.RUNNING)
    if deadline_at is None or instance.status is Status.COMPLETED or view.has_status(PARENT_STEP, StepStatus.STARTED):
        return
    if deadline_at <= (instance.ended_at or view.record.now):
        is_late = view.has_status(view.pivot, *PASSED)
        then = "after the pivot: the saga goes on" if is_late else "it compensates when no step is under way"
        yield f"deadline exceeded: it was {view.at(deadline_at)}" + (f"; {then}" if is_forward else "")
    elif is_forward and not view.has_status(view.pivot, *PASSED):
        yield f"it compensates if it is before its pivot at its deadline, {view.at(deadline_at)}"


def _skipped(view: SagaSnapshot) -> Iterator[str]:
    if names := [entry.step for entry in view.entries(Phase.ACTION, StepStatus.SKIPPED)]:
        yield f"skipped, because the condition (when=) was false: {', '.join(names)}"


def _retrying(view: SagaSnapshot, entry: JournalEntry) -> str:
    if entry.error is None:
        return f"{_named(entry)} is to be begun, due {view.at(entry.due_at)}"
    action = view.action(entry)
    if entry.unavailable_since:
        return _waits_for_service(view, entry, action)
    total = f" of {action.retry.max_attempts}" if action else ""
    return (
        f"{_named(entry)} did not succeed in attempt {entry.attempts}{total}: {entry.error}; "
        f"the next attempt is due {view.at(entry.due_at)}"
    )


def _waits_for_service(view: SagaSnapshot, entry: JournalEntry, action: StepAction | None) -> str:
    is_doubtful = entry.uncertainty is Uncertainty.OUTCOME_UNKNOWN
    doubt = "; the outcome of an earlier attempt is unknown" if is_doubtful else ""
    text = (
        f"{_named(entry)} waits for an unavailable service since {view.at(entry.unavailable_since)}: {entry.error}"
        f"{doubt}; no attempt is counted, and the next is due {view.at(entry.due_at)}"
    )
    if action is None or entry.unavailable_since is None:
        return text
    limit = entry.unavailable_since + timedelta(seconds=action.unavailable_for_seconds)
    return f"{text}; an operator must decide from {view.at(limit)}"


def _started(view: SagaSnapshot, entry: JournalEntry) -> str:
    step, action = view.step(entry), view.action(entry)
    command = action.command if action else None
    if step is None or action is None or step.kind in FAMILY:
        return _of_family(view, entry) or _unknown_kind(view, entry)
    if step.kind in (StepKind.SLEEP, StepKind.FOR_EACH):
        return _idle(view, entry, step)
    if command and not command.event_type:
        then = f"; if it has not come by {view.at(entry.due_at)}, that counts as rejected" if entry.due_at else ""
        return f"{_named(entry)} waits for the event {command.reply} since {view.at(entry.started_at)}{then}"
    if command:
        replies = " or ".join(reply for reply in (command.reply, command.rejection) if reply)
        return f"waits for reply {replies} of {_named(entry)}, {_asked(view, entry, action)}"
    begun = f"attempt {entry.attempts}, begun {view.at(entry.started_at)}"
    if view.is_attended:
        return f"{_named(entry)} is being done, {begun}"
    return (
        f"{_named(entry)} was running when its worker released it, {begun}; the next worker runs it again with "
        "the same key"
    )


def _of_family(view: SagaSnapshot, entry: JournalEntry) -> str | None:
    """Explain a step that waits for a child or for the parent. Other steps have no such explanation."""
    if entry.step == PARENT_STEP:
        parent = f"{view.record.instance.parent_id}, since {view.at(entry.started_at)}"
        return f"all its steps are done; it completes or compensates with its parent {parent}"
    step = view.step(entry)
    if entry.step in view.children or (step and step.kind is StepKind.CHILD):
        return _child(view, entry, step)
    return None


def _child(view: SagaSnapshot, entry: JournalEntry, step: Step | None) -> str:
    child = view.children.get(entry.step)
    name, child_id = step.child.name if step and step.child else "", view.child_id(entry)
    if child:
        name, child_id = f"{child.saga_type} version {child.definition_version}", child.saga_id
    doing = "waits for its child" if entry.phase is Phase.ACTION else "waits for the compensation of its child"
    text = f"{_named(entry)} {doing} {name} ({child_id}) since {view.at(entry.started_at)}"
    if entry.phase is Phase.ACTION and entry.command_event_id:
        text += "; it has called the child off"
    if child is None:
        return text
    error = f": {child.last_error}" if child.last_error and child.status is Status.FAILED else ""
    needing = "; it needs an operator" if child.needs_attention else ""
    return f"{text}; the child is {child.status}{error}{needing}"


def _idle(view: SagaSnapshot, entry: JournalEntry, step: Step) -> str:
    if step.kind is StepKind.SLEEP:
        return f"{_named(entry)} sleeps until {view.at(entry.due_at)}"
    done, count = view.items(entry)
    return f"{_named(entry)} has done {done} of {count} items, at most {step.parallel_max} at a time"


def _asked(view: SagaSnapshot, entry: JournalEntry, action: StepAction) -> str:
    if entry.undelivered:
        return f"and no attempt is counted: {entry.error}; the next look is due {view.at(entry.due_at)}"
    times = "asked once" if entry.attempts == 1 else f"asked {entry.attempts} times"
    again = entry.attempts < action.retry.max_attempts
    then = "it is asked again after" if again else "after the last attempt, an operator must decide from"
    return f"{times} since {view.at(entry.started_at)}; {then} {view.at(entry.due_at)}"


def _unknown_kind(view: SagaSnapshot, entry: JournalEntry) -> str:
    what = "is being done" if view.record.instance.owner else "waits for an answer, an event or a time"
    until = f"; the next look at it is due {view.at(entry.due_at)}" if entry.due_at else ""
    return f"{_named(entry)} {what}, attempt {entry.attempts}, begun {view.at(entry.started_at)}{until}"


def _operator_commands(view: SagaSnapshot) -> Iterator[str]:
    for message in view.record.messages:
        if message.kind is MessageKind.OPERATOR:
            when = {"compensate": _once(view), CALL_OFF: "once no step is under way"}.get(message.name, "next")
            command = message.name.replace("_", "-")
            yield f"{actor_of(message)} commanded {command} {view.at(message.delivered_at)}: a worker applies it {when}"


def _once(view: SagaSnapshot) -> str:
    """Name the condition of a waiting compensate command: the pivot or running calls must end first."""
    for entry in view.entries(Phase.ACTION, *OPEN):
        step = view.step(entry)
        if step and step.kind is StepKind.CHILD:
            return f"once the child of step {entry.step} has ended"
        if step and step.pivot and may_have_happened(step.kind, entry):
            return f"once the pivot {entry.step} has ended"
        if step and step.kind is StepKind.CALL and entry.status is StepStatus.STARTED and view.is_attended:
            return f"once the call {entry.step} has ended"
    return "next"


def _unread_replies(view: SagaSnapshot) -> Iterator[str]:
    for message in view.record.messages:
        if message.kind is MessageKind.REPLY:
            reason = "no turn has read it yet" if message in view.unread else _reason_kept(view, message)
            yield f"the event {message.name} came {view.at(message.delivered_at)}: {reason}"


def _reason_kept(view: SagaSnapshot, message: SagaMessage) -> str:
    """Name the step for which a reply is kept because the reply could not be applied. Other replies are early."""
    for entry in view.entries(view.phase, StepStatus.RETRYING, StepStatus.FAILED):
        action = view.action(entry)
        if action and action.command and message.name in (action.command.reply, action.command.rejection):
            how = "which could not apply it" if _not_applied(entry) else "which applies it after retry"
            return f"kept for {_named(entry)}, {how}"
    failed = view.definition is None and view.record.instance.status is Status.FAILED
    return "kept for a step that has failed, or is still to come" if failed else "kept for a step that is still to come"


def _owner(view: SagaSnapshot) -> str:
    owner, overdue = view.record.instance.owner, view.overdue_seconds
    if overdue >= GRACE_SECONDS:
        owner_text = f"; {owner} held it until then, and has not renewed its claim" if owner else ""
        return (
            f"overdue since {view.at(view.due_at)}: no worker runs it{owner_text}. No worker that holds "
            f"{view.definition_name} is running, or all of them are busy"
        )
    if overdue >= 0:
        return f"it is due now, and the next worker that holds {view.definition_name} takes it"
    if owner:
        return f"{owner} works on it, and has it until {view.at(view.due_at)}, or longer if it renews that"
    if view.due_at is None:
        return "no worker need look at it before a reply or an operator command arrives"
    return f"no worker need look at it before {view.at(view.due_at)}, or a reply or an operator command arrives"


def _unattended(view: SagaSnapshot) -> Iterator[str]:
    """Report that no worker will execute an operator command. Without a command, a failed saga needs no worker."""
    if view.overdue_seconds >= GRACE_SECONDS:
        yield _owner(view)


def _named(entry: JournalEntry) -> str:
    return f"step {entry.step}" if entry.phase is Phase.ACTION else f"the compensation of step {entry.step}"


def _ended(entry: JournalEntry) -> str:
    how = "failed" if entry.status is StepStatus.FAILED else "was rejected"
    return f"{how}: {entry.error or 'no reason was given'}"


def _not_applied(entry: JournalEntry) -> bool:
    return entry.uncertainty is Uncertainty.REPLY_NOT_APPLIED


def _rejected_by_reply(entry: JournalEntry) -> bool:
    return entry.reply_event_id is not None and entry.uncertainty is None


def _attempts(entry: JournalEntry) -> str:
    return "1 attempt" if entry.attempts == 1 else f"{entry.attempts} attempts"


class Suggestion(NamedTuple):
    """A command, and its effect on this saga."""

    command: str
    effect: str


def suggest_for_failed(view: SagaSnapshot) -> Iterator[Suggestion]:
    """Yield the operator commands that a failed saga accepts."""
    saga_id = view.record.instance.saga_id
    refused = any(_rejected_by_reply(entry) for entry in view.entries(view.phase, StepStatus.FAILED))
    but = "; a participant that has rejected gives the same answer under the same key" if refused else ""
    if not view.entries(view.phase, StepStatus.FAILED):
        yield Suggestion(f"outrider saga retry {saga_id}", "continues where it stopped, after the cause is removed")
    else:
        yield Suggestion(
            f"outrider saga retry {saga_id}", f"tries the failed steps again, with a new budget of attempts{but}"
        )
        yield Suggestion(
            f"outrider saga mark-done {saga_id}", "counts the failed steps as done, if you have settled them by hand"
        )
    if view.phase is Phase.ACTION and not view.has_status(view.pivot, StepStatus.DONE):
        yield Suggestion(
            f"outrider saga compensate {saga_id}",
            f"compensates the steps that are done or may have happened{_but(view)}",
        )


def worker(view: SagaSnapshot) -> Iterator[Suggestion]:
    """Yield the command that runs a worker, if the saga has been overdue for some time."""
    if view.overdue_seconds >= GRACE_SECONDS:
        yield Suggestion(RUN, f"runs a worker, if {view.definition_name} is among its sagas")


def suggest_for_open(view: SagaSnapshot) -> Iterator[Suggestion]:
    """Yield the operator commands that an active saga accepts."""
    saga_id, waiting = view.record.instance.saga_id, view.entries(view.phase, *OPEN)
    if any(entry.status is StepStatus.RETRYING for entry in waiting):
        yield Suggestion(f"outrider saga retry {saga_id}", "makes the next attempt due now")
    if any(_awaited(view, entry) for entry in waiting):
        yield Suggestion(
            f"outrider saga mark-done {saga_id}", "counts the awaited steps as done, if you know that they are"
        )
    for entry in waiting:
        if child_id := view.child_id(entry):
            yield Suggestion(f"outrider saga explain {child_id}", f"says what the child of step {entry.step} waits for")
    if view.has_status(PARENT_STEP, StepStatus.STARTED):
        parent_id = view.record.instance.parent_id
        yield Suggestion(f"outrider saga explain {parent_id}", "says what its parent waits for")
    elif view.phase is Phase.ACTION and not view.has_status(view.pivot, StepStatus.DONE):
        yield Suggestion(
            f"outrider saga compensate {saga_id}", f"gives it up, and compensates the steps that are done{_but(view)}"
        )


def _but(view: SagaSnapshot) -> str:
    """Name the limits of a compensation: steps without a compensation that may have happened, and a finished pivot."""
    if view.definition is None:
        return ", unless its pivot is done"
    outside = [(entry, view.step(entry)) for entry in view.entries(Phase.ACTION, StepStatus.FAILED, *OPEN)]
    left = [e.step for e, step in outside if step and step.compensation is None and may_have_happened(step.kind, e)]
    return f"; see first that {', '.join(left)} did not happen, since it has no compensation" if left else ""


def _awaited(view: SagaSnapshot, entry: JournalEntry) -> bool:
    step, action = view.step(entry), view.action(entry)
    if entry.step == PARENT_STEP or entry.step in view.children or (step and step.kind is StepKind.CHILD):
        return False
    if step is None or action is None:
        return view.record.instance.owner is None and entry.status is StepStatus.STARTED
    return action.command is not None or step.kind is StepKind.SLEEP


@dataclass(frozen=True, slots=True)
class SagaSnapshot:
    """A record, with derived values that are used several times."""

    record: SagaRecord
    definition: Definition | None
    children: Mapping[str, Instance] = field(default_factory=dict)
    """The children by the step that started them, as far as they are known."""

    @property
    def phase(self) -> Phase:
        """Return the current phase. Before compensation starts, compensations are at most planned."""
        instance = self.record.instance
        if instance.status is Status.FAILED:
            begun = any(entry.status is not StepStatus.PLANNED for entry in self.entries(Phase.COMPENSATION))
            return Phase.COMPENSATION if begun else Phase.ACTION
        return Phase.COMPENSATION if instance.status is Status.COMPENSATING else Phase.ACTION

    def entries(self, phase: Phase, *status: StepStatus) -> list[JournalEntry]:
        found = [e for e in self.record.journal if e.phase is phase and (not status or e.status in status)]
        return sorted(found, key=lambda entry: entry.position)

    def step(self, entry: JournalEntry) -> Step | None:
        return self.definition.steps.get(entry.step) if self.definition else None

    def action(self, entry: JournalEntry) -> StepAction | None:
        if (step := self.step(entry)) is None:
            return None
        return step.action if entry.phase is Phase.ACTION else step.compensation

    def child_id(self, entry: JournalEntry) -> UUID | None:
        """Return the id of the child of a step, or None for a step of another kind."""
        if entry.step in self.children:
            return self.children[entry.step].saga_id
        step = self.step(entry)
        if step is None or step.kind is not StepKind.CHILD or step.child is None:
            return None
        return step.child.saga.child_id(self.record.instance.saga_id, entry.step)

    def has_status(self, step: str | None, *status: StepStatus) -> bool:
        return any(entry.step == step for entry in self.entries(Phase.ACTION, *status))

    def items(self, entry: JournalEntry) -> tuple[int, int]:
        """Return the number of items that are done, and the number of all items of a step."""
        done = [e for e in self.entries(Phase.ACTION, StepStatus.DONE) if e.step != entry.step]
        return sum(base_name(e.step) == entry.step for e in done), len(json.loads(entry.data or "[]"))

    @property
    def pivot(self) -> str | None:
        pivot = self.definition.pivot if self.definition else None
        return pivot.name if pivot else None

    @property
    def unread(self) -> list[SagaMessage]:
        """Return messages that arrived after the last turn."""
        return [message for message in self.record.messages if message.delivered_at > self.record.instance.updated_at]

    @property
    def due_at(self) -> datetime | None:
        """Return the time since which a worker should run the saga, or the end of the claim, or the next deadline."""
        instance = self.record.instance
        times = [instance.wake_at] if instance.wake_at else []
        if instance.owner is None:
            times += [message.delivered_at for message in self.unread]
        return min(times, default=None)

    @property
    def overdue_seconds(self) -> float:
        return (self.record.now - self.due_at).total_seconds() if self.due_at else -1.0

    @property
    def is_attended(self) -> bool:
        return self.record.instance.owner is not None and self.overdue_seconds < 0

    @property
    def definition_name(self) -> str:
        return f"version {self.record.instance.definition_version} of {self.record.instance.saga_type}"

    def at(self, moment: datetime | None) -> str:
        """Format a time as local time and relative to now."""
        if moment is None:
            return "an unknown time"
        seconds = (moment - self.record.now).total_seconds()
        away = f"in {span(seconds)}" if seconds > 0 else f"{span(abs(seconds))} ago"
        return f"{moment.astimezone():%Y-%m-%d %H:%M:%S} ({away})"
