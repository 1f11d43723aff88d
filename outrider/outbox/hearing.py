"""Hearing what became of messages: each verdict is turned into an outcome, and each destination gets its due."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import islice

from outrider.broker import Broker
from outrider.clock import Clock
from outrider.event import Message, StagedEvent
from outrider.observer import BreakerOpened, Buried, Observer, Retried
from outrider.outbox.breaker import Breakers
from outrider.outbox.course import Course
from outrider.outbox.sealing import Sealed
from outrider.outbox.streams import Run
from outrider.outbox.verdicts import Failing, Judge
from outrider.outcome import Bury, Confirmed, Defer, Refused, Rejected, Unresolved, Verdict

Faults = dict[str, tuple[str, list[StagedEvent]]]
"""Per destination that is down: the error, and the events that were on their way to it."""


@dataclass(slots=True)
class Hearing:
    """Writes into courses what came of them, and into breakers what is down."""

    broker: Broker
    breakers: Breakers
    judge: Judge
    clock: Clock
    observer: Observer

    def destination(self, sealed: Sealed) -> str:
        """Return where the broker would send a run."""
        return self.broker.destination(sealed.messages[0])

    def hear(
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
            self.breakers.confirmed(self.destination(sealed), event.event_id)
        if index == len(events):
            return
        verdict = verdicts[index]
        if isinstance(verdict, Unresolved):
            course.leave(stream)
            faults.setdefault(verdict.destination, (verdict.error, []))[1].extend(events[index:])
        elif isinstance(verdict, Refused | Rejected):
            self.charge(course, sealed.run, index, verdict)
        else:
            error = f"{verdict!r} is not a verdict"
            course.leave(stream)
            faults.setdefault("", (error, []))[1].extend(events[index:])

    def charge(self, course: Course, run: Run, index: int, verdict: Failing) -> None:
        """Charge an event for a verdict, and let those of the run that follow it wait."""
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

    def defer(self, course: Course, run: Run, destination: str) -> None:
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
