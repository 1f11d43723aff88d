"""A world of parents and children under faults: all of a family is done, or all of it is undone.

The steps of all sagas can be compensated up to a pivot, so the end is exact: effects stand in a completed family, and
none stands in a compensated one.
"""

from __future__ import annotations

import asyncio
import json
import random
from collections import defaultdict
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, NamedTuple
from uuid import UUID

from outrider.errors import StepRejected
from outrider.retry import RetryPolicy
from outrider.saga import Saga, SagaRegistry
from outrider.saga.definition.children import PARENT_STEP
from outrider.saga.model import Instance, MessageKind, NewSagaMessage, Phase, SagaRecord, Status, StepStatus
from outrider.stores.memory import MemorySagas, MemoryStore
from outrider.stores.memory.saga import record_of
from tests.simulation.sagas.definitions import State
from tests.simulation.sagas.watcher import SavedInput, watch_turns
from tests.simulation.sagas.workers import SETTINGS, Workers
from tests.simulation.sagas.world import FAULTS_SECONDS, Report, SagaTrace, Unsound
from tests.simulation.virtual import VirtualClock, VirtualLoop
from tests.simulation.wire import Weather

QUIET_SECONDS_MAX = 4_000.0
LONG_SECONDS = 100_000
"""Longer than a world lasts: only a saga that is called off ends such a step."""
REPAIRS_MAX = 40
GENERATIONS = 3
OVER = (Status.COMPLETED, Status.COMPENSATED)


class StepPlace(NamedTuple):
    """The place of a step relative to the pivots of its saga and of the parents."""

    is_pivot: bool
    has_way_back: bool
    is_sure: bool


