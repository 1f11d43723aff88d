"""A world: writers, relays, a broker and an operator, all drawn from one seed."""

from __future__ import annotations

import asyncio
import random
from dataclasses import dataclass

from outrider import Outbox, RelaySettings, RetryPolicy
from outrider.brokers.base import Capabilities
from outrider.event import OnDeadLetter
from outrider.outbox.optimistic import OptimisticWriter
from outrider.stores.memory import MemoryStore
from tests.simulation.checks import at_rest, violations
from tests.simulation.faults import FaultMaker, Operator
from tests.simulation.model_broker import BrokerModel, ModelBroker
from tests.simulation.record import Graveyard, Record, Step
from tests.simulation.relays import RelayGroup
from tests.simulation.virtual import VirtualClock, VirtualLoop
from tests.simulation.wire import DistantStore, Weather, Wire
from tests.simulation.writers import Scene, StreamPlan, Writer

STORM_SECONDS = 40.0
DRAIN_SECONDS = 900.0
LEASE_SECONDS = 6.0
BLOCKING, SKIPPING = "orders", "mails"
MODES = ("numbered", "numbered", "locked", "free", "keyless")


class Unsound(AssertionError):
    """A guarantee was broken in a world."""


@dataclass(frozen=True, slots=True)
class Options:
    """How a world differs from what its seed says. `claims_order` makes the broker claim to keep order."""

    claims_order: bool | None = None
    ordered: bool | None = None
    faults: bool = True


@dataclass(frozen=True, slots=True)
class Report:
    """How it went."""

    trace: list[Step]
    events: int
    deliveries: int
    duplicates: int
    virtual_seconds: float


def run(seed: int, options: Options | None = None) -> Report:
    """Run the world of a seed to its end; raise Unsound if a guarantee was broken."""
    loop = VirtualLoop()
    world = World(seed, loop, options or Options())
    try:
        loop.run_until_complete(world.live())
    finally:
        loop.close()
    if wrong := world.violations:
        raise Unsound(_describe(seed, wrong))
    record = world.record
    duplicates = len(record.log) - len({delivery.event_id for delivery in record.log})
    return Report(record.trace, len(record.entries), len(record.log), duplicates, world.ended_at)


def _describe(seed: int, wrong: list[str]) -> str:
    found = "\n  ".join(wrong[:12])
    return f"seed {seed}:\n  {found}\nstudy it with: python -m tests.simulation.replay {seed}"


