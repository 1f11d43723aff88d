"""Code of a step that is at fault: it raises, takes too long, or leaves what cannot be stored. The worker goes on."""

from __future__ import annotations

import asyncio
import re
from typing import Any
from uuid import UUID

import pytest

import outrider
from outrider import Event
from outrider.saga import StepRejected
from outrider.saga.model import Status, StepStatus
from outrider.telemetry.events import SagaStepFailed
from tests.support.saga_shop import (
    PLAIN,
    TWICE,
    Order,
    Shop,
    begun,
    local,
    order_saga,
    request,
)

RETRYING, FAILED = StepStatus.RETRYING, StepStatus.FAILED


async def test_a_local_function_that_raises_leaves_no_trace_and_is_tried_again() -> None:
    saga, tries = order_saga(), list[int]()

    @saga.local(retry=PLAIN)
    async def create(run: Any, tx: Any) -> None:
        tries.append(run.attempt)
        run.state.parcel = "lost" if run.attempt == 1 else "kept"
        await outrider.stage(tx, Event("order.created", {"attempt": run.attempt}))
        if run.attempt == 1:
            raise RuntimeError("not today")

    shop = Shop(saga)
    saga_id = await begun(shop, saga)
    [fact] = shop.observer.of(SagaStepFailed)
    assert (fact.step, fact.status, fact.attempt) == ("create", "retrying", 1)
    assert re.fullmatch(r"RuntimeError: not today \(tests/unit/saga/test_failing_steps\.py:\d+ in create\)", fact.error)
    await shop.passes(1)
    assert tries == [1, 2]
    assert (await shop.state(saga_id))["parcel"] == "kept"
    assert [event.payload for event in await shop.sent()] == [{"attempt": 2}]


async def test_a_call_whose_time_is_over_is_made_again_with_the_same_key() -> None:
    saga, keys = order_saga(), list[str]()

    @saga.call(timeout_seconds=0.01, retry=PLAIN)
    async def charge(run: Any) -> None:
        keys.append(run.key)
        run.stage(Event("order.charged", {"attempt": run.attempt}))
        if run.attempt == 1:
            await asyncio.Event().wait()

    shop = Shop(saga)
    saga_id = await begun(shop, saga)
    assert await shop.progress(saga_id, "charge") == (RETRYING, 1)
    await shop.passes(1)
    assert keys == [f"{saga_id}:charge"] * 2
    [fact] = shop.observer.of(SagaStepFailed)
    assert fact.error == "unknown whether it happened: no result within 0.01 s"
    assert await shop.status(saga_id) is Status.COMPLETED
    assert [event.payload for event in await shop.sent()] == [{"attempt": 2}]


async def test_a_call_that_cancels_itself_has_failed() -> None:
    saga = order_saga()

    @saga.call(retry=PLAIN)
    async def charge(run: Any) -> None:
        if run.attempt == 1:
            raise asyncio.CancelledError

    shop = Shop(saga)
    saga_id = await begun(shop, saga)
    assert await shop.progress(saga_id, "charge") == (RETRYING, 1)
    await shop.passes(1)
    assert await shop.status(saga_id) is Status.COMPLETED


@pytest.mark.parametrize("kind", ["local", "call", "reply"])
async def test_a_state_that_cannot_be_stored_fails_its_step_and_goes_on_after_a_retry(kind: str) -> None:
    saga, bad = order_saga(), [True]

    def break_state(run: Any, *_: Any) -> None:
        run.state.amount = "twelve" if bad else 12

    async def break_state_later(run: Any) -> None:
        break_state(run)

    if kind == "local":
        saga.local(name="it")(break_state)
    elif kind == "call":
        saga.call(name="it")(break_state_later)
    else:
        request(saga, "it", compensate=None, compensated=None).on("stock.reserved")(break_state)
    shop = Shop(saga)
    saga_id = await begun(shop, saga)
    for command in await shop.sent():
        await shop.answer(command, "stock.reserved")
        await shop.works()
    instance = (await shop.shown(saga_id)).instance
    assert (instance.status, instance.needs_attention, instance.owner) == (Status.FAILED, True, None)
    assert instance.last_error is not None
    assert "Order.amount" in instance.last_error
    bad.clear()
    await shop.order(saga_id, "retry")
    await shop.works()
    assert await shop.status(saga_id) is Status.COMPLETED
    assert (await shop.state(saga_id))["amount"] == 12


