"""The deadline of a saga: before the pivot it compensates, after the pivot it goes on and is reported."""

from __future__ import annotations

from dataclasses import dataclass, replace
from datetime import timedelta
from typing import Any

import pytest

from outrider.errors import UsageError
from outrider.saga import Saga
from outrider.saga.definition.steps import Step
from outrider.saga.diagram import mermaid
from outrider.saga.model import Phase, Status, StepStatus
from outrider.saga.planner.actions import Outage
from outrider.telemetry.events import SagaNeedsAttention
from outrider.testing import SagaHarness
from tests.support.planner_case import Case, call, described, local, request, sleep, wait
from tests.support.stored_saga import EPOCH


@dataclass
class Trip:
    trip_id: str = "A-7"


def case_of(*groups: Step | list[Step], seconds: float = 60) -> Case:
    """Return a case with a deadline, with its first step just started."""
    case = Case(sleep("first", 1), *groups)
    case.stored.instance = replace(case.stored.instance, deadline_at=EPOCH + timedelta(seconds=seconds))
    case.advance(seconds=1)
    return case


@pytest.mark.parametrize("step", [wait("b", None), sleep("b", 1000)], ids=["wait", "sleep"])
def test_a_wait_or_a_sleep_wakes_for_the_deadline_and_the_saga_compensates(step: Step) -> None:
    case = case_of(local("a"), step)
    assert case.succeeds("a").wake_seconds == 59
    case.advance(seconds=59)
    assert (case.status, case.compensated(), case.attention) == (Status.COMPENSATING, ["a"], False)
    assert case.entry("b").error == case.stored.instance.last_error == "deadline exceeded"
    case.succeeds("a", phase=Phase.COMPENSATION)
    assert case.status is Status.COMPENSATED


def test_a_step_that_waits_for_an_unavailable_service_ends_with_the_deadline_of_the_saga() -> None:
    case = case_of(local("a"), call("b"))
    case.succeeds("a")
    while case.stored.now < EPOCH + timedelta(seconds=60):
        case.is_unavailable("b")
        assert case.status is Status.RUNNING
        case.wakes()
    assert (case.status, case.compensated()) == (Status.COMPENSATING, ["a"])


def test_an_earlier_deadline_of_a_step_comes_first() -> None:
    case = case_of(wait("a", 10))
    assert case.plan.wake_seconds == 10
    case.advance(seconds=10)
    assert (case.status, case.entry("a").error) == (Status.COMPENSATED, "nothing came within 10 s")


def test_a_call_under_way_is_awaited_and_no_further_step_starts() -> None:
    case = case_of([call("a"), wait("w", None)], call("b"))
    plan = case.advance(seconds=60)
    assert (case.status, case.progress("w"), plan.wake_seconds) == (Status.RUNNING, StepStatus.REJECTED, None)
    case.succeeds("a")
    assert (case.status, case.compensated()) == (Status.COMPENSATING, ["a"])
    assert ("b", Phase.ACTION) not in case.stored.journal


def test_the_reason_is_in_the_audit_log_even_if_no_step_waited() -> None:
    case = case_of(call("a"), call("b"))
    case.stored.now += timedelta(seconds=60)
    assert described(case.succeeds("a")) == ["call a compensation 1"]
    assert ("became compensating", "deadline exceeded") in [(note.what, note.detail) for note in case.stored.notes]


def test_a_request_whose_outcome_is_open_is_asked_again_before_the_saga_compensates() -> None:
    case = case_of(request("a"), call("b"), seconds=5)
    assert described(case.advance(seconds=10)) == []
    assert described(case.advance(seconds=2)) == ["send a action 2"]
    case.answer("yes", "a")
    assert case.compensated() == ["a"]


def test_a_reply_that_comes_with_the_deadline_to_the_last_step_completes_the_saga() -> None:
    case = case_of(request("a"))
    case.deliver("yes", "a")
    case.advance(seconds=60)
    assert case.status is Status.COMPLETED


@pytest.mark.parametrize("kind", [local, call, request])
def test_the_outcome_of_a_pivot_under_way_decides(kind: Any) -> None:
    case = case_of(local("a"), kind("b", compensate=False, pivot=True), wait("c", None))
    case.succeeds("a")
    case.advance(seconds=60)
    assert case.status is Status.RUNNING
    case.answer("yes", "b") if kind is request else case.succeeds("b")
    assert (case.status, case.progress("c"), case.compensated()) == (Status.RUNNING, StepStatus.STARTED, [])


@pytest.mark.parametrize("kind", [local, call])
def test_a_step_that_waits_for_its_service_stops_at_the_deadline(kind: Any) -> None:
    case = case_of(local("a"), kind("b"))
    case.outages = {("b", Phase.ACTION): Outage("503", 5)}
    case.succeeds("a")
    case.advance(seconds=60)
    assert (case.progress("b"), case.compensated()) == (StepStatus.REJECTED, ["a"])


def test_a_pivot_that_is_rejected_after_the_deadline_compensates() -> None:
    case = case_of(local("a"), call("b", compensate=False, pivot=True))
    case.succeeds("a")
    case.advance(seconds=60)
    case.declines("b")
    assert case.compensated() == ["a"]


