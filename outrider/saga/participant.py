"""Participants: a command takes effect once, and never after its compensation.

A repeated command gets the same reply again. If a compensation overtakes its action, there is nothing to compensate,
and the action is ignored on arrival. All writes happen in the transaction of the command's handler.
"""

from __future__ import annotations

import inspect
import json
from collections.abc import Callable
from dataclasses import dataclass, replace
from enum import StrEnum
from typing import Any, NamedTuple

from outrider.errors import Permanent, UsageError
from outrider.event import Event
from outrider.outbox.staging import Outbox, default
from outrider.retry import RetryPolicy
from outrider.saga.execution.step_executor import ANSWERED_HEADER, KEY_HEADER, PHASE_HEADER
from outrider.saga.model import ParticipantEntry, Phase
from outrider.saga.replies import unfit_key

Doing = Callable[[Event, Any], Any]
"""Takes the command and the transaction and returns the reply; async or synchronous."""

KEPT = (
    *("event_type", "payload", "aggregate_type", "aggregate_id", "headers", "topic", "key", "routing_key"),
    *("priority", "schema_version", "saga_id", "max_attempts"),
)
"""The fields that a repeated reply has in common with the first reply."""


@dataclass(frozen=True, slots=True)
class Rejection:
    """A negative reply: the effect did not happen and will not happen, so there is nothing to compensate.

    >>> Rejection(Event("stock.refused", {"reason": "sold out"})).reply.event_type
    'stock.refused'
    """

    reply: Event


class CommandOutcome(StrEnum):
    """The outcome of a command: done now, answered again as before, or ignored because the compensation came first."""

    DONE = "done"
    REPEATED = "repeated"
    BARRED = "barred"


class _Command(NamedTuple):
    event: Event
    key: str
    phase: Phase


class Participant:
    """A participant. The name must never change, because idempotency keys are stored under the name.

    Use a participant in the handlers of commands::

        stock = Participant("stock")

        @inbox.handler("stock.reserve", consumer="stock", topic="stock")
        async def reserve(command, tx):
            await stock.act(tx, command, take_from_shelf)

        @inbox.handler("stock.release", consumer="stock", topic="stock")
        async def release(command, tx):
            await stock.compensate(tx, command, put_back, nothing=Event("stock.released", {}))
    """

    def __init__(self, participant: str, *, outbox: Outbox = default) -> None:
        if not participant or not isinstance(participant, str):
            raise UsageError("a barrier needs the participant's name, the same for ever: Participant('stock')")
        self.participant, self._outbox = participant, outbox

    async def act(self, tx: Any, command: Event, do: Doing) -> CommandOutcome:
        """Execute a command once, and reply.

        `do` gets the command and the transaction, and returns the reply or a Rejection::

            async def take_from_shelf(command, tx):
                taken = await tx.execute("UPDATE shelf SET free = free - 1 WHERE free > 0")
                if taken == "UPDATE 0":
                    return Rejection(Event("stock.refused", {}))
                return Event("stock.reserved", {"reservation": command.payload["order"]})

            await stock.act(tx, command, take_from_shelf)
        """
        asked = _read(command, Phase.ACTION)
        entered = await self._enter(tx, asked.key, asked.phase)
        if entered.fresh:
            return await self._answer(tx, asked, await _done(do, command, tx))
        return CommandOutcome.BARRED if entered.barred else await self._repeat(tx, asked, entered.reply)

    async def compensate(self, tx: Any, command: Event, do: Doing, *, nothing: Event) -> CommandOutcome:
        """Compensate an action once, and reply; reply with `nothing` if the action never arrived or was rejected.

        If the command says that the action was confirmed, the action is compensated even after its entry was pruned.
        After a compensation, a late action is ignored::

            await stock.compensate(tx, command, put_back, nothing=Event("stock.released", {}))
        """
        asked = _read(command, Phase.COMPENSATION)
        entered = await self._enter(tx, asked.key, asked.phase)
        if not entered.fresh:
            return await self._repeat(tx, asked, entered.reply)
        never_came = entered.barred and command.headers.get(ANSWERED_HEADER) != "true"
        if never_came or await self._refused(tx, asked.key):
            return await self._answer(tx, asked, nothing)
        reply = await _done(do, command, tx)
        if isinstance(reply, Rejection):
            raise UsageError(
                f"the compensation of {command.event_type} cannot reject; return the reply, or raise to be tried again"
            )
        return await self._answer(tx, asked, reply)

    async def _enter(self, tx: Any, key: str, phase: Phase) -> ParticipantEntry:
        entered: ParticipantEntry = await self._outbox.perform(tx, "participant_enter", self.participant, key, phase)
        return entered

    async def _refused(self, tx: Any, key: str) -> bool:
        """Tell whether the action was rejected. The action is already recorded, so the call only reads."""
        action = await self._enter(tx, key, Phase.ACTION)
        return action.reply is not None and bool(json.loads(action.reply)["rejection"])

    async def _answer(self, tx: Any, asked: _Command, answer: Event | Rejection) -> CommandOutcome:
        reply = _addressed(answer.reply if isinstance(answer, Rejection) else answer, asked)
        # Stage first: staging checks the reply and explains an error.
        await self._outbox.stage(tx, reply)
        kept = _written(reply, rejection=isinstance(answer, Rejection))
        await self._outbox.perform(tx, "participant_keep", self.participant, asked.key, asked.phase, kept)
        return CommandOutcome.DONE

    async def _repeat(self, tx: Any, asked: _Command, kept: bytes | None) -> CommandOutcome:
        if kept is None:
            raise Permanent(
                f"{asked.event.event_type} with the key {asked.key} came before, and its handler committed without a "
                "reply; let what act() and compensate() raise pass through the handler"
            )
        fields = json.loads(kept)["reply"]
        retry = fields.pop("retry")
        await self._outbox.stage(tx, Event(**fields, retry=RetryPolicy.from_json(retry) if retry else None))
        return CommandOutcome.REPEATED


def _read(command: Event, phase: Phase) -> _Command:
    """Read the command headers of an event. An invalid event is a permanent error."""
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
        right = "compensate" if said == Phase.COMPENSATION else "act"
        raise Permanent(f"{command.event_type} came with the phase {said}; let its handler call {right}()")
    return _Command(command, key, phase)


async def _done(do: Doing, command: Event, tx: Any) -> Event | Rejection:
    reply = do(command, tx)
    reply = await reply if inspect.isawaitable(reply) else reply
    if isinstance(reply, Event | Rejection):
        return reply
    raise UsageError(
        f"the handling of {command.event_type} returned {reply!r}; return the reply, an Event or a Rejection"
    )


def _addressed(reply: Event, asked: _Command) -> Event:
    """Add the saga id and the key of the step to a reply, so that the reply finds its saga."""
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


def _written(reply: Event, *, rejection: bool) -> bytes:
    """Encode a reply as JSON. Staging has checked the reply, and encodes the same types as text."""
    fields = {name: getattr(reply, name) for name in KEPT}
    fields |= {"headers": dict(reply.headers), "retry": reply.retry.to_json() if reply.retry else None}
    return json.dumps({"rejection": rejection, "reply": fields}, default=_plain).encode()


def _plain(value: Any) -> str:
    return value.isoformat() if hasattr(value, "isoformat") else str(value)
