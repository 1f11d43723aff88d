"""Runs one claimed saga: turns, and the calls between turns.

A call starts only after the turn that starts the step is saved, and only while the claim is certainly valid. The result
of a call is an input of the next turn. A worker that loses the claim discards everything: the next owner calls again,
with the same key.
"""

from __future__ import annotations

import asyncio
from collections.abc import Collection, Iterator
from contextlib import nullcontext, suppress
from dataclasses import dataclass, field
from typing import Any
from uuid import UUID

from outrider.errors import ConcurrencyError, Transient
from outrider.redaction import Redactor
from outrider.retry import RetryPolicy
from outrider.saga.definition.saga import Saga
from outrider.saga.execution.step_executor import CANCELLED, StepExecutor, StepOutcome
from outrider.saga.execution.turn import (
    Conflict,
    Keyless,
    RunnerContext,
    Saved,
    StagingFailed,
    StepAtFault,
    TurnInput,
    TurnTransaction,
    Unplannable,
)
from outrider.saga.model import ENDED, Claim, SagaRecord, StepStatus
from outrider.saga.planner.actions import CallAction, Claimed, Input, LocalAction, Plan, Raised, wanted
from outrider.saga.settings import LEASE_MARGIN
from outrider.telemetry.events import (
    SagaAdvanced,
    SagaEnded,
    SagaNeedsAttention,
    SagaReleased,
    SagaStepFailed,
    SagaStepRolledBack,
    TelemetryEvent,
)
from outrider.tracebacks import text_of

CANCEL_SECONDS = 5.0
"""The time a cancelled call has to stop."""

ABANDON_PAUSE_SECONDS = 0.1

WAIT_SECONDS_MIN = 0.005

ROLLED_BACK_MAX = 20
"""The number of transient store errors in a row, during a local step, before an attempt is counted.

Many sagas that write one MongoDB document have write conflicts all the time, through no fault of the step.
"""

UNSUCCESSFUL = frozenset({StepStatus.RETRYING, StepStatus.REJECTED, StepStatus.FAILED})

PAUSES = RetryPolicy(base_seconds=0.1, cap_seconds=2)

FAILED_TURNS_MAX = 3
"""The number of turns that may fail with an error not known to be transient before the saga is stopped as failed."""

SECONDS_MIN = 0.001


