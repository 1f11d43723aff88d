"""The rules of the mailbox: which step takes a reply, when, and the end of replies without a step."""

from __future__ import annotations

from datetime import timedelta
from uuid import UUID

import pytest

from outrider.redaction import ErrorText
from outrider.saga.model import MessageKind, Phase, SagaMessage, Status, StepStatus
from outrider.saga.planner.planner import ApplyReply, InvalidResult, Plan, Raised
from outrider.saga.planner.replies import REPLIES_MAX, rejection_of, surplus
from tests.support.planner_case import COMPENSATION, Case, call, described, nothing, request, saga, wait
from tests.support.stored_saga import EPOCH, SAGA_ID


def test_an_early_reply_stays_in_the_mailbox_until_its_step_waits() -> None:
    case = Case(call("a"), wait("b"))
    plan = case.answer("event b")
    assert (plan.taken, plan.seen, case.messages) == ((), (1,), ["event b"])
    plan = case.succeeds("a")
    assert (plan.taken, case.messages, case.status) == ((1,), [], Status.COMPLETED)


def test_only_one_early_reply_is_kept_for_each_step() -> None:
    case = Case(call("a"), wait("b"))
    for _ in range(3):
        case.answer("event b")
    assert case.messages == ["event b"]


def test_an_answer_before_its_question_is_dropped() -> None:
    case = Case(call("a"), request("b"))
    assert case.answer("yes").taken == (1,)
    assert described(case.succeeds("a")) == ["send b action 1"]
    assert case.status is Status.RUNNING


def test_a_late_duplicate_reply_changes_nothing() -> None:
    case = Case(request("a"), call("b"))
    case.answer("yes", "a")
    plan = case.answer("no", "a")
    assert (plan.taken, plan.entries, plan.actions) == ((2,), (), ())
    assert [note.what for note in plan.notes] == ["reply dropped"]
    assert case.progress("a") is StepStatus.DONE


def test_a_late_reply_of_an_action_changes_nothing_once_it_is_being_compensated() -> None:
    case = Case(request("a"), call("b"))
    case.answer("yes", "a")
    case.declines("b")
    plan = case.answer("yes", "a")
    assert (plan.entries, case.messages, case.progress("a", COMPENSATION)) == ((), [], StepStatus.STARTED)


def test_a_reply_that_came_with_the_deadline_counts() -> None:
    case = Case([wait("a"), request("b")])
    case.deliver("event a")
    case.deliver("yes", "b")
    case.advance(seconds=10)
    assert case.status is Status.COMPLETED


def test_an_event_that_does_not_come_in_time_is_a_rejection() -> None:
    case = Case(call("a"), wait("b"))
    case.succeeds("a")
    assert case.plan.wake_seconds == 10
    case.advance(seconds=10)
    assert (case.progress("b"), case.compensated()) == (StepStatus.REJECTED, ["a"])


def test_the_key_tells_replies_of_one_type_apart() -> None:
    case = Case([request("a"), request("b")])
    case.answer("yes", "b")
    case.answer("no", "a")
    assert (case.progress("a"), case.progress("b")) == (StepStatus.REJECTED, StepStatus.DONE)


def test_a_reply_without_a_key_goes_to_the_step_that_waits_for_its_type() -> None:
    case = Case([request("a", own=" a"), request("b", own=" b")])
    case.answer("yes b")
    assert (case.progress("a"), case.progress("b")) == (StepStatus.STARTED, StepStatus.DONE)


def test_an_event_under_a_key_of_somebody_else_is_taken_by_a_wait_and_by_no_request() -> None:
    case = Case([wait("a"), request("b")])
    case.deliver("event a", key="theirs")
    case.deliver("yes", key="theirs")
    case.advance()
    assert (case.progress("a"), case.progress("b"), case.messages) == (StepStatus.DONE, StepStatus.STARTED, [])


def test_an_event_under_the_key_of_a_step_that_it_does_not_answer_is_taken_by_a_wait() -> None:
    case = Case(request("a"), wait("b"))
    case.answer("yes", "a")
    case.answer("event b", "a")
    assert case.status is Status.COMPLETED