@pytest.mark.parametrize("kind", ["local", "call", "request"])
async def test_a_state_that_cannot_be_read_fails_the_step_that_needs_it(kind: str) -> None:
    saga, log = order_saga(), list[str]()
    if kind == "local":
        local(saga, log)
    elif kind == "call":

        @saga.call()
        async def charge(run: Any) -> None:
            log.append("charge")

    else:
        request(saga).payload(lambda state: {"order": state.order_id})
    shop = Shop(saga)
    new = saga.new(Order("A-7"), "A-7")
    async with shop.store.transaction() as tx:
        await shop.store.start(tx, new._replace(state=b'{"order_id": 7}'))
    await shop.works()
    instance = (await shop.shown(new.saga_id)).instance
    assert (instance.status, instance.needs_attention) == (Status.FAILED, True)
    assert instance.last_error is not None
    assert "Order.order_id" in instance.last_error
    assert log == []
    assert await shop.sent() == []


async def test_a_payload_that_cannot_be_made_is_tried_as_often_as_the_policy_says_and_then_fails() -> None:
    saga, tries = order_saga(), list[str]()

    def payload(state: Order) -> dict[str, str]:
        tries.append(state.order_id)
        return {"order": dict[str, str]()[state.order_id]}

    request(saga, retry=TWICE).payload(payload)
    shop = Shop(saga)
    saga_id = await begun(shop, saga)
    assert await shop.progress(saga_id, "reserve") == (RETRYING, 1)
    await shop.passes(60)
    assert await shop.progress(saga_id, "reserve") == (FAILED, 2)
    assert len(tries) == 2
    error = (await shop.shown(saga_id)).instance.last_error
    assert error is not None
    assert re.fullmatch(r"payload: KeyError: 'A-7' \(tests/unit/saga/test_failing_steps\.py:\d+ in payload\)", error)
    assert await shop.sent() == []


async def test_a_reply_that_cannot_be_taken_in_is_tried_as_often_as_the_policy_says_however_often_was_asked() -> None:
    saga, tries = order_saga(), list[int]()

    def reserved(run: Any, reply: Any) -> None:
        tries.append(run.attempt)
        raise KeyError("reservation")

    request(saga, retry=TWICE).on("stock.reserved")(reserved)
    shop = Shop(saga)
    saga_id = await begun(shop, saga)
    [command] = await shop.sent()
    await shop.passes(31)
    await shop.passes(5)
    assert len(await shop.sent()) == 1
    await shop.answer(command, "stock.reserved")
    await shop.works()
    assert (tries, await shop.progress(saga_id, "reserve")) == ([1], (RETRYING, 1))
    await shop.passes(5)
    assert (tries, await shop.progress(saga_id, "reserve")) == ([1, 2], (FAILED, 2))
    error = (await shop.shown(saga_id)).instance.last_error
    assert error is not None
    assert error.startswith("its reply cannot be applied: on(\"stock.reserved\"): KeyError: 'reservation' (tests/")


