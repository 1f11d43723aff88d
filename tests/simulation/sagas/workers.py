"""The saga workers of a world: real ones, that are started, frozen, killed, stopped and replaced."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable
from dataclasses import dataclass, field

from outrider.errors import Transient
from outrider.saga import SagaRegistry, SagaWorker
from outrider.saga.settings import SagaSettings
from outrider.stores.memory import MemoryStore
from outrider.telemetry.events import SagaReleased, SagaStepRolledBack, TelemetryEvent
from tests.simulation.sagas.distant_sagas import DistantSagas
from tests.simulation.virtual import VirtualClock, VirtualLoop, as_actor
from tests.simulation.wire import Trace, Weather, Wire

SETTINGS = SagaSettings(
    lease_seconds=15,
    poll_seconds_min=0.5,
    poll_seconds_max=5,
    shutdown_timeout_seconds=8,
    maintenance_interval_seconds=1000,
)
IDLE_TRANSACTION_SECONDS = 10.0
"""The time after which the server ends the transaction of a frozen worker."""


@dataclass(slots=True)
class RunningWorker:
    """A worker with its task and its store."""

    worker: SagaWorker
    task: asyncio.Task[None]
    store: DistantSagas


@dataclass(slots=True)
class Releases:
    """An observer that writes to the trace why a worker dropped a saga."""

    name: str
    trace: Trace

    def emit(self, event: TelemetryEvent) -> None:
        if isinstance(event, SagaReleased):
            self.trace.note(self.name, "released", (event.error,))
        elif isinstance(event, SagaStepRolledBack):
            self.trace.note(self.name, "rolled back", (event.step, event.times))


@dataclass(slots=True)
class Workers:
    """Keeps a number of workers running."""

    loop: VirtualLoop
    store: MemoryStore
    sagas: SagaRegistry
    trace: Trace
    weather: Weather
    dice: Callable[[str], random.Random]
    on_staged: Callable[[], None]
    running: dict[str, RunningWorker] = field(default_factory=dict)
    gone: list[RunningWorker] = field(default_factory=list)
    errors: list[str] = field(default_factory=list)
    started: int = 0
    closed: bool = False

    def start(self) -> None:
        """Start a worker whose clock has an origin of its own."""
        if self.closed:
            return
        self.started += 1
        name = f"w{self.started}"
        rng = self.dice(name)
        wire = Wire(self.loop, name, self.dice(f"{name}/wire"), self.weather, self.trace)
        store = DistantSagas(self.store, wire, self.on_staged)
        worker = SagaWorker(
            store,
            self.sagas,
            store.stage,
            SETTINGS,
            Releases(name, self.trace),
            clock=VirtualClock(self.loop, rng.uniform(-1000, 1000)),
            rng=rng,
        )
        task = self.loop.create_task(worker.run(), name=name, context=as_actor(name))
        task.add_done_callback(lambda task: self._ended(name, task))
        self.running[name] = RunningWorker(worker, task, store)
        self.trace.note(name, "start")

    def freeze(self, name: str, seconds: float) -> None:
        """Stop a worker in the middle of its work for a while. Requests that it has sent go on."""
        if name not in self.loop.frozen:
            self.trace.note(name, "frozen", (round(seconds, 3),))
            self.loop.freeze(name)
            self.loop.call_later(seconds, self.thaw, name)
            if seconds > IDLE_TRANSACTION_SECONDS:
                self.loop.call_later(IDLE_TRANSACTION_SECONDS, self._end_transactions, name)

    def thaw(self, name: str) -> None:
        """Let a frozen worker go on."""
        if name in self.running and name in self.loop.frozen:
            self.trace.note(name, "thawed")
            self.loop.thaw(name)

    def kill(self, name: str) -> None:
        """Cancel a worker wherever it is."""
        self.trace.note(name, "killed")
        self.loop.thaw(name)
        self.running[name].task.cancel()

    def vanish(self, name: str) -> None:
        """Take a worker away without a trace, as a power cut does."""
        self.trace.note(name, "vanished")
        gone = self.running.pop(name)
        self.gone.append(gone)
        self.loop.freeze(name)
        gone.store.end_transactions()
        self.start()

    def stop(self, name: str) -> None:
        """Request a clean stop."""
        self.trace.note(name, "asked to stop")
        self.running[name].worker.stop()

    async def clear(self) -> None:
        """End every worker, so that the loop can be closed."""
        self.closed = True
        everybody = [*self.running.values(), *self.gone]
        for name in list(self.loop.frozen):
            self.loop.thaw(name)
        for member in everybody:
            member.task.cancel()
        await asyncio.gather(*(member.task for member in everybody), return_exceptions=True)

    def _end_transactions(self, name: str) -> None:
        if name in self.running and name in self.loop.frozen:
            self.running[name].store.end_transactions()

    def _ended(self, name: str, task: asyncio.Task[None]) -> None:
        if self.running.pop(name, None) is None:
            return
        error = None if task.cancelled() else task.exception()
        if error is not None and not isinstance(error, Transient):
            self.errors.append(f"{name} raised {error!r}")
        self.trace.note(name, "ended", (type(error).__name__,))
        self.start()