def test_a_step_that_failed_as_unknown_is_settled_by_its_answer_and_the_saga_goes_on() -> None:
    case = Case(request("a", attempts=1, reply_functions={"yes": nothing}), call("b"))
    case.advance(seconds=10)
    assert (case.status, case.attention) == (Status.FAILED, True)
    plan = case.answer("yes", "a")
    assert (case.status, case.attention, described(plan)) == (Status.RUNNING, False, ["absorb a", "call b action 1"])
    assert [(note.what, note.step) for note in plan.notes[:3]] == [
        ("answered after all", "a"),
        ("action done", "a"),
        ("became running", None),
    ]


def test_a_step_that_failed_as_unknown_is_settled_by_its_rejection_and_the_saga_is_compensated() -> None:
    case = Case(call("a"), request("b", pivot=True, compensate=False, attempts=1))
    case.succeeds("a")
    case.advance(seconds=10)
    assert described(case.answer("no", "b")) == ["call a compensation 1"]
    assert (case.status, case.attention, case.compensated()) == (Status.COMPENSATING, False, ["a"])


def test_of_several_that_failed_as_unknown_the_saga_waits_for_the_last_answer() -> None:
    case = Case([request("a", attempts=1), request("b", attempts=1), request("c", attempts=1)], call("d"))
    case.advance(seconds=10)
    case.answer("yes", "a")
    case.answer("no", "b")
    assert (case.status, case.attention, case.compensated()) == (Status.FAILED, True, [])
    case.answer("yes", "c")
    assert (case.status, case.attention, case.compensated()) == (Status.COMPENSATING, False, ["c", "a"])


def test_an_answer_settles_its_step_and_leaves_failed_what_no_answer_can_settle() -> None:
    case = Case([call("a", compensate=False, attempts=1), request("b", attempts=1)], call("c"))
    case.advance(seconds=10)
    case.raises("a")
    assert described(case.answer("yes", "b")) == []
    assert (case.status, case.attention, case.progress("b")) == (Status.FAILED, True, StepStatus.DONE)
    assert described(case.order("mark_done")) == ["call c action 1"]


def test_a_late_rejection_after_the_pivot_is_reported_and_still_needs_a_person() -> None:
    case = Case(call("a", pivot=True, compensate=False), request("b", compensate=False, attempts=1))
    case.succeeds("a")
    case.advance(seconds=10)
    plan = case.answer("no", "b")
    assert (case.status, case.attention, case.messages) == (Status.FAILED, True, [])
    assert plan.attention == ("action of b failed: rejected after the pivot: answered by no",)
    assert "became running" not in [note.what for note in plan.notes]
    assert case.answer("yes", "b").entries == ()


def test_an_event_that_comes_after_its_time_and_after_the_pivot_lets_the_saga_go_on() -> None:
    case = Case(call("a", pivot=True, compensate=False), wait("b"))
    case.succeeds("a")
    case.advance(seconds=10)
    assert (case.status, case.attention) == (Status.FAILED, True)
    case.answer("event b")
    assert (case.status, case.attention) == (Status.COMPLETED, False)


@pytest.mark.parametrize("others", [True, False])
def test_a_compensation_that_failed_as_unknown_is_settled_by_its_answer_whenever_it_comes(others: bool) -> None:
    case = Case(call("a"), request("b", attempts=1), call("c"))
    case.succeeds("a")
    case.answer("yes", "b")
    case.declines("c")
    case.advance(seconds=10)
    assert (case.status, case.attention) == (Status.COMPENSATING, True)
    if others:
        case.succeeds("a", phase=COMPENSATION)
        assert case.status is Status.FAILED
    case.answer("compensated", "b")
    assert (case.attention, case.messages) == (False, [])
    if not others:
        case.succeeds("a", phase=COMPENSATION)
    assert case.status is Status.COMPENSATED


def test_an_answer_to_a_step_that_a_person_has_settled_or_given_up_changes_nothing() -> None:
    for verb in ("mark_done", "compensate"):
        case = Case(request("a", attempts=1), call("b"))
        case.advance(seconds=10)
        case.order(verb)
        plan = case.answer("no", "a")
        assert (plan.entries, [note.what for note in plan.notes], case.messages) == ((), ["reply dropped"], [])


def test_attempts_to_take_a_reply_in_are_counted_by_themselves_and_made_when_they_are_due() -> None:
    case = Case(request("a", reply_functions={"yes": nothing}))
    case.advance(seconds=10)
    case.deliver("yes", "a")
    case.advance(Raised("a", Phase.ACTION, "bad reply", reply=True))
    assert (case.progress("a"), case.entry("a").attempts) == (StepStatus.RETRYING, 1)
    assert described(case.advance(seconds=1)) == []
    plan = case.advance(seconds=1)
    assert [action.attempt for action in plan.actions if isinstance(action, ApplyReply)] == [2]


