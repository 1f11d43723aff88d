"""The gate, purely: what to do with an arrival, given where its stream stands.

- What a dead letter holds, or what drains, goes first: everything else waits behind it, whatever the gate. That is
  true for those that drain, too, once one of them is buried and holds the stream.
- `monotonic` drops what is at or below the last one seen. An event without a number has nothing to compare.
- `strict` takes the next number, lets later ones wait, and drops earlier ones. A marker of a skipped event counts as
  that event. A replayed one was skipped before and is late by design: it passes once, by its receipt.
- What came early to a strict gate goes first, too, when the gate is another one now.
- `strict` is refused where it cannot be kept: for events that we did not number, whose gaps mean nothing.
"""

from __future__ import annotations

from typing import NamedTuple

from outrider.delivery import Arrival
from outrider.inbox.settings import ConsumerSettings, Gate, Start
from outrider.inbox_store import Cause, Dropped, Stalled, Standing, Waits

NOT_OURS = (
    "the gate is strict, and the event's sequence was not numbered by outrider, so that a gap would mean nothing; "
    'stage it with sequence="auto", or use another gate'
)


class Turn(NamedTuple):
    """It is the arrival's turn. `after` is where the stream stands once it is applied, skipped or discarded."""

    after: Standing


class Refuse(NamedTuple):
    """The gate cannot be kept for this arrival."""

    error: str
    after: Standing


Decision = Turn | Refuse | Dropped | Waits | Stalled


def decide(arrival: Arrival, at: Standing, settings: ConsumerSettings) -> tuple[Decision, Standing]:
    """Decide about one arrival; return also where the stream stands if it waits or is dropped.

    >>> event = Arrival(None, None, "", None, 7, None, gapless=True)
    >>> decide(event, Standing(seen=5), ConsumerSettings(gate="strict"))
    (Waits(), Standing(seen=5, cause=<Cause.EARLY: 'early'>, waiting=1))
    """
    returning = arrival.waiting_id is not None
    if at.cause is Cause.HELD or (at.cause in settings.drains and not returning):
        assert at.cause is not None
        return _wait(at, at.cause, settings, returning=returning)
    if settings.gate is Gate.STRICT:
        return _strict(arrival, at, settings)
    if arrival.skipped:
        return Dropped("the marker of a skipped event"), at
    if settings.gate is Gate.MONOTONIC and arrival.sequence is not None:
        return _monotonic(arrival.sequence, at)
    return Turn(at), at


def numbered(arrival: Arrival, settings: ConsumerSettings) -> Arrival:
    """Take a number away that a strict gate cannot count, or whoever discards the event would move the gate to it."""
    if settings.gate is Gate.STRICT and not (arrival.gapless or arrival.skipped):
        return arrival._replace(sequence=None)
    return arrival


def _monotonic(sequence: int, at: Standing) -> tuple[Decision, Standing]:
    if at.seen is not None and sequence <= at.seen:
        return Dropped(f"number {sequence} is not above {at.seen}, the last one seen"), at
    return Turn(at._replace(seen=sequence)), at


def _strict(arrival: Arrival, at: Standing, settings: ConsumerSettings) -> tuple[Decision, Standing]:
    sequence = arrival.sequence
    if sequence is None or not (arrival.gapless or arrival.skipped):
        return Refuse(NOT_OURS, at), at
    seen = at.seen if at.seen is not None or settings.start is Start.FIRST_SEEN else 0
    # Also for one that is buried: when it is discarded, the stream goes on behind it and not before.
    at = at._replace(seen=seen)
    if arrival.replayed and (seen is None or sequence <= seen):
        return Turn(at), at
    if seen is None:
        # The stream begins here, also if this one is buried: what comes after it must not begin it anew.
        at = at._replace(seen=sequence - 1)
    if seen is None or sequence == seen + 1:
        # Those that came early were waiting for this one.
        return Turn(at._replace(seen=sequence, cause=Cause.DRAINING if at.waiting else at.cause)), at
    if sequence <= seen:
        return Dropped(f"number {sequence} is not above {seen}, the last one seen"), at
    return _wait(at, Cause.EARLY, settings, returning=arrival.waiting_id is not None)


def _wait(at: Standing, cause: Cause, settings: ConsumerSettings, *, returning: bool) -> tuple[Decision, Standing]:
    if returning:
        return Waits(), at._replace(cause=cause)
    if at.waiting >= settings.waiting_max:
        return Stalled(), at
    return Waits(), at._replace(cause=cause, waiting=at.waiting + 1)
