"""Routing of events to handlers, by consumer, topic and type."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from difflib import get_close_matches
from typing import Any

from outrider.errors import UsageError
from outrider.event import default_topic
from outrider.inbox.settings import ConsumerSettings
from outrider.inbox.store import InboxStore
from outrider.payload.payloads import Payloads

EXAMPLE = '@inbox.handler("order.placed", consumer="billing")'

Handler = Callable[[Any, Any], Any]
"""A handler: takes an event (or a list of events, if it handles batches) and the transaction."""


@dataclass(frozen=True, slots=True)
class Route:
    """A handler, and whether it takes batches."""

    handler: Handler
    batch: bool = False

    @property
    def name(self) -> str:
        """Name the handler for people.

        >>> Route(print).name
        'builtins.print'
        """
        plain = getattr(self.handler, "func", self.handler)
        name = getattr(plain, "__qualname__", type(plain).__qualname__)
        return f"{plain.__module__}.{name}"


@dataclass(slots=True)
class Routes:
    """The handlers of one consumer. `otherwise` takes events without a handler; `payloads` opens the events."""

    consumer: str
    settings: ConsumerSettings = field(default_factory=ConsumerSettings)
    handlers: dict[tuple[str, str], Route] = field(default_factory=dict)
    otherwise: Route | None = None
    payloads: Payloads | None = None

    @property
    def topics(self) -> list[str]:
        """Return the topics of the consumer."""
        return sorted({topic for topic, _ in self.handlers})

    def find(self, topic: str, event_type: str) -> Route | None:
        """Return the handler of a type, if there is one."""
        return self.handlers.get((topic, event_type), self.otherwise)

    def check(self, store: InboxStore) -> None:
        """Reject handlers that cannot work with a store, before any event is handled."""
        for route in [*self.handlers.values(), *([self.otherwise] if self.otherwise else [])]:
            if problem := store.transactions.check_handler(route.handler):
                raise UsageError(f"the handler {route.name} {problem}")

    def add(self, topic: str, event_type: str, route: Route) -> None:
        """Register the handler of an event type. Only one is allowed: the order of two would be undefined."""
        if (existing := self.handlers.get((topic, event_type))) is not None:
            raise UsageError(
                f"the consumer {self.consumer} has a handler of {event_type} on {topic} already: {existing.name}; call "
                "both from one handler, or give the second a consumer of its own"
            )
        self.handlers[topic, event_type] = route


class Router:
    """The handlers of a service, for any number of consumers.

    >>> router = Router()
    >>> @router.handler("order.placed", consumer="billing")
    ... async def bill(event, tx): ...
    >>> router.consumers["billing"].topics
    ['events.order.placed']
    """

    def __init__(self, payloads: Payloads | None = None) -> None:
        self.consumers: dict[str, Routes] = {}
        self.payloads = payloads

    def consumer(self, name: str, settings: ConsumerSettings) -> None:
        """Set the settings of a consumer."""
        self._routes(name).settings = settings

    def handler(
        self, *event_types: str, consumer: str = "", topic: str | None = None, batch: bool = False
    ) -> Callable[[Handler], Handler]:
        """Register the handler of event types. The default topic is the one that staging would choose."""
        if not event_types or not all(isinstance(event_type, str) for event_type in event_types):
            raise UsageError(f"a handler needs the type of its events: {EXAMPLE}")
        if not consumer:
            raise UsageError(f"a handler needs the name of its consumer, under which receipts are kept: {EXAMPLE}")

        def register(handler: Handler) -> Handler:
            _check_arguments(handler)
            for event_type in event_types:
                route = Route(handler, batch)
                self._routes(consumer).add(topic or default_topic(event_type, None, None), event_type, route)
            return handler

        return register

    def select(self, names: Iterable[str]) -> Mapping[str, Routes]:
        """Return the consumers named, or all. A consumer with settings and no handler is a misspelt name."""
        for name, routes in self.consumers.items():
            if not routes.handlers:
                others = [other for other, each in self.consumers.items() if each.handlers]
                close = get_close_matches(name, others, n=1) or others
                suggestion = f"did you mean {close[0]}?" if close else f"register one: {EXAMPLE}"
                raise UsageError(f"the consumer {name} has settings and no handler; {suggestion}")
        wanted = list(names) or list(self.consumers)
        unknown = [name for name in wanted if name not in self.consumers]
        if unknown:
            raise UsageError(
                f"no consumer {unknown[0]!r} is registered (there are: {', '.join(self.consumers) or 'none'})"
            )
        return {name: self.consumers[name] for name in wanted}

    def _routes(self, name: str) -> Routes:
        if not name or not isinstance(name, str):
            raise UsageError("a consumer needs a name, the same for ever: receipts are kept under it")
        return self.consumers.setdefault(name, Routes(name, payloads=self.payloads))


def _check_arguments(handler: Handler) -> None:
    """Reject a handler that cannot be called with an event and a transaction."""
    try:
        signature = inspect.signature(handler)
    except ValueError:
        # A callable that is not written in Python may have no signature.
        return
    try:
        signature.bind(None, None)
    except TypeError as error:
        name = Route(handler).name
        raise UsageError(
            f"the handler {name}{signature} cannot be called with an event and the transaction ({error}); write "
            f"async def {name.rpartition('.')[2]}(event, tx)"
        ) from error
