"""The handler executor: runs batches of received events through their handlers, and drains held events.

A handler that raises counts an attempt of its event. An unavailable store counts no attempt. A transaction that loses a
write conflict is retried after a short back-off, and is not logged.
"""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Awaitable, Callable, Iterable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any
from uuid import UUID

from outrider.errors import InvalidHandler, OutriderError, WriteConflict
from outrider.event import DeadLetterReason, InboxStream, ReceivedEvent
from outrider.inbox.model import Applied, Held, Ignored, InboxDeadLettered, LeftWithBroker
from outrider.inbox.router import Routes
from outrider.inbox.store import InboxStore
from outrider.inbox.transaction import ERASED, NO_HANDLER, BatchOutcome, HandlerFailed, InboxTransaction
from outrider.redaction import without_values
from outrider.retry import RetryPolicy
from outrider.telemetry.events import (
    ConsumerBroken,
    ConsumerDeadLettered,
    ConsumerRecovered,
    ConsumerUnavailable,
    ErasedEventSkipped,
    Handled,
    HandlerRetried,
    HeldEventsFull,
    NoHandler,
    Observer,
)
from outrider.telemetry.health import StoreHealth
from outrider.tracebacks import summary_of, traceback_text, user_frame

BACKOFF = RetryPolicy(base_seconds=0.2, cap_seconds=10)

CONFLICTS = RetryPolicy(base_seconds=0.01, cap_seconds=0.2, jitter=0.5, max_attempts=20)
"""The retries of handlers that lose a write conflict on the same document, before the conflict counts as an error."""

STALL_SECONDS = 1.0

UNHANDLED_TYPES_MAX = 100

ERROR_CHARACTERS_MAX = 1000


@dataclass(slots=True)
class AttemptResult:
    """The result of an attempt: committed events, remaining events, and the rest time of their streams."""

    done: list[ReceivedEvent] = field(default_factory=list)
    left: list[ReceivedEvent] = field(default_factory=list)
    delay_seconds: dict[InboxStream, float] = field(default_factory=dict)
    stalled: set[InboxStream] = field(default_factory=set)

    def add(self, other: AttemptResult) -> None:
        """Add the result of another attempt."""
        self.done += other.done
        self.left += other.left
        self.delay_seconds |= other.delay_seconds
        self.stalled |= other.stalled


