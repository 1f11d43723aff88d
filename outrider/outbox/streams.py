"""Order: what may go out together, and what must wait. Pure.

A course is one pass over a relay's lanes. It holds each stream's events in order and hands them out in waves. The first
event of a stream that is not confirmed ends that stream's part: what follows it is parked, or left as it was if nothing
is known. No later event can get ahead of it, whichever way the verdicts arrive.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass, field
from typing import NamedTuple

from outrider.event import Readiness, StagedEvent, Stream
from outrider.lifecycle import State
from outrider.outcome import CONFIRMED, PARK, Defer, Outcome
from outrider.store import DueStream, Settlement

TopicRule = Callable[[str, str | None, str | None], str]
"""(event_type, topic, routing_key) to topic."""


def stream_of(event: StagedEvent, rule: TopicRule) -> Stream:
    """Return the stream of an event."""
    return Stream(event.lane, event.topic or rule(event.event_type, None, event.routing_key), event.key)


class Run(NamedTuple):
    """Events of one stream, in order, that go out together."""

    stream: Stream
    events: list[StagedEvent]


@dataclass(slots=True)
class Course:
    """One pass: what is ready by stream, and what is settled so far."""

    ready: dict[Stream, deque[StagedEvent]] = field(default_factory=dict)
    settlements: list[Settlement] = field(default_factory=list)
    emptied: list[Stream] = field(default_factory=list)

    def next_wave(self, limit: int, *, ordered: bool, alone: Callable[[StagedEvent], bool]) -> list[Run]:
        """Take at most one event per stream, or whole runs if the broker keeps a stream's order by itself.

        An event that must go alone is a run of its own.
        """
        wave: list[Run] = []
        room = limit
        for stream, events in list(self.ready.items()):
            if room <= 0:
                break
            run = Run(stream, _take(events, min(room, len(events)) if ordered else 1, alone))
            wave.append(run)
            room -= len(run.events)
            if not events:
                del self.ready[stream]
        return wave

    def confirm(self, event: StagedEvent, stream: Stream) -> None:
        """The broker has it."""
        self.settlements.append(Settlement(event, stream, CONFIRMED))

    def stop(self, event: StagedEvent, stream: Stream, outcome: Outcome) -> None:
        """The event did not go out: write why, and let the rest of its stream wait behind it."""
        self.settlements.append(Settlement(event, stream, outcome))
        self.park((follower, stream) for follower in self.ready.pop(stream, ()))

    def park(self, events: Iterable[tuple[StagedEvent, Stream]]) -> None:
        """These come behind an event that stopped. One that is parked already needs no second write to stay so."""
        self.settlements += [Settlement(event, stream, PARK) for event, stream in events if event.state != State.PARKED]

    def leave(self, stream: Stream) -> None:
        """Nothing is known: the stream stays as it is until the next pass."""
        self.ready.pop(stream, None)


def _take(events: deque[StagedEvent], count: int, alone: Callable[[StagedEvent], bool]) -> list[StagedEvent]:
    taken = [events.popleft()]
    if alone(taken[0]):
        return taken
    while events and len(taken) < count and not alone(events[0]):
        taken.append(events.popleft())
    return taken


def plan(
    fetched: Iterable[StagedEvent], due: Iterable[DueStream], blocked: Collection[Stream], rule: TopicRule
) -> Course:
    """Sort what was found into streams that may go, events to park or defer, and streams to leave alone."""
    course = Course()
    stopped: set[Stream] = set(blocked)
    left: set[Stream] = set()
    for event in fetched:
        stream = stream_of(event, rule)
        if stream in left:
            continue
        if event.readiness == Readiness.HELD:
            # Its writer is about to publish it. Whatever follows in the stream waits for the next pass.
            left.add(stream)
        elif stream in stopped:
            course.settlements.append(Settlement(event, stream, PARK))
        elif event.readiness == Readiness.EARLY and stream in course.ready:
            # Blocking the stream now would make those before it wait for this one's time.
            left.add(stream)
        elif event.readiness == Readiness.EARLY:
            stopped.add(stream)
            course.settlements.append(Settlement(event, stream, Defer()))
        else:
            course.ready.setdefault(stream, deque()).append(event)
    for waiting in due:
        _plan_due(course, waiting)
    return course


def _plan_due(course: Course, waiting: DueStream) -> None:
    if not waiting.events:
        course.emptied.append(waiting.stream)
        return
    run: deque[StagedEvent] = deque()
    for event in waiting.events:
        if event.readiness == Readiness.EARLY:
            # Parked events can have a time of their own; the stream then waits for that.
            if not run:
                course.settlements.append(Settlement(event, waiting.stream, Defer()))
            break
        run.append(event)
    if run:
        course.ready[waiting.stream] = run
