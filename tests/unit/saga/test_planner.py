"""The rules of the planner: the next step, retries, compensation, and unknown outcomes."""

from __future__ import annotations

import random
from dataclasses import replace
from typing import Any

import pytest

from outrider.saga.model import LOSSES_MAX, Phase, Status, StepStatus, Uncertainty
from outrider.saga.planner.planner import (
    CallAction,
    Claimed,
    InvalidResult,
    Plan,
    Raised,
    SendCommand,
    Succeeded,
    advance,
    key_of,
)
from tests.support.planner_case import COMPENSATION, Case, call, described, local, request, saga, sleep, wait
from tests.support.stored_saga import SAGA_ID


def test_a_step_is_journaled_before_it_is_done() -> None:
    case = Case(call("a"), call("b"))
    assert described(case.plan) == ["call a action 1"]
    assert case.progress("a") is StepStatus.STARTED
    assert not case.plan.release


def test_a_step_begins_in_the_turn_that_records_the_one_before_it() -> None:
    case = Case(local("a"), request("b"))
    assert described(case.succeeds("a")) == ["send b action 1"]
    assert case.progress("a") is StepStatus.DONE


def test_what_follows_a_parallel_group_waits_for_all_of_it() -> None:
    case = Case([call("a"), request("b")], call("c"))
    assert described(case.plan) == ["call a action 1", "send b action 1"]
    assert described(case.succeeds("a")) == []
    assert described(case.answer("yes", "b")) == ["call c action 1"]


def test_a_saga_whose_steps_are_all_done_is_completed() -> None:
    case = Case(call("a"), sleep("b"))
    case.succeeds("a")
    plan = case.advance(seconds=10)
    assert (case.status, plan.release, plan.wake_seconds) == (Status.COMPLETED, True, None)
    assert plan.instance.current_step is None


def test_every_attempt_and_the_compensation_of_a_step_have_one_key() -> None:
    case = Case(call("a"), call("b"))
    keys = {action.key for action in case.plan.actions if isinstance(action, CallAction)}
    case.raises("a")
    keys |= {action.key for action in case.advance(seconds=2).actions if isinstance(action, CallAction)}
    case.succeeds("a")
    keys |= {action.key for action in case.declines("b").actions if isinstance(action, CallAction)}
    assert keys == {key_of(SAGA_ID, "a")}


def test_an_attempt_that_raised_is_repeated_by_the_policy_of_its_step() -> None:
    case = Case(call("a"))
    plan = case.raises("a")
    assert (plan.release, plan.wake_seconds, plan.instance.last_error) == (True, 2.0, "broke")
    assert described(case.advance(seconds=1.9)) == []
    assert described(case.advance(seconds=0.1)) == ["call a action 2"]
    assert case.stored.instance.retry_count == 1


def test_a_timeout_is_resolved_by_asking_again_with_the_same_key_before_anything_is_compensated() -> None:
    case = Case([request("a"), call("b")])
    key = key_of(SAGA_ID, "a")
    case.advance(seconds=10)
    case.declines("b")
    assert (case.progress("a"), case.compensated()) == (StepStatus.RETRYING, [])
    assert case.advance(seconds=2).actions == (SendCommand("a", Phase.ACTION, 2, key),)
    assert case.status is Status.RUNNING
    case.answer("yes", "a")
    assert (case.status, case.compensated()) == (Status.COMPENSATING, ["a"])


def test_a_call_that_timed_out_is_called_again() -> None:
    case = Case(call("a"))
    case.times_out("a")
    assert described(case.advance(seconds=2)) == ["call a action 2"]


def test_a_late_answer_resolves_a_request_that_is_about_to_be_asked_again() -> None:
    case = Case(request("a"))
    case.advance(seconds=10)
    assert described(case.answer("yes", "a")) == []
    assert case.status is Status.COMPLETED


