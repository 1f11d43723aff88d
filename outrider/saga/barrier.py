"""A participant's barrier: a command has its effect once, and none after it was undone.

A repeated command gets the same answer again. A compensation that overtakes its action bars it: there is nothing to
undo, and the action is ignored when it comes. Everything happens in the transaction of the participant's own handler.
"""

from __future__ import annotations

import inspect
import json
from collections.abc import Callable
from dataclasses import dataclass, replace
from enum import StrEnum
from typing import Any, NamedTuple

from outrider.backoff import RetryPolicy
from outrider.errors import Misuse, Permanent
from outrider.event import Event
from outrider.saga.acting import ANSWERED_HEADER, KEY_HEADER, PHASE_HEADER
from outrider.saga.clerk import Clerk, usual
from outrider.saga.keys import unfit_key
from outrider.saga_store import Phase

Doing = Callable[[Event, Any], Any]
"""Takes the command and the transaction, and returns the reply; async or plain."""

KEPT = (
    *("event_type", "payload", "aggregate_type", "aggregate_id", "headers", "topic", "key", "routing_key"),
    *("priority", "schema_version", "saga_id", "max_attempts"),
)
"""What is the same in a reply that is given again."""


@dataclass(frozen=True, slots=True)
class Refusal:
    """A reply that says no: it was not done and will not be, so there is nothing to undo either.

    >>> Refusal(Event("stock.refused", {"reason": "sold out"})).reply.event_type
    'stock.refused'
    """

    reply: Event


class Passed(StrEnum):
    """What became of a command: done now, answered again as before, or ignored since it was undone before it came."""

    DONE = "done"
    REPEATED = "repeated"
    BARRED = "barred"


class _Command(NamedTuple):
    event: Event
    key: str
    phase: Phase


class Barrier:
    """The barrier of one participant; its name must stay the same for ever, since keys are kept under it.

    Use it in the handlers of commands::

        stock = Barrier("stock")

        @inbox.handler("stock.reserve", consumer="stock", topic="stock")
        async def reserve(command, tx):
            await stock.act(tx, command, take_from_shelf)

        @inbox.handler("stock.release", consumer="stock", topic="stock")
        async def release(command, tx):
            await stock.undo(tx, command, put_back, nothing=Event("stock.released", {}))
    """

    def __init__(self, participant: str, *, outbox: Clerk | None = None) -> None:
        if not participant or not isinstance(participant, str):
            raise Misuse("a barrier needs the participant's name, the same for ever: Barrier('stock')")
        self.participant, self._outbox = participant, outbox

    async def act(self, tx: Any, command: Event, do: Doing) -> Passed:
        """Do what a command says, once, and reply.

        `do` gets the command and the transaction, and returns the reply, or a Refusal::

            async def take_from_shelf(command, tx):
                taken = await tx.execute("UPDATE shelf SET free = free - 1 WHERE free > 0")
                if taken == "UPDATE 0":
                    return Refusal(Event("stock.refused", {}))
                return Event("stock.reserved", {"reservation": command.payload["order"]})

            await stock.act(tx, command, take_from_shelf)
        """
        asked = _read(command, Phase.ACTION)
        entered = await self._clerk.barrier_enter(tx, self.participant, asked.key, asked.phase)
        if entered.fresh:
            return await self._answer(tx, asked, await _done(do, command, tx))
        return Passed.BARRED if entered.barred else await self._repeat(tx, asked, entered.reply)

    async def undo(self, tx: Any, command: Event, undo: Doing, *, nothing: Event) -> Passed:
        """Undo what an action did, once, and reply; with `nothing`, if it never came or was refused.

        An action that was answered has come, even if the barrier has forgotten it by now. From then on the action is
        ignored, should it still come::

            await stock.undo(tx, command, put_back, nothing=Event("stock.released", {}))
        """
        asked = _read(command, Phase.COMPENSATION)
        entered = await self._clerk.barrier_enter(tx, self.participant, asked.key, asked.phase)
        if not entered.fresh:
            return await self._repeat(tx, asked, entered.reply)
        never_came = entered.barred and command.headers.get(ANSWERED_HEADER) != "true"
        if never_came or await self._refused(tx, asked.key):
            return await self._answer(tx, asked, nothing)
        reply = await _done(undo, command, tx)
        if isinstance(reply, Refusal):
            raise Misuse(
                f"the undo of {command.event_type} cannot refuse; return the reply, or raise to be tried again"
            )
        return await self._answer(tx, asked, reply)

    @property
    def _clerk(self) -> Clerk:
        return self._outbox or usual()

    async def _refused(self, tx: Any, key: str) -> bool:
        """Tell whether the action was refused. It has passed the barrier already, so this only reads."""
        action = await self._clerk.barrier_enter(tx, self.participant, key, Phase.ACTION)
        return action.reply is not None and bool(json.loads(action.reply)["refusal"])

    async def _answer(self, tx: Any, asked: _Command, answer: Event | Refusal) -> Passed:
        reply = _addressed(answer.reply if isinstance(answer, Refusal) else answer, asked)
        # First, because this checks the reply and says what is wrong with it.
        await self._clerk.stage(tx, reply)
        kept = _written(reply, refusal=isinstance(answer, Refusal))
        await self._clerk.barrier_keep(tx, self.participant, asked.key, asked.phase, kept)
        return Passed.DONE

    async def _repeat(self, tx: Any, asked: _Command, kept: bytes | None) -> Passed:
        if kept is None:
            raise Permanent(
                f"{asked.event.event_type} with the key {asked.key} came before, and its handler committed without a "
                "reply; let what act() and undo() raise pass through the handler"
            )
        fields = json.loads(kept)["reply"]
        retry = fields.pop("retry")
        await self._clerk.stage(tx, Event(**fields, retry=RetryPolicy.from_json(retry) if retry else None))
        return Passed.REPEATED


