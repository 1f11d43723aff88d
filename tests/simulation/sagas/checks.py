"""What must be true of every turn, and of a world that has come to rest."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from outrider.saga.doubt import missed, untaken
from outrider.saga.plan import Claimed, News, Plan, TimedOut, advance
from outrider.saga.steps import Definition, Kind
from outrider.saga_store import Entry, MailKind, Phase, Progress, Record, Status
from tests.simulation.sagas.makers import EFFECTIVE
from tests.simulation.sagas.shelf import Shelf

if TYPE_CHECKING:
    from tests.simulation.sagas.world import World

OPEN = (Progress.INTENDED, Progress.RETRYING)
CHANGES = {
    Status.STARTED: {Status.RUNNING, Status.COMPENSATING},
    Status.RUNNING: {Status.COMPENSATING, Status.COMPLETED, Status.FAILED},
    Status.COMPENSATING: {Status.COMPENSATED, Status.FAILED},
    Status.FAILED: {Status.RUNNING, Status.COMPENSATING},
}


@dataclass(slots=True)
class History:
    """What was saved, turn by turn."""

    definition: Definition
    undone: list[str] = field(default_factory=list)
    by_hand: set[tuple[str, Phase]] = field(default_factory=set)
    taken: set[str] = field(default_factory=set)
    compensation_ordered: bool = False
    doubted: set[str] = field(default_factory=set)
    """Steps with an attempt at the action that may still be on its way."""

    def turn(self, record: Record, news: Sequence[News], plan: Plan, shelf: Shelf) -> Iterator[str]:
        """Remember a turn, and name what is wrong with it."""
        obeyed = {note.what for note in plan.notes if note.what.startswith("order") and "ignored" not in note.detail}
        for note in plan.notes:
            if note.detail == "settled by a person" and note.step:
                self.by_hand.add((note.step, Phase(note.what.split()[0])))
        self.compensation_ordered |= "order compensate" in obeyed
        self.doubted |= self.unheard(record, news)
        yield from self.changes(plan)
        yield from self.hasty(record, plan, obeyed)
        yield from self.entries(plan, shelf)
        yield from self.waits(record, plan)
        yield from self.compensation(plan, ordered="order compensate" in obeyed, shelf=shelf)
        moved = record.instance.status is Status.FAILED and plan.instance.status is not Status.FAILED
        if moved and not obeyed and not any(note.what == "answered after all" for note in plan.notes):
            yield "it left failed without an order or an answer"
        yield from self.left_lying(record, plan, shelf)
        kept = [mail for mail in shelf.mail.values() if mail.kind is MailKind.REPLY and mail.mail_id in plan.seen]
        # Beside an answer that cannot be taken in, another one may wait for its place.
        stuck = [entry for entry in shelf.journal.values() if untaken(entry)]
        if len(kept) > len(self.definition.steps) + len(stuck):
            yield "replies pile up in the mailbox"

    def unheard(self, record: Record, news: Sequence[News]) -> set[str]:
        """Return the calls that were given up, or lost with their worker, before anybody knew what they came to."""
        late = {item.step for item in news if isinstance(item, TimedOut) and item.phase is Phase.ACTION}
        if any(isinstance(item, Claimed) for item in news):
            late |= {e.step for e in record.journal if (e.phase, e.progress) == (Phase.ACTION, Progress.INTENDED)}
        return {step for step in late if self.definition.steps[step].kind is Kind.CALL}

    def left_lying(self, record: Record, plan: Plan, shelf: Shelf) -> Iterator[str]:
        """What has failed for want of an answer does not stay so when that is there."""
        for mail in record.mail:
            step = (mail.key or "").partition(":")[2]
            entry = shelf.journal.get((step, Phase.ACTION))
            failed = entry is not None and entry.progress is Progress.FAILED and missed(entry)
            other = entry is not None and not (untaken(entry) and entry.event_id == mail.event_id)
            if failed and other and mail.name in ("yes", "no") and mail.mail_id in plan.seen:
                yield f"{step} stands failed, and its answer lies in the box"

    def hasty(self, record: Record, plan: Plan, obeyed: set[str]) -> Iterator[str]:
        """Nothing that may still be on its way is undone, but by a person who could know."""
        for entry in plan.entries:
            doubt = entry.step in self.doubted and (entry.phase, entry.progress) == (Phase.COMPENSATION, "planned")
            if doubt and not self.compensation_ordered and not self.stood(record, entry.step, Progress.DONE, plan):
                yield f"{entry.step} is undone, and an attempt at it may be on its way"
        pivot = self.definition.pivot
        if pivot is None or pivot.kind is Kind.LOCAL or "order compensate" not in obeyed:
            return
        before, after = (self.stood(record, pivot.name, Progress.FAILED, turn) for turn in (None, plan))
        if after and not before:
            yield "what waited for the pivot was undone, and nobody knew whether that had happened"

    @staticmethod
    def stood(record: Record, step: str, progress: Progress, plan: Plan | None = None) -> bool:
        lines = {entry.step: entry for entry in record.journal if entry.phase is Phase.ACTION}
        lines |= {entry.step: entry for entry in (plan.entries if plan else ()) if entry.phase is Phase.ACTION}
        return step in lines and lines[step].progress == progress

    def changes(self, plan: Plan) -> Iterator[str]:
        for note in plan.notes:
            old = note.old_status
            if old is not None and note.new_status not in CHANGES.get(old, set()) | {old}:
                yield f"it went from {old} to {note.new_status}"

    def entries(self, plan: Plan, shelf: Shelf) -> Iterator[str]:
        done = {entry.step for entry in shelf.journal.values() if (entry.phase, entry.progress) == ("action", "done")}
        for entry in plan.entries:
            step = self.definition.steps[entry.step]
            act = step.action if entry.phase is Phase.ACTION else step.undo
            if act is None:
                yield f"{entry.step} is undone, and has no undo"
            elif entry.attempts > act.retry.max_attempts:
                yield f"{entry.step} is attempted {entry.attempts} times, at most {act.retry.max_attempts} are allowed"
            if entry.phase is Phase.ACTION and entry.progress in OPEN and not done.issuperset(step.after):
                yield f"{entry.step} began before what it comes after was done"
            if (entry.phase, entry.progress) == (Phase.COMPENSATION, Progress.INTENDED):
                self.undone += [entry.step] if entry.step not in self.undone else []
            if step.pivot and step.kind is not Kind.LOCAL and "given up" in (entry.error or ""):
                yield "undoing began while the pivot was out"

    def waits(self, record: Record, plan: Plan) -> Iterator[str]:
        """An event that has come is never taken for one that has not, however early or late it was."""
        came = self.taken | {mail.name for mail in record.mail}
        for entry in plan.entries:
            refused = entry.progress in (Progress.REFUSED, Progress.FAILED)
            if refused and "nothing came" in (entry.error or "") and f"event {entry.step}" in came:
                yield f"{entry.step} was refused, and its event had come"
        self.taken |= {mail.name for mail in record.mail if mail.mail_id in plan.taken}

    def compensation(self, plan: Plan, *, ordered: bool, shelf: Shelf) -> Iterator[str]:
        begins = [note for note in plan.notes if note.what == "became compensating"]
        if not begins or ordered or any(note.old_status is Status.FAILED for note in begins):
            return
        for entry in shelf.journal.values():
            if entry.phase is Phase.ACTION and entry.progress not in (Progress.DONE, Progress.REFUSED):
                yield f"undoing began while {entry.step} was {entry.progress}"


def at_rest(world: World) -> Iterator[str]:
    """Name what is wrong with a world in which nothing is left to do."""
    shelf, history = world.shelf, world.history
    status = shelf.instance.status
    if status not in (Status.COMPLETED, Status.COMPENSATED, Status.FAILED):
        yield f"it rests and is {status}"
    if shelf.instance.needs_attention != (status is Status.FAILED):
        yield f"it is {status}, and needs_attention is {shelf.instance.needs_attention}"
    if status is not Status.FAILED and shelf.mail:
        yield f"it is {status}, and has mail"
    yield from _idle(world)
    yield from _order(shelf, history)
    yield from _rest_undone(shelf, history)
    yield from _ledger(world)
    pivot = world.definition.pivot
    if pivot and _progress(shelf, pivot.name) is Progress.DONE and world.parties.undos:
        yield f"{list(world.parties.undos)} was undone after the pivot"


def _idle(world: World) -> Iterator[str]:
    record = world.shelf.load()._replace(mail=())
    plan = advance(world.definition, record, [], random.Random(0))
    if plan != Plan(record.instance, release=True):
        yield f"an ended saga goes on: {plan}"


def _order(shelf: Shelf, history: History) -> Iterator[str]:
    places = [shelf.journal[step, Phase.ACTION].place for step in history.undone]
    if places != sorted(places, reverse=True):
        yield f"steps were undone in the order {history.undone}"


def _rest_undone(shelf: Shelf, history: History) -> Iterator[str]:
    for entry in shelf.journal.values():
        if history.undone and entry.phase is Phase.COMPENSATION and entry.progress is Progress.PLANNED:
            yield f"{entry.step} was not undone, as another step could not be"


def _progress(shelf: Shelf, step: str, phase: Phase = Phase.ACTION) -> Progress | None:
    entry: Entry | None = shelf.journal.get((step, phase))
    return entry.progress if entry else None


def _ledger(world: World) -> Iterator[str]:
    parties, shelf = world.parties, world.shelf
    for step in world.definition.steps.values():
        effects, undos = parties.effects[step.name], parties.undos[step.name]
        if effects > 1 or undos > effects:
            yield f"{step.name} happened {effects} times and was undone {undos} times"
        if step.kind not in EFFECTIVE or any((step.name, phase) in world.history.by_hand for phase in Phase):
            continue
        action, undo = (_progress(shelf, step.name, phase) for phase in Phase)
        if action is Progress.DONE and undo is None and (effects, undos) != (1, 0):
            yield f"{step.name} is done and happened {effects} times, undone {undos} times"
        if action is Progress.DONE and not effects:
            yield f"{step.name} is done and did not happen"
        if action in (None, Progress.REFUSED) and undo in (None, Progress.DONE) and effects != undos:
            yield f"{step.name} is {action}, and happened"
        if undo is Progress.DONE and effects != undos:
            yield f"{step.name} is undone, and its effect is there"
        yield from _all_or_nothing(world, step.name, effects - undos)


def _all_or_nothing(world: World, name: str, balance: int) -> Iterator[str]:
    step, status = world.definition.steps[name], world.shelf.instance.status
    if status is Status.COMPLETED and balance != 1:
        yield f"the saga is completed, and {name} stands at {balance}"
    if status is Status.COMPENSATED and step.undo is not None and balance != 0:
        yield f"the saga is compensated, and {name} stands at {balance}"
    if status is Status.COMPENSATED and step.pivot and balance != 0 and not world.history.compensation_ordered:
        yield "the saga is compensated, and its pivot happened"
