"""Where replies come in: an event that arrived becomes mail, in the transaction of the handler that received it.

An answer to a command belongs to the saga whose key it carries. Any other event belongs to the saga that `correlate`
finds, or else to the one whose id it carries. What belongs to nobody, or to a saga of another type, is dropped.
What could never be posted is refused for good, so that it is buried at once and holds nobody up.
"""

from __future__ import annotations

import json
from collections.abc import Awaitable, Callable
from typing import Any
from uuid import UUID

from outrider.errors import Permanent
from outrider.event import Event, uuid7
from outrider.observer import MailUnaddressed, MailUnknown, Observer, Observers
from outrider.saga.acting import KEY_HEADER
from outrider.saga.clerk import Clerk, usual
from outrider.saga.definition import saga_id_of
from outrider.saga.keys import unfit_key
from outrider.saga.sagas import Sagas
from outrider.saga.steps import Function, Kind, Step
from outrider.saga_store import MailKind, NewMail
from outrider.where import text_of, where

COPY = "copy saga_id and saga_key from the command, or use Barrier"
CORRELATE = "let the event carry saga_id, or give the wait correlate=…"
"""What to do about an event that does not say which saga it is for."""


class Intake:
    """Posts arrived events to sagas.

    Call `deliver` in a handler of yours, or let `outrider saga run` do all of it::

        intake = Intake(sagas)

        @inbox.handler("stock.reserved", consumer="saga.order")
        async def reserved(event, tx):
            await intake.deliver("order", event, tx)
    """

    def __init__(self, sagas: Sagas, clerk: Clerk | None = None, observer: Observer | None = None) -> None:
        self._sagas, self._clerk, self._observer = sagas, clerk, observer or Observers()

    @property
    def saga_types(self) -> list[str]:
        """Return the types of sagas that get replies at all."""
        return [name for name in sorted({saga.saga_type for saga in self._sagas}) if self.replies(name)]

    def replies(self, saga_type: str) -> list[tuple[str, str]]:
        """Return the topics and types of all events that steps of a saga wait for, in any of its versions."""
        pairs = {(topic, event_type) for step in self._steps(saga_type) for event_type, topic in step.replies.items()}
        return sorted(pairs)

    def handler(self, saga_type: str) -> Callable[[Event, Any], Awaitable[None]]:
        """Return a handler of an inbox that delivers to sagas of a type."""

        async def deliver(event: Event, tx: Any) -> None:
            await self.deliver(saga_type, event, tx)

        return deliver

    async def deliver(self, saga_type: str, event: Event, tx: Any) -> bool:
        """Post an event to the saga of a type that it belongs to; False if there is none, or it has it already."""
        saga_id = self._owner(saga_type, event)
        if saga_id is not None and await (self._clerk or usual()).post_mail(tx, [_mail(saga_type, saga_id, event)]):
            return True
        if saga_id is None and not self._correlating(saga_type, event.event_type):
            kinds = {step.kind for step in self._steps(saga_type) if event.event_type in step.replies}
            remedy = COPY if Kind.REQUEST in kinds else CORRELATE
            self._observer.notice(MailUnaddressed(saga_type, event.event_id, event.event_type, remedy))
        else:
            self._observer.notice(MailUnknown(saga_type, saga_id, event.event_id, event.event_type))
        return False

    def _owner(self, saga_type: str, event: Event) -> UUID | None:
        carried = _uuid(event.saga_id)
        if carried is not None and event.headers.get(KEY_HEADER, "").startswith(f"{carried}:"):
            return carried
        for correlate in self._correlating(saga_type, event.event_type):
            if (found := _correlated(correlate, event)) is not None:
                return saga_id_of(saga_type, found)
        return carried

    def _correlating(self, saga_type: str, event_type: str) -> list[Function]:
        """Return the functions that find the saga of an event, those of later versions first."""
        steps = reversed(self._steps(saga_type))
        return [step.correlate for step in steps if step.correlate and event_type in step.replies]

    def _steps(self, saga_type: str) -> list[Step]:
        sagas = sorted((saga for saga in self._sagas if saga.saga_type == saga_type), key=lambda saga: saga.version)
        return [step for saga in sagas for step in saga.definition.steps.values()]


def _mail(saga_type: str, saga_id: UUID, event: Event) -> NewMail:
    """Make mail of an event; what no store could keep would be as wrong the next time."""
    key = event.headers.get(KEY_HEADER)
    if key and (wrong := unfit_key(key)):
        raise Permanent(f"{event.event_type} answers no step: its header {KEY_HEADER} {wrong}; {COPY}")
    try:
        body = json.dumps(event.payload, allow_nan=False).encode()
    except ValueError as error:
        raise Permanent(f"the payload of {event.event_type} is not JSON: {error}; send null or a number") from error
    return NewMail(saga_id, MailKind.REPLY, event.event_type, key, body, event.event_id or uuid7(), saga_type)


def _correlated(correlate: Function, event: Event) -> str | None:
    """Ask which saga an event belongs to. The same function would say the same to the same event the next time."""
    try:
        found: str | None = correlate(event)
    except Exception as error:
        name, place = getattr(correlate, "__qualname__", repr(correlate)), where(error)
        said = f"{type(error).__name__}: {text_of(error)}" + (f" ({place})" if place else "")
        remedy = f"let it return None for a {event.event_type} that belongs to no saga"
        raise Permanent(f"correlate={name} raised {said}; {remedy}") from error
    return found


def _uuid(text: str | None) -> UUID | None:
    try:
        return UUID(text) if text else None
    except ValueError:
        return None
