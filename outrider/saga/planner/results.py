"""Results of attempts, and their effect on a step.

- `rejected`: the effect did not happen and will not happen. A call whose last attempt raised is rejected too, but the
  effect may have happened, so a compensation is planned immediately.
- A step whose outcome is still unknown after the last attempt is `failed`: to compensate and to continue might both be
  wrong. One attempt with an unknown outcome is enough for `failed`, because its effect may still happen when a later
  attempt raises.
- Sending the command and applying the reply have separate retry budgets. A command that has not left the outbox counts
  no attempt.
- A compensation cannot be rejected: the result is done or failed.
- An unavailable service costs no attempt: the attempt had no effect. The step waits, up to a limit of its own, and is
  then failed: an outage compensates nothing.
- A lost worker costs no attempt. Losses in a row are counted apart, and too many make the saga failed, never rejected.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from datetime import timedelta

from outrider.saga.definition.steps import StepKind
from outrider.saga.model import LOSSES_MAX, JournalEntry, Phase, StepStatus, Uncertainty, Undelivered
from outrider.saga.planner import replies
from outrider.saga.planner.actions import (
    Claimed,
    Input,
    InvalidResult,
    Outage,
    Raised,
    RejectedResult,
    Result,
    Succeeded,
    UnavailableResult,
)
from outrider.saga.planner.journal import ANSWERED, HERE, OPEN, Journal

UNKNOWN = "unknown whether it happened"

RAISED = "raised in its last attempt"

LOST = "the worker was lost before it reported a result"

NOT_BEGUN = "it had not begun"


def apply_inputs(journal: Journal, inputs: Iterable[Input]) -> None:
    """Apply the results of this worker's calls and local functions."""
    for result in inputs:
        if isinstance(result, Claimed):
            continue
        entry = journal.lines.get((result.step, result.phase))
        if entry is None or not _expected(journal, entry):
            what = type(result).__name__.lower()
            journal.note("result ignored", result.step, f"{result.phase} {what}, but no step waits for it any more")
            continue
        journal.audit_late_reply(entry)
        _apply(journal, entry, result)
    if journal.lost is None and not _awaited_results(journal):
        journal.losses = 0


def _awaited_results(journal: Journal) -> list[JournalEntry]:
    """Return the steps that this worker still runs. Without such a step, the saga has not caused the losses."""
    started = (entry for entry in journal.record.journal if entry.status is StepStatus.STARTED)
    here = (entry for entry in started if journal.kind(entry) in HERE)
    return [entry for entry in here if journal.lines[entry.step, entry.phase] is entry]


def _expected(journal: Journal, entry: JournalEntry) -> bool:
    if journal.kind(entry) in HERE:
        return entry.status is StepStatus.STARTED
    return entry.status in OPEN or entry.is_unresolved


def _apply(journal: Journal, entry: JournalEntry, result: Result) -> None:
    match result:
        case Succeeded(result=data):
            journal.settle(replace(entry, data=data), StepStatus.DONE)
        case RejectedResult(error=error):
            apply_rejection(journal, entry, error)
        case Raised(error=error, reply=True):
            retry_reply(journal, entry, error)
        case Raised(error=error):
            apply_exception(journal, entry, error)
        case UnavailableResult(error=error, retry_after_seconds=seconds):
            journal.retry_count -= entry.attempts > 1
            journal.wait_for_service(replace(entry, attempts=entry.attempts - 1), Outage(error, seconds))
        case InvalidResult(error=error) if replies.current(journal, entry):
            retry_reply(journal, entry, error, permanent=True)
        case InvalidResult(error=error):
            journal.settle(entry, StepStatus.FAILED, error, uncertainty=_after_error(journal, entry))
        case _:
            apply_unknown_outcome(journal, entry, f"no result within {journal.action(entry).timeout_seconds} s")


def apply_rejection(journal: Journal, entry: JournalEntry, error: str) -> None:
    """Reject a step that declined.

    For a request or a child, a compensation is planned, because its reply proves that the effect happened.
    """
    if entry.phase is Phase.COMPENSATION:
        journal.settle(entry, StepStatus.FAILED, error)
    elif journal.kind(entry) in (StepKind.REQUEST, StepKind.CHILD):
        reject_and_compensate(journal, entry, error)
    else:
        journal.reject(entry, error)


