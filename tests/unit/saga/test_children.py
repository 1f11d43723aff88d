"""A child: a saga that a step of another saga starts, awaits, and compensates."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest

from outrider.saga import Saga, SagaRegistry
from outrider.saga.explain import explain
from outrider.saga.model import Status, StepStatus
from outrider.testing import SagaHarness
from tests.support.child_shop import Order, Parcel, Shop, broken
from tests.support.saga_shop import ONCE

COMPLETED, COMPENSATED, RUNNING, FAILED = Status.COMPLETED, Status.COMPENSATED, Status.RUNNING, Status.FAILED


async def test_a_child_is_started_awaited_and_completes_with_its_parent() -> None:
    shop = Shop()
    await shop.start()
    child = (await shop.child()).instance
    assert (child.saga_id, child.parent_id, child.parent_step) == (
        shop.shipping.child_id(shop.saga_id, "ship"),
        shop.saga_id,
        "ship",
    )
    assert await shop.statuses() == [RUNNING, RUNNING]
    assert shop.did == ["create", "pack"]
    await shop.collected()
    assert await shop.statuses() == [COMPLETED, COMPLETED]
    assert shop.did == ["create", "pack", "label", "bill"]
    assert (await shop.harness.saga("A-7")).state == Order(parcels=["A-7"])


async def test_workers_are_notified_of_a_new_child_of_its_outcome_and_of_the_end_of_its_parent() -> None:
    shop, notified = Shop(), list[str]()

    async def notify() -> None:
        notified.append("")

    shop.harness.store.notify = notify
    await shop.start()
    assert len(notified) == 1
    await shop.collected()
    assert (await shop.statuses(), len(notified)) == ([COMPLETED, COMPLETED], 3)


async def test_a_child_that_is_done_waits_and_is_compensated_before_the_steps_ahead_of_it() -> None:
    shop = Shop()
    await shop.start("bill")
    await shop.collected()
    assert await shop.statuses() == [COMPENSATED, COMPENSATED]
    assert shop.did == ["create", "pack", "label", "unlabel", "unpack", "uncreate"]


async def test_a_child_that_is_rejected_compensates_itself_and_the_step_of_the_parent_is_rejected() -> None:
    shop = Shop()
    await shop.start("label")
    await shop.collected()
    assert await shop.statuses() == [COMPENSATED, COMPENSATED]
    assert shop.did == ["create", "pack", "unpack", "uncreate"]
    entry = next(entry for entry in (await shop.record()).journal if entry.step == "ship")
    assert entry.status is StepStatus.REJECTED
    assert entry.error == "its child has compensated itself: no such address"


async def test_a_child_that_needs_a_person_lets_its_parent_wait_and_is_named_by_explain() -> None:
    shop = Shop()
    await shop.start("bill", "unlabel")
    await shop.collected()
    child = (await shop.child()).instance
    assert await shop.statuses() == [Status.COMPENSATING, FAILED]
    explained = explain(await shop.record(), shop.order.definition, await shop.children())
    assert any(str(child.saga_id) in reason and "needs an operator" in reason for reason in explained.reasons)
    assert any(f"outrider saga explain {child.saga_id}" == help.command for help in explained.helps)
    shop.faults.clear()
    await shop.command("retry", shop.child_name)
    assert await shop.statuses() == [COMPENSATED, COMPENSATED]
    assert shop.did[-3:] == ["unpack", "unlabel", "uncreate"]


async def test_a_retry_of_the_parent_is_passed_on_to_the_child_that_has_failed() -> None:
    shop = Shop()
    await shop.start("bill", "unlabel")
    await shop.collected()
    shop.faults.clear()
    await shop.command("retry")
    assert await shop.statuses() == [COMPENSATED, COMPENSATED]
    audit = await shop.harness.store.admin.audit((await shop.child()).instance.saga_id)
    assert [note["actor"] for note in audit if note["what"] == "operator retry"] == ["test"]


async def test_a_command_to_compensate_calls_a_running_child_off_and_waits_for_it() -> None:
    shop = Shop()
    await shop.start()
    await shop.command("compensate")
    assert await shop.statuses() == [COMPENSATED, COMPENSATED]
    assert shop.did == ["create", "pack", "unpack", "uncreate"]


async def test_the_deadline_of_the_parent_reaches_its_running_child() -> None:
    shop = Shop(deadline_seconds=60)
    await shop.start()
    await shop.harness.advance(seconds=61)
    assert await shop.statuses() == [COMPENSATED, COMPENSATED]
    assert shop.did == ["create", "pack", "unpack", "uncreate"]


async def test_a_child_that_is_called_off_gives_no_open_outcome_up() -> None:
    shop = Shop(deadline_seconds=60)
    shop.shipping.request("truck.load", topic="truck", reply="truck.loaded", name="load", retry=ONCE)
    await shop.start()
    await shop.collected()
    await shop.harness.advance(seconds=61)
    # The outcome of the request is unknown, and no compensation covers it.
    assert await shop.statuses() == [RUNNING, FAILED]
    await shop.harness.reply("load")
    assert await shop.statuses() == [COMPENSATED, COMPENSATED]
    assert shop.did == ["create", "pack", "label", "unlabel", "unpack", "uncreate"]


async def test_a_command_to_compensate_also_gives_up_the_open_outcomes_of_a_child() -> None:
    shop = Shop()
    shop.shipping.request("truck.load", topic="truck", reply="truck.loaded", name="load")
    await shop.start()
    await shop.collected()
    await shop.command("compensate")
    assert await shop.statuses() == [COMPENSATED, COMPENSATED]


async def test_a_child_that_is_stopped_keeps_the_messages_of_its_parent() -> None:
    shop = Shop(deadline_seconds=60)
    await shop.start()
    steps = dict(shop.shipping._graph.steps)
    shop.shipping.call(name="weigh", after=["pack"])(broken)
    await shop.harness.advance(seconds=61)
    assert await shop.statuses() == [RUNNING, FAILED]
    shop.shipping._graph.steps, shop.shipping._definition = steps, None
    await shop.command("retry")
    assert await shop.statuses() == [COMPENSATED, COMPENSATED]


async def test_an_operator_may_compensate_a_running_child_and_not_one_that_is_done() -> None:
    shop = Shop()
    await shop.start()
    await shop.command("compensate", shop.child_name)
    assert await shop.statuses() == [COMPENSATED, COMPENSATED]

    shop = Shop(after=[])
    shop.order.sleep(60, name="later", after=["ship"])
    await shop.start()
    await shop.collected()
    await shop.command("compensate", shop.child_name)
    assert (await shop.statuses())[1] is RUNNING
    audit = await shop.harness.store.admin.audit((await shop.child()).instance.saga_id)
    assert "its parent relies on them" in audit[-1]["detail"]


async def test_neither_a_child_nor_its_parent_can_be_marked_as_done_while_one_waits_for_the_other() -> None:
    shop = Shop(when=None)
    shop.order.sleep(60, name="later")
    await shop.start()
    await shop.command("mark_done")
    assert (await shop.harness.saga("A-7")).steps["ship"] is StepStatus.STARTED
    await shop.collected()
    await shop.command("mark_done", shop.child_name)
    assert await shop.statuses() == [RUNNING, RUNNING]
    await shop.harness.advance(seconds=61)
    assert await shop.statuses() == [COMPLETED, COMPLETED]


async def test_a_failed_child_that_an_operator_has_settled_lets_the_parent_go_on() -> None:
    shop = Shop()
    shop.shipping.call(name="weigh", retry=ONCE)(broken)
    await shop.start()
    await shop.collected()
    assert await shop.statuses() == [RUNNING, FAILED]
    assert not (await shop.record()).instance.needs_attention
    await shop.command("mark_done", shop.child_name, label="by hand")
    assert await shop.statuses() == [COMPLETED, COMPLETED]


async def test_an_input_that_cannot_be_computed_fails_the_step_and_is_computed_again_by_a_retry() -> None:
    shop = Shop()
    await shop.start("input")
    view = await shop.harness.saga("A-7")
    assert (view.status, await shop.children()) == (FAILED, [])
    assert view.last_error is not None
    assert view.last_error.startswith("the input of its child, parcel, raised KeyError: 'parcel'")
    shop.faults.clear()
    await shop.command("retry")
    await shop.collected()
    assert await shop.statuses() == [COMPLETED, COMPLETED]


async def test_a_step_whose_child_could_not_be_started_has_nothing_to_compensate() -> None:
    shop = Shop()
    await shop.start("input", "bill")
    await shop.command("mark_done")
    assert await shop.statuses() == [COMPENSATED]
    assert shop.did == ["create", "uncreate"]


async def test_the_input_sees_the_reply_that_came_in_the_same_turn() -> None:
    shop = Shop()
    order = Saga("order", Order)
    ask = order.request("address.find", topic="addresses", reply="address.found", name="ask")

    @ask.on("address.found")
    def found(context: Any, reply: Any) -> None:
        context.state.order_id = reply.payload

    order.child(shop.shipping, input=shop.parcel, name="ship")
    order.child(shop.shipping, input=shop.parcel, name="again", for_each=lambda state: [state.order_id], after=["ask"])
    harness = shop.harness = SagaHarness(SagaRegistry(order, shop.shipping))
    await harness.start(order, Order(), "A-7")
    await harness.reply("ask", "A-8")
    assert [child.parent_step for child in await shop.children()] == ["again[0]", "ship"]
    for child in await shop.children():
        assert b'"A-8"' in child.state


async def test_a_state_of_another_type_is_a_fault_of_the_definition() -> None:
    shop = Shop(input=lambda state: state)
    await shop.start()
    assert "returned a Order; return a Parcel" in ((await shop.harness.saga("A-7")).last_error or "")


async def test_a_result_that_cannot_be_applied_is_applied_after_a_retry() -> None:
    shop = Shop()
    await shop.start("result")
    await shop.collected()
    for _ in range(12):
        await shop.harness.advance(seconds=60)
    assert await shop.statuses() == [FAILED, RUNNING]
    shop.faults.clear()
    await shop.command("retry")
    assert await shop.statuses() == [COMPLETED, COMPLETED]
    assert (await shop.harness.saga("A-7")).state.parcels == ["A-7"]


@pytest.mark.parametrize("fault", ["result", "declined"])
async def test_a_child_whose_result_is_not_taken_is_compensated(fault: str) -> None:
    shop = Shop()
    await shop.start(fault)
    await shop.collected()
    if fault == "result":
        await shop.command("compensate")
        for _ in range(12):
            await shop.harness.advance(seconds=60)
    assert await shop.statuses() == [COMPENSATED, COMPENSATED]
    assert shop.did == ["create", "pack", "label", "unlabel", "unpack", "uncreate"]


async def test_each_item_has_a_child_of_its_own_and_the_results_are_collected() -> None:
    shop = Shop(for_each=lambda state: ["a", "b", "c"], into="labels", parallel_max=2)
    await shop.start()
    assert [child.parent_step for child in await shop.children()] == ["ship[0]", "ship[1]"]
    for index in (1, 0, 2):
        await shop.collected(f"ship[{index}]")
    assert await shop.statuses() == [COMPLETED] * 4
    assert (await shop.harness.saga("A-7")).state.labels == ["L-a", "L-b", "L-c"]


async def test_a_rejected_item_calls_the_children_of_the_others_off() -> None:
    shop = Shop(for_each=lambda state: ["a", "b", "c"], into="labels")
    await shop.start()
    await shop.collected("ship[1]")
    shop.faults.add("label")
    await shop.collected("ship[0]")
    assert await shop.statuses() == [COMPENSATED] * 4
    assert sorted(shop.did) == sorted(["create", *["pack", "unpack"] * 3, "label", "unlabel", "uncreate"])


async def test_without_a_result_the_state_of_the_child_is_the_result_of_an_item() -> None:
    shop = Shop(for_each=lambda state: ["a"], into="states", result=None)
    await shop.start()
    await shop.collected("ship[0]")
    assert await shop.statuses() == [COMPLETED, COMPLETED]
    assert (await shop.harness.saga("A-7")).state.states == [{"order_id": "a", "label": "L-a"}]


async def test_a_child_is_left_out_when_its_condition_is_false() -> None:
    shop = Shop(when=lambda state: not state.is_billable)
    await shop.start()
    assert await shop.statuses() == [COMPLETED]
    assert shop.did == ["create", "bill"]


async def test_a_child_at_the_pivot_is_never_compensated_and_completes_with_its_parent() -> None:
    shop = Shop(pivot=True)
    await shop.start("bill")
    await shop.collected()
    assert await shop.statuses() == [FAILED, RUNNING]
    await shop.command("mark_done")
    assert await shop.statuses() == [COMPLETED, COMPLETED]


async def test_a_child_at_the_pivot_that_is_called_off_compensates_its_parent() -> None:
    shop = Shop(pivot=True)
    await shop.start()
    await shop.command("compensate")
    assert await shop.statuses() == [COMPENSATED, COMPENSATED]


async def test_a_child_after_the_pivot_that_compensates_itself_is_settled_by_hand() -> None:
    shop = Shop()
    later = Saga("order", Order)
    later.call(name="pay", pivot=True)(shop.bill)
    later.child(shop.shipping, input=shop.parcel, name="ship")
    harness = shop.harness = SagaHarness(SagaRegistry(later, shop.shipping))
    shop.faults.add("label")
    await harness.start(later, Order(), "A-7")
    await shop.collected()
    assert await shop.statuses() == [FAILED, COMPENSATED]
    await shop.command("retry")
    assert await shop.statuses() == [FAILED, COMPENSATED]
    await shop.command("mark_done")
    assert await shop.statuses() == [COMPLETED, COMPENSATED]


@dataclass
class Trip:
    order_id: str = "A-7"


def nested(shop: Shop) -> Saga[Trip]:
    trip = Saga("trip", Trip)
    trip.child(shop.order, input=lambda state: Order(state.order_id), name="buy")
    trip.wait("trip.ended", name="end", timeout_seconds=100)
    shop.harness = SagaHarness(SagaRegistry(trip, shop.order, shop.shipping))
    shop.saga_id = shop.order.child_id(trip.new(Trip(), "T").saga_id, "buy")
    return trip


@pytest.mark.parametrize("ends", [True, False])
async def test_a_child_of_a_child_ends_with_the_first_parent(*, ends: bool) -> None:
    shop = Shop()
    trip = nested(shop)
    await shop.harness.start(trip, Trip(), "T")
    await shop.collected()
    assert await shop.statuses() == [RUNNING, RUNNING]
    if ends:
        await shop.harness.event("trip.ended", correlation_id="T")
    else:
        await shop.harness.advance(seconds=101)
    assert (await shop.harness.saga("T")).status is (COMPLETED if ends else COMPENSATED)
    assert await shop.statuses() == [COMPLETED if ends else COMPENSATED] * 2
    undone = [] if ends else ["unlabel", "unpack", "uncreate"]
    assert shop.did == ["create", "pack", "label", "bill", *undone]


async def test_a_child_of_a_child_is_called_off_through_its_parent() -> None:
    shop = Shop()
    trip = nested(shop)
    await shop.harness.start(trip, Trip(), "T")
    await shop.command("compensate", "T")
    assert [(await shop.harness.saga("T")).status, *await shop.statuses()] == [COMPENSATED] * 3


async def test_a_child_that_is_called_off_before_it_has_run_runs_no_step() -> None:
    shop = Shop()
    async with shop.harness.store.transaction() as tx:
        await shop.order.start(tx, Order(), correlation_id="A-7", outbox=shop.harness.outbox)
    await shop.harness.worker.run_once()
    await shop.harness.worker.rest()
    assert await shop.statuses() == [RUNNING, Status.STARTED]
    await shop.command("compensate", shop.child_name)
    assert await shop.statuses() == [COMPENSATED, COMPENSATED]
    assert shop.did == ["create", "uncreate"]


async def test_the_deadline_of_a_child_is_met_when_its_steps_are_done() -> None:
    shop = Shop()
    shop.shipping.deadline_seconds = 30
    shop.order.sleep(60, name="later")
    await shop.start()
    await shop.collected()
    await shop.harness.advance(seconds=31)
    assert not any("deadline" in reason for reason in explain(await shop.child()).reasons)
    await shop.harness.advance(seconds=31)
    assert await shop.statuses() == [COMPLETED, COMPLETED]
    assert not (await shop.child()).instance.needs_attention


async def test_retention_keeps_a_child_until_its_parent_has_ended() -> None:
    shop = Shop(for_each=lambda state: ["a", "b"])
    await shop.start("label")
    days = {"saga_days": 90.0, "audit_days": 365.0, "participant_memory_days": 90.0}
    shop.faults.add("uncreate")
    await shop.collected("ship[0]")
    assert await shop.statuses() == [FAILED, COMPENSATED, COMPENSATED]
    await shop.harness.advance(seconds=91 * 86_400)
    assert (await shop.harness.store.prune(**days)).sagas == 0
    shop.faults.clear()
    await shop.command("retry")
    await shop.harness.advance(seconds=91 * 86_400)
    assert (await shop.harness.store.prune(**days)).sagas == 3


async def test_a_parent_does_not_wait_for_a_saga_of_the_name_of_its_child_that_another_program_has_started() -> None:
    shop = Shop()
    await shop.harness.start(shop.shipping, Parcel("B-1"), shop.child_name)
    await shop.start()
    parent = (await shop.record()).instance
    assert (parent.status, parent.needs_attention) == (FAILED, True)
    assert str(parent.last_error).startswith("ship cannot start its child: there is a saga shipping")
    await shop.command("retry")
    assert await shop.statuses() == [FAILED]
    await shop.command("compensate")
    assert await shop.statuses() == [COMPENSATED]
    # Each `create` is rolled back with the turn that cannot start the child, so there is nothing to undo.
    assert shop.did == ["pack", "create", "create"]
    assert (await shop.harness.saga(shop.child_name)).status is RUNNING
