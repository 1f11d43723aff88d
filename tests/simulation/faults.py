"""The fault maker, which causes failures, and the operator, who handles dead letters."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable
from dataclasses import dataclass
from uuid import UUID

from outrider.event import OnDeadLetter
from outrider.outbox.model import Criteria, State
from outrider.stores.memory import MemoryStore
from tests.simulation.model_broker import BrokerModel
from tests.simulation.record import Record
from tests.simulation.relays import RelayGroup

ALL = Criteria(limit=10_000)


@dataclass(slots=True)
class FaultMaker:
    """Freezes, kills and replaces relays; takes the broker down, and makes topics fall silent."""

    relays: RelayGroup
    broker_model: BrokerModel
    record: Record
    rng: random.Random
    topics: list[str]

    async def run(self, gap_seconds: float) -> None:
        """Cause failures until cancelled."""
        relays = (self._freeze, self._freeze, self._kill, self._vanish, self._stop)
        faults = (*relays, self._outage, self._outage, self._silence, self._silence)
        while True:
            await asyncio.sleep(self.rng.expovariate(1 / gap_seconds))
            self.rng.choice(faults)()

    def _freeze(self) -> None:
        self.relays.freeze(self._victim(), self.rng.uniform(0.5, 2.5 * self.relays.settings.lease_seconds))

    def _kill(self) -> None:
        self.relays.kill(self._victim())

    def _vanish(self) -> None:
        self.relays.vanish(self._victim())

    def _stop(self) -> None:
        self.relays.stop(self._victim())

    def _victim(self) -> str:
        return self.rng.choice(list(self.relays.members))

    def _outage(self) -> None:
        destination = self.rng.choice(("", *self.topics))
        self.broker_model.down[destination] = self.broker_model.down.get(destination, 0) + 1
        self.record.note("broker", "down", (destination or "all",))
        asyncio.get_running_loop().call_later(self.rng.uniform(0.2, 8), self._ended_reasons, destination)

    def _silence(self) -> None:
        topic = self.rng.choice(self.topics)
        self.broker_model.mute[topic] = self.broker_model.mute.get(topic, 0) + 1
        self.record.note("broker", "mute", (topic,))
        asyncio.get_running_loop().call_later(self.rng.uniform(0.2, 8), self._silence_ended, topic)

    def _silence_ended(self, topic: str) -> None:
        self.broker_model.mute[topic] -= 1
        self.record.note("broker", "answers again", (topic,))
        if not self.broker_model.mute[topic]:
            self.broker_model.recover(topic)

    def _ended_reasons(self, destination: str) -> None:
        self.broker_model.down[destination] -= 1
        self.record.note("broker", "up", (destination or "all",))


@dataclass(slots=True)
class Operator:
    """An operator: cures and replays dead letters, discards some, and dead-letters some events by hand."""

    store: MemoryStore
    record: Record
    rng: random.Random
    calm: bool = False

    async def run(self, gap_seconds: float) -> None:
        """Look after the dead letters until cancelled."""
        while True:
            await asyncio.sleep(gap_seconds if self.calm else self.rng.expovariate(1 / gap_seconds))
            for dead_letter in await self.store.admin.dead_letters(ALL):
                await self._decide(dead_letter["event_id"], dead_letter["policy"] == OnDeadLetter.BLOCK)
            if not self.calm and self.rng.random() < 0.2:
                await self._dead_letter()

    async def _decide(self, event_id: UUID, held: bool) -> None:
        entry = self.record.entries.get(event_id)
        wanted = held or (entry is not None and entry.fate.replay_when_skipped)
        drawn = 1.0 if self.calm else self.rng.random()
        if not wanted or drawn < 0.3:
            return
        if entry is not None and drawn > 0.4:
            entry.fate.poison = ""
        if drawn < 0.45:
            self.record.discarded[event_id] = ""
            await self._act("discard", event_id, lambda: self.store.admin.discard([event_id], "operator"))
        else:
            await self._act("replay", event_id, lambda: self.store.admin.replay([event_id], "operator"))

    async def _dead_letter(self) -> None:
        found = [event for event in await self.store.admin.events(ALL) if event["event_id"] in self.record.entries]
        held = {(event["lane"], event["key"]) for event in found if event["state"] == State.OPTIMISTIC}
        # An event that a writer publishes at this moment cannot be ordered against the operator's action.
        free = [event["event_id"] for event in found if (event["lane"], event["key"]) not in held]
        if free:
            event_id, policy = self.rng.choice(free), self.rng.choice(list(OnDeadLetter))
            await self._act(
                "dead-letter", event_id, lambda: self.store.admin.dead_letter(event_id, "operator", {}, policy)
            )

    async def _act(self, verb: str, event_id: UUID, act: Callable[[], object]) -> None:
        entry = self.record.entries.get(event_id)
        self.record.note("operator", verb, (entry.label if entry else "~",))
        done = act()
        assert asyncio.iscoroutine(done)
        await done
