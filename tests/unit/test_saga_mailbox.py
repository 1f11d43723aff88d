"""The rules of replies: which step takes them, when, and what becomes of those that nobody waits for."""

from __future__ import annotations

from outrider.saga.plan import Absorb, Raised
from outrider.saga_store import Phase, Progress, Status
from tests.unit.saga_case import COMPENSATION, Case, call, nothing, request, told, wait


def test_an_early_reply_stays_in_the_mailbox_until_its_step_waits() -> None:
    case = Case(call("a"), wait("b"))
    plan = case.answer("event b")
    assert (plan.taken, plan.seen, case.mail) == ((), (1,), ["event b"])
    plan = case.succeeds("a")
    assert (plan.taken, case.mail, case.status) == ((1,), [], Status.COMPLETED)


def test_only_one_early_reply_is_kept_for_each_step() -> None:
    case = Case(call("a"), wait("b"))
    for _ in range(3):
        case.answer("event b")
    assert case.mail == ["event b"]


def test_an_answer_before_its_question_is_dropped() -> None:
    case = Case(call("a"), request("b"))
    assert case.answer("yes").taken == (1,)
    assert told(case.succeeds("a")) == ["send b action 1"]
    assert case.status is Status.RUNNING


def test_a_late_duplicate_reply_changes_nothing() -> None:
    case = Case(request("a"), call("b"))
    case.answer("yes", "a")
    plan = case.answer("no", "a")
    assert (plan.taken, plan.entries, plan.moves) == ((2,), (), ())
    assert [note.what for note in plan.notes] == ["reply dropped"]
    assert case.progress("a") is Progress.DONE


def test_a_late_reply_of_an_action_changes_nothing_once_it_is_being_undone() -> None:
    case = Case(request("a"), call("b"))
    case.answer("yes", "a")
    case.declines("b")
    plan = case.answer("yes", "a")
    assert (plan.entries, case.mail, case.progress("a", COMPENSATION)) == ((), [], Progress.INTENDED)


def test_a_reply_that_came_with_the_deadline_counts() -> None:
    case = Case([wait("a"), request("b")])
    case.post("event a")
    case.post("yes", "b")
    case.tell(seconds=10)
    assert case.status is Status.COMPLETED


def test_an_event_that_does_not_come_in_time_is_a_refusal() -> None:
    case = Case(call("a"), wait("b"))
    case.succeeds("a")
    assert case.plan.wake_seconds == 10
    case.tell(seconds=10)
    assert (case.progress("b"), case.undone()) == (Progress.REFUSED, ["a"])


def test_the_key_tells_replies_of_one_type_apart() -> None:
    case = Case([request("a"), request("b")])
    case.answer("yes", "b")
    case.answer("no", "a")
    assert (case.progress("a"), case.progress("b")) == (Progress.REFUSED, Progress.DONE)


def test_a_reply_without_a_key_goes_to_the_step_that_waits_for_its_type() -> None:
    case = Case([request("a", own=" a"), request("b", own=" b")])
    case.answer("yes b")
    assert (case.progress("a"), case.progress("b")) == (Progress.INTENDED, Progress.DONE)


def test_an_event_under_a_key_of_somebody_else_is_taken_by_a_wait_and_by_no_request() -> None:
    case = Case([wait("a"), request("b")])
    case.post("event a", key="theirs")
    case.post("yes", key="theirs")
    case.tell()
    assert (case.progress("a"), case.progress("b"), case.mail) == (Progress.DONE, Progress.INTENDED, [])


def test_an_event_under_the_key_of_a_step_that_it_does_not_answer_is_taken_by_a_wait() -> None:
    case = Case(request("a"), wait("b"))
    case.answer("yes", "a")
    case.answer("event b", "a")
    assert case.status is Status.COMPLETED


def test_what_is_answered_already_is_not_asked_for_again() -> None:
    case = Case(request("a", attempts=1), call("b"))
    case.answer("yes", "a")
    case.declines("b")
    case.tell(seconds=10)
    case.answer("undone", "a")
    assert (case.status, case.mail) == (Status.FAILED, ["undone"])
    assert told(case.order("retry")) == []
    assert case.status is Status.COMPENSATED


def test_a_reply_that_cannot_be_taken_is_counted_while_the_request_waits_to_be_asked_again() -> None:
    case = Case(request("a", attempts=3))
    case.tell(seconds=10)
    case.post("yes", "a")
    case.raises("a")
    assert (case.progress("a"), case.entry("a").attempts) == (Progress.RETRYING, 2)


def test_a_reply_is_taken_into_the_state_before_the_command_that_may_need_it_is_sent() -> None:
    case = Case(request("a", takes={"yes": nothing}), request("b"))
    plan = case.answer("yes", "a")
    assert told(plan) == ["absorb a", "send b action 1"]
    assert [move.mail.name for move in plan.moves if isinstance(move, Absorb)] == ["yes"]


def test_a_reply_that_cannot_be_taken_into_the_state_waits_for_the_next_attempt() -> None:
    case = Case(request("a", attempts=3, takes={"yes": nothing}))
    case.post("yes", "a")
    plan = case.tell(Raised("a", Phase.ACTION, "bad reply"))
    assert (plan.taken, case.progress("a"), told(plan)) == ((), Progress.RETRYING, [])
    assert told(case.tell(seconds=5)) == ["absorb a"]


def test_a_reply_that_never_can_be_taken_into_the_state_needs_a_person_and_stays() -> None:
    case = Case(request("a", takes={"yes": nothing}))
    case.post("yes", "a")
    case.tell(Raised("a", Phase.ACTION, "bad reply"))
    assert (case.status, case.attention, case.mail) == (Status.FAILED, True, ["yes"])
    assert told(case.order("retry")) == ["absorb a"]


def test_a_reply_that_a_handler_refuses_came_from_something_that_happened() -> None:
    case = Case(request("a"), call("b"))
    case.post("yes", "a")
    case.declines("a")
    assert (case.undone(), case.mail) == (["a"], [])


def test_a_saga_that_has_ended_keeps_no_mail() -> None:
    case = Case(call("a"), [call("b"), wait("c")])
    case.answer("event c")
    case.declines("a")
    assert (case.status, case.mail) == (Status.COMPENSATED, [])
