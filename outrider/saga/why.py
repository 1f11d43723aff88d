"""Why a saga stands where it stands, in plain words: what it waits for, who has it, what comes next, what helps.

Pure: everything comes from a record of one moment. The kinds of steps are known to the definition only, so without it
the words are less precise, and never wrong.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from datetime import datetime
from typing import NamedTuple

from outrider.saga.graph import span
from outrider.saga.orders import actor_of
from outrider.saga.steps import Act, Definition, Kind, Step
from outrider.saga_store import Entry, Mail, MailKind, Phase, Progress, Record, Status

GRACE_SECONDS = 5.0
"""A worker looks every second, so what is overdue for longer has none."""

OPEN = (Progress.INTENDED, Progress.RETRYING)
OUTSIDE = (Kind.CALL, Kind.REQUEST)
RUN = "outrider saga run module:sagas"


class Help(NamedTuple):
    """A command, and what it does here."""

    command: str
    effect: str


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
    view = _View(record, definition)
    if record.instance.status in (Status.COMPLETED, Status.COMPENSATED):
        return Why(tuple(_over(view)))
    if record.instance.status is Status.FAILED:
        return Why((*_failed(view), *_orders(view), *_unheard(view)), (*_worker(view), *_ways_out(view)))
    return Why((*_open(view), *_orders(view), *_kept(view), _owner(view)), (*_worker(view), *_what_helps(view)))


@dataclass(frozen=True, slots=True)
class _View:
    """A record, and what is read from it more than once."""

    record: Record
    definition: Definition | None

    @property
    def phase(self) -> Phase:
        """Return whether the saga does or undoes. Before compensation begins, one is planned at most."""
        instance = self.record.instance
        if instance.status is Status.FAILED:
            begun = any(entry.progress is not Progress.PLANNED for entry in self.of(Phase.COMPENSATION))
            return Phase.COMPENSATION if begun else Phase.ACTION
        return Phase.COMPENSATION if instance.status is Status.COMPENSATING else Phase.ACTION

    def of(self, phase: Phase, *progress: Progress) -> list[Entry]:
        found = [e for e in self.record.journal if e.phase is phase and (not progress or e.progress in progress)]
        return sorted(found, key=lambda entry: entry.place)

    def step(self, entry: Entry) -> Step | None:
        return self.definition.steps.get(entry.step) if self.definition else None

    def act(self, entry: Entry) -> Act | None:
        if (step := self.step(entry)) is None:
            return None
        return step.action if entry.phase is Phase.ACTION else step.undo

    def stands(self, step: str | None, *progress: Progress) -> bool:
        return any(entry.step == step for entry in self.of(Phase.ACTION, *progress))

    @property
    def pivot(self) -> str | None:
        pivot = self.definition.pivot if self.definition else None
        return pivot.name if pivot else None

    @property
    def unread(self) -> list[Mail]:
        """Return mail that came after the last turn."""
        return [mail for mail in self.record.mail if mail.posted_at > self.record.instance.updated_at]

    @property
    def due_at(self) -> datetime | None:
        """Return since when somebody should have worked on it; or the end of the owner's claim, or its next time."""
        instance = self.record.instance
        times = [instance.wake_at] if instance.wake_at else []
        if instance.owner is None:
            times += [mail.posted_at for mail in self.unread]
        return min(times, default=None)

    @property
    def overdue_seconds(self) -> float:
        return (self.record.now - self.due_at).total_seconds() if self.due_at else -1.0

    @property
    def attended(self) -> bool:
        return self.record.instance.owner is not None and self.overdue_seconds < 0

    @property
    def what_runs_it(self) -> str:
        return f"version {self.record.instance.definition_version} of {self.record.instance.saga_type}"

    def at(self, moment: datetime | None) -> str:
        """Say when, by the clock on the wall and from now."""
        if moment is None:
            return "an unknown time"
        seconds = (moment - self.record.now).total_seconds()
        away = f"in {span(seconds)}" if seconds > 0 else f"{span(-seconds)} ago"
        return f"{moment.astimezone():%Y-%m-%d %H:%M:%S} ({away})"


def _over(view: _View) -> Iterator[str]:
    instance = view.record.instance
    for entry in view.of(Phase.ACTION, Progress.REFUSED, Progress.FAILED):
        yield f"step {entry.step} was {entry.progress}: {entry.error or 'no reason was given'}"
    what = "everything is done" if instance.status is Status.COMPLETED else "what was done before is undone"
    yield f"{instance.status} at {view.at(instance.ended_at)}: {what}, and nothing more happens"


def _failed(view: _View) -> Iterator[str]:
    failed = view.of(view.phase, Progress.FAILED)
    for entry in failed:
        yield f"{_named(entry)} has failed after {_attempts(entry)}: {entry.error or 'no reason was given'}"
    if not failed:
        yield view.record.instance.last_error or "it has failed, and no reason was given"
    yield f"it stands still since {view.at(view.record.instance.ended_at)}, until a person decides"


def _ways_out(view: _View) -> Iterator[Help]:
    saga_id = view.record.instance.saga_id
    refused = any("answered by" in (entry.error or "") for entry in view.of(view.phase, Progress.FAILED))
    but = "; a participant that has refused gives the same answer under the same key" if refused else ""
    yield Help(f"outrider saga retry {saga_id}", f"tries again what has failed, as often as at first{but}")
    if view.of(view.phase, Progress.FAILED):
        yield Help(f"outrider saga resume {saga_id}", "goes on as if that were done, if you have settled it by hand")
    if view.phase is Phase.ACTION and not view.stands(view.pivot, Progress.DONE):
        yield Help(f"outrider saga compensate {saga_id}", f"undoes what is done or may have happened{_but(view)}")


