"""A world of one saga and real workers. A seed decides everything: first faults, then quiet until the saga rests."""

from __future__ import annotations

import asyncio
import json
import random
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any
from unittest.mock import patch
from uuid import UUID

from outrider.errors import InvalidState, StepRejected, StepUnavailable
from outrider.event import Event, OutboxRow
from outrider.saga import SagaRegistry
from outrider.saga.definition.steps import StepKind, base_name
from outrider.saga.execution.step_executor import KEY_HEADER, PHASE_HEADER
from outrider.saga.model import LOSSES_MAX, MessageKind, NewSagaMessage, Phase, SagaRecord, Status
from outrider.saga.planner import results
from outrider.saga.replies import ReplyHandler
from outrider.stores.memory import MemorySagas, MemoryStore
from outrider.stores.memory.saga import record_of
from outrider.stores.memory.tables import SagaRow
from tests.simulation.sagas import checks
from tests.simulation.sagas.definitions import SAGA_TYPE, State, random_saga
from tests.simulation.sagas.participants import (
    Answer,
    Answered,
    Down,
    ServiceOutage,
    random_outage,
    random_participants,
)
from tests.simulation.sagas.watcher import SavedInput, watch_turns
from tests.simulation.sagas.workers import SETTINGS, Workers
from tests.simulation.virtual import VirtualClock, VirtualLoop, as_actor
from tests.simulation.wire import Weather

FAULTS_SECONDS = 60.0
QUIET_SECONDS_MAX = 4_000.0
COMMANDS = ("retry", "compensate", "mark_done")
OVER = (Status.COMPLETED, Status.COMPENSATED)


class Unsound(AssertionError):
    """A guarantee was broken."""


@dataclass(frozen=True, slots=True)
class Report:
    """The end of a world."""

    status: Status
    trace: tuple[str, ...]


@dataclass(slots=True)
class SagaTrace:
    """Everything that happened, a line each."""

    loop: VirtualLoop
    lines: list[str] = field(default_factory=list)

    def note(self, actor: str, verb: str, ids: Sequence[object] = ()) -> None:
        self.lines.append(f"{self.loop.time():9.3f}  {actor:<8} {verb} {' '.join(map(str, ids))}".rstrip())


