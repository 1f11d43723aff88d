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


class RejectEvent(NamedTuple):
    """Strict ordering is impossible for the event."""

    error: str
    after: StreamState


Decision = Accept | RejectEvent | Ignored | Held | LeftWithBroker


def decide(received: ReceivedEvent, state: StreamState, settings: ConsumerSettings) -> tuple[Decision, StreamState]:
    """Decide about one event; return also the state of its stream if the event is held or dropped.

    >>> event = ReceivedEvent(None, None, "", None, 7, None, gapless=True)
    >>> decide(event, StreamState(seen=5), ConsumerSettings(ordering="strict"))
    (Held(), StreamState(seen=5, cause=<InboxBlockReason.EARLY: 'early'>, waiting=1))
    """
    returning = received.waiting_id is not None
    if state.cause is InboxBlockReason.DEAD_LETTER or (state.cause in settings.drains and not returning):
        assert state.cause is not None
        return _hold(state, state.cause, settings, returning=returning)
    if settings.ordering is Ordering.STRICT:
        return _strict(received, state, settings)
    if received.skipped:
        return Ignored("the marker of a skipped event"), state
    if settings.ordering is Ordering.MONOTONIC and received.sequence is not None:
        return _monotonic(received.sequence, state)
    return Accept(state), state


def drop_uncountable_sequence(received: ReceivedEvent, settings: ConsumerSettings) -> ReceivedEvent:
    """Remove a sequence that strict ordering cannot count: a discarded event would move the stream to its sequence."""
    if settings.ordering is Ordering.STRICT and not (received.gapless or received.skipped):
        return received._replace(sequence=None)
    return received


def _monotonic(sequence: int, state: StreamState) -> tuple[Decision, StreamState]:
    if state.seen is not None and sequence <= state.seen:
        return Ignored(f"number {sequence} is not above {state.seen}, the last one seen"), state
    return Accept(state._replace(seen=sequence)), state


def _strict(received: ReceivedEvent, state: StreamState, settings: ConsumerSettings) -> tuple[Decision, StreamState]:
    sequence = received.sequence
    if sequence is None or not (received.gapless or received.skipped):
        return RejectEvent(NOT_OURS, state), state
    seen = state.seen if state.seen is not None or settings.first_sequence is FirstSequence.FIRST_SEEN else 0
    # Also for a dead-lettered event: after a discard, the stream continues behind the event.
    state = state._replace(seen=seen)
    if received.replayed and (seen is None or sequence <= seen):
        return Accept(state), state
    if seen is None:
        # The stream begins here, even if this event is dead-lettered: later events must not begin the stream again.
        state = state._replace(seen=sequence - 1)
    if seen is None or sequence == seen + 1:
        # Early events were held for this event.
        return Accept(
            state._replace(seen=sequence, cause=InboxBlockReason.DRAINING if state.waiting else state.cause)
        ), state
    if sequence <= seen:
        return Ignored(f"number {sequence} is not above {seen}, the last one seen"), state
    return _hold(state, InboxBlockReason.EARLY, settings, returning=received.waiting_id is not None)


def _hold(
    state: StreamState, cause: InboxBlockReason, settings: ConsumerSettings, *, returning: bool
) -> tuple[Decision, StreamState]:
    if returning:
        return Held(), state._replace(cause=cause)
    if state.waiting >= settings.held_per_stream_max:
        return LeftWithBroker(), state
    return Held(), state._replace(cause=cause, waiting=state.waiting + 1)
