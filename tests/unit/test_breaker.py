"""Telling an outage from a poison message."""

from __future__ import annotations

import pytest

from outrider.outbox.breaker import STRIKES, Breaker, Breakers
from tests.unit.build import staged

ONE, TWO, THREE = (staged(number).event_id for number in (1, 2, 3))


def fails_alone(breaker: Breaker, position: int) -> None:
    breaker.fault([staged(position)], "closed", 0.0, alone=True)


def test_a_fault_opens_the_breaker_and_a_passed_probe_closes_it() -> None:
    breaker = Breaker()
    breaker.fault([staged(1)], "closed", 10.0, alone=False)
    assert breaker.open
    assert breaker.retry_at == 10.5
    breaker.probe_passed()
    assert not breaker.open


def test_a_fault_that_hits_several_is_a_verdict_on_none_of_them() -> None:
    breaker = Breaker()
    breaker.fault([staged(1), staged(2)], "closed", 0.0, alone=False)
    breaker.probe_passed()
    breaker.confirmed(THREE)
    assert not breaker.strikes


def test_everything_unresolved_is_a_suspect() -> None:
    breakers = Breakers()
    breakers.get("orders").fault([staged(1), staged(2)], "closed", 0.0, alone=False)
    assert [breakers.suspected(event_id) for event_id in (ONE, TWO, THREE)] == [True, True, False]


def test_a_lone_failure_is_a_strike_once_a_probe_succeeds() -> None:
    breaker = Breaker()
    fails_alone(breaker, 1)
    assert not breaker.strikes
    breaker.probe_passed()
    assert breaker.strikes == {ONE: 1}


def test_a_lone_failure_is_a_strike_once_a_neighbour_is_confirmed() -> None:
    breaker = Breaker()
    fails_alone(breaker, 1)
    breaker.confirmed(TWO)
    assert breaker.strikes == {ONE: 1}


def test_a_probe_and_a_neighbour_make_one_strike_of_one_failure() -> None:
    breaker = Breaker()
    fails_alone(breaker, 1)
    breaker.probe_passed()
    breaker.confirmed(TWO)
    assert breaker.strikes == {ONE: 1}


def test_a_probe_that_fails_clears_everybody_because_it_is_an_outage() -> None:
    breaker = Breaker()
    fails_alone(breaker, 1)
    breaker.probe_failed("down", 1.0)
    breaker.probe_passed()
    breaker.confirmed(TWO)
    assert not breaker.strikes


def test_a_probe_proves_nothing_while_several_stand_accused() -> None:
    breaker = Breaker()
    fails_alone(breaker, 1)
    fails_alone(breaker, 2)
    breaker.probe_passed()
    assert not breaker.strikes


def test_a_neighbour_proves_it_for_all_who_stand_accused() -> None:
    breaker = Breaker()
    fails_alone(breaker, 1)
    fails_alone(breaker, 2)
    breaker.confirmed(THREE)
    assert breaker.strikes == {ONE: 1, TWO: 1}


def test_three_strikes_make_an_event_guilty() -> None:
    breakers = Breakers()
    breaker = breakers.get("")
    for strike in range(1, STRIKES + 1):
        assert breakers.guilty(ONE) is None
        fails_alone(breaker, 1)
        breaker.probe_passed()
        assert breaker.strikes[ONE] == strike
    assert breakers.guilty(ONE) == "closed"


def test_an_event_that_gets_through_is_cleared_of_everything() -> None:
    breaker = Breaker()
    fails_alone(breaker, 1)
    breaker.probe_passed()
    breaker.confirmed(ONE)
    assert not breaker.suspects
    assert not breaker.strikes
    assert not breaker.accused


def test_probes_back_off_to_the_cap_and_start_anew_after_a_success() -> None:
    breaker = Breaker(base_seconds=1, cap_seconds=5)
    waits = []
    for _ in range(5):
        breaker.probe_failed("down", 0.0)
        waits.append(breaker.retry_at)
    assert waits == [1, 2, 4, 5, 5]
    breaker.confirmed(ONE)
    breaker.probe_failed("down", 0.0)
    assert breaker.retry_at == 1


def test_a_very_long_outage_does_not_overflow() -> None:
    breaker = Breaker(failures=100_000)
    breaker.probe_failed("down", 0.0)
    assert breaker.retry_at == breaker.cap_seconds


@pytest.mark.parametrize(("down", "closed"), [("orders", "mails"), ("mails", "orders")])
def test_a_destination_is_down_by_itself(down: str, closed: str) -> None:
    breakers = Breakers()
    breakers.get(down).fault([], "down", 0.0, alone=False)
    assert breakers.open(down)
    assert not breakers.open(closed)
    assert not breakers.open("")
    assert [name for name, _ in breakers.waiting()] == [down]


def test_when_the_connection_is_down_every_destination_is() -> None:
    breakers = Breakers()
    breakers.get("").fault([], "down", 0.0, alone=False)
    assert breakers.open("orders")
    assert breakers.open("")


def test_a_message_that_got_through_to_one_destination_says_nothing_of_another() -> None:
    breakers = Breakers()
    fails_alone(breakers.get("orders"), 1)
    breakers.confirmed("mails", TWO)
    assert not breakers.get("orders").strikes


def test_those_with_the_fewest_falls_go_first_whatever_was_proved() -> None:
    breakers = Breakers()
    fails_alone(breakers.get(""), 1)
    fails_alone(breakers.get(""), 1)
    fails_alone(breakers.get(""), 2)
    assert sorted((ONE, TWO, THREE), key=breakers.falls) == [THREE, TWO, ONE]


def test_lanes_that_are_lost_take_their_suspects_with_them() -> None:
    breakers = Breakers()
    breaker = breakers.get("")
    breaker.fault([staged(1, lane=1), staged(2, lane=2)], "closed", 0.0, alone=False)
    breakers.forget_lanes({1})
    assert not breakers.suspected(ONE)
    assert breakers.suspected(TWO)


def test_breakers_with_nothing_left_to_watch_are_dropped() -> None:
    breakers = Breakers()
    fails_alone(breakers.get("orders"), 1)
    breakers.get("orders").probe_passed()
    assert not breakers.calm
    breakers.confirmed("orders", ONE)
    assert breakers.calm
