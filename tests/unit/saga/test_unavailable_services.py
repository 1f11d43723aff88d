"""The rules for services that are down: they cost no attempt, compensate nothing, and are waited for with patience."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import replace

import pytest

from outrider.saga.definition.steps import CALL_RETRY, Step
from outrider.saga.explain import explain
from outrider.saga.model import Status, StepStatus, Uncertainty
from outrider.saga.planner.planner import Claimed, Outage
from tests.support.planner_case import ACTION, COMPENSATION, Case, call, described, local, request


def patient(step: Step, seconds: float) -> Step:
    """Return a step that waits so long for its service."""
    return replace(step, action=replace(step.action, unavailable_for_seconds=seconds))


@pytest.mark.parametrize("step", [call, local], ids=["call", "local"])
def test_an_unavailable_service_costs_no_attempt_however_often_it_is_tried(step: Callable[..., Step]) -> None:
    case = Case(step("a", attempts=2))
    for _ in range(50):
        case.is_unavailable("a")
        assert (case.entry("a").attempts, case.progress("a"), case.status) == (0, StepStatus.RETRYING, Status.RUNNING)
        case.wakes()
        assert case.entry("a").attempts == 1
    assert case.plan.instance.retry_count == 0
    case.succeeds("a")
    assert (case.status, case.entry("a").unavailable_since) == (Status.COMPLETED, None)


def test_a_step_waits_longer_and_longer_for_its_service_and_the_saga_is_released_meanwhile() -> None:
    case = Case(call("a"))
    pauses = []
    for _ in range(8):
        case.is_unavailable("a")
        pauses.append(case.plan.wake_seconds)
        case.wakes()
    assert pauses == [2, 2, 4, 8, 16, 32, 60, 60]


def test_a_service_is_not_tried_before_the_time_that_it_asked_for() -> None:
    case = Case(call("a"))
    case.is_unavailable("a", asked=500)
    assert case.plan.wake_seconds == 500


def test_an_attempt_that_fails_otherwise_counts_and_ends_the_wait() -> None:
    case = Case(call("a", attempts=2))
    case.raises("a")
    case.wakes()
    case.is_unavailable("a")
    assert case.entry("a").attempts == 1
    case.wakes()
    case.raises("a")
    assert (case.progress("a"), case.entry("a").unavailable_since) == (StepStatus.REJECTED, None)


def test_a_service_that_stays_unavailable_fails_the_step_for_an_operator_and_compensates_nothing() -> None:
    case = Case(call("a"), patient(call("b"), 100))
    case.succeeds("a")
    while case.status is Status.RUNNING:
        case.is_unavailable("b")
        if case.plan.wake_seconds is not None:
            case.wakes()
    assert (case.status, case.attention, case.compensated()) == (Status.FAILED, True, [])
    assert case.entry("b").error == "the service has been unavailable since 2030-01-01 00:00:00 UTC: 503"
    case.order("retry")
    case.succeeds("b")
    assert case.status is Status.COMPLETED


def test_the_last_look_at_a_service_comes_at_the_limit_and_not_after_it() -> None:
    case = Case(patient(call("a"), 100))
    waited = 0.0
    while case.status is not Status.FAILED:
        case.is_unavailable("a")
        if case.plan.wake_seconds is not None:
            waited += case.plan.wake_seconds
            case.wakes()
    assert waited == 100


def test_a_compensation_waits_for_its_service_too_and_then_needs_an_operator() -> None:
    compensation = replace(call("a").action, unavailable_for_seconds=10)
    case = Case(replace(call("a"), compensation=compensation), call("b"))
    case.succeeds("a")
    case.declines("b")
    case.is_unavailable("a", COMPENSATION)
    assert case.status is Status.COMPENSATING
    case.advance(seconds=10)
    case.is_unavailable("a", COMPENSATION)
    assert (case.status, case.progress("a", COMPENSATION)) == (Status.FAILED, StepStatus.FAILED)


def test_during_an_outage_a_step_that_is_reached_waits_without_an_attempt() -> None:
    case = Case(local("a"), call("b"))
    case.outages["b", ACTION] = Outage("503", 40)
    case.succeeds("a")
    entry = case.entry("b")
    assert (described(case.plan), case.plan.release, case.plan.wake_seconds) == ([], True, 40)
    assert (entry.status, entry.attempts, entry.started_at) == (StepStatus.RETRYING, 0, None)
    case.outages.clear()
    case.wakes()
    assert described(case.plan) == ["call b action 1"]


def test_during_an_outage_a_lost_worker_is_not_followed_by_another_call() -> None:
    case = Case(call("a"))
    case.outages["a", ACTION] = Outage("503", 40)
    case.advance(Claimed())
    entry = case.entry("a")
    assert (described(case.plan), entry.attempts, entry.uncertainty) == ([], 0, Uncertainty.OUTCOME_UNKNOWN)


def test_a_long_outage_adds_no_line_to_the_audit_log_for_each_look() -> None:
    case = Case(call("a"))
    case.is_unavailable("a")
    case.outages["a", ACTION] = Outage("503", 40)
    for _ in range(100):
        case.wakes()
        assert case.plan.notes == ()


def test_the_limit_counts_during_an_outage_without_a_call() -> None:
    case = Case(patient(call("a"), 100))
    case.is_unavailable("a")
    case.outages["a", ACTION] = Outage("503", 40)
    while case.status is not Status.FAILED:
        case.wakes()
    assert case.entry("a").status is StepStatus.FAILED


@pytest.mark.parametrize("pivot", [False, True])
def test_an_operator_can_give_up_a_saga_that_waits_for_a_service_and_the_service_is_not_asked_to_compensate(
    pivot: bool,
) -> None:
    case = Case(call("a"), call("b", pivot=pivot, compensate=not pivot))
    case.succeeds("a")
    case.is_unavailable("b")
    case.order("compensate")
    assert (case.compensated(), case.progress("b")) == (["a"], StepStatus.REJECTED)
    case.succeeds("a", phase=COMPENSATION)
    assert case.status is Status.COMPENSATED


@pytest.mark.parametrize("how", ["raises", "times_out"])
def test_a_step_that_failed_otherwise_before_the_outage_may_have_happened_and_is_compensated(how: str) -> None:
    case = Case(call("a", attempts=9))
    getattr(case, how)("a")
    case.wakes()
    case.is_unavailable("a")
    case.order("compensate")
    assert case.compensated() == ["a"]


def test_an_operators_retry_of_a_raised_step_does_not_forget_that_it_may_have_happened() -> None:
    case = Case(patient(call("a", attempts=1, compensate=False), 10), call("b"))
    case.raises("a")
    assert case.status is Status.FAILED
    case.order("retry")
    case.is_unavailable("a")
    assert case.entry("a").uncertainty is Uncertainty.RAISED


def test_a_step_beside_a_rejected_step_is_stopped_if_it_only_waited_for_its_service() -> None:
    case = Case([call("a"), call("b"), local("c")])
    case.is_unavailable("a")
    case.succeeds("c")
    case.declines("b")
    assert (case.progress("a"), case.compensated()) == (StepStatus.REJECTED, ["c"])


def test_retry_by_an_operator_ends_the_long_pauses() -> None:
    case = Case(call("a"))
    for _ in range(6):
        case.is_unavailable("a")
        case.wakes()
    case.is_unavailable("a")
    case.outages["a", ACTION] = Outage("503", 3)
    case.order("retry")
    assert case.plan.wake_seconds == 3


def test_explain_says_since_when_a_step_waits_for_its_service_and_when_it_is_tried_next() -> None:
    case = Case(call("a"))
    case.is_unavailable("a")
    case.advance(seconds=1)
    [said, *_] = explain(case.stored.load(), case.definition).reasons
    assert said.startswith("step a waits for an unavailable service since ")
    assert "(1.0 s ago): 503; no attempt is counted, and the next is due " in said
    assert "(in 1.0 s); an operator must decide from " in said
    [said, *_] = explain(case.stored.load()).reasons
    assert said.startswith("step a waits for an unavailable service since ")


def test_an_outage_of_an_hour_compensates_no_saga_with_default_settings_whatever_its_calls_raise() -> None:
    shortest = [CALL_RETRY.delay_seconds(attempt, _Lowest()) for attempt in range(1, CALL_RETRY.max_attempts)]
    assert sum(shortest) > 2 * 3600


class _Lowest(random.Random):
    """Draws the lowest number each time."""

    def uniform(self, a: float, b: float) -> float:
        return a


@pytest.mark.parametrize("how", ["times_out", "loses_worker"])
def test_a_rejection_after_an_unknown_outcome_is_believed_and_the_audit_log_has_the_doubt(how: str) -> None:
    case = Case(call("a"), call("b", attempts=5))
    case.succeeds("a")
    case.times_out("b") if how == "times_out" else case.loses_worker()
    if how == "times_out":
        case.wakes()
        case.raises("b")
        case.wakes()
    case.declines("b")
    assert (case.progress("b"), case.compensated()) == (StepStatus.REJECTED, ["a"])
    [note] = [note for note in case.plan.notes if note.what == "action rejected"]
    assert note.detail.startswith("no; the outcome of an earlier attempt was unknown")


def test_a_rejecting_reply_after_an_unknown_outcome_is_believed_with_the_same_doubt() -> None:
    case = Case(request("a"))
    case.advance(seconds=10)
    case.wakes()
    case.answer("no", "a")
    [note] = [note for note in case.plan.notes if note.what == "action rejected"]
    assert note.detail.startswith("answered by no; the outcome of an earlier attempt was unknown")


def test_a_rejection_after_an_error_is_believed_and_the_audit_log_says_that_it_may_have_happened() -> None:
    case = Case(call("a"))
    case.raises("a")
    case.wakes()
    case.declines("a")
    [note] = [note for note in case.plan.notes if note.what == "action rejected"]
    assert note.detail.startswith("no; an earlier attempt ended with an error, and may have happened")
    assert (case.entry("a").error, case.compensated()) == ("no", [])


@pytest.mark.parametrize("step", [call, local], ids=["call", "local"])
def test_a_rejection_leaves_no_doubt_if_no_earlier_attempt_can_have_happened(step: Callable[..., Step]) -> None:
    case = Case(step("a"))
    if step is local:
        case.raises("a")
        case.wakes()
    case.is_unavailable("a")
    case.wakes()
    case.declines("a")
    [note] = [note for note in case.plan.notes if note.what == "action rejected"]
    assert note.detail == "no"
