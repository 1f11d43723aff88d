"""How an attempt ended, and what that makes of its step.

- `refused`: it did not happen and will not. A call whose last attempt raised counts as refused too, but it may have
  happened: a compensation is planned beside it at once, so that nobody forgets.
- An outcome that is still unknown after the last attempt is `failed`: undoing might be wrong, and so might going on.
  One attempt whose outcome is unknown is enough for that: it may still be on its way when a later one raises.
- Asking and taking the answer in have a budget each. A command that has not left the outbox was not asked yet.
- A compensation cannot be refused. It is done, or it failed.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from datetime import timedelta

from outrider.saga import mailbox
from outrider.saga.doubt import (
    BEFORE,
    BURIED,
    NOTHING_CAME,
    RAISED,
    UNKNOWN,
    UNSENT,
    UNTAKEN,
    buried,
    doubted,
    missed,
    unsent,
    untaken,
)
from outrider.saga.journal import ANSWERED, HERE, OPEN, Journal
from outrider.saga.news import Claimed, Declined, News, Raised, Result, Succeeded, Unfit
from outrider.saga.steps import Kind
from outrider.saga_store import Entry, Phase, Progress, Undelivered

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
        journal.note_late(entry)
        _apply(journal, entry, result)


def _expected(journal: Journal, entry: Entry) -> bool:
    if journal.kind(entry) in HERE:
        return entry.progress is Progress.INTENDED
    return entry.progress in OPEN or missed(entry)


def _apply(journal: Journal, entry: Entry, result: Result) -> None:
    match result:
        case Succeeded():
            journal.settle(entry, Progress.DONE)
        case Declined(error=error):
            declined(journal, entry, error)
        case Raised(error=error, reply=True):
            unfit_reply(journal, entry, error)
        case Raised(error=error):
            raised(journal, entry, error)
        case Unfit(error=error) if mailbox.current(journal, entry):
            unfit_reply(journal, entry, error, hopeless=True)
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
    """An attempt failed. What an earlier one may have done is not forgotten over it."""
    if doubted(entry):
        error = f"{BEFORE}it raised: {error}"
    if journal.retry(entry, error):
        return
    if entry.phase is Phase.COMPENSATION or journal.kind(entry) in ANSWERED or doubted(entry):
        journal.settle(entry, Progress.FAILED, error)
    elif journal.kind(entry) is Kind.LOCAL:
        journal.settle(entry, Progress.REFUSED, f"{RAISED}, and was rolled back: {error}", "raised")
    else:
        refused_but_perhaps_done(journal, entry, error, after=f"{RAISED}, and may have happened: ")


def unfit_reply(journal: Journal, entry: Entry, error: str, *, hopeless: bool = False) -> None:
    """The answer is there, and could not be taken in: that is tried again, and nothing is asked again.

    After its attempts another answer takes its place, if there is one; else it stays until there is.
    """
    error, answer = f"{UNTAKEN}: {error}", mailbox.current(journal, entry)
    again = untaken(entry) and (answer is None or entry.event_id in (None, answer.event_id))
    if answer and not again:
        mailbox.set_aside(journal, entry)
    event_id = answer.event_id if answer else entry.event_id
    entry = replace(entry, attempts=entry.attempts + 1 if again else 1, event_id=event_id, error=error)
    if not hopeless and journal.retry(entry, error):
        return
    if mailbox.another(journal, entry):
        mailbox.set_aside(journal, entry)
        renewed = replace(entry, attempts=0, due_at=journal.now, event_id=None, ended_at=None)
        journal.write(replace(renewed, progress=Progress.RETRYING), "another answer has come")
    else:
        journal.settle(entry, Progress.FAILED, error)


def refused_but_perhaps_done(journal: Journal, entry: Entry, error: str, after: str = "") -> None:
    """Count a step as refused and plan its compensation; without one, a person must say what is true."""
    if journal.step(entry).undo is None:
        return journal.settle(entry, Progress.FAILED, error)
    journal.settle(entry, Progress.REFUSED, after + error, "raised" if after else "")
    return journal.write(Entry(entry.step, Phase.COMPENSATION, Progress.PLANNED, place=0), "it may have happened")


def unknown(journal: Journal, entry: Entry, error: str) -> None:
    """Nobody knows whether it happened: ask again, with the same key. A local function is rolled back, so one knows."""
    if journal.kind(entry) is Kind.LOCAL:
        return raised(journal, entry, error)
    error = f"{UNKNOWN}: {error}"
    if not journal.retry(entry, error):
        journal.settle(entry, Progress.FAILED, error)
    return None


def pick_up(journal: Journal) -> None:
    """Begin again what a lost worker had begun: with the same key, and at the cost of an attempt."""
    begun = journal.lost.begun if journal.lost else None
    journal.lost = None
    for entry in journal.of(journal.phase, (Progress.INTENDED,)):
        if journal.kind(entry) not in HERE:
            continue
        if begun is not None and (entry.step, entry.phase, entry.attempts) not in begun:
            journal.retry_count -= entry.attempts > 1
            journal.intend(replace(entry, attempts=entry.attempts - 1))
        elif entry.attempts >= journal.act(entry).retry.max_attempts:
            unknown(journal, entry, LOST)
        else:
            rolled_back = journal.kind(entry) is Kind.LOCAL
            journal.intend(entry if rolled_back else replace(entry, error=f"{UNKNOWN}: {LOST}"))


def pass_time(journal: Journal) -> None:
    """Apply the deadlines that have come. Calls and local functions are timed by the worker that does them."""
    for entry in journal.of(journal.phase, OPEN):
        if entry.due_at is None or entry.due_at > journal.now or held(journal, entry):
            continue
        if entry.progress is Progress.RETRYING:
            # What has been answered is not asked again; when the answer raised in this turn, the next one reads it.
            if (entry.step, entry.phase) not in journal.unreadable:
                journal.intend(entry)
        else:
            _patience_is_over(journal, entry)


def held(journal: Journal, entry: Entry) -> bool:
    """Tell whether an attempt is not made again, since the saga is about to be undone; the pivot must be found out."""
    return entry.progress is Progress.RETRYING and journal.giving_up and not journal.step(entry).pivot


def _patience_is_over(journal: Journal, entry: Entry) -> None:
    seconds = journal.act(entry).timeout_seconds
    where = journal.undelivered.get(entry.event_id) if entry.event_id else None
    match journal.kind(entry):
        case Kind.SLEEP:
            journal.settle(entry, Progress.DONE)
        case Kind.WAIT:
            journal.settle(entry, Progress.REFUSED, f"{NOTHING_CAME} within {seconds} s")
        case Kind.REQUEST if where or unsent(entry):
            _ask_for_patience(journal, entry, where)
        case Kind.REQUEST:
            unknown(journal, entry, f"no answer within {seconds} s")


def _ask_for_patience(journal: Journal, entry: Entry, where: Undelivered | None) -> None:
    """Wait on, at no cost, for an answer to what nobody was asked yet; once it has left, for as long as at first."""
    told = _standstill(journal, entry, where)
    error = f"{BEFORE}{told}".removesuffix("; ") if doubted(entry) else told or None
    on = replace(entry, due_at=journal.patience(entry))
    if where and unsent(entry) and buried(entry) is (where is Undelivered.BURIED):
        return journal.amend(on)
    journal.write(replace(on, error=error), told or "the command has left the outbox", "is waited for")
    journal.last_error = error
    if where is Undelivered.BURIED:
        journal.attention.append(f"{entry.phase} of {entry.step} is not asked for: {told}")
    return None


def _standstill(journal: Journal, entry: Entry, where: Undelivered | None) -> str:
    if where is None:
        return ""
    if where is Undelivered.BURIED:
        return f"{BURIED}; put right what it says, and run: outrider dead replay {entry.event_id}"
    assert entry.due_at
    since = entry.due_at - timedelta(seconds=journal.act(entry).timeout_seconds or 0)
    return f"{UNSENT} (pending since {since:%Y-%m-%d %H:%M:%S} UTC; is a relay running?)"