class FamilyWorld:
    """A saga with children and perhaps their children, the workers, and the calls of all steps."""

    def __init__(self, seed: int, loop: VirtualLoop) -> None:
        self.seed, self.loop = seed, loop
        self.rng = self.dice("family")
        self.trace = SagaTrace(loop)
        self.store = MemoryStore(lanes=1, clock=VirtualClock(loop))
        self.rejects, self.broken = self.rng.choice((0.0, 0.05, 0.2)), self.rng.choice((0.0, 0.1))
        self.has_long_steps = self.rng.random() < 0.3
        self.sagas: list[Saga[State]] = []
        self.top = self._saga(GENERATIONS, has_pivot=self.rng.random() < 0.3)
        self.effects: dict[str, int] = defaultdict(int)
        self.barred: set[str] = set()
        self.fates: dict[str, random.Random] = {}
        self.faults = self.rng.choice((0.0, 0.5, 1.0, 2.0))
        self.people = self.rng.choice((0.0, 0.1, 0.5))
        self.haste, self.hasty = self.dice("haste"), list[asyncio.Task[None]]()
        self.weather = Weather()
        if self.faults:
            self.weather = Weather(
                slow=0.1, stalled=0.01, stall_seconds=2.5 * SETTINGS.lease_seconds, lost=self.rng.choice((0.0, 0.05))
            )
        self.is_healed = False
        self.workers = Workers(
            loop, self.store, SagaRegistry(*self.sagas), self.trace, self.weather, self.dice, lambda: None
        )
        self.problems: list[str] = []
        self.events = 0

    def dice(self, name: str) -> random.Random:
        """Return the random numbers of one actor."""
        return random.Random(f"{self.seed}/{name}")

    @property
    def records(self) -> dict[UUID, SagaRecord]:
        """Return all sagas as stored."""
        now = self.store.clock.now()
        found = (record_of(row, now) for row in self.store.sagas.sagas.rows.values())
        return {record.instance.saga_id: record for record in found if record}

    def children(self, parent_id: UUID) -> Iterator[SagaRecord]:
        """Yield the children of a saga."""
        return (record for record in self.records.values() if record.instance.parent_id == parent_id)

    def _saga(self, generations: int, *, has_pivot: bool, is_sure: bool = False) -> Saga[State]:
        """Return a saga of one to three groups of steps; the last generation has no children.

        A sure saga has no reason to compensate itself: it comes after the pivot of its parent.
        """
        rng = self.rng
        seconds = rng.randint(20, 60) if rng.random() < 0.2 and not is_sure else None
        saga = Saga(f"saga{len(self.sagas)}", State, deadline_seconds=seconds)
        self.sagas.append(saga)
        count = rng.randint(1, 3)
        pivot_at = rng.randrange(count) if has_pivot else count
        before: tuple[str, ...] = ()
        for at in range(count):
            size = 1 if at == pivot_at else rng.choice((1, 1, 2))
            names = tuple(f"{at}{letter}" for letter in "ab"[:size])
            for name in names:
                place = StepPlace(at == pivot_at, at < pivot_at, is_sure or at > pivot_at)
                self._add_step(saga, name, before, generations, place)
            before = names
        return saga

    def _add_step(
        self, saga: Saga[State], name: str, after: tuple[str, ...], generations: int, place: StepPlace
    ) -> None:
        rng, is_pivot = self.rng, place.is_pivot
        common: dict[str, Any] = {"name": name, "after": after}
        kinds = ["call", "call", "local", "sleep"] if not is_pivot else ["call", "local"]
        kind = rng.choice(["child", "child", *kinds] if generations > 1 and len(self.sagas) < 6 else kinds)
        if kind == "child":
            child = self._saga(generations - 1, has_pivot=is_pivot and rng.random() < 0.5, is_sure=place.is_sure)
            if rng.random() < 0.25 and not is_pivot:
                common["for_each"] = lambda state: [0, 1]
            common |= {"input": lambda state, item=None: State(), "result": self._count, "pivot": is_pivot}
            saga.child(child, **common)
        elif kind == "sleep":
            is_long = self.has_long_steps and place.has_way_back and not place.is_sure and rng.random() < 0.5
            saga.sleep(LONG_SECONDS if is_long and saga.deadline_seconds is None else rng.randint(1, 10), **common)
        else:
            retry = RetryPolicy(base_seconds=1, cap_seconds=4, max_attempts=rng.randint(1, 4))
            options: dict[str, Any] = {"retry": retry, "timeout_seconds": 20}
            act, undo = (partial(self._run, kind=kind, place=place, phase=phase) for phase in Phase)
            step: Any
            if kind == "call":
                step = saga.call(**common, **options, pivot=is_pivot)(_call(act))
            else:
                step = saga.local(**common, **options, pivot=is_pivot)(_local(act))
            if place.has_way_back:
                step.compensate(**options)(_call(undo) if kind == "call" else _local(undo))

    @staticmethod
    def _count(context: Any, child: State) -> None:
        context.state.replies += 1

    async def _run(self, context: Any, tx: Any = None, *, kind: str, place: StepPlace, phase: Phase) -> None:
        key, fate = context.key, self._fate(context, phase)
        await asyncio.sleep(fate.choice((0.01, 0.5, 4)) if self.faults and kind == "call" else 0.01)
        if not self.is_healed and not place.is_sure and fate.random() < self.broken:
            raise RuntimeError("broken")
        can_reject = phase is Phase.ACTION and (place.has_way_back or place.is_pivot) and not place.is_sure
        # A rejection speaks for all attempts.
        if can_reject and self.dice(key).random() < self.rejects:
            raise StepRejected("no")
        if kind == "local":
            tx.on_commit.append(partial(self._add, key, 1 if phase is Phase.ACTION else -1))
            return
        # The participant refuses an action that arrives after its compensation, from a worker that was frozen.
        if phase is Phase.COMPENSATION:
            self.barred.add(key)
        self.effects[key] = int(key not in self.barred)
        await asyncio.sleep(fate.choice((0.01, 0.5)) if self.faults else 0.01)

    def _add(self, key: str, change: int) -> None:
        self.effects[key] += change
        if self.effects[key] not in (0, 1):
            self.fail(f"the effect of {key} stands at {self.effects[key]}")

    def _fate(self, context: Any, phase: Phase) -> random.Random:
        status = self.records[context.saga_id].instance.status
        if phase is Phase.ACTION and status is Status.COMPENSATED:
            self.fail(f"{context.key} runs in a saga that is compensated")
        return self.fates.setdefault(f"{context.key}/{phase}", self.dice(f"{context.key}/{phase}"))

    async def live(self) -> None:
        """Run the world to its end."""
        store = MemorySagas(self.store)
        self.top_id = self.top.new(State(), "top").saga_id
        async with store.transaction() as tx:
            assert await store.start(tx, self.top.new(State(), "top"))
        for _ in range(2):
            self.workers.start()
        try:
            with watch_turns(self.saved, self.fail):
                await self._misbehave()
                await self._end()
                await store.prune(saga_days=90, audit_days=365, participant_memory_days=90)
                if not self.problems:
                    self.problems += [*self._at_rest(), *self.workers.errors]
        finally:
            await self.workers.clear()
            await asyncio.gather(*self.hasty)

    def fail(self, problem: str) -> None:
        """Record a broken guarantee."""
        self.problems.append(problem)

    def saved(self, turn: SavedInput) -> None:
        """Check a turn whose transaction has just been committed."""
        record = self.records[turn.claim.saga_id]
        old, new = turn.record.instance.status, record.instance.status
        saga_type, parent = record.instance.saga_type, self.records.get(record.instance.parent_id or UUID(int=0))
        for note in turn.plan.notes:
            self.trace.note(turn.claim.worker, f"{saga_type} {note.step or ''} {note.what}", (note.detail,))
        if record.instance.epoch != turn.claim.epoch:
            self.fail("a worker saved without its claim")
        if new is not old:
            if new is Status.COMPLETED and self.haste.random() < self.people:
                self.hasty += [self.loop.create_task(self._compensate_children(turn.claim.saga_id))]
            self.problems += _family_problems(record.instance, list(self.children(turn.claim.saga_id)))
            self.problems += _child_problems(turn.record, new, parent)

    async def _compensate_children(self, parent_id: UUID) -> None:
        """Command what comes too late: the parent has completed, and its children may not know it yet."""
        for child in list(self.children(parent_id)):
            await self._command(child.instance.saga_id, "compensate")

    async def _misbehave(self) -> None:
        """Freeze, kill, stop and replace workers, and let an operator give commands."""
        until = self.loop.time() + FAULTS_SECONDS
        while self.faults and self.loop.time() < until and not self.problems:
            await asyncio.sleep(self.rng.expovariate(self.faults / 8))
            victim = self.rng.choice(list(self.workers.running))
            workers, seconds = self.workers, self.rng.uniform(0.5, 2.5 * SETTINGS.lease_seconds)
            freeze = partial(workers.freeze, seconds=seconds)
            self.rng.choice((freeze, workers.kill, workers.vanish, workers.stop))(victim)
            if self.rng.random() < self.people:
                await self._command(self.top_id, "compensate")
            if self.rng.random() < self.people:
                await self._command(self.rng.choice(sorted(self.records)), "retry")

    async def _end(self) -> None:
        """Stop all faults; let an operator retry sagas that have failed, and give up a family that waits for long."""
        self.faults = 0.0
        self.weather.clear_up()
        for name in list(self.workers.running):
            self.workers.thaw(name)
        await self._quiet()
        self.problems += self._called_off_problems()
        self.is_healed = True
        if self.has_long_steps and not self.problems:
            await self._command(self.top_id, "compensate")
            await self._quiet()
        for _ in range(REPAIRS_MAX):
            failed = [record.instance for record in self.records.values() if record.instance.status is Status.FAILED]
            if not failed or self.problems:
                return
            for instance in failed:
                await self._command(instance.saga_id, "retry")
            await self._quiet()

    async def _command(self, saga_id: UUID, verb: str) -> None:
        self.events += 1
        self.trace.note("ann", verb, (self.records[saga_id].instance.saga_type,))
        body = json.dumps({"actor": "ann"}).encode()
        sagas = MemorySagas(self.store)
        async with sagas.transaction() as tx:
            message = NewSagaMessage(saga_id, MessageKind.OPERATOR, verb, None, body, UUID(int=self.events))
            await sagas.deliver(tx, [message])

    async def _quiet(self) -> None:
        """Wait until no saga can change by itself, apart from steps that last longer than a world."""
        limit = self.loop.time() + QUIET_SECONDS_MAX
        while not (self.problems or all(self._is_resting(record) for record in self.records.values())):
            if self.loop.time() > limit:
                return self.fail("it does not come to rest")
            await asyncio.sleep(0.5)
        return None

    def _is_resting(self, record: SagaRecord) -> bool:
        instance, row = record.instance, self.store.sagas.sagas.rows[record.instance.saga_id]
        wake_at = instance.wake_at
        is_long = wake_at is None or (wake_at - record.now).total_seconds() > QUIET_SECONDS_MAX
        return instance.owner is None and is_long and not (row.listens and row.unseen)

    def _called_off_problems(self) -> Iterator[str]:
        """Check that no child goes on that was called off, unless an operator has to look at the family first."""
        records = self.records.values()
        if not any(record.instance.status is Status.FAILED for record in records):
            for record in records:
                for entry in record.journal:
                    is_action = (entry.phase, entry.status) == (Phase.ACTION, StepStatus.STARTED)
                    if is_action and entry.command_event_id:
                        yield f"the child of step {entry.step} was called off and goes on"

    def _at_rest(self) -> Iterator[str]:
        records = self.records
        end = records[self.top_id].instance.status
        for record in records.values():
            instance = record.instance
            if instance.status not in OVER:
                yield f"{instance.saga_type} is {instance.status}, and its first parent is {end}"
            if record.messages:
                yield f"{instance.saga_type} has {len(record.messages)} messages left"
            if instance.parent_step and instance.parent_id:
                saga = next(saga for saga in self.sagas if saga.saga_type == instance.saga_type)
                if instance.saga_id != saga.child_id(instance.parent_id, instance.parent_step):
                    yield f"{instance.saga_type} is a second child of {instance.parent_step}"
        for key, effect in self.effects.items():
            owner = records[UUID(key.partition(":")[0])].instance
            if effect != int(owner.status is Status.COMPLETED):
                yield f"{owner.saga_type} is {owner.status}, and the effect of {key} stands at {effect}"


