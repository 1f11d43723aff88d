"""The publisher of batches, wave after wave, and the failure policy that turns publish results into outcomes.

The publisher does not touch the store, so no transaction can be open while the relay waits for the broker.
"""

from __future__ import annotations

import asyncio
import json
import random
from collections import deque
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from datetime import datetime
from functools import partial
from operator import attrgetter
from typing import Any, NamedTuple

from outrider.brokers.base import (
    CONFIRMED,
    Broker,
    Nacked,
    PublishesApart,
    PublishesPromptly,
    PublishResult,
    Rejected,
    Unanswered,
    Unknown,
)
from outrider.clock import Clock
from outrider.errors import InvalidPayload, InvalidSetting, KeysUnavailable, SchemaUnavailable
from outrider.event import (
    BAND_NAMES,
    SCHEMA_HEADER,
    DeadLetterReason,
    Message,
    OnDeadLetter,
    OutboxRow,
    Stream,
)
from outrider.outbox.batch import Batch, FailedResult, RunResult, StreamRun, Wave, group_size, must_isolate
from outrider.outbox.circuit_breaker import CircuitBreakers
from outrider.outbox.increasing_fields import IncreasingFields
from outrider.outbox.model import DeadLettered, Defer, Lease, Outcome, Retry
from outrider.outbox.settings import RelaySettings
from outrider.outbox.unanswered import UnansweredEvents, UnansweredRun
from outrider.payload.payloads import UNAVAILABLE_SECONDS, Payloads
from outrider.redaction import Redactor, header_values
from outrider.retry import RetryPolicy
from outrider.telemetry.events import BreakerOpened, EventDeadLettered, Observer, Retried
from outrider.wire import encode

ERROR_MAX = 2_000

PASS_SECONDS = 0.2
"""The time after which a pass begins no further wave."""

TRIAL_SECONDS = 0.02
"""The time for which a pass waits for a destination that has failed more than once."""

TRIAL_SECONDS_FIRST = 0.2
"""The same, for a destination that has failed once, or has answered since: its backlog should drain fast."""

TRIALS_MAX = 16
"""The number of destinations without an answer at which no further destination is tried."""

MayPublish = Callable[[], bool]
"""Returns True if a wave may begin now."""

_TYPE_VERSION = attrgetter("event_type", "schema_version")

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


