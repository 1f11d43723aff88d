"""One transaction of a consumer: receipts, sequencing, handlers, outcomes, commit. The consumer acks afterwards.

A crash before the commit rolls everything back, and the broker delivers again. A crash after the commit leaves the
receipt, and the next delivery is a duplicate. There is no third case, because everything is in one transaction.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import groupby
from typing import Any, NamedTuple
from uuid import UUID

from outrider.causation import counting_staged, handling
from outrider.errors import (
    InvalidHandler,
    InvalidPayload,
    OutriderError,
    Permanent,
    SubjectErased,
    TransactionLost,
    UsageError,
)
from outrider.event import DeadLetterReason, InboxStream, OnDeadLetter, ReceivedEvent, is_erased
from outrider.inbox.model import (
    Applied,
    EventOutcome,
    Held,
    HeldEvent,
    Ignored,
    InboxBlockReason,
    InboxDeadLettered,
    InboxOutcome,
    LeftWithBroker,
    StreamState,
)
from outrider.inbox.router import Route, Routes
from outrider.inbox.sequencing import Decision, RejectEvent, decide, drop_uncountable_sequence
from outrider.inbox.settings import Ordering
from outrider.inbox.store import InboxStore
from outrider.redaction import ErrorText, Redactor, header_values
from outrider.wire import decode

NO_HANDLER = Ignored("no handler of its type")

HANDLED_BEFORE = Ignored("handled before")

ERASED = Ignored("its subject was erased")

Todo = list[tuple[ReceivedEvent, Route | InboxOutcome]]


class HeldBatch(NamedTuple):
    """The first held events of a stream that drains."""

    stream: InboxStream
    limit: int


Batch = Sequence[ReceivedEvent] | HeldBatch


class BatchInput(NamedTuple):
    """The events of a transaction, the ids of fresh events, and the states of their streams."""

    events: Sequence[ReceivedEvent]
    fresh: frozenset[UUID]
    states: Mapping[InboxStream, StreamState]


@dataclass(slots=True)
class BatchOutcome:
    """The effects of a committed transaction."""

    entries: list[EventOutcome] = field(default_factory=list)
    duplicates: list[ReceivedEvent] = field(default_factory=list)
    states: dict[InboxStream, StreamState] = field(default_factory=dict)
    dead_letters: Mapping[UUID, int] = field(default_factory=dict)
    drains: Collection[InboxBlockReason] = (InboxBlockReason.DRAINING,)
    staged: int = 0
    """The number of events that the handlers have staged."""

    def of(self, kind: type[InboxOutcome]) -> list[EventOutcome]:
        """Return the entries with an outcome of this type."""
        return [entry for entry in self.entries if isinstance(entry.outcome, kind)]

    @property
    def draining(self) -> list[InboxStream]:
        """Return the streams whose held events may be handled now."""
        return [stream for stream, state in self.states.items() if state.cause in self.drains]


class InboxTransaction:
    """Processes events of one consumer; a batch is one transaction.

    An event whose id is in `dead_letter` becomes a dead letter in its turn, and its handler is not called.
    """

    def __init__(self, store: InboxStore, routes: Routes) -> None:
        self._store, self._routes = store, routes

    async def process(
        self, events: Sequence[ReceivedEvent], dead_letter: Mapping[UUID, InboxDeadLettered] | None = None
    ) -> BatchOutcome:
        """Process events that were just delivered."""
        return await self._process(events, dead_letter or {})

    async def process_held(
        self, stream: InboxStream, limit: int, dead_letter: Mapping[UUID, InboxDeadLettered] | None = None
    ) -> BatchOutcome:
        """Process the first held events of a draining stream. Do nothing if another process has the stream."""
        return await self._process(HeldBatch(stream, limit), dead_letter or {})

    async def _process(self, batch: Batch, dead_letter: Mapping[UUID, InboxDeadLettered]) -> BatchOutcome:
        outcome = BatchOutcome(drains=self._routes.settings.drains)
        if not isinstance(batch, HeldBatch):
            # Before the transaction: a slow store of keys must not keep its locks.
            await self._load_keys(batch)
        try:
            async with self._store.transaction() as tx:
                if (given := await self._read_batch(tx, batch)) is None:
                    return outcome
                todo = _decide(given, self._routes, dead_letter, outcome)
                with counting_staged() as staged:
                    seconds = await self._invoke(tx, todo)
                outcome.staged = staged.events
                outcome.entries = [
                    EventOutcome(event, Applied(seconds[event.event_id]) if isinstance(target, Route) else target)
                    for event, target in todo
                ]
                changed = {
                    stream: state for stream, state in outcome.states.items() if state != given.states.get(stream)
                }
                outcome.dead_letters = await self._store.record_outcomes(
                    tx, self._routes.consumer, outcome.entries, changed
                )
        except (Permanent, UsageError) as error:
            failed, applied = error.__cause__, outcome.of(Applied)
            if isinstance(failed, HandlerFailed):
                raise await self._attribute(batch, failed.received, error) from error
            if not applied:
                raise
            raise await self._attribute(batch, applied[0].received, error) from error
        return outcome

    async def _read_batch(self, tx: Any, batch: Batch) -> BatchInput | None:
        settings, consumer = self._routes.settings, self._routes.consumer
        if not isinstance(batch, HeldBatch):
            receipts = await self._store.record_receipts(tx, consumer, batch, ordered=settings.ordered)
            return BatchInput(batch, receipts.fresh, receipts.states)
        strict = settings.ordering is Ordering.STRICT
        claimed = await self._store.claim_held(
            tx, consumer, batch.stream, by_sequence=strict, limit=batch.limit, early=not strict
        )
        if claimed is None:
            return None
        events = [_reopen(held, batch.stream) for held in claimed.waiting]
        await self._load_keys(events)
        return BatchInput(events, claimed.fresh, {batch.stream: claimed.state})

    async def _load_keys(self, events: Sequence[ReceivedEvent]) -> None:
        """Read the keys of encrypted values, which the handlers get decrypted."""
        if self._routes.payloads is not None:
            await self._routes.payloads.load([], payloads=[received.delivery.body for received in events])

    async def _invoke(self, tx: Any, todo: Todo) -> dict[UUID, float]:
        """Run handlers in order. Consecutive events with the same batch handler are passed to the handler together."""
        seconds: dict[UUID, float] = {}
        accepted = [(event, target) for event, target in todo if isinstance(target, Route)]
        for route, group in groupby(accepted, key=lambda pair: pair[1]):
            events = [event for event, _ in group]
            for part in [events] if route.batch else [[event] for event in events]:
                started = time.monotonic()
                await call(route, part, tx, self._routes.settings.handler_timeout_seconds)
                spent = (time.monotonic() - started) / len(part)
                seconds.update(dict.fromkeys((event.event_id for event in part), spent))
        return seconds

    async def _attribute(self, batch: Batch, event: ReceivedEvent, error: Permanent | UsageError) -> OutriderError:
        """Find the cause of a transaction that was rejected after its handlers had returned: the handlers or the store.

        A permanent error is caused by the handlers: a deferred constraint, or an error that a handler has swallowed. A
        usage error of the store, such as missing rights, is caused by the handlers if the same transaction passes
        without them: a handler has changed its role, for instance.
        """
        if isinstance(error, InvalidHandler):
            route = self._routes.find(event.delivery.topic, event.event_type)
            return name_handler(route, event, error) if route else error
        if isinstance(error, UsageError) and not await self._passes_without_handlers(batch):
            return error
        return HandlerFailed(event, error.__cause__ or error, DeadLetterReason.MAX_RETRIES_EXCEEDED)

    async def _passes_without_handlers(self, batch: Batch) -> bool:
        outcome = BatchOutcome()
        try:
            async with self._store.transaction() as tx:
                if (given := await self._read_batch(tx, batch)) is None:
                    return False
                entries = [
                    EventOutcome(event, Applied() if isinstance(target, Route) else target)
                    for event, target in _decide(given, self._routes, {}, outcome)
                ]
                await self._store.record_outcomes(tx, self._routes.consumer, entries, outcome.states)
                raise _TrialDone
        except _TrialDone:
            return True
        except OutriderError:
            return False


class _TrialDone(Exception):
    """Raised to roll back a trial transaction."""


def _decide(
    given: BatchInput, routes: Routes, dead_letter: Mapping[UUID, InboxDeadLettered], outcome: BatchOutcome
) -> Todo:
    """Decide about events in order; every decision sees the stream state after the previous decision."""
    todo: Todo = []
    seen_ids: set[UUID] = set()
    outcome.states = dict(given.states)
    for received in (drop_uncountable_sequence(received, routes.settings) for received in given.events):
        state = outcome.states.get(received.stream, StreamState())
        if received.event_id not in given.fresh or received.event_id in seen_ids:
            if received.waiting_id is None:
                outcome.duplicates.append(received)
                continue
            todo.append((received, HANDLED_BEFORE))
            _settle(outcome, received, state)
            continue
        seen_ids.add(received.event_id)
        decision, blocked = decide(received, state, routes.settings)
        opened, target, after = _outcome(received, decision, blocked, routes, dead_letter.get(received.event_id))
        todo.append((opened, target))
        _settle(outcome, received, after, waits=isinstance(target, Held))
    return todo


def _outcome(
    received: ReceivedEvent,
    decision: Decision,
    blocked: StreamState,
    routes: Routes,
    dead_letter: InboxDeadLettered | None,
) -> tuple[ReceivedEvent, Route | InboxOutcome, StreamState]:
    """Return the outcome of an event; an event for a handler is opened."""
    if isinstance(decision, Held | LeftWithBroker | Ignored):
        return received, decision, blocked
    if isinstance(decision, RejectEvent):
        return received, *_dead_letter(received, _poison(decision.error, routes), blocked, decision.after)
    opened, target = _target(received, routes, dead_letter)
    if isinstance(target, InboxDeadLettered):
        return received, *_dead_letter(received, target, blocked, decision.after)
    return opened, target, decision.after


def _target(
    received: ReceivedEvent, routes: Routes, dead_letter: InboxDeadLettered | None
) -> tuple[ReceivedEvent, Route | Ignored | InboxDeadLettered]:
    if dead_letter is not None:
        return received, dead_letter
    if received.skipped:
        return received, Ignored("the marker of a skipped event")
    if received.event is None:
        return received, _poison(received.problem, routes)
    route = routes.find(received.delivery.topic, received.event_type)
    if route is None or routes.payloads is None or is_erased(received.event.payload):
        return received, ERASED if is_erased(received.event.payload) else route or NO_HANDLER
    try:
        opened = routes.payloads.open(received.event)
    except InvalidPayload as error:
        return received, _unopened(error, routes)
    # The delivery stays as received, and is what a store keeps.
    return received._replace(event=opened), route


def _unopened(error: InvalidPayload, routes: Routes) -> Ignored | InboxDeadLettered:
    if isinstance(error, SubjectErased):
        return ERASED
    letter = {"error": str(error)}
    return InboxDeadLettered(DeadLetterReason(error.reason), letter, routes.settings.on_dead_letter, 0)


def _poison(error: str, routes: Routes) -> InboxDeadLettered:
    return InboxDeadLettered(DeadLetterReason.POISON_MESSAGE, {"error": error}, routes.settings.on_dead_letter, 0)


def _dead_letter(
    received: ReceivedEvent, letter: InboxDeadLettered, state: StreamState, after: StreamState
) -> tuple[InboxOutcome, StreamState]:
    """Dead-letter by policy: the stream continues or is blocked. An event without a key blocks no stream."""
    if not received.keyed:
        return InboxDeadLettered(letter.reason, letter.failure, OnDeadLetter.SKIP, letter.attempts), after
    return letter, state._replace(cause=InboxBlockReason.DEAD_LETTER) if letter.policy is OnDeadLetter.BLOCK else after


def _settle(outcome: BatchOutcome, received: ReceivedEvent, after: StreamState, *, waits: bool = False) -> None:
    """Record the new state of the stream; remove a held event unless it is held again."""
    if received.waiting_id is not None and not waits:
        left = after.waiting - 1
        after = after._replace(
            waiting=left, cause=after.cause if left or after.cause is InboxBlockReason.DEAD_LETTER else None
        )
    if after != StreamState() or received.stream in outcome.states:
        outcome.states[received.stream] = after


def _reopen(waiting: HeldEvent, stream: InboxStream) -> ReceivedEvent:
    """Decode a held event with its stored id: decoding an event without an id would make a new id."""
    received = decode(waiting.delivery)
    return received._replace(
        event_id=waiting.event_id,
        stream=stream,
        waiting_id=waiting.waiting_id,
        replayed=received.replayed or waiting.replayed,
    )


class HandlerFailed(OutriderError):
    """A handler failed; the transaction is rolled back."""

    def __init__(self, received: ReceivedEvent, error: BaseException, reason: DeadLetterReason) -> None:
        # Without the text of the error, which may repeat the payload: `redactor` knows the part that may be kept.
        super().__init__(type(error).__name__)
        self.received, self.error, self.reason = received, error, reason

    def redactor(self, keep: ErrorText) -> Redactor:
        """Return the redactor of the event's values, as received and as the handler got them."""
        event, delivery = self.received.event, self.received.delivery
        opened = [event.payload, header_values(event.headers)] if event else []
        return Redactor(keep, delivery.body, *opened)

    @property
    def is_permanent(self) -> bool:
        """Return whether the failure is permanent: another attempt cannot help."""
        return isinstance(self.error, Permanent)


