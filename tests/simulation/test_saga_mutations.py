"""The simulation of sagas notices a missing rule: some world breaks a guarantee."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from typing import Any

import pytest

from outrider.saga.definition.steps import StepKind, base_name
from outrider.saga.execution import turn
from outrider.saga.execution.turn import Saved, TurnInput, TurnResult, TurnTransaction
from outrider.saga.model import (
    Claim,
    JournalEntry,
    Phase,
    SagaChange,
    SagaMessage,
    SagaRecord,
    Status,
    StepStatus,
    Uncertainty,
)
from outrider.saga.planner import compensation, operator_commands, planner, replies, results
from outrider.saga.planner import journal as journals
from outrider.saga.planner.actions import CallAction, Outage, key_of
from outrider.saga.planner.journal import OPEN, Journal, StepKey
from outrider.saga.planner.planner import is_halted
from outrider.stores.memory import MemoryTransaction
from outrider.stores.memory import saga as memory_saga
from tests.simulation.sagas.mutations import Breaks, Mutation, check_some_world_breaks
from tests.simulation.sagas.world import run

SEEDS = 1_000


def a_new_key_for_each_attempt(patch: pytest.MonkeyPatch) -> None:
    def changing(step: str, phase: Phase, attempt: int, key: str) -> CallAction:
        return CallAction(step, phase, attempt, f"{key}:{attempt}")

    patch.setitem(journals.ACTIONS, StepKind.CALL, changing)


def what_timed_out_did_not_happen(patch: pytest.MonkeyPatch) -> None:
    def refuse(journal: Journal, entry: JournalEntry, error: str) -> None:
        journal.settle(entry, StepStatus.REJECTED, error)

    patch.setattr(results, "apply_unknown_outcome", refuse)


def compensating_does_not_wait_for_what_is_under_way(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(compensation, "stop_idle_steps", lambda journal, reason: True)


def steps_are_compensated_first_to_last(patch: pytest.MonkeyPatch) -> None:
    start_next_compensation = compensation.start_next_compensation

    def go_forth(journal: Journal) -> None:
        planned = journal.entries(Phase.COMPENSATION, (StepStatus.PLANNED,))
        if planned and not journal.entries(Phase.COMPENSATION, OPEN):
            return journal.start(planned[-1])
        return start_next_compensation(journal)

    patch.setattr(compensation, "start_next_compensation", go_forth)


def a_failed_compensation_stops_the_others(patch: pytest.MonkeyPatch) -> None:
    start_next_compensation = compensation.start_next_compensation

    def stop(journal: Journal) -> None:
        if journal.entries(Phase.COMPENSATION, (StepStatus.FAILED,)) and not journal.entries(Phase.COMPENSATION, OPEN):
            return journal.set_status(Status.FAILED)
        return start_next_compensation(journal)

    patch.setattr(compensation, "start_next_compensation", stop)


def a_failed_compensation_counts_as_done(patch: pytest.MonkeyPatch) -> None:
    set_status = Journal.set_status

    def pretend(journal: Journal, status: Status, detail: str = "") -> None:
        failed = status is Status.FAILED and journal.is_compensating
        set_status(journal, Status.COMPENSATED if failed else status, detail)

    patch.setattr(Journal, "set_status", pretend)


def there_is_a_way_back_after_the_pivot(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Journal, "past_pivot", property(lambda journal: False))


def a_command_to_compensate_does_not_wait_for_the_pivot(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(operator_commands, "_pivot_is_out", lambda journal: False)


def a_command_that_waited_for_the_pivot_does_not_care_what_came_of_it(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(operator_commands, "_pivot_failed_since", lambda journal, mail: False)


def an_attempt_that_raised_tells_what_came_of_an_earlier_one(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(results, "_earlier_uncertainty", lambda entry: None)


def an_answer_that_comes_late_counts_for_nothing(patch: pytest.MonkeyPatch) -> None:
    would_take = replies._can_take

    def only_open(journal: Journal, place: StepKey, mail: SagaMessage) -> bool:
        return journal.has_status(place, *OPEN) and would_take(journal, place, mail)

    patch.setattr(replies, "_can_take", only_open)


def a_command_to_compensate_leaves_out_what_may_have_happened(patch: pytest.MonkeyPatch) -> None:
    def only_done(journal: Journal, entry: JournalEntry) -> bool:
        return journal.step(entry).compensation is not None and entry.status is StepStatus.DONE

    patch.setattr(compensation, "needs_compensation", only_done)


def a_call_that_raised_did_not_happen(patch: pytest.MonkeyPatch) -> None:
    def refuse(journal: Journal, entry: JournalEntry, error: str, after: str = "") -> None:
        journal.settle(entry, StepStatus.REJECTED, after + error)

    patch.setattr(results, "reject_and_compensate", refuse)


def what_a_lost_worker_had_begun_is_left_alone(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(results, "restart_interrupted", lambda journal: None)


def a_lost_worker_costs_an_attempt(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Journal, "repeat", lambda journal, entry, detail: journal.start(entry))


def losses_have_no_end(patch: pytest.MonkeyPatch) -> None:
    restart = results.restart_interrupted

    def forget_losses(journal: Journal) -> None:
        journal.losses = 0
        restart(journal)

    patch.setattr(results, "restart_interrupted", forget_losses)


def an_early_event_is_dropped(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(replies, "_can_wait", lambda journal, place: journal.has_status(place, *OPEN))


def late_replies_are_kept(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(replies, "drop_unneeded", lambda journal: None)


def deadlines_come_before_replies(patch: pytest.MonkeyPatch) -> None:
    read = replies.read

    def read_late(journal: Journal) -> None:
        if not is_halted(journal):
            results.apply_deadlines(journal)
        read(journal)

    patch.setattr(replies, "read", read_late)


def a_command_that_has_not_left_counts_an_attempt(patch: pytest.MonkeyPatch) -> None:
    def count(journal: Journal, entry: JournalEntry, _: object) -> None:
        results.apply_unknown_outcome(journal, entry, "no answer within a time")

    patch.setattr(results, "_extend_deadline", count)


def attempts_have_no_end(patch: pytest.MonkeyPatch) -> None:
    retry = Journal.retry

    def for_ever(journal: Journal, entry: JournalEntry, error: str, uncertainty: Uncertainty | None = None) -> bool:
        if not retry(journal, entry, error, uncertainty):
            journal.start(entry)
        return True

    patch.setattr(Journal, "retry", for_ever)


def an_unavailable_service_costs_an_attempt(patch: pytest.MonkeyPatch) -> None:
    wait_for_service = Journal.wait_for_service

    def charge(journal: Journal, entry: JournalEntry, outage: Outage) -> None:
        wait_for_service(journal, replace(entry, attempts=entry.attempts + 1), outage)

    patch.setattr(Journal, "wait_for_service", charge)


def a_call_that_waits_for_its_service_forgets_what_may_have_happened_before(patch: pytest.MonkeyPatch) -> None:
    wait_for_service = Journal.wait_for_service

    def forget(journal: Journal, entry: JournalEntry, outage: Outage) -> None:
        wait_for_service(journal, replace(entry, uncertainty=None), outage)

    patch.setattr(Journal, "wait_for_service", forget)


def a_worker_that_lost_its_claim_saves_anyway(patch: pytest.MonkeyPatch) -> None:
    def save_unfenced(tx: MemoryTransaction, claim: Claim, change: SagaChange, lease_seconds: float) -> Any:
        known = tx.store.sagas.sagas.seen_by(tx, claim.saga_id).instance
        assert known is not None
        change = replace(change, instance=replace(change.instance, version=known.version))
        return save(tx, claim._replace(worker=known.owner or claim.worker, epoch=known.epoch), change, lease_seconds)

    save = memory_saga.save
    patch.setattr(memory_saga, "save", save_unfenced)
    patch.setattr(turn, "require_claim", lambda record, claim: record)


def a_turn_that_was_saved_unnoticed_is_ignored(patch: pytest.MonkeyPatch) -> None:
    async def load(self: TurnTransaction, tx: Any, *, lock: bool) -> SagaRecord:
        return turn.require_claim(await self.context.store.load(tx, self.claim.saga_id, for_update=lock), self.claim)

    patch.setattr(TurnTransaction, "_load", load)


def a_call_begins_before_its_turn_is_saved(patch: pytest.MonkeyPatch) -> None:
    stages = TurnTransaction._stages

    async def call_early(self: TurnTransaction, tx: Any, given: TurnInput) -> TurnResult:
        result = await stages(self, tx, given)
        if isinstance(result, Saved):
            for action in result.plan.actions:
                if isinstance(action, CallAction):
                    asyncio.get_running_loop().create_task(self.executor.call(result.record.instance, action))
        return result

    patch.setattr(TurnTransaction, "_stages", call_early)


def a_condition_is_computed_before_the_reply_of_its_turn_is_applied(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(planner, "ApplyReply", type("Nothing", (), {}))


def a_condition_is_computed_again_in_each_turn(patch: pytest.MonkeyPatch) -> None:
    init = Journal.__post_init__

    def forget(journal: Journal) -> None:
        init(journal)
        skipped = [key for key, entry in journal.lines.items() if entry.status is StepStatus.SKIPPED]
        for key in skipped:
            del journal.lines[key]

    patch.setattr(Journal, "__post_init__", forget)


def a_deadline_is_not_noticed(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Journal, "is_overdue", property(lambda journal: False))


def all_items_have_the_key_of_their_step(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(journals, "key_of", lambda saga_id, step: key_of(saga_id, base_name(step)))


def items_are_not_compensated(patch: pytest.MonkeyPatch) -> None:
    needs_compensation = compensation.needs_compensation

    def only_steps(journal: Journal, entry: JournalEntry) -> bool:
        return base_name(entry.step) == entry.step and needs_compensation(journal, entry)

    patch.setattr(compensation, "needs_compensation", only_steps)


def a_list_is_computed_again_by_the_next_worker(patch: pytest.MonkeyPatch) -> None:
    init = Journal.__post_init__

    def forget(journal: Journal) -> None:
        init(journal)
        for name, step in journal.base.steps.items():
            entry = journal.lines.get((name, Phase.ACTION))
            if step.for_each and entry and entry.status is StepStatus.STARTED and journal.lost:
                journal.lines[name, Phase.ACTION] = replace(entry, status=StepStatus.PLANNED)

    patch.setattr(Journal, "__post_init__", forget)


MUTATIONS: dict[Mutation, Breaks] = {
    a_new_key_for_each_attempt: Breaks("happened", 12),
    what_timed_out_did_not_happen: Breaks("happened", 2),
    compensating_does_not_wait_for_what_is_under_way: Breaks("compensation began while", 46),
    steps_are_compensated_first_to_last: Breaks("compensated in the order", 17),
    a_failed_compensation_stops_the_others: Breaks("was not compensated", 178),
    a_failed_compensation_counts_as_done: Breaks("it is compensated, and needs_attention", 23),
    there_is_a_way_back_after_the_pivot: Breaks("pivot", 22),
    a_command_to_compensate_does_not_wait_for_the_pivot: Breaks("pivot was", 55),
    a_command_that_waited_for_the_pivot_does_not_care_what_came_of_it: Breaks(
        "the outcome of the pivot was unknown", 55
    ),
    an_attempt_that_raised_tells_what_came_of_an_earlier_one: Breaks("may be on its way", 32),
    an_answer_that_comes_late_counts_for_nothing: Breaks("its reply lies in the mailbox", 104),
    a_command_to_compensate_leaves_out_what_may_have_happened: Breaks("stands at 1", 18),
    a_call_that_raised_did_not_happen: Breaks("happened", 27),
    what_a_lost_worker_had_begun_is_left_alone: Breaks("does not come to rest", 9),
    a_lost_worker_costs_an_attempt: Breaks("an attempt", 9),
    losses_have_no_end: Breaks("runs again after", 24),
    an_early_event_is_dropped: Breaks("its event had come", 2),
    late_replies_are_kept: Breaks("messages", 10),
    deadlines_come_before_replies: Breaks("its event had come", 39),
    attempts_have_no_end: Breaks("attempted", 1),
    a_command_that_has_not_left_counts_an_attempt: Breaks("had not left", 1),
    an_unavailable_service_costs_an_attempt: Breaks("cost", 2),
    a_call_that_waits_for_its_service_forgets_what_may_have_happened_before: Breaks("may be on its way", 32),
    a_worker_that_lost_its_claim_saves_anyway: Breaks("a worker saved without its claim", 56),
    a_turn_that_was_saved_unnoticed_is_ignored: Breaks("happened 2 times", 189),
    a_condition_is_computed_before_the_reply_of_its_turn_is_applied: Breaks("and its condition is", 98),
    a_condition_is_computed_again_in_each_turn: Breaks("was skipped and is", 2),
    a_deadline_is_not_noticed: Breaks("the deadline", 130),
    all_items_have_the_key_of_their_step: Breaks("did not happen", 35),
    items_are_not_compensated: Breaks("stands at 1", 17),
    a_list_is_computed_again_by_the_next_worker: Breaks("has changed", 133),
    a_call_begins_before_its_turn_is_saved: Breaks("was called before its turn was saved", 2),
}


@pytest.mark.parametrize("mutation", MUTATIONS, ids=lambda mutation: str(mutation.__name__))
def test_some_world_breaks_when(mutation: Mutation, monkeypatch: pytest.MonkeyPatch) -> None:
    mutation(monkeypatch)
    check_some_world_breaks(run, SEEDS, MUTATIONS[mutation])
