"""A shop with sagas in memory: a test owns the clock, lets workers work, and carries the post by hand."""

from __future__ import annotations

import asyncio
import json
import random
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from datetime import datetime
from typing import Any
from uuid import UUID, uuid4

import outrider
from outrider import Event, RetryPolicy
from outrider.errors import Unreachable
from outrider.event import Delivery
from outrider.outbox.relay import Relay
from outrider.outbox.settings import RelaySettings
from outrider.saga import Saga, SagaRegistry, SagaSettings, SagaWorker
from outrider.saga.definition.step_handles import LocalStep, RequestStep
from outrider.saga.model import Claim, MessageKind, NewSagaMessage, Phase, SagaChange, SagaRecord, Status, StepStatus
from outrider.saga.replies import ReplyHandler
from outrider.stores.memory import MemorySagas, MemoryStore, MemoryTransaction
from outrider.telemetry.events import TelemetryEvent
from outrider.testing import ManualClock, MemoryBroker, RecordingObserver
from outrider.wire import decode

ONCE = RetryPolicy(jitter=0, max_attempts=1)
TWICE = RetryPolicy(jitter=0, max_attempts=2)
PLAIN = RetryPolicy(jitter=0)
LEASE_SECONDS = 15.0
PATIENCE_SECONDS = 5.0


class Bell(RecordingObserver):
    """A notebook that tells when a fact was heard."""

    def __init__(self) -> None:
        super().__init__()
        self._rung = asyncio.Event()

    def emit(self, fact: TelemetryEvent) -> None:
        super().emit(fact)
        self._rung.set()

    async def heard(self, kind: type[TelemetryEvent], count: int = 1) -> None:
        """Wait until a fact was heard so often."""
        async with asyncio.timeout(PATIENCE_SECONDS):
            while len(self.of(kind)) < count:
                self._rung.clear()
                await self._rung.wait()


class FlakySagas(MemorySagas):
    """A store whose transactions fail as a test wants: `away` of them do not begin, `unheard` commit and do not say."""

    away = 0
    unheard = 0
    saving: Callable[[SagaChange], None] = staticmethod(lambda turn: None)

    async def save(self, tx: MemoryTransaction, claim: Claim, turn: SagaChange, lease_seconds: float) -> datetime:
        self.saving(turn)
        return await super().save(tx, claim, turn, lease_seconds)

    @asynccontextmanager
    async def transaction(self) -> AsyncIterator[MemoryTransaction]:
        if self.away > 0:
            self.away -= 1
            raise Unreachable("the store does not answer")
        async with super().transaction() as tx:
            yield tx
        if self.unheard > 0:
            self.unheard -= 1
            raise Unreachable("the connection was lost")


