"""Steps with a condition: decided once from the state, journaled as skipped, and never compensated."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import pytest

from outrider.errors import InvalidHandler, UsageError
from outrider.saga import Saga, StepRejected
from outrider.saga.definition.steps import Step
from outrider.saga.model import Phase, Status, StepStatus
from outrider.saga.planner.actions import ApplyReply, Outage
from outrider.testing import SagaHarness
from tests.support.planner_case import Case, call, described, local, request, sleep, wait
from tests.support.saga_shop import ONCE


@dataclass
class Trip:
    abroad: bool = False
    visa: str | None = None


def conditional(step: Step, decide: Callable[[Any], bool], block: int | None = None) -> Step:
    return replace(step, when=decide, block=block)


def never(state: Any) -> bool:
    return False


def broken(state: Any) -> bool:
    raise KeyError("passport")


def case_of(*groups: Step | list[Step]) -> Case:
    """Return a case whose definition computes conditions from the stored state."""
    case = Case(sleep("first"), *groups)

    def compute(function: Callable[[Any], Any], stored: bytes) -> Any:
        try:
            return function(json.loads(stored))
        except KeyError as error:
            raise InvalidHandler(f"raised KeyError: {error}") from error

    case.definition = replace(case.definition, compute=compute)
    case.advance(seconds=10)
    return case


@pytest.mark.parametrize("kind", [local, call, request, wait, sleep])
def test_a_step_of_any_kind_is_skipped_and_its_followers_go_on(kind: Callable[[str], Step]) -> None:
    case = case_of(conditional(kind("a"), never), call("b"))
    assert described(case.plan) == ["call b action 1"]
    assert (case.progress("a"), case.entry("a").started_at, case.entry("a").attempts) == (StepStatus.SKIPPED, None, 0)
    assert case.succeeds("b").instance.last_error is None
    assert (case.status, case.attention) == (Status.COMPLETED, False)


def test_a_skipped_step_is_not_compensated() -> None:
    case = case_of(local("a"), conditional(request("b"), never), call("c", attempts=1))
    case.succeeds("a")
    case.declines("c")
    assert case.compensated() == ["a"]


def test_a_decision_is_taken_once_whatever_the_condition_says_later() -> None:
    answers = [True]
    case = case_of(conditional(request("a"), lambda state: answers.pop()), call("b"))
    case.loses_worker(2)
    assert described(case.answer("yes", "a")) == ["call b action 1"]
    assert not answers


def test_a_decision_stands_for_a_step_that_has_waited_in_vain_for_its_service() -> None:
    answers = [True]
    case = case_of(call("a"), conditional(call("b"), lambda state: answers.pop()))
    case.outages = {("b", Phase.ACTION): Outage("503", 5)}
    case.succeeds("a")
    assert (case.progress("b"), answers) == (StepStatus.RETRYING, [])
    case.advance(seconds=86_400)
    assert case.progress("b") is StepStatus.FAILED
    case.outages = {}
    assert described(case.order("retry")) == ["call b action 1"]


def test_a_saga_whose_last_step_is_skipped_is_completed() -> None:
    assert case_of(conditional(call("a"), never)).status is Status.COMPLETED


def test_a_condition_waits_for_the_state_that_a_reply_changes_in_the_same_turn() -> None:
    seen: list[Any] = []

    def is_paid(state: Any) -> bool:
        seen.append(state)
        return bool(state["paid"])

    case = case_of(replace(request("a"), reply_functions={"yes": lambda *_: None}), conditional(call("b"), is_paid))
    plan = case.answer("yes", "a")
    assert [type(action) for action in plan.actions] == [ApplyReply]
    assert (plan.release, plan.wake_seconds, seen) == (False, 0.0, [])
    case.stored.instance = replace(case.stored.instance, state=b'{"paid": true}')
    assert described(case.advance()) == ["call b action 1"]
    assert seen == [{"paid": True}]


def test_a_condition_that_raises_waits_for_a_person_and_is_computed_again_after_retry() -> None:
    case = case_of(conditional(call("a"), broken), call("b"))
    assert (case.status, case.attention, case.progress("a")) == (Status.FAILED, True, StepStatus.FAILED)
    [text] = case.plan.attention
    assert "condition broken raised KeyError: 'passport'" in text
    assert "then retry the saga" in text
    assert case.order("retry").instance.status is Status.FAILED, "the condition is still wrong"
    steps = {**case.definition.steps, "a": replace(case.definition.steps["a"], when=never)}
    case.definition = replace(case.definition, steps=steps)
    assert described(case.order("retry")) == ["call b action 1"]
    assert case.progress("a") is StepStatus.SKIPPED


def test_the_error_of_a_condition_is_written_without_values_of_the_state() -> None:
    case = case_of(conditional(call("a"), broken))
    case.stored.instance = replace(case.stored.instance, state=b'{"document": "passport"}')
    case.order("retry")
    [error] = [entry.error for entry in case.plan.entries]
    assert error is not None
    assert "condition broken raised KeyError: '***'" in error


def test_a_step_whose_condition_raised_is_not_compensated() -> None:
    case = case_of(local("a"), conditional(call("b"), broken))
    case.succeeds("a")
    case.order("compensate")
    assert case.compensated() == ["a"]


def test_a_condition_that_returns_no_bool_is_a_fault() -> None:
    case = case_of(conditional(call("a"), lambda state: None))  # type: ignore[arg-type,return-value]
    assert "returned a NoneType; return True or False" in (case.entry("a").error or "")


def test_the_condition_of_a_block_is_computed_once_for_all_its_steps() -> None:
    asked: list[Any] = []

    def decide(state: Any) -> bool:
        asked.append(state)
        return True

    case = case_of([conditional(call(name), decide, 1) for name in "ab"], call("c"))
    assert described(case.plan) == ["call a action 1", "call b action 1"]
    assert len(asked) == 1


def test_a_block_is_skipped_as_a_whole_with_the_steps_that_come_later_in_it() -> None:
    case = case_of(conditional(call("a"), never, 1), conditional(call("b"), lambda state: True, 1), call("c"))
    assert described(case.plan) == ["call c action 1"]
    assert case.progress("b") is StepStatus.SKIPPED
    assert [case.entry(name).position for name in "abc"] == [2, 3, 4]


def test_a_skipped_pivot_counts_as_passed() -> None:
    case = case_of(local("a"), conditional(call("b", compensate=False, pivot=True), never), call("c", compensate=False))
    case.succeeds("a")
    case.declines("c")
    assert (case.status, case.compensated()) == (Status.FAILED, [])


def test_an_early_event_of_a_skipped_wait_is_dropped() -> None:
    case = case_of(call("a"), conditional(wait("b"), never), call("c"))
    case.deliver("event b")
    case.succeeds("a")
    assert case.messages == []


def test_no_condition_is_computed_while_a_command_to_compensate_waits() -> None:
    case = case_of([call("a"), sleep("b")], conditional(call("c"), broken))
    case.deliver("compensate")
    case.advance(seconds=10)
    assert case.status is Status.RUNNING
    case.succeeds("a")
    assert case.compensated() == ["a"]
    assert ("c", Phase.ACTION) not in case.stored.journal


def trip_saga() -> Saga[Trip]:
    trip = Saga("trip", Trip)
    visa = trip.request(*("visa.ask",), topic="visa", reply="visa.given", name="visa", when=lambda state: state.abroad)

    @visa.on("visa.given")
    def given(context: Any, reply: Any) -> None:
        context.state.visa = reply.payload["number"]

    def has_visa(state: Trip) -> bool:
        return state.visa is not None

    @trip.call(when=has_visa, retry=ONCE)
    async def stamp(context: Any) -> None:
        if context.state.visa == "forged":
            raise StepRejected("forged")

    return trip


async def test_the_harness_shows_skipped_steps_and_explain_tells_them() -> None:
    harness = SagaHarness(trip := trip_saga())
    await harness.start(trip, Trip(), "A-7")
    seen = await harness.saga("A-7")
    assert (seen.status, seen.steps) == (Status.COMPLETED, {"visa": StepStatus.SKIPPED, "stamp": StepStatus.SKIPPED})
    assert "skipped, because the condition (when=) was false: visa, stamp" in seen.reasons


async def test_a_condition_sees_what_the_reply_before_it_has_written() -> None:
    harness = SagaHarness(trip := trip_saga())
    await harness.start(trip, Trip(abroad=True), "A-7")
    await harness.reply("visa", {"number": "V-1"})
    assert (await harness.saga("A-7")).steps == {"visa": StepStatus.DONE, "stamp": StepStatus.DONE}


async def test_a_condition_cannot_change_the_state() -> None:
    trip = Saga("trip", Trip)

    def forget(state: Trip) -> bool:
        state.visa = "changed"
        return True

    trip.sleep(seconds=1, name="nap", when=forget)
    harness = SagaHarness(trip)
    await harness.start(trip, Trip(), "A-7")
    await harness.advance(seconds=1)
    assert (await harness.saga("A-7")).state == Trip()


def test_a_condition_is_checked_where_it_is_written() -> None:
    trip = Saga("trip", Trip)

    async def slow(state: Trip) -> bool:
        return True

    with pytest.raises(UsageError, match=r"test_conditional_steps.py:\d+: .*slow is async, and may only compute"):
        trip.sleep(seconds=1, name="nap", when=slow)  # type: ignore[arg-type]
    with pytest.raises(UsageError, match=r"cannot be called with \(state\)"), trip.parallel(when=lambda: True):  # type: ignore[arg-type,misc]
        pass
    with (
        pytest.raises(UsageError, match="give the when= to each step, or to the block alone"),
        trip.parallel(when=never),
    ):
        trip.sleep(seconds=1, name="nap", when=never)


async def test_a_parallel_block_is_skipped_through_the_definition() -> None:
    trip = Saga("trip", Trip)
    with trip.parallel(when=lambda state: state.abroad):
        trip.sleep(seconds=1, name="nap")
        passport = trip.call(name="passport")(stamp_it)
        passport.compensate()(stamp_it)
    trip.call(name="pack")(stamp_it)
    harness = SagaHarness(trip)
    await harness.start(trip, Trip(), "A-7")
    skipped, done = StepStatus.SKIPPED, StepStatus.DONE
    assert (await harness.saga("A-7")).steps == {"nap": skipped, "passport": skipped, "pack": done}


async def stamp_it(context: Any) -> None: ...
