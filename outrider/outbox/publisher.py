"""Publishing one course: wave after wave, each verdict turned into an outcome.

Nothing here touches the store, so no transaction can be open while the broker is waited for.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import islice
from typing import NamedTuple

from outrider.broker import Broker
from outrider.clock import Clock
from outrider.codec.seal import seal
from outrider.event import BAND_NAMES, Message, StagedEvent, Stream, default_topic
from outrider.observer import BreakerClosed, BreakerOpened, Buried, Observer, Retried
from outrider.outbox.breaker import Breakers
from outrider.outbox.streams import Course, Run, TopicRule, portions, topic_of, waves
from outrider.outbox.turnstile import Turnstile, publish
from outrider.outbox.verdicts import Failing, Judge
from outrider.outcome import CONFIRMED, Bury, Confirmed, Defer, Refused, Rejected, Unresolved, Verdict


class Sealed(NamedTuple):
    """A run with its messages."""

    run: Run
    messages: list[Message]


def _seal_all(events: Iterable[StagedEvent], rule: TopicRule, lanes: int) -> list[Message]:
    """Encode events at once; return nothing if one of them cannot be encoded, for then each run is looked at."""
    try:
        return [seal(event, topic_of(event, rule), BAND_NAMES[event.lane // lanes]) for event in events]
    except Exception:
        # Which event it is, and what is said about it, is for `_seal`, which meets it again.
        return []


def _events(runs: Iterable[Run]) -> Iterator[StagedEvent]:
    return (event for run in runs for event in run.events)


def _joined(batch: list[Sealed]) -> tuple[list[Run], list[Message]]:
    return [sealed.run for sealed in batch], [message for sealed in batch for message in sealed.messages]


Faults = dict[str, tuple[str, list[StagedEvent]]]
"""Per destination that is down: the error, and the events that were on their way to it."""


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
            if calm and (messages := _seal_all(_events(wave), self.rule, self.lanes)):
                await self._send(course, wave, messages, may_publish, alone=False)
                continue
            ready = [sealed for run in wave if (sealed := self._seal(course, run))]
            together, suspects = (ready, []) if calm else self._sort(course, ready)
            if together:
                await self._send(course, *_joined(together), may_publish, alone=False)
            for sealed in suspects:
                if may_publish() and not self.breakers.open(self._destination(sealed)):
                    await self._send(course, *_joined([sealed]), may_publish, alone=True)
                else:
                    course.leave(sealed.run.stream)

    async def _send_fresh(self, course: Course, may_publish: Callable[[], bool]) -> None:
        """Send what is fresh while all is calm: at once if the broker keeps order by itself, else wave by wave.

        Events go out in the order they were fetched in, and that of each stream is part of it. What is left when
        something is not as it should be is sorted into streams.
        """
        for wave in self._fresh_waves(course.fresh):
            messages = _seal_all(wave, self.rule, self.lanes) if self.breakers.calm else []
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
        sent, verdicts = zip(*(heard[event] for event in _events(runs)), strict=True)
        self._hear(course, runs, sent, verdicts, alone=False)

    def _alone(self, event: StagedEvent) -> bool:
        return event.suspect or self.breakers.suspected(event.event_id)

    def _doubt(self, ready: tuple[Stream, list[StagedEvent]]) -> tuple[bool, int]:
        head = ready[1][0]
        return self._alone(head), self.breakers.falls(head.event_id)

    def _destination(self, sealed: Sealed) -> str:
        return self.broker.destination(sealed.messages[0])

    def _seal(self, course: Course, run: Run) -> Sealed | None:
        """Encode a run. An event that cannot be encoded is rejected when its turn comes; it must not stop its lane."""
        stream, events = run
        messages: list[Message] = []
        try:
            band = BAND_NAMES[stream.lane // self.lanes]
            messages += (seal(event, stream.topic, band) for event in events)
        except Exception as error:
            if not messages:
                self._charge(course, run, 0, Rejected(f"cannot be encoded: {type(error).__name__}: {error}"))
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
        destination = self._destination(sealed)
        if self.breakers.open(destination):
            self._defer(course, sealed.run, destination)
            return True
        if error := self.breakers.guilty(sealed.run.events[0].event_id):
            self._charge(course, sealed.run, 0, Unresolved(error, destination))
            return True
        return False

    async def _send(
        self, course: Course, runs: list[Run], messages: list[Message], may_publish: Callable[[], bool], *, alone: bool
    ) -> None:
        verdicts = await self._publish(messages, may_publish, alone=alone)
        if verdicts and self._all_confirmed(verdicts):
            course.confirm(runs)
        elif verdicts:
            self._hear(course, runs, messages, verdicts, alone=alone)

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

    def _hear(
        self, course: Course, runs: list[Run], messages: Sequence[Message], verdicts: Sequence[Verdict], *, alone: bool
    ) -> None:
        """Take the verdicts run by run."""
        faults: Faults = {}
        sent, heard = iter(messages), iter(verdicts)
        for run in runs:
            sealed = Sealed(run, list(islice(sent, len(run.events))))
            self._note(course, sealed, list(islice(heard, len(run.events))), faults)
        for destination, (error, events) in faults.items():
            self._fault(destination, events, error, alone=alone)

    def _note(self, course: Course, sealed: Sealed, verdicts: list[Verdict], faults: Faults) -> None:
        """Take the verdicts on one run: confirmed up to the first that is not, and that one decides for the rest."""
        stream, events = sealed.run
        failing = (index for index, verdict in enumerate(verdicts) if not isinstance(verdict, Confirmed))
        index = next(failing, len(events))
        course.confirm([Run(stream, events[:index])])
        for event in events[:index]:
            self.breakers.confirmed(self._destination(sealed), event.event_id)
        if index == len(events):
            return
        verdict = verdicts[index]
        if isinstance(verdict, Unresolved):
            course.leave(stream)
            faults.setdefault(verdict.destination, (verdict.error, []))[1].extend(events[index:])
        elif isinstance(verdict, Refused | Rejected):
            self._charge(course, sealed.run, index, verdict)
        else:
            error = f"{verdict!r} is not a verdict"
            course.leave(stream)
            faults.setdefault("", (error, []))[1].extend(events[index:])

    def _charge(self, course: Course, run: Run, index: int, verdict: Failing) -> None:
        event, stream = run.events[index], run.stream
        outcome = self.judge.outcome(event, stream, verdict, self.clock.now())
        course.stop(event, stream, outcome)
        course.park(stream, run.events[index + 1 :])
        self.breakers.forget(event.event_id)
        if isinstance(outcome, Bury):
            self.observer.notice(
                Buried(event.event_id, stream.topic, event.event_type, outcome.reason, outcome.policy, verdict.error)
            )
        else:
            delay = outcome.delay_seconds
            self.observer.notice(Retried(event.event_id, stream.topic, event.attempts + 1, delay, verdict.error))

    def _defer(self, course: Course, run: Run, destination: str) -> None:
        """A destination is down, others are not: its streams leave the lane's start, so that they hide nobody else."""
        stream, events = run
        if self.breakers.open(""):
            course.leave(stream)
            return
        retry_at = self.breakers.get(destination).retry_at or 0.0
        delay = max(self.judge.settings.breaker_seconds_base, retry_at - self.clock.boot_seconds())
        course.stop(events[0], stream, Defer(delay))
        course.park(stream, events[1:])

    def _fault(self, destination: str, events: list[StagedEvent], error: str, *, alone: bool) -> None:
        now = self.clock.boot_seconds()
        breaker = self.breakers.get(destination)
        breaker.fault(events, error, now, alone=alone)
        self.observer.notice(BreakerOpened(destination, error, (breaker.retry_at or now) - now))

    async def probe(self) -> float | None:
        """Probe the destinations whose time has come; return the seconds until the next one, None if all are up."""
        for name, breaker in self.breakers.waiting():
            if breaker.retry_at is not None and breaker.retry_at <= self.clock.boot_seconds():
                await self._probe(name)
        now = self.clock.boot_seconds()
        return min((max(0.0, (b.retry_at or now) - now) for _, b in self.breakers.waiting()), default=None)

    async def _probe(self, destination: str) -> None:
        breaker = self.breakers.get(destination)
        try:
            async with asyncio.timeout(self.judge.settings.publish_timeout_seconds):
                await self.broker.probe(destination)
        except Exception as error:
            # Whatever a probe raises means that the destination is not known to work; the breaker reports it.
            now = self.clock.boot_seconds()
            breaker.probe_failed(f"{type(error).__name__}: {error}", now)
            self.observer.notice(BreakerOpened(destination, breaker.error, (breaker.retry_at or now) - now))
        else:
            breaker.probe_passed()
            self.observer.notice(BreakerClosed(destination))
