"""A turn: the planner gets the inputs, and one transaction writes everything that follows.

The transaction contains a local function or the application of replies, the staged commands and events, and the save.
An error in user code rolls the transaction back, and the turn runs again with the error as an input; so a turn always
ends. If no plan can be computed, the saga is stopped as failed, because a stop can always be saved.
"""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple, TypeVar
from uuid import UUID

from outrider.clock import Clock
from outrider.errors import ConcurrencyError, InvalidEvent, Transient
from outrider.event import Event
from outrider.outbox.staging import Stage
from outrider.saga.execution import step_executor
from outrider.saga.execution.step_executor import RAISED, StepExecutor, StepOutcome, described
from outrider.saga.model import (
    AuditEntry,
    Claim,
    Instance,
    JournalEntry,
    MessageKind,
    Phase,
    SagaChange,
    SagaRecord,
    Status,
    StepStatus,
    Undelivered,
)
from outrider.saga.planner.actions import (
    Action,
    ApplyReply,
    CallAction,
    Input,
    LocalAction,
    Plan,
    Raised,
    Result,
    SendCommand,
    Succeeded,
    wanted,
)
from outrider.saga.planner.journal import ERROR_CHARACTERS_MAX, OPEN, StepKey
from outrider.saga.planner.operator_commands import actor_of
from outrider.saga.planner.planner import advance, overdue
from outrider.saga.planner.replies import surplus
from outrider.saga.state.merge import merged, overwritten
from outrider.saga.store import SagaStore

T = TypeVar("T")

Lot = tuple[Action, Sequence[Event]]
"""An action and the events to be staged for the action."""

UNCOMPUTABLE = "no turn of it can be computed, which is a fault of its definition, its state or this program"

OVER = frozenset({Status.COMPLETED, Status.COMPENSATED})


class CommitUnknown(Exception):
    """A turn seemed to fail but was saved, and its plan is lost."""


class SavedTurn(NamedTuple):
    """A completed turn. `record` is the input, `turn` the saved change, or None if there was no change.

    `owed` holds results that are inputs of the next turn, which follows immediately.
    """

    record: SagaRecord
    plan: Plan
    turn: SagaChange | None = None
    owed: tuple[Result, ...] = ()


class _AtFault(Exception):
    """User code failed; the turn must run again."""


class _Uncomputable(Exception):
    """The planner itself failed."""


