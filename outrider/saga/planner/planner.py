"""The planner: a pure function from journal, messages, time and inputs of the worker to the next actions of a saga.

- Decisions are deterministic: equal records and equal inputs give equal plans.
- Replies are applied before operator commands, and both before deadlines. A command is checked against the situation at
  the time of the turn.
- Compensation starts only when no step can still take effect, unless an operator commands compensation. After the pivot
  is done, the saga never compensates.
- A saga that is going to compensate first calls off its running children, and waits for them.
- A saga whose deadline has passed starts no further step before the pivot, and compensates as after a rejection.
- A failed saga resumes after an operator command, or when the missing reply arrives.
- A condition is computed once, from the state that the store has after the turn. The journal keeps its result.
- Each step is journaled before the step starts, so any worker can continue after a crash. A lost worker costs no
  attempt.
"""

from __future__ import annotations

import json
import random
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from types import MappingProxyType
from typing import Any
from uuid import UUID

from outrider.errors import InvalidHandler, InvalidState
from outrider.redaction import ErrorText
from outrider.saga.definition.fingerprint import definition_changed
from outrider.saga.definition.steps import ITEMS_MAX, Definition, Step, base_name
from outrider.saga.definition.validation import Function
from outrider.saga.model import PASSED, JournalEntry, Phase, SagaRecord, Status, StepStatus, Undelivered
from outrider.saga.planner import children, compensation, operator_commands, replies, results
from outrider.saga.planner.actions import (
    Action,
    ApplyReply,
    CallAction,
    Claimed,
    Input,
    InvalidResult,
    LocalAction,
    Outage,
    Plan,
    Raised,
    RejectedResult,
    SendCommand,
    Succeeded,
    TimedOut,
    UnavailableResult,
    key_of,
    wanted,
)
from outrider.saga.planner.journal import HERE, OPEN, Journal, StepKey

__all__ = [
    "Action",
    "ApplyReply",
    "CallAction",
    "Claimed",
    "Input",
    "InvalidResult",
    "LocalAction",
    "Outage",
    "Plan",
    "Raised",
    "RejectedResult",
    "SendCommand",
    "Succeeded",
    "TimedOut",
    "UnavailableResult",
    "advance",
    "key_of",
    "overdue",
    "wanted",
]

NOTHING: Mapping[UUID, Undelivered] = MappingProxyType({})
NO_OUTAGES: Mapping[StepKey, Outage] = MappingProxyType({})
ENDED = frozenset({Status.COMPLETED, Status.COMPENSATED})
DEADLINE = "deadline exceeded"


def advance(
    definition: Definition,
    record: SagaRecord,
    inputs: Sequence[Input],
    rng: random.Random,
    undelivered: Mapping[UUID, Undelivered] = NOTHING,
    *,
    outages: Mapping[StepKey, Outage] = NO_OUTAGES,
    error_text: ErrorText = ErrorText.REDACTED,
) -> Plan:
    """Plan a turn. The first turn after a claim gets the input `Claimed()` and starts interrupted steps again.

    Messages and time of the record must be of the same moment: with an old mailbox and a new time, a reply would be
    missed. `undelivered` has the `overdue` commands that have not left the outbox, because such commands count no
    attempt. `outages` has the steps that are not tried now, because their service is unavailable. `error_text` is the
    part of the reasons of participants that is kept.

    ```python
    plan = advance(order.definition, record, [Claimed()], random.Random())
    ```
    """
    journal = Journal(
        definition,
        record,
        rng,
        lost=next((item for item in inputs if isinstance(item, Claimed)), None),
        unreadable=frozenset(_unreadable(inputs)),
        undelivered=undelivered,
        outages=outages,
        error_text=error_text,
    )
    if error := _find_unknown_steps(journal.definition, record) or definition_changed(definition, record):
        return _stop(journal, error)
    if results.is_lost_outside_of_steps(journal):
        return _stop(journal, results.lost_text(journal.losses))
    results.apply_inputs(journal, inputs)
    _apply_until_stable(journal)
    replies.drop_unneeded(journal)
    children.collect_messages(journal)
    return _plan(journal)


def overdue(record: SagaRecord) -> list[UUID]:
    """Return the commands whose deadline has passed. The caller checks whether the commands have left the outbox.

    ```python
    undelivered = await store.undelivered(tx, overdue(record))
    ```
    """
    waiting = (entry for entry in record.journal if entry.status is StepStatus.STARTED)
    late = (entry for entry in waiting if entry.due_at and entry.due_at <= record.now)
    return [entry.command_event_id for entry in late if entry.command_event_id]