def apply_exception(journal: Journal, entry: JournalEntry, error: str) -> None:
    """Retry a step after an exception, or end the step. An earlier unknown outcome is preserved."""
    uncertainty = _earlier_uncertainty(entry)
    if uncertainty:
        error = f"{UNKNOWN} before; it raised: {error}"
    if journal.retry(entry, error, _after_error(journal, entry)):
        return
    if entry.phase is Phase.COMPENSATION or journal.kind(entry) in ANSWERED or uncertainty:
        journal.settle(entry, StepStatus.FAILED, error, uncertainty=uncertainty)
    elif journal.kind(entry) is StepKind.LOCAL:
        journal.settle(entry, StepStatus.REJECTED, f"{RAISED}, and was rolled back: {error}", "raised")
    else:
        reject_and_compensate(journal, entry, error, after=f"{RAISED}, and may have happened: ")


def _earlier_uncertainty(entry: JournalEntry) -> Uncertainty | None:
    return entry.uncertainty if entry.uncertainty is Uncertainty.OUTCOME_UNKNOWN else None


def _after_error(journal: Journal, entry: JournalEntry) -> Uncertainty | None:
    """Return the uncertainty after an error: the effect of a call may have happened before the error."""
    raised = Uncertainty.RAISED if journal.kind(entry) is StepKind.CALL else None
    return _earlier_uncertainty(entry) or raised


def retry_reply(journal: Journal, entry: JournalEntry, error: str, *, permanent: bool = False) -> None:
    """Retry the application of a reply; the command is not sent again.

    After the last attempt, another reply replaces the failed reply. Without another reply, the failed reply is kept.
    """
    error, answer = f"its reply cannot be applied: {error}", replies.current(journal, entry)
    uncertainty, reply_event_id = Uncertainty.REPLY_NOT_APPLIED, entry.reply_event_id
    again = entry.uncertainty is uncertainty and (answer is None or reply_event_id in (None, answer.event_id))
    if answer and not again:
        replies.set_aside(journal, entry)
    entry = replace(
        entry,
        attempts=entry.attempts + 1 if again else 1,
        uncertainty=uncertainty,
        undelivered=None,
        reply_event_id=answer.event_id if answer else reply_event_id,
        error=error,
    )
    if not permanent and journal.retry(entry, error, uncertainty):
        return
    if replies.another(journal, entry):
        replies.set_aside(journal, entry)
        renewed = replace(entry, attempts=0, due_at=journal.now, reply_event_id=None, ended_at=None)
        journal.write(replace(renewed, status=StepStatus.RETRYING), "another reply has arrived")
    else:
        journal.settle(entry, StepStatus.FAILED, error, uncertainty=uncertainty)


def reject_and_compensate(journal: Journal, entry: JournalEntry, error: str, after: str = "") -> None:
    """Reject a step and plan its compensation. Without a compensation, the step fails and an operator must decide."""
    if journal.step(entry).compensation is None:
        return journal.settle(entry, StepStatus.FAILED, error, uncertainty=_after_error(journal, entry))
    journal.settle(entry, StepStatus.REJECTED, after + error, "raised" if after else "")
    return journal.write(
        JournalEntry(entry.step, Phase.COMPENSATION, StepStatus.PLANNED, position=0), "it may have happened"
    )


def apply_unknown_outcome(journal: Journal, entry: JournalEntry, error: str) -> None:
    """Retry a step with an unknown outcome, with the same key.

    A local function is rolled back, so its outcome is known.
    """
    if journal.kind(entry) is StepKind.LOCAL:
        return apply_exception(journal, entry, error)
    error, uncertainty = f"{UNKNOWN}: {error}", Uncertainty.OUTCOME_UNKNOWN
    if not journal.retry(entry, error, uncertainty):
        journal.settle(entry, StepStatus.FAILED, error, uncertainty=uncertainty)
    return None


def restart_interrupted(journal: Journal) -> None:
    """Repeat the attempts of a lost worker, with the same key and at no cost.

    The outcome of a call is unknown; a local function was rolled back. After too many losses in a row, the steps fail,
    because one of them may be the cause.
    """
    begun = journal.lost.begun if journal.lost else None
    journal.lost = None
    is_given_up = journal.losses >= LOSSES_MAX
    for entry in _interrupted(journal):
        uncertainty = Uncertainty.OUTCOME_UNKNOWN if journal.kind(entry) is StepKind.CALL else entry.uncertainty
        if is_given_up:
            journal.settle(entry, StepStatus.FAILED, lost_text(journal.losses), uncertainty=uncertainty)
        elif begun is not None and (entry.step, entry.phase, entry.attempts) not in begun:
            journal.repeat(entry, NOT_BEGUN)
        elif uncertainty:
            journal.repeat(replace(entry, error=f"{UNKNOWN}: {LOST}", uncertainty=uncertainty), LOST)
        else:
            journal.repeat(entry, LOST)
    if is_given_up:
        journal.losses = 0