def test_an_answered_request_is_not_sent_again_when_its_answer_raises_in_the_turn_that_applies_retry() -> None:
    case = Case(request("a", attempts=1, reply_functions={"yes": nothing}))
    case.advance(seconds=10)
    case.deliver("yes", "a")
    case.deliver("retry")
    plan = case.advance(Raised("a", Phase.ACTION, "bad reply", reply=True))
    assert (described(plan), case.status, case.messages, plan.wake_seconds) == ([], Status.RUNNING, ["yes"], 0)
    assert described(case.advance()) == ["absorb a"]


def test_a_reply_is_taken_into_the_state_before_the_command_that_may_need_it_is_sent() -> None:
    case = Case(request("a", reply_functions={"yes": nothing}), request("b"))
    plan = case.answer("yes", "a")
    assert described(plan) == ["absorb a", "send b action 1"]
    assert [action.message.name for action in plan.actions if isinstance(action, ApplyReply)] == ["yes"]


def test_a_reply_that_cannot_be_taken_into_the_state_waits_for_the_next_attempt() -> None:
    case = Case(request("a", attempts=3, reply_functions={"yes": nothing}))
    case.deliver("yes", "a")
    plan = case.advance(Raised("a", Phase.ACTION, "bad reply", reply=True))
    assert (plan.taken, case.progress("a"), described(plan)) == ((), StepStatus.RETRYING, [])
    assert described(case.advance(seconds=5)) == ["absorb a"]


def test_a_reply_that_never_can_be_taken_into_the_state_needs_a_person_and_stays() -> None:
    case = Case(request("a", attempts=1, reply_functions={"yes": nothing}))
    case.deliver("yes", "a")
    case.advance(Raised("a", Phase.ACTION, "bad reply", reply=True))
    assert (case.status, case.attention, case.messages) == (Status.FAILED, True, ["yes"])
    assert described(case.order("retry")) == ["absorb a"]


def test_a_reply_that_a_handler_rejects_came_from_a_completed_action() -> None:
    case = Case(request("a"), call("b"))
    case.deliver("yes", "a")
    case.declines("a")
    assert (case.compensated(), case.messages) == (["a"], [])


def test_a_saga_that_has_ended_keeps_no_messages() -> None:
    case = Case(call("a"), [call("b"), wait("c")])
    case.answer("event c")
    case.declines("a")
    assert (case.status, case.messages) == (Status.COMPENSATED, [])


def bad(case: Case) -> Plan:
    """Let the answer that a step would take now raise."""
    return case.advance(Raised("a", Phase.ACTION, "bad reply", reply=True))


@pytest.mark.parametrize("together", [True, False])
def test_a_good_answer_replaces_one_that_could_not_be_applied(together: bool) -> None:
    case = Case(request("a", attempts=1, reply_functions={"yes": nothing}))
    case.deliver("yes", "a")
    if together:
        case.deliver("yes", "a")
        assert (bad(case).wake_seconds, case.messages, case.attention) == (0, ["yes"], False)
        plan = case.advance()
    else:
        bad(case)
        assert (case.status, case.attention, case.messages) == (Status.FAILED, True, ["yes"])
        plan = case.answer("yes", "a")
        assert "reply set aside" in [note.what for note in plan.notes]
    assert [(action.message.event_id, action.attempt) for action in plan.actions if isinstance(action, ApplyReply)] == [
        (UUID(int=2), 1)
    ]
    assert (case.status, case.messages, case.entry("a").reply_event_id) == (Status.COMPLETED, [], UUID(int=2))


def test_an_answer_that_could_not_be_applied_has_all_its_attempts_before_another_replaces_it() -> None:
    case = Case(request("a", attempts=2, reply_functions={"yes": nothing}))
    case.deliver("yes", "a")
    bad(case)
    case.answer("yes", "a")
    assert (case.progress("a"), case.messages) == (StepStatus.RETRYING, ["yes", "yes"])
    case.stored.now += timedelta(seconds=5)
    plan = bad(case)
    assert (case.messages, plan.notes[0].what) == (["yes"], "reply set aside")
    assert [action.message.event_id for action in case.advance().actions if isinstance(action, ApplyReply)] == [
        UUID(int=2)
    ]


