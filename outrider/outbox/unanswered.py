"""Events that were published and have no answer yet, beyond the end of their pass.

A destination without an answer must not delay the others, so the pass goes on: in the store the event is deferred and
the events behind it are parked. The relay keeps the answer that is still to come, publishes nothing of the stream
meanwhile, and settles the event in the first pass after the answer. If there is none within the publish timeout, the
result is unknown.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace

from outrider.brokers.base import PublishResult, Unanswered, Unknown
from outrider.clock import Clock
from outrider.event import Stream
from outrider.outbox.batch import StreamRun
from outrider.outbox.model import Lease, State


@dataclass(frozen=True, slots=True)
class UnansweredRun:
    """The events of a stream that wait for the answers of a destination, in the state that the store has by now.

    `group_size` is the number of messages that were published together in isolation, 0 without isolation.
    """

    run: StreamRun
    results: Sequence[PublishResult]
    destination: str
    epoch: int | None
    began: float
    deadline: float
    group_size: int = 0

    @property
    def answers(self) -> list[asyncio.Future[PublishResult]]:
        """Return the answers that were outstanding when the pass went on."""
        return [result.answer for result in self.results if isinstance(result, Unanswered)]

    def final_results(self, no_answer: str) -> list[PublishResult]:
        """Return the results, unknown where the answer is still missing."""
        return [self._final(result, no_answer) for result in self.results]

    def _final(self, result: PublishResult, no_answer: str) -> PublishResult:
        if not isinstance(result, Unanswered):
            return result
        if result.answer.done() and not result.answer.cancelled() and result.answer.exception() is None:
            return result.answer.result()
        return Unknown(no_answer, self.destination)


@dataclass(slots=True)
class UnansweredEvents:
    """The runs without an answer, one per stream. `on_answer` is called with the lane of each answer."""

    clock: Clock
    on_answer: Callable[[int], None]
    _runs: dict[Stream, UnansweredRun] = field(default_factory=dict)

    def add(self, found: UnansweredRun) -> None:
        """Keep a run until its answers are taken."""
        stream, events = found.run
        head, *behind = events
        waiting = [head._replace(state=State.DEFERRED), *(event._replace(state=State.PARKED) for event in behind)]
        self._runs[stream] = replace(found, run=StreamRun(stream, waiting))
        for answer in found.answers:
            answer.add_done_callback(lambda _: self.on_answer(stream.lane))

    def streams(self, lease: Lease) -> set[Stream]:
        """Return the streams of a lease from which nothing may be published now."""
        return {stream for stream in self._runs if stream.lane in lease.epochs}

    def take(self, lease: Lease) -> list[UnansweredRun]:
        """Return the runs of a lease that have their answers, or have waited for too long; forget them."""
        now = self.clock.boot_seconds()
        mine = [found for stream, found in self._runs.items() if stream.lane in lease.epochs]
        taken = [found for found in mine if found.deadline <= now or all(answer.done() for answer in found.answers)]
        for found in taken:
            del self._runs[found.run.stream]
        return taken

    def next_seconds(self, lease: Lease) -> float | None:
        """Return the seconds until a run of the lease has waited for too long, None if there is no such run."""
        if not self._runs:
            return None
        deadlines = [found.deadline for stream, found in self._runs.items() if stream.lane in lease.epochs]
        return max(0.0, min(deadlines) - self.clock.boot_seconds()) if deadlines else None

    async def wait(self, lease: Lease) -> None:
        """Wait for the answers of a lease, up to the deadline of the last run."""
        mine = [found for stream, found in self._runs.items() if stream.lane in lease.epochs]
        if answers := [answer for found in mine for answer in found.answers]:
            seconds = max(found.deadline for found in mine) - self.clock.boot_seconds()
            await asyncio.wait(answers, timeout=max(0.0, seconds))

    def lanes(self) -> set[int]:
        """Return the lanes with events in progress."""
        return {stream.lane for stream in self._runs}

    def drop(self, lanes: Iterable[int]) -> list[UnansweredRun]:
        """Forget the runs of lanes that the relay has lost or released, and return them."""
        gone = set(lanes)
        dropped = [found for stream, found in self._runs.items() if stream.lane in gone]
        for found in dropped:
            del self._runs[found.run.stream]
        return dropped
