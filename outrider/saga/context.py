"""The arguments of a step function: the context of an attempt, and the reply."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import Any, Generic, NamedTuple, TypeVar
from uuid import UUID

from outrider.errors import InvalidEvent, InvalidHandler
from outrider.event import Event
from outrider.saga.model import Phase

S = TypeVar("S")


class Reply(NamedTuple):
    """An event that answered a step."""

    event_type: str
    payload: Any


REMEDY = 'write context.stage(Event("order.placed", {"order": "A-7"})), with one event after the other'


class NothingToAwait:
    """The return value of `context.stage`: events are staged with the commit, so there is nothing to await."""

    def __repr__(self) -> str:
        return "<staged with the commit>"

    def __await__(self) -> Iterator[Any]:
        raise InvalidHandler(
            "awaits context.stage(…), which has nothing to wait for; write context.stage(…) without await"
        )


NOTHING_TO_AWAIT = NothingToAwait()


@dataclass(slots=True)
class StepContext(Generic[S]):
    """An attempt at a step. Change or replace `state`; the state is saved if the step succeeds.

    `key` is the idempotency key. All attempts of the action and of the compensation have the same key; `phase` tells
    action and compensation apart.

    >>> context = StepContext({"paid": False}, UUID(int=7), "…:charge", 1, "A-7")
    >>> _ = context.stage(Event("order.charged", {}))
    >>> context.staged[0].saga_id
    '00000000-0000-0000-0000-000000000007'
    """

    state: S
    saga_id: UUID
    key: str
    attempt: int
    correlation_id: str
    phase: Phase = Phase.ACTION
    item: Any = None
    """The item for which a step with `for_each` is run."""
    result: Any = None
    """In a compensation of a step with `into`: the result of the action for this item."""
    staged: list[Event] = field(default_factory=list)

    def stage(self, *events: Event) -> NothingToAwait:
        """Stage events in the commit that records the step. A failed attempt stages no event.

        An event without a saga id gets the id of the saga::

            context.stage(Event("order.placed", {"order": context.state.order_id}))
        """
        for event in events:
            if not isinstance(event, Event):
                raise InvalidEvent("event", f"a {type(event).__name__} is not an Event", REMEDY)
            self.staged.append(event if event.saga_id else replace(event, saga_id=str(self.saga_id)))
        return NOTHING_TO_AWAIT