async def call(route: Route, part: list[ReceivedEvent], tx: Any, limit_seconds: float | None) -> None:
    """Call a handler with its events. An error of the handler becomes HandlerFailed; other errors pass unchanged."""
    events = [received.event for received in part]
    limit = asyncio.timeout(limit_seconds)
    try:
        async with limit:
            with handling([event for event in events if event]):
                await tx.call(route.handler, events if route.batch else events[0])
    except TransactionLost:
        raise
    except InvalidHandler as error:
        raise name_handler(route, part[0], error) from error
    except (Exception, asyncio.CancelledError) as error:
        if isinstance(error, asyncio.CancelledError) and _being_cancelled():
            raise
        if limit.expired():
            late = TimeoutError(f"took longer than handler_timeout_seconds = {limit_seconds}")
            late.__cause__ = error
            raise HandlerFailed(part[0], late, DeadLetterReason.PROCESSING_TIMEOUT) from error
        raise HandlerFailed(part[0], error, DeadLetterReason.MAX_RETRIES_EXCEEDED) from error


def name_handler(route: Route, received: ReceivedEvent, error: InvalidHandler) -> InvalidHandler:
    """Return an error that names the handler and the event."""
    return InvalidHandler(f"the handler {route.name} {error}; the event was {received.event_type} {received.event_id}")


def _being_cancelled() -> bool:
    """Return whether the current task is being cancelled.

    Otherwise the handler awaited a cancelled task, and failed.
    """
    task = asyncio.current_task()
    return task is not None and task.cancelling() > 0
