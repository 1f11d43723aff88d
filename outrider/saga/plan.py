"""The plan, purely: what to do next with a saga, given its journal, its mail, the time, and what a worker has to tell.

- Nothing is decided twice differently: the same record and the same news give the same plan.
- Orders come before replies, and replies before deadlines, so an answer that came with the deadline counts.
- Nothing is undone while something may still happen, but by order; and nothing at all once the pivot is done.
- Everything that is intended is journaled before it is done, so that after a crash anybody can go on.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import replace

from outrider.saga import compensation, mailbox, orders, outcomes
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
from outrider.saga.steps import Definition
from outrider.saga_store import Entry, Phase, Progress, Record, Status

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
    "wanted",
]

OVER = frozenset({Status.COMPLETED, Status.COMPENSATED})


def advance(definition: Definition, record: Record, news: Sequence[News], chance: random.Random) -> Plan:
    """Decide a turn. The first one after a claim is told `Claimed()`, so that what was under way is begun again.

    The record's mail and time are of one moment: with an old mailbox and a new time, a reply would be missed.

    ```python
    plan = advance(order.definition, record, [Claimed()], random.Random())
    ```
    """
    journal = Journal(definition, record, chance)
    if strangers := [entry.step for entry in record.journal if not _known(definition, entry)]:
        return _estranged(journal, strangers)
    outcomes.hear(journal, news)
    _settle_down(journal, news)
    mailbox.tidy(journal)
    return _plan(journal)


def _settle_down(journal: Journal, news: Sequence[News]) -> None:
    """Apply one thing after the other until nothing changes: what begins now may be answered already."""
    unreadable: set[Place] = {(item.step, item.phase) for item in news if isinstance(item, Raised | Unfit)}
    lost = any(isinstance(item, Claimed) for item in news)
    changes = -1
    while changes != len(journal.notes):
        changes = len(journal.notes)
        orders.obey(journal)
        mailbox.read(journal, unreadable)
        if lost and journal.status is not Status.FAILED:
            outcomes.pick_up(journal)
            lost = False
        _decide(journal)


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
    refused = journal.of(Phase.ACTION, (Progress.REFUSED,))
    if journal.past_pivot:
        for entry in refused:
            journal.settle(entry, Progress.FAILED, f"refused after the pivot: {entry.error}")
    if halted(journal):
        if not under_way(journal):
            journal.become(Status.FAILED)
    elif refused:
        if compensation.let_go(journal):
            compensation.begin(journal)
    else:
        _begin_ready(journal)


def _begin_ready(journal: Journal) -> None:
    """Begin every step whose predecessors are all done."""
    done = {entry.step for entry in journal.of(Phase.ACTION, (Progress.DONE,))}
    if done.issuperset(journal.definition.steps):
        return journal.become(Status.COMPLETED)
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
            last_error=journal.last_error,
            retry_count=journal.retry_count,
            needs_attention=bool(failed),
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
    due = [entry.due_at for entry in journal.of(journal.phase, OPEN) if entry.due_at and entry not in busy]
    return max(0.0, (min(due) - journal.now).total_seconds()) if due else None


def _known(definition: Definition, entry: Entry) -> bool:
    step = definition.steps.get(entry.step)
    return step is not None and (entry.phase is Phase.ACTION or step.undo is not None)


def _estranged(journal: Journal, strangers: Sequence[str]) -> Plan:
    """Stop a saga whose definition was changed under it; its journal stays as it is."""
    instance = journal.record.instance
    if instance.status in OVER:
        return Plan(instance, taken=tuple(mail.mail_id for mail in journal.letters), release=True)
    name = f"version {journal.definition.version} of {journal.definition.saga_type}"
    error = (
        f"{name} has no {', '.join(strangers)}, or no undo of it, and the journal has; give the changed definition a "
        "new version, and keep the old one until its sagas have ended"
    )
    if instance.status is not Status.FAILED:
        journal.attention.append(error)
        journal.become(Status.FAILED)
    orders.ignore(journal, error)
    return Plan(
        replace(instance, status=Status.FAILED, last_error=error, needs_attention=True),
        taken=tuple(journal.taken),
        seen=tuple(mail.mail_id for mail in journal.letters),
        notes=tuple(journal.notes),
        release=True,
        attention=tuple(journal.attention),
    )
