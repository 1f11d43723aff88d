"""Compensation: the planner fixes the list at the start, and compensates in reverse order, one step at a time."""

from __future__ import annotations

from dataclasses import replace

from outrider.saga.definition.steps import StepKind
from outrider.saga.model import JournalEntry, Phase, Status, StepStatus
from outrider.saga.planner.journal import OPEN, OUTSIDE, Journal

GIVEN_UP = "given up, as compensation was ordered"


def begin(journal: Journal) -> None:
    """Plan the compensations, last step first.

    Only an operator command starts compensation while a step is unresolved.
    """
    actions = journal.of(Phase.ACTION)
    chosen = [entry for entry in reversed(actions) if to_be_compensated(journal, entry)]
    for entry in actions:
        _close(journal, entry)
    journal.become(Status.COMPENSATING)
    for position, entry in enumerate(chosen, start=1):
        journal.write(JournalEntry(entry.step, Phase.COMPENSATION, StepStatus.PLANNED, position=position))


def to_be_compensated(journal: Journal, entry: JournalEntry) -> bool:
    """Tell whether a step needs compensation: the step is done or may have happened, and has a compensation."""
    if journal.step(entry).compensation is None:
        return False
    if entry.status is StepStatus.DONE or (entry.step, Phase.COMPENSATION) in journal.lines:
        return True
    return entry.status is not StepStatus.REJECTED and journal.kind(entry) in OUTSIDE


def _close(journal: Journal, entry: JournalEntry) -> None:
    """Close an open action before compensation starts.

    No alert is raised, because an operator commanded compensation.
    """
    if entry.status in OPEN:
        status = StepStatus.FAILED if journal.kind(entry) in OUTSIDE else StepStatus.REJECTED
        closed = replace(entry, status=status, due_at=None, error=GIVEN_UP, ended_at=journal.now)
        journal.write(replace(closed, uncertainty=None, undelivered=None), GIVEN_UP)


def let_go(journal: Journal) -> bool:
    """Stop steps without an effect; tell whether all other steps are settled, so compensation can start."""
    for entry in journal.of(Phase.ACTION, OPEN):
        idle = journal.kind(entry) in (StepKind.WAIT, StepKind.SLEEP)
        rolled_back = journal.kind(entry) is StepKind.LOCAL and entry.status is StepStatus.RETRYING
        if idle or rolled_back:
            error = entry.error or "not awaited any more, as another step was rejected"
            journal.write(
                replace(entry, status=StepStatus.REJECTED, due_at=None, error=error, ended_at=journal.now), error
            )
    return not journal.of(Phase.ACTION, OPEN)


def go_back(journal: Journal) -> None:
    """Start the next compensation unless another is open. A failed compensation does not stop the others."""
    if journal.of(Phase.COMPENSATION, OPEN):
        return
    if planned := journal.of(Phase.COMPENSATION, (StepStatus.PLANNED,)):
        journal.start(planned[0])
    else:
        failed = journal.of(Phase.COMPENSATION, (StepStatus.FAILED,))
        journal.become(Status.FAILED if failed else Status.COMPENSATED)