@pytest.mark.parametrize("compensate", [True, False])
def test_a_call_unknown_after_its_last_attempt_needs_a_person_and_nothing_is_compensated(compensate: bool) -> None:
    case = Case(call("a"), call("b", compensate=compensate))
    case.succeeds("a")
    plan = case.exhausts("b", unknown=True)
    assert (case.status, case.attention, case.compensated()) == (Status.FAILED, True, [])
    assert plan.attention == ("action of b failed: unknown whether it happened: no result within 10 s",)


def test_a_request_that_is_never_answered_needs_a_person_and_nothing_is_compensated() -> None:
    case = Case(call("a"), request("b"))
    case.succeeds("a")
    for _ in range(3):
        case.advance(seconds=10)
    assert (case.status, case.attention, case.compensated()) == (Status.FAILED, True, [])


def test_what_the_same_worker_knows_not_to_have_begun_is_begun_at_no_cost() -> None:
    case = Case([call("a", attempts=1), call("b"), local("c", attempts=1)])
    plan = case.advance(Claimed(frozenset({("b", Phase.ACTION, 1)})))
    assert described(plan) == ["call a action 1", "call b action 1", "local c action 1"]
    assert [case.entry(step).uncertainty for step in "abc"] == [None, Uncertainty.OUTCOME_UNKNOWN, None]
    assert described(case.advance(Claimed(frozenset()))) == ["call a action 1", "call b action 1", "local c action 1"]
    assert case.stored.instance.retry_count == 0


def test_a_lost_worker_costs_no_attempt() -> None:
    case = Case([call("a", attempts=1), local("b", attempts=1), request("c")])
    for losses in range(1, LOSSES_MAX):
        assert described(case.loses_worker()) == ["call a action 1", "local b action 1"]
        assert (case.stored.instance.losses, case.stored.instance.retry_count) == (losses, 0)
    assert (case.entry("a").uncertainty, case.entry("b").uncertainty) == (Uncertainty.OUTCOME_UNKNOWN, None)


def test_what_is_under_way_here_is_not_begun_again() -> None:
    case = Case(call("a"))
    plan = case.advance(seconds=99)
    assert (plan.actions, plan.release) == ((), False)


@pytest.mark.parametrize("make", [call, local])
def test_a_step_whose_worker_is_lost_too_often_needs_a_person_and_nothing_is_compensated(make: Any) -> None:
    case = Case(call("a"), make("b", attempts=1))
    case.succeeds("a")
    case.loses_worker(LOSSES_MAX)
    assert (case.status, case.attention, case.compensated()) == (Status.FAILED, True, [])
    assert (case.progress("b"), case.entry("b").attempts) == (StepStatus.FAILED, 1)
    assert case.entry("b").is_unresolved == (make is call)
    assert f"its worker was lost {LOSSES_MAX} times in a row" in str(case.stored.instance.last_error)
    assert case.stored.instance.losses == 0
    assert described(case.order("retry")) == [f"{make.__name__} b action 1"]


def test_a_result_ends_the_losses_in_a_row() -> None:
    case = Case(local("a"), local("b"))
    case.loses_worker(LOSSES_MAX - 1)
    case.succeeds("a")
    assert case.stored.instance.losses == 0
    case.loses_worker(LOSSES_MAX - 1)
    case.raises("b")
    assert (case.progress("b"), case.stored.instance.losses) == (StepStatus.RETRYING, 0)


def test_the_result_of_one_step_says_nothing_of_the_losses_while_another_runs() -> None:
    case = Case([local("a"), call("b")])
    case.loses_worker(3)
    case.succeeds("a")
    assert case.stored.instance.losses == 3
    case.succeeds("b")
    assert case.stored.instance.losses == 0