def test_a_saga_after_its_pivot_goes_on_is_reported_once_and_needs_nobody_when_it_is_done() -> None:
    case = case_of(call("a", compensate=False, pivot=True), wait("b", None))
    assert case.succeeds("a").wake_seconds == 59
    plan = case.advance(seconds=59)
    assert (case.status, case.attention, plan.wake_seconds) == (Status.RUNNING, True, None)
    assert plan.attention == ("deadline exceeded after the pivot, so the saga goes on",)
    again = case.advance(seconds=100)
    assert (case.attention, again.attention, again.notes) == (True, (), ())
    case.answer("event b")
    assert (case.status, case.attention) == (Status.COMPLETED, False)


def test_a_saga_that_no_worker_ran_before_its_deadline_compensates_without_a_step() -> None:
    case = Case(wait("a", None))
    case.stored.instance = replace(case.stored.instance, deadline_at=EPOCH, status=Status.STARTED)
    case.stored.journal.clear()
    assert described(case.advance(seconds=1)) == []
    assert (case.status, case.stored.journal) == (Status.COMPENSATED, {})


def test_a_failed_saga_stays_failed_at_its_deadline_and_compensates_after_its_missing_reply() -> None:
    case = case_of(request("a"), wait("b", None))
    case.advance(seconds=10)
    case.advance(seconds=2)
    assert case.advance(seconds=10).wake_seconds is None
    case.advance(seconds=100)
    assert case.status is Status.FAILED
    case.answer("yes", "a")
    assert (case.status, case.compensated()) == (Status.COMPENSATING, ["a"])


def test_a_compensating_saga_does_not_mind_its_deadline() -> None:
    case = case_of(local("a"), request("b"), call("c", attempts=1))
    case.succeeds("a")
    case.answer("yes", "b")
    case.declines("c")
    before = case.plan.wake_seconds
    assert before == 10, "the reply to the compensation"
    case.advance(seconds=200, where=None)
    assert case.status is Status.COMPENSATING


def test_a_reply_after_the_deadline_is_handled_as_any_late_reply() -> None:
    case = case_of(local("a"), wait("b", None))
    case.succeeds("a")
    case.advance(seconds=60)
    case.answer("event b")
    assert (case.messages, case.progress("b")) == ([], StepStatus.REJECTED)


def trip_saga(**options: Any) -> Saga[Trip]:
    trip = Saga("trip", Trip, **options)

    @trip.call()
    async def book(context: Any) -> None: ...

    @book.compensate()
    async def cancel(context: Any) -> None: ...

    trip.wait("visa.granted", name="visa", pivot=True)
    trip.wait("trip.over", name="over")
    return trip


async def test_the_deadline_is_measured_from_the_start_and_kept_with_the_saga() -> None:
    harness = SagaHarness(trip := trip_saga(deadline_seconds=3600))
    await harness.start(trip, Trip(), "A-7")
    harness.sagas.find("trip", 1).deadline_seconds = 5.0  # type: ignore[union-attr]
    await harness.advance(seconds=3599)
    seen = await harness.saga("A-7")
    assert seen.status is Status.RUNNING
    assert any("it compensates if it is before its pivot at its deadline" in reason for reason in seen.reasons)
    await harness.advance(seconds=1)
    seen = await harness.saga("A-7")
    assert seen.status is Status.COMPENSATED
    assert any(reason.startswith("deadline exceeded") for reason in seen.reasons)


async def test_a_saga_that_is_late_after_its_pivot_is_reported_and_explained() -> None:
    harness = SagaHarness(trip := trip_saga(deadline_seconds=3600))
    await harness.start(trip, Trip(), "A-7")
    assert await harness.event("visa.granted", correlation_id="A-7")
    await harness.advance(seconds=3600)
    seen = await harness.saga("A-7")
    assert (seen.status, seen.needs_attention) == (Status.RUNNING, True)
    assert any(reason.endswith("after the pivot: the saga goes on") for reason in seen.reasons)
    assert [event.error for event in harness.observer.of(SagaNeedsAttention)] == [
        "deadline exceeded after the pivot, so the saga goes on"
    ]
    await harness.event("trip.over", correlation_id="A-7")
    assert (await harness.saga("A-7")).status is Status.COMPLETED


def test_a_diagram_shows_the_deadline() -> None:
    assert 'begin(["trip<br/>version 1<br/>deadline 60 min"])' in mermaid(trip_saga(deadline_seconds=3600).definition)


def test_a_deadline_is_checked_where_the_saga_is_defined() -> None:
    with pytest.raises(UsageError, match=r"test_deadline.py:\d+: deadline_seconds=0 cannot work"):
        trip_saga(deadline_seconds=0)
    trip = trip_saga(deadline_seconds=60)
    trip.sleep(60, name="rest")
    trip.check()
    late = Saga("late", Trip, deadline_seconds=60)
    late.sleep(60, name="rest")
    with pytest.raises(UsageError, match=r"rest sleeps for 60 s.*so it would always compensate; sleep for less"):
        late.check()
