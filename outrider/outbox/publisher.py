"""The publisher of batches, wave after wave, and the failure policy that turns publish results into outcomes.

The publisher does not touch the store, so no transaction can be open while the relay waits for the broker.
"""

from __future__ import annotations

import asyncio
import json
import random
from collections import deque
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from datetime import datetime
from typing import Any, NamedTuple

from outrider.brokers.base import CONFIRMED, Broker, Nacked, PublishResult, Rejected, Unknown
from outrider.clock import Clock
from outrider.errors import InvalidSetting
from outrider.event import BAND_NAMES, DeadLetterReason, Message, OnDeadLetter, OutboxRow, Stream
from outrider.outbox.batch import Batch, FailedResult, RunResult, StreamRun, Wave, group_size, must_isolate
from outrider.outbox.circuit_breaker import CircuitBreakers
from outrider.outbox.model import DeadLettered, Defer, Outcome, Retry
from outrider.outbox.settings import RelaySettings
from outrider.retry import RetryPolicy
from outrider.telemetry.events import BreakerOpened, EventDeadLettered, Observer, Retried
from outrider.wire import encode

ERROR_MAX = 2_000

PASS_SECONDS = 0.2
"""The time after which a pass begins no further wave."""

MayPublish = Callable[[], bool]
"""Returns True if a wave may begin now."""

_KIND: dict[type[Any], str] = {Nacked: "nacked", Rejected: "rejected", Unknown: "unknown"}


class SharedExclusiveLock:
    """A lock that waves share and that a suspect holds alone, so that a failure has a single possible cause."""

    def __init__(self) -> None:
        self._entry = asyncio.Lock()
        self._inside = 0
        self._empty = asyncio.Event()
        self._empty.set()

    @asynccontextmanager
    async def acquire(self, *, exclusive: bool) -> AsyncIterator[None]:
        """Hold the lock for the block. A waiting suspect keeps new waves out, and therefore cannot starve."""
        async with self._entry:
            if exclusive:
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


class EncodedWave(NamedTuple):
    """A wave with its messages."""

    wave: Wave
    messages: list[Message]


class EncodedRun(NamedTuple):
    """A run of suspects with its messages."""

    run: StreamRun
    messages: list[Message]