def _read(command: Event, phase: Phase) -> _Command:
    """Read what makes an event a command; anything else would be as wrong the next time."""
    key, said = command.headers.get(KEY_HEADER), command.headers.get(PHASE_HEADER)
    if not key or not said:
        raise Permanent(
            f"{command.event_type} is no command of a saga: its headers {KEY_HEADER} and {PHASE_HEADER} are missing; "
            "handle it without a barrier"
        )
    if wrong := unfit_key(key):
        raise Permanent(f"{command.event_type} is no command of a saga: its header {KEY_HEADER} {wrong}")
    if said not in list(Phase):
        raise Permanent(
            f"{command.event_type} is no command of a saga: its header {PHASE_HEADER} is {said[:40]!r}; there are "
            f"{', '.join(Phase)}"
        )
    if said != phase:
        right = "undo" if said == Phase.COMPENSATION else "act"
        raise Permanent(f"{command.event_type} came with the phase {said}; let its handler call {right}()")
    return _Command(command, key, phase)


async def _done(do: Doing, command: Event, tx: Any) -> Event | Refusal:
    reply = do(command, tx)
    reply = await reply if inspect.isawaitable(reply) else reply
    if isinstance(reply, Event | Refusal):
        return reply
    raise Misuse(f"the handling of {command.event_type} returned {reply!r}; return the reply, an Event or a Refusal")


def _addressed(reply: Event, asked: _Command) -> Event:
    """Let a reply find its saga: by its id, and by the key of the step."""
    saga_id = asked.event.saga_id or asked.key.partition(":")[0]
    told = {KEY_HEADER: asked.key, "causation_id": str(asked.event.event_id)}
    if trace := asked.event.headers.get("traceparent"):
        told["traceparent"] = trace
    return replace(
        reply,
        saga_id=saga_id,
        key=reply.key or reply.aggregate_id or saga_id,
        headers={**told, **reply.headers, KEY_HEADER: asked.key},
    )


def _written(reply: Event, *, refusal: bool) -> bytes:
    """Write a reply down as JSON; staging has found it fit, and writes the same types as text."""
    fields = {name: getattr(reply, name) for name in KEPT}
    fields |= {"headers": dict(reply.headers), "retry": reply.retry.to_json() if reply.retry else None}
    return json.dumps({"refusal": refusal, "reply": fields}, default=_plain).encode()


def _plain(value: Any) -> str:
    return value.isoformat() if hasattr(value, "isoformat") else str(value)
