"""Runs one claimed saga: turns, and the calls between turns.

A call starts only after the turn that starts the step is saved, and only while the claim is certainly valid. The result
of a call is an input of the next turn. A worker that loses the claim discards everything: the next owner calls again,
with the same key.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable, Collection, Iterator
from contextlib import AbstractAsyncContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any
from uuid import UUID

from outrider.clock import Clock
from outrider.errors import ConcurrencyError, Transient
from outrider.outbox.staging import Stage
from outrider.retry import RetryPolicy
from outrider.saga.definition.saga import Saga
from outrider.saga.execution.step_executor import CANCELLED, LeakedTasks, StepExecutor, StepOutcome
from outrider.saga.execution.turn import CommitUnknown, SavedTurn, TurnInput, TurnTransaction
from outrider.saga.model import ENDED, Claim, SagaRecord, StepStatus
from outrider.saga.planner.actions import CallAction, Claimed, Input, LocalAction, Plan, Raised, wanted
from outrider.saga.settings import LEASE_MARGIN, SagaSettings
from outrider.saga.store import SagaStore
from outrider.telemetry.events import (
    Observer,
    SagaAdvanced,
    SagaEnded,
    SagaNeedsAttention,
    SagaStepFailed,
    SagaStepRolledBack,
    TelemetryEvent,
)
from outrider.telemetry.health import StoreHealth

CANCEL_SECONDS = 5.0
"""The time a cancelled call has to stop."""

ABANDON_PAUSE_SECONDS = 0.1

WAIT_SECONDS_MIN = 0.005

ROLLED_BACK_MAX = 20
"""The number of transient store errors in a row, during a local step, before an attempt is counted.