def test_a_saga_whose_turns_cost_the_workers_is_stopped_before_its_code_runs_again() -> None:
    case = Case(request("a"))
    case.deliver("yes", "a")
    case.stored.instance = replace(case.stored.instance, losses=LOSSES_MAX)
    plan = case.advance(Claimed())
    assert (case.status, case.attention, plan.actions) == (Status.FAILED, True, ())
    assert "its worker was lost 20 times in a row" in str(case.stored.instance.last_error)
    assert case.messages == ["yes"]


def test_a_compensation_whose_worker_is_lost_too_often_does_not_stop_the_others() -> None:
    case = Case(local("a"), local("b"), call("c"))
    case.succeeds("a")
    case.succeeds("b")
    case.declines("c")
    assert described(case.loses_worker(LOSSES_MAX)) == ["local a compensation 1"]
    assert (case.progress("b", COMPENSATION), case.stored.instance.losses) == (StepStatus.FAILED, 0)


def test_a_compensation_that_a_lost_worker_had_begun_is_begun_again() -> None:
    case = Case(call("a"), call("b"))
    case.succeeds("a")
    case.declines("b")
    assert described(case.loses_worker()) == ["call a compensation 1"]


def test_a_rejection_compensates_what_is_done_last_first_and_one_at_a_time() -> None:
    case = Case(call("a"), local("b"), request("c"), call("d"))
    case.succeeds("a")
    case.succeeds("b")
    case.answer("yes", "c")
    assert described(case.declines("d")) == ["send c compensation 1"]
    assert described(case.answer("compensated", "c")) == ["local b compensation 1"]
    assert described(case.succeeds("b", phase=COMPENSATION)) == ["call a compensation 1"]
    case.succeeds("a", phase=COMPENSATION)
    assert (case.status, case.attention, case.compensated()) == (Status.COMPENSATED, False, ["c", "b", "a"])


def test_steps_without_a_compensation_and_rejected_ones_are_left_out() -> None:
    case = Case(call("a"), call("b", compensate=False), call("c"))
    case.succeeds("a")
    case.succeeds("b")
    case.declines("c")
    assert case.compensated() == ["a"]


def test_a_saga_that_has_nothing_to_compensate_is_compensated_at_once() -> None:
    case = Case(call("a"))
    case.declines("a")
    assert (case.status, case.plan.release, case.plan.wake_seconds) == (Status.COMPENSATED, True, None)


def test_a_rejection_waits_for_the_parallel_branch_that_is_under_way() -> None:
    case = Case([call("a"), call("b"), request("c")])
    case.declines("a")
    assert (case.status, case.compensated()) == (Status.RUNNING, [])
    case.answer("yes", "c")
    assert (case.status, case.compensated()) == (Status.RUNNING, [])
    case.succeeds("b")
    assert (case.status, case.compensated()) == (Status.COMPENSATING, ["c", "b"])


def test_a_rejection_begins_no_new_step_while_it_waits() -> None:
    case = Case([call("a"), call("b")], call("c"))
    case.declines("a")
    assert described(case.succeeds("b")) == ["call b compensation 1"]


def test_a_rejection_does_not_wait_for_events_timers_and_what_was_rolled_back() -> None:
    case = Case([call("a"), wait("b"), sleep("c"), local("d")])
    case.raises("d")
    case.declines("a")
    assert case.status is Status.COMPENSATED
    assert [case.entry(step).error for step in "bcd"] == [
        "no longer awaited, because another step was rejected",
        "no longer awaited, because another step was rejected",
        "broke",
    ]


def test_a_rejection_waits_for_a_local_that_has_begun() -> None:
    case = Case([call("a"), local("b")])
    case.declines("a")
    assert (case.status, case.progress("b")) == (Status.RUNNING, StepStatus.STARTED)
    case.succeeds("b")
    assert case.compensated() == ["b"]


def test_a_local_step_without_attempts_left_counts_as_rejected() -> None:
    case = Case(call("a"), local("b"))
    case.succeeds("a")
    case.exhausts("b")
    assert (case.progress("b"), case.compensated()) == (StepStatus.REJECTED, ["a"])


