"""The rules of orders: how a person helps a saga that has failed, or stops one that has not."""

from __future__ import annotations

import pytest

from outrider.saga.plan import Call, wanted
from outrider.saga.steps import Step
from outrider.saga_store import Progress, Status
from tests.unit.saga_case import COMPENSATION, Case, call, local, request, sleep, told, wait


def test_a_failed_step_lets_what_is_under_way_here_end_and_asks_for_a_person_at_once() -> None:
    case = Case([call("a", undo=False), call("b"), wait("c", seconds=99)], call("d"))
    plan = case.exhausts("a")
    assert (case.status, case.attention, plan.release, plan.wake_seconds) == (Status.RUNNING, True, False, None)
    plan = case.succeeds("b")
    assert (case.status, plan.release, plan.wake_seconds) == (Status.FAILED, True, None)
    assert case.progress("c") is Progress.INTENDED


def test_a_failed_saga_is_not_moved_by_replies_or_time() -> None:
    case = Case([call("a", undo=False), request("b"), wait("c")])
    case.exhausts("a")
    before = dict(case.shelf.journal)
    case.post("yes", "b")
    case.tell(seconds=999)
    assert (case.status, case.shelf.journal, case.mail) == (Status.FAILED, before, ["yes"])


def test_a_reply_that_came_while_the_saga_had_failed_is_taken_when_it_goes_on() -> None:
    case = Case(request("a", attempts=1))
    case.tell(seconds=10)
    for _ in range(3):
        case.answer("yes", "a")
    assert (case.status, case.mail) == (Status.FAILED, ["yes"])
    assert told(case.order("retry")) == []
    assert (case.status, case.attention) == (Status.COMPLETED, False)


def test_retry_gives_what_failed_a_new_budget() -> None:
    case = Case(call("a", undo=False))
    case.exhausts("a")
    plan = case.order("retry")
    assert (case.status, case.attention, told(plan)) == (Status.RUNNING, False, ["call a action 1"])
    case.raises("a")
    assert case.progress("a") is Progress.RETRYING


def test_retry_after_the_pivot_tries_a_refused_step_again() -> None:
    case = Case(call("a", pivot=True, undo=False), call("b", undo=False))
    case.succeeds("a")
    case.declines("b")
    assert told(case.order("retry")) == ["call b action 1"]


def test_retry_tries_failed_compensations_again() -> None:
    case = Case(call("a"), call("b"), call("c"))
    case.succeeds("a")
    case.succeeds("b")
    case.declines("c")
    case.declines("b", COMPENSATION)
    case.succeeds("a", phase=COMPENSATION)
    assert told(case.order("retry")) == ["call b compensation 1"]
    assert (case.status, case.attention) == (Status.COMPENSATING, False)
    case.succeeds("b", phase=COMPENSATION)
    assert case.status is Status.COMPENSATED


def test_retry_of_a_compensation_lets_the_one_under_way_end_first() -> None:
    case = Case(call("a"), call("b"), call("c"))
    case.succeeds("a")
    case.succeeds("b")
    case.declines("c")
    case.declines("b", COMPENSATION)
    assert told(case.order("retry")) == []
    assert told(case.succeeds("a", phase=COMPENSATION)) == ["call b compensation 1"]


def test_retry_makes_a_waiting_attempt_due_now() -> None:
    case = Case(call("a"))
    case.raises("a")
    assert told(case.order("retry")) == ["call a action 2"]


def test_compensate_undoes_what_is_done_and_what_may_have_happened() -> None:
    case = Case(call("a"), [call("b"), request("c"), local("d"), wait("e")])
    case.succeeds("a")
    case.order("compensate")
    assert (case.status, case.undone()) == (Status.COMPENSATING, ["c", "b", "a"])
    assert case.plan.wake_seconds == 10


