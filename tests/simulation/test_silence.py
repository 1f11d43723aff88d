"""Destinations that never answer, in virtual time: the others go on as if nothing had happened."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Sequence
from typing import Any

import pytest

from outrider import Event, Relay, RelaySettings, stage
from outrider.brokers.base import CONFIRMED, Capabilities, PublishResult, Unanswered, Unknown
from outrider.errors import Transient
from outrider.event import Message
from outrider.outbox.publisher import BatchPublisher
from outrider.stores.memory import MemoryStore
from outrider.telemetry.events import BreakerOpened, EventDeadLettered, Retried
from outrider.testing import MemoryBroker, RecordingObserver
from tests.simulation.virtual import VirtualClock, VirtualLoop

MUTE = 10
SECONDS = 30.0
EVERY_SECONDS = 0.05
ANSWER_SECONDS = 0.005
PATIENCE_SECONDS = 0.2
SILENCE_SECONDS = 4.0


class PartlyMuteBroker(MemoryBroker):
    """A broker that takes its time to answer, and never answers for the topics in `mute`."""

    def __init__(self, mute: int) -> None:
        super().__init__()
        self.capabilities = Capabilities(publish_seconds=SILENCE_SECONDS)
        self.mute = {f"mute-{number}" for number in range(mute)}
        self.stored: dict[str, float] = {}
        self.unconfirmed: set[str] = set()
        self.in_flight: dict[str, int] = {}
        self.in_flight_max = 0

    async def publish(self, messages: Sequence[Message]) -> Sequence[PublishResult]:
        await asyncio.sleep(ANSWER_SECONDS)
        results: list[PublishResult] = [self._answer(message) for message in messages]
        if results.count(CONFIRMED) < len(results):
            await asyncio.sleep(PATIENCE_SECONDS)
        return results

    async def publish_apart(self, messages: Sequence[Message]) -> Sequence[PublishResult]:
        results = [self._answer(message) for message in messages]
        return [await result.answer if isinstance(result, Unanswered) else result for result in results]

    async def probe(self, destination: str) -> None:
        if destination in self.unconfirmed:
            self.unconfirmed.discard(destination)
            raise Transient(f"{destination} did not answer")

    def _answer(self, message: Message) -> PublishResult:
        loop = asyncio.get_running_loop()
        if message.topic not in self.mute:
            self.stored.setdefault(message.message_id, loop.time())
            return CONFIRMED
        answer: asyncio.Future[PublishResult] = loop.create_future()
        self.in_flight[message.topic] = self.in_flight.get(message.topic, 0) + 1
        self.in_flight_max = max(self.in_flight_max, self.in_flight[message.topic])
        loop.call_later(SILENCE_SECONDS, self._give_up, message.topic, answer)
        return Unanswered(message.topic, answer)

    def _give_up(self, topic: str, answer: asyncio.Future[PublishResult]) -> None:
        self.in_flight[topic] -= 1
        self.unconfirmed.add(topic)
        if not answer.done():
            answer.set_result(Unknown("no answer", topic))


class Silence:
    """Half a minute of a relay with a number of mute topics; all topics get events all the time."""

    def __init__(self, mute: int) -> None:
        self.broker = PartlyMuteBroker(mute)
        self.observer = RecordingObserver()
        self.latencies: list[float] = []
        loop = VirtualLoop()
        try:
            loop.run_until_complete(self._live(loop))
        finally:
            loop.close()

    async def _live(self, loop: VirtualLoop) -> None:
        store = MemoryStore(clock=VirtualClock(loop))
        clock, rng = VirtualClock(loop), random.Random(0)
        relay = Relay(store, self.broker, RelaySettings(), observer=self.observer, clock=clock, rng=rng)
        running = asyncio.create_task(relay.run())
        staged: dict[str, float] = {}
        while loop.time() < SECONDS:
            number = len(staged)
            topics = ["healthy", *(self.broker.mute if number % 5 == 0 else ())]
            async with store.transaction() as tx:
                events = [Event("changed", {}, topic=topic, key=f"k{number % 20}") for topic in sorted(topics)]
                ids = await stage(tx, *events)
            staged[str(ids[0])] = loop.time()
            await store.notify()
            await asyncio.sleep(EVERY_SECONDS)
        self.latencies = sorted(self.broker.stored.get(name, loop.time()) - at for name, at in staged.items())
        relay.stop()
        await running

    def share(self, part: float) -> float:
        """Return the latency that this part of the healthy events does not exceed."""
        return self.latencies[int(part * (len(self.latencies) - 1))]


def violations(silence: Silence, healthy: Silence) -> list[str]:
    """Name the rules that a relay with mute destinations breaks."""
    found = []
    if silence.share(0.9) > 2 * healthy.share(0.9):
        found.append(f"healthy events take {silence.share(0.9):.3f} s, and {healthy.share(0.9):.3f} s without silence")
    if silence.share(1) > 1:
        found.append(f"a healthy event took {silence.share(1):.3f} s")
    if len(silence.observer.of(Retried)) + len(silence.observer.of(EventDeadLettered)):
        found.append("a silence has spent an attempt")
    if any(not opened.destination for opened in silence.observer.of(BreakerOpened)):
        found.append("the connection counts as down")
    return found


def test_healthy_destinations_go_on_while_ten_others_never_answer() -> None:
    silence = Silence(MUTE)
    assert violations(silence, Silence(0)) == []
    assert {opened.destination for opened in silence.observer.of(BreakerOpened)} == silence.broker.mute
    assert silence.broker.in_flight_max <= 4, "more than one message for each worker went to a mute destination"


def test_without_late_answers_healthy_events_wait_for_mute_destinations(monkeypatch: pytest.MonkeyPatch) -> None:
    """The mutation: a publish returns only with the last answer."""
    monkeypatch.setattr(PartlyMuteBroker, "publish", PartlyMuteBroker.publish_apart)
    assert violations(Silence(MUTE), Silence(0))


def test_without_trials_apart_healthy_events_wait_for_the_suspects(monkeypatch: pytest.MonkeyPatch) -> None:
    """The mutation: the suspects of every destination need the whole broker for themselves."""

    def no_trial(*_: Any) -> str:
        return ""

    monkeypatch.setattr(BatchPublisher, "_half_open_destination", no_trial)
    assert violations(Silence(MUTE), Silence(0))