def test_the_audit_log_says_that_a_local_step_or_a_call_raised_and_not_that_it_was_rejected() -> None:
    case = Case(local("a", attempts=1))
    notes = case.raises("a").notes
    assert [(note.what, note.detail) for note in notes[:1]] == [
        ("action raised", "raised in its last attempt, and was rolled back: broke")
    ]
    case = Case(call("a", attempts=1))
    notes = case.raises("a").notes
    assert [(note.what, note.detail) for note in notes[:1]] == [
        ("action raised", "raised in its last attempt, and may have happened: broke")
    ]


def test_a_saga_that_has_ended_well_or_is_compensated_has_no_last_error() -> None:
    case = Case(call("a"))
    case.raises("a")
    case.advance(seconds=2)
    assert case.stored.instance.last_error == "broke"
    assert case.succeeds("a").instance.last_error is None
    case = Case(call("a"))
    assert case.declines("a").instance.last_error is None


def test_a_local_that_timed_out_was_rolled_back() -> None:
    case = Case(call("a"), local("b", attempts=1))
    case.succeeds("a")
    case.times_out("b")
    assert (case.progress("b"), case.compensated()) == (StepStatus.REJECTED, ["a"])


def test_a_call_whose_last_attempt_raised_is_compensated_too_as_it_may_have_happened() -> None:
    case = Case(call("a"), call("b"))
    case.succeeds("a")
    case.exhausts("b")
    assert (case.progress("b"), case.compensated()) == (StepStatus.REJECTED, ["b", "a"])


def test_a_call_that_raised_in_the_end_is_unknown_still_if_an_earlier_attempt_was_and_nothing_is_compensated() -> None:
    case = Case(call("a"), call("b", attempts=3))
    case.succeeds("a")
    case.times_out("b")
    case.advance(seconds=9)
    case.raises("b")
    case.advance(seconds=9)
    plan = case.raises("b")
    assert (case.status, case.attention, case.compensated()) == (Status.FAILED, True, [])
    assert plan.attention == ("action of b failed: unknown whether it happened before; it raised: broke",)


def test_that_an_attempt_was_lost_with_its_worker_is_not_forgotten_when_the_next_one_raises() -> None:
    case = Case(call("a", attempts=1))
    case.loses_worker()
    case.raises("a")
    assert (case.status, case.compensated()) == (Status.FAILED, [])
    case.order("retry")
    case.raises("a")
    case.advance(seconds=2)
    case.raises("a")
    assert (case.status, case.compensated()) == (Status.FAILED, [])


def test_a_call_that_says_that_it_did_not_happen_is_believed_after_an_attempt_that_was_unknown() -> None:
    case = Case(call("a"), call("b"))
    case.succeeds("a")
    case.times_out("b")
    case.advance(seconds=2)
    case.declines("b")
    assert case.compensated() == ["a"]


def test_that_it_may_have_happened_is_not_forgotten_while_another_branch_is_under_way() -> None:
    case = Case([call("a"), call("b"), call("c")])
    case.exhausts("b")
    case.succeeds("c")
    assert case.status is Status.RUNNING
    case.advance(Claimed())
    case.succeeds("a")
    assert (case.status, case.compensated()) == (Status.COMPENSATING, ["c", "b", "a"])


def test_a_call_whose_last_attempt_raised_and_that_has_no_compensation_needs_a_person() -> None:
    case = Case(call("a"), call("b", compensate=False))
    case.succeeds("a")
    case.exhausts("b")
    assert (case.status, case.attention, case.compensated()) == (Status.FAILED, True, [])


def test_a_failed_compensation_does_not_stop_the_others() -> None:
    case = Case(call("a"), call("b"), call("c"))
    case.succeeds("a")
    case.succeeds("b")
    case.declines("c")
    plan = case.exhausts("b", COMPENSATION)
    assert plan.attention == ("compensation of b failed: broke",)
    assert (case.status, case.attention) == (Status.COMPENSATING, True)
    assert described(plan) == ["call a compensation 1"]
    plan = case.succeeds("a", phase=COMPENSATION)
    assert (case.status, case.attention, plan.attention) == (Status.FAILED, True, ())