def _unreadable(inputs: Sequence[Input]) -> Iterator[StepKey]:
    for item in inputs:
        if isinstance(item, InvalidResult) or (isinstance(item, Raised) and item.reply):
            yield item.step, item.phase


def _apply_until_stable(journal: Journal) -> None:
    """Apply replies, commands and decisions until no change remains: a new step may already have a reply."""
    changes = -1
    while changes != len(journal.notes):
        changes = len(journal.notes)
        replies.read(journal)
        _resume_if_answered(journal)
        operator_commands.apply_commands(journal)
        if journal.lost and journal.status is not Status.FAILED:
            results.restart_interrupted(journal)
        _decide(journal)


def _resume_if_answered(journal: Journal) -> None:
    """Resume the saga if all failed steps have been answered. A saga without a failed step stays failed."""
    _fail_late_rejections(journal)
    had_failed = any(
        (entry.phase, entry.status) == (journal.phase, StepStatus.FAILED) for entry in journal.record.journal
    )
    if journal.status is Status.FAILED and had_failed and not journal.entries(journal.phase, (StepStatus.FAILED,)):
        journal.set_status(
            Status.COMPENSATING if journal.is_compensating else Status.RUNNING, "the unknown outcome is answered"
        )


def _fail_late_rejections(journal: Journal) -> None:
    if journal.past_pivot:
        for entry in journal.entries(Phase.ACTION, (StepStatus.REJECTED,)):
            error = f"rejected after the pivot: {entry.error}"
            journal.settle(entry, StepStatus.FAILED, error, uncertainty=entry.uncertainty)


def _decide(journal: Journal) -> None:
    if journal.status is Status.STARTED:
        journal.set_status(Status.RUNNING)
    if not is_halted(journal):
        results.apply_deadlines(journal)
    if journal.status is Status.RUNNING:
        _advance(journal)
    elif journal.status is Status.COMPENSATING:
        compensation.start_next_compensation(journal)


def is_halted(journal: Journal) -> bool:
    """Tell whether the saga has stopped, or will stop when the running calls have ended."""
    if journal.status is Status.RUNNING:
        return bool(journal.entries(Phase.ACTION, (StepStatus.FAILED,)))
    return journal.status is not Status.COMPENSATING


def _advance(journal: Journal) -> None:
    _fail_late_rejections(journal)
    if is_halted(journal):
        if not running_steps(journal):
            journal.set_status(Status.FAILED)
    elif journal.entries(Phase.ACTION, (StepStatus.REJECTED,)):
        if compensation.stop_idle_steps(journal, compensation.ANOTHER_REJECTED):
            compensation.begin(journal)
    elif reason := _reason_to_give_up(journal):
        journal.last_error = reason
        if compensation.stop_idle_steps(journal, reason):
            compensation.begin(journal, reason)
    else:
        _start_ready(journal)


def _reason_to_give_up(journal: Journal) -> str | None:
    """Return the reason to compensate without a rejection: the deadline, or the parent of a child."""
    if journal.past_pivot or journal.has_passed_all or journal.has_done_all:
        return None
    if journal.is_overdue:
        return DEADLINE
    return children.CALLED_OFF if journal.is_called_off else None


def _start_ready(journal: Journal) -> None:
    """Start or skip each step whose predecessors are all done or skipped."""
    if journal.has_passed_all:
        return journal.set_status(Status.COMPLETED)
    passed = {entry.step for entry in journal.entries(Phase.ACTION, PASSED)}
    if journal.compensation_requested:
        return None
    for step in journal.base.steps.values():
        entry = journal.lines.get((step.name, Phase.ACTION)) or _new_entry(journal, step.name)
        if entry.status is StepStatus.PLANNED and passed.issuperset(step.after):
            _start_or_skip(journal, step, entry)
        if step.for_each and journal.has_status((step.name, Phase.ACTION), StepStatus.STARTED):
            _advance_items(journal, step)
    if journal.is_child and journal.has_done_all:
        children.start_last_wait(journal)
    return None


def _new_entry(journal: Journal, name: str) -> JournalEntry:
    position = sum(entry.phase is Phase.ACTION for entry in journal.lines.values()) + 1
    return JournalEntry(name, Phase.ACTION, StepStatus.PLANNED, position)


