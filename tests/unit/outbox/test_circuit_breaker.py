"""The difference between an outage and a poison message."""

from __future__ import annotations

import pytest

from outrider.circuit_breaker import CircuitBreaker
from outrider.outbox.circuit_breaker import STRIKES, CircuitBreakers, PoisonDetector
from tests.support.outbox_rows import staged

ONE, TWO, THREE = (staged(number).event_id for number in (1, 2, 3))


def fail_isolated(breakers: CircuitBreakers, position: int, destination: str = "") -> None:
    breakers.fail(destination, [staged(position)], "closed", 0.0, isolated=True)


def test_a_failure_opens_the_breaker_and_a_passed_probe_closes_it() -> None:
    breaker = CircuitBreaker()
    breaker.open("closed", 10.0)
    assert breaker.is_open
    assert breaker.retry_at == 10.5
    breaker.close()
    assert not breaker.is_open


def test_a_failure_that_hits_several_proves_nothing_about_any_of_them() -> None:
    detector = PoisonDetector()
    detector.failed([staged(1), staged(2)], isolated=False)
    detector.probe_passed()
    detector.confirmed(THREE)
    assert not detector.strikes


def test_all_unresolved_events_are_suspects() -> None:
    breakers = CircuitBreakers()
    breakers.fail("orders", [staged(1), staged(2)], "closed", 0.0, isolated=False)
    assert [breakers.is_suspect(event_id) for event_id in (ONE, TWO, THREE)] == [True, True, False]


def test_an_isolated_failure_is_a_strike_once_a_probe_succeeds() -> None:
    detector = PoisonDetector()
    detector.failed([staged(1)], isolated=True)
    assert not detector.strikes
    detector.probe_passed()
    assert detector.strikes == {ONE: 1}


def test_an_isolated_failure_is_a_strike_once_another_event_is_confirmed() -> None:
    detector = PoisonDetector()
    detector.failed([staged(1)], isolated=True)
    detector.confirmed(TWO)
    assert detector.strikes == {ONE: 1}


def test_a_probe_and_a_confirmed_event_make_one_strike_of_one_failure() -> None:
    detector = PoisonDetector()
    detector.failed([staged(1)], isolated=True)
    detector.probe_passed()
    detector.confirmed(TWO)
    assert detector.strikes == {ONE: 1}


def test_a_failed_probe_drops_every_unproven_failure_because_it_is_an_outage() -> None:
    breakers = CircuitBreakers()
    fail_isolated(breakers, 1)
    breakers.probe_failed("", "down", 1.0)
    breakers.probe_passed("")
    breakers.confirmed("", TWO)
    assert not breakers.get("").detector.strikes


def test_a_probe_proves_nothing_after_several_isolated_failures() -> None:
    detector = PoisonDetector()
    detector.failed([staged(1)], isolated=True)
    detector.failed([staged(2)], isolated=True)
    detector.probe_passed()
    assert not detector.strikes


def test_a_confirmed_event_proves_all_isolated_failures() -> None:
    detector = PoisonDetector()
    detector.failed([staged(1)], isolated=True)
    detector.failed([staged(2)], isolated=True)
    detector.confirmed(THREE)
    assert detector.strikes == {ONE: 1, TWO: 1}


def test_three_strikes_make_an_event_poison() -> None:
    breakers = CircuitBreakers()
    for strike in range(1, STRIKES + 1):
        assert breakers.poison_error(ONE) is None
        fail_isolated(breakers, 1)
        breakers.probe_passed("")
        assert breakers.get("").detector.strikes[ONE] == strike
    assert breakers.get("").detector.is_poison(ONE)
    assert breakers.poison_error(ONE) == "closed"


def test_a_confirmed_event_is_cleared_of_everything() -> None:
    breakers = CircuitBreakers()
    fail_isolated(breakers, 1)
    breakers.probe_passed("")
    breakers.confirmed("", ONE)
    assert not breakers.is_suspect(ONE)
    assert breakers.isolated_failures(ONE) == 0
    breakers.confirmed("", TWO)
    assert not breakers.get("").detector.strikes


def test_probes_back_off_to_the_cap_and_start_anew_after_a_success() -> None:
    breaker = CircuitBreaker(base_seconds=1, cap_seconds=5)
    waits = []
    for _ in range(5):
        breaker.open("down", 0.0)
        waits.append(breaker.retry_at)
    assert waits == [1, 2, 4, 5, 5]
    breaker.reset()
    breaker.open("down", 0.0)
    assert breaker.retry_at == 1


def test_a_very_long_outage_does_not_overflow() -> None:
    breaker = CircuitBreaker(failures=100_000)
    breaker.open("down", 0.0)
    assert breaker.retry_at == breaker.cap_seconds


@pytest.mark.parametrize(("down", "closed"), [("orders", "mails"), ("mails", "orders")])
def test_a_destination_is_down_by_itself(down: str, closed: str) -> None:
    breakers = CircuitBreakers()
    breakers.fail(down, [], "down", 0.0, isolated=False)
    assert breakers.is_open(down)
    assert not breakers.is_open(closed)
    assert not breakers.is_open("")
    assert [name for name, _ in breakers.open_breakers()] == [down]