class PassLimits(NamedTuple):
    """The limits of a pass: its lanes, the test for the start of a wave, and the time after which no wave begins."""

    lease: Lease
    may_publish: MayPublish
    ends_at: float


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
    unanswered: UnansweredEvents
    payloads: Payloads | None = None
    increases: IncreasingFields | None = None
    _lock: SharedExclusiveLock = field(default_factory=SharedExclusiveLock)
    _trials: set[asyncio.Task[Sequence[PublishResult]]] = field(default_factory=set)

    async def publish(self, batch: Batch, lease: Lease, may_publish: MayPublish) -> bool:
        """Publish until the batch is empty, the lease runs short, or the connection is down.

        Events are not inspected individually while all destinations are healthy. Return True if the pass ran out of
        time with events left: a stream with thousands of waves must not delay the other streams of the worker.
        """
        limit, ordered = self.policy.settings.in_flight_max, self.broker.capabilities.ordered
        self._begin_checks(lease)
        limits = PassLimits(lease, may_publish, self.clock.boot_seconds() + PASS_SECONDS)
        while may_publish() and not self.breakers.is_open(""):
            if self.clock.boot_seconds() >= limits.ends_at:
                return True
            wave = batch.next_wave(limit, ordered=ordered, breakers=self.breakers)
            if wave is None:
                return False
            await self._load_checks(wave.events)
            if not wave.has_suspects and (messages := self._encode_all(wave.events)):
                if not await self._send(batch, limits, wave, messages):
                    return False
                continue
            together, suspects, trials = self._inspect(batch, wave)
            trying = [self._try(batch, limits, name, runs) for name, runs in trials.items()]
            sending = [self._send(batch, limits, *together)] if together else []
            if not all((await asyncio.gather(*sending, *trying))[: len(sending)]):
                return False
            while suspects:
                group = self._next_group(batch, suspects)
                if group and not await self._send(batch, limits, *group, isolated=True):
                    return False
        return False

    def _begin_checks(self, lease: Lease) -> None:
        if self.increases is not None:
            self.increases.begin(lease)

    async def _load_checks(self, events: Sequence[OutboxRow]) -> None:
        """Read the schemas and the last values with which events are compared."""
        if self.payloads is not None:
            await self.payloads.load(set(map(_TYPE_VERSION, events)), payloads=(event.payload for event in events))
        if self.increases is not None:
            await self.increases.load(events)

    def finish(self, batch: Batch, lease: Lease) -> None:
        """Record the answers that have come since the pass of their events."""
        for late in self.unanswered.take(lease):
            stream, events = late.run
            self.breakers.answered(late.destination, len(events))
            if late.epoch != lease.epochs[stream.lane]:
                continue
            no_reply = no_answer(self.broker.capabilities.name, self.policy.settings.publish_timeout_seconds)
            results = self._redacted(late.run.events, late.final_results(no_reply))
            recorded = batch.record_late(late.run, results, self._decide)
            if late.group_size and recorded.failure is None:
                self.breakers.grow_from(late.destination, late.group_size)
            self._apply([recorded], partial(_same, late.destination), late.group_size == 1, late.began)

    def drop(self, lanes: set[int]) -> None:
        """Forget the events without an answer in lanes that the relay has lost or released."""
        if self.increases is not None:
            self.increases.drop(lanes)
        for late in self.unanswered.drop(lanes):
            self.breakers.answered(late.destination, len(late.run.events))

    def close(self) -> None:
        """Give up the trials in progress."""
        for trial in self._trials:
            trial.cancel()

    async def _send(
        self, batch: Batch, limits: PassLimits, wave: Wave, messages: list[Message], *, isolated: bool = False
    ) -> bool:
        """Publish a wave and record the results; return False if the lease or the connection ended before the start."""
        async with self._lock.acquire(exclusive=isolated):
            # Waiting for the lock may have taken the rest of the lease, and another wave may have failed meanwhile.
            if not limits.may_publish() or self.breakers.is_open(""):
                return False
            began = self.clock.boot_seconds()
            results = await self._publish(messages)
        if self.breakers.is_healthy and results.count(CONFIRMED) == len(results):
            batch.confirm(wave)
        else:
            self._record(batch, limits.lease, EncodedWave(wave, messages), results, began, isolated=isolated)
        return True

    async def _try(self, batch: Batch, limits: PassLimits, name: str, runs: deque[EncodedRun]) -> bool:
        """Publish to a half-open destination, one group at a time, and leave it behind if it does not answer soon."""
        assert isinstance(self.broker, PublishesApart)
        while runs:
            now = self.clock.boot_seconds()
            if now >= limits.ends_at or not limits.may_publish() or self.breakers.is_open(""):
                for run, _ in runs:
                    batch.leave(run.stream)
                return True
            if self.breakers.is_stopped(name) or self.breakers.unanswered_destinations >= TRIALS_MAX:
                for run, _ in runs:
                    batch.stop(run, Defer(self.breakers.wait_seconds(name, now)))
                return True
            group = self._next_group(batch, runs, name)
            if group is None:
                return True
            messages = group.messages
            # The other workers see the destination as stopped as long as this group has no answer.
            self.breakers.unanswered(name, len(messages), now)
            trial = asyncio.create_task(self._publish_apart(self.broker, messages))
            self._trials.add(trial)
            trial.add_done_callback(self._trials.discard)
            seconds = TRIAL_SECONDS if self.breakers.get(name).breaker.failures > 1 else TRIAL_SECONDS_FIRST
            try:
                await asyncio.wait([trial], timeout=seconds)
            finally:
                self.breakers.answered(name, len(messages))
            results = trial.result() if trial.done() else _answers_of(trial, name, len(messages))
            self._record(batch, limits.lease, group, results, now, isolated=True)
        return True

    async def _publish(self, messages: list[Message]) -> Sequence[PublishResult]:
        broker, seconds = self.broker, self.policy.settings.publish_timeout_seconds
        if not isinstance(broker, PublishesPromptly):
            return await publish(broker, messages, seconds)
        return await limit_time(broker.publish_promptly(messages), len(messages), broker.capabilities.name, seconds)

    async def _publish_apart(self, broker: PublishesApart, messages: list[Message]) -> Sequence[PublishResult]:
        seconds = self.policy.settings.publish_timeout_seconds
        return await limit_time(broker.publish_apart(messages), len(messages), self.broker.capabilities.name, seconds)

    def _record(
        self,
        batch: Batch,
        lease: Lease,
        sent: EncodedWave,
        results: Sequence[PublishResult],
        began: float,
        *,
        isolated: bool,
    ) -> None:
        """Record the results of a wave, and keep the runs without an answer."""
        wave, messages = sent
        by_id = {event.event_id: message for event, message in zip(wave.events, messages, strict=True)}

        def destination(event: OutboxRow) -> str:
            return self.broker.destination(by_id[event.event_id])

        recorded = batch.record(wave, self._redacted(wave.events, results), self._decide)
        deadline = began + self.policy.settings.publish_timeout_seconds
        for stream, _, events, failure, _, rest in recorded:
            if isinstance(failure, Unanswered):
                self.breakers.unanswered(failure.destination, len(events), self.clock.boot_seconds())
                run, epoch = StreamRun(stream, events), lease.epochs.get(stream.lane)
                size = len(messages) if isolated else 0
                self.unanswered.add(UnansweredRun(run, rest, failure.destination, epoch, began, deadline, size))
        self._apply(recorded, destination, isolated and len(messages) == 1, began)
        if isolated and all(run.failure is None for run in recorded):
            self.breakers.grow(map(self.broker.destination, messages))

    def _redacted(self, events: Sequence[OutboxRow], results: Sequence[PublishResult]) -> Sequence[PublishResult]:
        """Return results with redacted texts. Events with the same text are redacted together: it may quote any."""
        same_text: dict[str, list[OutboxRow]] = {}
        for event, result in zip(events, results, strict=True):
            if isinstance(result, Nacked | Rejected | Unknown):
                same_text.setdefault(result.error, []).append(event)
        if not same_text:
            return results
        texts = {text: self.policy.redactor(found).text(text) for text, found in same_text.items()}
        return [
            replace(result, error=texts[result.error]) if isinstance(result, Nacked | Rejected | Unknown) else result
            for result in results
        ]

    def _encode_all(self, events: Sequence[OutboxRow]) -> list[Message]:
        """Encode all events; if an event cannot be encoded, return an empty list, and the caller inspects the runs."""
        lanes = self.lanes
        try:
            if (payloads := self.payloads) is not None:
                return [
                    encode_checked(payloads, event, event.topic, BAND_NAMES[event.lane // lanes], self.increases)
                    for event in events
                ]
            return [encode(event, event.topic, BAND_NAMES[event.lane // lanes]) for event in events]
        except Exception:
            # `_encode` will fail on the event again, and records the error.
            return []

    def _inspect(
        self, batch: Batch, wave: Wave
    ) -> tuple[EncodedWave | None, deque[EncodedRun], dict[str, deque[EncodedRun]]]:
        """Encode a wave run by run, and stop runs that cannot be published.

        Return the others, the suspects that need the broker for themselves, and the runs by half-open destination.
        """
        runs: list[StreamRun] = []
        together: list[Message] = []
        suspects: deque[EncodedRun] = deque()
        trials: dict[str, deque[EncodedRun]] = {}
        for run, messages in [found for run in batch.runs_of(wave) if (found := self._encode(batch, run))]:
            if wave.has_suspects and self._stop_if_unpublishable(batch, run, messages[0]):
                continue
            if wave.has_suspects and (name := self._half_open_destination(run.events[0], messages[0])):
                trials.setdefault(name, deque()).append(EncodedRun(run, messages))
            elif wave.has_suspects and must_isolate(run.events[0], self.breakers):
                suspects.append(EncodedRun(run, messages))
            else:
                runs.append(run)
                together += messages
        rest = Wave([event for run in runs for event in run.events], runs)
        return EncodedWave(rest, together) if runs else None, suspects, trials

    def _half_open_destination(self, event: OutboxRow, message: Message) -> str:
        """Return the half-open destination to which an event goes, or an empty name.

        An event that may break the connection is published alone on it.
        """
        if not isinstance(self.broker, PublishesApart) or self.breakers.is_suspect_of("", event.event_id):
            return ""
        name = self.broker.destination(message)
        return name if self.breakers.is_half_open(name) else ""

    def _next_group(self, batch: Batch, suspects: deque[EncodedRun], name: str = "") -> EncodedWave | None:
        """Take the suspects that are published together now; None if their destination is down.

        All events of a half-open destination, which is named, are suspects.
        """
        runs: list[StreamRun] = []
        together: list[Message] = []
        limit = 0
        while suspects:
            (stream, events), messages = suspects[0]
            size = min(self._group_size(event, name) for event in events)
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

    def _group_size(self, event: OutboxRow, name: str) -> int:
        alone = event.suspect or not name
        return group_size(event, self.breakers) if alone else self.breakers.half_open_group_size(name, event.event_id)

    def _encode(self, batch: Batch, run: StreamRun) -> tuple[StreamRun, list[Message]] | None:
        """Encode a run up to the first event that cannot be encoded; an unencodable head is rejected at once."""
        stream, events = run
        messages: list[Message] = []
        try:
            band = BAND_NAMES[stream.lane // self.lanes]
            if (payloads := self.payloads) is None:
                messages += (encode(event, stream.topic, band) for event in events)
            else:
                increases = self.increases
                messages += (encode_checked(payloads, event, stream.topic, band, increases) for event in events)
        except Exception as error:
            if not messages:
                self._stop_unencodable(batch, run, error)
                return None
            batch.put_back(stream, events[len(messages) :])
        return StreamRun(stream, events[: len(messages)]), messages

    def _stop_unencodable(self, batch: Batch, run: StreamRun, error: Exception) -> None:
        """Stop a run whose head has no message: the payload is invalid, its schema is unknown, or it is poison."""
        if isinstance(error, SchemaUnavailable | KeysUnavailable):
            # Not the fault of the event: it costs no attempt, and waits until the source of schemas or keys answers.
            batch.stop(run, Defer(UNAVAILABLE_SECONDS))
        elif isinstance(error, InvalidPayload):
            self._fail(batch, run, Rejected(str(error), DeadLetterReason(error.reason)))
        else:
            text = self.policy.redactor(run.events[:1]).text(f"{type(error).__name__}: {error}")
            self._fail(batch, run, Rejected(f"cannot be encoded: {text}"))

    def _stop_if_unpublishable(self, batch: Batch, run: StreamRun, message: Message) -> bool:
        """Stop a run that cannot be published now: the destination is down, or the head is poison."""
        destination = self.broker.destination(message)
        if self.breakers.is_open(""):
            batch.leave(run.stream)
            return True
        if self.breakers.is_stopped(destination):
            # Only this destination is down. Its streams leave the start of the lane, so that they hide no other stream.
            batch.stop(run, Defer(self.breakers.wait_seconds(destination, self.clock.boot_seconds())))
            return True
        if error := self.breakers.poison_error(run.events[0].event_id):
            self._fail(batch, run, Unknown(error, destination))
            return True
        return False

    def _decide(self, event: OutboxRow, result: FailedResult | Unanswered) -> Retry | DeadLettered | Defer:
        if isinstance(result, Unanswered):
            settings = self.policy.settings
            return Defer(settings.publish_timeout_seconds + settings.breaker_seconds_base)
        return self.policy.outcome(event, event.stream, result, self.clock.now())

    def _fail(self, batch: Batch, run: StreamRun, result: FailedResult) -> None:
        """Count a failed attempt of the head of a run that was not published."""
        outcome = self._decide(run.events[0], result)
        batch.stop(run, outcome)
        self._emit_failure(run.events[0], run.stream, result, outcome)

    def _apply(
        self, recorded: list[RunResult], destination: Callable[[OutboxRow], str], isolated: bool, began: float
    ) -> None:
        """Clear confirmed events of suspicion, report failed events, and open the breakers of failed destinations."""
        failed: dict[str, tuple[str, list[OutboxRow]]] = {}
        for stream, confirmed, unconfirmed, failure, outcome, _ in recorded:
            for event in confirmed:
                self.breakers.confirmed(destination(event), event.event_id)
            if isinstance(failure, Nacked | Rejected) and outcome is not None:
                self._emit_failure(unconfirmed[0], stream, failure, outcome)
            elif isinstance(failure, Unknown):
                failed.setdefault(failure.destination, (failure.error, []))[1].extend(unconfirmed)
        for name, (error, events) in failed.items():
            now, was_open = self.clock.boot_seconds(), self.breakers.get(name).breaker.is_open
            wait = self.breakers.fail(name, events, error, now, isolated=isolated, began=began)
            if self.breakers.get(name).breaker.is_open and not was_open:
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


def encode_checked(
    payloads: Payloads, event: OutboxRow, topic: str, band: str, increases: IncreasingFields | None = None
) -> Message:
    """Encode an event with a valid payload. The URI of its schema is a header, unless the event has such a header."""
    schema_uri = payloads.check_row(event)
    if increases is not None:
        increases.check(event)
    message = encode(event, topic, band)
    if schema_uri is not None:
        message.headers.setdefault(SCHEMA_HEADER, schema_uri)
    return message


async def publish(broker: Broker, messages: list[Message], seconds: float) -> Sequence[PublishResult]:
    """Publish with a time limit; every message gets a result, even if the adapter raises."""
    return await limit_time(broker.publish(messages), len(messages), broker.capabilities.name, seconds)


async def limit_time(
    publishing: Awaitable[Sequence[PublishResult]], count: int, broker: str, seconds: float
) -> Sequence[PublishResult]:
    """Return the results of a publish, or as many unknown results after the time limit or an error."""
    try:
        async with asyncio.timeout(seconds):
            results = await publishing
        if len(results) != count:
            return [Unknown(f"{len(results)} results for {count} messages")] * count
        return results
    except asyncio.CancelledError:
        task = asyncio.current_task()
        if task is None or task.cancelling():
            raise
        # Not a cancellation of this task, but of a future inside the client; the results of all messages are unknown.
        return [Unknown("the broker's client cancelled the publish")] * count
    except TimeoutError:
        return [Unknown(no_answer(broker, seconds))] * count
    except Exception as error:
        # If an adapter raises, the results of all messages are unknown; the result carries the error.
        return [Unknown(describe(error))] * count


def _same(destination: str, _: OutboxRow) -> str:
    return destination


def _answers_of(trial: asyncio.Task[Sequence[PublishResult]], destination: str, count: int) -> list[PublishResult]:
    """Return results that are not there yet, one per message of a trial."""
    answers: list[asyncio.Future[PublishResult]] = [trial.get_loop().create_future() for _ in range(count)]

    def hand_over(done: asyncio.Task[Sequence[PublishResult]]) -> None:
        results = [Unknown("given up", destination)] * count if done.cancelled() else done.result()
        for answer, result in zip(answers, results, strict=True):
            answer.set_result(result)

    trial.add_done_callback(hand_over)
    return [Unanswered(destination, answer) for answer in answers]


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

    def redactor(self, events: Sequence[OutboxRow] = ()) -> Redactor:
        """Return the redactor of error texts of the broker, which may quote these events."""
        headers = [header_values(event.headers) for event in events if event.headers != b"{}"]
        return Redactor(self.settings.error_text, *(event.payload for event in events), *headers)

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
