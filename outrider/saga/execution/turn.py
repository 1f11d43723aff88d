"""A turn: the planner gets the inputs, and one transaction writes everything that follows.

The stages of a turn: load, execute the local step, plan, build the change, save, send to children and parent, stage,
commit. `TurnTransaction.run`
returns the result as a value. The runner repeats a turn after an error in user code, with the error as an input; so a
turn always ends. If no plan can be computed, the saga is stopped as failed, because a stop can always be saved.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple
from uuid import UUID

from outrider.causation import counting_staged
from outrider.clock import Clock
from outrider.errors import (
    ActiveKeyMissing,
    ConcurrencyError,
    InvalidEvent,
    InvalidPayload,
    KeyMissing,
    KeysUnavailable,
    SubjectErased,
    Transient,
)
from outrider.event import Event
from outrider.outbox.staging import Stage
from outrider.payload.payloads import Payloads
from outrider.saga.definition.children import CALL_OFF
from outrider.saga.execution import step_executor
from outrider.saga.execution.outages import StepOutages
from outrider.saga.execution.step_executor import RAISED, LeakedTasks, StepExecutor, StepOutcome, describe
from outrider.saga.model import (
    AuditEntry,
    Claim,
    Instance,
    JournalEntry,
    MessageKind,
    NewSaga,
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
from outrider.saga.settings import SagaSettings
from outrider.saga.state.encryption import StoredTurn, encrypt_turn, load_new_keys
from outrider.saga.state.merge import merged, overwritten
from outrider.saga.store import SagaStore
from outrider.telemetry.events import Observer
from outrider.telemetry.health import StoreHealth

UNPLANNABLE = "no turn of it can be computed, which is a fault of its definition, its state or this program"

KEYS_SECONDS = 30.0
"""The time after which a saga is claimed again that waits for a key."""

OVER = frozenset({Status.COMPLETED, Status.COMPENSATED})


@dataclass(frozen=True, slots=True)
class RunnerContext:
    """The dependencies that all sagas of a worker share."""

    store: SagaStore
    stage: Stage
    settings: SagaSettings
    observer: Observer
    clock: Clock
    rng: random.Random
    health: StoreHealth
    leaked: LeakedTasks
    outages: StepOutages
    ahead: Callable[[float], AbstractAsyncContextManager[None]]
    """Extends the claims of running calls before a local step blocks the store for the given number of seconds."""
    payloads: Payloads | None = None


@dataclass(slots=True)
class TurnInput:
    """The inputs of a turn. A result that fails during the turn replaces the original input."""

    record: SagaRecord | None = None
    """The saga as it was just read; None to read the saga in the transaction of the turn."""
    inputs: list[Input] = field(default_factory=list)
    outcomes: list[StepOutcome] = field(default_factory=list)
    local: LocalAction | None = None
    leaving: Sequence[CallAction | LocalAction] | None = None
    """Set when the saga must be released: the actions that were not started."""
    stop: str | None = None
    """Set when no turn can be planned: the reason with which the saga is stopped as failed."""
    waits_for: str | None = None
    """Set when the saga cannot be opened or encrypted without a key: the reason with which it is released, to wait."""
    local_ran: bool = False
    """Whether the function of `local` was called."""
    stage_separately: bool = False
    """Set after staging failed: the events of each action are staged separately to find the cause."""
    failed_replies: dict[StepKey, Result] = field(default_factory=dict)
    failed_commands: dict[StepKey, Result] = field(default_factory=dict)

    def copy(self) -> TurnInput:
        """Return a copy for one more try, in which overrides are recorded."""
        return replace(self, outcomes=list(self.outcomes), failed_replies={}, failed_commands={})

    def override(self, action: Action, result: Result) -> None:
        """Record a result for an action. The action no longer runs, and an earlier result is replaced."""
        step_key = action.step, action.phase
        if isinstance(action, ApplyReply):
            self.failed_replies[step_key] = result
        elif isinstance(action, SendCommand):
            self.failed_commands[step_key] = result
        else:
            self.local = None if action == self.local else self.local
            kept = (outcome for outcome in self.outcomes if outcome.action != action)
            self.outcomes = [*kept, StepOutcome(action, result)]

    def deferred(self, record: SagaRecord) -> tuple[Result, ...]:
        """Return the results that become inputs after this turn is saved, because their steps start in this turn."""
        early = (result for step_key, result in self.failed_replies.items() if not _is_awaited(record, step_key))
        return (*early, *self.failed_commands.values())


class Saved(NamedTuple):
    """The turn is committed. `record` is its input; `change` was saved, or is None if there was no change.

    `deferred` holds results that are inputs of the next turn, which follows immediately.
    """

    record: SagaRecord
    plan: Plan
    change: SagaChange | None = None
    deferred: tuple[Result, ...] = ()
    staged: int = 0
    waits_for: str | None = None
    """The reason why the saga was only released: a key is missing."""


@dataclass(frozen=True, slots=True)
class Conflict:
    """Nothing was written: an earlier turn seemed to fail but was saved, and its plan is lost."""


class StepAtFault(NamedTuple):
    """Nothing was written, because code of a step failed. The turn runs again with the result as an input."""

    action: Action
    result: Result


@dataclass(frozen=True, slots=True)
class StagingFailed:
    """Nothing was written. The turn runs again and stages the events of each action separately."""


class Unplannable(NamedTuple):
    """Nothing was written, because the planner failed or the name of a child is taken. The saga can only be stopped."""

    reason: str


class Keyless(NamedTuple):
    """Nothing was written, because a key is missing or the keys cannot be read. The saga is released, to wait."""

    reason: str


TurnResult = Saved | Conflict | StepAtFault | StagingFailed | Unplannable | Keyless

KEYLESS = (KeysUnavailable, KeyMissing, ActiveKeyMissing)


class _RollBack(Exception):
    """Ends a transaction without a commit."""


class _Staged(NamedTuple):
    """An action and the events to be staged for the action."""

    action: Action
    events: Sequence[Event]


@dataclass(slots=True)
class TurnTransaction:
    """Runs the turns of one saga while the saga is claimed."""

    context: RunnerContext
    executor: StepExecutor
    claim: Claim
    version: int | None
    """The version that must be stored, or None to accept any version."""
    seen: frozenset[int] = frozenset()
    instance: Instance | None = None
    """The saga as it was last read."""
    unrecorded: bool = False
    """Whether the state has changed since the audit log has kept it."""
    saved_at: float = float("-inf")
    """The worker's clock at the last save request. The saved claim lasts at least one lease from this time."""

    async def run(self, turn_input: TurnInput) -> TurnResult:
        """Run a turn in one transaction, and commit only if the result is `Saved`.

        Raises Transient if the store fails, and ConcurrencyError if the claim is lost.
        """
        store = self.context.store
        result: TurnResult
        try:
            async with store.transactions.open() if turn_input.local else store.transaction() as tx:
                with counting_staged() as staged:
                    result = await self._stages(tx, turn_input)
                if not isinstance(result, Saved):
                    raise _RollBack
                result = result._replace(staged=staged.events)
        except _RollBack:
            return result
        except Transient:
            raise
        except RAISED as error:
            # A save that fails after a local function was caused by the function, for example by a row that violates a
            # constraint.
            if turn_input.local is None:
                raise
            assert self.instance is not None
            return StepAtFault(turn_input.local, self.executor.failed_on_save(self.instance, turn_input.local, error))
        if result.change:
            self.version = result.record.instance.version + 1
            self.unrecorded &= not result.change.keep_state
            self.seen = frozenset(result.plan.seen)
        return result

    async def _stages(self, tx: Any, turn_input: TurnInput) -> TurnResult:
        """Load and open the saga, and advance, stop or release it."""
        stored = turn_input.record or await self._load(tx, lock=turn_input.local is not None)
        if stored is None:
            return Conflict()
        self.instance = stored.instance
        if turn_input.waits_for is not None:
            return await self._put_back(tx, stored, turn_input.waits_for)
        if turn_input.stop is not None:
            return await self._stop(tx, stored, turn_input.stop)
        record = await self._open(stored)
        if not isinstance(record, SagaRecord):
            return record
        self.instance = record.instance
        return await self._advance(tx, turn_input, record)

    async def _open(self, stored: SagaRecord) -> SagaRecord | Keyless | Unplannable:
        """Return the saga with plain values. The stop of an erased saga keeps what is stored: no key will ever come."""
        try:
            return await self.executor.open(stored)
        except KEYLESS as error:
            return Keyless(str(error))
        except SubjectErased as error:
            return Unplannable(error.problem)
        except InvalidPayload as error:
            return Unplannable(f"what is stored of it does not open: {error}")

    async def _advance(self, tx: Any, turn_input: TurnInput, record: SagaRecord) -> TurnResult:
        """Execute the local step, plan, and write: build the change, save, stage."""
        outcomes = list(turn_input.outcomes)
        late = overdue(record)
        undelivered = await self.context.store.undelivered(tx, late) if late else {}
        if turn_input.local:
            turn_input.local_ran = True
            outcome = await self.executor.local(record.instance, turn_input.local, tx)
            self.context.outages.record(record.instance.saga_type, outcome.result)
            if not isinstance(outcome.result, Succeeded):
                return StepAtFault(turn_input.local, outcome.result)
            outcomes.append(outcome)
        try:
            record, plan = self._plan(turn_input, record, outcomes, undelivered)
        except RAISED as error:
            redactor = self.executor.redactor(record.instance)
            return Unplannable(f"{UNPLANNABLE}: {describe(error, redactor)}")
        return await self._write(tx, turn_input, record, plan, outcomes)

    async def _stop(self, tx: Any, record: SagaRecord, reason: str) -> Saved:
        plan = stopped(record, reason)
        change = SagaChange(plan.instance, (), plan.taken, plan.seen, plan.notes, plan.release, at=record.now)
        await self._save(tx, change)
        return Saved(record, plan, change)

    async def _put_back(self, tx: Any, record: SagaRecord, reason: str) -> Saved:
        """Release the saga as it is stored, to be claimed again a moment later, or by a worker that has the key."""
        seen = tuple(message.message_id for message in record.messages)
        plan = Plan(record.instance, seen=seen, release=True, wake_seconds=KEYS_SECONDS)
        change = SagaChange(record.instance, seen=seen, release=True, wake_seconds=KEYS_SECONDS, at=record.now)
        await self._save(tx, change)
        return Saved(record, plan, change, waits_for=reason)

    async def _write(
        self, tx: Any, turn_input: TurnInput, record: SagaRecord, plan: Plan, outcomes: Sequence[StepOutcome]
    ) -> Saved | StepAtFault | StagingFailed | Unplannable | Keyless:
        deferred = turn_input.deferred(record)
        if self._is_unchanged(record, plan) and not deferred:
            return Saved(record, plan)
        built = self._build(turn_input, record, plan)
        if isinstance(built, StepAtFault):
            return built
        instance, entries, staged = built
        release = plan.release and not deferred
        messages = plan.taken, plan.seen
        keep_state = self._keeps_state(instance, plan)
        change = SagaChange(
            instance, entries, *messages, plan.notes, release, plan.wake_seconds, record.now, keep_state
        )
        # A local step may have taken longer than keys stay fresh.
        await load_new_keys(self.context.payloads, [instance, *plan.children])
        try:
            stored = encrypt_turn(self.context.payloads, change, plan.children, plan.messages)
        except KEYLESS as error:
            return Keyless(str(error))
        except InvalidEvent as error:
            return Unplannable(f"it cannot be encrypted: {error}")
        await self._save(tx, stored.change)
        if taken := await self._send(tx, stored):
            return Unplannable(name_taken(taken))
        staged = [*(_Staged(outcome.action, outcome.staged) for outcome in outcomes), *staged]
        failure = await self._stage(tx, turn_input, instance, [one for one in staged if one.events])
        return Saved(record, plan, change, deferred) if failure is None else failure

    async def _load(self, tx: Any, *, lock: bool) -> SagaRecord | None:
        """Return the saga, or None if the stored version is not the expected version."""
        found = await self.context.store.load(tx, self.claim.saga_id, for_update=lock)
        record = require_claim(found, self.claim)
        return record if self.version in (None, record.instance.version) else None

    def _plan(
        self,
        turn_input: TurnInput,
        record: SagaRecord,
        outcomes: Sequence[StepOutcome],
        undelivered: Mapping[UUID, Undelivered],
    ) -> tuple[SagaRecord, Plan]:
        clashes, record = overwrites(record, outcomes), with_states(record, outcomes)
        inputs = [
            *turn_input.inputs,
            *(outcome.result for outcome in outcomes),
            *failed_reply_inputs(turn_input, record),
        ]
        outages = self.context.outages.current(record.instance.saga_type)
        plan = advance(
            self.executor.saga.definition,
            record,
            inputs,
            self.context.rng,
            undelivered,
            outages=outages,
            error_text=self.context.settings.error_text,
        )
        plan = replace(plan, notes=(*clashes, *plan.notes)) if clashes else plan
        plan = plan if turn_input.leaving is None else hand_over(plan, record, turn_input.leaving)
        self.context.outages.started(record.instance.saga_type, plan.actions)
        return record, plan

    def _build(
        self, turn_input: TurnInput, record: SagaRecord, plan: Plan
    ) -> tuple[Instance, Sequence[JournalEntry], list[_Staged]] | StepAtFault:
        """Apply replies to the state and build commands, in the order of the plan: a command sees earlier replies."""
        staged: list[_Staged] = []
        entries = {(entry.step, entry.phase): entry for entry in plan.entries}
        instance = plan.instance
        for action in plan.actions:
            match action:
                case ApplyReply():
                    applied = self.executor.apply_reply(instance, action)
                    if isinstance(applied, Result):
                        return StepAtFault(action, applied)
                    instance = replace(instance, state=applied.state)
                    if applied.result is not None:
                        step_key = action.step, action.phase
                        entries[step_key] = replace(entries[step_key], data=applied.result)
                    staged.append(_Staged(action, applied.staged))
                case SendCommand() if (action.step, action.phase) not in turn_input.failed_commands:
                    is_answered = answered((*record.journal, *plan.entries), action)
                    command = self.executor.command(instance, action, answered=is_answered)
                    if isinstance(command, Result):
                        return StepAtFault(action, command)
                    staged.append(_Staged(action, (replace(command, event_id=command_id(plan.entries, action)),)))
        return instance, tuple(entries.values()), staged

    async def _save(self, tx: Any, change: SagaChange) -> None:
        self.saved_at = self.context.clock.boot_seconds()
        await self.context.store.save(tx, self.claim, change, self.context.settings.lease_seconds)

    def _keeps_state(self, instance: Instance, plan: Plan) -> bool:
        """Tell whether the audit log keeps the state after this turn: the first one, and each one that was changed.

        A change in a turn without a line is kept with the next line.
        """
        before = self.instance
        if before is None or not self.context.settings.audit_states:
            return False
        self.unrecorded |= before.audit_lines == 1 or before.state != instance.state
        return self.unrecorded and bool(plan.notes)

    async def _send(self, tx: Any, stored: StoredTurn) -> NewSaga | None:
        """Start children and deliver messages to other sagas, after the save, which has proved the claim.

        Return a child that cannot be started, because its name is taken.
        """
        for child in stored.children:
            if not await self.context.store.start(tx, child):
                return child
        if stored.messages:
            await self.context.store.deliver(tx, stored.messages)
        return None

    async def _stage(
        self, tx: Any, turn_input: TurnInput, instance: Instance, staged: Sequence[_Staged]
    ) -> StepAtFault | StagingFailed | None:
        """Stage all events in one call. If staging fails, stage them per action to find the cause."""
        if not turn_input.stage_separately:
            try:
                events = [event for one in staged for event in one.events]
                if events:
                    await self.context.stage(tx, *(step_executor.traced(event, instance) for event in events))
                return None
            except InvalidEvent:
                # The events were rejected before any write, so the transaction is still usable.
                pass
            except Transient:
                raise
            except RAISED:
                return StagingFailed()
        for action, wanted_by_action in staged:
            try:
                await self.context.stage(tx, *(step_executor.traced(event, instance) for event in wanted_by_action))
            except Transient:
                raise
            except RAISED as error:
                return StepAtFault(action, self.executor.cannot_stage(instance, action, error))
        return None

    def _is_unchanged(self, record: SagaRecord, plan: Plan) -> bool:
        """Tell whether the plan changes nothing and needs no save."""
        changes = plan.entries or plan.notes or plan.taken or plan.actions or plan.release
        return not changes and plan.instance == record.instance and self.seen.issuperset(plan.seen)


