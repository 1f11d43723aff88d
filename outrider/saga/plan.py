"""The plan, purely: what to do next with a saga, given its journal, its mail, the time, and what a worker has to tell.

- Nothing is decided twice differently: the same record and the same news give the same plan.
- Replies come before orders, which are looked at in the situation that is true then, and both before deadlines.
- Nothing is undone while something may still happen, but by order; and nothing at all once the pivot is done.
- A failed saga goes on by order, or when the answer for whose want it has failed comes after all.
- Everything that is intended is journaled before it is done, so that after a crash anybody can go on.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from types import MappingProxyType
from uuid import UUID

from outrider.saga import compensation, mailbox, orders, outcomes
from outrider.saga.doubt import TOO_LATE, buried
from outrider.saga.journal import HERE, OPEN, Journal, Place
from outrider.saga.news import (
    Absorb,
    Call,
    Claimed,
    Declined,
    Local,
    Move,
    News,
    Plan,
    Raised,
    Send,
    Succeeded,
    TimedOut,
    Unfit,
    key_of,
    wanted,
)
from outrider.saga.outline import drift
from outrider.saga.steps import Definition
from outrider.saga_store import Entry, Phase, Progress, Record, Status, Undelivered

__all__ = [
    "Absorb",
    "Call",
    "Claimed",
    "Declined",
    "Local",
    "Move",
    "News",
    "Plan",
    "Raised",
    "Send",
    "Succeeded",
    "TimedOut",
    "Unfit",
    "advance",
    "key_of",
    "overdue",
    "wanted",
]

NOTHING: Mapping[UUID, Undelivered] = MappingProxyType({})
OVER = frozenset({Status.COMPLETED, Status.COMPENSATED})


def advance(
    definition: Definition,
    record: Record,
    news: Sequence[News],
    chance: random.Random,
    undelivered: Mapping[UUID, Undelivered] = NOTHING,
) -> Plan:
    """Decide a turn. The first one after a claim is told `Claimed()`, so that what was under way is begun again.

    The record's mail and time are of one moment: with an old mailbox and a new time, a reply would be missed. Of the
    commands that are `overdue`, those that have not left the outbox are given, since their step is not charged.

    ```python
    plan = advance(order.definition, record, [Claimed()], random.Random())
    ```
    """
    journal = Journal(
        definition,
        record,
        chance,
        lost=next((item for item in news if isinstance(item, Claimed)), None),
        unreadable=frozenset(_unreadable(news)),
        undelivered=undelivered,
    )
    if error := _strangers(definition, record) or drift(definition, record):
        return _estranged(journal, error)
    outcomes.hear(journal, news)
    _settle_down(journal)
    mailbox.tidy(journal)
    return _plan(journal)


def overdue(record: Record) -> list[UUID]:
    """Return the commands whose time is over, so that somebody must look whether they have left at all.

    ```python
    undelivered = await store.undelivered(tx, overdue(record))
    ```
    """
    waiting = (entry for entry in record.journal if entry.progress is Progress.INTENDED and entry.event_id)
    return [entry.event_id for entry in waiting if entry.event_id and entry.due_at and entry.due_at <= record.now]


def _unreadable(news: Sequence[News]) -> Iterator[Place]:
    for item in news:
        if isinstance(item, Unfit) or (isinstance(item, Raised) and item.reply):
            yield item.step, item.phase


def _settle_down(journal: Journal) -> None:
    """Apply one thing after the other until nothing changes: what begins now may be answered already."""
    changes = -1
    while changes != len(journal.notes):
        changes = len(journal.notes)
        mailbox.read(journal)
        _go_on_if_answered(journal)
        orders.obey(journal)
        if journal.lost and journal.status is not Status.FAILED:
            outcomes.pick_up(journal)
        _decide(journal)


def _go_on_if_answered(journal: Journal) -> None:
    """Go on if everything that had failed is answered by now. A saga that was parked has nothing that failed."""
    _fail_what_was_refused_too_late(journal)
    had_failed = any(
        (entry.phase, entry.progress) == (journal.phase, Progress.FAILED) for entry in journal.record.journal
    )
    if journal.status is Status.FAILED and had_failed and not journal.of(journal.phase, (Progress.FAILED,)):
        journal.become(Status.COMPENSATING if journal.begun else Status.RUNNING, "what was not known is answered")


def _fail_what_was_refused_too_late(journal: Journal) -> None:
    if journal.past_pivot:
        for entry in journal.of(Phase.ACTION, (Progress.REFUSED,)):
            journal.settle(entry, Progress.FAILED, f"{TOO_LATE}: {entry.error}")


def _decide(journal: Journal) -> None:
    if journal.status is Status.STARTED:
        journal.become(Status.RUNNING)
    if not halted(journal):
        outcomes.pass_time(journal)
    if journal.status is Status.RUNNING:
        _go_on(journal)
    elif journal.status is Status.COMPENSATING:
        compensation.go_back(journal)


def halted(journal: Journal) -> bool:
    """Tell whether the saga has stopped, or stops as soon as what is under way here has ended."""
    if journal.status is Status.RUNNING:
        return bool(journal.of(Phase.ACTION, (Progress.FAILED,)))
    return journal.status is not Status.COMPENSATING


def _go_on(journal: Journal) -> None:
    _fail_what_was_refused_too_late(journal)
    if halted(journal):
        if not under_way(journal):
            journal.become(Status.FAILED)
    elif journal.of(Phase.ACTION, (Progress.REFUSED,)):
        if compensation.let_go(journal):
            compensation.begin(journal)
    else:
        _begin_ready(journal)


def _begin_ready(journal: Journal) -> None:
    """Begin every step whose predecessors are all done."""
    done = {entry.step for entry in journal.of(Phase.ACTION, (Progress.DONE,))}
    if done.issuperset(journal.definition.steps):
        return journal.become(Status.COMPLETED)
    if journal.giving_up:
        return None
    for step in journal.definition.steps.values():
        if (step.name, Phase.ACTION) not in journal.lines and done.issuperset(step.after):
            place = len(journal.of(Phase.ACTION)) + 1
            journal.intend(Entry(step.name, Phase.ACTION, Progress.PLANNED, place))
    return None


def under_way(journal: Journal) -> list[Entry]:
    """Return what a worker is doing itself, so that it must keep its claim."""
    if journal.status is Status.FAILED:
        return []
    intended = journal.of(journal.phase, (Progress.INTENDED,))
    return [entry for entry in intended if journal.kind(entry) in HERE]


def _plan(journal: Journal) -> Plan:
    record = journal.record
    standing = journal.of(journal.phase, (*OPEN, Progress.FAILED))
    failed = [entry for entry in standing if entry.progress is Progress.FAILED]
    return Plan(
        instance=replace(
            record.instance,
            status=journal.status,
            current_step=next((entry.step for entry in failed or standing), None),
            last_error=None if journal.status in OVER else journal.last_error,
            retry_count=journal.retry_count,
            needs_attention=bool(failed) or journal.status is Status.FAILED or any(map(buried, standing)),
        ),
        entries=tuple(journal.lines[place] for place in journal.changed),
        taken=tuple(journal.taken),
        seen=tuple(mail.mail_id for mail in journal.letters),
        notes=tuple(journal.notes),
        moves=journal.still_wanted(),
        release=not under_way(journal),
        wake_seconds=_wake_seconds(journal),
        attention=tuple(journal.attention),
    )


def _wake_seconds(journal: Journal) -> float | None:
    """Return how long nothing can happen but by news and mail; None if that is for ever."""
    if halted(journal):
        return None
    busy = under_way(journal)
    waiting = [entry for entry in journal.of(journal.phase, OPEN) if entry not in busy]
    due = [entry.due_at for entry in waiting if entry.due_at and not outcomes.held(journal, entry)]
    return max(0.0, (min(due) - journal.now).total_seconds()) if due else None


def _known(definition: Definition, entry: Entry) -> bool:
    step = definition.steps.get(entry.step)
    return step is not None and (entry.phase is Phase.ACTION or step.undo is not None)


def _strangers(definition: Definition, record: Record) -> str | None:
    """Say what the journal has and the definition has not."""
    strangers = [entry.step for entry in record.journal if not _known(definition, entry)]
    if not strangers:
        return None
    return (
        f"version {definition.version} of {definition.saga_type} has no {', '.join(strangers)}, or no undo of it, and "
        "the journal has; give the changed definition a new version, and keep the old one until its sagas have ended"
    )


def _estranged(journal: Journal, error: str) -> Plan:
    """Stop a saga whose definition was changed under it; its journal stays as it is."""
    instance = journal.record.instance
    if instance.status in OVER:
        return Plan(instance, taken=tuple(mail.mail_id for mail in journal.letters), release=True)
    if instance.status is not Status.FAILED:
        journal.attention.append(error)
        journal.become(Status.FAILED, error)
    orders.ignore(journal, error)
    mailbox.make_room(journal)
    return Plan(
        replace(instance, status=Status.FAILED, last_error=error, needs_attention=True),
        taken=tuple(journal.taken),
        seen=tuple(mail.mail_id for mail in journal.letters),
        notes=tuple(journal.notes),
        release=True,
        attention=tuple(journal.attention),
    )
