"""A worker: it claims the saga, saves a turn, and makes the actions; it may be lost between any two of these."""

from __future__ import annotations

import random
from dataclasses import replace
from datetime import datetime, timedelta
from functools import partial
from typing import TYPE_CHECKING, Any

from outrider.saga.execution.turn import hand_over
from outrider.saga.model import SagaRecord, StepStatus, Undelivered
from outrider.saga.planner.journal import OPEN
from outrider.saga.planner.planner import (
    ApplyReply,
    CallAction,
    Claimed,
    Input,
    InvalidResult,
    LocalAction,
    Plan,
    Raised,
    SendCommand,
    StepDeclined,
    Succeeded,
    TimedOut,
    advance,
    overdue,
    wanted,
)
from tests.simulation.sagas.parties import Done, Reply
from tests.simulation.sagas.shelf import Fenced

if TYPE_CHECKING:
    from tests.simulation.sagas.world import World

STILL_IN_THE_OUTBOX = 0.2
"""How often a command whose time is over has not left."""
CHARGED = (StepStatus.RETRYING, StepStatus.FAILED)


class Worker:
    """One worker. A new life begins after each loss; results of a former one reach nobody."""

    def __init__(self, name: str, world: World) -> None:
        self.name, self.world, self.life = name, world, 0
        self.forget()

    def forget(self) -> None:
        """Have nothing: no claim, nothing to do, nothing under way."""
        self.life += 1
        self.epoch: int | None = None
        self.record: SagaRecord | None = None
        self.todo: list[CallAction | LocalAction] = []
        self.calls: dict[CallAction, datetime] = {}
        self.inputs: list[Input] = []
        self.wake_at: datetime | None = None

    def step(self) -> bool:
        """Do one thing; False if there is nothing to do."""
        if self.epoch is None:
            return self.claim()
        self.cancel_what_is_void()
        choices = [action for action, possible in self.choices() if possible]
        if choices:
            self.world.rng.choice(choices)()
        return bool(choices)

    def choices(self) -> list[tuple[partial[None], bool]]:
        shelf = self.world.shelf
        late = [call for call, due_at in self.calls.items() if due_at <= shelf.now]
        known = {message.message_id for message in self.record.messages} if self.record else set()
        woken = self.wake_at is not None and self.wake_at <= shelf.now
        return [
            (partial(self.do_next), bool(self.todo)),
            (partial(self.tell), bool(self.inputs)),
            (partial(self.time_out, late), bool(late)),
            (partial(self.look_again), woken or bool(shelf.messages.keys() - known - shelf.seen)),
        ]

    def look_again(self) -> None:
        """Mail has come, or something is due: this needs the mailbox as it is now."""
        self.record = None
        self.turn([])

    def cancel_what_is_void(self) -> None:
        """An order may have ended a step that is still to be done, or under way."""
        if self.record:
            journal = self.record.journal
            self.todo = [action for action in self.todo if wanted(journal, action)]
            self.calls = {call: due_at for call, due_at in self.calls.items() if wanted(journal, call)}

    def claim(self) -> bool:
        self.epoch = self.world.shelf.claim(self.name)
        if self.epoch is None:
            return False
        self.world.trace(self.name, "claim")
        self.turn([Claimed()])
        return True

    def do_next(self) -> None:
        action = self.todo.pop(0)
        if isinstance(action, LocalAction):
            return self.run_local(action)
        seconds = self.world.act(action.step, action.phase).timeout_seconds
        assert seconds is not None
        self.calls[action] = self.world.shelf.now + timedelta(seconds=seconds)
        return self.world.send("call", partial(self.world.serve_call, self, self.life, action))

    def run_local(self, action: LocalAction) -> None:
        fate = self.world.parties.fates[action.step, action.phase]
        if fate.raises_before + fate.raises_after > 0:
            fate.raises_before, fate.raises_after = fate.raises_before - 1, fate.raises_after - 1
            self.turn([Raised(action.step, action.phase, "broke")])
        elif fate.silent > 0:
            fate.silent -= 1
            self.turn([TimedOut(action.step, action.phase)])
        elif fate.refuses:
            self.turn([StepDeclined(action.step, action.phase, "no")])
        else:
            self.turn([Succeeded(action.step, action.phase)], local=action)

    def returned(self, life: int, call: CallAction, reply: Reply) -> None:
        """A call has come back; perhaps too late."""
        if life != self.life or self.calls.pop(call, None) is None:
            return
        if isinstance(reply, Done):
            agreed = Succeeded(call.step, call.phase), StepDeclined(call.step, call.phase, "no")
            self.inputs.append(agreed[0] if reply.agreed else agreed[1])
        else:
            self.inputs.append(Raised(call.step, call.phase, "broke"))

    def time_out(self, late: list[CallAction]) -> None:
        for call in late:
            del self.calls[call]
        self.turn([TimedOut(call.step, call.phase) for call in late])

    def tell(self) -> None:
        inputs, self.inputs = self.inputs, []
        self.turn(inputs)

    def turn(self, inputs: list[Input], local: LocalAction | None = None, owed: tuple[Input, ...] = ()) -> None:
        """Decide, save, and take over the actions; the world may end it all in between.

        `owed` is told in the next turn: of steps that begin in this one, the plan cannot hear yet.
        """
        world = self.world
        record = self.look()
        plan = self.decide(record, inputs)
        if unread := world.unreadable(plan):
            place = unread.step, unread.phase
            raised, unfit = Raised(*place, "cannot be read", reply=True), InvalidResult(*place, "cannot be read")
            fault = world.rng.choice((raised, raised, unfit))
            return self.turn([*inputs, fault], local, owed if awaits(record, unread) else (*owed, fault))
        if world.strikes("asked to stop", 0.03):
            plan = hand_over(plan, record, self.todo)
        plan = replace(plan, release=plan.release and not owed)
        if world.strikes("lost before saving"):
            return self.forget()
        try:
            assert self.epoch is not None
            world.shelf.save(self.name, self.epoch, plan)
        except Fenced:
            world.trace(self.name, "fenced")
            return self.forget()
        world.saved(self.name, record, inputs, plan, local)
        if world.strikes("lost after saving") or plan.release:
            return self.forget()
        self.inputs += owed
        return self.take_over(plan)

    def look(self) -> SagaRecord:
        """Read the saga again, or rely on what was saved last, with the mail and the time of then."""
        if self.record is None or self.world.rng.random() < 0.7:
            return self.world.shelf.load()
        return self.record

    def decide(self, record: SagaRecord, inputs: list[Input]) -> Plan:
        seed = self.world.rng.random()
        waiting = [event_id for event_id in overdue(record) if self.world.rng.random() < STILL_IN_THE_OUTBOX]
        undelivered = dict.fromkeys(waiting, Undelivered.WAITING)
        plans = [advance(self.world.definition, record, inputs, random.Random(seed), undelivered) for _ in range(2)]
        asked = [entry for entry in plans[0].entries if entry.command_event_id in undelivered]
        if any(entry.uncertainty and entry.status in CHARGED for entry in asked):
            self.world.fail("an attempt was charged for a command that had not left")
        if plans[0] != plans[1]:
            self.world.fail("the same record gave two plans")
        reworded = record._replace(journal=tuple(replace(e, error=e.error and "reworded") for e in record.journal))
        other = advance(self.world.definition, reworded, inputs, random.Random(seed), undelivered)
        if decisions(other) != decisions(plans[0]):
            self.world.fail("the wording of an error decided something")
        return plans[0]

    def take_over(self, plan: Plan) -> None:
        self.record = self.world.shelf.load()
        self.todo += [action for action in plan.actions if isinstance(action, CallAction | LocalAction)]
        seconds = plan.wake_seconds
        self.wake_at = None if seconds is None else self.record.now + timedelta(seconds=seconds)


def awaits(record: SagaRecord, action: ApplyReply) -> bool:
    """Tell whether the step had begun before this turn."""
    found = (entry for entry in record.journal if (entry.step, entry.phase) == (action.step, action.phase))
    return any(entry.status in OPEN or entry.is_unresolved for entry in found)


def decisions(plan: Plan) -> Any:
    """Return a plan without the texts that are meant for people."""
    instance = replace(plan.instance, last_error=None)
    entries = [replace(entry, error=None) for entry in plan.entries]
    return instance, entries, plan.taken, plan.seen, plan.actions, plan.release, plan.wake_seconds, len(plan.attention)


def commands(plan: Plan) -> list[SendCommand]:
    return [action for action in plan.actions if isinstance(action, SendCommand)]


def absorbed(plan: Plan) -> list[ApplyReply]:
    return [action for action in plan.actions if isinstance(action, ApplyReply)]
