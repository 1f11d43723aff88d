"""Steps as they are written: a function that would fail later is rejected at once, with the line to fix."""

from __future__ import annotations

import sys
from collections.abc import AsyncIterator, Callable, Iterator
from functools import partial
from types import FrameType
from typing import Any

import pytest

from outrider.errors import AlreadyStarted, UsageError
from outrider.saga import Saga
from outrider.saga.model import Status
from tests.support.saga_shop import Order, Shop, begun, order_saga, request

STOCK: dict[str, Any] = {"command": "stock.reserve", "topic": "stock", "reply": "stock.reserved"}
HERE = r"test_step_handles\.py:\d+: "


def yields(run: Any, more: Any = None, own: int = 0) -> Iterator[None]:
    yield


async def yields_later(run: Any, more: Any = None, own: int = 0) -> AsyncIterator[None]:
    yield


def blocks(run: Any, more: Any = None, own: int = 0) -> None: ...


async def waits(run: Any, more: Any = None, own: int = 0) -> None: ...


class YieldsLater:
    async def __call__(self, run: Any, more: Any = None, own: int = 0) -> AsyncIterator[None]:
        yield


class Waits:
    async def __call__(self, run: Any, more: Any = None, own: int = 0) -> None: ...

    async def method(self, run: Any, more: Any = None, own: int = 0) -> None: ...

    def blocks(self, run: Any, more: Any = None, own: int = 0) -> None: ...


def kind_of(function: Any) -> str:
    return getattr(function, "__name__", type(function).__name__)


def positions(order: Saga[Order]) -> dict[str, Callable[[Any], object]]:
    """Return all positions in which a function may be given."""
    step = request(order)
    create, charge = order.local(name="create")(waits), order.call(name="charge")(waits)
    return {
        "local": order.local(name="more"),
        "compensate of local": create.compensate(),
        "call": order.call(name="more"),
        "compensate of call": charge.compensate(),
        "on": step.on("stock.reserved"),
        "payload": step.payload,
        "compensation_payload": step.compensation_payload,
        "correlate": lambda function: order.wait("parcel.collected", correlate=function),
    }


POSITIONS = list(positions(order_saga()))


@pytest.mark.parametrize("position", POSITIONS)
@pytest.mark.parametrize("function", [yields, yields_later, partial(yields, own=1), YieldsLater()], ids=kind_of)
def test_a_function_with_a_yield_is_rejected_wherever_it_is_given(position: str, function: Any) -> None:
    with pytest.raises(UsageError, match=f"{HERE}.* has a yield in it"):
        positions(order_saga())[position](function)


@pytest.mark.parametrize("position", ["on", "payload", "compensation_payload", "correlate"])
@pytest.mark.parametrize("function", [waits, Waits(), Waits().method, partial(waits, own=1)], ids=kind_of)
def test_what_may_only_compute_is_not_async_in_any_disguise(position: str, function: Any) -> None:
    with pytest.raises(UsageError, match=f"{HERE}.* is async, and may only compute"):
        positions(order_saga())[position](function)


@pytest.mark.parametrize("position", ["call", "compensate of call"])
@pytest.mark.parametrize("function", [blocks, partial(blocks, own=1), Waits().blocks], ids=kind_of)
def test_a_call_does_not_block_in_any_disguise(position: str, function: Any) -> None:
    with pytest.raises(UsageError, match=f"{HERE}.* would stop all other sagas"):
        positions(order_saga())[position](function)


@pytest.mark.parametrize("function", [waits, Waits(), Waits().method, partial(waits, own=1)], ids=kind_of)
def test_a_call_may_be_anything_that_is_async(function: Any) -> None:
    order = order_saga()
    step = order.call(name="charge")(function)
    order.call(name="again")(step)
    assert list(order.definition.steps) == ["charge", "again"]


def test_a_function_without_a_signature_is_accepted() -> None:
    order = order_saga()
    request(order).payload(vars)
    command = order.definition.steps["reserve"].action.command
    assert command
    assert command.payload is vars


