"""The simulation of families notices a missing rule: some world breaks a guarantee."""

from __future__ import annotations

from typing import Any
from uuid import uuid5

import pytest

from outrider.saga import Saga
from outrider.saga.execution.turn import TurnTransaction
from outrider.saga.model import Instance, NewSaga, SagaMessage, Status
from outrider.saga.planner import children, compensation, planner
from outrider.saga.planner.journal import OPEN, Journal
from outrider.saga.state.encryption import StoredTurn
from tests.simulation.sagas.families import run_family
from tests.simulation.sagas.mutations import Breaks, Mutation, check_some_world_breaks

SEEDS = 300


def a_child_has_another_id_in_each_turn(patch: pytest.MonkeyPatch) -> None:
    child_of = Saga.child_of

    def renamed(saga: Saga[Any], parent: Instance, step: str, state: Any) -> NewSaga:
        new = child_of(saga, parent, step, state)
        saga_id = uuid5(new.saga_id, str(parent.version))
        return new._replace(saga_id=saga_id, correlation_id=str(saga_id))

    patch.setattr(Saga, "child_of", renamed)


def a_child_does_not_wait_for_its_parent(patch: pytest.MonkeyPatch) -> None:
    def complete(journal: Journal) -> None:
        journal.set_status(Status.COMPLETED)
        start_last_wait(journal)

    start_last_wait = children.start_last_wait
    patch.setattr(children, "start_last_wait", complete)


def a_child_does_not_report_its_outcome(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(children, "_reports", lambda journal: iter(()))


def a_parent_does_not_report_its_end(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(children, "_ends", lambda journal: iter(()))


def a_child_that_is_done_is_not_compensated(patch: pytest.MonkeyPatch) -> None:
    needs_compensation = compensation.needs_compensation

    def only_others(journal: Journal, entry: Any) -> bool:
        return journal.step(entry).child is None and needs_compensation(journal, entry)

    patch.setattr(compensation, "needs_compensation", only_others)


def compensation_does_not_wait_for_running_children(patch: pytest.MonkeyPatch) -> None:
    stop_idle_steps = compensation.stop_idle_steps

    def stop(journal: Journal, reason: str) -> bool:
        stop_idle_steps(journal, reason)
        return not [entry for entry in journal.entries(journal.phase, OPEN) if not journal.step(entry).child]

    patch.setattr(compensation, "stop_idle_steps", stop)


def a_command_to_compensate_does_not_reach_children(patch: pytest.MonkeyPatch) -> None:
    def only_wait(journal: Journal, command: SagaMessage | None = None) -> bool:
        return bool(children.awaited(journal))

    patch.setattr("outrider.saga.planner.operator_commands.children.call_off", only_wait)


def a_child_that_is_called_off_goes_on(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Journal, "is_called_off", property(lambda journal: False))


def a_deadline_of_a_child_counts_after_its_steps_are_done(patch: pytest.MonkeyPatch) -> None:
    reason = planner._reason_to_give_up

    def late(journal: Journal) -> str | None:
        deadline_at = journal.record.instance.deadline_at
        is_late = deadline_at is not None and deadline_at <= journal.now and not journal.past_pivot
        return planner.DEADLINE if is_late and journal.is_child else reason(journal)

    patch.setattr(planner, "_reason_to_give_up", late)


def a_command_compensates_a_child_whose_parent_has_completed(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Journal, "is_relied_on", property(lambda journal: journal.awaits_parent))


def a_message_is_sent_before_its_turn_is_committed(patch: pytest.MonkeyPatch) -> None:
    async def send_apart(self: TurnTransaction, tx: Any, stored: StoredTurn) -> None:
        store = self.context.store
        for child in stored.children:
            await store.start(tx, child)
        async with store.transaction() as own:
            await store.deliver(own, stored.messages)

    patch.setattr(TurnTransaction, "_send", send_apart)


MUTATIONS: dict[Mutation, Breaks] = {
    a_child_has_another_id_in_each_turn: Breaks("is a second child of", 0),
    a_child_does_not_wait_for_its_parent: Breaks("a child is completed, and its parent is running", 2),
    a_child_does_not_report_its_outcome: Breaks("its first parent is running", 2),
    a_parent_does_not_report_its_end: Breaks("its first parent is completed", 7),
    a_child_that_is_done_is_not_compensated: Breaks("a parent is compensated, and its child is running", 2),
    compensation_does_not_wait_for_running_children: Breaks("a parent compensates, and its child is running", 1),
    a_command_to_compensate_does_not_reach_children: Breaks("its first parent is running", 1),
    a_child_that_is_called_off_goes_on: Breaks("was called off and goes on", 1),
    a_deadline_of_a_child_counts_after_its_steps_are_done: Breaks("a child that was done compensates", 51),
    a_command_compensates_a_child_whose_parent_has_completed: Breaks("a child that was done compensates", 9),
    a_message_is_sent_before_its_turn_is_committed: Breaks("is completed, and its", 9),
}


@pytest.mark.parametrize("mutation", MUTATIONS, ids=lambda mutation: str(mutation.__name__))
def test_some_family_breaks_when(mutation: Mutation, monkeypatch: pytest.MonkeyPatch) -> None:
    mutation(monkeypatch)
    check_some_world_breaks(run_family, SEEDS, MUTATIONS[mutation])