def _family_problems(parent: Instance, children: list[SagaRecord]) -> Iterator[str]:
    """Check the children of a saga whose status has changed."""
    steps = [child.instance.parent_step for child in children]
    if len(set(steps)) < len(steps):
        yield f"{parent.saga_type} has two children of one step"
    for record in children:
        child = record.instance
        is_done = _awaits_parent(record)
        if parent.status is Status.COMPENSATED and child.status is not Status.COMPENSATED:
            yield f"a parent is compensated, and its child is {child.status}"
        if parent.status is Status.COMPLETED and not is_done:
            yield f"a parent is completed, and its child is {child.status}"
        if parent.status is Status.COMPENSATING and not (is_done or child.status is Status.COMPENSATED):
            yield f"a parent compensates, and its child is {child.status}"


def _child_problems(before: SagaRecord, status: Status, parent: SagaRecord | None) -> Iterator[str]:
    """Check the parent of a saga whose status has changed."""
    if parent is None:
        return
    if status is Status.COMPLETED and parent.instance.status is not Status.COMPLETED:
        yield f"a child is completed, and its parent is {parent.instance.status}"
    told = (Status.COMPENSATING, Status.FAILED)
    if status is Status.COMPENSATING and _awaits_parent(before) and parent.instance.status not in told:
        yield f"a child that was done compensates, and its parent is {parent.instance.status}"


def _awaits_parent(record: SagaRecord) -> bool:
    return any((entry.step, entry.status) == (PARENT_STEP, StepStatus.STARTED) for entry in record.journal)


def _call(function: Callable[..., Any]) -> Callable[[Any], Any]:
    async def call(context: Any) -> None:
        await function(context)

    return call


def _local(function: Callable[..., Any]) -> Callable[[Any, Any], Any]:
    async def local(context: Any, tx: Any) -> None:
        await function(context, tx)

    return local


def run_family(seed: int) -> Report:
    """Run a world to its end. Raises Unsound if the world broke a guarantee."""
    world = observe_family(seed)
    if world.problems:
        found = "\n  ".join(world.problems[:5])
        raise Unsound(f"seed {seed}:\n  {found}\nstudy it with: python -m tests.simulation.sagas.replay family {seed}")
    return Report(world.records[world.top_id].instance.status, tuple(world.trace.lines))


def observe_family(seed: int) -> FamilyWorld:
    """Run a world to its end, and return the world with its broken guarantees."""
    loop = VirtualLoop()
    try:
        world = FamilyWorld(seed, loop)
        loop.run_until_complete(world.live())
    finally:
        loop.close()
    return world
