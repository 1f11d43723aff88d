"""What a step's function is handed: one run of one step of one saga."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import Any, Generic, NamedTuple, TypeVar
from uuid import UUID

from outrider.errors import InvalidEvent, UnfitHandler
from outrider.event import Event
from outrider.saga_store import Phase

S = TypeVar("S")


class Reply(NamedTuple):
    """An event that answered a step."""

    event_type: str
    payload: Any


REMEDY = 'write run.stage(Event("order.placed", {"order": "A-7"})), with one event after the other'


class NothingToAwait:
    """What `run.stage` returns: events go out with the commit, so there is nothing to wait for here."""

    def __repr__(self) -> str:
        return "<staged with the commit>"

    def __await__(self) -> Iterator[Any]:
        raise UnfitHandler("awaits run.stage(…), which has nothing to wait for; write run.stage(…) without await")


NOTHING_TO_AWAIT = NothingToAwait()


@dataclass(slots=True)
class Run(Generic[S]):
    """One attempt at a step. Change `state`, or put another in its place; it is saved if the step succeeds.

    `key` is the idempotency key: the same in every attempt, and for the action and its compensation, which `phase`
    tells apart.

    >>> run = Run({"paid": False}, UUID(int=7), "…:charge", 1, "A-7")
    >>> _ = run.stage(Event("order.charged", {}))
    >>> run.staged[0].saga_id
    '00000000-0000-0000-0000-000000000007'
    """

    state: S
    saga_id: UUID
    key: str
    attempt: int
    correlation_id: str
    phase: Phase = Phase.ACTION
    staged: list[Event] = field(default_factory=list)

    def stage(self, *events: Event) -> NothingToAwait:
        """Let events go out with the commit that records this step, and only with it.

        An event without a saga id gets this saga's::

            run.stage(Event("order.placed", {"order": run.state.order_id}))
        """
        for event in events:
            if not isinstance(event, Event):
                raise InvalidEvent("event", f"a {type(event).__name__} is not an Event", REMEDY)
            self.staged.append(event if event.saga_id else replace(event, saga_id=str(self.saga_id)))
        return NOTHING_TO_AWAIT