@dataclass(slots=True)
class TurnTransaction:
    """Runs the turns of one saga while the saga is claimed."""

    store: SagaStore
    stage: Stage
    acting: StepExecutor
    claim: Claim
    version: int | None
    """The version that must be stored, or None to accept any version."""
    lease_seconds: float
    rng: random.Random
    clock: Clock
    seen: frozenset[int] = frozenset()
    entered: bool = False
    """Whether the last turn called a local function."""
    saved_at: float = float("-inf")
    """The worker's clock at the last save request. The saved claim lasts at least one lease from this time."""

    async def take(self, given: TurnInput, record: SagaRecord | None = None) -> SavedTurn:
        """Run a turn, with a record that was just read or with a record that is read in the transaction."""
        self.entered = False
        turned = await self._committed(replace(given, unread={}, unsent={}), record)
        if turned.turn:
            self.version = turned.record.instance.version + 1
            self.seen = frozenset(turned.plan.seen)
        return turned

    async def _committed(self, given: TurnInput, record: SagaRecord | None) -> SavedTurn:
        while True:
            try:
                async with self._transaction(given) as tx:
                    return await self._take(tx, given, record)
            except _AtFault:
                continue
            except (Transient, CommitUnknown):
                raise
            except _Uncomputable as error:
                given.stop = f"{UNCOMPUTABLE}: {described(error.__cause__ or error)}"
            except RAISED as error:
                # A save that fails after a local function was caused by the function, for example by a row that
                # violates a constraint.
                if (spoilt := given.local) is None:
                    raise
                given.blame(spoilt, self.acting.spoilt(spoilt, error))

    def _transaction(self, given: TurnInput) -> AbstractAsyncContextManager[Any]:
        return self.store.transactions.open() if given.local else self.store.transaction()

    async def _take(self, tx: Any, given: TurnInput, record: SagaRecord | None) -> SavedTurn:
        record = record or await self._load(tx, lock=given.local is not None)
        acted = list(given.acted)
        if given.stop is not None:
            return await self._stop(tx, record, given.stop)
        late = overdue(record)
        undelivered = await self.store.undelivered(tx, late) if late else {}
        if given.local:
            acted.append(await self._run_local(tx, given, record))
        record, plan = self._planned(given, record, acted, undelivered)
        debts = owed(given, record)
        if self._quiet(record, plan, debts):
            return SavedTurn(record, plan)
        return SavedTurn(record, plan, await self._write(tx, given, record, plan, acted), debts)

    def _planned(
        self,
        given: TurnInput,
        record: SagaRecord,
        acted: Sequence[StepOutcome],
        undelivered: Mapping[UUID, Undelivered],
    ) -> tuple[SagaRecord, Plan]:
        try:
            clashes, record = overwriting(record, acted), with_states(record, acted)
            inputs = [*given.inputs, *(one.result for one in acted), *unread(given, record)]
            plan = advance(self.acting.saga.definition, record, inputs, self.rng, undelivered)
            plan = replace(plan, notes=(*clashes, *plan.notes)) if clashes else plan
            return record, plan if given.leaving is None else hand_over(plan, record, given.leaving)
        except RAISED as error:
            raise _Uncomputable from error

    async def _stop(self, tx: Any, record: SagaRecord, reason: str) -> SavedTurn:
        plan = stopped(record, reason)
        turn = SagaChange(plan.instance, (), plan.taken, plan.seen, plan.notes, plan.release)
        await self._save(tx, turn)
        return SavedTurn(record, plan, turn)

    async def _load(self, tx: Any, *, lock: bool) -> SagaRecord:
        record = held(await self.store.load(tx, self.claim.saga_id, for_update=lock), self.claim)
        if self.version not in (None, record.instance.version):
            raise CommitUnknown
        return record

    async def _run_local(self, tx: Any, given: TurnInput, record: SagaRecord) -> StepOutcome:
        assert given.local
        self.entered = True
        acted = await self.acting.local(record.instance, given.local, tx)
        if not isinstance(acted.result, Succeeded):
            given.blame(given.local, acted.result)
            raise _AtFault
        return acted

    async def _write(
        self, tx: Any, given: TurnInput, record: SagaRecord, plan: Plan, acted: Sequence[StepOutcome]
    ) -> SagaChange:
        lots: list[Lot] = [(one.action, one.staged) for one in acted]
        instance = plan.instance
        for action in plan.actions:
            match action:
                case ApplyReply():
                    taken = _fine(self.acting.absorb(instance, action), given.unread)
                    instance = replace(instance, state=taken.state)
                    lots.append((action, taken.staged))
                case SendCommand() if (action.step, action.phase) not in given.unsent:
                    happened = answered((*record.journal, *plan.entries), action)
                    asked = _fine(self.acting.command(instance, action, answered=happened), given.unsent)
                    lots.append((action, (replace(asked, event_id=command_id(plan.entries, action)),)))
        release = plan.release and not owed(given, record)
        turn = SagaChange(instance, plan.entries, plan.taken, plan.seen, plan.notes, release, plan.wake_seconds)
        await self._save(tx, turn)
        await self._stage_all(tx, given, instance, [lot for lot in lots if lot[1]])
        return turn

    async def _save(self, tx: Any, turn: SagaChange) -> None:
        self.saved_at = self.clock.boot_seconds()
        await self.store.save(tx, self.claim, turn, self.lease_seconds)

    async def _stage_all(self, tx: Any, given: TurnInput, instance: Instance, lots: Sequence[Lot]) -> None:
        """Stage all events in one call. If staging fails, stage them per action to find the cause."""
        if not lots:
            return None
        try:
            if given.carefully:
                return await self._stage_each(tx, given, instance, lots)
            await self._stage(tx, instance, [event for _, events in lots for event in events])
        except InvalidEvent:
            # The events were rejected before any write, so the transaction is still usable.
            await self._stage_each(tx, given, instance, lots)
        except (Transient, _AtFault):
            raise
        except RAISED as error:
            given.carefully = True
            raise _AtFault from error

    async def _stage_each(self, tx: Any, given: TurnInput, instance: Instance, lots: Sequence[Lot]) -> None:
        for action, events in lots:
            try:
                await self._stage(tx, instance, events)
            except Transient:
                raise
            except RAISED as error:
                given.blame(action, self.acting.unfit_to_stage(action, error))
                raise _AtFault from error

    async def _stage(self, tx: Any, instance: Instance, events: Sequence[Event]) -> None:
        await self.stage(tx, *(step_executor.traced(event, instance) for event in events))

    def _quiet(self, record: SagaRecord, plan: Plan, debts: Sequence[Result]) -> bool:
        """Tell whether the turn changed nothing and needs no save."""
        changes = plan.entries or plan.notes or plan.taken or plan.actions or plan.release or debts
        return not changes and plan.instance == record.instance and self.seen.issuperset(plan.seen)


