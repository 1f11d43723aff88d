"""Compensation: the planner fixes the list at the start, and compensates in reverse order, one step at a time."""

from __future__ import annotations

from dataclasses import replace

from outrider.saga.definition.steps import StepKind
from outrider.saga.model import JournalEntry, Phase, Status, StepStatus
from outrider.saga.planner import children
from outrider.saga.planner.journal import OPEN, OUTSIDE, Journal

ANOTHER_REJECTED = "no longer awaited, because another step was rejected"

IDLE = frozenset({StepKind.WAIT, StepKind.SLEEP, StepKind.PARENT, StepKind.FOR_EACH})
"""Kinds of steps that have no effect of their own while they wait."""

GIVEN_UP = "given up, because an operator commanded compensation"


def begin(journal: Journal, reason: str = "") -> None:
    """Plan the compensations, last step first.

    Only an operator command starts compensation while a step is unresolved.
    """
    actions = journal.entries(Phase.ACTION)
    chosen = [entry for entry in reversed(actions) if needs_compensation(journal, entry)]
    for entry in actions:
        _close(journal, entry)
    journal.set_status(Status.COMPENSATING, reason)
    for position, entry in enumerate(chosen, start=1):
        journal.write(JournalEntry(entry.step, Phase.COMPENSATION, StepStatus.PLANNED, position=position))


def needs_compensation(journal: Journal, entry: JournalEntry) -> bool:
    """Tell whether a step needs compensation: the step is done or may have happened, and has a compensation."""
    if journal.step(entry).compensation is None:
        return False
    if journal.kind(entry) is StepKind.CHILD and entry.started_at is None:
        # An operator has settled a step whose child could not be started.
        return False
    if entry.status is StepStatus.DONE or (entry.step, Phase.COMPENSATION) in journal.lines:
        return True
    return may_have_happened(journal.kind(entry), entry)


def may_have_happened(kind: StepKind, entry: JournalEntry) -> bool:
    """Tell whether a step that is not done may have taken effect, or may still do so.

    A call that has only waited for its service has not: each attempt that may have had an effect leaves an uncertainty.
    Neither has a step that was not started: its condition was false or could not be computed.
    """
    if entry.started_at is None or entry.status is StepStatus.REJECTED or kind not in OUTSIDE:
        return False
    waited = kind is StepKind.CALL and entry.status is not StepStatus.STARTED
    return not waited or entry.uncertainty is not None


def _close(journal: Journal, entry: JournalEntry) -> None:
    """Close an open action before compensation starts.

    No alert is raised, because an operator commanded compensation.
    """
    if entry.status in (*OPEN, StepStatus.PLANNED):
        status = StepStatus.FAILED if may_have_happened(journal.kind(entry), entry) else StepStatus.REJECTED
        closed = replace(entry, status=status, due_at=None, error=GIVEN_UP, ended_at=journal.now)
        journal.write(replace(closed, uncertainty=None, undelivered=None, unavailable_since=None), GIVEN_UP)


def stop_idle_steps(journal: Journal, reason: str) -> bool:
    """Stop steps without an effect, and call off running children.

    Tell whether all other steps are settled, so compensation can start.
    """
    children.call_off(journal)
    for entry in journal.entries(Phase.ACTION, (*OPEN, StepStatus.PLANNED)):
        idle = entry.status is StepStatus.PLANNED or journal.kind(entry) in IDLE
        without_effect = entry.status is StepStatus.RETRYING and not may_have_happened(journal.kind(entry), entry)
        if idle or without_effect:
            error = entry.error or reason
            stopped = replace(entry, status=StepStatus.REJECTED, due_at=None, error=error, unavailable_since=None)
            journal.write(replace(stopped, ended_at=journal.now), error)
    return not journal.entries(Phase.ACTION, OPEN)


def start_next_compensation(journal: Journal) -> None:
    """Start the next compensation unless another is open. A failed compensation does not stop the others."""
    if journal.entries(Phase.COMPENSATION, OPEN):
        return
    if planned := journal.entries(Phase.COMPENSATION, (StepStatus.PLANNED,)):
        journal.start(planned[0])
    else:
        failed = journal.entries(Phase.COMPENSATION, (StepStatus.FAILED,))
        journal.set_status(Status.FAILED if failed else Status.COMPENSATED)
