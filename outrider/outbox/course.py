"""A course: one pass over a relay's lanes. Pure.

It holds each stream's events in order and hands them out in waves. The first event of a stream that is not confirmed
ends that stream's part: what follows it is parked, or left as it was if nothing is known. No later event can get ahead
of it, whichever way the verdicts arrive.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from itertools import chain

from outrider.event import StagedEvent, Stream
from outrider.lifecycle import State
from outrider.outbox.streams import Run, TopicRule, stream_of
from outrider.outbox.waves import WAVE_BYTES_MAX, Alone, fits, payload_bytes, run_length
from outrider.outcome import CONFIRMED, PARK, Outcome
from outrider.store import Settlement


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
            count = run_length(events, room, room_bytes, alone) if ordered else 1
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