def held(record: SagaRecord | None, claim: Claim) -> SagaRecord:
    """Return the record if the claim is still valid. Raises ConcurrencyError."""
    if record is None or (record.instance.owner, record.instance.epoch) != (claim.worker, claim.epoch):
        raise ConcurrencyError(f"saga {claim.saga_id} has another owner by now; nothing was written: claim it again")
    return record


def _fine(made: T | Result, blamed: dict[StepKey, Result]) -> T:
    """Return the value, or record the failed result and restart the turn."""
    if isinstance(made, Result):
        blamed[made.step, made.phase] = made
        raise _AtFault
    return made


@dataclass(slots=True)
class TurnInput:
    """The inputs of a turn. A result that fails during the turn replaces the original input."""

    inputs: list[Input] = field(default_factory=list)
    acted: list[StepOutcome] = field(default_factory=list)
    local: LocalAction | None = None
    leaving: Sequence[CallAction | LocalAction] | None = None
    """Set when the saga must be released: the actions that were not started."""
    stop: str | None = None
    """Set when no turn can run: the reason with which the saga is stopped as failed."""
    carefully: bool = False
    """Set after staging failed: the events of each action are staged separately to find the cause."""
    unread: dict[StepKey, Result] = field(default_factory=dict)
    unsent: dict[StepKey, Result] = field(default_factory=dict)

    def blame(self, action: Action, result: Result) -> None:
        """Record a result for an action. The action no longer runs, and an earlier result is replaced."""
        step_key = action.step, action.phase
        if isinstance(action, ApplyReply):
            self.unread[step_key] = result
        elif isinstance(action, SendCommand):
            self.unsent[step_key] = result
        else:
            self.local = None if action == self.local else self.local
            self.acted = [*(one for one in self.acted if one.action != action), StepOutcome(action, result)]


def overwriting(record: SagaRecord, acted: Sequence[StepOutcome]) -> list[AuditEntry]:
    """Return an audit entry for each step that overwrites a field which a parallel step has changed."""
    state, notes, instance = record.instance.state, [], record.instance
    for one in acted:
        if isinstance(one.result, Succeeded):
            if fields := overwritten(state, one.before, one.after):
                detail = f"{', '.join(fields)}: changed by another step while this one ran; this one's value is kept"
                owner = instance.owner or "worker"
                notes.append(
                    AuditEntry(instance.status, instance.status, one.action.step, "state overwritten", owner, detail)
                )
            state = merged(state, one.before, one.after)
    return notes


def with_states(record: SagaRecord, acted: Sequence[StepOutcome]) -> SagaRecord:
    """Merge the state changes of completed steps into the record."""
    state = record.instance.state
    for one in acted:
        if isinstance(one.result, Succeeded):
            state = merged(state, one.before, one.after)
    return record._replace(instance=replace(record.instance, state=state))


