"""Definitions of children: their checks, fingerprints, ids, diagrams and explanations."""

from __future__ import annotations

import random
from dataclasses import replace
from typing import Any
from uuid import UUID

import pytest

from outrider.errors import UsageError
from outrider.saga import Saga, SagaRegistry
from outrider.saga.definition.children import PARENT_COMPLETED, PARENT_STEP
from outrider.saga.definition.fingerprint import definition_changed
from outrider.saga.diagram import mermaid, mermaid_run
from outrider.saga.explain import explain
from outrider.saga.model import MessageKind, SagaMessage, SagaRecord, Status, StepStatus
from outrider.saga.planner.planner import advance
from outrider.testing import SagaHarness
from tests.support.child_shop import Order, Parcel, Shop, broken


def test_a_child_that_the_worker_does_not_hold_is_an_error_that_names_the_remedy() -> None:
    shop = Shop()
    with pytest.raises(UsageError, match=r"not among the sagas .* SagaRegistry\(order, shipping\)"):
        SagaHarness(SagaRegistry(shop.order))


def test_a_cycle_of_sagas_is_an_error() -> None:
    first, second = Saga("first", Order), Saga("second", Order)
    first.child(second, input=lambda state: state)
    second.child(first, input=lambda state: state)
    with pytest.raises(UsageError, match="first starts second starts first"):
        SagaRegistry(first, second)


def test_a_child_with_a_pivot_must_be_the_pivot_of_its_parent_or_after_it() -> None:
    shop = Shop()
    shop.shipping.call(name="hand_over", pivot=True)(broken)
    with pytest.raises(UsageError, match=r"make ship the pivot of order \(pivot=True\)"):
        SagaRegistry(shop.order, shop.shipping)
    fine = Shop(pivot=True)
    fine.shipping.call(name="hand_over", pivot=True)(broken)
    assert len(SagaRegistry(fine.order, fine.shipping)) == 2


def test_a_definition_says_where_it_is_wrong() -> None:
    order: Any = Saga("order", Order)
    with pytest.raises(UsageError, match="is no saga"):
        order.child("shipping", input=lambda state: state)
    with pytest.raises(UsageError, match="cannot be called with"):
        order.child(Saga("shipping", Parcel), input=lambda: None)
    with pytest.raises(UsageError, match="last wait of each child"):
        order.sleep(1, name=PARENT_STEP)


async def test_another_version_of_a_running_child_or_another_child_is_noticed() -> None:
    shop = Shop()
    await shop.start()

    def changed(child: Saga[Any], **options: Any) -> str | None:
        order = Saga("order", Order)
        shop._local(order, "create")
        order.child(child, input=shop.parcel, name="ship", **options)
        order.call(name="bill")(shop.bill)
        return definition_changed(order.definition, record)

    record = await shop.record()
    other, newer = Saga("posting", Parcel), Saga("shipping", Parcel, version=2)
    for saga in (other, newer):
        saga.sleep(1, name="nap")
    assert changed(shop.shipping, result=shop.shipped) is None
    assert "another child, or another version" in (changed(newer, result=shop.shipped) or "")
    assert "result of its child" in (changed(shop.shipping) or "")
    done = replace(next(entry for entry in record.journal if entry.step == "ship"), status=StepStatus.DONE)
    record = record._replace(journal=(*(entry for entry in record.journal if entry.step != "ship"), done))
    assert changed(newer) is None
    assert "child of another type" in (changed(other) or "")


async def test_diagrams_show_children_and_parents() -> None:
    shop = Shop()
    shop.order.sleep(60, name="later")
    await shop.start()
    await shop.collected()
    assert "ship<br/>child<br/>shipping version 1" in mermaid(shop.order.definition)
    assert "the child compensates" in mermaid(shop.order.definition)
    child = await shop.child()
    assert str(child.instance.saga_id) in mermaid_run(shop.order.definition, await shop.record())
    drawn = mermaid_run(shop.shipping.definition, child)
    assert f"child of {shop.saga_id}, step ship" in drawn
    assert "waits for its parent" in drawn
    assert "not in this definition" not in drawn


async def test_explain_tells_a_child_from_its_parent() -> None:
    shop = Shop()
    await shop.start()
    told = explain(await shop.record(), shop.order.definition)
    assert any("waits for its child shipping version 1" in reason for reason in told.reasons)
    parent = f"the child of step ship of saga {shop.saga_id}, which waits for its outcome"
    assert any(parent in reason for reason in explain(await shop.child()).reasons)
    without = explain(await shop.record(), None, await shop.children())
    assert any("waits for its child shipping version 1" in reason for reason in without.reasons)
    shop = Shop()
    shop.order.sleep(60, name="later")
    await shop.start()
    await shop.collected()
    told = explain(await shop.child())
    assert not any("waits for its outcome" in reason for reason in told.reasons)
    assert any(f"completes or compensates with its parent {shop.saga_id}" in reason for reason in told.reasons)
    assert [help.command for help in told.helps] == [f"outrider saga explain {shop.saga_id}"]


