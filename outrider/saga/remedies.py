"""What helps a saga that stands still: commands, and what each of them does here. Pure, as the reasons are."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from outrider.saga.steps import Kind
from outrider.saga.view import GRACE_SECONDS, OPEN, OUTSIDE, View
from outrider.saga_store import Entry, Phase, Progress

RUN = "outrider saga run module:sagas"


class Help(NamedTuple):
    """A command, and what it does here."""

    command: str
    effect: str


def ways_out(view: View) -> Iterator[Help]:
    """Yield the orders that a saga takes which has failed."""
    saga_id = view.record.instance.saga_id
    refused = any("answered by" in (entry.error or "") for entry in view.of(view.phase, Progress.FAILED))
    but = "; a participant that has refused gives the same answer under the same key" if refused else ""
    if not view.of(view.phase, Progress.FAILED):
        yield Help(f"outrider saga retry {saga_id}", "goes on where it stood, once that is put right")
    else:
        yield Help(f"outrider saga retry {saga_id}", f"tries again what has failed, as often as at first{but}")
        yield Help(f"outrider saga resume {saga_id}", "goes on as if that were done, if you have settled it by hand")
    if view.phase is Phase.ACTION and not view.stands(view.pivot, Progress.DONE):
        yield Help(f"outrider saga compensate {saga_id}", f"undoes what is done or may have happened{_but(view)}")


def worker(view: View) -> Iterator[Help]:
    """Yield how to run a worker, if none has looked at it for long."""
    if view.overdue_seconds >= GRACE_SECONDS:
        yield Help(RUN, f"runs a worker, if {view.what_runs_it} is among its sagas")


def what_helps(view: View) -> Iterator[Help]:
    """Yield the orders that a saga takes which has not failed."""
    saga_id, waiting = view.record.instance.saga_id, view.of(view.phase, *OPEN)
    if any(entry.progress is Progress.RETRYING for entry in waiting):
        yield Help(f"outrider saga retry {saga_id}", "makes the next attempt due now")
    if any(_awaited(view, entry) for entry in waiting):
        yield Help(f"outrider saga resume {saga_id}", "counts what it waits for as done, if you know that it is")
    if view.phase is Phase.ACTION and not view.stands(view.pivot, Progress.DONE):
        yield Help(f"outrider saga compensate {saga_id}", f"gives it up, and undoes what is done{_but(view)}")


def _but(view: View) -> str:
    """Say what compensation cannot do: undo what may have happened and has no undo, or anything after the pivot."""
    if view.definition is None:
        return ", unless its pivot is done"
    outside = [(entry, view.step(entry)) for entry in view.of(Phase.ACTION, Progress.FAILED, *OPEN)]
    left = [entry.step for entry, step in outside if step and step.kind in OUTSIDE and step.undo is None]
    return f"; see first that {', '.join(left)} did not happen, since it has no undo" if left else ""


def _awaited(view: View, entry: Entry) -> bool:
    step, act = view.step(entry), view.act(entry)
    if step is None or act is None:
        return view.record.instance.owner is None and entry.progress is Progress.INTENDED
    return act.command is not None or step.kind is Kind.SLEEP
