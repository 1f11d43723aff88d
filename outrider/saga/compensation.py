"""Undoing: the plan for it is frozen when it begins, and followed backwards, one step at a time."""

from __future__ import annotations

from dataclasses import replace

from outrider.saga.journal import OPEN, OUTSIDE, Journal
from outrider.saga.steps import Kind
from outrider.saga_store import Entry, Phase, Progress, Status

GIVEN_UP = "given up, as compensation was ordered"


def begin(journal: Journal) -> None:
    """Freeze what is to be undone, last first. Only an order begins while something is unresolved, and includes it."""
    actions = journal.of(Phase.ACTION)
    chosen = [entry for entry in reversed(actions) if to_be_undone(journal, entry)]
    for entry in actions:
        _close(journal, entry)
    journal.become(Status.COMPENSATING)
    for place, entry in enumerate(chosen, start=1):
        journal.write(Entry(entry.step, Phase.COMPENSATION, Progress.PLANNED, place=place))


def to_be_undone(journal: Journal, entry: Entry) -> bool:
    """Tell whether a step belongs into the plan: it is done, or it may have happened, and there is an undo."""
    if journal.step(entry).undo is None:
        return False
    if entry.progress is Progress.DONE or (entry.step, Phase.COMPENSATION) in journal.lines:
        return True
    return entry.progress is not Progress.REFUSED and journal.kind(entry) in OUTSIDE


def _close(journal: Journal, entry: Entry) -> None:
    """Let no action be open beside a compensation. Nobody alarms: it was a person who ordered this."""
    if entry.progress in OPEN:
        progress = Progress.FAILED if journal.kind(entry) in OUTSIDE else Progress.REFUSED
        journal.write(replace(entry, progress=progress, due_at=None, error=GIVEN_UP, ended_at=journal.now), GIVEN_UP)


def let_go(journal: Journal) -> bool:
    """Stop what has no effect yet; tell whether everything else is settled too, so that undoing may begin."""
    for entry in journal.of(Phase.ACTION, OPEN):
        idle = journal.kind(entry) in (Kind.WAIT, Kind.SLEEP)
        rolled_back = journal.kind(entry) is Kind.LOCAL and entry.progress is Progress.RETRYING
        if idle or rolled_back:
            error = entry.error or "not awaited any more, as another step was refused"
            journal.write(
                replace(entry, progress=Progress.REFUSED, due_at=None, error=error, ended_at=journal.now), error
            )
    return not journal.of(Phase.ACTION, OPEN)


def go_back(journal: Journal) -> None:
    """Undo the next step, if none is being undone. What failed is passed over: the others are undone all the same."""
    if journal.of(Phase.COMPENSATION, OPEN):
        return
    if planned := journal.of(Phase.COMPENSATION, (Progress.PLANNED,)):
        journal.intend(planned[0])
    else:
        failed = journal.of(Phase.COMPENSATION, (Progress.FAILED,))
        journal.become(Status.FAILED if failed else Status.COMPENSATED)
