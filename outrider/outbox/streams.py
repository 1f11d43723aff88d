"""Order: what may go out together, and what must wait. Pure.

A course is one pass over a relay's lanes. It holds each stream's events in order and hands them out in waves. The first
event of a stream that is not confirmed ends that stream's part: what follows it is parked, or left as it was if nothing
is known. No later event can get ahead of it, whichever way the verdicts arrive.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass, field
from itertools import chain
from operator import attrgetter
from typing import NamedTuple

from outrider.event import Readiness, StagedEvent, Stream
from outrider.lifecycle import State
from outrider.outcome import CONFIRMED, PARK, Defer, Outcome
from outrider.store import DueStream, Settlement

WAVE_BYTES_MAX = 4_000_000
"""Once so much payload is in a wave, the rest waits for the next: a slow network must confirm it within the timeout."""

_PAYLOAD = attrgetter("payload")
_READY = Readiness.READY

TopicRule = Callable[[str, str | None, str | None], str]
"""(event_type, topic, routing_key) to topic."""


def topic_of(event: StagedEvent, rule: TopicRule) -> str:
    """Return the topic of an event; a foreign row may have none of its own."""
    return event.topic or rule(event.event_type, None, event.routing_key)


def stream_of(event: StagedEvent, rule: TopicRule) -> Stream:
    """Return the stream of an event."""
    return Stream(event.lane, topic_of(event, rule), event.key)


def payload_bytes(events: Iterable[StagedEvent]) -> int:
    """Return how much payload events have together."""
    return sum(map(len, map(_PAYLOAD, events)))


class Run(NamedTuple):
    """Events of one stream, in order, that go out together."""

    stream: Stream
    events: list[StagedEvent]


Alone = Callable[[StagedEvent], bool]
"""Tells whether an event must go out with nothing else."""


@dataclass(slots=True)
class Course:
    """One pass: what is ready by stream, and what is settled so far.

    While nothing stands in the way of any event, they are all `fresh`: in order, and not looked at one by one. What is
    confirmed of them is `sent`. They are sorted into streams once that matters; if all are confirmed, it never does.
    """

    fresh: Sequence[StagedEvent] = ()
    sent: list[StagedEvent] = field(default_factory=list)
    ready: dict[Stream, list[StagedEvent]] = field(default_factory=dict)
    settlements: list[Settlement] = field(default_factory=list)
    emptied: list[Stream] = field(default_factory=list)
    confirmed: int = 0
    careful: bool = False
    """Whether an event among them has broken the connection before."""

    def next_wave(self, limit: int, *, ordered: bool, alone: Alone | None = None) -> list[Run]:
        """Take at most one event per stream, or whole runs if the broker keeps a stream's order by itself.

        An event that must go alone is a run of its own. The limit is in events; there is one in bytes besides.
        """
        if ordered and alone is None and self._fits(limit):
            return self.take_all()
        wave: list[Run] = []
        left: dict[Stream, list[StagedEvent]] = {}
        room, room_bytes = limit, WAVE_BYTES_MAX
        for stream, events in self.ready.items():
            if room <= 0 or room_bytes <= 0:
                left[stream] = events
                continue
            count = _run_length(events, room, room_bytes, alone) if ordered else 1
            if count < len(events):
                left[stream] = events[count:]
            taken = events[:count]
            wave.append(Run(stream, taken))
            room -= count
            room_bytes -= len(taken[0].payload) if count == 1 else payload_bytes(taken)
        self.ready = left
        return wave

    def _fits(self, limit: int) -> bool:
        """Tell whether everything that is ready may go at once."""
        if sum(map(len, self.ready.values())) > limit:
            return False
        return fits(chain.from_iterable(self.ready.values()))

    def sort(self, rule: TopicRule) -> None:
        """Sort into its streams what is fresh and not sent; what is sent will be settled together with it."""
        sent = {event.event_id for event in self.sent}
        for event in self.fresh:
            if event.event_id not in sent:
                self.ready.setdefault(stream_of(event, rule), []).append(event)
        self.settlements += [Settlement(event, stream_of(event, rule), CONFIRMED) for event in self.sent]
        self.fresh, self.sent = (), []

    def take_all(self) -> list[Run]:
        """Take everything that is ready."""
        everything = [Run(stream, events) for stream, events in self.ready.items()]
        self.ready = {}
        return everything

    def take(self, events: Iterable[StagedEvent], rule: TopicRule) -> list[Run]:
        """Take these, which come first in their streams."""
        taken: dict[Stream, list[StagedEvent]] = {}
        for event in events:
            taken.setdefault(stream_of(event, rule), []).append(event)
        for stream, run in taken.items():
            if left := self.ready.pop(stream)[len(run) :]:
                self.ready[stream] = left
        return [Run(stream, run) for stream, run in taken.items()]

    def confirm_fresh(self, wave: Sequence[StagedEvent]) -> None:
        """The broker has these of what was fresh."""
        self.sent += wave
        self.confirmed += len(wave)

    def confirm(self, runs: Iterable[Run]) -> None:
        """The broker has them."""
        before = len(self.settlements)
        self.settlements += [Settlement(event, stream, CONFIRMED) for stream, events in runs for event in events]
        self.confirmed += len(self.settlements) - before

    def stop(self, event: StagedEvent, stream: Stream, outcome: Outcome) -> None:
        """The event did not go out: write why, and let the rest of its stream wait behind it."""
        self.settlements.append(Settlement(event, stream, outcome))
        self.park(stream, self.ready.pop(stream, ()))

    def park(self, stream: Stream, events: Iterable[StagedEvent]) -> None:
        """These come behind an event that stopped. One that is parked already needs no second write to stay so."""
        self.settlements += [Settlement(event, stream, PARK) for event in events if event.state != State.PARKED]

    def put_back(self, stream: Stream, events: list[StagedEvent]) -> None:
        """These were taken too early; they go before whatever of the stream is still ready."""
        self.ready[stream] = events + self.ready.get(stream, [])

    def leave(self, stream: Stream) -> None:
        """Nothing is known: the stream stays as it is until the next pass."""
        self.ready.pop(stream, None)


def waves(events: Iterable[StagedEvent], rule: TopicRule) -> list[list[StagedEvent]]:
    """Split events into waves: the first of every stream, the second of every stream, and so on."""
    split: list[list[StagedEvent]] = []
    before: dict[tuple[int, str, str], int] = {}
    for event in events:
        # A plain tuple, because this runs for every event, and a named one takes four times as long.
        stream = (event.lane, topic_of(event, rule), event.key)
        number = before.get(stream, 0)
        before[stream] = number + 1
        if number == len(split):
            split.append([])
        split[number].append(event)
    return split


def portions(events: Sequence[StagedEvent], limit: int) -> list[Sequence[StagedEvent]]:
    """Split events, in order, into portions that may be under way at once. The limit is in events; see `fits`."""
    if len(events) <= limit and fits(events):
        return [events]
    split: list[list[StagedEvent]] = []
    size = 0
    for event in events:
        size += len(event.payload)
        if not split or len(split[-1]) >= limit or size > WAVE_BYTES_MAX:
            split.append([])
            size = len(event.payload)
        split[-1].append(event)
    return list(split)


def fits(events: Iterable[StagedEvent]) -> bool:
    """Tell whether events are few bytes enough to go out at once."""
    return payload_bytes(events) <= WAVE_BYTES_MAX


def _run_length(events: list[StagedEvent], room: int, room_bytes: int, alone: Alone | None) -> int:
    """Return how many of the first events may go together: one at least, however large."""
    if alone and alone(events[0]):
        return 1
    size = 0
    for index, event in enumerate(events[:room]):
        size += len(event.payload)
        if index and (size > room_bytes or (alone and alone(event))):
            return index
    return min(room, len(events))


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