def test_the_id_of_a_child_follows_from_parent_and_step() -> None:
    shop = Shop()
    first, second = UUID(int=1), UUID(int=2)
    ids = {shop.shipping.child_id(parent, step) for parent in (first, second) for step in ("a", "b", "a[0]")}
    assert len(ids) == 6
    assert shop.shipping.child_id(first, "a") == shop.shipping.child_id(first, "a")


def commanded(record: SagaRecord, *event_ids: int) -> SagaRecord:
    """Return a record with so many commands to compensate."""
    messages = tuple(
        SagaMessage(number, MessageKind.OPERATOR, "compensate", None, b'{"actor": "ann"}', UUID(int=number), record.now)
        for number in event_ids
    )
    return record._replace(messages=messages)


async def test_a_running_child_is_told_once_however_many_commands_there_are() -> None:
    shop = Shop()
    await shop.start()
    record = commanded(await shop.record(), 1, 2)
    plan = advance(shop.order.definition, record, [], random.Random(1))
    told = [(message.saga_id, message.name) for message in plan.messages]
    child_id = shop.shipping.child_id(shop.saga_id, "ship")
    assert told == [(child_id, "call_off"), (child_id, "compensate")]
    assert (plan.taken, plan.instance.status) == ((), Status.RUNNING)
    changed = {(entry.step, entry.phase): entry for entry in (*record.journal, *plan.entries)}
    later = record._replace(journal=tuple(changed.values()))
    assert advance(shop.order.definition, later, [], random.Random(1)).messages == ()


async def test_a_later_command_reaches_a_child_that_may_have_ignored_the_first() -> None:
    shop = Shop()
    await shop.start()
    record = await shop.record()
    told = []
    for commands in ([1], [1, 2], [1, 2]):
        plan = advance(shop.order.definition, commanded(record, *commands), [], random.Random(1))
        changed = {(entry.step, entry.phase): entry for entry in (*record.journal, *plan.entries)}
        record = record._replace(journal=tuple(changed.values()))
        told.append([message.event_id for message in plan.messages if message.name == "compensate"])
    (first,), (second,), later = told
    assert first != second
    assert later == []


@pytest.mark.parametrize("command", ["compensate", "call_off"])
async def test_a_child_whose_parent_has_completed_completes_whatever_was_commanded_meanwhile(command: str) -> None:
    shop = Shop()
    shop.order.wait("order.closed", name="close")
    await shop.start()
    await shop.collected()
    record = commanded(await shop.child(), 1)
    sent = record.messages[0]._replace(name=command)
    key = f"{record.instance.saga_id}:{PARENT_STEP}"
    told = SagaMessage(2, MessageKind.REPLY, PARENT_COMPLETED, key, b"{}", UUID(int=2), record.now)
    plan = advance(shop.shipping.definition, record._replace(messages=(sent, told)), [], random.Random(1))
    assert (plan.instance.status, plan.taken) == (Status.COMPLETED, (2, 1))
    assert next(note.detail for note in plan.notes if note.what == f"operator {command}").startswith("ignored")


async def test_equal_records_give_equal_messages_and_each_message_of_a_turn_has_an_id_of_its_own() -> None:
    shop = Shop(for_each=lambda state: ["a", "b"])
    await shop.start()
    record = commanded(await shop.record(), 1)
    plans = [advance(shop.order.definition, record, [], random.Random(seed)) for seed in (1, 2)]
    assert plans[0].messages == plans[1].messages
    assert len({message.event_id for message in plans[0].messages}) == len(plans[0].messages) == 4


async def test_the_end_of_a_parent_is_told_to_its_children_in_the_turn_in_which_it_ends() -> None:
    shop = Shop(for_each=lambda state: ["a", "b"])
    shop.order.wait("order.closed", name="close")
    await shop.start()
    for index in (0, 1):
        await shop.collected(f"ship[{index}]")
    record = await shop.record()
    assert advance(shop.order.definition, record, [], random.Random(1)).messages == ()
    closed = SagaMessage(1, MessageKind.REPLY, "order.closed", None, b"{}", UUID(int=1), record.now)
    plan = advance(shop.order.definition, record._replace(messages=(closed,)), [], random.Random(1))
    assert plan.instance.status is Status.COMPLETED
    assert [message.name for message in plan.messages] == ["parent.completed"] * 2
    assert {message.saga_id for message in plan.messages} == {child.saga_id for child in await shop.children()}
