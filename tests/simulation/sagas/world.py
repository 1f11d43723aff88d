"""A world of one saga. A seed decides everything: first there is trouble, then quiet until nothing is left to do."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from uuid import UUID

from outrider.saga.definition.steps import StepAction, StepKind
from outrider.saga.model import MessageKind, Phase, SagaRecord, Status
from outrider.saga.planner.planner import ApplyReply, CallAction, Input, LocalAction, Plan, SendCommand
from tests.simulation.sagas import checks, makers
from tests.simulation.sagas.crew import Worker, absorbed, commands
from tests.simulation.sagas.parties import Done, parties
from tests.simulation.sagas.shelf import Shelf

TROUBLE_STEPS = 120
QUIET_STEPS_MAX = 3_000
VERBS = ("retry", "compensate", "mark_done")


class Unsound(AssertionError):
    """A promise was broken."""


@dataclass(frozen=True, slots=True)
class Report:
    """How a world ended."""

    status: Status
    trace: tuple[str, ...]


class World:
    """Everything there is."""

    def __init__(self, seed: int) -> None:
        self.seed, self.rng = seed, random.Random(seed)
        self.lines: list[str] = []
        self.definition = makers.definition(self.rng)
        self.parties = parties(self.definition, self.rng)
        self.shelf = Shelf()
        self.workers = [Worker("one", self), Worker("two", self)]
        self.network: list[tuple[str, Callable[[], None]]] = []
        self.history = checks.History(self.definition)
        self.trouble = self.rng.choice((0.0, 0.5, 1.0, 2.0))
        self.people = self.rng.choice((0.0, 0.0, 0.01, 0.05))
        self.events = 0
        for step in self.definition.steps.values():
            if step.kind is StepKind.WAIT:
                # Who waits without a deadline relies on the event, so that one is never lost.
                sure = step.action.timeout_seconds is None
                if sure or self.rng.random() < 0.8:
                    self.network.append(("event", partial(self.reply, f"event {step.name}", None, sure=sure)))

    def fail(self, what: str) -> None:
        raise Unsound(f"seed {self.seed}: {what}")

    def trace(self, who: str, what: str) -> None:
        seconds = (self.shelf.now - self.shelf.instance.started_at).total_seconds()
        self.lines.append(f"{seconds:8.2f}  {who:<8} {what}")

    def act(self, step: str, phase: Phase) -> StepAction:
        definition = self.definition.steps[step]
        act = definition.action if phase is Phase.ACTION else definition.compensation
        assert act is not None
        return act

    def strikes(self, what: str, odds: float = 0.04) -> bool:
        """Tell whether a misfortune happens now."""
        struck = self.rng.random() < odds * self.trouble
        if struck:
            self.trace("world", what)
        return struck

    def send(self, label: str, packet: Callable[[], None]) -> None:
        """Put something on its way; it may arrive twice."""
        self.network.append((label, packet))
        if label != "call" and self.strikes(f"{label} doubled", 0.15):
            self.network.append((label, packet))

    def deliver(self) -> None:
        """Let something arrive: anything, in whatever order it was sent."""
        label, packet = self.network.pop(self.rng.randrange(len(self.network)))
        self.trace("network", label)
        packet()

    def serve_call(self, worker: Worker, life: int, call: CallAction) -> None:
        fate = self.parties.fates[call.step, call.phase]
        reply = self.parties.hear(call.step, call.phase, call.key)
        if fate.silent > 0:
            fate.silent -= 1
        elif not self.strikes("result lost", 0.1):
            self.network.append(("result", partial(worker.returned, life, call, reply)))

    def serve_command(self, command: SendCommand) -> None:
        fate = self.parties.fates[command.step, command.phase]
        reply = self.parties.hear(command.step, command.phase, command.key)
        if fate.silent > 0:
            fate.silent -= 1
        elif isinstance(reply, Done):
            wire = self.act(command.step, command.phase).command
            assert wire is not None
            name = wire.reply if reply.agreed else wire.rejection
            assert name is not None
            self.reply(name, None if command.step in name else command.key)

    def reply(self, name: str, key: str | None, *, sure: bool = False) -> None:
        self.events += 1
        post = partial(self.shelf.deliver, MessageKind.REPLY, name, key, UUID(int=self.events))
        if sure or not self.strikes("reply lost", 0.1):
            self.send(f"reply {name}", post)

    def order(self, verb: str) -> None:
        self.events += 1
        self.trace("ann", verb)
        self.shelf.deliver(MessageKind.OPERATOR, verb, None, UUID(int=self.events))

    def unreadable(self, plan: Plan) -> ApplyReply | None:
        return next((action for action in absorbed(plan) if self.strikes("reply unreadable", 0.3)), None)

    def saved(
        self, who: str, record: SagaRecord, inputs: Sequence[Input], plan: Plan, local: LocalAction | None
    ) -> None:
        """A turn was saved: what belongs to its transaction is true now."""
        for note in plan.notes:
            self.trace(who, f"{note.step or ''} {note.what} {note.detail}")
        if local is not None:
            effects = self.parties.effects if local.phase is Phase.ACTION else self.parties.compensations
            effects[local.step] += 1
        for command in commands(plan):
            self.send(f"command {command.step} {command.phase}", partial(self.serve_command, command))
        for problem in self.history.turn(record, inputs, plan, self.shelf):
            self.fail(problem)

    def run(self) -> Report:
        for _ in range(TROUBLE_STEPS if self.trouble else 0):
            self.misbehave()
        self.trouble = 0.0
        self.come_to_rest()
        for _ in range(self.rng.choice((0, 2, 4))):
            if self.shelf.instance.status is Status.FAILED:
                self.look_after()
        for problem in checks.at_rest(self):
            self.fail(problem)
        return Report(self.shelf.instance.status, tuple(self.lines))

    def misbehave(self) -> None:
        """Let anybody do anything."""
        if self.strikes("a worker is lost"):
            self.rng.choice(self.workers).forget()
        if self.rng.random() < self.people:
            self.order(self.rng.choice(VERBS))
        if self.network and self.rng.random() < 0.4:
            self.deliver()
        if not self.rng.choice(self.workers).step() or self.rng.random() < 0.1:
            self.shelf.now += timedelta(seconds=self.rng.choice((0.1, 1, 3, 20)))

    def look_after(self) -> None:
        """A person looks at a failed saga, and orders something."""
        if self.rng.random() < 0.7:
            self.parties.heal()
        self.order(self.rng.choice(VERBS))
        self.come_to_rest()

    def come_to_rest(self) -> None:
        for _ in range(QUIET_STEPS_MAX):
            if self.network:
                self.deliver()
            elif not any(worker.step() for worker in self.workers) and not self.wait():
                return
        self.fail("it does not come to rest")

    def wait(self) -> bool:
        """Let time pass until something is due; False if nothing ever is."""
        for worker in self.workers:
            if worker.epoch is not None:
                self.shelf.renew(worker.name, worker.epoch)
        times = [self.shelf.instance.wake_at]
        for worker in self.workers:
            times += [worker.wake_at, *worker.calls.values()]
        ahead = [time for time in times if time is not None and time > self.shelf.now]
        if not ahead:
            return False
        self.shelf.now = min(ahead)
        return True


def run(seed: int) -> Report:
    """Let a world run its course; raises Unsound if it broke a promise."""
    return World(seed).run()