def test_a_compensation_that_is_rejected_has_failed_at_once() -> None:
    case = Case(call("a"), call("b"))
    case.succeeds("a")
    case.declines("b")
    case.declines("a", COMPENSATION)
    assert (case.status, case.attention) == (Status.FAILED, True)


def test_a_compensation_without_an_answer_is_asked_for_again_and_fails_in_the_end() -> None:
    case = Case(request("a"), call("b"))
    case.answer("yes", "a")
    case.declines("b")
    case.advance(seconds=10)
    assert described(case.advance(seconds=2)) == ["send a compensation 2"]
    case.advance(seconds=10)
    assert (case.status, case.progress("a", COMPENSATION)) == (Status.FAILED, StepStatus.FAILED)


def test_a_rejected_pivot_compensates_what_came_before_it() -> None:
    case = Case(call("a"), call("b", pivot=True, compensate=False))
    case.succeeds("a")
    case.declines("b")
    assert (case.status, case.compensated()) == (Status.COMPENSATING, ["a"])


def test_nothing_is_compensated_after_the_pivot() -> None:
    case = Case(call("a"), call("b", pivot=True, compensate=False), call("c", compensate=False))
    case.succeeds("a")
    case.succeeds("b")
    plan = case.declines("c")
    assert (case.status, case.attention, case.compensated()) == (Status.FAILED, True, [])
    assert plan.attention == ("action of c failed: rejected after the pivot: no",)


def test_attempts_that_run_out_after_the_pivot_compensate_nothing() -> None:
    case = Case(local("a"), local("b", pivot=True, compensate=False), local("c", compensate=False))
    case.succeeds("a")
    case.succeeds("b")
    case.exhausts("c")
    assert (case.status, case.attention, case.compensated()) == (Status.FAILED, True, [])


def test_a_rejection_beside_a_pivot_that_succeeds_compensates_nothing() -> None:
    case = Case(call("a"), [call("b", pivot=True, compensate=False), call("c")])
    case.succeeds("a")
    case.declines("c")
    case.succeeds("b")
    assert (case.status, case.compensated()) == (Status.FAILED, [])


def test_only_a_message_can_advance_a_saga_that_waits_without_a_deadline() -> None:
    case = Case(wait("a", seconds=None))
    assert (case.plan.release, case.plan.wake_seconds) == (True, None)


def test_the_saga_wakes_for_whatever_is_due_first() -> None:
    case = Case([sleep("a", 7), wait("b", 5), call("c")])
    assert (case.plan.release, case.plan.wake_seconds) == (False, 5)
    plan = case.raises("c")
    assert (plan.release, plan.wake_seconds) == (True, 2)


def test_the_worker_times_its_own_calls_so_the_saga_does_not_wake_for_them() -> None:
    assert Case([sleep("a", 20), call("b")]).plan.wake_seconds == 20


def test_the_current_step_is_the_first_that_is_under_way_or_one_that_failed() -> None:
    case = Case([wait("a", seconds=99), call("b", compensate=False)])
    assert case.stored.instance.current_step == "a"
    case.exhausts("b")
    assert (case.status, case.stored.instance.current_step) == (Status.FAILED, "b")


def test_the_journal_has_the_position_the_start_and_the_end_of_a_step() -> None:
    case = Case(call("a"), call("b"))
    began = case.stored.now
    case.raises("a")
    case.advance(seconds=2)
    case.succeeds("a")
    entry = case.entry("a")
    assert (entry.position, entry.started_at, entry.ended_at) == (1, began, case.stored.now)
    assert (entry.attempts, entry.error, entry.due_at) == (2, None, None)
    assert case.entry("b").position == 2