def _start_or_skip(journal: Journal, step: Step, entry: JournalEntry) -> None:
    """Start a step unless its condition is false. A condition that cannot be computed is a fault of the definition."""
    if (step.when or step.for_each or step.child) and _applies_replies(journal):
        # The reply changes the state only after the planner, so the next turn decides.
        journal.is_undecided = True
        return None
    name = getattr(step.when, "__name__", "when")
    try:
        runs = step.when is None or _runs_beside(journal, step) or _compute(journal, step.when)
        if not isinstance(runs, bool):
            raise InvalidHandler(f"returned a {type(runs).__name__}; return True or False")
    except (InvalidHandler, InvalidState) as error:
        text = f"its condition {name} {journal.text_of(error)}; correct when= at {step.line}, then retry the saga"
        return journal.settle(entry, StepStatus.FAILED, text)
    if runs:
        if step.for_each:
            return _freeze_items(journal, step, entry)
        if step.child:
            return children.start(journal, step, entry)
        # The start shows that the condition is decided, even if the step waits for a service that is down.
        return journal.start(replace(entry, started_at=journal.now) if step.when else entry)
    for other in journal.base.steps.values():
        if other.name == step.name or (step.block is not None and other.block == step.block):
            skipped = journal.lines.get((other.name, Phase.ACTION)) or _new_entry(journal, other.name)
            if skipped.status is StepStatus.PLANNED:
                journal.settle(skipped, StepStatus.SKIPPED, f"{name} returned False")
    return None


def _applies_replies(journal: Journal) -> bool:
    return any(isinstance(action, ApplyReply) for action in journal.actions)


def _compute(journal: Journal, function: Function) -> Any:
    assert journal.definition.compute
    return journal.definition.compute(function, journal.record.instance.state)


def _freeze_items(journal: Journal, step: Step, entry: JournalEntry) -> None:
    """Write the list of items to the journal, so that no later turn computes another list."""
    assert step.for_each
    try:
        data, count = frozen_items(_compute(journal, step.for_each))
    except (InvalidHandler, InvalidState) as error:
        name = getattr(step.for_each, "__name__", "for_each")
        text = f"its list {name} {journal.text_of(error)}; correct for_each= at {step.line}, then retry the saga"
        return journal.settle(entry, StepStatus.FAILED, text)
    started = replace(entry, status=StepStatus.STARTED, attempts=1, started_at=journal.now, error=None, data=data)
    journal.write(started, f"{count} items")
    return journal.expand()


def frozen_items(items: Any) -> tuple[str, int]:
    """Return the items as JSON text, and their number. Raises InvalidHandler for a list that cannot be stored.

    >>> frozen_items(["single", "double"])
    ('["single", "double"]', 2)
    """
    if not isinstance(items, list | tuple | range):
        raise InvalidHandler(f"returned a {type(items).__name__}; return a list")
    if len(items) > ITEMS_MAX:
        raise InvalidHandler(f"returned {len(items)} items, and {ITEMS_MAX} are allowed; divide them among sagas")
    for index, item in enumerate(items):
        try:
            same = json.loads(json.dumps(item, allow_nan=False)) == item
        except (TypeError, ValueError, RecursionError):
            same = False
        if not same:
            kind = type(item).__name__
            raise InvalidHandler(f"returned the item {index}, a {kind} that is no JSON value; return its id or a dict")
    return json.dumps(list(items)), len(items)


def _advance_items(journal: Journal, step: Step) -> None:
    """Start items up to the limit. When all are done, put their results into the state and end the step."""
    names = [name for name, item in journal.definition.steps.items() if item.item and base_name(name) == step.name]
    entries = {name: journal.lines.get((name, Phase.ACTION)) for name in names}
    room = step.parallel_max - sum(entry is not None and entry.status in OPEN for entry in entries.values())
    ready = [name for name, entry in entries.items() if entry is None or entry.status is StepStatus.PLANNED]
    if ready and step.child and _applies_replies(journal):
        journal.is_undecided = True
        return None
    for name in ready[: max(0, room)]:
        entry = entries[name] or _new_entry(journal, name)
        children.start(journal, journal.definition.steps[name], entry) if step.child else journal.start(entry)
    if not all(entry is not None and entry.status is StepStatus.DONE for entry in entries.values()):
        return None
    if step.into and _applies_replies(journal):
        # Functions of replies return their results only after the planner.
        journal.is_undecided = True
        return None
    group = journal.lines[step.name, Phase.ACTION]
    try:
        if step.into:
            results_so_far = [entry.data if entry and entry.data else "null" for entry in entries.values()]
            journal.set_fields({step.into: [json.loads(text) for text in results_so_far]})
    except InvalidState as error:
        said = journal.text_of(error)
        text = f"the results of its items do not fit: {said}; correct into= at {step.line}, then retry the saga"
        return journal.settle(group, StepStatus.FAILED, text)
    journal.settle(group, StepStatus.DONE, f"{len(names)} items")
    return None


