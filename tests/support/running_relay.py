"""A relay that runs in this process, and an observer that wakes a test at each telemetry event."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from uuid import UUID

import outrider
from outrider.brokers.base import Broker
from outrider.event import Event
from outrider.outbox.relay import Relay
from outrider.outbox.settings import RelaySettings
from outrider.outbox.store import OutboxStore
from outrider.outbox.validation import StagingRules
from outrider.stores.memory import MemoryStore
from outrider.telemetry.events import BreakerOpened, EventDeadLettered, PassCompleted, Retried, TelemetryEvent
from outrider.testing import MemoryBroker, RecordingObserver

PATIENCE_SECONDS = 60.0
PAYLOAD_BYTES_MAX = 4_000_000
OUTBOX = outrider.Outbox(rules=StagingRules(payload_bytes_max=PAYLOAD_BYTES_MAX))
SETTINGS = RelaySettings(breaker_seconds_base=0.1, breaker_seconds_max=0.5, poll_seconds_max=0.2, workers=2)


class SignallingObserver(RecordingObserver):
    """A recording observer that a test can wait for."""

    def __init__(self) -> None:
        super().__init__()
        self._emitted = asyncio.Event()

    def emit(self, fact: TelemetryEvent) -> None:
        """Record the telemetry event, and wake waiting tests."""
        super().emit(fact)
        self._emitted.set()
        self._emitted = asyncio.Event()

    async def until(self, true: Callable[[], Awaitable[bool]]) -> None:
        """Wait for telemetry events until the condition is true."""
        async with asyncio.timeout(PATIENCE_SECONDS):
            while True:
                emitted = self._emitted
                if await true():
                    return
                await emitted.wait()


NEVER = RelaySettings(poll_seconds_min=600, poll_seconds_max=600)
"""Polls so rarely that a test is over before."""


@asynccontextmanager
async def relaying_without_polls(store: OutboxStore) -> AsyncIterator[Callable[..., Awaitable[None]]]:
    """Run a relay around the block; yield a function that waits until these events, and no others, are confirmed."""
    broker = MemoryBroker()
    relay = Relay(store, broker, NEVER)
    running = asyncio.create_task(relay.run())

    async def confirmed(*event_ids: UUID) -> None:
        wanted = sorted(map(str, event_ids))
        async with asyncio.timeout(PATIENCE_SECONDS):
            while sorted(message.message_id for message in broker.log) != wanted:  # noqa: ASYNC110 (short waits)
                await asyncio.sleep(0.01)

    try:
        yield confirmed
    finally:
        relay.stop()
        await running


@dataclass
class RunningRelay:
    """A running relay, and the store that it reads."""

    broker: Broker
    settings: RelaySettings = SETTINGS
    store: MemoryStore = field(default_factory=MemoryStore)
    observer: SignallingObserver = field(default_factory=SignallingObserver)

    @asynccontextmanager
    async def open(self) -> AsyncIterator[RunningRelay]:
        """Let the relay run for the block."""
        relay = Relay(self.store, self.broker, self.settings, observer=self.observer)
        running = asyncio.create_task(relay.run())
        try:
            yield self
        finally:
            relay.stop()
            await running

    async def stage(self, *events: Event) -> list[str]:
        """Stage events; return their ids."""
        async with self.store.transaction() as conn:
            return [str(event_id) for event_id in await OUTBOX.stage(conn, *events)]

    async def sent(self) -> int:
        """Count what has been delivered."""
        return (await self.store.admin.counts()).get("sent", 0)

    async def until_sent(self, count: int, **others: int) -> None:
        """Wait until so many have been delivered, and so many are in the other states named."""

        async def settled() -> bool:
            counts = await self.store.admin.counts()
            return all(counts.get(state, 0) == wanted for state, wanted in {"sent": count, **others}.items())

        await self.observer.until(settled)

    async def until_emitted(self, kind: type[TelemetryEvent], count: int = 1) -> None:
        """Wait until so many telemetry events of a kind were emitted."""

        async def emitted() -> bool:
            return len(self.observer.of(kind)) >= count

        await self.observer.until(emitted)

    async def until_confirmed(self, count: int) -> None:
        """Wait until at least so many were confirmed."""

        async def confirmed() -> bool:
            return sum(fact.confirmed for fact in self.observer.of(PassCompleted)) >= count

        await self.observer.until(confirmed)

    @property
    def failed_attempts(self) -> list[TelemetryEvent]:
        """The telemetry events of failed attempts."""
        return [*self.observer.of(Retried), *self.observer.of(EventDeadLettered)]

    @property
    def down(self) -> set[str]:
        """The destinations that were found to be down."""
        return {fact.destination for fact in self.observer.of(BreakerOpened)}