class World:
    """Everybody, and the order of events: a storm, then calm, then the reckoning."""

    def __init__(self, seed: int, loop: VirtualLoop, options: Options) -> None:
        self.seed, self.loop = seed, loop
        self.record = Record(loop)
        rng = self.new_rng("world")
        self.rng = rng
        self.faults = options.faults
        self.store = MemoryStore(lanes=rng.choice((1, 2, 3)), clock=VirtualClock(loop))
        self.store.tables.dead = Graveyard(self.record)
        ordered = rng.random() < 0.25 if options.ordered is None else options.ordered
        self.broker_model = BrokerModel(self.record, self.new_rng("broker"), ordered)
        self.weather = _weather(rng) if options.faults else Weather(slow=0.1)
        capabilities = Capabilities(ordered=ordered if options.claims_order is None else options.claims_order)
        self.relays = RelayGroup(
            loop, self.store, self.broker_model, self.record, _settings(rng), self.weather, self.new_rng, capabilities
        )
        mischief = rng.choice((0.5, 1.0, 2.0)) if options.faults else 0.0
        self.scene = Scene(self.store, self.record, _plans(rng), late=rng.choice((0.05, 0.2)), mischief=mischief)
        self.scene.breaking = int(rng.random() < 0.3)
        self.violations: list[str] = []
        self.ended_at = 0.0

    def new_rng(self, name: str) -> random.Random:
        """Give every actor chances of its own, so that one actor's draws do not change another's."""
        return random.Random(f"{self.seed}/{name}")

    async def live(self) -> None:
        """Let it all happen."""
        operator = Operator(self.store, self.record, self.new_rng("operator"))
        try:
            await self._storm(operator)
            await self._calm(operator)
        finally:
            await self.relays.clear()

    async def _storm(self, operator: Operator) -> None:
        for _ in range(self.rng.choice((2, 2, 3))):
            self.relays.add()
        maker = FaultMaker(self.relays, self.broker_model, self.record, self.new_rng("faults"), [BLOCKING, SKIPPING])
        makers = [maker.run(self.rng.choice((3, 6, 12))), operator.run(6)] if self.faults else [self._restarts()]
        tasks = [self.loop.create_task(make) for make in makers]
        writers = [self._writer(f"w{n}") for n in range(3)]
        gap = STORM_SECONDS / 8
        await asyncio.gather(*(writer.run(self.rng.randint(4, 8), gap) for writer in writers))
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    def _writer(self, name: str) -> Writer:
        """A writer has its own line to the store and to the broker; only some publish after their commit."""
        wire = Wire(self.loop, name, self.new_rng(f"{name}/wire"), self.weather, self.record)
        store, broker = (
            DistantStore(self.store, wire, self.record),
            ModelBroker(self.broker_model, wire, self.relays.capabilities),
        )
        sender = OptimisticWriter(
            store,
            broker,
            Outbox().insert,
            enabled=self.rng.random() < 0.4,
            clock=VirtualClock(self.loop, self.rng.uniform(-1000, 1000)),
        )
        return Writer(self.scene, name, self.new_rng(name), sender)

    async def _restarts(self) -> None:
        """The only disturbance in a world without faults: relays that are stopped cleanly and replaced."""
        while True:
            await asyncio.sleep(self.rng.uniform(0.5, 5))
            self.relays.stop(self.rng.choice(list(self.relays.members)))

    async def _calm(self, operator: Operator) -> None:
        self.record.note("world", "calm")
        self.weather.clear_up()
        self.relays.calm()
        operator.calm = True
        person = self.loop.create_task(operator.run(2))
        limit = self.loop.time() + DRAIN_SECONDS
        while not (self._rests() or self.loop.time() > limit):  # noqa: ASYNC110 - the sleep is virtual
            await asyncio.sleep(0.5)
        person.cancel()
        await asyncio.gather(person, return_exceptions=True)
        await self.relays.close()
        self.ended_at = self.loop.time()
        self.violations = [*violations(self.record, self.store), *self.relays.left_behind()]

    def _rests(self) -> bool:
        return at_rest(self.record, self.store) or bool(self.record.crashes)


def _plans(rng: random.Random) -> list[StreamPlan]:
    keys = ("a", "b", "c")
    return [
        StreamPlan(topic, key, rng.choice((1, 5, 5, 5, 8)), rng.choice(MODES))
        for topic in (BLOCKING, SKIPPING)
        for key in rng.sample(keys, 2)
    ]


def _weather(rng: random.Random) -> Weather:
    return Weather(
        slow=rng.choice((0.0, 0.1, 0.3)),
        stalled=rng.choice((0.0, 0.02, 0.06)),
        stall_seconds=2.5 * LEASE_SECONDS,
        lost=rng.choice((0.0, 0.01, 0.03)),
        swoon=rng.choice((0.0, 0.05, 0.15)),
    )


def _settings(rng: random.Random) -> RelaySettings:
    return RelaySettings(
        lease_seconds=LEASE_SECONDS,
        publish_timeout_seconds=rng.choice((1.0, 2.5)),
        batch_max=rng.choice((1, 4, 100)),
        in_flight_max=rng.choice((1, 3, 100)),
        workers=rng.choice((1, 2)),
        poll_seconds_min=0.15,
        poll_seconds_max=4.0,
        breaker_seconds_base=2.0,
        breaker_seconds_max=4.0,
        maintenance_interval_seconds=10.0,
        retry=RetryPolicy(base_seconds=0.5, cap_seconds=4.0, max_attempts=6),
        dead_letter_policies={SKIPPING: OnDeadLetter.SKIP},
    )