def test_of_many_answers_that_wait_for_a_bad_one_to_be_set_aside_the_last_is_kept() -> None:
    case = Case(request("a", attempts=2, reply_functions={"yes": nothing}))
    case.deliver("yes", "a")
    bad(case)
    for _ in range(5):
        case.answer("yes", "a")
    assert [message.event_id.int for message in case.stored.messages.values()] == [1, 6]


def test_a_second_bad_answer_gets_attempts_of_its_own_and_replaces_the_first() -> None:
    case = Case(request("a", attempts=1, reply_functions={"yes": nothing}))
    case.deliver("yes", "a")
    bad(case)
    case.deliver("yes", "a")
    bad(case)
    assert (case.status, case.attention) == (Status.FAILED, True)
    assert [message.event_id.int for message in case.stored.messages.values()] == [2]
    assert case.advance().actions == ()


def test_an_answer_that_breaks_the_state_makes_room_for_a_good_one_as_well() -> None:
    case = Case(request("a", reply_functions={"yes": nothing}))
    case.deliver("yes", "a")
    case.advance(InvalidResult("a", Phase.ACTION, "r is no text"))
    assert (case.status, case.messages) == (Status.FAILED, ["yes"])
    assert described(case.answer("yes", "a")) == ["absorb a"]
    assert case.status is Status.COMPLETED


def test_a_bad_answer_is_dropped_once_its_step_is_being_compensated() -> None:
    case = Case(request("a", attempts=1, reply_functions={"yes": nothing}))
    case.deliver("yes", "a")
    bad(case)
    case.order("compensate")
    assert (case.compensated(), case.messages) == (["a"], [])


def test_an_answer_in_the_turn_that_begins_its_step_does_not_replace_the_command() -> None:
    case = Case(request("a"), request("b"))
    case.deliver("yes", "b")
    plan = case.answer("yes", "a")
    assert (described(plan), case.messages) == (["send b action 1"], [])
    assert "reply dropped" in [note.what for note in plan.notes]


def test_an_answer_in_the_turn_that_begins_to_compensate_its_step_does_not_replace_the_command() -> None:
    case = Case(request("a"), call("b"))
    case.answer("yes", "a")
    case.deliver("compensated", "a")
    plan = case.declines("b")
    assert (described(plan), case.progress("a", COMPENSATION), case.messages) == (
        ["send a compensation 1"],
        StepStatus.STARTED,
        [],
    )


def test_a_rejection_with_an_unreadable_payload_is_a_rejection() -> None:
    message = SagaMessage(1, MessageKind.REPLY, "no", None, b"[" * 100_000, UUID(int=1), EPOCH)
    assert rejection_of(message) == "answered by no"


def test_the_reason_of_a_rejection_is_kept_without_values_of_its_payload_and_of_the_state() -> None:
    body = b'{"reason": "Jane Doe of room 4711 has not paid", "name": "Jane Doe"}'
    message = SagaMessage(1, MessageKind.REPLY, "no", None, body, UUID(int=1), EPOCH)
    state = b'{"room": 4711}'
    assert rejection_of(message, state=state) == "answered by no: *** of room *** has not paid"
    assert rejection_of(message, state=state, error_text=ErrorText.FULL).endswith("Jane Doe of room 4711 has not paid")


def test_a_participant_that_answers_under_the_id_of_the_command_is_heard() -> None:
    case = Case(request("a"))
    asked = case.entry("a").command_event_id
    assert asked is not None
    case.stored.deliver(MessageKind.REPLY, "yes", f"{SAGA_ID}:a", asked)
    case.advance()
    assert case.status is Status.COMPLETED


def test_a_saga_whose_definition_lacks_a_step_keeps_the_newest_replies_only() -> None:
    case = Case(request("a"))
    case.definition = saga(request("b"))
    for _ in range(5):
        case.answer("yes", "a")
    case.answer("other")
    assert [message.event_id.int for message in case.stored.messages.values()] == [4, 5, 6]
    assert "replies dropped" in [note.what for note in case.stored.notes]


def test_a_mailbox_without_a_reader_is_bounded_whatever_the_keys() -> None:
    letters = [
        SagaMessage(n, MessageKind.REPLY, "yes", f"key {n}", b"{}", UUID(int=n), EPOCH) for n in range(REPLIES_MAX + 7)
    ]
    assert [message.message_id for message in surplus(letters)] == [6, 5, 4, 3, 2, 1, 0]
