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

from outrider.errors import Permanent, SubjectErased, UsageError
from outrider.event import ERASED, Event, subject_of
from outrider.outbox.staging import Outbox, default
from outrider.payload.conversion import to_plain
from outrider.payload.model import PayloadCipher, PayloadFacts, reply_facts
from outrider.retry import RetryPolicy
from outrider.saga.execution.step_executor import ANSWERED_HEADER, KEY_HEADER, PHASE_HEADER
from outrider.saga.model import ParticipantEntry, Phase
from outrider.saga.replies import key_problem

CommandFunction = Callable[[Event, Any], Any]
"""Takes the command and the transaction and returns the reply; async or synchronous."""

REPLY_FIELDS = (
    *("event_type", "payload", "aggregate_type", "aggregate_id", "headers", "topic", "key", "routing_key"),
    *("priority", "schema_version", "saga_id", "max_attempts", "subject"),
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
            await stock.execute(tx, command, take_from_shelf)

        @inbox.handler("stock.release", consumer="stock", topic="stock")
        async def release(command, tx):
            await stock.compensate(tx, command, put_back, nothing=Event("stock.released", {}))
    """

    def __init__(self, participant: str, *, outbox: Outbox = default) -> None:
        if not participant or not isinstance(participant, str):
            raise UsageError("a participant needs a name that never changes: Participant('stock')")
        self.participant, self._outbox = participant, outbox

    async def execute(self, tx: Any, command: Event, do: CommandFunction) -> CommandOutcome:
        """Execute a command once, and reply.

        `do` gets the command and the transaction, and returns the reply or a Rejection::

            async def take_from_shelf(command, tx):
                taken = await tx.execute("UPDATE shelf SET free = free - 1 WHERE free > 0")
                if taken == "UPDATE 0":
                    return Rejection(Event("stock.refused", {}))
                return Event("stock.reserved", {"reservation": command.payload["order"]})

            await stock.execute(tx, command, take_from_shelf)
        """
        request = _read(command, Phase.ACTION)
        entry = await self._enter(tx, request.key, request.phase)
        if entry.fresh:
            return await self._answer(tx, request, await _call(do, command, tx))
        return CommandOutcome.BARRED if entry.barred else await self._repeat(tx, request, entry.reply)

    async def compensate(self, tx: Any, command: Event, do: CommandFunction, *, nothing: Event) -> CommandOutcome:
        """Compensate an action once, and reply; reply with `nothing` if the action never arrived or was rejected.

        If the command says that the action was confirmed, the action is compensated even after its entry was pruned.
        After a compensation, a late action is ignored::

            await stock.compensate(tx, command, put_back, nothing=Event("stock.released", {}))
        """
        request = _read(command, Phase.COMPENSATION)
        entry = await self._enter(tx, request.key, request.phase)
        if not entry.fresh:
            return await self._repeat(tx, request, entry.reply)
        never_arrived = entry.barred and command.headers.get(ANSWERED_HEADER) != "true"
        if never_arrived or await self._was_rejected(tx, request.key):
            return await self._answer(tx, request, nothing)
        reply = await _call(do, command, tx)
        if isinstance(reply, Rejection):
            raise UsageError(
                f"the compensation of {command.event_type} cannot reject; return the reply, or raise to be tried again"
            )
        return await self._answer(tx, request, reply)

    async def _enter(self, tx: Any, key: str, phase: Phase) -> ParticipantEntry:
        entry: ParticipantEntry = await self._outbox.perform(tx, "participant_enter", self.participant, key, phase)
        return entry

    async def _was_rejected(self, tx: Any, key: str) -> bool:
        """Tell whether the action was rejected. The action is already recorded, so the call only reads."""
        action = await self._enter(tx, key, Phase.ACTION)
        return action.reply is not None and bool(json.loads(action.reply)["rejection"])

    async def _answer(self, tx: Any, request: _Command, answer: Event | Rejection) -> CommandOutcome:
        reply = _address(answer.reply if isinstance(answer, Rejection) else answer, request)
        # Stage first: staging checks the reply and explains an error.
        await self._outbox.stage(tx, reply)
        stored_reply = self._encrypted(request, _encode_reply(reply, rejection=isinstance(answer, Rejection)))
        await self._outbox.perform(
            tx, "participant_save_reply", self.participant, request.key, request.phase, stored_reply
        )
        return CommandOutcome.DONE

    async def _repeat(self, tx: Any, request: _Command, stored_reply: bytes | None) -> CommandOutcome:
        if stored_reply is None:
            raise Permanent(
                f"{request.event.event_type} with the key {request.key} came before, and its handler committed without "
                "a reply; let the errors of execute() and compensate() pass through the handler"
            )
        if ERASED in (stored := json.loads(stored_reply)):
            # The saga had ended before its data was erased, so it waits for no reply.
            return CommandOutcome.REPEATED
        try:
            fields = (await self._opened(request, stored))["reply"]
        except SubjectErased:
            # So is the saga, if its data was: it is stopped, or has ended.
            return CommandOutcome.REPEATED
        retry = fields.pop("retry")
        await self._outbox.stage(tx, Event(**fields, retry=RetryPolicy.from_json(retry) if retry else None))
        return CommandOutcome.REPEATED

    def _encrypted(self, request: _Command, reply: bytes) -> bytes:
        """Return a reply with the fields encrypted that are sensitive in its event."""
        cipher, document = self._cipher, json.loads(reply)
        facts = self._facts(request, document)
        if cipher is None or not cipher.is_sensitive(facts.event_type):
            return reply
        return json.dumps(cipher.encrypt(facts, document)).encode()

    async def _opened(self, request: _Command, document: Any) -> Any:
        if self._cipher is None:
            return document
        await self._cipher.load([], [document])
        return self._cipher.decrypt(self._facts(request, document), document)

    def _facts(self, request: _Command, document: Any) -> PayloadFacts:
        return reply_facts(self.participant, request.key, request.phase, document["reply"])

    @property
    def _cipher(self) -> PayloadCipher | None:
        payloads = self._outbox.rules.payloads
        return payloads.encryption if payloads is not None else None


def _read(command: Event, phase: Phase) -> _Command:
    """Read the command headers of an event. An invalid event is a permanent error."""
    key, phase_text = command.headers.get(KEY_HEADER), command.headers.get(PHASE_HEADER)
    if not key or not phase_text:
        raise Permanent(
            f"{command.event_type} is no command of a saga: its headers {KEY_HEADER} and {PHASE_HEADER} are missing; "
            "handle it without a participant"
        )
    if wrong := key_problem(key):
        raise Permanent(f"{command.event_type} is no command of a saga: its header {KEY_HEADER} {wrong}")
    if phase_text not in list(Phase):
        raise Permanent(
            f"{command.event_type} is no command of a saga: its header {PHASE_HEADER} is {phase_text[:40]!r}; there "
            f"are {', '.join(Phase)}"
        )
    if phase_text != phase:
        right = "compensate" if phase_text == Phase.COMPENSATION else "execute"
        raise Permanent(f"{command.event_type} came with the phase {phase_text}; let its handler call {right}()")
    return _Command(command, key, phase)


async def _call(do: CommandFunction, command: Event, tx: Any) -> Event | Rejection:
    reply = do(command, tx)
    reply = await reply if inspect.isawaitable(reply) else reply
    if isinstance(reply, Event | Rejection):
        return reply
    raise UsageError(
        f"the handling of {command.event_type} returned {reply!r}; return the reply, an Event or a Rejection"
    )


def _address(reply: Event, request: _Command) -> Event:
    """Add the saga id and the key of the step to a reply, so that the reply finds its saga; and its subject."""
    saga_id = request.event.saga_id or request.key.partition(":")[0]
    headers = {KEY_HEADER: request.key, "causation_id": str(request.event.event_id)}
    if trace := request.event.headers.get("traceparent"):
        headers["traceparent"] = trace
    return replace(
        reply,
        saga_id=saga_id,
        subject=request.event.subject if subject_of(reply) is None else reply.subject,
        key=reply.key or reply.aggregate_id or saga_id,
        headers={**headers, **reply.headers, KEY_HEADER: request.key},
    )


def _encode_reply(reply: Event, *, rejection: bool) -> bytes:
    """Encode a reply as JSON. Staging has checked the reply, and encodes the same types as text."""
    fields = {name: getattr(reply, name) for name in REPLY_FIELDS}
    fields |= {"headers": dict(reply.headers), "retry": reply.retry.to_json() if reply.retry else None}
    return json.dumps({"rejection": rejection, "reply": fields}, default=to_plain).encode()