def test_the_same_record_and_inputs_give_the_same_plan() -> None:
    case = Case([call("a"), request("b")], call("c"))
    case.deliver("yes", "b")
    record, inputs = case.stored.load(), [Raised("a", Phase.ACTION, "broke")]
    plans = [advance(case.definition, record, inputs, random.Random(5)) for _ in range(2)]
    assert plans[0] == plans[1]


def test_nothing_happens_to_a_saga_that_has_ended() -> None:
    case = Case(call("a"))
    case.succeeds("a")
    record = case.stored.load()
    assert advance(case.definition, record, [Claimed()], random.Random(1)) == Plan(record.instance, release=True)


def test_every_change_is_noted_with_both_statuses_and_who_made_it() -> None:
    case = Case(call("a"))
    notes = case.succeeds("a").notes
    assert [(note.old_status, note.new_status, note.step, note.what, note.actor) for note in notes] == [
        (Status.RUNNING, Status.RUNNING, "a", "action done", "w"),
        (Status.RUNNING, Status.COMPLETED, None, "became completed", "w"),
    ]


def test_a_saga_whose_step_is_gone_from_the_definition_stops_with_the_remedy_and_keeps_its_journal() -> None:
    case = Case(call("a"), call("b"))
    journal, old = dict(case.stored.journal), case.definition
    case.definition = saga(call("b"))
    plan = case.advance(Claimed())
    assert [(note.old_status, note.new_status) for note in plan.notes] == [(Status.RUNNING, Status.FAILED)]
    assert (case.status, case.attention, case.stored.journal) == (Status.FAILED, True, journal)
    assert "give the changed definition a new version" in plan.attention[0]
    assert plan.notes[0].detail == plan.attention[0]
    assert "ignored, because version 1 of order has no a" in case.order("retry").notes[0].detail
    case.definition = old
    assert described(case.advance(Claimed())) == []
    case.deliver("retry")
    assert described(case.advance(Claimed())) == ["call a action 1"]


def test_a_parked_saga_needs_attention_until_it_goes_on_whatever_comes() -> None:
    case = Case([request("a"), wait("b")])
    whole, case.definition = case.definition, saga(wait("b"))
    case.answer("event b")
    assert (case.status, case.attention, case.messages) == (Status.FAILED, True, ["event b"])
    case.definition = whole
    case.deliver("yes", "a")
    plan = case.advance(Claimed())
    assert (case.status, case.attention, plan.attention) == (Status.FAILED, True, ())
    case.order("retry")
    assert (case.status, case.attention) == (Status.COMPLETED, False)


def test_a_saga_whose_compensation_is_gone_from_the_definition_stops_with_the_remedy() -> None:
    case = Case(call("a"), call("b"))
    case.succeeds("a")
    case.declines("b")
    case.definition = saga(call("a", compensate=False), call("b"))
    assert "no compensation of it" in case.advance(Claimed()).attention[0]


def test_what_cannot_be_recorded_needs_a_person_at_once_and_nothing_is_compensated() -> None:
    case = Case(call("a"), call("b"))
    case.succeeds("a")
    case.advance(InvalidResult("b", Phase.ACTION, "the state holds a socket"))
    assert (case.status, case.attention, case.compensated()) == (Status.FAILED, True, [])


def test_a_result_of_an_attempt_that_was_given_up_changes_nothing() -> None:
    case = Case(call("a"))
    case.times_out("a")
    assert case.succeeds("a").entries == ()
    assert case.progress("a") is StepStatus.RETRYING


def test_a_result_without_a_waiting_step_is_noted_and_changes_nothing() -> None:
    case = Case(call("a"), call("b"))
    case.succeeds("a")
    plan = case.advance(Succeeded("a", Phase.ACTION))
    assert (plan.entries, plan.actions, [note.what for note in plan.notes]) == ((), (), ["result ignored"])
