"""The batch of one pass: plans waves of events, and records an outcome for every event. Pure.

```python
batch = Batch.plan(fetched, due, blocked)
while wave := batch.next_wave(limit, ordered=ordered, breakers=breakers):
    batch.record(wave, await publish(wave), decide)
await store.settle(lease, batch.settlements)
```

Order is kept per stream. A wave has at most one event of a stream, or a run of first events if the broker keeps order.
The first unconfirmed event stops its stream: the events behind it are parked, or left alone if the result is unknown.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Iterable, Sequence
from itertools import chain
from operator import attrgetter
from typing import NamedTuple

from outrider.brokers.base import CONFIRMED, Confirmed, Nacked, PublishResult, Rejected, Unanswered, Unknown
from outrider.event import OutboxRow, Readiness, Stream
from outrider.outbox.circuit_breaker import CircuitBreakers
from outrider.outbox.model import PARK, WAITING, Defer, DueStream, Outcome, Settlement, Settlements, State

_READY = Readiness.READY

WAVE_BYTES_MAX = 4_000_000
"""The payload bytes of a wave: a slow network must confirm a wave within the publish timeout."""

HOT_EVENTS_MIN = 8
"""A stream with fewer events left in a pass is not worth a write."""

_PAYLOAD = attrgetter("payload")

FailedResult = Nacked | Rejected | Unknown

Decide = Callable[[OutboxRow, Nacked | Rejected | Unanswered], Outcome]
"""Chooses the outcome of an event that the broker did not confirm, or not yet."""


class StreamRun(NamedTuple):
    """Events of a stream, in order, that are published together."""

    stream: Stream
    events: Sequence[OutboxRow]


class Wave(NamedTuple):
    """Events to publish at the same time.

    A wave without `runs` holds fetched events that were not grouped by stream. In a `has_suspects` wave, suspects may
    be among the events, and the publisher inspects every run.
    """

    events: Sequence[OutboxRow]
    runs: Sequence[StreamRun] | None = None
    has_suspects: bool = False


class RunResult(NamedTuple):
    """The result of a run: the confirmed events, then the event that stopped the run and the events behind it.

    An `Unknown` failure has no outcome: the store keeps the event unchanged. `results` are those of the unconfirmed
    events, if the first has no answer yet.
    """

    stream: Stream
    confirmed: Sequence[OutboxRow]
    unconfirmed: Sequence[OutboxRow] = ()
    failure: FailedResult | Unanswered | None = None
    outcome: Outcome | None = None
    results: Sequence[PublishResult] = ()


class Batch:
    """The events of one pass by stream, and their outcomes so far.

    `_ungrouped` holds the events in fetch order, as long as every event may be published. The batch groups the events
    by stream at the first failure, which means never if all events are confirmed.
    """

    def __init__(self) -> None:
        self.confirmed = 0
        self._ungrouped: Sequence[OutboxRow] = ()
        self._ungrouped_waves: list[Sequence[OutboxRow]] | None = None
        self._ready: dict[Stream, list[OutboxRow]] = {}
        self._sent: list[OutboxRow] = []
        self._others: list[Settlement] = []
        self._emptied: list[Stream] = []
        self._has_suspects = False

    @classmethod
    def plan(
        cls,
        fetched: Sequence[OutboxRow],
        due: Collection[DueStream] = (),
        blocked: Collection[Stream] = (),
        unanswered: Collection[Stream] = (),
    ) -> Batch:
        """Sort events into streams that may be published, events to park or defer, and streams to leave alone.

        Streams with an `unanswered` message are left alone, even if the store could not record that they wait.
        """
        batch = cls()
        if not blocked and not due and not unanswered and all(event.readiness == _READY for event in fetched):
            batch._ungrouped = fetched
            return batch
        ready, stopped, left = batch._ready, set(blocked), set(unanswered).difference(blocked)
        for event in fetched:
            stream = event.stream
            if stream in left:
                continue
            if event.readiness == Readiness.OPTIMISTIC:
                # The writer is about to publish the event. The events behind wait for the next pass.
                left.add(stream)
            elif stream in stopped:
                batch._others.append(Settlement(event, stream, PARK))
            elif event.readiness == _READY:
                ready.setdefault(stream, []).append(event)
            elif stream in ready:
                # The event is early. Blocking the stream now would delay the events before it.
                left.add(stream)
            else:
                stopped.add(stream)
                batch._others.append(Settlement(event, stream, Defer()))
        for found in _leave_out_preceded(due, fetched):
            if found.stream not in unanswered:
                batch._plan_due(found)
        return batch

    @property
    def settlements(self) -> Settlements:
        """Return the outcomes so far."""
        return Settlements(self._sent, self._others, self._emptied)

    def next_wave(self, limit: int, *, ordered: bool, breakers: CircuitBreakers | None = None) -> Wave | None:
        """Take the next events to publish: one per stream, or whole runs if the broker is `ordered`.

        The limit is in events; WAVE_BYTES_MAX applies as well. Events that must be isolated are separate runs.
        """
        healthy = breakers is None or (breakers.is_healthy and not self._has_suspects)
        if self._ungrouped:
            if healthy:
                return self._next_ungrouped(limit, ordered=ordered)
            self._group()
        if not self._ready:
            return None
        if breakers is not None and not healthy:
            self._ready = dict(sorted(self._ready.items(), key=lambda item: _suspicion_order(item[1][0], breakers)))
            return _wave(self._take(limit, ordered=ordered, breakers=breakers), has_suspects=True)
        if ordered and self._fits(limit):
            runs = [StreamRun(stream, events) for stream, events in self._ready.items()]
            self._ready = {}
            return _wave(runs)
        return _wave(self._take(limit, ordered=ordered))

    def confirm(self, wave: Wave) -> None:
        """Record that the broker has confirmed every event of a wave."""
        if wave.runs is None:
            self._sent += wave.events
            self.confirmed += len(wave.events)
            return
        for stream, events in wave.runs:
            self._confirm(stream, events)

    def record(self, wave: Wave, results: Sequence[PublishResult], decide: Decide) -> list[RunResult]:
        """Record the results of a wave, one per event in the same order; return the results by stream."""
        by_id = dict(zip((event.event_id for event in wave.events), results, strict=True))
        failed: set[tuple[str, str]] = set()
        recorded = []
        for run in self.runs_of(wave):
            # A broker knows topic and key only. It nacks the events of another band after a failure, too.
            name = run.stream.topic, run.stream.key
            run_results = [by_id[event.event_id] for event in run.events]
            recorded.append(self._record_run(run, run_results, decide, is_behind=name in failed))
            if recorded[-1].failure is not None:
                failed.add(name)
        return recorded

    def record_late(self, run: StreamRun, results: Sequence[PublishResult], decide: Decide) -> RunResult:
        """Record results that have arrived after the pass of their events."""
        return self._record_run(run, results, decide, is_behind=False)

    def runs_of(self, wave: Wave) -> Sequence[StreamRun]:
        """Return the events of a wave by stream; the rest of the batch is then grouped by stream as well."""
        if wave.runs is not None:
            return wave.runs
        self._group()
        taken: dict[Stream, list[OutboxRow]] = {}
        for event in wave.events:
            taken.setdefault(event.stream, []).append(event)
        for stream, run in taken.items():
            # Waves go out in order, so these are the first events of the stream that are left.
            if left := self._ready.pop(stream)[len(run) :]:
                self._ready[stream] = left
        return [StreamRun(stream, run) for stream, run in taken.items()]

    def stop(self, run: StreamRun, outcome: Outcome, index: int = 0) -> None:
        """Settle an unpublished event of a run, and park all events behind it."""
        stream, events = run
        self._others.append(Settlement(events[index], stream, outcome))
        for event in chain(events[index + 1 :], self._ready.pop(stream, ())):
            # A parked event needs no second write to stay parked.
            if event.state != State.PARKED:
                self._others.append(Settlement(event, stream, PARK))

    def defer_hot(self, lanes: Collection[int]) -> None:
        """Take a stream that holds most of a lane's fetched events out of the way of the other streams of the lane.

        The rest of the stream waits as a blocked stream that is due at once, so the next fetch finds the events behind.
        """
        self._group()
        counts: Counter[int] = Counter()
        for stream, events in self._ready.items():
            counts[stream.lane] += len(events)
        for stream, events in list(self._ready.items()):
            hot = stream.lane in lanes and 2 * len(events) > counts[stream.lane] and len(events) >= HOT_EVENTS_MIN
            if hot and events[0].state not in WAITING:
                self.stop(StreamRun(stream, self._ready.pop(stream)), Defer(0.0))

    def put_back(self, stream: Stream, events: Sequence[OutboxRow]) -> None:
        """Return events that were taken too early to the start of their stream."""
        self._ready[stream] = [*events, *self._ready.get(stream, ())]

    def leave(self, stream: Stream) -> None:
        """Leave the rest of a stream alone until the next pass, because the result of the head is unknown."""
        self._ready.pop(stream, None)

    def _plan_due(self, due: DueStream) -> None:
        stream, _, events = due
        if not events:
            self._emptied.append(stream)
            return
        early = (index for index, event in enumerate(events) if event.readiness == Readiness.EARLY)
        # A parked event can have a later `available_at`; the stream then waits.
        first_early = next(early, len(events))
        if first_early:
            self._ready[stream] = events[:first_early]
            self._has_suspects |= any(event.suspect for event in events)
        else:
            self._others.append(Settlement(events[0], stream, Defer()))

    def _next_ungrouped(self, limit: int, *, ordered: bool) -> Wave | None:
        if self._ungrouped_waves is None:
            waves = [self._ungrouped] if ordered else split_by_stream(self._ungrouped)
            # Taken from the end, because a list gives its last element away without moving the others.
            self._ungrouped_waves = [part for wave in waves for part in split_by_size(wave, limit)][::-1]
        return Wave(self._ungrouped_waves.pop()) if self._ungrouped_waves else None

    def _group(self) -> None:
        sent = {event.event_id for event in self._sent}
        for event in self._ungrouped:
            if event.event_id not in sent:
                self._ready.setdefault(event.stream, []).append(event)
        self._ungrouped, self._ungrouped_waves = (), None

    def _take(self, limit: int, *, ordered: bool, breakers: CircuitBreakers | None = None) -> list[StreamRun]:
        runs: list[StreamRun] = []
        left: dict[Stream, list[OutboxRow]] = {}
        room, room_bytes = limit, WAVE_BYTES_MAX
        for stream, events in self._ready.items():
            if room <= 0 or room_bytes <= 0:
                left[stream] = events
                continue
            count = _run_length(events, room, room_bytes, breakers) if ordered else 1
            if count < len(events):
                left[stream] = events[count:]
            taken = events[:count]
            runs.append(StreamRun(stream, taken))
            room -= count
            room_bytes -= len(taken[0].payload) if count == 1 else payload_bytes(taken)
        self._ready = left
        return runs

    def _fits(self, limit: int) -> bool:
        streams = self._ready.values()
        return sum(map(len, streams)) <= limit and payload_bytes(chain.from_iterable(streams)) <= WAVE_BYTES_MAX

    def _confirm(self, stream: Stream, events: Sequence[OutboxRow]) -> None:
        self.confirmed += len(events)
        for event in events:
            if event.state in WAITING:
                self._others.append(Settlement(event, stream, CONFIRMED))
            else:
                self._sent.append(event)

    def _record_run(
        self, run: StreamRun, results: Sequence[PublishResult], decide: Decide, *, is_behind: bool
    ) -> RunResult:
        """Confirm events up to the first failure, which decides about the rest of the stream.

        A nack `is_behind` a failure of the same topic and key in another band: the next pass publishes the event again.
        """
        stream, events = run
        failed = (index for index, result in enumerate(results) if not isinstance(result, Confirmed))
        index = next(failed, len(events))
        confirmed, unconfirmed = events[:index], events[index:]
        self._confirm(stream, confirmed)
        if not unconfirmed:
            return RunResult(stream, confirmed)
        result = results[index]
        if is_behind and isinstance(result, Nacked):
            self.leave(stream)
            return RunResult(stream, confirmed)
        if isinstance(result, Nacked | Rejected | Unanswered):
            outcome = decide(events[index], result)
            self.stop(run, outcome, index)
            rest = results[index:] if isinstance(result, Unanswered) else ()
            return RunResult(stream, confirmed, unconfirmed, result, outcome, rest)
        self.leave(stream)
        unknown = result if isinstance(result, Unknown) else Unknown(f"{result!r} is not a publish result")
        return RunResult(stream, confirmed, unconfirmed, unknown)


def must_isolate(event: OutboxRow, breakers: CircuitBreakers) -> bool:
    """Return whether an event must be published in isolation, because it may break the connection."""
    return event.suspect or breakers.is_suspect(event.event_id)


def group_size(event: OutboxRow, breakers: CircuitBreakers) -> int:
    """Return how many suspects may be published together with a suspect; an event that was charged is alone."""
    return 1 if event.suspect else breakers.group_size(event.event_id)


def payload_bytes(events: Iterable[OutboxRow]) -> int:
    """Return the total size of the payloads."""
    return sum(map(len, map(_PAYLOAD, events)))


def split_by_stream(events: Iterable[OutboxRow]) -> list[list[OutboxRow]]:
    """Split events into the first of every stream, the second of every stream, and so on."""
    split: list[list[OutboxRow]] = []
    before: dict[tuple[int, str, str], int] = {}
    for event in events:
        # A plain tuple, because this runs for every event, and a named one takes four times as long.
        stream = (event.lane, event.topic, event.key)
        number = before.get(stream, 0)
        before[stream] = number + 1
        if number == len(split):
            split.append([])
        split[number].append(event)
    return split


def split_by_size(events: Sequence[OutboxRow], limit: int) -> list[Sequence[OutboxRow]]:
    """Split events, in order, into portions of at most `limit` events and WAVE_BYTES_MAX."""
    if len(events) <= limit and payload_bytes(events) <= WAVE_BYTES_MAX:
        return [events]
    split: list[list[OutboxRow]] = []
    size = 0
    for event in events:
        size += len(event.payload)
        if not split or len(split[-1]) >= limit or size > WAVE_BYTES_MAX:
            split.append([])
            size = len(event.payload)
        split[-1].append(event)
    return list(split)


def _wave(runs: Sequence[StreamRun], *, has_suspects: bool = False) -> Wave:
    return Wave([event for run in runs for event in run.events], runs, has_suspects)


def _suspicion_order(head: OutboxRow, breakers: CircuitBreakers) -> tuple[bool, int]:
    return must_isolate(head, breakers), breakers.isolated_failures(head.event_id)


def _leave_out_preceded(due: Iterable[DueStream], fetched: Sequence[OutboxRow]) -> Iterable[DueStream]:
    """Leave out streams with a fetched event before the held events: that event is parked, or a writer publishes it."""
    streams = {found.stream: found for found in due}
    for event in fetched if streams else ():
        found = streams.get(event.stream)
        if found and found.events and event.position < found.events[0].position:
            del streams[found.stream]
    return streams.values()


def _run_length(events: Sequence[OutboxRow], room: int, room_bytes: int, breakers: CircuitBreakers | None) -> int:
    """Return the number of first events that may be published together: at least one, of any size."""
    isolated = breakers is not None and must_isolate(events[0], breakers)
    if breakers and isolated:
        room = min(room, group_size(events[0], breakers))
    size = 0
    for index, event in enumerate(events[:room]):
        size += len(event.payload)
        if index and (size > room_bytes or (breakers and must_isolate(event, breakers) != isolated)):
            return index
        if index and breakers and isolated and group_size(event, breakers) == 1:
            return index
    return min(room, len(events))
