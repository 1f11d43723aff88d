"""Sequencing as a table: the decision about a received event and the state of its stream."""

from __future__ import annotations

from itertools import product
from typing import Any
from uuid import UUID

import pytest

from outrider.event import Delivery, InboxStream, ReceivedEvent
from outrider.inbox.model import Held, Ignored, InboxBlockReason, LeftWithBroker, StreamState
from outrider.inbox.sequencing import NOT_OURS, Accept, RejectEvent, decide, drop_uncountable_sequence
from outrider.inbox.settings import ConsumerSettings, Ordering

OURS = {"gapless": True}
STRICT, FROM_ONE = {"ordering": "strict"}, {"ordering": "strict", "first_sequence": "one"}
MONOTONIC: dict[str, Any] = {"ordering": "monotonic"}
EARLY, HELD, DRAINING = InboxBlockReason.EARLY, InboxBlockReason.DEAD_LETTER, InboxBlockReason.DRAINING


def received(sequence: int | None, **said: Any) -> ReceivedEvent:
    stream = InboxStream("orders", "A")
    return ReceivedEvent(UUID(int=1), None, "", stream, sequence, Delivery("orders", b"A", b""), **said)


def at(seen: int | None = None, cause: InboxBlockReason | None = None, waiting: int = 0) -> StreamState:
    return StreamState(seen, cause, waiting)


TURNS = [
    # Without ordering, numbers mean nothing.
    ({}, received(3), at(), at()),
    ({}, received(3), at(seen=9), at(seen=9)),
    ({}, received(None), at(), at()),
    # Monotonic ordering accepts anything newer, and events without a number.
    (MONOTONIC, received(3), at(), at(seen=3)),
    (MONOTONIC, received(9), at(seen=3), at(seen=9)),
    (MONOTONIC, received(None), at(seen=3), at(seen=3)),
    # Strict ordering accepts the next number; in a new stream, the first one it sees or number one.
    (STRICT, received(7, **OURS), at(), at(seen=7)),
    (STRICT, received(8, **OURS), at(seen=7), at(seen=8)),
    (FROM_ONE, received(1, **OURS), at(), at(seen=1)),
    (FROM_ONE, received(8, **OURS), at(seen=7), at(seen=8)),
    # The marker of a skipped event counts as that event, and needs no other proof that it is ours.
    (STRICT, received(8, skipped=True), at(seen=7), at(seen=8)),
    # Those that came early go when the one they waited for has come.
    (STRICT, received(8, **OURS), at(7, EARLY, 2), at(8, DRAINING, 2)),
    (STRICT, received(8, waiting_id=1, **OURS), at(7, DRAINING, 2), at(8, DRAINING, 2)),
    # A replayed event is late by design, and moves nothing.
    (STRICT, received(3, replayed=True, **OURS), at(seen=7), at(seen=7)),
    (STRICT, received(3, replayed=True, **OURS), at(), at()),
    (FROM_ONE, received(1, replayed=True, **OURS), at(), at(seen=1)),
]

DROPS = [
    (MONOTONIC, received(3), at(seen=3)),
    (MONOTONIC, received(2), at(seen=3)),
    (MONOTONIC, received(9, skipped=True), at(seen=3)),
    ({}, received(9, skipped=True), at()),
    (STRICT, received(7, **OURS), at(seen=7)),
    (STRICT, received(1, skipped=True), at(seen=7)),
]

WAITS = [
    # Early: the stream remembers what it waits for.
    (STRICT, received(9, **OURS), at(seen=7), at(7, EARLY, 1)),
    (STRICT, received(10, **OURS), at(7, EARLY, 1), at(7, EARLY, 2)),
    (FROM_ONE, received(2, **OURS), at(), at(0, EARLY, 1)),
    (STRICT, received(9, skipped=True), at(seen=7), at(7, EARLY, 1)),
    # Behind a dead letter, or behind draining events, every event waits, whatever the ordering.
    *(
        (ordering, received(8, **OURS), at(7, cause, 2), at(7, cause, 3))
        for ordering, cause in product(({}, MONOTONIC, STRICT), (HELD, DRAINING))
    ),
    ({}, received(None), at(None, HELD, 0), at(None, HELD, 1)),
    # One that waited already and is still early goes on waiting, and is not counted again.
    (STRICT, received(9, waiting_id=1, **OURS), at(7, DRAINING, 2), at(7, EARLY, 2)),
]

