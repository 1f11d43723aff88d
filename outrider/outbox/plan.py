"""Planning a course: what may go out, and what must wait. Pure."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence

from outrider.event import Readiness, StagedEvent, Stream
from outrider.outbox.course import Course
from outrider.outbox.streams import TopicRule, stream_of
from outrider.outcome import PARK, Defer
from outrider.store import DueStream, Settlement

_READY = Readiness.READY


def plan(
    fetched: Sequence[StagedEvent], due: Collection[DueStream], blocked: Collection[Stream], rule: TopicRule
) -> Course:
    """Sort what was found into streams that may go, events to park or defer, and streams to leave alone."""
    if not blocked and not due and all(event.readiness == _READY for event in fetched):
        return Course(fetched)
    course = Course()
    ready = course.ready
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
        elif event.readiness == _READY:
            ready.setdefault(stream, []).append(event)
        elif stream in ready:
            # It is early. Blocking the stream now would make those before it wait for this one's time.
            left.add(stream)
        else:
            stopped.add(stream)
            course.settlements.append(Settlement(event, stream, Defer()))
    for waiting in _unpreceded(due, fetched, rule):
        _plan_due(course, waiting)
    return course


def _unpreceded(due: Iterable[DueStream], fetched: Sequence[StagedEvent], rule: TopicRule) -> Iterable[DueStream]:
    """Leave out streams with an event before those that wait: it is parked in this pass, or in its writer's hands."""
    streams = {waiting.stream: waiting for waiting in due}
    for event in fetched if streams else ():
        waiting = streams.get(stream_of(event, rule))
        if waiting and waiting.events and event.position < waiting.events[0].position:
            del streams[waiting.stream]
    return streams.values()


def _plan_due(course: Course, waiting: DueStream) -> None:
    if not waiting.events:
        course.emptied.append(waiting.stream)
        return
    early = (index for index, event in enumerate(waiting.events) if event.readiness == Readiness.EARLY)
    # Parked events can have a time of their own; the stream then waits for that.
    first_early = next(early, len(waiting.events))
    if first_early:
        course.ready[waiting.stream] = waiting.events[:first_early]
        course.careful |= any(event.suspect for event in waiting.events)
    else:
        course.settlements.append(Settlement(waiting.events[0], waiting.stream, Defer()))
