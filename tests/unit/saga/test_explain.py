"""Explanations of a saga's state, from the journal, the messages, the owner and the time."""

from __future__ import annotations

from dataclasses import replace
from datetime import timedelta

import pytest

from outrider.saga.definition.steps import Definition, Step
from outrider.saga.execution.turn import hand_over
from outrider.saga.explain import GRACE_SECONDS, Explanation, explain
from outrider.saga.model import Phase, SagaRecord, Status
from outrider.saga.planner.planner import Raised
from tests.support.planner_case import Case, call, local, nothing, request, sleep, wait
from tests.support.stored_saga import LEASE_SECONDS, SAGA_ID

COMPENSATION = Phase.COMPENSATION


def look(case: Case, *, seconds: float = 0, read: bool = True) -> SagaRecord:
    """Return what is known so much later; what was not read came after the last turn."""
    record = case.stored.load()
    posted = min((message.delivered_at for message in record.messages), default=record.now)
    updated = record.now if read else posted - timedelta(seconds=1)
    instance = replace(record.instance, updated_at=updated, ended_at=record.now)
    return record._replace(instance=instance, now=record.now + timedelta(seconds=seconds))


def explained(
    case: Case, definition: Definition | None = None, *, seconds: float = 0, read: bool = True
) -> Explanation:
    return explain(look(case, seconds=seconds, read=read), definition or case.definition)


def words(explanation: Explanation) -> str:
    return "\n".join(explanation.reasons)


def suggested(explanation: Explanation) -> list[str]:
    return [command.split()[2] for command, _ in explanation.helps]


def test_a_request_says_what_answers_it_how_often_it_was_asked_and_when_again() -> None:
    case = Case(request("reserve"))
    assert "waits for reply yes or no of step reserve, asked once since" in words(explained(case))
    assert "it is asked again after" in words(explained(case))
    case.advance(seconds=10)
    case.advance(seconds=5)
    assert "asked 2 times" in words(explained(case))
    assert "an operator must decide from" in words(explained(case))


def test_a_step_that_waits_for_a_message_or_a_time_needs_no_worker() -> None:
    explanation = explained(Case(wait("collected", seconds=None)))
    assert "step collected waits for the event event collected since" in words(explanation)
    assert "no worker need look at it before a reply or an operator command arrives" in words(explanation)
    assert "counts as rejected" in words(explained(Case(wait("collected"))))
    assert "sleeps until" in words(explained(Case(sleep("rest", 10))))
    assert "(in 10.0 s), or a reply or an operator command arrives" in words(explained(Case(sleep("rest", 10))))
    assert suggested(explanation) == ["mark-done", "compensate"]


def test_a_step_under_way_names_its_worker_until_the_end_of_the_claim() -> None:
    case = Case(call("charge"))
    explanation = explained(case, seconds=1)
    assert "step charge is being done, attempt 1" in words(explanation)
    assert "w works on it, and has it until" in words(explanation)
    assert suggested(explanation) == ["compensate"]
    late = explained(case, seconds=LEASE_SECONDS + GRACE_SECONDS)
    assert "step charge was running when its worker released it, attempt 1" in words(late)
    assert "no worker runs it; w held it until then, and has not renewed its claim" in words(late)
    assert "No worker that holds version 1 of order is running" in words(late)
    assert suggested(late)[0] == "run"


def test_what_is_due_is_overdue_only_after_a_while() -> None:
    case = Case(sleep("rest", 10))
    assert "it is due now" in words(explained(case, seconds=10))
    assert "overdue since" in words(explained(case, seconds=10 + GRACE_SECONDS))


def test_an_unread_message_makes_a_saga_overdue() -> None:
    case = Case(wait("collected", seconds=None))
    case.deliver("event collected")
    assert "the event event collected came" in words(explained(case, read=False))
    assert "it is due now" in words(explained(case, read=False))
    assert "no turn has read it yet" in words(explained(case, read=False, seconds=60))
    assert "overdue since" in words(explained(case, read=False, seconds=60))


def test_an_event_that_came_early_is_kept() -> None:
    case = Case(call("charge"), wait("collected"))
    case.answer("event collected")
    assert "kept for a step that is still to come" in words(explained(case))


def test_a_failed_attempt_shows_its_error_and_the_next_attempt() -> None:
    case = Case(call("charge"))
    case.raises("charge")
    explanation = explained(case)
    assert "step charge did not succeed in attempt 1 of 2: broke; the next attempt is due" in words(explanation)
    assert suggested(explanation) == ["retry", "compensate"]


def test_what_was_handed_over_before_it_began_has_made_no_attempt() -> None:
    case = Case(call("charge"))
    record = look(case)
    left = hand_over(replace(case.plan, release=False), record, [])
    explanation = explain(record._replace(journal=left.entries), case.definition)
    assert explanation.reasons[0].startswith("step charge is to be begun, due ")


def test_a_failed_step_offers_every_way_out() -> None:
    case = Case(local("create"), call("charge", compensate=False))
    case.succeeds("create")
    case.exhausts("charge")
    explanation = explained(case)
    assert case.status is Status.FAILED
    assert "step charge has failed after 2 attempts: broke" in words(explanation)
    assert suggested(explanation) == ["retry", "mark-done", "compensate"]
    assert explanation.helps[-1].effect.endswith("see first that charge did not happen, since it has no compensation")
    assert all(str(SAGA_ID) in command for command, _ in explanation.helps)


def test_an_unread_operator_command_for_a_failed_saga_is_reported() -> None:
    case = Case(call("charge", compensate=False))
    case.exhausts("charge")
    assert "overdue" not in words(explained(case, seconds=60))
    case.deliver("retry")
    explanation = explained(case, seconds=60, read=False)
    assert "overdue since" in words(explanation)
    assert suggested(explanation)[0] == "run"


