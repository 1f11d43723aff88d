"""The rules for every turn, and for a world that is at rest."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from outrider.saga.definition.steps import Definition, Step, StepKind, base_name
from outrider.saga.model import (
    LOSSES_MAX,
    PASSED,
    JournalEntry,
    MessageKind,
    Phase,
    SagaRecord,
    Status,
    StepStatus,
    Uncertainty,
)
from outrider.saga.planner.planner import Claimed, Input, Plan, TimedOut, UnavailableResult, advance
from outrider.saga.state.codec import decode
from outrider.stores.memory.tables import SagaRow
from tests.simulation.sagas.definitions import EFFECTIVE, State

if TYPE_CHECKING:
    from tests.simulation.sagas.world import World

OPEN = (StepStatus.STARTED, StepStatus.RETRYING)
CHANGES = {
    Status.STARTED: {Status.RUNNING, Status.COMPENSATING, Status.FAILED},
    Status.RUNNING: {Status.COMPENSATING, Status.COMPLETED, Status.FAILED},
    Status.COMPENSATING: {Status.COMPENSATED, Status.FAILED},
    Status.FAILED: {Status.RUNNING, Status.COMPENSATING},
}


@dataclass(slots=True)
class History:
    """The turns that were saved, and their checks."""

    base: Definition
    definition: Definition = field(init=False)
    """The definition with the items of the lists in the journal."""
    compensated: list[str] = field(default_factory=list)
    by_hand: set[tuple[str, Phase]] = field(default_factory=set)
    taken: set[str] = field(default_factory=set)
    compensation_commanded: bool = False
    losses_max: int = LOSSES_MAX
    unresolved: set[str] = field(default_factory=set)
    """Steps with an attempt at the action that may still be on its way."""

    def turn(self, record: SagaRecord, inputs: Sequence[Input], plan: Plan, row: SagaRow) -> Iterator[str]:
        """Record a turn, and yield its problems."""
        self.definition = self.base.expanded(row.journal.values())
        applied = {
            note.what for note in plan.notes if note.what.startswith("operator") and "ignored" not in note.detail
        }
        for note in plan.notes:
            if note.detail == "settled by an operator" and note.step:
                self.by_hand.add((note.step, Phase(note.what.split()[0])))
        self.compensation_commanded |= "operator compensate" in applied
        self.unresolved |= self.unresolved_calls(record, inputs)
        yield from self.forbidden_changes(plan)
        if any(isinstance(item, Claimed) for item in inputs):
            yield from self.charged_losses(record, plan, applied)
        yield from self.charged_outages(record, inputs, plan, applied)
        yield from self.compensated_too_early(record, plan, applied)
        yield from self.entries(plan, row)
        yield from self.items(record, plan, row)
        yield from self.conditions(record, plan, row)
        yield from self.deadline(record, plan, row, commanded="operator compensate" in applied)
        yield from self.missed_events(record, plan)
        yield from self.compensation(plan, commanded="operator compensate" in applied, row=row)
        moved = record.instance.status is Status.FAILED and plan.instance.status is not Status.FAILED
        if moved and not applied and not any(note.what == "answered after all" for note in plan.notes):
            yield "it left failed without a command or a reply"
        yield from self.ignored_replies(record, plan, row)
        kept = [
            message
            for message in row.messages.values()
            if message.kind is MessageKind.REPLY and message.message_id in plan.seen
        ]
        # Beside an answer that cannot be taken in, another one may wait for its place.
        stuck = [entry for entry in row.journal.values() if entry.uncertainty is Uncertainty.REPLY_NOT_APPLIED]
        if len(kept) > len(self.definition.steps) + len(stuck):
            yield "replies pile up in the mailbox"

    def unresolved_calls(self, record: SagaRecord, inputs: Sequence[Input]) -> set[str]:
        """Return the steps whose call timed out or was lost with its worker, before its result was known."""
        late = {item.step for item in inputs if isinstance(item, TimedOut) and item.phase is Phase.ACTION}
        if any(isinstance(item, Claimed) for item in inputs):
            late |= {e.step for e in record.journal if (e.phase, e.status) == (Phase.ACTION, StepStatus.STARTED)}
        return {step for step in late if self.definition.steps[step].kind is StepKind.CALL}

    def charged_losses(self, record: SagaRecord, plan: Plan, applied: set[str]) -> Iterator[str]:
        """A lost worker costs no attempt and rejects nothing; after too many losses in a row, no step runs again."""
        after = {(entry.step, entry.phase): entry for entry in plan.entries}
        for entry in record.journal:
            step, saved = self.definition.steps[entry.step], after.get((entry.step, entry.phase))
            if saved is None or entry.status is not StepStatus.STARTED or step.kind not in EFFECTIVE:
                continue
            if step.kind is not StepKind.REQUEST and saved.attempts > entry.attempts:
                yield f"a lost worker cost {entry.step} an attempt"
            if step.kind is StepKind.LOCAL and saved.status is StepStatus.REJECTED and not applied:
                yield f"{entry.step} was rejected because its worker was lost"
            again = record.instance.losses >= self.losses_max and saved.status is StepStatus.STARTED
            if again and step.kind is not StepKind.REQUEST:
                yield f"{entry.step} runs again after {record.instance.losses} losses"

    def charged_outages(
        self, record: SagaRecord, inputs: Sequence[Input], plan: Plan, applied: set[str]
    ) -> Iterator[str]:
        """An unavailable service costs no attempt and fails no step."""
        before = {(entry.step, entry.phase): entry for entry in record.journal}
        after = {(entry.step, entry.phase): entry for entry in plan.entries}
        for item in inputs:
            if not isinstance(item, UnavailableResult) or applied:
                continue
            was, saved = before[item.step, item.phase], after.get((item.step, item.phase))
            if was.status is not StepStatus.STARTED or saved is None:
                continue
            if saved.status is StepStatus.FAILED:
                yield f"{item.step} was failed by an outage"
            if saved.attempts != was.attempts - 1:
                yield f"an unavailable service cost {item.step} an attempt"

    def ignored_replies(self, record: SagaRecord, plan: Plan, row: SagaRow) -> Iterator[str]:
        """A step that failed without a reply goes on when the reply arrives."""
        for message in record.messages:
            step = (message.key or "").partition(":")[2]
            entry = row.journal.get((step, Phase.ACTION))
            failed = entry is not None and entry.is_unresolved
            other = entry is not None and (entry.uncertainty, entry.reply_event_id) != (
                Uncertainty.REPLY_NOT_APPLIED,
                message.event_id,
            )
            if failed and other and message.name in ("yes", "no") and message.message_id in plan.seen:
                yield f"{step} has failed, and its reply lies in the mailbox"

    def compensated_too_early(self, record: SagaRecord, plan: Plan, applied: set[str]) -> Iterator[str]:
        """A step whose attempt may still take effect is compensated only by command of an operator."""
        for entry in plan.entries:
            doubt = entry.step in self.unresolved and (entry.phase, entry.status) == (Phase.COMPENSATION, "planned")
            if (
                doubt
                and not self.compensation_commanded
                and not self.has_status(record, entry.step, StepStatus.DONE, plan)
            ):
                yield f"{entry.step} is compensated, and an attempt at it may be on its way"
        pivot = self.definition.pivot
        if pivot is None or pivot.kind is StepKind.LOCAL or "operator compensate" not in applied:
            return
        before, after = (self.has_status(record, pivot.name, StepStatus.FAILED, turn) for turn in (None, plan))
        if after and not before:
            yield "the saga was compensated although the outcome of the pivot was unknown"

    @staticmethod
    def has_status(record: SagaRecord, step: str, progress: StepStatus, plan: Plan | None = None) -> bool:
        lines = {entry.step: entry for entry in record.journal if entry.phase is Phase.ACTION}
        lines |= {entry.step: entry for entry in (plan.entries if plan else ()) if entry.phase is Phase.ACTION}
        return step in lines and lines[step].status == progress

    def forbidden_changes(self, plan: Plan) -> Iterator[str]:
        for note in plan.notes:
            old = note.old_status
            if old is not None and note.new_status not in CHANGES.get(old, set()) | {old}:
                yield f"it went from {old} to {note.new_status}"

    def entries(self, plan: Plan, row: SagaRow) -> Iterator[str]:
        done = {entry.step for entry in row.journal.values() if entry.phase is Phase.ACTION and entry.status in PASSED}
        for entry in plan.entries:
            step = self.definition.steps[entry.step]
            act = step.action if entry.phase is Phase.ACTION else step.compensation
            if act is None:
                yield f"{entry.step} is compensated, and has no compensation"
            elif entry.attempts > act.retry.max_attempts:
                yield f"{entry.step} is attempted {entry.attempts} times, at most {act.retry.max_attempts} are allowed"
            if entry.phase is Phase.ACTION and entry.status in OPEN and not done.issuperset(step.after):
                yield f"{entry.step} began before what it comes after was done"
            if (entry.phase, entry.status) == (Phase.COMPENSATION, StepStatus.STARTED):
                self.compensated += [entry.step] if entry.step not in self.compensated else []
            is_given_up = entry.status is StepStatus.FAILED and "given up" in (entry.error or "")
            if step.pivot and step.kind is not StepKind.LOCAL and is_given_up:
                yield "compensation began while the pivot was out"

    def items(self, record: SagaRecord, plan: Plan, row: SagaRow) -> Iterator[str]:
        """A list stays as it is, its items keep to the limit, and the step is done when all of them are."""
        before = {entry.step: entry for entry in record.journal if entry.phase is Phase.ACTION}
        assert row.instance is not None
        for name, step in self.definition.steps.items():
            entry = row.journal.get((name, Phase.ACTION))
            if step.kind is not StepKind.FOR_EACH or entry is None or entry.data is None:
                continue
            old, mine = before.get(name), [n for n in self.definition.steps if n != name and base_name(n) == name]
            if old is not None and old.data not in (None, entry.data):
                yield f"the list of {name} has changed"
            items = [row.journal[item, Phase.ACTION] for item in mine if (item, Phase.ACTION) in row.journal]
            if sum(item.status in OPEN for item in items) > step.parallel_max:
                yield f"{name} runs more items than {step.parallel_max}"
            if entry.status is not StepStatus.DONE or (old is not None and old.status is StepStatus.DONE):
                continue
            if [item.status for item in items] != [StepStatus.DONE] * len(mine):
                yield f"{name} is done, and some of its items are not"
            if step.into and len(decode(State, row.instance.state).results) != len(mine):
                yield f"{name} is done, and results are missing"

    def conditions(self, record: SagaRecord, plan: Plan, row: SagaRow) -> Iterator[str]:
        """A step is skipped or starts as its condition says of the stored state, and the decision stands."""
        before = {entry.step: entry for entry in record.journal if entry.phase is Phase.ACTION}
        assert row.instance is not None
        for entry in plan.entries:
            step, old = self.definition.steps[entry.step], before.get(entry.step)
            if entry.phase is Phase.COMPENSATION or step.when is None:
                continue
            if old is not None and StepStatus.SKIPPED in (old.status, entry.status):
                yield f"{entry.step} was {old.status} and is {entry.status}"
            runs = step.when(decode(State, row.instance.state))
            if old is None and runs != (entry.status is not StepStatus.SKIPPED):
                yield f"{entry.step} is {entry.status}, and its condition is {runs}"

    def deadline(self, record: SagaRecord, plan: Plan, row: SagaRow, *, commanded: bool) -> Iterator[str]:
        """After the deadline no step before the pivot starts, and a saga after its pivot does not compensate."""
        deadline_at, pivot = record.instance.deadline_at, self.definition.pivot
        if deadline_at is None or deadline_at > record.now:
            return
        is_past = pivot is not None and _progress(row, pivot.name) in PASSED
        known = {entry.step for entry in record.journal if entry.phase is Phase.ACTION}
        for entry in plan.entries:
            if entry.phase is Phase.ACTION and entry.step not in known and not is_past:
                yield f"{entry.step} began after the deadline"
        idle = not any(entry.status in OPEN for entry in row.journal.values() if entry.phase is Phase.ACTION)
        if plan.instance.status is Status.RUNNING and not is_past and idle:
            yield "the deadline has passed, and the saga goes on"
        if is_past and not commanded and plan.instance.status is Status.COMPENSATING:
            yield "the saga compensates for its deadline after the pivot"

    def missed_events(self, record: SagaRecord, plan: Plan) -> Iterator[str]:
        """A wait whose event has arrived is never rejected, however early or late the event was."""
        came = self.taken | {message.name for message in record.messages}
        for entry in plan.entries:
            refused = entry.status in (StepStatus.REJECTED, StepStatus.FAILED)
            if refused and "nothing came" in (entry.error or "") and f"event.{entry.step}" in came:
                yield f"{entry.step} was rejected, and its event had come"
        self.taken |= {message.name for message in record.messages if message.message_id in plan.taken}

    def compensation(self, plan: Plan, *, commanded: bool, row: SagaRow) -> Iterator[str]:
        begins = [note for note in plan.notes if note.what == "became compensating"]
        if not begins or commanded or any(note.old_status is Status.FAILED for note in begins):
            return
        for entry in row.journal.values():
            if entry.phase is Phase.ACTION and entry.status not in (*PASSED, StepStatus.REJECTED):
                yield f"compensation began while {entry.step} was {entry.status}"


def at_rest(world: World) -> Iterator[str]:
    """Yield the problems of a world in which nothing is left to do."""
    row, history, instance = world.row, world.history, world.record.instance
    status = instance.status
    if status not in (Status.COMPLETED, Status.COMPENSATED, Status.FAILED):
        yield f"it rests and is {status}"
    if instance.needs_attention != (status is Status.FAILED):
        yield f"it is {status}, and needs_attention is {instance.needs_attention}"
    if status is not Status.FAILED and row.messages:
        yield f"it is {status}, and has messages"
    yield from _idle(world)
    yield from _order(row, history)
    yield from _rest_compensated(row, history)
    yield from _ledger(world)
    pivot = world.definition.pivot
    if pivot and _progress(row, pivot.name) in PASSED and world.participants.compensations:
        yield f"{list(world.participants.compensations)} was compensated after the pivot"


def _idle(world: World) -> Iterator[str]:
    record = world.record._replace(messages=())
    plan = advance(world.definition, record, [], random.Random(0))
    if plan != Plan(record.instance, release=True):
        yield f"an ended saga goes on: {plan}"


def _order(row: SagaRow, history: History) -> Iterator[str]:
    places = [row.journal[step, Phase.ACTION].position for step in history.compensated]
    if places != sorted(places, reverse=True):
        yield f"steps were compensated in the order {history.compensated}"


def _rest_compensated(row: SagaRow, history: History) -> Iterator[str]:
    for entry in row.journal.values():
        if history.compensated and entry.phase is Phase.COMPENSATION and entry.status is StepStatus.PLANNED:
            yield f"{entry.step} was not compensated, as another step could not be"


def _progress(row: SagaRow, step: str, phase: Phase = Phase.ACTION) -> StepStatus | None:
    entry: JournalEntry | None = row.journal.get((step, phase))
    return entry.status if entry else None


def _ledger(world: World) -> Iterator[str]:
    participants, row = world.participants, world.row
    for step in world.definition.expanded(row.journal.values()).steps.values():
        effects, compensations = participants.effects[step.name], participants.compensations[step.name]
        if effects > 1 or compensations > effects:
            yield f"{step.name} happened {effects} times and was compensated {compensations} times"
        if step.kind not in EFFECTIVE or any((step.name, phase) in world.history.by_hand for phase in Phase):
            continue
        action, compensate = (_progress(row, step.name, phase) for phase in Phase)
        if action is StepStatus.DONE and compensate is None and (effects, compensations) != (1, 0):
            yield f"{step.name} is done and happened {effects} times, compensated {compensations} times"
        if action is StepStatus.DONE and not effects:
            yield f"{step.name} is done and did not happen"
        if (
            action in (None, StepStatus.REJECTED, StepStatus.SKIPPED)
            and compensate in (None, StepStatus.DONE)
            and effects != compensations
        ):
            yield f"{step.name} is {action}, and happened"
        if compensate is StepStatus.DONE and effects != compensations:
            yield f"{step.name} is compensated, and its effect is there"
        yield from _all_or_nothing(world, step, effects - compensations)


def _all_or_nothing(world: World, step: Step, balance: int) -> Iterator[str]:
    name, status = step.name, world.status
    wanted = 0 if _progress(world.row, name) is StepStatus.SKIPPED else 1
    if status is Status.COMPLETED and balance != wanted:
        yield f"the saga is completed, and {name} stands at {balance}"
    if status is Status.COMPENSATED and step.compensation is not None and balance != 0:
        yield f"the saga is compensated, and {name} stands at {balance}"
    if status is Status.COMPENSATED and step.pivot and balance != 0 and not world.history.compensation_commanded:
        yield "the saga is compensated, and its pivot happened"