class SagaRunner:
    """Runs one saga, from its claim to its release."""

    def __init__(self, context: RunnerContext, saga: Saga[Any], record: SagaRecord, *, stop: str | None = None) -> None:
        """Take over a claimed saga. `stop` is the reason why the saga can only be stopped."""
        instance = record.instance
        assert instance.owner is not None
        self.claim = Claim(instance.owner, instance.saga_id, instance.epoch)
        self.in_turn = False
        self.wake_seconds: float | None = None
        self.released = False
        self.claimed_until = float("-inf")
        self.was_suspect = instance.is_suspect
        self._context, self._instance, self._stop_reason = context, instance, stop
        self._executor = StepExecutor(
            context.store, saga, context.leaked, context.observer, context.payloads, context.settings.error_text
        )
        self._turns = TurnTransaction(context, self._executor, self.claim, instance.version)
        self._record: SagaRecord | None = record
        self._inputs: list[Input] = [Claimed()]
        self._todo: list[CallAction | LocalAction] = []
        self._calls: dict[CallAction, asyncio.Task[StepOutcome]] = {}
        self._due_at: float | None = None
        self._trusted_until = float("-inf")
        self._stopping, self._abandoning = asyncio.Event(), asyncio.Event()

    @property
    def is_suspect(self) -> bool:
        """Tell whether the saga was lost with its workers and has not passed its step since."""
        return self._instance.is_suspect

    @property
    def redactor(self) -> Redactor:
        """Return the redactor of error texts of the saga."""
        return self._executor.redactor(self._instance)

    @property
    def has_calls(self) -> bool:
        """Tell whether a call is running, which the next owner would repeat after a lost claim."""
        return bool(self._calls)

    def adopt(self, record: SagaRecord) -> bool:
        """Continue under a new claim of the same worker, unless another worker has written the saga in between.

        A worker saves a turn before any step starts, so an unchanged version proves that no step was started.
        """
        instance = record.instance
        if self.released or instance.version != self._turns.version:
            return False
        self.claim = self._turns.claim = self.claim._replace(epoch=instance.epoch)
        return True

    def stop(self) -> None:
        """Start no further step, and release the saga when the running calls have ended."""
        self._stopping.set()

    def abandon(self) -> None:
        """Release the saga now. The next owner repeats the running calls."""
        self._stopping.set()
        self._abandoning.set()

    async def run(self) -> None:
        """Run the saga until its release. Raises when the claim is lost."""
        try:
            while not self.released:
                await self._turn()
                if not self.released:
                    self._start_calls()
                    await self._wait()
        finally:
            await self._cancel(list(self._calls))

    async def _turn(self) -> None:
        """Run a turn with the calls that have ended and the next local step."""
        if self._abandoning.is_set():
            await self._cancel(list(self._calls))
        ended = [call for call, task in self._calls.items() if task.done()]
        leaving = self._stopping.is_set() and len(ended) == len(self._calls)
        outcomes = [_result(call, self._calls[call]) for call in ended]
        for outcome in outcomes:
            self._context.outages.record(self._instance.saga_type, outcome.result)
        local = None if leaving else next((action for action in self._todo if isinstance(action, LocalAction)), None)
        turn_input = TurnInput(
            self._record,
            self._inputs,
            outcomes,
            local,
            self._todo if leaving else None,
            self._stop_reason,
        )
        timeout_seconds = self._executor.action(local.step, local.phase).timeout_seconds if local else None
        async with nullcontext() if local is None else self._context.ahead(timeout_seconds or 0.0):
            result = await self._save(turn_input)
        self._record = None
        if isinstance(result, Conflict):
            return await self._restart()
        for call in ended:
            del self._calls[call]
        self._todo = [action for action in self._todo if action != local]
        return await self._apply(result)

    async def _save(self, turn_input: TurnInput) -> Saved | Conflict:
        """Repeat the turn until its result is saved: after errors of the store, and with each error of a step."""
        context, rolled_back = self._context, 0
        attempt = turn_input.copy()
        while True:
            self.in_turn = True
            try:
                result = await self._turns.run(attempt)
            except ConcurrencyError:
                raise
            except Transient as error:
                self.in_turn = False
                if attempt.local_ran and turn_input.local:
                    rolled_back += 1
                    pause_seconds = self._roll_back(turn_input, turn_input.local, rolled_back, error)
                else:
                    pause_seconds = context.health.failed(str(error))
                await self._pause(pause_seconds)
                turn_input.record = None
                attempt = turn_input.copy()
                continue
            finally:
                self.in_turn = False
            match result:
                case StepAtFault(action, failure):
                    attempt.override(action, failure)
                case StagingFailed():
                    attempt.stage_separately = True
                case Unplannable(reason):
                    attempt.stop = reason
                case Keyless(reason):
                    attempt.waits_for = reason
                case _:
                    context.health.recovered()
                    return result

    def _roll_back(self, turn_input: TurnInput, local: LocalAction, times: int, error: Transient) -> float:
        """Report a store failure during a local step, count an attempt if failures persist, and return the pause.

        The store has begun the transaction and read the saga, so the store is reachable; the step itself may be the
        cause.
        """
        saga, said = (self._instance.saga_id, self._instance.saga_type), text_of(error, self.redactor)
        self._context.observer.emit(SagaStepRolledBack(*saga, local.step, local.phase, times, said))
        if times >= ROLLED_BACK_MAX:
            text = f"the store has failed under it {times} times in a row, the last time so: {said}"
            turn_input.override(local, Raised(local.step, local.phase, text))
        return PAUSES.delay_seconds(times, self._context.rng)

    async def _restart(self) -> None:
        """Restart as after a claim: a turn was saved, but its plan is unknown.

        The outcome of steps that this worker has not started is known, because no other worker can have started them.
        """
        started = frozenset((call.step, call.phase, call.attempt) for call in self._calls)
        await self._cancel(list(self._calls))
        self._turns.version = None
        self._inputs, self._todo = [Claimed(started)], []

    async def _apply(self, saved: Saved) -> None:
        """Cancel calls that the turn has made obsolete, and queue the new actions."""
        plan = saved.plan
        self._inputs = list(saved.deferred)
        self.wake_seconds = plan.wake_seconds
        self._due_at = None if plan.wake_seconds is None else _now() + plan.wake_seconds
        if saved.change is None:
            self._instance = saved.record.instance
            return
        if plan.children or plan.messages:
            with suppress(Transient):
                await self._context.store.notify()
        self.released = saved.change.release
        self._trusted_until = self._turns.saved_at + self._context.settings.lease_seconds * LEASE_MARGIN
        self.claimed_until = self._trusted_until
        self._instance = saved.change.instance
        if saved.waits_for:
            self._context.observer.emit(SagaReleased(self.claim.worker, self.claim.saga_id, saved.waits_for))
            return
        for event in telemetry_of(saved.record, plan, saved.staged):
            self._context.observer.emit(event)
        entries = {(entry.step, entry.phase): entry for entry in (*saved.record.journal, *plan.entries)}
        self._todo += [action for action in plan.actions if isinstance(action, CallAction | LocalAction)]
        self._todo = [action for action in self._todo if wanted(entries.values(), action)]
        await self._cancel([call for call in self._calls if not wanted(entries.values(), call)])

    def _start_calls(self) -> None:
        if self._stopping.is_set():
            return
        for call in [action for action in self._todo if isinstance(action, CallAction)]:
            if self._context.clock.boot_seconds() >= self._trusted_until:
                # The claim may have ended. Otherwise the saga is released, and actions that were not started cost no
                # attempt.
                self.stop()
                return
            self._todo.remove(call)
            self._calls[call] = asyncio.create_task(self._executor.call(self._instance, call))

    async def _wait(self) -> None:
        """Wait until a call ends, a deadline passes or a stop is requested. Poll the mailbox at intervals."""
        stopping = self._stopping.is_set()
        if self._inputs or (stopping and not self._calls) or (not stopping and self._todo):
            return
        seconds = self._context.settings.poll_seconds_max
        if self._due_at is not None:
            seconds = min(seconds, max(WAIT_SECONDS_MIN, self._due_at - _now()))
        signal = asyncio.create_task((self._abandoning if stopping else self._stopping).wait())
        try:
            await asyncio.wait([signal, *self._calls.values()], timeout=seconds, return_when=asyncio.FIRST_COMPLETED)
        finally:
            signal.cancel()

    async def _pause(self, seconds: float) -> None:
        """Wait before the next store access; only briefly if the saga is to be abandoned."""
        if self._abandoning.is_set():
            await asyncio.sleep(min(seconds, ABANDON_PAUSE_SECONDS))
        else:
            await wait_for(self._abandoning, seconds)

    async def _cancel(self, calls: Collection[CallAction]) -> None:
        tasks = [self._calls.pop(call) for call in calls]
        for task in tasks:
            task.cancel()
        if tasks:
            await asyncio.wait(tasks, timeout=CANCEL_SECONDS)