def test_when_the_connection_is_down_every_destination_is() -> None:
    breakers = CircuitBreakers()
    breakers.fail("", [], "down", 0.0, isolated=False)
    assert breakers.is_open("orders")
    assert breakers.is_open("")


def test_a_confirmed_event_at_one_destination_proves_nothing_about_another() -> None:
    breakers = CircuitBreakers()
    fail_isolated(breakers, 1, "orders")
    breakers.confirmed("mails", TWO)
    assert not breakers.get("orders").detector.strikes


def test_events_with_the_fewest_isolated_failures_go_first_whatever_was_proved() -> None:
    breakers = CircuitBreakers()
    fail_isolated(breakers, 1)
    fail_isolated(breakers, 1)
    fail_isolated(breakers, 2)
    assert sorted((ONE, TWO, THREE), key=breakers.isolated_failures) == [THREE, TWO, ONE]


def test_lost_lanes_take_their_suspects_with_them() -> None:
    breakers = CircuitBreakers()
    breakers.fail("", [staged(1, lane=1), staged(2, lane=2)], "closed", 0.0, isolated=False)
    breakers.clear_lanes({1})
    assert not breakers.is_suspect(ONE)
    assert breakers.is_suspect(TWO)


def test_healthy_destinations_are_dropped() -> None:
    breakers = CircuitBreakers()
    fail_isolated(breakers, 1, "orders")
    breakers.probe_passed("orders")
    assert not breakers.is_healthy
    breakers.confirmed("orders", ONE)
    assert breakers.is_healthy


def test_a_group_of_suspects_doubles_after_a_success_and_halves_after_a_failure() -> None:
    breakers = CircuitBreakers()
    breakers.fail("orders", [staged(1), staged(2)], "closed", 0.0, isolated=False)
    sizes = [breakers.group_size(ONE)]
    for _ in range(3):
        breakers.probe_passed("orders")
        breakers.grow(["orders"])
        sizes.append(breakers.group_size(ONE))
    breakers.fail("orders", [staged(1), staged(2)], "closed", 0.0, isolated=False)
    assert [*sizes, breakers.group_size(ONE)] == [1, 2, 4, 8, 4]


def test_a_suspect_that_failed_alone_stays_alone() -> None:
    breakers = CircuitBreakers()
    breakers.fail("", [staged(2)], "closed", 0.0, isolated=False)
    fail_isolated(breakers, 1)
    breakers.grow([""])
    assert [breakers.group_size(event_id) for event_id in (ONE, TWO)] == [1, 2]


def test_an_outage_that_every_worker_reports_is_one_failure() -> None:
    breakers = CircuitBreakers(base_seconds=1)
    waits = [breakers.fail("", [staged(n)], "down", 0.0, isolated=False) for n in range(1, 5)]
    assert waits == [1, 1, 1, 1]
    assert breakers.probe_failed("", "down", 1.0) == 2


def test_a_report_of_a_publish_from_before_the_probe_does_not_open_the_breaker_again() -> None:
    breakers = CircuitBreakers(base_seconds=1)
    breakers.fail("", [staged(1)], "down", 5.0, isolated=False, began=0.0)
    breakers.probe_passed("", 6.0)
    breakers.fail("", [staged(2)], "down", 6.5, isolated=False, began=2.0)
    assert not breakers.is_open("")
    assert breakers.is_suspect(TWO)
    breakers.fail("", [staged(3)], "down", 8.0, isolated=False, began=7.0)
    assert breakers.is_open("")


def test_a_destination_without_an_answer_is_stopped_until_the_answer_and_no_other_is() -> None:
    breakers = CircuitBreakers()
    breakers.unanswered("orders", 2, 0.0)
    assert (breakers.is_stopped("orders"), breakers.is_stopped("mails"), breakers.is_open("orders")) == (
        True,
        False,
        False,
    )
    assert not breakers.is_healthy
    breakers.answered("orders", 1)
    assert breakers.is_stopped("orders")
    breakers.answered("orders", 1)
    assert not breakers.is_stopped("orders")


def test_the_wait_for_an_answer_grows_with_the_time_that_has_passed() -> None:
    breakers = CircuitBreakers(base_seconds=0.5)
    breakers.unanswered("orders", 1, 10.0)
    assert [breakers.wait_seconds("orders", now) for now in (10.0, 11.0, 13.0)] == [0.5, 1.0, 3.0]
    breakers.answered("orders", 1)
    assert breakers.wait_seconds("orders", 1e9) == 0.5


def test_a_destination_is_half_open_from_its_failure_to_its_first_confirmed_message() -> None:
    breakers = CircuitBreakers()
    breakers.fail("orders", [staged(1)], "down", 0.0, isolated=False)
    breakers.probe_passed("orders")
    assert breakers.is_half_open("orders")
    assert breakers.half_open_group_size("orders", TWO) == 1
    breakers.confirmed("orders", ONE)
    assert not breakers.is_half_open("orders")


def test_the_connection_is_probed_more_often_than_a_destination() -> None:
    breakers = CircuitBreakers(base_seconds=1, cap_seconds=30)
    for name, longest in (("", 4), ("orders", 30)):
        assert max(breakers.probe_failed(name, "down", 0.0) for _ in range(9)) == longest