class World:
    """The saga, its workers, its participants, and the network between them."""

    def __init__(self, seed: int, loop: VirtualLoop, *, calm: bool = False, outage: bool | None = None) -> None:
        """Draw a world. A `calm` world has no faults; `outage` says whether services are down for a while.

        The saga of a calm world is plain: nothing in it depends on the time or on the order of replies.
        """
        self.seed, self.loop = seed, loop
        self.rng = rng = self.dice("world")
        self.trace = SagaTrace(loop)
        self.saga = random_saga(rng, self, plain=calm)
        self.definition = self.saga.definition
        self.participants = random_participants(self.definition, rng)
        self.store = MemoryStore(lanes=1, clock=VirtualClock(loop))
        self.sagas = SagaRegistry(self.saga)
        self.replies = ReplyHandler(self.sagas)
        self.new = self.saga.new(State(), "A-7")
        self.losses_max = self.dice("losses").choice((2, LOSSES_MAX))
        self.history = checks.History(self.definition, losses_max=self.losses_max)
        self.faults = rng.choice((0.0, 0.5, 1.0, 2.0))
        self.people = rng.choice((0.0, 0.0, 0.2, 1.0))
        self.repairs = rng.choice((0, 2, 4))
        if calm:
            # An operator would decide by luck how a saga ends.
            self.faults = self.people = self.repairs = 0
            self.participants.heal()
        down = self.dice("outage")
        has_outage = down.random() < 0.25 if outage is None else outage
        self.outage = random_outage(self.definition, down) if has_outage else ServiceOutage()
        self.weather = _weather(rng) if self.faults else Weather()
        self.staged = asyncio.Event()
        self.workers = Workers(loop, self.store, self.sagas, self.trace, self.weather, self.dice, self.staged.set)
        self.in_flight = 0
        self.deliveries: set[asyncio.Task[Any]] = set()
        self.events = 0
        self.problems: list[str] = []

    def dice(self, name: str) -> random.Random:
        """Return the random numbers of one actor, so that the draws of an actor change no other actor."""
        return random.Random(f"{self.seed}/{name}")

    @property
    def row(self) -> SagaRow:
        """Return the saga as stored."""
        return self.store.sagas.sagas.rows[self.new.saga_id]

    @property
    def record(self) -> SagaRecord:
        """Return the saga as a worker reads it."""
        found = record_of(self.row, self.store.clock.now())
        assert found is not None
        return found

    @property
    def status(self) -> Status:
        """Return the status of the saga as stored."""
        return self.record.instance.status

    async def live(self) -> None:
        """Run the world to its end."""
        store = MemorySagas(self.store)
        async with store.transaction() as tx:
            assert await store.start(tx, self.new)
        relay = self.loop.create_task(self._relay())
        for _ in range(2):
            self.workers.start()
        try:
            with watch_turns(self.saved, self.fail), patch.object(results, "LOSSES_MAX", self.losses_max):
                self._send_awaited_events()
                if self.faults:
                    await self._misbehave()
                await self._quiet()
                for _ in range(self.repairs):
                    if self.status is Status.FAILED and not self.problems:
                        await self._look_after()
                # A reply that arrives in the moment of the end lies in the mailbox until the next maintenance.
                await store.prune(saga_days=90, audit_days=365, participant_memory_days=90)
                self.problems += [*checks.at_rest(self), *self.workers.errors] if not self.problems else []
        finally:
            relay.cancel()
            await self.workers.clear()
            await asyncio.gather(relay, *self.deliveries, return_exceptions=True)

    def fail(self, problem: str) -> None:
        """Record a broken guarantee."""
        self.problems.append(problem)

    def saved(self, turn: SavedInput) -> None:
        """Check a turn whose transaction has just been committed."""
        for note in turn.plan.notes:
            self.trace.note(turn.claim.worker, f"{note.step or ''} {note.what}", (note.detail,))
        if self.record.instance.epoch != turn.claim.epoch:
            self.fail("a worker saved without its claim")
        self.problems += self.history.turn(turn.record, turn.inputs, turn.plan, self.row)

    async def call(self, step: str, phase: Phase, key: str) -> None:
        """Call a participant over the network. The request arrives even if the worker dies meanwhile."""
        if (step, phase) not in self.row.journal:
            self.fail(f"{step} was called before its turn was saved")
        answer: asyncio.Future[Answer] = self.loop.create_future()

        def arrive() -> None:
            if self.is_down(step, phase):
                return self.send("result", partial(_answer, answer, Down()), repeated=False)
            given = self.participants.receive(step, phase, key)
            if not self.participants.is_silent(step, phase) and not self.strikes("result lost", 0.1):
                self.send("result", partial(_answer, answer, given), repeated=False)
            return None

        self.send(f"call {step} {phase}", arrive, repeated=False)
        _check_answer(await answer)

    async def run_local(self, step: str, phase: Phase, tx: Any) -> None:
        """Run a local step. The effect happens if the transaction commits."""
        await asyncio.sleep(self.rng.choice((0, 0.01, 1)) if self.faults else 0)
        if self.is_down(step, phase):
            raise StepUnavailable("down")
        fate = self.participants.fate(step, phase)
        if fate.raises_before + fate.raises_after > 0:
            fate.raises_before, fate.raises_after = fate.raises_before - 1, fate.raises_after - 1
            raise RuntimeError("broke")
        if self.participants.is_silent(step, phase):
            await asyncio.Event().wait()
        if fate.rejects:
            raise StepRejected("no")
        effects = self.participants.effects if phase is Phase.ACTION else self.participants.compensations
        tx.on_commit.append(partial(_count, effects, step))

    def is_down(self, step: str, phase: Phase) -> bool:
        """Tell whether the service of a step is down now."""
        outage, step_key = self.outage, (base_name(step), phase)
        is_down = step_key in outage.steps and outage.begin <= self.loop.time() < outage.end
        if is_down:
            self.trace.note("world", f"the service of {step} is down")
        return is_down

    def apply_reply(self) -> None:
        """Fail to apply a reply, now and then."""
        if self.strikes("reply unreadable", 0.3):
            if self.rng.random() < 0.3:
                raise InvalidState("replies", "cannot be read", "send another reply")
            raise RuntimeError("cannot be read")

    def strikes(self, what: str, odds: float) -> bool:
        """Tell whether a fault happens now."""
        struck = self.rng.random() < odds * self.faults
        if struck:
            self.trace.note("world", what)
        return struck

    def send(self, label: str, arrive: Callable[[], Any], *, repeated: bool = True) -> None:
        """Send something over the network: it arrives later, in any order, and perhaps twice."""
        copies = 2 if repeated and self.strikes(f"{label} doubled", 0.15) else 1
        for _ in range(copies):
            seconds = self.rng.choice((0.01, 0.1, 1, 4, 15)) if self.faults else self.rng.choice((0.01, 0.1))
            self.in_flight += 1
            self.loop.call_later(seconds, self._arrive, label, arrive, context=as_actor(""))

    def _arrive(self, label: str, arrive: Callable[[], Any]) -> None:
        self.trace.note("network", label)
        result = arrive()
        if asyncio.iscoroutine(result):
            self._deliver(result)
        self.in_flight -= 1

    def _deliver(self, work: Coroutine[Any, Any, Any]) -> None:
        task = self.loop.create_task(work, context=as_actor(""))
        self.deliveries.add(task)
        task.add_done_callback(self.deliveries.discard)

    async def _relay(self) -> None:
        """Publish what was staged, sometimes only after an outage."""
        while True:
            await self.staged.wait()
            self.staged.clear()
            await asyncio.sleep(self.rng.uniform(10, 40) if self.strikes("relay is down", 0.1) else 0.05)
            for position in sorted(self.store.tables.rows):
                event = self.store.tables.take(position).event
                self.send(f"command {event.event_type}", partial(self._receive_command, event))

    def _receive_command(self, event: OutboxRow) -> None:
        headers = json.loads(event.headers)
        key, phase = headers[KEY_HEADER], Phase(headers[PHASE_HEADER])
        step = key.partition(":")[2]
        answer = self.participants.receive(step, phase, key)
        if self.participants.is_silent(step, phase) or not isinstance(answer, Answered):
            return
        definition = self.definition.find(step)
        assert definition
        action = definition.action if phase is Phase.ACTION else definition.compensation
        assert action
        assert action.command
        name = action.command.reply if answer.agreed else action.command.rejection
        assert name is not None
        if not self.strikes("reply lost", 0.1):
            self._reply(name, None if step in name else key)

    def _send_awaited_events(self) -> None:
        for step in self.definition.steps.values():
            if step.kind is StepKind.WAIT:
                # A wait without a deadline relies on its event, so that event is never lost.
                sure = step.action.timeout_seconds is None
                if sure or (self.rng.random() < 0.8 and not self.strikes("reply lost", 0.1)):
                    self._reply(f"event.{step.name}", None)

    def _reply(self, name: str, key: str | None) -> None:
        self.events += 1
        headers = {KEY_HEADER: key} if key else {}
        saga_id = str(self.new.saga_id)
        event = Event(name, {}, saga_id=saga_id, headers=headers, event_id=UUID(int=self.events))
        self.send(f"reply {name}", partial(self._deliver_reply, event))

    async def _deliver_reply(self, event: Event) -> None:
        async with self.store.transaction() as tx:
            await self.replies.deliver(SAGA_TYPE, event, tx)

    async def _command(self, verb: str) -> None:
        self.events += 1
        self.trace.note("ann", verb)
        body = json.dumps({"actor": "ann"}).encode()
        event_id = UUID(int=self.events)
        sagas = MemorySagas(self.store)
        async with sagas.transaction() as tx:
            message = NewSagaMessage(self.new.saga_id, MessageKind.OPERATOR, verb, None, body, event_id)
            await sagas.deliver(tx, [message])

    async def _misbehave(self) -> None:
        """Freeze, kill, stop and replace workers, and let an operator give commands."""
        until = self.loop.time() + FAULTS_SECONDS
        while self.loop.time() < until and not (self.status in OVER and not self.in_flight):
            await asyncio.sleep(self.rng.expovariate(self.faults / 8))
            victim = self.rng.choice(list(self.workers.running))
            match self.rng.choice(("freeze", "freeze", "kill", "vanish", "stop")):
                case "freeze":
                    self.workers.freeze(victim, self.rng.uniform(0.5, 2.5 * SETTINGS.lease_seconds))
                case "kill":
                    self.workers.kill(victim)
                case "vanish":
                    self.workers.vanish(victim)
                case "stop":
                    self.workers.stop(victim)
            if self.rng.random() < self.people:
                await self._command(self.rng.choice(COMMANDS))

    async def _look_after(self) -> None:
        """Let an operator repair participants and give a command to a failed saga."""
        if self.rng.random() < 0.7:
            self.participants.heal()
        await self._command(self.rng.choice(COMMANDS))
        await self._quiet()

    async def _quiet(self) -> None:
        """Stop all faults, and wait until nothing is left to do."""
        self.faults = 0.0
        self.weather.clear_up()
        for name in list(self.workers.running):
            self.workers.thaw(name)
        limit = self.loop.time() + QUIET_SECONDS_MAX
        while not (self.is_at_rest or self.problems):
            if self.loop.time() > limit:
                return self.fail("it does not come to rest")
            await asyncio.sleep(0.5)
        return None

    @property
    def is_at_rest(self) -> bool:
        """Tell whether only an operator could still change the saga."""
        instance, row = self.record.instance, self.row
        moving = self.in_flight or self.deliveries or self.staged.is_set() or self.store.tables.rows
        return not moving and instance.owner is None and instance.wake_at is None and not (row.listens and row.unseen)


