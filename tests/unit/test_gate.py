"""The gate as a table: what an arrival and the place of its stream decide."""

from __future__ import annotations

from itertools import product
from typing import Any
from uuid import UUID

import pytest

from outrider.delivery import Arrival, Delivery, InboxStream
from outrider.inbox.gate import NOT_OURS, Refuse, Turn, decide, numbered
from outrider.inbox.settings import ConsumerSettings, Gate
from outrider.inbox_store import Cause, Dropped, Stalled, Standing, Waits

OURS = {"gapless": True}
STRICT, FROM_ONE = {"gate": "strict"}, {"gate": "strict", "start": "one"}
MONOTONIC: dict[str, Any] = {"gate": "monotonic"}
EARLY, HELD, DRAINING = Cause.EARLY, Cause.HELD, Cause.DRAINING


def arrival(sequence: int | None, **said: Any) -> Arrival:
    stream = InboxStream("orders", "A")
    return Arrival(UUID(int=1), None, "", stream, sequence, Delivery("orders", b"A", b""), **said)


def at(seen: int | None = None, cause: Cause | None = None, waiting: int = 0) -> Standing:
    return Standing(seen, cause, waiting)


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


def decided(settings: dict[str, Any], arrival: Arrival, standing: Standing) -> tuple[Any, Standing]:
    return decide(arrival, standing, ConsumerSettings(waiting_max=settings.pop("waiting_max", 1000), **settings))


@pytest.mark.parametrize(("settings", "arrival", "before", "after"), TURNS)
def test_it_is_its_turn(settings: dict[str, Any], arrival: Arrival, before: Standing, after: Standing) -> None:
    # If it is buried instead, the stream stays where it is; one that begins with this event has begun.
    begins = settings in (STRICT, FROM_ONE) and before.seen is None and after.seen is not None
    otherwise = before._replace(seen=(arrival.sequence or 0) - 1) if begins else before
    assert decided({**settings}, arrival, before) == (Turn(after), otherwise)


@pytest.mark.parametrize(("settings", "arrival", "before"), DROPS)
def test_it_is_dropped_and_nothing_moves(settings: dict[str, Any], arrival: Arrival, before: Standing) -> None:
    decision, after = decided({**settings}, arrival, before)
    assert isinstance(decision, Dropped)
    assert after == before


@pytest.mark.parametrize(("settings", "arrival", "before", "after"), WAITS)
def test_it_waits(settings: dict[str, Any], arrival: Arrival, before: Standing, after: Standing) -> None:
    assert decided({**settings}, arrival, before) == (Waits(), after)


@pytest.mark.parametrize(("settings", "arrival", "before"), STALLS)
def test_it_stays_with_the_broker_when_too_many_wait(
    settings: dict[str, Any], arrival: Arrival, before: Standing
) -> None:
    assert decided({**settings, "waiting_max": 3}, arrival, before) == (Stalled(), before)
    assert decided({**settings, "waiting_max": 4}, arrival, before)[0] == Waits()


@pytest.mark.parametrize("arrival", REFUSALS)
def test_a_strict_gate_refuses_what_we_did_not_number(arrival: Arrival) -> None:
    assert decided({**STRICT}, arrival, at(seen=7)) == (Refuse(NOT_OURS, at(seen=7)), at(seen=7))


@pytest.mark.parametrize("gate", list(Gate))
def test_what_returns_from_waiting_is_not_stopped_by_the_drain_it_is_part_of(gate: Gate) -> None:
    returning = arrival(8, waiting_id=1, **OURS)
    assert isinstance(decided({"gate": gate}, returning, at(7, DRAINING, 1))[0], Turn)


@pytest.mark.parametrize("gate", list(Gate))
def test_what_returns_from_waiting_goes_on_waiting_behind_one_that_was_buried_with_it(gate: Gate) -> None:
    returning = arrival(8, waiting_id=1, **OURS)
    assert decided({"gate": gate, "waiting_max": 1}, returning, at(7, HELD, 2)) == (Waits(), at(7, HELD, 2))


def test_only_a_strict_gate_takes_a_number_away_and_only_one_that_is_not_ours() -> None:
    strict, monotonic = ConsumerSettings(gate=Gate.STRICT), ConsumerSettings(gate=Gate.MONOTONIC)
    assert numbered(arrival(8), strict).sequence is None
    assert numbered(arrival(8, skipped=True), strict).sequence == 8
    assert numbered(arrival(8, **OURS), strict).sequence == 8
    assert numbered(arrival(8), monotonic).sequence == 8
