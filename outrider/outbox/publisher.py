"""Publishing one course, wave after wave.

Nothing here touches the store, so no transaction can be open while the broker is waited for.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field

from outrider.broker import Broker
from outrider.clock import Clock
from outrider.codec.seal import seal
from outrider.event import BAND_NAMES, Message, StagedEvent, Stream, default_topic
from outrider.observer import Observer
from outrider.outbox.breaker import Breakers
from outrider.outbox.course import Course
from outrider.outbox.hearing import Hearing
from outrider.outbox.sealing import Sealed, events_of, joined, seal_all
from outrider.outbox.streams import Run, TopicRule
from outrider.outbox.turnstile import Turnstile, publish
from outrider.outbox.verdicts import Judge
from outrider.outbox.waves import portions, waves
from outrider.outcome import CONFIRMED, Rejected, Unresolved, Verdict


@dataclass(slots=True)
class Publisher:
    """Sends courses to a broker. Shared by a relay's workers, because a destination is down for all of them."""

    broker: Broker
    breakers: Breakers
    judge: Judge
    clock: Clock
    observer: Observer
    lanes: int
    rule: TopicRule = default_topic
    turnstile: Turnstile = field(default_factory=Turnstile)
    hearing: Hearing = field(init=False)

    def __post_init__(self) -> None:
        self.hearing = Hearing(self.broker, self.breakers, self.judge, self.clock, self.observer)

    async def run(self, course: Course, may_publish: Callable[[], bool]) -> None:
        """Publish until the course is empty, the lease runs short, or the connection is down.

        While nothing has gone wrong lately, no single event needs looking at.
        """
        limit, ordered = self.judge.settings.in_flight_max, self.broker.traits.ordered
        if course.fresh:
            await self._send_fresh(course, may_publish)
        while course.ready and may_publish() and not self.breakers.open(""):
            calm = self.breakers.calm and not course.careful
            if not calm:
                course.ready = dict(sorted(course.ready.items(), key=self._doubt))
            wave = course.next_wave(limit, ordered=ordered, alone=None if calm else self._alone)
            if calm and (messages := seal_all(events_of(wave), self.rule, self.lanes)):
                await self._send(course, wave, messages, may_publish, alone=False)
                continue
            ready = [sealed for run in wave if (sealed := self._seal(course, run))]
            together, suspects = (ready, []) if calm else self._sort(course, ready)
            if together:
                await self._send(course, *joined(together), may_publish, alone=False)
            for sealed in suspects:
                if may_publish() and not self.breakers.open(self.hearing.destination(sealed)):
                    await self._send(course, *joined([sealed]), may_publish, alone=True)
                else:
                    course.leave(sealed.run.stream)

    async def _send_fresh(self, course: Course, may_publish: Callable[[], bool]) -> None:
        """Send what is fresh while all is calm: at once if the broker keeps order by itself, else wave by wave.

        Events go out in the order they were fetched in, and that of each stream is part of it. What is left when
        something is not as it should be is sorted into streams.
        """
        for wave in self._fresh_waves(course.fresh):
            messages = seal_all(wave, self.rule, self.lanes) if self.breakers.calm else []
            if not messages:
                course.sort(self.rule)
                return
            verdicts = await self._publish(messages, may_publish, alone=False)
            if not verdicts:
                break
            if not self._all_confirmed(verdicts):
                self._hear_fresh(course, wave, messages, verdicts)
                return
            course.confirm_fresh(wave)
        course.fresh = ()

    def _fresh_waves(self, events: Sequence[StagedEvent]) -> Iterable[Sequence[StagedEvent]]:
        limit = self.judge.settings.in_flight_max
        if self.broker.traits.ordered:
            return portions(events, limit)
        return (portion for wave in waves(events, self.rule) for portion in portions(wave, limit))

    def _hear_fresh(
        self, course: Course, wave: Sequence[StagedEvent], messages: list[Message], verdicts: Sequence[Verdict]
    ) -> None:
        """Take the verdicts on a wave that was not sorted into streams."""
        heard = dict(zip(wave, zip(messages, verdicts, strict=True), strict=True))
        course.sort(self.rule)
        runs = course.take(wave, self.rule)
        sent, verdicts = zip(*(heard[event] for event in events_of(runs)), strict=True)
        self.hearing.hear(course, runs, sent, verdicts, alone=False)

    def _alone(self, event: StagedEvent) -> bool:
        return event.suspect or self.breakers.suspected(event.event_id)

    def _doubt(self, ready: tuple[Stream, list[StagedEvent]]) -> tuple[bool, int]:
        head = ready[1][0]
        return self._alone(head), self.breakers.falls(head.event_id)

    def _seal(self, course: Course, run: Run) -> Sealed | None:
        """Encode a run. An event that cannot be encoded is rejected when its turn comes; it must not stop its lane."""
        stream, events = run
        messages: list[Message] = []
        try:
            band = BAND_NAMES[stream.lane // self.lanes]
            messages += (seal(event, stream.topic, band) for event in events)
        except Exception as error:
            if not messages:
                self.hearing.charge(course, run, 0, Rejected(f"cannot be encoded: {type(error).__name__}: {error}"))
                return None
            course.put_back(stream, events[len(messages) :])
        return Sealed(Run(stream, events[: len(messages)]), messages)

    def _sort(self, course: Course, wave: list[Sealed]) -> tuple[list[Sealed], list[Sealed]]:
        """Split a wave into what goes together and what goes alone; the rest stops here."""
        together: list[Sealed] = []
        suspects: list[Sealed] = []
        for sealed in wave:
            if not self._stopped(course, sealed):
                (suspects if self._alone(sealed.run.events[0]) else together).append(sealed)
        return together, suspects

    def _stopped(self, course: Course, sealed: Sealed) -> bool:
        """Stop a run that cannot go now: its destination is down, or its head has earned its strikes."""
        destination = self.hearing.destination(sealed)
        if self.breakers.open(destination):
            self.hearing.defer(course, sealed.run, destination)
            return True
        if error := self.breakers.guilty(sealed.run.events[0].event_id):
            self.hearing.charge(course, sealed.run, 0, Unresolved(error, destination))
            return True
        return False

    async def _send(
        self, course: Course, runs: list[Run], messages: list[Message], may_publish: Callable[[], bool], *, alone: bool
    ) -> None:
        verdicts = await self._publish(messages, may_publish, alone=alone)
        if verdicts and self._all_confirmed(verdicts):
            course.confirm(runs)
        elif verdicts:
            self.hearing.hear(course, runs, messages, verdicts, alone=alone)

    async def _publish(
        self, messages: list[Message], may_publish: Callable[[], bool], *, alone: bool
    ) -> Sequence[Verdict]:
        """Publish when it is their turn; return nothing if by then it is too late to begin."""
        async with self.turnstile.passing(alone=alone):
            if not may_publish():  # Waiting for a turn may have taken what was left of the lease.
                return ()
            return await publish(self.broker, messages, self.judge.settings.publish_timeout_seconds)

    def _all_confirmed(self, verdicts: Sequence[Verdict]) -> bool:
        """Tell whether nothing needs looking at: all went well, and has before."""
        return self.breakers.calm and verdicts.count(CONFIRMED) == len(verdicts)