class HandlerExecutor:
    """Runs received events of one consumer through their handlers."""

    def __init__(self, store: InboxStore, routes: Routes, observer: Observer, rng: random.Random) -> None:
        self._store, self._routes, self._observer, self._rng = store, routes, observer, rng
        self._transaction = InboxTransaction(store, routes)
        self._failures = Failures(routes, observer, rng)
        self._drains: dict[InboxStream, asyncio.Task[None]] = {}
        unavailable = partial(ConsumerUnavailable, routes.consumer)
        recovered = partial(ConsumerRecovered, routes.consumer)
        self.health = StoreHealth(observer, unavailable, recovered, BACKOFF, rng)
        self._ending = False
        self._unhandled_types: set[tuple[str, str]] = set()
        self._failed = asyncio.Event()
        self._error: BaseException | None = None

    async def execute(self, events: Sequence[ReceivedEvent]) -> AttemptResult:
        """Try all events in one transaction; after a handler failure, try every event in a separate transaction."""
        attempt = await self._attempt(events)
        if len(events) == 1 or not attempt.left:
            return attempt
        result = AttemptResult(done=attempt.done, delay_seconds=attempt.delay_seconds, stalled=attempt.stalled)
        for received in attempt.left:
            if received.stream in result.delay_seconds:
                result.left.append(received)
            else:
                result.add(await self._attempt([received]))
        return result

    def drain(self, stream: InboxStream) -> None:
        """Process the held events of a stream, in the background."""
        if stream not in self._drains:
            task = asyncio.create_task(self._drain(stream))
            self._drains[stream] = task
            task.add_done_callback(partial(self._on_drain_end, stream))

    def _on_drain_end(self, stream: InboxStream, task: asyncio.Task[None]) -> None:
        self._drains.pop(stream, None)
        if not task.cancelled() and (error := task.exception()):
            self._error = error
            self._failed.set()

    async def wait_for_failure(self) -> None:
        """Wait until a drain fails with an error that must end the consumer, and raise the error."""
        await self._failed.wait()
        assert self._error is not None
        raise self._error

    @property
    def draining(self) -> bool:
        """Return whether a stream is being drained."""
        return bool(self._drains)

    def forget(self, events: Sequence[ReceivedEvent]) -> None:
        """Forget the failed attempts of released events: the next consumer starts again at zero."""
        self._failures.forget(events)

    async def wait_for_drains(self) -> None:
        """Wait until all drains have ended."""
        while self._drains:
            await asyncio.wait(self._drains.values())

    async def stop(self) -> None:
        """Cancel drains. Uncommitted work is rolled back, and is done later or by another process."""
        # A drain may miss its cancellation if its connection is lost at the same moment.
        self._ending = True
        tasks = list(self._drains.values())
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def _attempt(self, events: Sequence[ReceivedEvent]) -> AttemptResult:
        started = time.monotonic()
        try:
            done = await self._run(self._transaction.process, events)
        except HandlerFailed as failed:
            if len(events) > 1:
                return AttemptResult(left=list(events))
            return _delayed(events, await self._count_attempt(failed))
        except InvalidHandler:
            raise
        except OutriderError as error:
            return _delayed(events, self.health.failed(str(error)))
        self._committed(done, time.monotonic() - started)
        stalled = [entry.received for entry in done.of(LeftWithBroker)]
        attempt = _delayed(stalled, STALL_SECONDS)
        attempt.stalled = {received.stream for received in stalled}
        # Uses the delivered sequence: a received event may have lost its sequence on the way.
        left = [received.delivery for received in stalled]
        attempt.done = [received for received in events if received.delivery not in left] if left else list(events)
        return attempt

    async def _drain(self, stream: InboxStream) -> None:
        limit, failing = self._routes.settings.batch_max, None
        while not self._ending:
            started = time.monotonic()
            try:
                done = await self._run(self._transaction.process_held, stream, limit)
            except HandlerFailed as failed:
                single, limit, failing = limit == 1, 1, failed.received
                await asyncio.sleep(await self._count_attempt(failed) if single else 0)
                continue
            except InvalidHandler:
                raise
            except OutriderError as error:
                await asyncio.sleep(self.health.failed(str(error)))
                continue
            self._committed(done, time.monotonic() - started)
            if stream not in done.draining:
                # Another process may have the stream now. If the stream comes back, attempts are counted from zero.
                self._failures.forget([failing] if failing else [])
                return

    async def _run(self, process: Callable[..., Awaitable[BatchOutcome]], *args: Any) -> BatchOutcome:
        """Process a batch. A lost write conflict is retried soon, without counting an attempt."""
        conflicts = 0
        while True:
            try:
                return await process(*args, self._failures.to_dead_letter)
            except WriteConflict:
                conflicts += 1
                if conflicts == CONFLICTS.max_attempts:
                    raise
                await asyncio.sleep(CONFLICTS.delay_seconds(conflicts, self._rng))
            except InvalidHandler as error:
                # To continue would be worse: the receipt may claim an effect that does not exist.
                self._observer.emit(ConsumerBroken(self._routes.consumer, without_values(error)))
                raise

    async def _count_attempt(self, failed: HandlerFailed) -> float:
        """Count an attempt, unless the store is unavailable."""
        if await self._store.ping():
            return self._failures.count_attempt(failed)
        return self.health.failed(self._failures.text(failed))

    def _committed(self, done: BatchOutcome, seconds: float) -> None:
        self.health.recovered()
        self._failures.forget(entry.received for entry in done.entries)
        self._failures.forget(done.duplicates)
        self._emit_outcomes(done, seconds)
        for stream in done.draining:
            self.drain(stream)

    def _emit_outcomes(self, done: BatchOutcome, seconds: float) -> None:
        consumer = self._routes.consumer
        applied, dropped, waiting = (len(done.of(kind)) for kind in (Applied, Ignored, Held))
        unhandled, erased = (
            [received for received, outcome in done.entries if outcome is reason] for reason in (NO_HANDLER, ERASED)
        )
        dropped -= len(unhandled) + len(erased)
        counts = applied, len(done.duplicates), dropped, waiting, len(unhandled)
        self._observer.emit(Handled(consumer, *counts, seconds=seconds, staged=done.staged, erased=len(erased)))
        self._emit_unhandled_types(unhandled)
        for received in erased:
            event = received.event_id, received.delivery.topic, received.event_type
            self._observer.emit(ErasedEventSkipped(consumer, *event))
        for received, outcome in done.of(InboxDeadLettered):
            assert isinstance(outcome, InboxDeadLettered)
            self._observer.emit(
                ConsumerDeadLettered(
                    consumer,
                    received.event_id,
                    received.delivery.topic,
                    received.event_type,
                    outcome.reason,
                    outcome.policy,
                    outcome.failure.get("kind"),
                    outcome.failure["error"],
                    outcome.failure.get("where"),
                    done.dead_letters.get(received.event_id),
                )
            )
        for received, _ in done.of(LeftWithBroker):
            topic, key, _ = received.stream
            self._observer.emit(HeldEventsFull(consumer, topic, key, done.states[received.stream].waiting))

    def _emit_unhandled_types(self, events: Sequence[ReceivedEvent]) -> None:
        """Emit every unhandled type once, up to a limit: any service may write to a topic."""
        for received in events:
            kind = (received.delivery.topic, received.event_type)
            if kind not in self._unhandled_types and len(self._unhandled_types) < UNHANDLED_TYPES_MAX:
                self._unhandled_types.add(kind)
                self._observer.emit(NoHandler(self._routes.consumer, *kind))