def _result(call: CallAction, task: asyncio.Task[StepOutcome]) -> StepOutcome:
    if task.cancelled():
        return StepOutcome(call, Raised(call.step, call.phase, CANCELLED))
    return task.result()


def _now() -> float:
    return asyncio.get_running_loop().time()


def telemetry_of(record: SagaRecord, plan: Plan, staged: int) -> Iterator[TelemetryEvent]:
    """Yield the telemetry events of a saved turn."""
    old, new = record.instance, plan.instance
    saga = new.saga_id, new.saga_type
    yield SagaAdvanced(*saga, new.status, new.current_step, new.retry_count, staged)
    before = {(entry.step, entry.phase): entry for entry in record.journal}
    for entry in plan.entries:
        was = before.get((entry.step, entry.phase))
        # A step that has only waited for its service has made no attempt.
        attempted = entry.started_at is not None
        if (
            entry.status in UNSUCCESSFUL
            and entry.error
            and attempted
            and (was is None or was.status is not entry.status)
        ):
            yield SagaStepFailed(*saga, entry.step, entry.phase, entry.status, entry.attempts, entry.error)
    for reason in plan.attention:
        yield SagaNeedsAttention(*saga, new.correlation_id, reason)
    if new.status in ENDED and old.status is not new.status:
        seconds = (record.now - new.started_at).total_seconds()
        yield SagaEnded(*saga, new.correlation_id, new.status, round(seconds, 3))


@dataclass(slots=True)
class FailingSagas:
    """Sagas whose last turns failed with an error not known to be transient, and the errors."""

    errors: dict[UUID, list[str]] = field(default_factory=dict)

    def add(self, saga_id: UUID, error: str) -> None:
        """Record a failed turn."""
        self.errors[saga_id] = [*self.errors.get(saga_id, []), error][-FAILED_TURNS_MAX:]

    def clear(self, saga_id: UUID) -> None:
        """Clear the errors of a saga after a successful run."""
        self.errors.pop(saga_id, None)

    def stop_reason(self, saga_id: UUID) -> str | None:
        """Return the reason to stop a saga, or None to try again.

        >>> FailingSagas().stop_reason(UUID(int=7)) is None
        True
        """
        errors = self.errors.get(saga_id, [])
        if len(errors) < FAILED_TURNS_MAX:
            return None
        return f"its turn has failed {len(errors)} times in a row, the last time so: {errors[-1]}"


async def wait_for(event: asyncio.Event, seconds: float) -> bool:
    """Wait for an event or a timeout; tell whether the event is set.

    >>> asyncio.run(wait_for(asyncio.Event(), 0.001))
    False
    """
    try:
        async with asyncio.timeout(max(seconds, SECONDS_MIN)):
            await event.wait()
    except TimeoutError:
        return False
    return True