def test_an_answer_in_the_mailbox_of_a_failed_saga_is_reported() -> None:
    case = Case(request("reserve", attempts=1, reply_functions={"yes": nothing}), wait("collected"))
    case.advance(seconds=10)
    assert "if the reply to step reserve arrives late, it settles the step" in words(explained(case))
    case.deliver("event collected")
    case.deliver("yes", "reserve")
    assert words(explained(case, read=False)).count("no turn has read it yet") == 2
    case.advance(Raised("reserve", Phase.ACTION, "bad reply", reply=True))
    explanation = words(explained(case))
    assert case.status is Status.FAILED
    assert "its reply cannot be applied: bad reply" in explanation
    assert "kept for step reserve, which could not apply it" in explanation
    assert "the event event collected came" in explanation
    assert "kept for a step that is still to come" in explanation
    assert "kept for a step that has failed, or is still to come" in words(explain(look(case)))


def test_after_the_pivot_compensate_is_not_suggested() -> None:
    case = Case(call("charge", pivot=True, compensate=False), call("ship", compensate=False))
    case.succeeds("charge")
    assert "compensate" not in suggested(explained(case))
    case.exhausts("ship")
    assert suggested(explained(case)) == ["retry", "mark-done"]
    unknown = explain(look(case))
    assert unknown.helps[-1].effect.endswith("unless its pivot is done")


def test_an_operator_command_waits_for_a_worker_or_for_the_end_of_the_pivot() -> None:
    case = Case(local("create"), call("charge", pivot=True, compensate=False))
    case.succeeds("create")
    case.deliver("retry")
    case.deliver("compensate")
    assert "ann commanded retry" in words(explained(case))
    assert "a worker applies it next" in words(explained(case))
    assert "a worker applies it once the pivot charge has ended" in words(explained(case))


def test_compensate_waits_for_a_call_in_progress() -> None:
    case = Case(call("charge"))
    case.order("compensate")
    assert "a worker applies it once the call charge has ended" in words(explained(case, seconds=1))
    assert "a worker applies it next" in words(explained(case, seconds=LEASE_SECONDS + 1))


def test_what_happens_at_this_very_moment_was_not_less_than_no_time_ago() -> None:
    case = Case(call("charge", compensate=False))
    case.exhausts("charge")
    assert "(0 ms ago)" in words(explained(case))


def test_compensation_says_what_is_being_compensated_and_what_is_still_to_come() -> None:
    case = Case(local("create"), request("reserve"), call("charge"))
    case.succeeds("create")
    case.answer("yes", "reserve")
    case.declines("charge")
    explanation = explained(case)
    assert "waits for reply compensated of the compensation of step reserve, asked once" in words(explanation)
    assert "still to be compensated: create" in words(explanation)
    assert suggested(explanation) == ["mark-done"]


def test_a_failed_compensation_is_reported_at_once_and_at_the_end() -> None:
    case = Case(local("create"), call("book"), call("charge"))
    case.succeeds("create")
    case.succeeds("book")
    case.declines("charge")
    case.exhausts("book", COMPENSATION)
    assert case.progress("create", COMPENSATION) == "started"
    assert "the compensation of step book has failed after 2 attempts: broke" in words(explained(case))
    case.succeeds("create", phase=COMPENSATION)
    assert case.status is Status.FAILED
    assert "the compensation of step book has failed after 2 attempts: broke" in words(explained(case))
    assert suggested(explained(case)) == ["retry", "mark-done"]


def test_what_is_over_says_so_and_offers_nothing() -> None:
    done = Case(local("create"))
    done.succeeds("create")
    assert words(explained(done)).startswith("completed at")
    compensated = Case(local("create"), call("charge"))
    compensated.succeeds("create")
    compensated.declines("charge")
    compensated.succeeds("create", phase=COMPENSATION)
    assert explained(compensated).reasons[0] == "step charge was rejected: no"
    assert "compensated at" in words(explained(compensated))
    raised = Case(local("create", attempts=1))
    raised.raises("create")
    assert (
        explained(raised).reasons[0]
        == "step create was rejected: raised in its last attempt, and was rolled back: broke"
    )
    given_up = Case(request("reserve"))
    given_up.order("compensate")
    given_up.answer("compensated", "reserve")
    assert explained(given_up).reasons[0] == "step reserve failed: given up, because an operator commanded compensation"
    assert explained(done).helps == explained(compensated).helps == ()


@pytest.mark.parametrize(
    ("step", "explanation"), [(call("a"), "step a is being done"), (sleep("a"), "step a waits for an")]
)
def test_without_the_definition_the_words_are_less_precise(step: Step, explanation: str) -> None:
    case = Case(step)
    assert explanation in words(explain(look(case)))


def test_a_saga_whose_definition_was_changed_under_it_says_so() -> None:
    case = Case(local("create"))
    case.definition = Case(local("other")).definition
    case.advance()
    explanation = explained(case)
    assert "has no create" in words(explanation)
    assert suggested(explanation)[0] == "retry"
    assert "mark-done" not in suggested(explanation)
    assert explanation.helps[0].effect == "continues where it stopped, after the cause is removed"


def test_a_fresh_saga_has_begun_nothing() -> None:
    case = Case(local("create"))
    record = look(case)
    fresh = replace(record.instance, status=Status.STARTED, owner=None, wake_at=record.now)
    explanation = explain(record._replace(instance=fresh, journal=()), case.definition)
    assert explanation.reasons == (
        "no step has begun yet",
        "it is due now, and the next worker that holds version 1 of order takes it",
    )