def name_taken(child: NewSaga) -> str:
    """Return the reason why a saga stops: its child has the name of another saga, which would never report to it."""
    return (
        f"{child.parent_step} cannot start its child: there is a saga {child.saga_type} {child.correlation_id} "
        "already, which another program has started; compensate this saga, or retry when the other is removed"
    )


def require_claim(record: SagaRecord | None, claim: Claim) -> SagaRecord:
    """Return the record if the claim is still valid. Raises ConcurrencyError."""
    if record is None or (record.instance.owner, record.instance.epoch) != (claim.worker, claim.epoch):
        raise ConcurrencyError(f"saga {claim.saga_id} has another owner by now; nothing was written: claim it again")
    return record


def overwrites(record: SagaRecord, outcomes: Sequence[StepOutcome]) -> list[AuditEntry]:
    """Return an audit entry for each step that overwrites a field which a parallel step has changed."""
    state, notes, instance = record.instance.state, [], record.instance
    for outcome in outcomes:
        if isinstance(outcome.result, Succeeded):
            if fields := overwritten(state, outcome.before, outcome.after):
                detail = f"{', '.join(fields)}: changed by another step while this one ran; this one's value is kept"
                owner = instance.owner or "worker"
                notes.append(
                    AuditEntry(
                        instance.status, instance.status, outcome.action.step, "state overwritten", owner, detail
                    )
                )
            state = merged(state, outcome.before, outcome.after)
    return notes