def answered(journal: Sequence[JournalEntry], action: SendCommand) -> bool:
    """Tell whether an event has confirmed the action to be compensated. A `mark_done` of an operator does not count."""
    return action.phase is Phase.COMPENSATION and any(
        (entry.step, entry.phase, entry.status) == (action.step, Phase.ACTION, StepStatus.DONE) and entry.reply_event_id
        for entry in journal
    )


def command_id(journal: Sequence[JournalEntry], action: SendCommand) -> UUID | None:
    """Return the event id of a command in the journal, which is used to trace the command."""
    found = (entry for entry in journal if (entry.step, entry.phase) == (action.step, action.phase))
    return next((entry.command_event_id for entry in found), None)


def _awaits(record: SagaRecord, step_key: StepKey) -> bool:
    found = (entry for entry in record.journal if (entry.step, entry.phase) == step_key)
    return any(entry.status in OPEN or entry.is_unresolved for entry in found)


def unread(given: TurnInput, record: SagaRecord) -> list[Result]:
    """Return results for replies that could not be applied.

    For a step that starts in this turn, the result only marks the reply as early; `owed` returns the actual result.
    """
    return [
        result
        if _awaits(record, step_key)
        else Raised(*step_key, "its reply came early, and cannot be taken in", reply=True)
        for step_key, result in given.unread.items()
    ]


def owed(given: TurnInput, record: SagaRecord) -> tuple[Result, ...]:
    """Return the results that become inputs after this turn is saved, because their steps start in this turn."""
    early = (result for step_key, result in given.unread.items() if not _awaits(record, step_key))
    return (*early, *given.unsent.values())


def hand_over(plan: Plan, record: SagaRecord, unbegun: Sequence[CallAction | LocalAction]) -> Plan:
    """Return the plan of a turn that releases the saga, due immediately. The next owner starts open actions again."""
    if plan.release:
        return plan
    lines = {(entry.step, entry.phase): entry for entry in (*record.journal, *plan.entries)}
    changed = {(entry.step, entry.phase): entry for entry in plan.entries}
    notes, again = list(plan.notes), 0
    for action in (*unbegun, *plan.actions):
        step_key = action.step, action.phase
        if isinstance(action, CallAction | LocalAction) and wanted([lines[step_key]], action):
            left = replace(lines[step_key], status=StepStatus.RETRYING, attempts=action.attempt - 1, due_at=record.now)
            lines[step_key] = changed[step_key] = left
            status, actor = plan.instance.status, record.instance.owner or "worker"
            notes.append(AuditEntry(status, status, action.step, f"{action.phase} handed over", actor, "not begun"))
            again += action.attempt > 1
    instance = replace(plan.instance, retry_count=plan.instance.retry_count - again)
    return replace(
        plan,
        instance=instance,
        entries=tuple(changed.values()),
        notes=tuple(notes),
        actions=tuple(action for action in plan.actions if not isinstance(action, CallAction | LocalAction)),
        release=True,
        wake_seconds=0.0,
    )


def stopped(record: SagaRecord, reason: str) -> Plan:
    """Return the plan of a turn that stops a saga as failed. The journal and the newest replies stay."""
    instance, reason = record.instance, reason[:ERROR_CHARACTERS_MAX]
    everything = tuple(message.message_id for message in record.messages)
    if instance.status in OVER:
        return Plan(instance, taken=everything, release=True)
    owner = instance.owner or "worker"
    orders = [message for message in record.messages if message.kind is MessageKind.OPERATOR]
    notes = [
        AuditEntry(
            Status.FAILED,
            Status.FAILED,
            None,
            f"operator {message.name}",
            actor_of(message),
            f"ignored, because {reason}",
        )
        for message in orders
    ]
    known = instance.status is Status.FAILED and instance.last_error == reason
    if not known:
        notes.insert(0, AuditEntry(instance.status, Status.FAILED, None, "became failed", owner, reason))
    return Plan(
        replace(instance, status=Status.FAILED, last_error=reason, needs_attention=True),
        taken=tuple(message.message_id for message in (*orders, *surplus(record.messages))),
        seen=everything,
        notes=tuple(notes),
        release=True,
        attention=() if known else (reason,),
    )
