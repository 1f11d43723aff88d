"""Publishing one course: wave after wave, each verdict turned into an outcome.

Nothing here touches the store, so no transaction can be open while the broker is waited for.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

from outrider.broker import Broker
from outrider.clock import Clock
from outrider.codec.seal import seal
from outrider.event import Message, StagedEvent
from outrider.observer import BreakerClosed, BreakerOpened, Buried, Observer, Retried
from outrider.outbox.breaker import Breakers
from outrider.outbox.streams import Course, Run
from outrider.outbox.verdicts import Failing, Judge
from outrider.outcome import Bury, Confirmed, Defer, Unresolved, Verdict


class Turnstile:
    """Lets waves through side by side, and a suspect only by itself: a fault must have one possible cause."""

    def __init__(self) -> None:
        self._entry = asyncio.Lock()
        self._inside = 0
        self._empty = asyncio.Event()
        self._empty.set()

    @asynccontextmanager
    async def passing(self, *, alone: bool) -> AsyncIterator[None]:
        """Wait for a turn, and hold it for the block. A suspect keeps the entry while it waits, so none starves."""
        async with self._entry:
            if alone:
                await self._empty.wait()
                yield
                return
            self._inside += 1
            self._empty.clear()
        try:
            yield
        finally:
            self._inside -= 1
            if not self._inside:
                self._empty.set()


async def publish(broker: Broker, messages: list[Message], seconds: float) -> Sequence[Verdict]:
    """Publish with a time limit. Whatever the adapter does, each message has a verdict in the end."""
    try:
        async with asyncio.timeout(seconds):
            return await broker.publish(messages)
    except TimeoutError:
        return [Unresolved(f"no verdict from the broker within {seconds:g} s")] * len(messages)
    except Exception as error:
        # An adapter that raises has told us nothing about any message; the error is reported with the verdict.
        return [Unresolved(f"{type(error).__name__}: {error}")] * len(messages)


@dataclass(slots=True)
class Sealed:
    """A run with its messages, and where they go."""

    run: Run
    messages: list[Message]
    destination: str


@dataclass(slots=True)
class Publisher:
    """Sends courses to a broker. Shared by a relay's workers, because a destination is down for all of them."""

    broker: Broker
    breakers: Breakers
    judge: Judge
    clock: Clock
    observer: Observer
    turnstile: Turnstile = field(default_factory=Turnstile)

    async def run(self, course: Course, may_publish: Callable[[], bool]) -> None:
        """Publish until the course is empty, the lease runs short, or the connection is down."""
        limit, ordered = self.judge.settings.in_flight_max, self.broker.traits.ordered
        while course.ready and may_publish() and not self.breakers.open(""):
            wave = course.next_wave(limit, ordered=ordered, alone=self._alone)
            together, suspects = self._sort(course, wave)
            if together:
                await self._send(course, together, alone=False)
            for sealed in suspects:
                if not may_publish() or self.breakers.open(sealed.destination):
                    course.leave(sealed.run.stream)
                    continue
                await self._send(course, [sealed], alone=True)

    def _alone(self, event: StagedEvent) -> bool:
        return event.suspect or self.breakers.suspected(event.position)

    def _sort(self, course: Course, wave: list[Run]) -> tuple[list[Sealed], list[Sealed]]:
        """Split a wave into what goes together and what goes alone; the rest stops here."""
        together: list[Sealed] = []
        suspects: list[Sealed] = []
        for run in wave:
            messages = [seal(event, run.stream) for event in run.events]
            sealed = Sealed(run, messages, self.broker.destination(messages[0]))
            if self.breakers.open(sealed.destination):
                self._defer(course, sealed)
            elif error := self.breakers.guilty(sealed.destination, run.events[0].position):
                self._charge(course, run, 0, Unresolved(error, sealed.destination))
            else:
                (suspects if self._alone(run.events[0]) else together).append(sealed)
        suspects.sort(key=lambda sealed: self.breakers.strikes(sealed.destination, sealed.run.events[0].position))
        return together, suspects

    async def _send(self, course: Course, batch: list[Sealed], *, alone: bool) -> None:
        messages = [message for sealed in batch for message in sealed.messages]
        async with self.turnstile.passing(alone=alone):
            verdicts = iter(await publish(self.broker, messages, self.judge.settings.publish_timeout_seconds))
        faults: dict[str, list[tuple[StagedEvent, Unresolved]]] = {}
        for sealed in batch:
            self._note(course, sealed, [next(verdicts) for _ in sealed.messages], faults)
        for destination, found in faults.items():
            self._fault(destination, [event for event, _ in found], found[0][1].error, alone=alone)

    def _note(
        self,
        course: Course,
        sealed: Sealed,
        verdicts: list[Verdict],
        faults: dict[str, list[tuple[StagedEvent, Unresolved]]],
    ) -> None:
        """Take the verdicts on one run: confirmed up to the first that is not, and that one decides for the rest."""
        stream, events = sealed.run
        for index, (event, verdict) in enumerate(zip(events, verdicts, strict=True)):
            if isinstance(verdict, Confirmed):
                course.confirm(event, stream)
                self.breakers.confirmed(sealed.destination, event.position)
                continue
            if isinstance(verdict, Unresolved):
                course.leave(stream)
                faults.setdefault(verdict.destination, []).extend((later, verdict) for later in events[index:])
            else:
                self._charge(course, sealed.run, index, verdict)
            return

    def _charge(self, course: Course, run: Run, index: int, verdict: Failing) -> None:
        event, stream = run.events[index], run.stream
        outcome = self.judge.outcome(event, stream, verdict, self.clock.now())
        course.stop(event, stream, outcome)
        course.park((later, stream) for later in run.events[index + 1 :])
        self.breakers.forget(event.position)
        if isinstance(outcome, Bury):
            self.observer.notice(
                Buried(event.event_id, stream.topic, event.event_type, outcome.reason, outcome.policy, verdict.error)
            )
        else:
            delay = outcome.delay_seconds
            self.observer.notice(Retried(event.event_id, stream.topic, event.attempts + 1, delay, verdict.error))

    def _defer(self, course: Course, sealed: Sealed) -> None:
        """A destination is down, others are not: its streams leave the lane's start, so that they hide nobody else."""
        stream, events = sealed.run
        if self.breakers.open(""):
            course.leave(stream)
            return
        retry_at = self.breakers.get(sealed.destination).retry_at or 0.0
        delay = max(self.judge.settings.breaker_seconds_base, retry_at - self.clock.boot_seconds())
        course.stop(events[0], stream, Defer(delay))
        course.park((later, stream) for later in events[1:])

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
