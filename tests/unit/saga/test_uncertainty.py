"""The rules of uncertainty: decisions read typed columns of the journal, never the wording of an error."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from outrider.saga.explain import explain
from outrider.saga.model import Status, StepStatus, Uncertainty, Undelivered
from outrider.saga.planner.planner import Claimed, Input, Plan, Raised
from tests.support.planner_case import ACTION, Case, call, request, wait


class Reworded(Case):
    """A saga whose stored errors are replaced by another text before each turn."""

    def advance(self, *inputs: Input, seconds: float = 0, where: Undelivered | None = None) -> Plan:
        for key, entry in self.stored.journal.items():
            self.stored.journal[key] = replace(entry, error=entry.error and "corrected wording")
        return super().advance(*inputs, seconds=seconds, where=where)


def a_call_times_out_and_then_raises(case: Case) -> None:
    case.times_out("a")
    case.advance(seconds=5)
    case.raises("a")


def a_worker_is_lost_and_the_next_attempt_raises(case: Case) -> None:
    case.advance(Claimed())
    case.raises("a")


def an_answer_comes_after_the_step_has_failed(case: Case) -> None:
    case.advance(seconds=10)
    case.advance(seconds=5)
    case.advance(seconds=10)
    case.answer("yes", "a")


def a_command_is_stuck_in_the_outbox_and_then_a_dead_letter(case: Case) -> None:
    case.advance(seconds=10)
    case.advance(seconds=5)
    for where in (Undelivered.WAITING, Undelivered.WAITING, Undelivered.DEAD_LETTER, None, None):
        case.advance(seconds=10, where=where)


def an_answer_cannot_be_applied_and_another_comes(case: Case) -> None:
    case.deliver("yes", "a")
    case.advance(Raised("a", ACTION, "no such field", reply=True))
    case.advance(Raised("a", ACTION, "no such field", reply=True), seconds=5)
    case.answer("yes", "a")


def an_event_comes_after_the_pivot_made_its_absence_a_failure(case: Case) -> None:
    case.advance(seconds=10)
    case.succeeds("p")
    case.advance()


STORIES: list[tuple[Callable[[Case], None], Any]] = [
    (a_call_times_out_and_then_raises, lambda: (call("a"),)),
    (a_worker_is_lost_and_the_next_attempt_raises, lambda: (call("a"),)),
    (an_answer_comes_after_the_step_has_failed, lambda: (request("a"),)),
    (a_command_is_stuck_in_the_outbox_and_then_a_dead_letter, lambda: (request("a"),)),
    (an_answer_cannot_be_applied_and_another_comes, lambda: (request("a"),)),
    (an_event_comes_after_the_pivot_made_its_absence_a_failure, lambda: ([call("p", pivot=True), wait("a")],)),
]


def decided(case: Case) -> Any:
    """Return the decisions about a saga, without any text that is meant for people."""
    plan, record = case.plan, case.stored.load()
    helps = [suggestion.command for suggestion in explain(record, case.definition).helps]
    return (
        [replace(entry, error=None) for entry in record.journal],
        (plan.instance.status, plan.instance.needs_attention, plan.instance.current_step, plan.instance.retry_count),
        (plan.actions, plan.taken, plan.seen, plan.release, plan.wake_seconds, len(plan.attention)),
        helps,
    )


@pytest.mark.parametrize(("story", "steps"), STORIES, ids=[story.__name__ for story, _ in STORIES])
def test_another_wording_of_a_stored_error_changes_no_decision(story: Callable[[Case], None], steps: Any) -> None:
    plain, reworded = Case(*steps()), Reworded(*steps())
    story(plain)
    story(reworded)
    assert decided(plain) == decided(reworded)


def test_the_wording_of_an_error_that_looks_like_uncertainty_is_none() -> None:
    case = Case(call("a", attempts=1))
    case.advance(Raised("a", ACTION, "unknown whether it happened"))
    assert (case.entry("a").uncertainty, case.status) == (None, Status.COMPENSATING)


def test_an_unknown_outcome_stays_unknown_until_the_step_is_settled() -> None:
    case = Case(call("a"))
    case.times_out("a")
    case.advance(seconds=5)
    assert (case.progress("a"), case.entry("a").uncertainty) == (StepStatus.STARTED, Uncertainty.OUTCOME_UNKNOWN)
    case.succeeds("a")
    assert case.entry("a").uncertainty is None


def test_command_and_reply_are_kept_side_by_side() -> None:
    case = Case(request("a"))
    asked = case.entry("a").command_event_id
    case.answer("yes", "a")
    settled = case.entry("a")
    assert settled.command_event_id == asked
    assert settled.reply_event_id not in (None, asked)
