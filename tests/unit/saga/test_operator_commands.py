"""The rules of operator commands: a person helps a failed saga, or stops one that has not failed."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest

from outrider.saga.definition.steps import Definition, Step
from outrider.saga.model import Status, StepStatus
from outrider.saga.planner.planner import CallAction, Claimed, Plan, wanted
from tests.support.planner_case import COMPENSATION, Case, call, described, local, nothing, request, saga, sleep, wait


def test_a_failed_step_lets_what_is_under_way_here_end_and_asks_for_a_person_at_once() -> None:
    case = Case([call("a", compensate=False), call("b"), wait("c", seconds=99)], call("d"))
    plan = case.exhausts("a")
    assert (case.status, case.attention, plan.release, plan.wake_seconds) == (Status.RUNNING, True, False, None)
    plan = case.succeeds("b")
    assert (case.status, plan.release, plan.wake_seconds) == (Status.FAILED, True, None)
    assert case.progress("c") is StepStatus.STARTED


def test_a_failed_saga_is_not_moved_by_time_nor_by_replies_to_what_has_not_failed() -> None:
    case = Case([call("a", compensate=False), request("b"), wait("c")], call("d"))
    case.exhausts("a")
    before = case.entry("a"), case.entry("c")
    case.deliver("yes", "b")
    plan = case.advance(seconds=999)
    assert (case.status, case.attention, described(plan), plan.wake_seconds) == (Status.FAILED, True, [], None)
    assert (case.entry("a"), case.entry("c")) == before
    assert (case.progress("b"), case.messages) == (StepStatus.DONE, [])


@pytest.mark.parametrize("verb", ["retry", "mark_done", "compensate"])
def test_an_answer_is_read_before_an_operator_command_that_came_with_it_or_earlier_is_applied(verb: str) -> None:
    case = Case(
        call("a"),
        request("b", pivot=True, compensate=False, attempts=1, reply_functions={"yes": nothing}),
        call("c", compensate=False),
    )
    case.succeeds("a")
    case.advance(seconds=10)
    assert case.status is Status.FAILED
    case.deliver(verb)
    case.deliver("yes", "b")
    assert described(case.advance()) == ["absorb b", "call c action 1"]
    assert (case.status, case.attention, case.compensated(), case.messages) == (Status.RUNNING, False, [], [])


def test_an_answer_that_came_before_compensate_is_in_the_state_of_the_compensation() -> None:
    case = Case(request("a", reply_functions={"yes": nothing}))
    case.deliver("yes", "a")
    case.deliver("compensate")
    assert described(case.advance()) == ["absorb a", "send a compensation 1"]


def test_mark_done_that_came_with_a_rejection_of_the_failed_step_settles_nothing_else() -> None:
    case = Case(call("a"), [request("b", attempts=1), wait("c", seconds=None)])
    case.succeeds("a")
    case.advance(seconds=10)
    case.deliver("no", "b")
    plan = case.order("mark_done")
    assert (case.status, case.compensated(), case.progress("c")) == (Status.COMPENSATING, ["a"], StepStatus.REJECTED)
    assert "ignored, because no step is failed any more" in [note.detail for note in plan.notes]


def test_a_parked_saga_says_that_it_goes_on_when_retry_finds_nothing_that_failed() -> None:
    case = Case(request("a"))
    definition, case.definition = case.definition, Case(request("other")).definition
    case.advance()
    case.definition = definition
    assert case.order("retry").notes[-1].detail == "continues where it stopped"


def test_retry_gives_what_failed_a_new_budget() -> None:
    case = Case(call("a", compensate=False))
    case.exhausts("a")
    plan = case.order("retry")
    assert (case.status, case.attention, described(plan)) == (Status.RUNNING, False, ["call a action 1"])
    case.raises("a")
    assert case.progress("a") is StepStatus.RETRYING


def test_retry_after_the_pivot_tries_a_rejected_step_again() -> None:
    case = Case(call("a", pivot=True, compensate=False), call("b", compensate=False))
    case.succeeds("a")
    case.declines("b")
    assert described(case.order("retry")) == ["call b action 1"]


def test_retry_tries_failed_compensations_again() -> None:
    case = Case(call("a"), call("b"), call("c"))
    case.succeeds("a")
    case.succeeds("b")
    case.declines("c")
    case.declines("b", COMPENSATION)
    case.succeeds("a", phase=COMPENSATION)
    assert described(case.order("retry")) == ["call b compensation 1"]
    assert (case.status, case.attention) == (Status.COMPENSATING, False)
    case.succeeds("b", phase=COMPENSATION)
    assert case.status is Status.COMPENSATED


def test_retry_of_a_compensation_lets_the_one_under_way_end_first() -> None:
    case = Case(call("a"), call("b"), call("c"))
    case.succeeds("a")
    case.succeeds("b")
    case.declines("c")
    case.declines("b", COMPENSATION)
    assert described(case.order("retry")) == []
    assert described(case.succeeds("a", phase=COMPENSATION)) == ["call b compensation 1"]


def test_retry_makes_a_waiting_attempt_due_now() -> None:
    case = Case(call("a"))
    case.raises("a")
    assert described(case.order("retry")) == ["call a action 2"]


def test_compensate_compensates_what_is_done_and_what_may_have_happened() -> None:
    case = Case(call("a"), [call("b"), request("c"), local("d"), wait("e")])
    case.succeeds("a")
    case.raises("b")
    case.order("compensate")
    assert (case.status, case.compensated()) == (Status.COMPENSATING, ["c", "b", "a"])
    assert case.plan.wake_seconds == 10


def test_compensate_compensates_what_failed_as_unknown() -> None:
    case = Case(call("a"), call("b"))
    case.succeeds("a")
    case.exhausts("b", unknown=True)
    case.order("compensate")
    assert (case.status, case.attention, case.compensated()) == (Status.COMPENSATING, False, ["b", "a"])


def test_compensate_waits_for_a_call_that_is_under_way_and_compensates_what_came_of_it() -> None:
    case = Case(call("a"))
    action = case.plan.actions[0]
    assert isinstance(action, CallAction)
    case.order("compensate")
    assert wanted(case.stored.load().journal, action)
    assert (case.status, case.messages, case.compensated()) == (Status.RUNNING, ["compensate"], [])
    assert described(case.succeeds("a")) == ["call a compensation 1"]
    assert case.messages == []


@pytest.mark.parametrize("ends", [Case.raises, Case.times_out])
def test_compensate_that_waited_does_not_wait_for_another_attempt(ends: Callable[[Case, str], Plan]) -> None:
    case = Case(call("a"))
    case.order("compensate")
    assert described(ends(case, "a")) == ["call a compensation 1"]


def test_compensate_does_not_wait_for_the_call_of_a_worker_that_was_lost() -> None:
    case = Case(call("a"))
    case.deliver("compensate")
    assert described(case.advance(Claimed())) == ["call a compensation 1"]


def test_nothing_new_begins_and_nothing_is_tried_again_while_compensate_waits() -> None:
    case = Case([call("a"), call("b"), call("c")])
    steps = saga([call("a"), call("b"), call("c")]).steps
    case.definition = Definition("order", 1, {**steps, "d": replace(call("d"), after=("b",))})
    case.raises("c")
    case.order("compensate")
    plan = case.succeeds("b")
    assert (described(plan), plan.wake_seconds) == ([], None)
    assert described(case.advance(seconds=99)) == []
    case.succeeds("a")
    assert case.compensated() == ["c", "b", "a"]


def test_compensate_is_ignored_once_the_pivot_is_done() -> None:
    case = Case(call("a"), call("b", pivot=True, compensate=False), call("c", compensate=False))
    case.succeeds("a")
    case.succeeds("b")
    plan = case.order("compensate")
    assert (case.status, case.compensated(), case.messages) == (Status.RUNNING, [], [])
    assert plan.notes[0].detail == (
        "ignored, because the pivot is done, and nothing is compensated after it; use retry or mark_done"
    )


def test_compensate_waits_while_the_outcome_of_the_pivot_is_unknown() -> None:
    case = Case(call("a"), call("b", pivot=True, compensate=False))
    case.succeeds("a")
    case.order("compensate")
    assert (case.status, case.messages) == (Status.RUNNING, ["compensate"])
    case.times_out("b")
    assert (case.status, case.messages) == (Status.RUNNING, ["compensate"])
    case.advance(seconds=2)
    case.declines("b")
    assert (case.status, case.compensated(), case.messages) == (Status.COMPENSATING, ["a"], [])


@pytest.mark.parametrize("seconds", [0, 1])
def test_compensate_that_waited_for_the_pivot_is_ignored_when_its_outcome_is_unknown_in_the_end(seconds: float) -> None:
    case = Case(call("a"), call("b", pivot=True, compensate=False, attempts=1))
    case.succeeds("a")
    case.order("compensate")
    case.advance(seconds=seconds)
    plan = case.times_out("b")
    assert (case.status, case.attention, case.compensated(), case.messages) == (Status.FAILED, True, [], [])
    assert [note.detail for note in plan.notes if note.what == "operator compensate"] == [
        "ignored, because the pivot's outcome is unknown; find out, then retry, mark_done or compensate again"
    ]
    case.order("compensate")
    assert (case.status, case.attention, case.compensated()) == (Status.COMPENSATING, False, ["a"])


def test_compensate_is_answered_when_the_saga_fails_while_its_pivot_is_open() -> None:
    case = Case(call("a"), [request("b", pivot=True, compensate=False), call("c", compensate=False, attempts=1)])
    case.succeeds("a")
    case.order("compensate")
    assert case.messages == ["compensate"]
    case.raises("c")
    assert (case.status, case.messages, case.compensated()) == (Status.FAILED, [], [])
    [answer] = [note.detail for note in case.plan.notes if note.what == "operator compensate"]
    assert answer.endswith("use retry, then compensate again")


def test_compensate_that_was_given_before_the_pivot_failed_and_came_after_is_ignored() -> None:
    case = Case(call("a"), request("b", pivot=True, compensate=False, attempts=1))
    case.succeeds("a")
    given_at = case.stored.now
    case.advance(seconds=10)
    case.deliver("compensate")
    [(message_id, message)] = case.stored.messages.items()
    case.stored.messages[message_id] = message._replace(delivered_at=given_at)
    case.advance()
    assert (case.status, case.attention, case.compensated(), case.messages) == (Status.FAILED, True, [], [])


def test_compensate_that_waited_for_the_pivot_is_ignored_when_it_is_done() -> None:
    case = Case(call("a"), call("b", pivot=True, compensate=False))
    case.succeeds("a")
    case.order("compensate")
    case.succeeds("b")
    assert (case.status, case.compensated(), case.messages) == (Status.COMPLETED, [], [])


def test_compensate_does_not_wait_for_a_local_pivot_which_has_not_happened() -> None:
    case = Case(call("a"), local("b", pivot=True, compensate=False))
    case.succeeds("a")
    case.order("compensate")
    assert case.compensated() == ["a"]


def test_mark_done_counts_a_failed_step_as_done_and_goes_on() -> None:
    case = Case(call("a", compensate=False), call("b"))
    case.exhausts("a")
    assert described(case.order("mark_done")) == ["call b action 1"]
    assert (case.status, case.attention) == (Status.RUNNING, False)


def test_mark_done_counts_failed_compensations_as_done() -> None:
    case = Case(call("a"), call("b"))
    case.succeeds("a")
    case.declines("b")
    case.declines("a", COMPENSATION)
    case.order("mark_done")
    assert (case.status, case.attention) == (Status.COMPENSATED, False)


@pytest.mark.parametrize("step", [wait("a", seconds=None), sleep("a"), request("a")])
def test_mark_done_counts_a_waiting_step_as_done(step: Step) -> None:
    case = Case(step)
    case.order("mark_done")
    assert case.status is Status.COMPLETED


@pytest.mark.parametrize(
    ("verb", "because"),
    [
        ("retry", "no step has failed, and no step waits for another attempt"),
        ("mark_done", "no step has failed, and no step is waited for"),
        ("dance", "there is no such command; there are retry, compensate, mark_done"),
    ],
)
def test_an_operator_command_that_changes_nothing_is_answered_with_the_reason(verb: str, because: str) -> None:
    case = Case(call("a"))
    note = case.order(verb).notes[0]
    assert (note.what, note.detail, note.actor) == (f"operator {verb}", f"ignored, because {because}", "ann")
    assert (case.messages, case.progress("a")) == ([], StepStatus.STARTED)


def test_compensate_is_ignored_while_it_is_being_done() -> None:
    case = Case(call("a"), call("b"))
    case.succeeds("a")
    case.declines("b")
    plan = case.order("compensate")
    assert "compensation has begun already" in plan.notes[0].detail
    assert plan.entries == ()
