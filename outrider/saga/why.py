"""Why a saga stands where it stands, in plain words: what it waits for, who has it, what comes next, what helps.

Pure: everything comes from a record of one moment. The kinds of steps are known to the definition only, so without it
the words are less precise, and never wrong.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from outrider.saga.doubt import RAISED, missed, unsent, untaken
from outrider.saga.orders import actor_of
from outrider.saga.remedies import Help, ways_out, what_helps, worker
from outrider.saga.steps import Act, Definition, Kind
from outrider.saga.view import GRACE_SECONDS, OPEN, OUTSIDE, View
from outrider.saga_store import Entry, Mail, MailKind, Phase, Progress, Record, Status


class Why(NamedTuple):
    """The reasons, most important first, and the commands that help."""

    reasons: tuple[str, ...]
    helps: tuple[Help, ...] = ()


def explain(record: Record, definition: Definition | None = None) -> Why:
    """Say why a saga stands where it stands.

    With the definition of its version it also says what each step waits for::

        record = await store.desk.show(saga_id)
        print("\\n".join(explain(record, order.definition).reasons))
    """
    view = View(record, definition)
    if record.instance.status in (Status.COMPLETED, Status.COMPENSATED):
        return Why(tuple(_over(view)))
    if record.instance.status is Status.FAILED:
        reasons = (*_failed(view), *_orders(view), *_kept(view), *_unheard(view))
        return Why(reasons, (*worker(view), *ways_out(view)))
    return Why((*_open(view), *_orders(view), *_kept(view), _owner(view)), (*worker(view), *what_helps(view)))


def _over(view: View) -> Iterator[str]:
    instance = view.record.instance
    for entry in view.of(Phase.ACTION, Progress.REFUSED, Progress.FAILED):
        raised = (entry.error or "").startswith(RAISED)
        yield f"step {entry.step} {entry.error}" if raised else f"step {entry.step} {_ended(entry)}"
    what = "everything is done" if instance.status is Status.COMPLETED else "what was done before is undone"
    yield f"{instance.status} at {view.at(instance.ended_at)}: {what}, and nothing more happens"


def _failed(view: View) -> Iterator[str]:
    failed = view.of(view.phase, Progress.FAILED)
    for entry in failed:
        yield f"{_named(entry)} has failed after {_attempts(entry)}: {entry.error or 'no reason was given'}"
        if missed(entry) and (act := view.act(entry)) and act.command:
            which = "another answer" if untaken(entry) else "the answer"
            yield f"should {which} to {_named(entry)} come after all, that settles it"
    if not failed:
        yield view.record.instance.last_error or "it has failed, and no reason was given"
    yield f"it stands still since {view.at(view.record.instance.ended_at)}, until a person decides"


def _open(view: View) -> Iterator[str]:
    waiting = view.of(view.phase, *OPEN)
    for entry in waiting:
        yield _retrying(view, entry) if entry.progress is Progress.RETRYING else _intended(view, entry)
    for entry in view.of(view.phase, Progress.FAILED):
        yield f"{_named(entry)} has failed after {_attempts(entry)}: {entry.error or 'no reason was given'}"
    if view.phase is Phase.COMPENSATION and (planned := view.of(view.phase, Progress.PLANNED)):
        yield f"still to be undone: {', '.join(entry.step for entry in planned)}"
    if not waiting:
        yield "no step has begun yet" if not view.record.journal else "the next step is to begin"


def _retrying(view: View, entry: Entry) -> str:
    if entry.error is None:
        return f"{_named(entry)} is to be begun, due {view.at(entry.due_at)}"
    act = view.act(entry)
    of = f" of {act.retry.max_attempts}" if act else ""
    return (
        f"{_named(entry)} did not succeed in attempt {entry.attempts}{of}: {entry.error}; "
        f"the next attempt is due {view.at(entry.due_at)}"
    )


def _intended(view: View, entry: Entry) -> str:
    step, act = view.step(entry), view.act(entry)
    command = act.command if act else None
    if step is None or act is None:
        return _unknown_kind(view, entry)
    if step.kind is Kind.SLEEP:
        return f"{_named(entry)} lets time pass until {view.at(entry.due_at)}"
    if command and not command.event_type:
        then = f"; if it has not come by {view.at(entry.due_at)}, that counts as refused" if entry.due_at else ""
        return f"{_named(entry)} waits for the event {command.reply} since {view.at(entry.intended_at)}{then}"
    if command:
        replies = " or ".join(reply for reply in (command.reply, command.refusal) if reply)
        return f"waits for reply {replies} of {_named(entry)}, {_asked(view, entry, act)}"
    begun = f"attempt {entry.attempts}, begun {view.at(entry.intended_at)}"
    if view.attended:
        return f"{_named(entry)} is being done, {begun}"
    return f"{_named(entry)} was being done when its worker let go of it, {begun}; the next one does it again, same key"


def _asked(view: View, entry: Entry, act: Act) -> str:
    if unsent(entry):
        return f"and costs it nothing: {entry.error}; the next look is due {view.at(entry.due_at)}"
    times = "asked once" if entry.attempts == 1 else f"asked {entry.attempts} times"
    again = entry.attempts < act.retry.max_attempts
    then = "it is asked again after" if again else "after the last attempt, a person must look from"
    return f"{times} since {view.at(entry.intended_at)}; {then} {view.at(entry.due_at)}"


def _unknown_kind(view: View, entry: Entry) -> str:
    what = "is being done" if view.record.instance.owner else "waits for an answer, an event or a time"
    until = f"; the next look at it is due {view.at(entry.due_at)}" if entry.due_at else ""
    return f"{_named(entry)} {what}, attempt {entry.attempts}, begun {view.at(entry.intended_at)}{until}"


def _orders(view: View) -> Iterator[str]:
    for mail in view.record.mail:
        if mail.kind is MailKind.ORDER:
            when = _once(view) if mail.name == "compensate" else "next"
            yield f"{actor_of(mail)} ordered {mail.name} {view.at(mail.posted_at)}: a worker acts on it {when}"


def _once(view: View) -> str:
    """Say what an order to compensate waits for: the pivot, and calls that are under way."""
    for entry in view.of(Phase.ACTION, *OPEN):
        step = view.step(entry)
        if step and step.pivot and step.kind in OUTSIDE:
            return f"once the pivot {entry.step} has come to an end"
        if step and step.kind is Kind.CALL and entry.progress is Progress.INTENDED and view.attended:
            return f"once the call {entry.step} has come to an end"
    return "next"


def _kept(view: View) -> Iterator[str]:
    for mail in view.record.mail:
        if mail.kind is MailKind.REPLY:
            why = "nobody has read it yet" if mail in view.unread else _keeper(view, mail)
            yield f"the event {mail.name} came {view.at(mail.posted_at)}: {why}"


def _keeper(view: View, mail: Mail) -> str:
    """Say which step has an answer that it could not take in; any other is early."""
    for entry in view.of(view.phase, Progress.RETRYING, Progress.FAILED):
        act = view.act(entry)
        if act and act.command and mail.name in (act.command.reply, act.command.refusal):
            how = "which could not take it in" if untaken(entry) else "which retry makes take it"
            return f"kept for {_named(entry)}, {how}"
    failed = view.definition is None and view.record.instance.status is Status.FAILED
    return "kept for a step that has failed, or is still to come" if failed else "kept for a step that is still to come"


def _owner(view: View) -> str:
    owner, overdue = view.record.instance.owner, view.overdue_seconds
    if overdue >= GRACE_SECONDS:
        held = f"; {owner} held it until then, and has not renewed its claim" if owner else ""
        return (
            f"overdue since {view.at(view.due_at)}: nobody works on it{held}. No worker that holds {view.what_runs_it} "
            "is running, or all of them are busy"
        )
    if overdue >= 0:
        return f"it is due now, and the next worker that holds {view.what_runs_it} takes it"
    if owner:
        return f"{owner} works on it, and has it until {view.at(view.due_at)}, or longer if it renews that"
    if view.due_at is None:
        return "no worker need look at it before an answer or an order comes"
    return f"no worker need look at it before {view.at(view.due_at)}, or an answer or an order comes"


def _unheard(view: View) -> Iterator[str]:
    """Say that there is nobody to act on an order; without one, a failed saga needs no worker."""
    if view.overdue_seconds >= GRACE_SECONDS:
        yield _owner(view)


def _named(entry: Entry) -> str:
    return f"step {entry.step}" if entry.phase is Phase.ACTION else f"the undoing of step {entry.step}"


def _ended(entry: Entry) -> str:
    how = "failed" if entry.progress is Progress.FAILED else "was refused"
    return f"{how}: {entry.error or 'no reason was given'}"


def _attempts(entry: Entry) -> str:
    return "1 attempt" if entry.attempts == 1 else f"{entry.attempts} attempts"