@pytest.mark.parametrize("topic", ["stock orders", "lager/neu", "lagerä", "..", "x" * 250])
def test_a_topic_that_a_broker_rejects_is_rejected_first(topic: str) -> None:
    order = order_saga()
    for write in (
        lambda: order.request("stock.reserve", topic=topic, reply="stock.reserved"),
        lambda: order.request("stock.reserve", topic="stock", reply="stock.reserved", reply_topic=topic),
        lambda: order.wait("parcel.collected", topic=topic),
    ):
        with pytest.raises(UsageError, match=HERE):
            write()


def test_a_type_of_event_is_short_enough_and_comes_on_a_topic_that_there_can_be() -> None:
    order = order_saga()
    with pytest.raises(UsageError, match=f"{HERE}.* has 400 bytes; use at most 240"):
        order.request("ä" * 200, topic="stock", reply="stock.reserved")
    for more in (
        {"reply": "stock reserved"},
        {"rejection": "ä"},
        {"compensate": "stock.release", "compensated": "a/b"},
    ):
        with pytest.raises(UsageError, match=f"{HERE}.* would come on the topic 'events"):
            order.request(**{**STOCK, **more})
    with pytest.raises(UsageError, match=f"{HERE}.* would come on the topic"):
        order.wait("parcel collected")
    order.wait("parcel collected", topic="parcels")


@pytest.mark.parametrize("traceparent", ["garbage", "", "ä\0", 123, "00-" + "0" * 32])
def test_a_saga_is_not_started_with_a_trace_that_no_event_could_carry(traceparent: Any) -> None:
    order = order_saga()
    order.sleep(1, name="nap")
    with pytest.raises(UsageError, match="is not a W3C traceparent"):
        order.new(Order("A-7"), "A-7", traceparent=traceparent)


def test_a_time_of_too_many_digits_is_rejected_like_any_other() -> None:
    for seconds in (10**400, 10**5000):
        with pytest.raises(UsageError, match=f"{HERE}seconds=.* cannot work"):
            order_saga().sleep(seconds, name="nap")


def test_a_decorator_without_its_parentheses_says_so() -> None:
    order = order_saga()
    create, charge, step = order.local(name="create")(waits), order.call(name="charge")(waits), request(order)
    decorators: list[Any] = [order.local, order.call, create.compensate, charge.compensate, step.on]
    for decorator in decorators:
        with pytest.raises(UsageError, match=rf"{HERE}.*write @….{decorator.__name__}\("):
            decorator(waits)


def test_a_step_of_another_saga_is_no_predecessor() -> None:
    order, other = order_saga(), Saga("refund", Order)
    order.sleep(1, name="nap")
    nap = other.sleep(1, name="nap")
    with pytest.raises(UsageError, match=f"{HERE}.* is a step of another saga"):
        order.sleep(1, name="more", after=nap)