def _open(view: _View) -> Iterator[str]:
    waiting = view.of(view.phase, *OPEN)
    for entry in waiting:
        yield _retrying(view, entry) if entry.progress is Progress.RETRYING else _intended(view, entry)
    for entry in view.of(view.phase, Progress.FAILED):
        yield f"{_named(entry)} has failed after {_attempts(entry)}: {entry.error or 'no reason was given'}"
    if view.phase is Phase.COMPENSATION and (planned := view.of(view.phase, Progress.PLANNED)):
        yield f"still to be undone: {', '.join(entry.step for entry in planned)}"
    if not waiting:
        yield "no step has begun yet" if not view.record.journal else "the next step is to begin"


def _retrying(view: _View, entry: Entry) -> str:
    act = view.act(entry)
    of = f" of {act.retry.max_attempts}" if act else ""
    return (
        f"{_named(entry)} did not succeed in attempt {entry.attempts}{of}: {entry.error or 'no reason was given'}; "
        f"the next attempt is due {view.at(entry.due_at)}"
    )


def _intended(view: _View, entry: Entry) -> str:
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


def _asked(view: _View, entry: Entry, act: Act) -> str:
    times = "asked once" if entry.attempts == 1 else f"asked {entry.attempts} times"
    again = entry.attempts < act.retry.max_attempts
    then = "it is asked again after" if again else "after the last attempt, a person must look from"
    return f"{times} since {view.at(entry.intended_at)}; {then} {view.at(entry.due_at)}"


def _unknown_kind(view: _View, entry: Entry) -> str:
    what = "is being done" if view.record.instance.owner else "waits for an answer, an event or a time"
    until = f"; the next look at it is due {view.at(entry.due_at)}" if entry.due_at else ""
    return f"{_named(entry)} {what}, attempt {entry.attempts}, begun {view.at(entry.intended_at)}{until}"


def _orders(view: _View) -> Iterator[str]:
    for mail in view.record.mail:
        if mail.kind is MailKind.ORDER:
            held = mail.name == "compensate" and view.stands(view.pivot, *OPEN)
            when = f"once the pivot {view.pivot} has come to an end" if held else "next"
            yield f"{actor_of(mail)} ordered {mail.name} {view.at(mail.posted_at)}: a worker acts on it {when}"


def _kept(view: _View) -> Iterator[str]:
    for mail in view.record.mail:
        if mail.kind is MailKind.REPLY:
            why = "nobody has read it yet" if mail in view.unread else "kept for a step that is still to come"
            yield f"the event {mail.name} came {view.at(mail.posted_at)}: {why}"


def _owner(view: _View) -> str:
    owner, overdue = view.record.instance.owner, view.overdue_seconds
    if overdue >= GRACE_SECONDS:
        held = f"; {owner} held it until then, and has not renewed its claim" if owner else ""
        return (
            f"overdue since {view.at(view.due_at)}: nobody works on it{held}. No worker that holds {view.what_runs_it} "
            "is running, or all of them are busy"
        )
    if overdue >= 0:
        return "it is due now, and the next worker that looks takes it"
    if owner:
        return f"{owner} works on it, and has it until {view.at(view.due_at)}, or longer if it renews that"
    if view.due_at is None:
        return "no worker need look at it before an answer or an order comes"
    return f"no worker need look at it before {view.at(view.due_at)}, or an answer or an order comes"


def _unheard(view: _View) -> Iterator[str]:
    """Say that there is nobody to act on an order; without one, a failed saga needs no worker."""
    if view.overdue_seconds >= GRACE_SECONDS:
        yield _owner(view)


def _worker(view: _View) -> Iterator[Help]:
    if view.overdue_seconds >= GRACE_SECONDS:
        yield Help(RUN, f"runs a worker, if {view.what_runs_it} is among its sagas")


def _what_helps(view: _View) -> Iterator[Help]:
    saga_id, waiting = view.record.instance.saga_id, view.of(view.phase, *OPEN)
    if any(entry.progress is Progress.RETRYING for entry in waiting):
        yield Help(f"outrider saga retry {saga_id}", "makes the next attempt due now")
    if any(_awaited(view, entry) for entry in waiting):
        yield Help(f"outrider saga resume {saga_id}", "counts what it waits for as done, if you know that it is")
    if view.phase is Phase.ACTION and not view.stands(view.pivot, Progress.DONE):
        yield Help(f"outrider saga compensate {saga_id}", f"gives it up, and undoes what is done{_but(view)}")


def _but(view: _View) -> str:
    """Say what compensation cannot do: undo what may have happened and has no undo, or anything after the pivot."""
    if view.definition is None:
        return ", unless its pivot is done"
    outside = [(entry, view.step(entry)) for entry in view.of(Phase.ACTION, Progress.FAILED, *OPEN)]
    left = [entry.step for entry, step in outside if step and step.kind in OUTSIDE and step.undo is None]
    return f"; see first that {', '.join(left)} did not happen, since it has no undo" if left else ""


def _awaited(view: _View, entry: Entry) -> bool:
    step, act = view.step(entry), view.act(entry)
    if step is None or act is None:
        return view.record.instance.owner is None and entry.progress is Progress.INTENDED
    return act.command is not None or step.kind is Kind.SLEEP


def _named(entry: Entry) -> str:
    return f"step {entry.step}" if entry.phase is Phase.ACTION else f"the undoing of step {entry.step}"


def _attempts(entry: Entry) -> str:
    return "1 attempt" if entry.attempts == 1 else f"{entry.attempts} attempts"
