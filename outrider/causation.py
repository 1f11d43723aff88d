"""Causation: events that a handler stages continue the trace and the correlation of the event that is handled.

The inbox says which events are handled; drivers ask when they stage events or start a saga. Headers that an event has
of its own win. No header is invented: a handled event without a trace gives none.

Consumers and saga workers also count the events that are staged in their transactions, to wake relays after the commit.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass

from outrider.event import TRACEPARENT, Event

TRACE_ID = re.compile(r"(?!0{32})[0-9a-f]{32}")
"""The id of a trace."""

TEXT_BYTES_MAX = 1000

TRACE = frozenset({"traceparent", "tracestate", "trace_id"})
"""The headers of a trace, which belong together."""


@dataclass(slots=True)
class HandledEvents:
    """The events that a handler gets. Most handlers stage nothing, so the headers are read when they are needed."""

    events: Sequence[Event]
    _headers: Mapping[str, str] | None = None

    @property
    def headers(self) -> Mapping[str, str]:
        """Return the headers to continue: of a batch, the headers in which its events agree."""
        if self._headers is None:
            first, *others = [_headers_to_continue(event) for event in self.events]
            self._headers = {name: text for name, text in first.items() if all(o.get(name) == text for o in others)}
        return self._headers


_handled: ContextVar[HandledEvents | None] = ContextVar("outrider_causation", default=None)


@contextmanager
def handling(events: Sequence[Event]) -> Iterator[None]:
    """While the block runs, staged events continue these events. A batch gives the headers in which its events agree.

    >>> with handling([Event("order.placed", {}, headers={"correlation_id": "cart-3"})]):
    ...     continue_headers('{"tenant": "blue"}')
    '{"correlation_id": "cart-3", "tenant": "blue"}'
    """
    token = _handled.set(HandledEvents(events))
    try:
        yield
    finally:
        _handled.reset(token)


def continue_headers(own: str) -> str:
    """Return the headers of an event that is staged, with the headers to continue; both are JSON."""
    handled = _handled.get()
    if handled is None or not (continued := handled.headers):
        return own
    headers = json.loads(own)
    if not TRACE.isdisjoint(headers):
        continued = {name: text for name, text in continued.items() if name not in TRACE}
    return json.dumps({**continued, **headers}, ensure_ascii=False)


def traceparent() -> str | None:
    """Return the traceparent to continue, if the events that are handled have one."""
    handled = _handled.get()
    return None if handled is None else handled.headers.get("traceparent")


def is_handling() -> bool:
    """Tell whether a handler runs."""
    return _handled.get() is not None


@dataclass(slots=True)
class StagedCount:
    """The number of events that were staged inside a block, in tasks and threads that the block has started as well."""

    events: int = 0


_staged: ContextVar[StagedCount | None] = ContextVar("outrider_staged", default=None)


@contextmanager
def counting_staged() -> Iterator[StagedCount]:
    """Count the events that are staged while the block runs.

    >>> with counting_staged() as staged:
    ...     count_staged(2)
    >>> staged.events
    2
    """
    token = _staged.set(count := StagedCount())
    try:
        yield count
    finally:
        _staged.reset(token)


def count_staged(events: int) -> None:
    """Report staged events to the surrounding block that counts them, if there is one."""
    if count := _staged.get():
        count.events += events


def _headers_to_continue(event: Event) -> dict[str, str]:
    """Return the headers to continue. Any sender may have written them, so an invalid value counts as missing."""
    found, given = {}, event.headers
    if TRACEPARENT.fullmatch(parent := given.get("traceparent", "")) and TRACE_ID.match(parent, 3):
        found["traceparent"] = parent
        if _is_plain(state := given.get("tracestate", "")):
            found["tracestate"] = state
    elif TRACE_ID.fullmatch(trace := given.get("trace_id", "")):
        found["trace_id"] = trace
    if event.event_id is not None:
        found["correlation_id"] = found["causation_id"] = str(event.event_id)
    if _is_plain(correlation := given.get("correlation_id", "")):
        found["correlation_id"] = correlation
    return found


def _is_plain(text: str) -> bool:
    return text.isprintable() and 0 < len(text.encode()) <= TEXT_BYTES_MAX
