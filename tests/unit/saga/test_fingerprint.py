"""A definition that is changed under its version: a saga that has the change before it stops, and says what it is."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any
from uuid import UUID

import pytest

from outrider.saga import Saga, SagaRegistry
from outrider.saga.model import Status
from tests.support.saga_shop import Order, Shop, order_saga, request

Write = Callable[[Saga[Order]], object]


async def nothing(run: Any, tx: Any = None) -> None: ...


def create(saga: Saga[Order]) -> object:
    return saga.local(name="create")(nothing)


def compensated_create(saga: Saga[Order]) -> object:
    return saga.local(name="create")(nothing).compensate()(nothing)


def nap(saga: Saga[Order]) -> object:
    return saga.sleep(60, name="nap")


def charge(saga: Saga[Order]) -> object:
    return saga.call(name="charge", pivot=True)(nothing)


def pay(saga: Saga[Order]) -> object:
    return request(saga, "pay", compensate=None, compensated=None)


def conditional_pay(saga: Saga[Order]) -> object:
    return request(saga, "pay", compensate=None, compensated=None, when=lambda state: state.amount > 0)


def skipped_create(saga: Saga[Order]) -> object:
    return saga.local(name="create", when=lambda state: False)(nothing).compensate()(nothing)


def saga_of(*steps: Write) -> Saga[Order]:
    saga = order_saga()
    for write in steps:
        write(saga)
    return saga


async def continued(before: Saga[Order], after: Saga[Order]) -> tuple[Shop, UUID]:
    """Start a saga, let it come to its nap, and let a worker go on that has another definition."""
    shop = Shop(before)
    saga_id = await shop.start(before, Order("A-7"))
    await shop.works()
    shop.sagas = SagaRegistry(after)
    shop.worker = shop.new_worker(1)
    await shop.passes(60)
    return shop, saga_id


STEPS: list[Write] = [create, nap, charge, pay]


def log(saga: Saga[Order]) -> object:
    return saga.local(name="log")(nothing)


@pytest.mark.parametrize(
    ("after", "change"),
    [
        ([create, log, nap, charge, pay], "step log was inserted before nap"),
        ([create, nap, charge, pay, log], "step log was inserted after pay"),
        ([log, create, nap, charge, pay], "step log was inserted before create"),
        ([create, nap, charge], "step pay was taken out"),
        ([create, nap, pay, charge], "step pay comes after nap now, and came after charge"),
        ([create, nap, lambda s: s.call(name="charge")(nothing), pay], "step charge is not the pivot any more"),
        (
            [create, nap, lambda s: s.local(name="charge", pivot=True)(nothing), pay],
            "step charge is a local now, and was a call",
        ),
        (
            [create, nap, charge, lambda s: request(s, "pay", compensate=None, compensated=None, reply="bank.paid")],
            "step pay has other replies",
        ),
        (
            [create, nap, charge, lambda s: request(s, "pay", compensate=None, compensated=None, topic="bank")],
            "step pay has another command or topic",
        ),
        (
            [create, nap, charge, lambda s: s.request("bank.pay", topic="stock", reply="stock.reserved", name="pay")],
            "step pay has another command or topic",
        ),
        ([create, nap, charge, conditional_pay], "step pay has a condition now"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
async def test_a_saga_that_has_a_change_of_its_definition_before_it_stops_and_says_which(
    after: list[Write], change: str
) -> None:
    shop, saga_id = await continued(saga_of(*STEPS), saga_of(*after))
    instance = (await shop.shown(saga_id)).instance
    assert (instance.status, instance.needs_attention) == (Status.FAILED, True)
    assert instance.last_error == (
        f"the definition of order v1 has changed since this saga started: {change}; give it version=2 and keep v1"
    )
    assert await shop.progress(saga_id, "log") is None


@pytest.mark.parametrize(
    "after",
    [
        [lambda s: s.call(name="create")(nothing), nap, charge, pay],
        [
            create,
            lambda s: s.sleep(5, name="nap"),
            charge,
            lambda s: request(s, "pay", compensate=None, compensated=None).payload(vars),
        ],
        [compensated_create, nap, charge, pay],
    ],
    ids=["behind", "code", "compensate"],
)
async def test_what_is_behind_a_saga_may_change_code_may_change_anywhere_and_a_compensation_may_be_added(
    after: list[Write],
) -> None:
    shop, saga_id = await continued(saga_of(*STEPS), saga_of(*after))
    assert await shop.status(saga_id) is Status.RUNNING
    assert (await shop.shown(saga_id)).instance.current_step == "pay"


async def test_a_saga_whose_step_has_lost_its_compensation_stops_and_says_so() -> None:
    shop, saga_id = await continued(saga_of(compensated_create, nap, charge, pay), saga_of(*STEPS))
    instance = (await shop.shown(saga_id)).instance
    assert instance.status is Status.FAILED
    assert "step create has no compensation any more" in (instance.last_error or "")


async def test_a_skipped_step_may_change_altogether_because_nothing_of_it_will_run() -> None:
    shop, saga_id = await continued(saga_of(skipped_create, nap, charge, pay), saga_of(create, nap, charge, pay))
    assert (await shop.shown(saga_id)).instance.current_step == "pay"


async def test_a_stopped_saga_goes_on_with_its_own_definition_after_retry() -> None:
    before = saga_of(create, nap, log)
    shop, saga_id = await continued(before, saga_of(create, nap, charge, log))
    assert await shop.status(saga_id) is Status.FAILED
    shop.sagas = SagaRegistry(before)
    shop.worker = shop.new_worker(2)
    await shop.order(saga_id, "retry")
    await shop.passes(60)
    assert await shop.status(saga_id) is Status.COMPLETED


async def test_a_saga_that_is_being_compensated_does_not_mind_steps_that_will_not_be_done() -> None:
    def compensation(saga: Saga[Order]) -> object:
        return request(saga)

    before = saga_of(compensation, nap, log)
    shop = Shop(before)
    saga_id = await shop.start(before, Order("A-7"))
    await shop.works()
    [asked] = await shop.sent()
    await shop.answer(asked, "stock.reserved")
    await shop.works()
    await shop.order(saga_id, "compensate")
    await shop.works()
    [compensate] = await shop.sent()
    shop.sagas = SagaRegistry(saga_of(compensation, nap))
    shop.worker = shop.new_worker(1)
    await shop.answer(compensate, "stock.released")
    await shop.works()
    assert await shop.status(saga_id) is Status.COMPENSATED


def reserve(**changed: Any) -> Write:
    return lambda saga: request(saga, **changed)


COMPENSATIONS = [
    {"compensate": "stock.free"},
    {"compensated": "stock.freed"},
    {"topic": "other-stock"},
    {"reply_topic": "other-replies"},
]
CHANGED = "the compensation of step reserve has another command, topic or reply"


@pytest.mark.parametrize("changed", COMPENSATIONS, ids=lambda changed: next(iter(changed)))
async def test_a_done_step_whose_compensation_lies_ahead_may_not_change_the_participant_of_it(
    changed: dict[str, str],
) -> None:
    before = saga_of(reserve(), nap, log)
    shop = Shop(before)
    saga_id = await shop.start(before, Order("A-7"))
    await shop.works()
    [asked] = await shop.sent()
    await shop.answer(asked, "stock.reserved")
    await shop.works()
    shop.sagas = SagaRegistry(saga_of(reserve(**changed), nap, log))
    shop.worker = shop.new_worker(1)
    await shop.order(saga_id, "compensate")
    await shop.works()
    instance = (await shop.shown(saga_id)).instance
    assert (instance.status, await shop.sent()) == (Status.FAILED, [])
    assert CHANGED in (instance.last_error or "")


@pytest.mark.parametrize("changed", COMPENSATIONS, ids=lambda changed: next(iter(changed)))
async def test_a_compensation_that_has_begun_may_not_change_either(changed: dict[str, str]) -> None:
    before = saga_of(reserve(), nap, log)
    shop = Shop(before)
    saga_id = await shop.start(before, Order("A-7"))
    await shop.works()
    [asked] = await shop.sent()
    await shop.answer(asked, "stock.reserved")
    await shop.works()
    await shop.order(saga_id, "compensate")
    await shop.works()
    [compensate] = await shop.sent()
    shop.sagas = SagaRegistry(saga_of(reserve(**changed), nap, log))
    shop.worker = shop.new_worker(1)
    await shop.passes(3600)
    instance = (await shop.shown(saga_id)).instance
    assert (instance.status, await shop.sent()) == (Status.FAILED, [])
    assert CHANGED in (instance.last_error or "")
    shop.sagas = SagaRegistry(before)
    shop.worker = shop.new_worker(2)
    await shop.answer(compensate, "stock.released")
    await shop.order(saga_id, "retry")
    await shop.works()
    assert await shop.status(saga_id) is Status.COMPENSATED


async def test_a_done_step_may_change_its_command_if_its_compensation_stays_or_the_pivot_is_done() -> None:
    def pivot(saga: Saga[Order]) -> object:
        return saga.local(name="confirm", pivot=True)(nothing)

    async def at_the_nap(before: Saga[Order], after: Saga[Order]) -> Status:
        shop = Shop(before)
        saga_id = await shop.start(before, Order("A-7"))
        await shop.works()
        [asked] = await shop.sent()
        await shop.answer(asked, "stock.reserved")
        await shop.works()
        shop.sagas = SagaRegistry(after)
        shop.worker = shop.new_worker(1)
        await shop.passes(60)
        return await shop.status(saga_id)

    renamed = reserve(reply="stock.held")
    assert await at_the_nap(saga_of(reserve(), nap, log), saga_of(renamed, nap, log)) is Status.COMPLETED
    moved = reserve(topic="other-stock")
    assert await at_the_nap(saga_of(reserve(), pivot, nap), saga_of(moved, pivot, nap)) is Status.COMPLETED
