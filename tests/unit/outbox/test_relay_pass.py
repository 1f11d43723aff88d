"""What a pass of the relay reads."""

from __future__ import annotations

from collections.abc import Sequence

from outrider import Event, Relay, RelaySettings
from outrider.brokers.base import PublishResult
from outrider.event import Message
from outrider.stores.memory import MemoryStore
from outrider.telemetry.events import PassCompleted
from outrider.testing import MemoryBroker
from outrider.testing.fakes import ManualClock, RecordingObserver
from tests.support.memory_benches import MemoryHarness

KEYS, EVENTS = 64, 12_800
WAVE_SECONDS = 0.01


class SlowBroker(MemoryBroker):
    """A broker that takes the same time for each wave, so a pass ends before its batch."""

    def __init__(self, clock: ManualClock) -> None:
        super().__init__()
        self._clock = clock

    async def publish(self, messages: Sequence[Message]) -> Sequence[PublishResult]:
        self._clock.advance(seconds=WAVE_SECONDS)
        return await super().publish(messages)


async def test_a_relay_reads_an_event_hardly_more_than_once_although_its_passes_run_out_of_time() -> None:
    clock, observer = ManualClock(), RecordingObserver()
    store, broker = MemoryStore(clock=clock), SlowBroker(clock)
    harness = MemoryHarness(store, clock)
    await harness.stage(*(Event("order.placed", {}, key=f"k{number % KEYS}") for number in range(EVENTS)))
    relay = Relay(store, broker, RelaySettings(workers=1), observer=observer, clock=clock)
    await relay.heartbeat()
    while len(broker.log) < EVENTS:
        await relay.heartbeat()
        await relay.run_once()
    fetched = sum(event.fetched for event in observer.of(PassCompleted))
    assert EVENTS <= fetched < 1.5 * EVENTS
