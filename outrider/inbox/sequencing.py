"""Sequencing, purely: the decision about a received event, given the state of its stream.

- A stream that is blocked by a dead letter, or drains, holds every new event, with any `ordering`. The same is true for
  draining events behind an event that was dead-lettered on the way.
- `monotonic` drops events at or below the last sequence seen. An event without a sequence is accepted.
- `strict` accepts the next sequence, holds later events and drops earlier ones. The marker of a skipped event counts as
  the event. A replayed event was skipped before and is late by design: its receipt lets the event pass once.
- Events that a strict consumer has held go first when the consumer's `ordering` is no longer strict.
- `strict` rejects events that outrider did not number: a gap between their sequences has no meaning.
"""

from __future__ import annotations

from typing import NamedTuple

from outrider.event import ReceivedEvent
from outrider.inbox.model import Held, Ignored, InboxBlockReason, LeftWithBroker, StreamState
from outrider.inbox.settings import ConsumerSettings, FirstSequence, Ordering

NOT_OURS = (
    "the ordering is strict, and the event's sequence was not numbered by outrider, so that a gap would mean nothing; "
    'stage it with sequence="auto", or use another ordering'
)


class Accept(NamedTuple):
    """The event is accepted. `after` is the state of the stream once the event is applied, skipped or discarded."""

    after: StreamState


class Refuse(NamedTuple):
    """Strict ordering is impossible for the event."""

    error: str
    after: StreamState


Decision = Accept | Refuse | Ignored | Held | LeftWithBroker


def decide(received: ReceivedEvent, at: StreamState, settings: ConsumerSettings) -> tuple[Decision, StreamState]:
    """Decide about one event; return also the state of its stream if the event is held or dropped.

    >>> event = ReceivedEvent(None, None, "", None, 7, None, gapless=True)
    >>> decide(event, StreamState(seen=5), ConsumerSettings(ordering="strict"))
    (Held(), StreamState(seen=5, cause=<InboxBlockReason.EARLY: 'early'>, waiting=1))
    """
    returning = received.waiting_id is not None
    if at.cause is InboxBlockReason.DEAD_LETTER or (at.cause in settings.drains and not returning):
        assert at.cause is not None
        return _wait(at, at.cause, settings, returning=returning)
    if settings.ordering is Ordering.STRICT:
        return _strict(received, at, settings)
    if received.skipped:
        return Ignored("the marker of a skipped event"), at
    if settings.ordering is Ordering.MONOTONIC and received.sequence is not None:
        return _monotonic(received.sequence, at)
    return Accept(at), at


def numbered(received: ReceivedEvent, settings: ConsumerSettings) -> ReceivedEvent:
    """Remove a sequence that strict ordering cannot count: a discarded event would move the stream to its sequence."""
    if settings.ordering is Ordering.STRICT and not (received.gapless or received.skipped):
        return received._replace(sequence=None)
    return received


def _monotonic(sequence: int, at: StreamState) -> tuple[Decision, StreamState]:
    if at.seen is not None and sequence <= at.seen:
        return Ignored(f"number {sequence} is not above {at.seen}, the last one seen"), at
    return Accept(at._replace(seen=sequence)), at


def _strict(received: ReceivedEvent, at: StreamState, settings: ConsumerSettings) -> tuple[Decision, StreamState]:
    sequence = received.sequence
    if sequence is None or not (received.gapless or received.skipped):
        return Refuse(NOT_OURS, at), at
    seen = at.seen if at.seen is not None or settings.first_sequence is FirstSequence.FIRST_SEEN else 0
    # Also for a dead-lettered event: after a discard, the stream continues behind the event.
    at = at._replace(seen=seen)
    if received.replayed and (seen is None or sequence <= seen):
        return Accept(at), at
    if seen is None:
        # The stream begins here, even if this event is dead-lettered: later events must not begin the stream again.
        at = at._replace(seen=sequence - 1)
    if seen is None or sequence == seen + 1:
        # Early events were held for this event.
        return Accept(at._replace(seen=sequence, cause=InboxBlockReason.DRAINING if at.waiting else at.cause)), at
    if sequence <= seen:
        return Ignored(f"number {sequence} is not above {seen}, the last one seen"), at
    return _wait(at, InboxBlockReason.EARLY, settings, returning=received.waiting_id is not None)


def _wait(
    at: StreamState, cause: InboxBlockReason, settings: ConsumerSettings, *, returning: bool
) -> tuple[Decision, StreamState]:
    if returning:
        return Held(), at._replace(cause=cause)
    if at.waiting >= settings.held_per_stream_max:
        return LeftWithBroker(), at
    return Held(), at._replace(cause=cause, waiting=at.waiting + 1)
