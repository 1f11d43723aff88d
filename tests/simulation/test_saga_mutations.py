"""The sagas' simulation would notice: take one rule away, and some world breaks a promise."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from outrider.saga import compensation, mailbox, orders, outcomes
from outrider.saga import journal as journals
from outrider.saga.journal import OPEN, Journal
from outrider.saga.news import Call
from outrider.saga.plan import halted
from outrider.saga.steps import Kind
from outrider.saga_store import Entry, Phase, Progress, Status
from tests.simulation.sagas.world import Unsound, run

SEEDS = 1_000
Mutation = Callable[[pytest.MonkeyPatch], None]


def first_unsound() -> str:
    """Return what went wrong in the first world that broke a promise."""
    for seed in range(SEEDS):
        try:
            run(seed)
        except Unsound as found:
            return str(found)
    pytest.fail(f"{SEEDS} worlds did without this rule, so they prove nothing about it")


def a_new_key_for_each_attempt(patch: pytest.MonkeyPatch) -> None:
    def changing(step: str, phase: Phase, attempt: int, key: str) -> Call:
        return Call(step, phase, attempt, f"{key}:{attempt}")

    patch.setitem(journals.MOVES, Kind.CALL, changing)


def what_timed_out_did_not_happen(patch: pytest.MonkeyPatch) -> None:
    def refuse(journal: Journal, entry: Entry, error: str) -> None:
        journal.settle(entry, Progress.REFUSED, error)

    patch.setattr(outcomes, "unknown", refuse)


def undoing_does_not_wait_for_what_is_under_way(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(compensation, "let_go", lambda journal: True)


def steps_are_undone_first_to_last(patch: pytest.MonkeyPatch) -> None:
    go_back = compensation.go_back

    def go_forth(journal: Journal) -> None:
        planned = journal.of(Phase.COMPENSATION, (Progress.PLANNED,))
        if planned and not journal.of(Phase.COMPENSATION, OPEN):
            return journal.intend(planned[-1])
        return go_back(journal)

    patch.setattr(compensation, "go_back", go_forth)


def a_failed_compensation_stops_the_others(patch: pytest.MonkeyPatch) -> None:
    go_back = compensation.go_back

    def stop(journal: Journal) -> None:
        if journal.of(Phase.COMPENSATION, (Progress.FAILED,)) and not journal.of(Phase.COMPENSATION, OPEN):
            return journal.become(Status.FAILED)
        return go_back(journal)

    patch.setattr(compensation, "go_back", stop)


def a_failed_compensation_counts_as_done(patch: pytest.MonkeyPatch) -> None:
    become = Journal.become

    def pretend(journal: Journal, status: Status) -> None:
        become(journal, Status.COMPENSATED if status is Status.FAILED and journal.begun else status)

    patch.setattr(Journal, "become", pretend)


def there_is_a_way_back_after_the_pivot(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Journal, "past_pivot", property(lambda journal: False))


def an_order_to_compensate_does_not_wait_for_the_pivot(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(orders, "_pivot_is_out", lambda journal: False)


def an_order_that_waited_for_the_pivot_does_not_care_what_came_of_it(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(orders, "_pivot_failed_since", lambda journal, mail: False)


def an_attempt_that_raised_tells_what_came_of_an_earlier_one(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(outcomes, "doubted", lambda entry: False)


def an_answer_that_comes_late_counts_for_nothing(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(mailbox, "missed", lambda entry: False)


def an_order_to_compensate_leaves_out_what_may_have_happened(patch: pytest.MonkeyPatch) -> None:
    def only_done(journal: Journal, entry: Entry) -> bool:
        return journal.step(entry).undo is not None and entry.progress is Progress.DONE

    patch.setattr(compensation, "to_be_undone", only_done)


def a_call_that_raised_did_not_happen(patch: pytest.MonkeyPatch) -> None:
    def refuse(journal: Journal, entry: Entry, error: str, after: str = "") -> None:
        journal.settle(entry, Progress.REFUSED, after + error)

    patch.setattr(outcomes, "refused_but_perhaps_done", refuse)


def what_a_lost_worker_had_begun_is_left_alone(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(outcomes, "pick_up", lambda journal: None)


def an_early_event_is_dropped(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(mailbox, "_may_wait", lambda journal, place: journal.stands(place, *OPEN))


def late_replies_are_kept(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(mailbox, "tidy", lambda journal: None)


def deadlines_come_before_replies(patch: pytest.MonkeyPatch) -> None:
    read = mailbox.read

    def read_late(journal: Journal) -> None:
        if not halted(journal):
            outcomes.pass_time(journal)
        read(journal)

    patch.setattr(mailbox, "read", read_late)


def what_has_not_left_is_charged(patch: pytest.MonkeyPatch) -> None:
    def charge(journal: Journal, entry: Entry, _: object) -> None:
        outcomes.unknown(journal, entry, "no answer within a time")

    patch.setattr(outcomes, "_ask_for_patience", charge)


def attempts_have_no_end(patch: pytest.MonkeyPatch) -> None:
    retry = Journal.retry

    def for_ever(journal: Journal, entry: Entry, error: str) -> bool:
        if not retry(journal, entry, error):
            journal.intend(entry)
        return True

    patch.setattr(Journal, "retry", for_ever)


MUTATIONS: dict[Mutation, str] = {
    a_new_key_for_each_attempt: "happened",
    what_timed_out_did_not_happen: "happened",
    undoing_does_not_wait_for_what_is_under_way: "undoing began while",
    steps_are_undone_first_to_last: "undone in the order",
    a_failed_compensation_stops_the_others: "was not undone",
    a_failed_compensation_counts_as_done: "it is compensated, and needs_attention",
    there_is_a_way_back_after_the_pivot: "pivot",
    an_order_to_compensate_does_not_wait_for_the_pivot: "pivot was",
    an_order_that_waited_for_the_pivot_does_not_care_what_came_of_it: "what waited for the pivot was undone",
    an_attempt_that_raised_tells_what_came_of_an_earlier_one: "may be on its way",
    an_answer_that_comes_late_counts_for_nothing: "its answer lies in the box",
    an_order_to_compensate_leaves_out_what_may_have_happened: "stands at 1",
    a_call_that_raised_did_not_happen: "happened",
    what_a_lost_worker_had_begun_is_left_alone: "does not come to rest",
    an_early_event_is_dropped: "it rests and is running",
    late_replies_are_kept: "mail",
    deadlines_come_before_replies: "its event had come",
    attempts_have_no_end: "attempted",
    what_has_not_left_is_charged: "had not left",
}


@pytest.mark.parametrize("mutation", MUTATIONS, ids=lambda mutation: str(mutation.__name__))
def test_some_world_breaks_when(mutation: Mutation, monkeypatch: pytest.MonkeyPatch) -> None:
    mutation(monkeypatch)
    assert MUTATIONS[mutation] in first_unsound()
