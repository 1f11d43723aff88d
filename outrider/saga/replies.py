"""The reply handler: turns a received event into a saga message, in the handler transaction.

A reply to a command belongs to the saga whose key the event carries. Any other event belongs to the saga that
`correlate` finds, or else to the saga whose id the event carries. An event without a saga, or for a saga of a different
type, is dropped. An event that can never be delivered raises Permanent, so the inbox dead-letters the event at once and
continues with the next.
"""

from __future__ import annotations

import json
from collections.abc import Awaitable, Callable
from typing import Any
from uuid import UUID

from outrider.errors import Permanent, SubjectErased
from outrider.event import Event, uuid7
from outrider.outbox.staging import Outbox, default
from outrider.redaction import UNREDACTED
from outrider.saga.definition.saga import SagaRegistry, saga_id_of
from outrider.saga.definition.steps import Step, StepKind
from outrider.saga.definition.validation import Function
from outrider.saga.execution.step_executor import KEY_HEADER
from outrider.saga.model import MessageKind, NewSagaMessage
from outrider.telemetry.events import ErasedEventSkipped, Observer, Observers, ReplyOfUnknownSaga, ReplyWithoutSaga
from outrider.tracebacks import summary_of, user_frame

COPY = "copy saga_id and saga_key from the command, or use Participant"

CORRELATE = "let the event carry saga_id, or give the wait correlate=…"
"""The remedy for an event that does not identify its saga."""

KEY_BYTES_MAX = 1000
"""More than a saga id and the longest step name need, and less than an index can hold."""


class ReplyHandler:
    """Delivers received events to sagas.

    Call `deliver` in a handler, or use `outrider saga run`, which registers all handlers::

        replies = ReplyHandler(sagas)

        @inbox.handler("stock.reserved", consumer="saga.order")
        async def reserved(event, tx):
            await replies.deliver("order", event, tx)
    """

    def __init__(self, sagas: SagaRegistry, outbox: Outbox = default, observer: Observer | None = None) -> None:
        self._payloads = sagas.payloads
        self._sagas, self._outbox, self._observer = sagas, outbox, observer or Observers()

    @property
    def saga_types(self) -> list[str]:
        """Return the saga types that expect replies."""
        return [name for name in sorted({saga.saga_type for saga in self._sagas}) if self.replies(name)]

    def replies(self, saga_type: str) -> list[tuple[str, str]]:
        """Return the topics and types of all events that steps of a saga type wait for, in all versions."""
        pairs = {(topic, event_type) for step in self._steps(saga_type) for event_type, topic in step.replies.items()}
        return sorted(pairs)

    def handler(self, saga_type: str) -> Callable[[Event, Any], Awaitable[None]]:
        """Return an inbox handler that delivers to sagas of a type."""

        async def deliver(event: Event, tx: Any) -> None:
            await self.deliver(saga_type, event, tx)

        return deliver

    async def deliver(self, saga_type: str, event: Event, tx: Any) -> bool:
        """Deliver an event to its saga of a type; False if there is no saga, or the saga already has the event.

        An event whose subject was erased is dropped as well.

        The mailbox keeps the payload as received; an event that this code cannot open raises InvalidPayload.
        """
        opened = event
        if self._payloads is not None:
            await self._payloads.load([], payloads=[event.payload])
            try:
                opened = self._payloads.open(event)
            except SubjectErased:
                facts = event.event_id, event.topic or "", event.event_type
                self._observer.emit(ErasedEventSkipped(self._sagas.consumer(saga_type), *facts))
                return False
        saga_id = self._find_saga(saga_type, opened)
        if saga_id is not None:
            message = _message(saga_type, saga_id, event)
            if await self._outbox.perform(tx, "deliver_messages", [message]):
                return True
        if saga_id is None and not self._correlate_functions(saga_type, event.event_type):
            kinds = {step.kind for step in self._steps(saga_type) if event.event_type in step.replies}
            remedy = COPY if StepKind.REQUEST in kinds else CORRELATE
            self._observer.emit(ReplyWithoutSaga(saga_type, event.event_id, event.event_type, remedy))
        else:
            self._observer.emit(ReplyOfUnknownSaga(saga_type, saga_id, event.event_id, event.event_type))
        return False

    def _find_saga(self, saga_type: str, event: Event) -> UUID | None:
        carried_id = _uuid(event.saga_id)
        if carried_id is not None and event.headers.get(KEY_HEADER, "").startswith(f"{carried_id}:"):
            return carried_id
        for correlate in self._correlate_functions(saga_type, event.event_type):
            if (found := _correlation_id(correlate, event)) is not None:
                return saga_id_of(saga_type, found)
        return carried_id

    def _correlate_functions(self, saga_type: str, event_type: str) -> list[Function]:
        """Return the correlate functions for an event type, later versions first."""
        steps = reversed(self._steps(saga_type))
        return [step.correlate for step in steps if step.correlate and event_type in step.replies]

    def _steps(self, saga_type: str) -> list[Step]:
        sagas = sorted((saga for saga in self._sagas if saga.saga_type == saga_type), key=lambda saga: saga.version)
        return [step for saga in sagas for step in saga.definition.steps.values()]


def _message(saga_type: str, saga_id: UUID, event: Event) -> NewSagaMessage:
    """Build a message from an event. Raises Permanent for an event that no store can keep."""
    key = event.headers.get(KEY_HEADER)
    if key and (problem := key_problem(key)):
        raise Permanent(f"{event.event_type} answers no step: its header {KEY_HEADER} {problem}; {COPY}")
    try:
        body = json.dumps(event.payload, allow_nan=False).encode()
    except ValueError as error:
        raise Permanent(f"the payload of {event.event_type} is not JSON: {error}; send null or a number") from error
    event_id, version = event.event_id or uuid7(), str(event.schema_version)
    return NewSagaMessage(saga_id, MessageKind.REPLY, event.event_type, key, body, event_id, saga_type, version)


def _correlation_id(correlate: Function, event: Event) -> str | None:
    """Return the correlation id of an event. An exception is permanent, because the function would raise again."""
    try:
        found: str | None = correlate(event)
    except Exception as error:
        name, location = getattr(correlate, "__qualname__", repr(correlate)), user_frame(error)
        error_text = summary_of(error, UNREDACTED) + (f" ({location})" if location else "")
        remedy = f"let it return None for a {event.event_type} that belongs to no saga"
        raise Permanent(f"correlate={name} raised {error_text}; {remedy}") from error
    return found


def _uuid(text: str | None) -> UUID | None:
    try:
        return UUID(text) if text else None
    except ValueError:
        return None


def key_problem(key: str) -> str | None:
    """Return the reason why a text cannot be the key of a step, or None.

    >>> key_problem("x" * 2000)
    'is longer than 1000 bytes'
    """
    if "\0" in key or any("\ud800" <= character <= "\udfff" for character in key):
        return "has a NUL or half a character in it"
    if len(key.encode()) > KEY_BYTES_MAX:
        return f"is longer than {KEY_BYTES_MAX} bytes"
    return None