def _runs_beside(journal: Journal, step: Step) -> bool:
    """Tell whether another step of the same parallel block has started, so the condition of the block was true."""
    together = [other.name for other in journal.base.steps.values() if other.block == step.block]
    entries = (journal.lines.get((name, Phase.ACTION)) for name in together if step.block is not None)
    return any(entry is not None and entry.started_at is not None for entry in entries)


def running_steps(journal: Journal) -> list[JournalEntry]:
    """Return the steps that this worker runs itself, and for which the worker must keep its claim."""
    if journal.status is Status.FAILED:
        return []
    is_started = journal.entries(journal.phase, (StepStatus.STARTED,))
    return [entry for entry in is_started if journal.kind(entry) in HERE]


def _plan(journal: Journal) -> Plan:
    record = journal.record
    active = journal.entries(journal.phase, (*OPEN, StepStatus.FAILED))
    failed = [entry for entry in active if entry.status is StepStatus.FAILED]
    dead_lettered = any(entry.undelivered is Undelivered.DEAD_LETTER for entry in active)
    is_late = journal.is_overdue and journal.past_pivot
    if is_late and not record.instance.needs_attention:
        journal.attention.append(f"{DEADLINE} after the pivot, so the saga goes on")
        journal.note(DEADLINE, None, "after the pivot, so the saga goes on")
    return Plan(
        instance=replace(
            record.instance,
            status=journal.status,
            current_step=next((base_name(entry.step) for entry in failed or active), None),
            last_error=None if journal.status in ENDED else journal.last_error,
            retry_count=journal.retry_count,
            losses=journal.losses,
            needs_attention=bool(failed) or journal.status is Status.FAILED or dead_lettered or is_late,
        ),
        entries=tuple(journal.lines[step_key] for step_key in journal.changed),
        taken=tuple(journal.taken),
        seen=tuple(message.message_id for message in journal.unread),
        notes=tuple(journal.notes),
        actions=journal.remaining_actions(),
        release=not running_steps(journal) and not _is_undecided(journal),
        wake_seconds=_wake_seconds(journal),
        attention=tuple(journal.attention),
        children=tuple(journal.children),
        messages=tuple(journal.messages),
    )


def _is_undecided(journal: Journal) -> bool:
    return journal.is_undecided and journal.status is Status.RUNNING and not is_halted(journal)


def _wake_seconds(journal: Journal) -> float | None:
    """Return the seconds until the next deadline, or None if only an input or a message can change the saga."""
    if is_halted(journal):
        return None
    if _is_undecided(journal):
        return 0.0
    busy = running_steps(journal)
    waiting = [entry for entry in journal.entries(journal.phase, OPEN) if entry not in busy]
    due = [entry.due_at for entry in waiting if entry.due_at and not results.is_retry_suspended(journal, entry)]
    deadline_at = journal.record.instance.deadline_at
    if journal.status is Status.RUNNING and deadline_at is not None and deadline_at > journal.now:
        due.append(deadline_at)
    return max(0.0, (min(due) - journal.now).total_seconds()) if due else None


def _is_defined(definition: Definition, entry: JournalEntry) -> bool:
    step = definition.steps.get(entry.step)
    return step is not None and (entry.phase is Phase.ACTION or step.compensation is not None)


def _find_unknown_steps(definition: Definition, record: SagaRecord) -> str | None:
    """Return an error for journal entries whose step or compensation is missing in the definition."""
    strangers = [entry.step for entry in record.journal if not _is_defined(definition, entry)]
    if not strangers:
        return None
    return (
        f"version {definition.version} of {definition.saga_type} has no {', '.join(strangers)}, or no compensation of "
        "it, and the journal has; give the changed definition a new version, and keep the old one until its sagas have "
        "ended"
    )


def _stop(journal: Journal, error: str) -> Plan:
    """Stop a saga that cannot be run: its definition was changed, or its turns cost the workers. The journal stays."""
    instance = journal.record.instance
    if instance.status in ENDED:
        return Plan(instance, taken=tuple(message.message_id for message in journal.unread), release=True)
    if instance.status is not Status.FAILED:
        journal.attention.append(error)
        journal.set_status(Status.FAILED, error)
    operator_commands.ignore(journal, error)
    replies.make_room(journal)
    return Plan(
        replace(instance, status=Status.FAILED, last_error=error, needs_attention=True),
        taken=tuple(journal.taken),
        seen=tuple(message.message_id for message in journal.unread),
        notes=tuple(journal.notes),
        release=True,
        attention=tuple(journal.attention),
    )