STALLS = [
    (STRICT, received(9, **OURS), at(7, EARLY, 3)),
    ({}, received(None), at(None, HELD, 3)),
]

REJECTIONS = [received(None), received(8), received(None, **OURS)]


def decided(settings: dict[str, Any], received: ReceivedEvent, standing: StreamState) -> tuple[Any, StreamState]:
    return decide(
        received, standing, ConsumerSettings(held_per_stream_max=settings.pop("held_per_stream_max", 1000), **settings)
    )


@pytest.mark.parametrize(("settings", "received", "before", "after"), TURNS)
def test_an_event_in_sequence_is_accepted(
    settings: dict[str, Any], received: ReceivedEvent, before: StreamState, after: StreamState
) -> None:
    # If it is dead-lettered instead, the stream stays where it is; one that begins with this event has begun.
    begins = settings in (STRICT, FROM_ONE) and before.seen is None and after.seen is not None
    otherwise = before._replace(seen=(received.sequence or 0) - 1) if begins else before
    assert decided({**settings}, received, before) == (Accept(after), otherwise)


@pytest.mark.parametrize(("settings", "received", "before"), DROPS)
def test_it_is_dropped_and_nothing_moves(
    settings: dict[str, Any], received: ReceivedEvent, before: StreamState
) -> None:
    decision, after = decided({**settings}, received, before)
    assert isinstance(decision, Ignored)
    assert after == before


@pytest.mark.parametrize(("settings", "received", "before", "after"), WAITS)
def test_it_waits(settings: dict[str, Any], received: ReceivedEvent, before: StreamState, after: StreamState) -> None:
    assert decided({**settings}, received, before) == (Held(), after)


@pytest.mark.parametrize(("settings", "received", "before"), STALLS)
def test_it_stays_with_the_broker_when_too_many_wait(
    settings: dict[str, Any], received: ReceivedEvent, before: StreamState
) -> None:
    assert decided({**settings, "held_per_stream_max": 3}, received, before) == (LeftWithBroker(), before)
    assert decided({**settings, "held_per_stream_max": 4}, received, before)[0] == Held()


@pytest.mark.parametrize("received", REJECTIONS)
def test_strict_ordering_rejects_events_without_our_sequence(received: ReceivedEvent) -> None:
    assert decided({**STRICT}, received, at(seen=7)) == (RejectEvent(NOT_OURS, at(seen=7)), at(seen=7))


@pytest.mark.parametrize("ordering", list(Ordering))
def test_a_held_event_is_not_stopped_by_its_own_drain(ordering: Ordering) -> None:
    returning = received(8, waiting_id=1, **OURS)
    assert isinstance(decided({"ordering": ordering}, returning, at(7, DRAINING, 1))[0], Accept)


@pytest.mark.parametrize("ordering", list(Ordering))
def test_a_held_event_goes_on_waiting_behind_one_that_was_dead_lettered_with_it(ordering: Ordering) -> None:
    returning = received(8, waiting_id=1, **OURS)
    assert decided({"ordering": ordering, "held_per_stream_max": 1}, returning, at(7, HELD, 2)) == (
        Held(),
        at(7, HELD, 2),
    )


def test_only_strict_ordering_drops_a_number_and_only_one_that_is_not_ours() -> None:
    strict, monotonic = ConsumerSettings(ordering=Ordering.STRICT), ConsumerSettings(ordering=Ordering.MONOTONIC)
    assert drop_uncountable_sequence(received(8), strict).sequence is None
    assert drop_uncountable_sequence(received(8, skipped=True), strict).sequence == 8
    assert drop_uncountable_sequence(received(8, **OURS), strict).sequence == 8
    assert drop_uncountable_sequence(received(8), monotonic).sequence == 8
