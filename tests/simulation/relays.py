"""The relays of a world: started, frozen, killed, stopped, and replaced."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable
from dataclasses import dataclass, field

from outrider import Relay, RelaySettings, Transient
from outrider.brokers.base import Capabilities
from outrider.stores.memory import MemoryStore
from tests.simulation.model_broker import BrokerModel, ModelBroker
from tests.simulation.record import Record
from tests.simulation.virtual import VirtualClock, VirtualLoop, as_actor
from tests.simulation.wire import DistantStore, Weather, Wire


@dataclass(slots=True)
class Member:
    """A relay that runs."""

    relay: Relay
    task: asyncio.Task[None]


@dataclass(slots=True)
class RelayGroup:
    """Keeps a number of relays running, whatever happens to them."""

    loop: VirtualLoop
    store: MemoryStore
    broker_model: BrokerModel
    record: Record
    settings: RelaySettings
    weather: Weather
    new_rng: Callable[[str], random.Random]
    capabilities: Capabilities
    members: dict[str, Member] = field(default_factory=dict)
    gone: list[Member] = field(default_factory=list)
    left: list[str] = field(default_factory=list)
    hired: int = 0
    closed: bool = False

    def add(self) -> None:
        """Start a relay with a clock of its own origin."""
        if self.closed:
            return
        self.hired += 1
        name = f"r{self.hired}"
        rng = self.new_rng(name)
        wire = Wire(self.loop, name, self.new_rng(f"{name}/wire"), self.weather, self.record)
        broker = ModelBroker(self.broker_model, wire, self.capabilities, lambda: self._swoon(name, rng))
        relay = Relay(
            DistantStore(self.store, wire, self.record),
            broker,
            self.settings,
            clock=VirtualClock(self.loop, rng.uniform(-1000, 1000)),
            rng=rng,
        )
        task = self.loop.create_task(relay.run(), name=name, context=as_actor(name))
        task.add_done_callback(lambda task: self._ended(name, task))
        self.members[name] = Member(relay, task)
        self.record.note(name, "start")

    def freeze(self, name: str, seconds: float) -> None:
        """Stop a relay in its tracks for a while. Its clock goes on, and so does what it has sent."""
        if name in self.members and name not in self.loop.frozen:
            self.record.note(name, "frozen", (round(seconds, 3),))
            self.loop.freeze(name)
            self.loop.call_later(seconds, self._thaw, name)

    def _swoon(self, name: str, rng: random.Random) -> None:
        """The worst moment to be stopped: the broker has the messages, and nothing is settled."""
        if self.weather.swoon and rng.random() < self.weather.swoon:
            self.freeze(name, rng.uniform(1, 2.5) * self.settings.lease_seconds)

    def kill(self, name: str) -> None:
        """Cancel a relay wherever it is."""
        member = self.members[name]
        self.record.note(name, "killed")
        self.loop.thaw(name)
        member.task.cancel()

    def vanish(self, name: str) -> None:
        """Take a relay away without a trace, as a power cut does."""
        self.record.note(name, "vanished")
        self.gone.append(self.members.pop(name))
        self.loop.freeze(name)
        self.add()

    def stop(self, name: str) -> None:
        """Ask a relay to stop."""
        self.record.note(name, "asked to stop")
        self.members[name].relay.stop()

    def calm(self) -> None:
        """Let every relay run on undisturbed."""
        for name in list(self.members):
            self._thaw(name)

    async def close(self) -> None:
        """Stop everybody cleanly, then clear away those who vanished."""
        self.closed = True
        members = list(self.members.values())
        for member in members:
            member.relay.stop()
        await asyncio.gather(*(member.task for member in members), return_exceptions=True)
        self.left += [member.relay.name for member in members]

    def left_behind(self) -> list[str]:
        """Name lanes that still belong to a relay which left cleanly."""
        return [
            f"lane {n} is owned by nobody's {r.owner}"
            for n, r in self.store.tables.lanes.items()
            if r.owner in self.left
        ]

    async def clear(self) -> None:
        """End every task there is, so that the loop can be closed."""
        self.closed = True
        everybody = [*self.members.values(), *self.gone]
        for member in everybody:
            member.task.cancel()
        for name in list(self.loop.frozen):
            self.loop.thaw(name)
        await asyncio.gather(*(member.task for member in everybody), return_exceptions=True)

    def _thaw(self, name: str) -> None:
        if name in self.members and name in self.loop.frozen:
            self.record.note(name, "thawed")
            self.loop.thaw(name)

    def _ended(self, name: str, task: asyncio.Task[None]) -> None:
        if self.members.pop(name, None) is None:
            return
        error = None if task.cancelled() else task.exception()
        if error is not None and not isinstance(error, Transient):
            self.record.crashes.append(f"{name} crashed: {error!r}")
        self.record.note(name, "ended", (type(error).__name__,))
        self.add()
