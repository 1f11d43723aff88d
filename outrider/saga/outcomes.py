"""How an attempt ended, and what that makes of its step.

- `refused`: it did not happen and will not. A call whose last attempt raised counts as refused too, but it may have
  happened: a compensation is planned beside it at once, so that nobody forgets.
- An outcome that is still unknown after the last attempt is `failed`: undoing might be wrong, and so might going on.
- A compensation cannot be refused. It is done, or it failed.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

from outrider.saga.journal import ANSWERED, HERE, OPEN, Journal
from outrider.saga.news import Claimed, Declined, News, Raised, Result, Succeeded, Unfit
from outrider.saga.steps import Kind
from outrider.saga_store import Entry, Phase, Progress

LOST = "the worker was lost before it could tell"


def hear(journal: Journal, news: Iterable[News]) -> None:
    """Apply what this worker's own calls and local functions have come to."""
    for result in news:
        if isinstance(result, Claimed):
            continue
        entry = journal.lines.get((result.step, result.phase))
        if entry is None or not _expected(journal, entry):
            what = type(result).__name__.lower()
            journal.note("result ignored", result.step, f"{result.phase} {what}, but nobody waits for it any more")
            continue
        _apply(journal, entry, result)


def _expected(journal: Journal, entry: Entry) -> bool:
    if journal.kind(entry) in HERE:
        return entry.progress is Progress.INTENDED
    return entry.progress in OPEN


def _apply(journal: Journal, entry: Entry, result: Result) -> None:
    match result:
        case Succeeded():
            journal.settle(entry, Progress.DONE)
        case Declined(error=error):
            declined(journal, entry, error)
        case Raised(error=error):
            raised(journal, entry, error)
        case Unfit(error=error):
            journal.settle(entry, Progress.FAILED, error)
        case _:
            unknown(journal, entry, f"no result within {journal.act(entry).timeout_seconds} s")


def declined(journal: Journal, entry: Entry, error: str) -> None:
    """It did not happen and will not. A reply that is declined came from something that did happen."""
    if entry.phase is Phase.COMPENSATION:
        journal.settle(entry, Progress.FAILED, error)
    elif journal.kind(entry) is Kind.REQUEST:
        refused_but_perhaps_done(journal, entry, error)
    else:
        journal.settle(entry, Progress.REFUSED, error)


def raised(journal: Journal, entry: Entry, error: str) -> None:
    """An attempt failed."""
    kind = journal.kind(entry)
    if kind in ANSWERED and entry.attempts < journal.act(entry).retry.max_attempts:
        # Nothing is sent again, since the answer is there; so the attempt is counted here.
        entry = replace(entry, attempts=entry.attempts + 1)
    if journal.retry(entry, error):
        return
    if entry.phase is Phase.COMPENSATION or kind in ANSWERED:
        journal.settle(entry, Progress.FAILED, error)
    elif kind is Kind.LOCAL:
        journal.settle(entry, Progress.REFUSED, error)
    else:
        refused_but_perhaps_done(journal, entry, error)


def refused_but_perhaps_done(journal: Journal, entry: Entry, error: str) -> None:
    """Count a step as refused and plan its compensation; without one, a person must say what is true."""
    if journal.step(entry).undo is None:
        return journal.settle(entry, Progress.FAILED, error)
    journal.settle(entry, Progress.REFUSED, error)
    return journal.write(Entry(entry.step, Phase.COMPENSATION, Progress.PLANNED, place=0), "it may have happened")


def unknown(journal: Journal, entry: Entry, error: str) -> None:
    """Nobody knows whether it happened: ask again, with the same key. A local function is rolled back, so one knows."""
    if journal.kind(entry) is Kind.LOCAL:
        return raised(journal, entry, error)
    if not journal.retry(entry, error):
        journal.settle(entry, Progress.FAILED, f"unknown whether it happened: {error}")
    return None


def pick_up(journal: Journal) -> None:
    """Begin again what a lost worker had begun: with the same key, and at the cost of an attempt."""
    for entry in journal.of(journal.phase, (Progress.INTENDED,)):
        if journal.kind(entry) not in HERE:
            continue
        if entry.attempts < journal.act(entry).retry.max_attempts:
            journal.intend(entry)
        else:
            unknown(journal, entry, LOST)


def pass_time(journal: Journal) -> None:
    """Apply the deadlines that have come. Calls and local functions are timed by the worker that does them."""
    for entry in journal.of(journal.phase, OPEN):
        if entry.due_at is None or entry.due_at > journal.now:
            continue
        if entry.progress is Progress.RETRYING:
            journal.intend(entry)
        else:
            _patience_is_over(journal, entry)


def _patience_is_over(journal: Journal, entry: Entry) -> None:
    seconds = journal.act(entry).timeout_seconds
    match journal.kind(entry):
        case Kind.SLEEP:
            journal.settle(entry, Progress.DONE)
        case Kind.WAIT:
            journal.settle(entry, Progress.REFUSED, f"nothing came within {seconds} s")
        case Kind.REQUEST:
            unknown(journal, entry, f"no answer within {seconds} s")
