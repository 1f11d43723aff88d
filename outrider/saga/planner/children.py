"""Children: sagas that a step of another saga starts, and their parents. All messages between them are in one place.

- A child is started in the turn that starts the step. Its id follows from parent and step, so no second is started.
- A child reports its outcome in the turn in which it is decided: done, rejected (compensated by itself or because the
  parent called it off), or compensated after it was done.
- A child whose steps are all done waits for the end of its parent: it completes or compensates with the parent.
- A parent that is going to compensate calls its running children off, and waits for their outcomes first.
- A message follows from a change of the journal in this turn, so no message is sent twice.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace
from uuid import UUID, uuid5

from outrider.errors import InvalidHandler, InvalidState
from outrider.saga.definition.children import (
    CALL_OFF,
    CHILD_COMPENSATED,
    CHILD_DONE,
    CHILD_REJECTED,
    PARENT_COMPENSATES,
    PARENT_COMPLETED,
    PARENT_STEP,
    ChildSaga,
)
from outrider.saga.definition.steps import Step, StepKind
from outrider.saga.model import (
    JournalEntry,
    MessageKind,
    NewSagaMessage,
    Phase,
    SagaMessage,
    Status,
    StepStatus,
)
from outrider.saga.planner.actions import key_of
from outrider.saga.planner.journal import OPEN, Journal

ENDED = frozenset({Status.COMPLETED, Status.COMPENSATED})

CALLED_OFF = "the parent is going to compensate"


def start(journal: Journal, step: Step, entry: JournalEntry) -> None:
    """Start the child of a step. An input that cannot be computed is a fault of the definition."""
    child, compute, instance = step.child, journal.definition.compute, journal.record.instance
    assert child
    assert compute
    items = () if step.item is None else (json.loads(step.item),)
    try:
        new = child.saga.child_of(instance, entry.step, compute(child.input, instance.state, *items))
    except (InvalidHandler, InvalidState) as error:
        name = getattr(child.input, "__name__", "input")
        said = journal.text_of(error)
        text = f"the input of its child, {name}, {said}; correct input= at {step.line}, then retry the saga"
        return journal.settle(entry, StepStatus.FAILED, text)
    journal.children.append(new)
    return journal.start(entry, f" starts {child.name}: {new.saga_id}")


def start_last_wait(journal: Journal) -> None:
    """Let a child whose steps are all done wait for the end of its parent."""
    position = sum(entry.phase is Phase.ACTION for entry in journal.lines.values()) + 1
    journal.start(JournalEntry(PARENT_STEP, Phase.ACTION, StepStatus.PLANNED, position))


def has_ended(journal: Journal, entry: JournalEntry) -> bool:
    """Tell whether a failed step had a child that has ended, so that a retry cannot change its outcome."""
    is_child = journal.kind(entry) is StepKind.CHILD
    return is_child and entry.reply_event_id is not None and entry.uncertainty is None


def awaited(journal: Journal) -> list[JournalEntry]:
    """Return the steps of the current phase that wait for a child."""
    return [entry for entry in journal.entries(journal.phase, OPEN) if journal.kind(entry) is StepKind.CHILD]


def call_off(journal: Journal, command: SagaMessage | None = None) -> bool:
    """Call off all running children; tell whether an outcome is still awaited.

    A child that is called off compensates as after its deadline: no outcome is guessed. Only the command of an operator
    gives up steps whose outcome is open. A child whose outcome could not be applied has ended its steps, and is not
    running.
    """
    started = journal.entries(Phase.ACTION, (StepStatus.STARTED,))
    running = [entry for entry in started if journal.kind(entry) is StepKind.CHILD]
    for entry in running:
        child, child_id = _child_of(journal, entry)
        passed_id = _passed_id(child_id, command) if command else None
        if entry.command_event_id is None:
            body = json.dumps({"actor": f"saga {journal.record.instance.saga_id}"}).encode()
            _command(journal, child, child_id, CALL_OFF, body, journal.command_id(entry))
        if command and passed_id and entry.command_event_id != passed_id:
            _command(journal, child, child_id, command.name, command.body, passed_id)
        called_off = replace(entry, command_event_id=passed_id or entry.command_event_id or journal.command_id(entry))
        if called_off != entry:
            journal.write(called_off, CALLED_OFF, "is called off")
    return bool(running)


def pass_on(journal: Journal, command: SagaMessage) -> list[JournalEntry]:
    """Pass an operator command on to the children for which a step waits, and return the steps."""
    entries = awaited(journal)
    for entry in entries:
        child, child_id = _child_of(journal, entry)
        _command(journal, child, child_id, command.name, command.body, _passed_id(child_id, command))
    return entries


def _passed_id(child_id: UUID, command: SagaMessage) -> UUID:
    return uuid5(child_id, f"{command.name} {command.event_id}")


def _command(  # noqa: PLR0917 - the parts of one message
    journal: Journal, child: ChildSaga, child_id: UUID, name: str, body: bytes, event_id: UUID
) -> None:
    message = NewSagaMessage(child_id, MessageKind.OPERATOR, name, None, body, event_id, child.saga_type)
    journal.messages.append(message)


def collect_messages(journal: Journal) -> None:
    """Add the messages that follow from this turn: compensations of children, and the outcome for the parent."""
    journal.messages += [*_compensations(journal), *_reports(journal), *_ends(journal)]


def _compensations(journal: Journal) -> Iterator[NewSagaMessage]:
    """Yield the messages that compensate children whose steps are done."""
    for step_key in journal.changed:
        entry = journal.lines[step_key]
        is_started = entry.phase is Phase.COMPENSATION and entry.status is StepStatus.STARTED
        is_new = is_started and not journal.was_started_before(step_key)
        if is_new and entry.command_event_id and journal.kind(entry) is StepKind.CHILD:
            child, child_id = _child_of(journal, entry)
            yield _to_child(child, child_id, PARENT_COMPENSATES, entry.command_event_id)


def _reports(journal: Journal) -> Iterator[NewSagaMessage]:
    """Yield the outcome of a child, for its parent."""
    instance = journal.record.instance
    if instance.parent_id is None or instance.parent_step is None:
        return
    key, name, body = key_of(instance.parent_id, instance.parent_step), "", b""
    was_done = any(entry.step == PARENT_STEP for entry in journal.record.journal)
    if journal.status is Status.COMPENSATED and instance.status is not Status.COMPENSATED:
        name = CHILD_COMPENSATED if was_done else CHILD_REJECTED
        body = json.dumps({"reason": journal.last_error}).encode()
    elif journal.awaits_parent and not was_done:
        name = CHILD_DONE
    if name:
        event_id = _message_id(journal, name, instance.parent_id)
        yield NewSagaMessage(instance.parent_id, MessageKind.REPLY, name, key, body, event_id)


def _ends(journal: Journal) -> Iterator[NewSagaMessage]:
    """Yield the messages that let the children of a saga that has ended complete."""
    if journal.status not in ENDED or journal.record.instance.status in ENDED:
        return
    for entry in journal.entries(Phase.ACTION, (StepStatus.DONE,)):
        is_undone = journal.has_status((entry.step, Phase.COMPENSATION), StepStatus.DONE)
        if journal.kind(entry) is StepKind.CHILD and entry.started_at and not is_undone:
            child, child_id = _child_of(journal, entry)
            yield _to_child(child, child_id, PARENT_COMPLETED, _message_id(journal, PARENT_COMPLETED, child_id))


def _to_child(child: ChildSaga, child_id: UUID, name: str, event_id: UUID) -> NewSagaMessage:
    key = key_of(child_id, PARENT_STEP)
    return NewSagaMessage(child_id, MessageKind.REPLY, name, key, b"{}", event_id, child.saga_type)


def _child_of(journal: Journal, entry: JournalEntry) -> tuple[ChildSaga, UUID]:
    child = journal.step(entry).child
    assert child
    return child.saga, child.saga.child_id(journal.record.instance.saga_id, entry.step)


def _message_id(journal: Journal, name: str, receiver: UUID) -> UUID:
    instance = journal.record.instance
    return uuid5(instance.saga_id, f"{name} {receiver} {instance.version} {journal.now.isoformat()}")