@dataclass(slots=True)
class BatchPublisher:
    """Publishes batches. The workers of a relay share a publisher, because a destination is down for all workers."""

    broker: Broker
    breakers: CircuitBreakers
    policy: FailurePolicy
    clock: Clock
    observer: Observer
    lanes: int
    _lock: SharedExclusiveLock = field(default_factory=SharedExclusiveLock)

    async def publish(self, batch: Batch, may_publish: MayPublish) -> bool:
        """Publish until the batch is empty, the lease runs short, or the connection is down.

        Events are not inspected individually while all destinations are healthy. Return True if the pass ran out of
        time with events left: a stream with thousands of waves must not delay the other streams of the worker.
        """
        limit, ordered = self.policy.settings.in_flight_max, self.broker.capabilities.ordered
        ends_at = self.clock.boot_seconds() + PASS_SECONDS
        while may_publish() and not self.breakers.is_open(""):
            if self.clock.boot_seconds() >= ends_at:
                return True
            wave = batch.next_wave(limit, ordered=ordered, breakers=self.breakers)
            if wave is None:
                return False
            if not wave.has_suspects and (messages := self._encode_all(wave.events)):
                if not await self._send(batch, wave, messages, may_publish):
                    return False
                continue
            together, suspects = self._inspect(batch, wave)
            if together and not await self._send(batch, *together, may_publish):
                return False
            while suspects:
                group = self._next_group(batch, suspects)
                if group and not await self._send(batch, *group, may_publish, isolated=True):
                    return False
        return False

    async def _send(
        self, batch: Batch, wave: Wave, messages: list[Message], may_publish: MayPublish, *, isolated: bool = False
    ) -> bool:
        """Publish a wave and record the results; return False if the lease or the connection ended before the start."""
        async with self._lock.acquire(exclusive=isolated):
            # Waiting for the lock may have taken the rest of the lease, and another wave may have failed meanwhile.
            if not may_publish() or self.breakers.is_open(""):
                return False
            results = await publish(self.broker, messages, self.policy.settings.publish_timeout_seconds)
        if self.breakers.is_healthy and results.count(CONFIRMED) == len(results):
            batch.confirm(wave)
        else:
            destinations = {e.event_id: m for e, m in zip(wave.events, messages, strict=True)}
            recorded = batch.record(wave, results, self._decide)
            alone = isolated and len(messages) == 1
            self._apply(recorded, lambda event: self.broker.destination(destinations[event.event_id]), alone)
            if isolated and all(run.failure is None for run in recorded):
                self.breakers.grow(map(self.broker.destination, messages))
        return True

    def _encode_all(self, events: Sequence[OutboxRow]) -> list[Message]:
        """Encode all events; if an event cannot be encoded, return an empty list, and the caller inspects the runs."""
        lanes = self.lanes
        try:
            return [encode(event, event.topic, BAND_NAMES[event.lane // lanes]) for event in events]
        except Exception:
            # `_encode` will fail on the event again, and records the error.
            return []

    def _inspect(self, batch: Batch, wave: Wave) -> tuple[EncodedWave | None, deque[EncodedRun]]:
        """Encode a wave run by run, and stop runs that cannot be published; return the others, and the suspects."""
        runs: list[StreamRun] = []
        together: list[Message] = []
        suspects: deque[EncodedRun] = deque()
        for run, messages in [found for run in batch.runs_of(wave) if (found := self._encode(batch, run))]:
            if wave.has_suspects and self._stop_if_unpublishable(batch, run, messages[0]):
                continue
            if wave.has_suspects and must_isolate(run.events[0], self.breakers):
                suspects.append(EncodedRun(run, messages))
            else:
                runs.append(run)
                together += messages
        rest = Wave([event for run in runs for event in run.events], runs)
        return EncodedWave(rest, together) if runs else None, suspects

    def _next_group(self, batch: Batch, suspects: deque[EncodedRun]) -> EncodedWave | None:
        """Take the suspects that are published together now; None if their destination is down."""
        runs: list[StreamRun] = []
        together: list[Message] = []
        limit = 0
        while suspects:
            (stream, events), messages = suspects[0]
            size = min(group_size(event, self.breakers) for event in events)
            limit = min(size, limit) if runs else size
            if runs and len(together) + len(events) > limit:
                break
            suspects.popleft()
            if self.breakers.is_open(self.broker.destination(messages[0])):
                batch.leave(stream)
                continue
            if len(events) > limit:
                # The group became smaller after the wave was taken.
                batch.put_back(stream, events[limit:])
            runs.append(StreamRun(stream, events[:limit]))
            together += messages[:limit]
        return EncodedWave(Wave([event for run in runs for event in run.events], runs), together) if runs else None

    def _encode(self, batch: Batch, run: StreamRun) -> tuple[StreamRun, list[Message]] | None:
        """Encode a run up to the first event that cannot be encoded; an unencodable head is rejected at once."""
        stream, events = run
        messages: list[Message] = []
        try:
            band = BAND_NAMES[stream.lane // self.lanes]
            messages += (encode(event, stream.topic, band) for event in events)
        except Exception as error:
            if not messages:
                result = Rejected(f"cannot be encoded: {type(error).__name__}: {error}")
                self._fail(batch, run, result)
                return None
            batch.put_back(stream, events[len(messages) :])
        return StreamRun(stream, events[: len(messages)]), messages

    def _stop_if_unpublishable(self, batch: Batch, run: StreamRun, message: Message) -> bool:
        """Stop a run that cannot be published now: the destination is down, or the head is poison."""
        destination = self.broker.destination(message)
        if self.breakers.is_open(""):
            batch.leave(run.stream)
            return True
        if self.breakers.is_open(destination):
            # Only this destination is down. Its streams leave the start of the lane, so that they hide no other stream.
            retry_at = self.breakers.get(destination).breaker.retry_at or 0.0
            wait = retry_at - self.clock.boot_seconds()
            batch.stop(run, Defer(max(self.policy.settings.breaker_seconds_base, wait)))
            return True
        if error := self.breakers.poison_error(run.events[0].event_id):
            self._fail(batch, run, Unknown(error, destination))
            return True
        return False

    def _decide(self, event: OutboxRow, result: FailedResult) -> Retry | DeadLettered:
        return self.policy.outcome(event, event.stream, result, self.clock.now())

    def _fail(self, batch: Batch, run: StreamRun, result: FailedResult) -> None:
        """Count a failed attempt of the head of a run that was not published."""
        outcome = self._decide(run.events[0], result)
        batch.stop(run, outcome)
        self._emit_failure(run.events[0], run.stream, result, outcome)

    def _apply(self, recorded: list[RunResult], destination: Callable[[OutboxRow], str], isolated: bool) -> None:
        """Clear confirmed events of suspicion, report failed events, and open the breakers of failed destinations."""
        failed: dict[str, tuple[str, list[OutboxRow]]] = {}
        for stream, confirmed, unconfirmed, failure, outcome in recorded:
            for event in confirmed:
                self.breakers.confirmed(destination(event), event.event_id)
            if failure is not None and outcome is not None:
                self._emit_failure(unconfirmed[0], stream, failure, outcome)
            elif isinstance(failure, Unknown):
                failed.setdefault(failure.destination, (failure.error, []))[1].extend(unconfirmed)
        for name, (error, events) in failed.items():
            wait = self.breakers.fail(name, events, error, self.clock.boot_seconds(), isolated=isolated)
            self.observer.emit(BreakerOpened(name, error, wait, self.broker.capabilities.name))

    def _emit_failure(self, event: OutboxRow, stream: Stream, result: FailedResult, outcome: Outcome) -> None:
        self.breakers.clear(event.event_id)
        if isinstance(outcome, DeadLettered):
            self.observer.emit(
                EventDeadLettered(
                    event.event_id, stream.topic, event.event_type, outcome.reason, outcome.policy, result.error
                )
            )
        elif isinstance(outcome, Retry):
            delay = outcome.delay_seconds
            self.observer.emit(Retried(event.event_id, stream.topic, event.attempts + 1, delay, result.error))


async def publish(broker: Broker, messages: list[Message], seconds: float) -> Sequence[PublishResult]:
    """Publish with a time limit; every message gets a result, even if the adapter raises."""
    try:
        async with asyncio.timeout(seconds):
            results = await broker.publish(messages)
        if len(results) != len(messages):
            return [Unknown(f"{len(results)} results for {len(messages)} messages")] * len(messages)
        return results
    except asyncio.CancelledError:
        task = asyncio.current_task()
        if task is None or task.cancelling():
            raise
        # Not a cancellation of this task, but of a future inside the client; the results of all messages are unknown.
        return [Unknown("the broker's client cancelled the publish")] * len(messages)
    except TimeoutError:
        return [Unknown(no_answer(broker.capabilities.name, seconds))] * len(messages)
    except Exception as error:
        # If an adapter raises, the results of all messages are unknown; the result carries the error.
        return [Unknown(describe(error))] * len(messages)


def no_answer(broker: str, seconds: float) -> str:
    """Return the error text for a broker that does not answer."""
    return f"no answer from {broker} within {seconds:g} s"


def describe(error: Exception) -> str:
    """Return the kind and the text of an error; some errors have no text, and their cause says more.

    >>> describe(TimeoutError())
    'TimeoutError'
    """
    causes = (f"{type(each).__name__}: {each}" for each in (error, error.__cause__) if each is not None and str(each))
    return next(causes, type(error).__name__)


@dataclass(frozen=True, slots=True)
class FailurePolicy:
    """Decides between a retry and dead-lettering."""

    settings: RelaySettings
    rng: random.Random

    def outcome(self, event: OutboxRow, stream: Stream, result: FailedResult, now: datetime) -> Retry | DeadLettered:
        """Count a failed attempt of an event, and choose between a retry and dead-lettering."""
        attempt = event.attempts + 1
        failure = {
            "kind": _KIND[type(result)],
            "error": _storable(result.error),
            "attempt": attempt,
            "at": now.isoformat(),
        }
        if isinstance(result, Rejected):
            return DeadLettered(result.reason, failure, self._policy(event, stream))
        policy = retry_policy(event, self.settings.retry)
        if attempt < (event.max_attempts or policy.max_attempts):
            return Retry(policy.delay_seconds(attempt, self.rng), failure)
        poison = isinstance(result, Unknown)
        reason = DeadLetterReason.POISON_MESSAGE if poison else DeadLetterReason.MAX_RETRIES_EXCEEDED
        return DeadLettered(reason, failure, self._policy(event, stream))

    def _policy(self, event: OutboxRow, stream: Stream) -> OnDeadLetter:
        # An event without a key is alone in its stream, so it cannot block another event.
        keyless = stream.key == str(event.event_id)
        return OnDeadLetter.SKIP if keyless else self.settings.policy_of(stream.topic)


def _storable(error: object) -> str:
    """Return an error text that every database can store; the text may quote the message."""
    text = str(error)[:ERROR_MAX].replace("\0", "\N{REPLACEMENT CHARACTER}")
    return text.encode(errors="replace").decode()


def retry_policy(event: OutboxRow, default: RetryPolicy) -> RetryPolicy:
    """Return the event's own policy, or the relay's if the event has no readable policy."""
    if event.retry is None:
        return default
    try:
        return RetryPolicy.from_json(json.loads(event.retry))
    except (TypeError, ValueError, InvalidSetting):
        return default