def test_compensate_undoes_what_failed_as_unknown() -> None:
    case = Case(call("a"), call("b"))
    case.succeeds("a")
    case.exhausts("b", unknown=True)
    case.order("compensate")
    assert (case.status, case.attention, case.undone()) == (Status.COMPENSATING, False, ["b", "a"])


def test_a_result_that_comes_after_the_order_to_compensate_changes_nothing() -> None:
    case = Case(call("a"))
    move = case.plan.moves[0]
    assert isinstance(move, Call)
    case.order("compensate")
    assert not wanted(case.shelf.load().journal, move)
    assert case.succeeds("a").entries == ()


def test_compensate_is_ignored_once_the_pivot_is_done() -> None:
    case = Case(call("a"), call("b", pivot=True, undo=False), call("c", undo=False))
    case.succeeds("a")
    case.succeeds("b")
    plan = case.order("compensate")
    assert (case.status, case.undone(), case.mail) == (Status.RUNNING, [], [])
    assert plan.notes[0].detail == (
        "ignored, because the pivot is done, and nothing is undone after it; order retry or resume"
    )


def test_compensate_waits_while_nobody_knows_whether_the_pivot_happens() -> None:
    case = Case(call("a"), call("b", pivot=True, undo=False))
    case.succeeds("a")
    case.order("compensate")
    assert (case.status, case.mail) == (Status.RUNNING, ["compensate"])
    case.times_out("b")
    assert (case.status, case.mail) == (Status.RUNNING, ["compensate"])
    case.tell(seconds=2)
    case.times_out("b")
    assert (case.status, case.undone(), case.mail) == (Status.COMPENSATING, ["a"], [])


def test_compensate_that_waited_for_the_pivot_is_ignored_when_it_is_done() -> None:
    case = Case(call("a"), call("b", pivot=True, undo=False))
    case.succeeds("a")
    case.order("compensate")
    case.succeeds("b")
    assert (case.status, case.undone(), case.mail) == (Status.COMPLETED, [], [])


def test_compensate_does_not_wait_for_a_local_pivot_which_has_not_happened() -> None:
    case = Case(call("a"), local("b", pivot=True, undo=False))
    case.succeeds("a")
    case.order("compensate")
    assert case.undone() == ["a"]


def test_resume_counts_a_failed_step_as_done_and_goes_on() -> None:
    case = Case(call("a", undo=False), call("b"))
    case.exhausts("a")
    assert told(case.order("resume")) == ["call b action 1"]
    assert (case.status, case.attention) == (Status.RUNNING, False)


def test_resume_counts_failed_compensations_as_done() -> None:
    case = Case(call("a"), call("b"))
    case.succeeds("a")
    case.declines("b")
    case.declines("a", COMPENSATION)
    case.order("resume")
    assert (case.status, case.attention) == (Status.COMPENSATED, False)


@pytest.mark.parametrize("step", [wait("a", seconds=None), sleep("a"), request("a")])
def test_resume_counts_what_is_waited_for_as_done(step: Step) -> None:
    case = Case(step)
    case.order("resume")
    assert case.status is Status.COMPLETED


@pytest.mark.parametrize(
    ("verb", "because"),
    [
        ("retry", "nothing has failed, and nothing waits for another attempt"),
        ("resume", "nothing has failed, and nothing is waited for"),
        ("dance", "there is no such order; there are retry, compensate, resume"),
    ],
)
def test_an_order_that_changes_nothing_is_answered_with_the_reason(verb: str, because: str) -> None:
    case = Case(call("a"))
    note = case.order(verb).notes[0]
    assert (note.what, note.detail, note.actor) == (f"order {verb}", f"ignored, because {because}", "ann")
    assert (case.mail, case.progress("a")) == ([], Progress.INTENDED)


def test_compensate_is_ignored_while_it_is_being_done() -> None:
    case = Case(call("a"), call("b"))
    case.succeeds("a")
    case.declines("b")
    plan = case.order("compensate")
    assert "compensation has begun already" in plan.notes[0].detail
    assert plan.entries == ()