def _answer(future: asyncio.Future[Answer], answer: Answer) -> None:
    if not future.done():
        future.set_result(answer)


def _check_answer(answer: Answer) -> None:
    if isinstance(answer, Down):
        raise StepUnavailable("down")
    if not isinstance(answer, Answered):
        raise RuntimeError("broke")
    if not answer.agreed:
        raise StepRejected("no")


def _count(effects: dict[str, int], step: str) -> None:
    effects[step] += 1


def _weather(rng: random.Random) -> Weather:
    return Weather(
        slow=rng.choice((0.0, 0.1, 0.3)),
        stalled=rng.choice((0.0, 0.01, 0.04)),
        stall_seconds=2.5 * SETTINGS.lease_seconds,
        lost=rng.choice((0.0, 0.02, 0.06)),
    )


def run(seed: int, *, calm: bool = False, outage: bool | None = None) -> Report:
    """Run a world to its end. Raises Unsound if the world broke a guarantee."""
    world = observe(seed, calm=calm, outage=outage)
    if world.problems:
        found = "\n  ".join(world.problems[:5])
        raise Unsound(f"seed {seed}:\n  {found}\nstudy it with: python -m tests.simulation.sagas.replay {seed}")
    return Report(world.status, tuple(world.trace.lines))


def observe(seed: int, *, calm: bool = False, outage: bool | None = None) -> World:
    """Run a world to its end, and return the world with its broken guarantees."""
    loop = VirtualLoop()
    try:
        world = World(seed, loop, calm=calm, outage=outage)
        loop.run_until_complete(world.live())
    finally:
        loop.close()
    return world
