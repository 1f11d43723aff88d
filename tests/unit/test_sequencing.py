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


def arrival(sequence: int | None, **said: Any) -> ReceivedEvent:
    stream = InboxStream("orders", "A")
    return ReceivedEvent(UUID(int=1), None, "", stream, sequence, Delivery("orders", b"A", b""), **said)


def at(seen: int | None = None, cause: InboxBlockReason | None = None, waiting: int = 0) -> StreamState:
    return StreamState(seen, cause, waiting)


TURNS = [
    # Without a gate numbers mean nothing.
    ({}, arrival(3), at(), at()),
    ({}, arrival(3), at(seen=9), at(seen=9)),
    ({}, arrival(None), at(), at()),
    # A monotonic gate takes anything newer, and what has no number.
    (MONOTONIC, arrival(3), at(), at(seen=3)),
    (MONOTONIC, arrival(9), at(seen=3), at(seen=9)),
    (MONOTONIC, arrival(None), at(seen=3), at(seen=3)),
    # A strict gate takes the next one; in a stream it has not met, the first one it sees or number one.
    (STRICT, arrival(7, **OURS), at(), at(seen=7)),
    (STRICT, arrival(8, **OURS), at(seen=7), at(seen=8)),
    (FROM_ONE, arrival(1, **OURS), at(), at(seen=1)),
    (FROM_ONE, arrival(8, **OURS), at(seen=7), at(seen=8)),
    # The marker of a skipped event counts as that event, and needs no other proof that it is ours.
    (STRICT, arrival(8, skipped=True), at(seen=7), at(seen=8)),
    # Those that came early go when the one they waited for has come.
    (STRICT, arrival(8, **OURS), at(7, EARLY, 2), at(8, DRAINING, 2)),
    (STRICT, arrival(8, waiting_id=1, **OURS), at(7, DRAINING, 2), at(8, DRAINING, 2)),
    # A replayed event is late by design, and moves nothing.
    (STRICT, arrival(3, replayed=True, **OURS), at(seen=7), at(seen=7)),
    (STRICT, arrival(3, replayed=True, **OURS), at(), at()),
    (FROM_ONE, arrival(1, replayed=True, **OURS), at(), at(seen=1)),
]

DROPS = [
    (MONOTONIC, arrival(3), at(seen=3)),
    (MONOTONIC, arrival(2), at(seen=3)),
    (MONOTONIC, arrival(9, skipped=True), at(seen=3)),
    ({}, arrival(9, skipped=True), at()),
    (STRICT, arrival(7, **OURS), at(seen=7)),
    (STRICT, arrival(1, skipped=True), at(seen=7)),
]

WAITS = [
    # Early: the stream remembers what it waits for.
    (STRICT, arrival(9, **OURS), at(seen=7), at(7, EARLY, 1)),
    (STRICT, arrival(10, **OURS), at(7, EARLY, 1), at(7, EARLY, 2)),
    (FROM_ONE, arrival(2, **OURS), at(), at(0, EARLY, 1)),
    (STRICT, arrival(9, skipped=True), at(seen=7), at(7, EARLY, 1)),
    # Behind a dead letter, or behind those that drain, everything waits, whatever the gate.
    *(
        (gate, arrival(8, **OURS), at(7, cause, 2), at(7, cause, 3))
        for gate, cause in product(({}, MONOTONIC, STRICT), (HELD, DRAINING))
    ),
    ({}, arrival(None), at(None, HELD, 0), at(None, HELD, 1)),
    # One that waited already and is still early goes on waiting, and is not counted again.
    (STRICT, arrival(9, waiting_id=1, **OURS), at(7, DRAINING, 2), at(7, EARLY, 2)),
]

STALLS = [
    (STRICT, arrival(9, **OURS), at(7, EARLY, 3)),
    ({}, arrival(None), at(None, HELD, 3)),
]

REFUSALS = [arrival(None), arrival(8), arrival(None, **OURS)]


def decided(settings: dict[str, Any], arrival: ReceivedEvent, standing: StreamState) -> tuple[Any, StreamState]:
    return decide(
        arrival, standing, ConsumerSettings(held_per_stream_max=settings.pop("held_per_stream_max", 1000), **settings)
    )


@pytest.mark.parametrize(("settings", "arrival", "before", "after"), TURNS)
def test_it_is_its_turn(
    settings: dict[str, Any], arrival: ReceivedEvent, before: StreamState, after: StreamState
) -> None:
    # If it is buried instead, the stream stays where it is; one that begins with this event has begun.
    begins = settings in (STRICT, FROM_ONE) and before.seen is None and after.seen is not None
    otherwise = before._replace(seen=(arrival.sequence or 0) - 1) if begins else before
    assert decided({**settings}, arrival, before) == (Accept(after), otherwise)


@pytest.mark.parametrize(("settings", "arrival", "before"), DROPS)
def test_it_is_dropped_and_nothing_moves(settings: dict[str, Any], arrival: ReceivedEvent, before: StreamState) -> None:
    decision, after = decided({**settings}, arrival, before)
    assert isinstance(decision, Ignored)
    assert after == before


@pytest.mark.parametrize(("settings", "arrival", "before", "after"), WAITS)
def test_it_waits(settings: dict[str, Any], arrival: ReceivedEvent, before: StreamState, after: StreamState) -> None:
    assert decided({**settings}, arrival, before) == (Held(), after)


@pytest.mark.parametrize(("settings", "arrival", "before"), STALLS)
def test_it_stays_with_the_broker_when_too_many_wait(
    settings: dict[str, Any], arrival: ReceivedEvent, before: StreamState
) -> None:
    assert decided({**settings, "held_per_stream_max": 3}, arrival, before) == (LeftWithBroker(), before)
    assert decided({**settings, "held_per_stream_max": 4}, arrival, before)[0] == Held()


@pytest.mark.parametrize("arrival", REFUSALS)
def test_a_strict_gate_refuses_what_we_did_not_number(arrival: ReceivedEvent) -> None:
    assert decided({**STRICT}, arrival, at(seen=7)) == (RejectEvent(NOT_OURS, at(seen=7)), at(seen=7))


@pytest.mark.parametrize("ordering", list(Ordering))
def test_what_returns_from_waiting_is_not_stopped_by_the_drain_it_is_part_of(ordering: Ordering) -> None:
    returning = arrival(8, waiting_id=1, **OURS)
    assert isinstance(decided({"ordering": ordering}, returning, at(7, DRAINING, 1))[0], Accept)


@pytest.mark.parametrize("ordering", list(Ordering))
def test_what_returns_from_waiting_goes_on_waiting_behind_one_that_was_buried_with_it(ordering: Ordering) -> None:
    returning = arrival(8, waiting_id=1, **OURS)
    assert decided({"ordering": ordering, "held_per_stream_max": 1}, returning, at(7, HELD, 2)) == (
        Held(),
        at(7, HELD, 2),
    )


def test_only_a_strict_gate_takes_a_number_away_and_only_one_that_is_not_ours() -> None:
    strict, monotonic = ConsumerSettings(ordering=Ordering.STRICT), ConsumerSettings(ordering=Ordering.MONOTONIC)
    assert drop_uncountable_sequence(arrival(8), strict).sequence is None
    assert drop_uncountable_sequence(arrival(8, skipped=True), strict).sequence == 8
    assert drop_uncountable_sequence(arrival(8, **OURS), strict).sequence == 8
    assert drop_uncountable_sequence(arrival(8), monotonic).sequence == 8