async def test_a_late_answer_that_cannot_be_taken_in_gets_attempts_of_its_own_and_nothing_is_asked_again() -> None:
    saga, tries = order_saga(), list[int]()

    def reserved(run: Any, reply: Any) -> None:
        tries.append(run.attempt)
        if run.attempt == 1:
            raise KeyError("reservation")
        run.state.reservation = "R-1"

    request(saga, retry=TWICE).on("stock.reserved")(reserved)
    shop = Shop(saga)
    saga_id = await begun(shop, saga)
    [command] = await shop.sent()
    await shop.passes(31)
    await shop.passes(5)
    assert len(await shop.sent()) == 1
    await shop.passes(31)
    assert await shop.status(saga_id) is Status.FAILED
    await shop.answer(command, "stock.reserved")
    await shop.works()
    assert (tries, await shop.progress(saga_id, "reserve")) == ([1], (RETRYING, 1))
    assert not (await shop.shown(saga_id)).instance.needs_attention
    await shop.passes(5)
    assert (tries, await shop.status(saga_id), await shop.sent()) == ([1, 2], Status.COMPLETED, [])


async def test_a_reply_that_cannot_be_taken_in_is_tried_again() -> None:
    saga, tries = order_saga(), list[int]()

    def reserved(run: Any, reply: Any) -> None:
        tries.append(1)
        if len(tries) == 1:
            raise KeyError("reservation")
        run.state.reservation = "R-1"

    request(saga).on("stock.reserved")(reserved)
    shop = Shop(saga)
    saga_id = await begun(shop, saga)
    [command] = await shop.sent()
    await shop.answer(command, "stock.reserved")
    await shop.works()
    assert await shop.progress(saga_id, "reserve") == (RETRYING, 1)
    await shop.passes(5)
    assert await shop.status(saga_id) is Status.COMPLETED
    assert (await shop.state(saga_id))["reservation"] == "R-1"
    assert len(tries) == 2


async def test_an_early_event_that_cannot_be_taken_in_is_tried_again() -> None:
    saga, tries = order_saga(), list[int]()

    def collected(run: Any, reply: Any) -> None:
        tries.append(1)
        if len(tries) == 1:
            raise KeyError("parcel")

    request(saga)
    saga.wait("parcel.collected", name="collected").on("parcel.collected")(collected)
    shop = Shop(saga)
    saga_id = await begun(shop, saga)
    await shop.arrives(Event("parcel.collected", {}, saga_id=str(saga_id), event_id=UUID(int=1)))
    await shop.works()
    [command] = await shop.sent()
    await shop.answer(command, "stock.reserved")
    await shop.works()
    assert await shop.progress(saga_id, "collected") == (RETRYING, 1)
    await shop.passes(5)
    assert await shop.status(saga_id) is Status.COMPLETED
    assert len(tries) == 2


async def test_a_reply_that_its_handler_rejects_is_compensated() -> None:
    saga, log = order_saga(), list[str]()
    local(saga, log)

    def reserved(run: Any, reply: Any) -> None:
        raise StepRejected("too dear")

    request(saga).on("stock.reserved")(reserved)
    shop = Shop(saga)
    saga_id = await begun(shop, saga)
    [command] = await shop.sent()
    await shop.answer(command, "stock.reserved")
    await shop.works()
    [compensate] = await shop.sent()
    assert compensate.event_type == "stock.release"
    await shop.answer(compensate, "stock.released")
    await shop.works()
    assert await shop.status(saga_id) is Status.COMPENSATED
    assert log == ["create", "compensate create"]


async def test_an_early_event_that_its_handler_rejects_is_compensated() -> None:
    saga, log = order_saga(), list[str]()
    local(saga, log)

    def collected(run: Any, reply: Any) -> None:
        raise StepRejected("the wrong parcel")

    request(saga, compensate=None, compensated=None)
    saga.wait("parcel.collected", name="collected").on("parcel.collected")(collected)
    shop = Shop(saga)
    saga_id = await begun(shop, saga)
    await shop.arrives(Event("parcel.collected", {}, saga_id=str(saga_id), event_id=UUID(int=1)))
    await shop.works()
    [command] = await shop.sent()
    await shop.answer(command, "stock.reserved")
    await shop.works()
    assert await shop.status(saga_id) is Status.COMPENSATED
    assert log == ["create", "compensate create"]