def chain(count: int) -> None:
    order = order_saga()
    for number in range(count // 2):
        order.sleep(1, name=f"before {number}")
    order.call(name="charge", pivot=True)(waits)
    for number in range(count // 2):
        order.sleep(1, name=f"after {number}")
    order.check()


def fan(count: int) -> None:
    order = order_saga()
    with order.parallel():
        for number in range(count):
            order.wait(f"e{number}")
    order.check()


@pytest.mark.parametrize("write", [chain, fan])
def test_ten_times_as_many_steps_take_about_ten_times_as_many_operations_to_write(write: Callable[[int], None]) -> None:
    write(1)  # Fills caches.
    few, many = (lines_executed(write, count) for count in (60, 600))
    # A quadratic algorithm executes a hundred times as many.
    assert many < 12 * few


def lines_executed(write: Callable[[int], None], count: int) -> int:
    executed, before = 0, sys.gettrace()

    def trace(frame: FrameType, event: str, argument: object) -> Any:
        nonlocal executed
        executed += event == "line"
        return trace

    sys.settrace(trace)
    try:
        write(count)
    finally:
        sys.settrace(before)
    return executed


def test_a_long_saga_is_still_checked_step_by_step() -> None:
    order = order_saga()
    order.call(name="charge", pivot=True)(waits)
    for number in range(100):
        order.sleep(1, name=f"nap {number}")
    with pytest.raises(UsageError, match="is a second pivot"):
        order.call(name="ship", pivot=True)(waits)
    with pytest.raises(UsageError, match="has a compensation and comes after the pivot"):
        request(order)
    with pytest.raises(UsageError, match="neither before nor after the pivot"):
        order.sleep(1, name="beside", after=[])


async def test_the_compensation_of_a_request_carries_the_payload_of_its_action_made_of_the_state_at_that_time() -> None:
    order = order_saga()
    step = request(order)

    @step.payload
    def what(state: Order) -> dict[str, Any]:
        return {"order": state.order_id, "reservation": state.reservation}

    @step.on("stock.reserved")
    def reserved(run: Any, reply: Any) -> None:
        run.state.reservation = "R-1"

    request(
        order,
        "pay",
        command="bank.charge",
        reply="bank.charged",
        rejection="bank.refused",
        compensate=None,
        compensated=None,
    )
    shop = Shop(order)
    await begun(shop, order)
    [asked] = await shop.sent()
    await shop.answer(asked, "stock.reserved")
    await shop.works()
    [charge] = await shop.sent()
    await shop.answer(charge, "bank.refused")
    await shop.works()
    [compensate] = await shop.sent()
    assert (compensate.event_type, compensate.payload) == ("stock.release", {"order": "A-7", "reservation": "R-1"})


async def test_a_payload_that_is_nothing_is_not_sent() -> None:
    order = order_saga()
    request(order).payload(lambda state: None)
    shop = Shop(order)
    saga_id = await begun(shop, order)
    instance = (await shop.shown(saga_id)).instance
    assert instance.status is Status.FAILED
    assert (instance.last_error or "").startswith("payload: returned None; return what the command is to carry")
    assert await shop.sent() == []


@pytest.mark.parametrize("lazy", [waits, yields, yields_later])
async def test_a_reply_taken_by_what_only_returns_something_to_run_fails_at_once(lazy: Any) -> None:
    order = order_saga()
    request(order).on("stock.reserved")(lambda run, reply: lazy(run))
    shop = Shop(order)
    saga_id = await begun(shop, order)
    [asked] = await shop.sent()
    await shop.answer(asked, "stock.reserved")
    await shop.works()
    instance = (await shop.shown(saga_id)).instance
    assert instance.status is Status.FAILED
    assert 'on("stock.reserved"): returned' in (instance.last_error or "")


@pytest.mark.parametrize("kind", ["local", "call"])
async def test_a_step_that_returns_what_it_should_have_awaited_fails_at_once(kind: str) -> None:
    order = order_saga()

    async def forgets(run: Any, *tx: Any) -> Any:
        return waits(run)

    order.local()(forgets) if kind == "local" else order.call()(forgets)
    shop = Shop(order)
    saga_id = await begun(shop, order)
    instance = (await shop.shown(saga_id)).instance
    assert instance.status is Status.FAILED
    assert "returned a coroutine that nobody has awaited" in (instance.last_error or "")


async def test_a_start_that_must_be_new_says_that_the_saga_is_there() -> None:
    order = order_saga()
    order.sleep(60, name="nap")
    shop = Shop(order)
    saga_id = await shop.start(order, Order("A-7", 12))
    async with shop.store.transaction() as tx:
        assert await order.start(tx, Order("A-7", 13), correlation_id="A-7") == saga_id
        with pytest.raises(AlreadyStarted, match="there is a saga order A-7 already, and it was left as it is"):
            await order.start(tx, Order("A-7", 13), correlation_id="A-7", must_be_new=True)
        await order.start(tx, Order("A-8", 13), correlation_id="A-8", must_be_new=True)
    assert (await shop.state(saga_id))["amount"] == 12


async def test_when_two_parallel_steps_change_one_field_the_audit_log_names_the_winner() -> None:
    order = order_saga()
    with order.parallel():

        @order.call()
        async def hotel(run: Any) -> None:
            run.state.amount, run.state.reservation = 1, "hotel"

        @order.call()
        async def car(run: Any) -> None:
            run.state.amount, run.state.charge = 2, "car"

    shop = Shop(order)
    saga_id = await begun(shop, order)
    state = await shop.state(saga_id)
    overwritten = [line for line in await shop.store.admin.audit(saga_id) if line["what"] == "state overwritten"]
    assert [line["detail"] for line in overwritten] == [
        "amount: changed by another step while this one ran; this one's value is kept"
    ]
    assert state["amount"] == {"hotel": 1, "car": 2}[overwritten[0]["step"]]
    assert (state["reservation"], state["charge"]) == ("hotel", "car")