def lost_text(losses: int) -> str:
    """Return the reason why a saga that was lost too often is given to an operator.

    >>> lost_text(20)
    'its worker was lost 20 times in a row; it may be the cause: see the logs of the workers, then retry'
    """
    return f"its worker was lost {losses} times in a row; it may be the cause: see the logs of the workers, then retry"


def is_lost_outside_of_steps(journal: Journal) -> bool:
    """Tell whether too many workers were lost while they ran no step: in a payload, in a reply, or in the planner."""
    return journal.lost is not None and journal.losses >= LOSSES_MAX and not _interrupted(journal)


def _interrupted(journal: Journal) -> list[JournalEntry]:
    started = journal.entries(journal.phase, (StepStatus.STARTED,))
    return [entry for entry in started if journal.kind(entry) in HERE]


def apply_deadlines(journal: Journal) -> None:
    """Apply expired deadlines. The worker itself measures the time of calls and local functions."""
    for entry in journal.entries(journal.phase, OPEN):
        if entry.due_at is None or entry.due_at > journal.now or is_retry_suspended(journal, entry):
            continue
        if entry.status is StepStatus.RETRYING:
            # A step with a reply is not started again; if the reply raised in this turn, the next turn reads the reply.
            if (entry.step, entry.phase) not in journal.unreadable:
                journal.start(entry)
        else:
            _on_timeout(journal, entry)


def is_retry_suspended(journal: Journal, entry: JournalEntry) -> bool:
    """Tell whether a retry waits because the saga will compensate. Only the pivot is still retried."""
    return entry.status is StepStatus.RETRYING and journal.compensation_requested and not journal.step(entry).pivot


def _on_timeout(journal: Journal, entry: JournalEntry) -> None:
    seconds = journal.action(entry).timeout_seconds
    undelivered = journal.undelivered.get(entry.command_event_id) if entry.command_event_id else None
    match journal.kind(entry):
        case StepKind.SLEEP:
            journal.settle(entry, StepStatus.DONE)
        case StepKind.WAIT:
            error = f"nothing came within {seconds} s"
            journal.settle(entry, StepStatus.REJECTED, error, uncertainty=Uncertainty.NO_EVENT)
        case StepKind.REQUEST if undelivered or entry.undelivered:
            _extend_deadline(journal, entry, undelivered)
        case StepKind.REQUEST:
            apply_unknown_outcome(journal, entry, f"no answer within {seconds} s")


def _extend_deadline(journal: Journal, entry: JournalEntry, undelivered: Undelivered | None) -> None:
    """Extend the deadline of a command that has not left the outbox, without counting an attempt.

    After the command has left, the step waits the full timeout once more.
    """
    text = _describe_undelivered(journal, entry, undelivered)
    uncertainty = f"{UNKNOWN} before" if _earlier_uncertainty(entry) else ""
    error = "; ".join(filter(None, (uncertainty, text))) or None
    waiting = replace(entry, due_at=journal.deadline(entry), undelivered=undelivered)
    if undelivered and entry.undelivered is undelivered:
        return journal.update(waiting)
    journal.write(replace(waiting, error=error), text or "the command has left the outbox", "is waited for")
    journal.last_error = error
    if undelivered is Undelivered.DEAD_LETTER:
        journal.attention.append(f"{entry.phase} of {entry.step} is not sent: {text}")
    return None


def _describe_undelivered(journal: Journal, entry: JournalEntry, undelivered: Undelivered | None) -> str:
    if undelivered is None:
        return ""
    if undelivered is Undelivered.DEAD_LETTER:
        remedy = f"remove its cause, and run: outrider dead-letters replay {entry.command_event_id}"
        return f"its command is a dead letter; {remedy}"
    assert entry.due_at
    since = entry.due_at - timedelta(seconds=journal.action(entry).timeout_seconds or 0)
    return f"its command is still in the outbox (pending since {since:%Y-%m-%d %H:%M:%S} UTC; is a relay running?)"