def with_states(record: SagaRecord, outcomes: Sequence[StepOutcome]) -> SagaRecord:
    """Merge the state changes of completed steps into the record."""
    state = record.instance.state
    for outcome in outcomes:
        if isinstance(outcome.result, Succeeded):
            state = merged(state, outcome.before, outcome.after)
    return record if state == record.instance.state else record._replace(instance=replace(record.instance, state=state))


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


def _is_awaited(record: SagaRecord, step_key: StepKey) -> bool:
    found = (entry for entry in record.journal if (entry.step, entry.phase) == step_key)
    return any(entry.status in OPEN or entry.is_unresolved for entry in found)


def failed_reply_inputs(turn_input: TurnInput, record: SagaRecord) -> list[Result]:
    """Return results for replies that could not be applied.

    For a step that starts in this turn, the result only marks the reply as early; `TurnInput.deferred` has the actual
    result.
    """
    return [
        result
        if _is_awaited(record, step_key)
        else Raised(*step_key, "its reply came early, and cannot be taken in", reply=True)
        for step_key, result in turn_input.failed_replies.items()
    ]


def hand_over(plan: Plan, record: SagaRecord, not_started: Sequence[CallAction | LocalAction]) -> Plan:
    """Return the plan of a turn that releases the saga, due immediately. The next owner starts open actions again."""
    if plan.release:
        return plan
    lines = {(entry.step, entry.phase): entry for entry in (*record.journal, *plan.entries)}
    changed = {(entry.step, entry.phase): entry for entry in plan.entries}
    notes, again = list(plan.notes), 0
    for action in (*not_started, *plan.actions):
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
    operator = [message for message in record.messages if message.kind is MessageKind.OPERATOR]
    commands = [message for message in operator if message.name != CALL_OFF]
    notes = [
        AuditEntry(
            Status.FAILED,
            Status.FAILED,
            None,
            f"operator {message.name}",
            actor_of(message),
            f"ignored, because {reason}",
        )
        for message in commands
    ]
    known = instance.status is Status.FAILED and instance.last_error == reason
    if not known:
        notes.insert(0, AuditEntry(instance.status, Status.FAILED, None, "became failed", owner, reason))
    return Plan(
        replace(instance, status=Status.FAILED, last_error=reason, needs_attention=True),
        taken=tuple(message.message_id for message in (*commands, *surplus(record.messages))),
        seen=everything,
        notes=tuple(notes),
        release=True,
        attention=() if known else (reason,),
    )
