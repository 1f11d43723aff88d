"""Assignment of replies to steps: a reply is taken now, kept for later, or dropped.

- A step takes a reply if the step waits for the reply or has failed without the reply, even while the saga is stopped.
- Early events are kept, one per wait step. A reply that arrives before its command was sent is ignored.
- A reply that the state could not apply is kept until a newer reply arrives.
- Replies for which no step will ever wait are dropped, to keep the mailbox small.
- The key identifies the step. A reply without a key goes to the first step that waits for the event type.
- Only one step takes an event, even if the event is delivered several times.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import replace

from outrider.redaction import ErrorText, Redactor
from outrider.saga.definition.children import FAMILY_MESSAGES
from outrider.saga.definition.steps import FAMILY, Step, StepKind
from outrider.saga.model import JournalEntry, MessageKind, Phase, SagaMessage, StepStatus, Uncertainty
from outrider.saga.planner.actions import ApplyReply, key_of
from outrider.saga.planner.journal import OPEN, Journal, StepKey

REPLIES_PER_KEY_MAX = 2
REPLIES_MAX = 100
"""Limits on replies kept for a saga that cannot read its mailbox: per name and key, and in total."""


def read(journal: Journal) -> None:
    """Assign replies to waiting steps."""
    for message in replies(journal):
        for step_key in matching_steps(journal, message):
            if _waits(journal, step_key, message):
                _take(journal, journal.lines[step_key], message)
                break


def _waits(journal: Journal, step_key: StepKey, message: SagaMessage) -> bool:
    return step_key not in journal.unreadable and _can_take(journal, step_key, message)


def _can_take(journal: Journal, step_key: StepKey, message: SagaMessage) -> bool:
    entry = journal.lines.get(step_key)
    if entry is None or entry.phase is not journal.phase or not _asked(journal, entry):
        return False
    if _not_applied(entry) and entry.status is StepStatus.RETRYING:
        due = entry.due_at is None or entry.due_at <= journal.now
        return due and entry.reply_event_id in (None, message.event_id)
    if _not_applied(entry) and entry.reply_event_id == message.event_id:
        return False
    return entry.status in OPEN or entry.is_unresolved


def _not_applied(entry: JournalEntry) -> bool:
    return entry.uncertainty is Uncertainty.REPLY_NOT_APPLIED


def _asked(journal: Journal, entry: JournalEntry) -> bool:
    """Tell whether a reply is possible: the command was staged in an earlier turn. A wait step needs no command."""
    return journal.kind(entry) is not StepKind.REQUEST or journal.was_started_before((entry.step, entry.phase))


def current(journal: Journal, entry: JournalEntry) -> SagaMessage | None:
    """Return the reply that a step would take now: the reply that has just raised, if any."""
    step_key = entry.step, entry.phase
    found = (message for message in replies(journal) if step_key in matching_steps(journal, message))
    return next((message for message in found if _can_take(journal, step_key, message)), None)


def another(journal: Journal, entry: JournalEntry) -> SagaMessage | None:
    """Return a further reply to a step, besides the reply that the step cannot apply."""
    step_key = entry.step, entry.phase
    others = (message for message in replies(journal) if message.event_id != entry.reply_event_id)
    return next((message for message in others if step_key in matching_steps(journal, message)), None)


def set_aside(journal: Journal, entry: JournalEntry) -> None:
    """Drop the reply that a step could not apply."""
    for message in replies(journal):
        if message.event_id == entry.reply_event_id:
            journal.taken[message.message_id] = None
            journal.note("reply set aside", entry.step, f"{message.name} ({message.event_id}): {entry.error}")


def replies(journal: Journal) -> list[SagaMessage]:
    """Return the replies that no step has taken."""
    return [message for message in journal.unread if message.kind is MessageKind.REPLY]


def matching_steps(journal: Journal, message: SagaMessage) -> Iterator[StepKey]:
    """Yield the steps and phases that may take a reply; none, if a step has already taken the same event."""
    if any(entry.reply_event_id == message.event_id and _settled(entry) for entry in journal.lines.values()):
        return
    keyed = [step for step in journal.definition.steps.values() if _key(journal, step) == message.key]
    named = bool(keyed) and any(_answers(keyed[0], phase, message.name) for phase in Phase)
    for step in keyed if named else journal.definition.steps.values():
        # An event from outside the saga has its own key or no key; only a wait step takes such an event. A message of
        # another saga always names the step.
        if named or (step.kind not in FAMILY and (message.key is None or step.kind is StepKind.WAIT)):
            yield from ((step.name, phase) for phase in Phase if _answers(step, phase, message.name))


def _settled(entry: JournalEntry) -> bool:
    return entry.status not in (*OPEN, StepStatus.PLANNED) and not entry.is_unresolved


def _key(journal: Journal, step: Step) -> str:
    return key_of(journal.record.instance.saga_id, step.name)


def _answers(step: Step, phase: Phase, name: str) -> bool:
    action = step.action if phase is Phase.ACTION else step.compensation
    command = action.command if action else None
    return command is not None and name in (command.reply, command.rejection)


def _take(journal: Journal, entry: JournalEntry, message: SagaMessage) -> None:
    journal.taken[message.message_id] = None
    again = _not_applied(entry) and entry.reply_event_id in (None, message.event_id)
    if _not_applied(entry):
        set_aside(journal, entry)
    entry = replace(entry, reply_event_id=message.event_id)
    step = journal.step(entry)
    if message.name in step.reply_functions:
        attempt = entry.attempts + 1 if again else 1
        journal.actions.append(ApplyReply(entry.step, entry.phase, message, attempt, step.item))
    elif step.into is not None and entry.phase is Phase.ACTION:
        entry = replace(entry, data=message.body.decode())
    journal.audit_late_reply(entry)
    command = journal.action(entry).command
    if command is not None and message.name == command.rejection:
        reason = rejection_of(message, journal.kind(entry), journal.record.instance.state, journal.error_text)
        journal.reject(entry, reason)
    else:
        journal.settle(entry, StepStatus.DONE, f"answered by {message.name}")


def rejection_of(
    message: SagaMessage,
    kind: StepKind = StepKind.REQUEST,
    state: bytes = b"null",
    error_text: ErrorText = ErrorText.REDACTED,
) -> str:
    """Describe a rejection, with the `reason` of the payload if there is a reason.

    A reason is a text for people, and is redacted as the text of an error: it may quote the payload and the state.

    >>> from datetime import UTC, datetime
    >>> from uuid import UUID
    >>> body = b'{"reason": "out of stock"}'
    >>> rejection_of(SagaMessage(1, MessageKind.REPLY, "stock.refused", None, body, UUID(int=1), datetime.now(UTC)))
    'answered by stock.refused: out of stock'
    """
    try:
        payload = json.loads(message.body)
    except (ValueError, RecursionError):
        payload = None
    reason = payload.pop("reason", None) if isinstance(payload, dict) else None
    if reason:
        reason = Redactor(error_text, state, payload).text(reason if isinstance(reason, str) else json.dumps(reason))
    texts = {StepKind.CHILD: "its child has compensated itself", StepKind.PARENT: "its parent compensates"}
    return texts.get(kind, f"answered by {message.name}") + (f": {reason}" if reason else "")


def drop_unneeded(journal: Journal) -> None:
    """Drop replies for which no step will wait, and duplicate replies for a step.

    If a step could not apply its reply, the newest further reply is kept as well.
    """
    kept: dict[StepKey, SagaMessage] = {}
    stuck = {
        step_key: entry.reply_event_id
        for step_key, entry in journal.lines.items()
        if _not_applied(entry) and _can_wait(journal, step_key)
    }
    for message in replies(journal):
        if message.event_id in stuck.values():
            continue
        free = (p for p in matching_steps(journal, message) if p in stuck or p not in kept)
        step_key = next((p for p in free if _can_wait(journal, p)), None)
        if step_key is None:
            _drop(journal, message)
        else:
            if step_key in kept:
                _drop(journal, kept[step_key])
            kept[step_key] = message


def _drop(journal: Journal, message: SagaMessage) -> None:
    journal.taken[message.message_id] = None
    journal.note("reply dropped", None, f"{message.name}: no step waits for it, or will")


def make_room(journal: Journal) -> None:
    """Drop the surplus replies of a saga that cannot read its mailbox."""
    if dropped := surplus(journal.unread):
        journal.taken.update(dict.fromkeys(message.message_id for message in dropped))
        names = ", ".join(sorted({message.name for message in dropped}))
        journal.note("replies dropped", None, f"{len(dropped)} of {names}: newer ones are kept")


def surplus(unread: Sequence[SagaMessage]) -> list[SagaMessage]:
    """Return the replies to drop for a saga that cannot assign its replies to steps.

    The newest replies of each name and key stay, up to a total limit. A message of a child or of the parent is not sent
    again, so the newest of each key stays in any case; their number is limited by the steps.
    """
    counts: Counter[tuple[str, str | None]] = Counter()
    kept, dropped = 0, []
    for message in reversed([message for message in unread if message.kind is MessageKind.REPLY]):
        counts[message.name, message.key] += 1
        if message.name in FAMILY_MESSAGES and message.key is not None and counts[message.name, message.key] == 1:
            continue
        if counts[message.name, message.key] > REPLIES_PER_KEY_MAX or kept >= REPLIES_MAX:
            dropped.append(message)
        else:
            kept += 1
    return dropped


def _can_wait(journal: Journal, step_key: StepKey) -> bool:
    if step_key[1] is not journal.phase:
        return False
    if step_key not in journal.lines:
        # A reply cannot arrive before its command, so the reply was meant for another step or another attempt.
        return journal.definition.steps[step_key[0]].kind is StepKind.WAIT
    return _asked(journal, journal.lines[step_key]) and journal.has_status(step_key, *OPEN, StepStatus.FAILED)
