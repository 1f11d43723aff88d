"""The saga worker: claims sagas that are due or have messages, and runs each saga in a separate task.

Each duty is a method that can be called separately (`run_once`, `renew`, `run_maintenance`); `run` calls them in loops.
After a crash, the journal still has the started steps. The worker that claims the saga after the lease starts the steps
again, with the same keys.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any
from uuid import UUID

from outrider.clock import Clock, SystemClock
from outrider.errors import InvalidHandler, OutriderError, Transient, UsageError
from outrider.outbox.staging import Stage
from outrider.saga.definition.saga import SagaRegistry
from outrider.saga.definition.steps import Step, StepKind
from outrider.saga.execution.outages import StepOutages
from outrider.saga.execution.runner import PAUSES, FailingSagas, SagaRunner, wait_for
from outrider.saga.execution.step_executor import RAISED, LeakedTasks, definition_site, describe
from outrider.saga.execution.turn import RunnerContext
from outrider.saga.model import SagaRecord
from outrider.saga.settings import LEASE_MARGIN, SagaSettings
from outrider.saga.state.encryption import load_keys
from outrider.saga.store import SagaStore
from outrider.telemetry.events import (
    Handled,
    Observer,
    Observers,
    SagaMaintenanceDone,
    SagaReleased,
    SagaWorkerRecovered,
    SagaWorkerStarted,
    SagaWorkerStopped,
    SagaWorkerUnavailable,
    TelemetryEvent,
)
from outrider.telemetry.health import StoreHealth

LOST = "its claim was lost: another worker has it, or will have it"

SHORTEN_SECONDS = 0.1
"""The delay before extended claims return to the normal lease, because several local steps may follow each other."""


class SagaWorker:
    """A saga worker, with a new name at each start.

    The arguments are a store, the sagas, and the function that stages events in transactions of the store::

        worker = SagaWorker(await open_sagas(url), SagaRegistry(order, refund), outrider.stage)
        await worker.run()
    """

    def __init__(
        self,
        store: SagaStore,
        sagas: SagaRegistry,
        stage: Stage,
        settings: SagaSettings | None = None,
        observer: Observer | None = None,
        *,
        clock: Clock | None = None,
        rng: random.Random | None = None,
    ) -> None:
        self.store, self.sagas, self.settings = store, SagaRegistry.of(sagas), settings or SagaSettings()
        self.observer, self.clock, self.rng = (
            observer or Observers(),
            clock or SystemClock(),
            rng or random.Random(),
        )
        check_children(self.sagas)
        check_locals(store, self.sagas)
        self.name = f"saga-worker-{self.rng.getrandbits(48):012x}"
        self._health = StoreHealth(
            self.observer,
            partial(SagaWorkerUnavailable, self.name),
            partial(SagaWorkerRecovered, self.name),
            PAUSES,
            self.rng,
        )
        self._runners: dict[UUID, SagaRunner] = {}
        self._tasks: dict[UUID, asyncio.Task[None]] = {}
        self._renewal = ClaimRenewal(store, self.settings, self.clock, self._health, self._runners, self._cancel_lost)
        self._context = RunnerContext(
            store,
            stage,
            self.settings,
            self.observer,
            self.clock,
            self.rng,
            self._health,
            LeakedTasks(self.observer),
            StepOutages(self.settings, self.observer, self.clock),
            self._renewal.ahead,
            self.sagas.payloads,
        )
        self._failing = FailingSagas()
        self._due_at: float | None = None
        self._stopping, self._wake = asyncio.Event(), asyncio.Event()

    @property
    def busy(self) -> int:
        """Return the number of claimed sagas."""
        return len(self._runners)

    @property
    def leaked(self) -> int:
        """Return the number of cancelled calls that still run. A process with leaked calls may have to be killed."""
        return len(self._context.leaked.tasks)

    def stop(self) -> None:
        """Request a clean stop: no new claims, running calls may finish, and all sagas are released."""
        self._stopping.set()
        self.wake()

    def wake(self) -> None:
        """Look for sagas now. Safe to call from the event loop at any time."""
        self._wake.set()

    def emit(self, event: TelemetryEvent) -> None:
        """Look for sagas after a consumer has handled an event, because the event may be a reply.

        A worker is an observer for the consumers in the same process::

            Consumer(source, store, routes, observer=Observers([log_observer(), worker]))
        """
        if isinstance(event, Handled):
            self.wake()

    async def run(self) -> None:
        """Run sagas until `stop` is called. A cancelled worker leaves everything as after a crash."""
        definitions = tuple(f"{saga_type} v{version}" for saga_type, version in sorted(self.sagas.versions))
        self.observer.emit(SagaWorkerStarted(self.name, definitions))
        try:
            async with self.store.listen(self.wake), asyncio.TaskGroup() as tasks:
                duties = [
                    tasks.create_task(self._repeat(self.renew, self.settings.renew_seconds)),
                    tasks.create_task(self._repeat(self._renewal.shorten, 0.0)),
                    tasks.create_task(self._repeat(self.run_maintenance, self.settings.maintenance_interval_seconds)),
                ]
                await self._claim_until_stopped()
                await self._release_all()
                for duty in duties:
                    duty.cancel()
        finally:
            await self._cancel_all()
        self.observer.emit(SagaWorkerStopped(self.name))

    async def run_once(self) -> int:
        """Claim sagas up to the concurrency limit, start to run them, and return their number.

        One suspect is run at a time, so that a saga that kills its worker costs the other suspects nothing.
        """
        room = self.settings.concurrency - len(self._runners)
        if room <= 0:
            return 0
        if self._due_at is not None and self._due_at <= asyncio.get_running_loop().time():
            self._due_at = None
        records = await self.store.claim(
            self.name,
            self.sagas.versions,
            limit=room,
            lease_seconds=self.settings.lease_seconds,
            suspects=0 if any(runner.is_suspect for runner in self._runners.values()) else 1,
        )
        await load_keys(self.sagas.payloads, records)
        for record in records:
            self._start(record)
        return len(records)

    async def rest(self) -> None:
        """Wait until no saga is claimed: all have ended, or wait for a message or a deadline."""
        while self._tasks:
            await asyncio.wait(list(self._tasks.values()))

    async def renew(self) -> None:
        """Renew all claims, and drop sagas whose claim is lost."""
        await self._renewal.renew()

    async def run_maintenance(self) -> None:
        """Remove old sagas, audit entries and participant entries."""
        settings = self.settings
        pruned = await self.store.prune(
            saga_days=settings.saga_days,
            audit_days=settings.audit_days,
            participant_memory_days=settings.participant_memory_days,
        )
        if any(pruned):
            self.observer.emit(SagaMaintenanceDone(*pruned))

    def _start(self, record: SagaRecord) -> None:
        instance = record.instance
        saga = self.sagas.find(instance.saga_type, instance.definition_version)
        assert saga is not None, "only what is here is claimed"
        if (known := self._runners.get(instance.saga_id)) and known.adopt(record):
            return
        self._forget(instance.saga_id)
        runner = SagaRunner(self._context, saga, record, stop=self._failing.stop_reason(instance.saga_id))
        self._runners[instance.saga_id] = runner
        task = asyncio.create_task(self._run(runner), name=f"saga-{instance.saga_id}")
        self._tasks[instance.saga_id] = task
        # A task that is cancelled before its first step runs none of its code.
        task.add_done_callback(lambda _: self._remove(runner))

    def _cancel_lost(self, runner: SagaRunner) -> None:
        """Cancel a saga whose claim was not renewed, unless a newer runner has replaced this runner."""
        if self._runners.get(runner.claim.saga_id) is runner:
            self._tasks[runner.claim.saga_id].cancel()

    def _forget(self, saga_id: UUID) -> None:
        """Forget an earlier claim of the same saga, which ended unnoticed."""
        self._runners.pop(saga_id, None)
        if task := self._tasks.pop(saga_id, None):
            task.cancel()

    async def _run(self, runner: SagaRunner) -> None:
        try:
            with self._report_release(runner):
                await runner.run()
        finally:
            self._remove(runner)

    def _remove(self, runner: SagaRunner) -> None:
        saga_id = runner.claim.saga_id
        if self._runners.get(saga_id) is runner:
            del self._runners[saga_id], self._tasks[saga_id]
            self._released(runner)

    @contextmanager
    def _report_release(self, runner: SagaRunner) -> Iterator[None]:
        """Report why a saga was dropped. The saga becomes due again only after its lease, so there is no busy loop."""
        saga_id = runner.claim.saga_id
        try:
            yield
        except asyncio.CancelledError:
            self.observer.emit(SagaReleased(self.name, saga_id, LOST))
            raise
        except RAISED as error:
            said = describe(error, runner.redactor)
            if not isinstance(error, Transient):
                self._failing.add(saga_id, said)
            self.observer.emit(SagaReleased(self.name, saga_id, said))
        else:
            self._failing.clear(saga_id)

    def _released(self, runner: SagaRunner) -> None:
        """Store the next due time, and wake the claim loop if there was no room before, or none for a suspect."""
        if runner.wake_seconds is not None:
            due_at = asyncio.get_running_loop().time() + runner.wake_seconds
            self._due_at = due_at if self._due_at is None else min(self._due_at, due_at)
        full = len(self._runners) + 1 >= self.settings.concurrency
        if runner.wake_seconds is not None or full or runner.was_suspect:
            self.wake()

    async def _claim_until_stopped(self) -> None:
        """Claim sagas until a stop is requested: immediately after a notification, otherwise with growing pauses."""
        idle_seconds = self.settings.poll_seconds_min
        while not self._stopping.is_set():
            self._wake.clear()
            try:
                found = await self.run_once()
            except OutriderError as error:
                # Also for errors not known to be transient: a worker should survive one bad response. The error is
                # reported.
                await wait_for(self._stopping, self._health.failed(str(error)))
                continue
            self._health.recovered()
            if found:
                idle_seconds = self.settings.poll_seconds_min
                continue
            woken = await wait_for(self._wake, self._idle(idle_seconds))
            lowest, highest = self.settings.poll_seconds_min, self.settings.poll_seconds_max
            idle_seconds = lowest if woken else min(idle_seconds * 2, highest)

    def _idle(self, seconds: float) -> float:
        if self._due_at is None:
            return seconds
        return min(seconds, max(self._due_at - asyncio.get_running_loop().time(), 0.001))

    async def _repeat(self, duty: Callable[[], Awaitable[None]], seconds: float) -> None:
        """Repeat a duty. After a store error, the retry follows soon; claims stay valid until their leases end."""
        pause = min(seconds, self.settings.renew_seconds)
        while True:
            await asyncio.sleep(pause)
            try:
                await duty()
            except OutriderError as error:
                pause = min(seconds, self._health.failed(str(error)))
            else:
                self._health.recovered()
                pause = seconds

    async def _release_all(self) -> None:
        """Let running calls finish within the shutdown timeout, then release all sagas."""
        for runner in self._runners.values():
            runner.stop()
        if self._tasks:
            await asyncio.wait(list(self._tasks.values()), timeout=self.settings.shutdown_timeout_seconds)
        for runner in self._runners.values():
            runner.abandon()
        if self._tasks:
            await asyncio.wait(list(self._tasks.values()), timeout=self.settings.lease_seconds)

    async def _cancel_all(self) -> None:
        """Cancel all sagas immediately, without a write to the store."""
        tasks: list[asyncio.Task[Any]] = list(self._tasks.values())
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


@dataclass(slots=True)
class ClaimRenewal:
    """Renews the claims of a worker, and calls `lost` with each runner whose claim is no longer valid."""

    store: SagaStore
    settings: SagaSettings
    clock: Clock
    health: StoreHealth
    runners: Mapping[UUID, SagaRunner]
    lost: Callable[[SagaRunner], None]
    _extended: asyncio.Event = field(default_factory=asyncio.Event)
    _blocked_seconds: list[float] = field(default_factory=list)

    async def renew(self) -> None:
        """Renew all claims; extend the claims of running calls while a local step may block the store."""
        runners, extra_seconds = list(self.runners.values()), max(self._blocked_seconds, default=0.0)
        calls = [runner for runner in runners if runner.has_calls and extra_seconds]
        await self._renew(calls, self.settings.lease_seconds + extra_seconds)
        await self._renew([runner for runner in runners if runner not in calls], self.settings.lease_seconds)

    @asynccontextmanager
    async def ahead(self, seconds: float) -> AsyncIterator[None]:
        """Extend claims before a local step, where the step blocks the store and claims of calls would expire."""
        if not self.store.one_at_a_time:
            yield
            return
        until = self.clock.boot_seconds() + seconds
        calling = [runner for runner in self.runners.values() if runner.has_calls]
        self._blocked_seconds.append(seconds)
        try:
            if any(runner.claimed_until < until for runner in calling):
                self._extended.set()
                try:
                    await self._renew(calling, self.settings.lease_seconds + max(self._blocked_seconds))
                except Transient as error:
                    self.health.failed(str(error))
            yield
        finally:
            self._blocked_seconds.remove(seconds)

    async def shorten(self) -> None:
        """Return extended claims to the normal lease. A long lease would delay the recovery from a dead worker."""
        await self._extended.wait()
        await asyncio.sleep(SHORTEN_SECONDS)
        if not self._blocked_seconds:
            self._extended.clear()
            await self.renew()

    async def _renew(self, runners: Sequence[SagaRunner], seconds: float) -> None:
        claims = {runner: runner.claim for runner in runners}
        if not claims:
            return
        asked_at = self.clock.boot_seconds()
        held = await self.store.renew(list(claims.values()), seconds)
        for runner, claim in claims.items():
            if claim.saga_id in held:
                runner.claimed_until = asked_at + seconds * LEASE_MARGIN
            elif runner.claim == claim and not runner.in_turn:
                # A runner in a turn may just have released the saga; otherwise its save detects the lost claim.
                self.lost(runner)


def check_children(sagas: SagaRegistry) -> None:
    """Reject a saga whose child is not among the sagas of the worker, which would wait for the child for ever::

    check_children(SagaRegistry(order, shipping))
    """
    for saga in sagas:
        for step in saga.definition.steps.values():
            if step.child and sagas.find(step.child.saga.saga_type, step.child.saga.version) is not step.child.saga:
                raise UsageError(
                    f"{step.line}: the step {step.name} of {saga.saga_type} starts {step.child.name}, which is not "
                    f"among the sagas of this worker; name it too: SagaRegistry({saga.saga_type}, "
                    f"{step.child.saga.saga_type})"
                )


def check_locals(store: SagaStore, sagas: SagaRegistry) -> None:
    """Reject a function that cannot run as a local step, and name the line of its definition::

    check_locals(await open_sagas(url), SagaRegistry(order))
    """
    for saga in sagas:
        for step in saga.definition.steps.values():
            if step.kind is StepKind.LOCAL:
                _check(store, saga.saga_type, step)


def _check(store: SagaStore, saga_type: str, step: Step) -> None:
    for act in (step.action, step.compensation):
        if act and act.function and (problem := store.transactions.check_handler(act.function)):
            raise InvalidHandler(f"the step {step.name} of {saga_type}: {definition_site(act.function)} {problem}")