Many sagas that write one MongoDB document have write conflicts all the time, through no fault of the step.
"""

UNLUCKY = frozenset({StepStatus.RETRYING, StepStatus.REJECTED, StepStatus.FAILED})

PAUSES = RetryPolicy(base_seconds=0.1, cap_seconds=2)

SPOILT_MAX = 3
"""The number of turns that may fail with an error not known to be transient before the saga is stopped as failed."""

SECONDS_MIN = 0.001


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
    strays: LeakedTasks
    ahead: Callable[[float], AbstractAsyncContextManager[None]]
    """Extends the claims of running calls before a local step blocks the store for the given number of seconds."""


class SagaRunner:
    """Runs one saga, from its claim to its release."""

    def __init__(self, means: RunnerContext, saga: Saga[Any], record: SagaRecord, *, stop: str | None = None) -> None:
        """Take over a claimed saga. `stop` is the reason why the saga can only be stopped."""
        instance = record.instance
        assert instance.owner is not None
        self.claim = Claim(instance.owner, instance.saga_id, instance.epoch)
        self.in_turn = False
        self.wake_seconds: float | None = None
        self.released = False
        self.claimed_until = float("-inf")
        self._means, self._instance, self._hopeless = means, instance, stop
        self._acting = StepExecutor(means.store, saga, means.strays, means.observer)
        self._turning = TurnTransaction(
            means.store,
            means.stage,
            self._acting,
            self.claim,
            instance.version,
            means.settings.lease_seconds,
            means.rng,
            means.clock,
        )
        self._record: SagaRecord | None = record
        self._inputs: list[Input] = [Claimed()]
        self._todo: list[CallAction | LocalAction] = []
        self._calls: dict[CallAction, asyncio.Task[StepOutcome]] = {}
        self._due_at: float | None = None
        self._trusted_until = float("-inf")
        self._stopping, self._abandoning = asyncio.Event(), asyncio.Event()

    @property
    def calling(self) -> bool:
        """Tell whether a call is running, which the next owner would repeat after a lost claim."""
        return bool(self._calls)

    def adopt(self, record: SagaRecord) -> bool:
        """Continue under a new claim of the same worker, unless another worker has written the saga in between.

        A worker saves a turn before any step starts, so an unchanged version proves that no step was started.
        """
        instance = record.instance
        if self.released or instance.version != self._turning.version:
            return False
        self.claim = self._turning.claim = self.claim._replace(epoch=instance.epoch)
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
            while not await self._turn():
                self._begin_calls()
                await self._until_something_happens()
        finally:
            await self._cancel(list(self._calls))

    async def _turn(self) -> bool:
        """Run a turn; tell whether the saga is released."""
        if self._abandoning.is_set():
            await self._cancel(list(self._calls))
        ended = [call for call, task in self._calls.items() if task.done()]
        leaving = self._stopping.is_set() and len(ended) == len(self._calls)
        given = TurnInput(
            self._inputs,
            [_result(call, self._calls[call]) for call in ended],
            None if leaving else next((action for action in self._todo if isinstance(action, LocalAction)), None),
            self._todo if leaving else None,
            self._hopeless,
        )
        local = given.local
        try:
            async with self._keeping_busy(local):
                turned = await self._taken(given)
        except CommitUnknown:
            await self._begin_again()
            return False
        for call in ended:
            del self._calls[call]
        self._todo = [action for action in self._todo if action != local]
        await self._take_over(turned)
        return turned.turn is not None and turned.turn.release

    def _keeping_busy(self, local: LocalAction | None) -> AbstractAsyncContextManager[None]:
        if local is None:
            return nullcontext()
        return self._means.ahead(self._acting.act(local.step, local.phase).timeout_seconds or 0.0)

    async def _taken(self, given: TurnInput) -> SavedTurn:
        """Run a turn, and retry while the store has transient errors."""
        means, rolled_back = self._means, 0
        while True:
            self.in_turn = True
            try:
                turned = await self._turning.take(given, self._record)
            except ConcurrencyError:
                raise
            except Transient as error:
                self.in_turn = False
                rolled_back += self._turning.entered
                if self._turning.entered and given.local:
                    await self._pause(self._rolled_back(given, given.local, rolled_back, error))
                else:
                    await self._pause(means.health.failed(str(error)))
            else:
                means.health.recovered()
                if turned.turn:
                    self.released = turned.turn.release
                    self._trusted_until = self._turning.saved_at + means.settings.lease_seconds * LEASE_MARGIN
                    self.claimed_until = self._trusted_until
                return turned
            finally:
                self.in_turn = False
                self._record = None

    def _rolled_back(self, given: TurnInput, local: LocalAction, times: int, error: Transient) -> float:
        """Report a store failure during a local step, count an attempt if failures persist, and return the pause.

        The store has begun the transaction and read the saga, so the store is reachable; the step itself may be the
        cause.
        """
        saga = self._instance.saga_id, self._instance.saga_type
        self._means.observer.emit(SagaStepRolledBack(*saga, local.step, local.phase, times, str(error)))
        if times >= ROLLED_BACK_MAX:
            text = f"the store has failed under it {times} times in a row, the last time so: {error}"
            given.blame(local, Raised(local.step, local.phase, text))
        return PAUSES.delay_seconds(times, self._means.rng)

    async def _begin_again(self) -> None:
        """Restart as after a claim: a turn was saved, but its plan is unknown.

        Steps that this worker has not started cost no attempt, because no other worker can have started them.
        """
        begun = frozenset((call.step, call.phase, call.attempt) for call in self._calls)
        await self._cancel(list(self._calls))
        self._turning.version = None
        self._inputs, self._todo = [Claimed(begun)], []

    async def _take_over(self, turned: SavedTurn) -> None:
        """Cancel calls that the turn has made obsolete, and queue the new actions."""
        plan = turned.plan
        self._inputs = list(turned.owed)
        self.wake_seconds = plan.wake_seconds
        self._due_at = None if plan.wake_seconds is None else _now() + plan.wake_seconds
        if turned.turn is None:
            return
        self._instance = turned.turn.instance
        for fact in facts_of(turned.record, plan):
            self._means.observer.emit(fact)
        lines = {(entry.step, entry.phase): entry for entry in (*turned.record.journal, *plan.entries)}
        self._todo += [action for action in plan.actions if isinstance(action, CallAction | LocalAction)]
        self._todo = [action for action in self._todo if wanted(lines.values(), action)]
        await self._cancel([call for call in self._calls if not wanted(lines.values(), call)])

    def _begin_calls(self) -> None:
        if self._stopping.is_set():
            return
        for call in [action for action in self._todo if isinstance(action, CallAction)]:
            if self._means.clock.boot_seconds() >= self._trusted_until:
                # The claim may have ended. Otherwise the saga is released, and actions that were not started cost no
                # attempt.
                self.stop()
                return
            self._todo.remove(call)
            self._calls[call] = asyncio.create_task(self._acting.call(self._instance, call))

    async def _until_something_happens(self) -> None:
        """Wait until a call ends, a deadline passes or a stop is requested. Poll the mailbox at intervals."""
        stopping = self._stopping.is_set()
        if self._inputs or (stopping and not self._calls) or (not stopping and self._todo):
            return
        seconds = self._means.settings.poll_seconds_max
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


def facts_of(record: SagaRecord, plan: Plan) -> Iterator[TelemetryEvent]:
    """Yield the telemetry events of a saved turn."""
    old, new = record.instance, plan.instance
    saga = new.saga_id, new.saga_type
    yield SagaAdvanced(*saga, new.status, new.current_step, new.retry_count)
    before = {(entry.step, entry.phase): entry for entry in record.journal}
    for entry in plan.entries:
        was = before.get((entry.step, entry.phase))
        if entry.status in UNLUCKY and entry.error and (was is None or was.status is not entry.status):
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

    def met(self, saga_id: UUID, error: str) -> None:
        """Record a failed turn."""
        self.errors[saga_id] = [*self.errors.get(saga_id, []), error][-SPOILT_MAX:]

    def over(self, saga_id: UUID) -> None:
        """Clear the errors of a saga after a successful run."""
        self.errors.pop(saga_id, None)

    def verdict(self, saga_id: UUID) -> str | None:
        """Return the reason to stop a saga, or None to try again.

        >>> FailingSagas().verdict(UUID(int=7)) is None
        True
        """
        errors = self.errors.get(saga_id, [])
        if len(errors) < SPOILT_MAX:
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
