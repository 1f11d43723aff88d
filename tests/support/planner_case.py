"""Building blocks for tests of the planner: steps in one line each, and a saga that gets inputs and is saved."""

from __future__ import annotations

import random
from dataclasses import replace
from datetime import timedelta
from typing import Any
from uuid import UUID

from outrider.retry import RetryPolicy
from outrider.saga.definition.steps import CommandSpec, Definition, Step, StepAction, StepKind
from outrider.saga.model import JournalEntry, MessageKind, Phase, Status, StepStatus, Undelivered
from outrider.saga.planner.actions import CallAction, LocalAction, SendCommand
from outrider.saga.planner.planner import (
    ApplyReply,
    Claimed,
    Input,
    Outage,
    Plan,
    Raised,
    RejectedResult,
    Succeeded,
    TimedOut,
    UnavailableResult,
    advance,
    key_of,
    overdue,
)
from tests.support.stored_saga import SAGA_ID, StoredSaga

ACTION, COMPENSATION = Phase.ACTION, Phase.COMPENSATION


def policy(attempts: int) -> RetryPolicy:
    return RetryPolicy(base_seconds=2, jitter=0, max_attempts=attempts)


def nothing(*_: object) -> None:
    """Stand for a function of the user's, which the plan never calls."""


def here(kind: StepKind, name: str, *, attempts: int = 2, compensate: bool = True, **more: Any) -> Step:
    act = StepAction(nothing, retry=policy(attempts), timeout_seconds=10)
    return Step(name, kind, act, act if compensate else None, **more)


def local(name: str, **more: Any) -> Step:
    return here(StepKind.LOCAL, name, **more)


def call(name: str, **more: Any) -> Step:
    return here(StepKind.CALL, name, **more)


def request(name: str, *, attempts: int = 2, compensate: bool = True, own: str = "", **more: Any) -> Step:
    """Return a request that is answered by `yes`, `no` and `compensated`, each followed by `own`."""
    action = StepAction(None, CommandSpec("do", "t", f"yes{own}", f"no{own}"), policy(attempts), timeout_seconds=10)
    compensation = StepAction(
        None, CommandSpec("compensate", "t", f"compensated{own}"), policy(attempts), timeout_seconds=10
    )
    return Step(name, StepKind.REQUEST, action, compensation if compensate else None, **more)


def wait(name: str, seconds: float | None = 10, **more: Any) -> Step:
    return Step(
        name, StepKind.WAIT, StepAction(None, CommandSpec("", "", f"event {name}"), timeout_seconds=seconds), **more
    )


def sleep(name: str, seconds: float = 10, **more: Any) -> Step:
    return Step(name, StepKind.SLEEP, StepAction(timeout_seconds=seconds), **more)


def saga(*groups: Step | list[Step]) -> Definition:
    """Return a definition: one step after the other, those of a list side by side."""
    steps: dict[str, Step] = {}
    before: tuple[str, ...] = ()
    for group in groups:
        members = group if isinstance(group, list) else [group]
        steps |= {step.name: replace(step, after=before) for step in members}
        before = tuple(step.name for step in members)
    return Definition("order", 1, steps)


class Case:
    """A saga, a worker that holds it as long as it must, and the time."""

    def __init__(self, *groups: Step | list[Step]) -> None:
        self.definition, self.stored, self.events, self.epoch = saga(*groups), StoredSaga(), 0, 0
        self.outages: dict[tuple[str, Phase], Outage] = {}
        self.plan = self.advance(Claimed())

    def advance(self, *inputs: Input, seconds: float = 0, where: Undelivered | None = None) -> Plan:
        """Let time pass, give inputs to the planner, and save its plan; `where` is the location of overdue commands."""
        self.stored.now += timedelta(seconds=seconds)
        self.stored.instance = replace(self.stored.instance, owner="w", epoch=1)
        record = self.stored.load()
        undelivered = {event_id: where for event_id in overdue(record) if where}
        self.plan = advance(self.definition, record, inputs, random.Random(1), undelivered, outages=self.outages)
        self.stored.save("w", 1, self.plan)
        return self.plan

    def loses_worker(self, times: int = 1) -> Plan:
        """Lose so many workers in a row, and claim the saga after each."""
        for _ in range(times):
            self.stored.instance = replace(self.stored.instance, losses=self.stored.instance.losses + 1)
            self.advance(Claimed())
        return self.plan

    def succeeds(self, *steps: str, phase: Phase = ACTION) -> Plan:
        return self.advance(*(Succeeded(step, phase) for step in steps))

    def declines(self, step: str, phase: Phase = ACTION) -> Plan:
        return self.advance(RejectedResult(step, phase, "no"))

    def raises(self, step: str, phase: Phase = ACTION) -> Plan:
        return self.advance(Raised(step, phase, "broke"))

    def is_unavailable(self, step: str, phase: Phase = ACTION, *, seconds: float = 0, asked: float = 0) -> Plan:
        """Let time pass, and let the service of a step be unavailable; the service may ask for a pause."""
        return self.advance(UnavailableResult(step, phase, "503", asked), seconds=seconds)

    def wakes(self) -> Plan:
        """Let time pass until the saga is due."""
        assert self.plan.release
        assert self.plan.wake_seconds is not None
        return self.advance(seconds=self.plan.wake_seconds)

    def times_out(self, step: str, phase: Phase = ACTION) -> Plan:
        return self.advance(TimedOut(step, phase))

    def exhausts(self, step: str, phase: Phase = ACTION, *, unknown: bool = False) -> Plan:
        """Fail the two attempts that there are."""
        for _ in range(2):
            self.advance(seconds=5)
            self.times_out(step, phase) if unknown else self.raises(step, phase)
        return self.plan

    def deliver(self, name: str, step: str | None = None, key: str | None = None) -> None:
        self.events += 1
        kind = MessageKind.OPERATOR if name in ("retry", "compensate", "mark_done", "dance") else MessageKind.REPLY
        self.stored.deliver(kind, name, key_of(SAGA_ID, step) if step else key, UUID(int=self.events))

    def answer(self, name: str, step: str | None = None) -> Plan:
        self.deliver(name, step)
        return self.advance()

    order = answer

    @property
    def status(self) -> Status:
        return self.stored.instance.status

    @property
    def attention(self) -> bool:
        return self.stored.instance.needs_attention

    @property
    def messages(self) -> list[str]:
        return [message.name for message in self.stored.messages.values()]

    def entry(self, step: str, phase: Phase = ACTION) -> JournalEntry:
        return self.stored.journal[step, phase]

    def progress(self, step: str, phase: Phase = ACTION) -> StepStatus:
        return self.entry(step, phase).status

    def compensated(self) -> list[str]:
        """Return the steps that are planned to be compensated, are being compensated, or have been, in that order."""
        lines = [entry for entry in self.stored.journal.values() if entry.phase is COMPENSATION]
        return [entry.step for entry in sorted(lines, key=lambda entry: entry.position)]


NAMES = {CallAction: "call", LocalAction: "local", SendCommand: "send"}


def described(plan: Plan) -> list[str]:
    """Return the actions of a plan in words."""
    return [
        f"absorb {action.step}"
        if isinstance(action, ApplyReply)
        else f"{NAMES[type(action)]} {action.step} {action.phase} {action.attempt}"
        for action in plan.actions
    ]