def _delayed(events: Sequence[ReceivedEvent], seconds: float) -> AttemptResult:
    return AttemptResult(left=list(events), delay_seconds={received.stream: seconds for received in events})


@dataclass(slots=True)
class Failing:
    """A failing event: its attempts, and its dead letter after the last attempt."""

    attempts: int = 0
    dead_letter: InboxDeadLettered | None = None


@dataclass(slots=True)
class Failures:
    """The failing events of one consumer; never more than events in flight."""

    routes: Routes
    observer: Observer
    rng: random.Random
    failing: dict[UUID, Failing] = field(default_factory=dict)

    def count_attempt(self, failed: HandlerFailed) -> float:
        """Count an attempt; return the seconds to the next attempt. The last attempt leads to a dead letter."""
        received, retry = failed.received, self.routes.settings.retry
        known = self.failing.setdefault(received.event_id, Failing())
        known.attempts += 1
        if failed.is_permanent or known.attempts >= retry.max_attempts:
            reason = DeadLetterReason.PERMANENT_FAILURE if failed.is_permanent else failed.reason
            policy = self.routes.settings.on_dead_letter
            known.dead_letter = InboxDeadLettered(reason, self._failure(failed), policy, known.attempts)
            return 0.0
        delay = retry.delay_seconds(known.attempts, self.rng)
        self.observer.emit(
            HandlerRetried(
                consumer=self.routes.consumer,
                event_id=received.event_id,
                topic=received.delivery.topic,
                event_type=received.event_type,
                attempt=known.attempts,
                delay_seconds=round(delay, 3),
                error=self.text(failed),
            )
        )
        return delay

    def text(self, failed: HandlerFailed) -> str:
        """Return the part of the text of a failure that may be logged and stored."""
        redactor = failed.redactor(self.routes.settings.error_text)
        return _storable(summary_of(failed.error, redactor))[:ERROR_CHARACTERS_MAX]

    def _failure(self, failed: HandlerFailed) -> dict[str, Any]:
        redactor = failed.redactor(self.routes.settings.error_text)
        return {
            "error": self.text(failed),
            "kind": type(failed.error).__qualname__,
            "where": user_frame(failed.error),
            "traceback": _storable(traceback_text(failed.error, redactor)),
        }

    @property
    def to_dead_letter(self) -> dict[UUID, InboxDeadLettered]:
        """Return the events without attempts left."""
        return {event_id: known.dead_letter for event_id, known in self.failing.items() if known.dead_letter}

    def forget(self, events: Iterable[ReceivedEvent]) -> None:
        """Remove settled events."""
        if self.failing:
            for received in events:
                self.failing.pop(received.event_id, None)


def _storable(text: str) -> str:
    # The database would reject a NUL or a lone surrogate in an error, and the event could not be dead-lettered.
    return text.replace("\0", "\\0").encode(errors="replace").decode()