class Shop:
    """A memory store, sagas in it, and the wire between it and participants."""

    def __init__(self, *sagas: Saga[Any], own_time: bool = True) -> None:
        self.clock, self.observer, self.broker = ManualClock(), Bell(), MemoryBroker()
        self.outbox = MemoryStore(clock=self.clock if own_time else None)
        self.store = FlakySagas(self.outbox)
        self.sagas = SagaRegistry(*sagas)
        self.intake = ReplyHandler(self.sagas, observer=self.observer)
        relay = RelaySettings(workers=1)
        self.relay = Relay(self.outbox, self.broker, relay, clock=self.clock, rng=random.Random(1))
        self.worker = self.hire()
        self._read = 0

    def hire(self, seed: int = 0, **settings: Any) -> SagaWorker:
        """Make another worker."""
        made = SagaSettings(**{"lease_seconds": LEASE_SECONDS, **settings})
        rng = random.Random(seed)
        return SagaWorker(self.store, self.sagas, outrider.stage, made, self.observer, clock=self.clock, rng=rng)

    async def start(self, saga: Saga[Any], state: Any, correlation_id: str = "A-7") -> UUID:
        async with self.store.transaction() as tx:
            return await saga.start(tx, state, correlation_id=correlation_id)

    async def works(self, worker: SagaWorker | None = None) -> None:
        """Let a worker work until nothing is left that it could do now."""
        worker = worker or self.worker
        while await worker.run_once():
            await worker.rest()

    async def passes(self, seconds: float) -> None:
        """Let time pass, and the worker do what is due then."""
        self.clock.advance(seconds=seconds)
        await self.works()

    async def sent(self) -> list[Event]:
        """Return the events that were published since the last time."""
        # Twice: when much time has passed, it finds out with the first that it was taken for dead.
        await self.relay.heartbeat()
        await self.relay.heartbeat()
        while await self.relay.run_once():
            pass
        fresh, self._read = self.broker.log[self._read :], len(self.broker.log)
        return [_opened(message) for message in fresh]

    async def answer(self, command: Event, reply: str, payload: Any = None, *, saga_type: str = "order") -> bool:
        """Answer a command as a participant does."""
        headers = {"saga_key": command.headers["saga_key"]}
        event = Event(reply, payload or {}, saga_id=command.saga_id, headers=headers, event_id=uuid4())
        return await self.arrives(event, saga_type=saga_type)

    async def arrives(self, event: Event, *, saga_type: str = "order") -> bool:
        """Let an event come in, as an inbox does."""
        async with self.store.transaction() as tx:
            return await self.intake.deliver(saga_type, event, tx)

    async def order(self, saga_id: UUID, verb: str) -> None:
        """Tell a saga what to do, as a person does."""
        body = json.dumps({"actor": "ann"}).encode()
        async with self.store.transaction() as tx:
            await self.store.deliver(tx, [NewSagaMessage(saga_id, MessageKind.OPERATOR, verb, None, body, uuid4())])

    async def shown(self, saga_id: UUID) -> SagaRecord:
        record = await self.store.admin.show(saga_id)
        assert record is not None
        return record

    async def status(self, saga_id: UUID) -> Status:
        return (await self.shown(saga_id)).instance.status

    async def state(self, saga_id: UUID) -> dict[str, Any]:
        found: dict[str, Any] = json.loads((await self.shown(saga_id)).instance.state)
        return found

    async def progress(self, saga_id: UUID, step: str, phase: Phase = Phase.ACTION) -> tuple[StepStatus, int] | None:
        """Return how far a step has come, and in how many attempts."""
        journal = (await self.shown(saga_id)).journal
        return next(((e.status, e.attempts) for e in journal if (e.step, e.phase) == (step, phase)), None)

    async def trail(self, saga_id: UUID) -> list[str]:
        return [line["what"] for line in await self.store.admin.audit(saga_id)]


def _opened(message: Any) -> Event:
    headers = {name: value.encode() for name, value in message.headers.items()}
    event = decode(Delivery(message.topic, message.key.encode(), message.body, headers)).event
    assert event is not None
    return event


@dataclass
class Order:
    """What the sagas of these tests keep."""

    order_id: str
    amount: int = 0
    reservation: str | None = None
    charge: str | None = None
    parcel: str | None = None


def order_saga() -> Saga[Order]:
    return Saga("order", Order)


def local(saga: Saga[Order], log: list[str], name: str = "create", **options: Any) -> LocalStep[Order]:
    """Add a local step that notes what it does, and what is compensated of it."""

    @saga.local(name=name, **options)
    async def do(run: Any, tx: Any) -> None:
        log.append(name)

    @do.compensate()
    async def compensate(run: Any, tx: Any) -> None:
        log.append(f"compensate {name}")

    return do


def request(saga: Saga[Order], name: str = "reserve", **options: Any) -> RequestStep[Order]:
    """Add a request to the stock, or to whomever the options say."""
    plain: dict[str, Any] = {
        "command": "stock.reserve",
        "topic": "stock",
        "reply": "stock.reserved",
        "rejection": "stock.refused",
        "compensate": "stock.release",
        "compensated": "stock.released",
        "timeout_seconds": 30,
        "retry": PLAIN,
        "name": name,
    }
    return saga.request(**{**plain, **options})


async def begun(shop: Shop, saga: Saga[Order], **state: Any) -> UUID:
    """Start a saga, and let it come as far as it comes."""
    saga_id = await shop.start(saga, Order("A-7", **state))
    await shop.works()
    return saga_id


async def until(event: asyncio.Event) -> None:
    async with asyncio.timeout(PATIENCE_SECONDS):
        await event.wait()


@asynccontextmanager
async def running(worker: SagaWorker) -> AsyncIterator[asyncio.Task[None]]:
    """Run a worker around the block."""
    task = asyncio.create_task(worker.run())
    try:
        yield task
    finally:
        worker.stop()
        await asyncio.gather(task, return_exceptions=True)
