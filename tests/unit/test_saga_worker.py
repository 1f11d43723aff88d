"""The saga worker: steps of every kind, replies early and late, and the orders of people."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from uuid import UUID

import pytest

import outrider
from outrider import Event
from outrider.saga import SagaWorker, StepRejected
from outrider.saga.model import Phase, Status, StepStatus
from outrider.telemetry.events import (
    Handled,
    ReplyOfUnknownSaga,
    SagaAdvanced,
    SagaEnded,
    SagaNeedsAttention,
    SagaWorkerStarted,
)
from outrider.telemetry.log_observer import LogObserver
from tests.unit.saga_shop import (
    ONCE,
    TWICE,
    Order,
    Shop,
    begun,
    local,
    order_saga,
    request,
    running,
    until,
)

RETRYING = StepStatus.RETRYING


async def test_a_saga_completes_and_its_state_goes_from_step_to_step() -> None:
    saga, log = order_saga(), list[str]()
    local(saga, log)
    reserve = request(saga)

    @reserve.payload
    def what(state: Order) -> dict[str, Any]:
        return {"order": state.order_id}

    @reserve.on("stock.reserved")
    def reserved(run: Any, reply: Any) -> None:
        run.state.reservation = reply.payload["reservation"]

    @saga.call()
    async def charge(run: Any) -> None:
        run.state.charge = f"{run.state.reservation} for {run.state.amount}"
        run.stage(Event("order.charged", {"amount": run.state.amount}))

    shop = Shop(saga)
    saga_id = await begun(shop, saga, amount=12)
    [command] = await shop.sent()
    assert (command.event_type, command.topic, command.payload) == ("stock.reserve", "stock", {"order": "A-7"})
    assert (command.saga_id, command.key) == (str(saga_id), str(saga_id))
    assert command.headers["saga_key"] == f"{saga_id}:reserve"
    assert command.headers["saga_phase"] == "action"
    assert await shop.answer(command, "stock.reserved", {"reservation": "R-1"})
    await shop.works()
    assert await shop.status(saga_id) is Status.COMPLETED
    assert (await shop.state(saga_id))["charge"] == "R-1 for 12"
    [charged] = await shop.sent()
    assert (charged.event_type, charged.saga_id) == ("order.charged", str(saga_id))
    assert [fact.status for fact in shop.observer.of(SagaEnded)] == ["completed"]
    assert log == ["create"]


async def test_starting_a_saga_twice_is_one_start() -> None:
    saga, log = order_saga(), list[str]()
    local(saga, log)
    shop = Shop(saga)
    first = await begun(shop, saga)
    assert await begun(shop, saga) == first
    assert log == ["create"]


async def test_the_end_of_a_step_and_the_beginning_of_the_next_are_one_commit() -> None:
    saga, log = order_saga(), list[str]()
    for name in ("a", "b", "c"):
        local(saga, log, name)
    shop = Shop(saga)
    saga_id = await begun(shop, saga)
    assert log == ["a", "b", "c"]
    # One to begin, and one for each step: that of the last step also ends the saga.
    assert (await shop.shown(saga_id)).instance.version == 4


async def test_a_rejection_is_compensated_in_reverse() -> None:
    saga, log = order_saga(), list[str]()
    local(saga, log, "a")
    request(saga)
    local(saga, log, "b")

    @saga.call()
    async def charge(run: Any) -> None:
        raise StepRejected("the card was declined")

    shop = Shop(saga)
    saga_id = await begun(shop, saga)
    [command] = await shop.sent()
    await shop.answer(command, "stock.reserved")
    await shop.works()
    assert log == ["a", "b", "compensate b"]
    [compensate] = await shop.sent()
    assert (compensate.event_type, compensate.headers["saga_phase"]) == ("stock.release", "compensation")
    assert compensate.headers["saga_key"] == command.headers["saga_key"]
    await shop.answer(compensate, "stock.released")
    await shop.works()
    assert log == ["a", "b", "compensate b", "compensate a"]
    assert await shop.status(saga_id) is Status.COMPENSATED
    assert (await shop.shown(saga_id)).instance.last_error is None


async def test_a_request_without_an_answer_is_made_again_with_the_same_key() -> None:
    saga = order_saga()
    request(saga)
    shop = Shop(saga)
    saga_id = await begun(shop, saga)
    [first] = await shop.sent()
    await shop.passes(30)
    assert await shop.progress(saga_id, "reserve") == (RETRYING, 1)
    await shop.passes(1)
    [second] = await shop.sent()
    assert second.headers["saga_key"] == first.headers["saga_key"]
    assert second.event_id != first.event_id
    await shop.answer(second, "stock.reserved")
    # The answer to the first question came late, but it came, so there are two.
    await shop.answer(first, "stock.reserved")
    await shop.works()
    assert await shop.status(saga_id) is Status.COMPLETED
    assert not await shop.answer(first, "stock.reserved")
    assert len(shop.observer.of(ReplyOfUnknownSaga)) == 1


async def test_an_event_that_comes_before_its_wait_is_kept_for_it() -> None:
    saga, log = order_saga(), list[str]()
    request(saga)
    parcel = saga.wait("parcel.collected", timeout_seconds=60, name="collected", correlate=lambda e: e.payload["order"])

    @parcel.on("parcel.collected")
    def collected(run: Any, reply: Any) -> None:
        log.append("collected")
        run.state.parcel = reply.payload["order"]

    shop = Shop(saga)
    saga_id = await begun(shop, saga)
    early = Event("parcel.collected", {"order": "A-7"}, event_id=UUID(int=1))
    assert await shop.arrives(early)
    assert not await shop.arrives(early)
    await shop.works()
    [command] = await shop.sent()
    await shop.answer(command, "stock.reserved")
    await shop.works()
    assert await shop.status(saga_id) is Status.COMPLETED
    assert (await shop.state(saga_id))["parcel"] == "A-7"
    assert log == ["collected"]


async def test_a_wait_that_nothing_ends_is_refused_when_its_time_is_over() -> None:
    saga, log = order_saga(), list[str]()
    local(saga, log)
    saga.wait("parcel.collected", timeout_seconds=60)
    shop = Shop(saga)
    saga_id = await begun(shop, saga)
    await shop.passes(59)
    assert await shop.status(saga_id) is Status.RUNNING
    await shop.passes(1)
    assert await shop.status(saga_id) is Status.COMPENSATED
    assert log == ["create", "compensate create"]


async def test_a_sleep_takes_its_time_and_no_worker() -> None:
    saga, log = order_saga(), list[str]()
    saga.sleep(seconds=3600, name="cool_down")
    local(saga, log)
    shop = Shop(saga)
    saga_id = await begun(shop, saga)
    assert shop.worker.busy == 0
    await shop.passes(3599)
    assert log == []
    await shop.passes(1)
    assert log == ["create"]
    assert await shop.status(saga_id) is Status.COMPLETED


async def test_steps_side_by_side_both_keep_what_they_put_into_the_state() -> None:
    saga = order_saga()
    both = asyncio.Barrier(2)
    with saga.parallel():

        @saga.call()
        async def hotel(run: Any) -> None:
            await both.wait()
            run.state.reservation = "H-1"

        @saga.call()
        async def car(run: Any) -> None:
            await both.wait()
            await asyncio.sleep(0)
            run.state.charge = "C-1"

    @saga.local()
    def sum_up(run: Any, tx: Any) -> None:
        run.state.parcel = f"{run.state.reservation} {run.state.charge}"

    shop = Shop(saga)
    async with asyncio.timeout(5):
        saga_id = await begun(shop, saga)
    assert (await shop.state(saga_id))["parcel"] == "H-1 C-1"


async def test_a_failed_compensation_keeps_no_other_from_being_done() -> None:
    saga, log = order_saga(), list[str]()
    local(saga, log, "a")
    b = saga.local(name="b")(lambda run, tx: None)

    @b.compensate(retry=TWICE)
    def cannot(run: Any, tx: Any) -> None:
        log.append("compensate b")
        raise RuntimeError("stuck")

    local(saga, log, "c")
    saga.local(name="d")(_refuse)
    shop = Shop(saga)
    saga_id = await begun(shop, saga)
    assert await shop.progress(saga_id, "b", Phase.COMPENSATION) == (RETRYING, 1)
    await shop.passes(2)
    assert log == ["a", "c", "compensate c", "compensate b", "compensate b", "compensate a"]
    instance = (await shop.shown(saga_id)).instance
    assert (instance.status, instance.needs_attention) == (Status.FAILED, True)
    [fact] = shop.observer.of(SagaNeedsAttention)
    assert "b failed" in fact.error
    assert fact.level == "error"


def _refuse(run: Any, tx: Any) -> None:
    raise StepRejected("no")


async def test_an_order_to_retry_gives_a_failed_call_a_new_budget() -> None:
    saga, broken = order_saga(), [True]

    @saga.call(retry=ONCE)
    async def charge(run: Any) -> None:
        if broken:
            raise RuntimeError("not today")

    shop = Shop(saga)
    saga_id = await begun(shop, saga)
    assert await shop.status(saga_id) is Status.FAILED
    broken.clear()
    await shop.order(saga_id, "retry")
    await shop.works()
    assert await shop.status(saga_id) is Status.COMPLETED


async def test_an_order_to_resume_counts_what_failed_as_done() -> None:
    saga, log = order_saga(), list[str]()

    @saga.call(retry=ONCE)
    async def charge(run: Any) -> None:
        raise RuntimeError("not today")

    local(saga, log)
    shop = Shop(saga)
    saga_id = await begun(shop, saga)
    await shop.order(saga_id, "mark_done")
    await shop.works()
    assert await shop.status(saga_id) is Status.COMPLETED
    assert log == ["create"]


async def test_an_order_to_compensate_waits_for_the_call_that_is_under_way_since_to_cancel_it_proves_nothing() -> None:
    saga, log, begins, returns = order_saga(), list[str](), asyncio.Event(), asyncio.Event()
    local(saga, log)

    @saga.call()
    async def charge(run: Any) -> None:
        begins.set()
        await returns.wait()
        log.append("charged")

    @charge.compensate()
    async def refund(run: Any) -> None:
        log.append("compensate charge")

    shop = Shop(saga)
    saga_id = await shop.start(saga, Order("A-7"))
    async with running(shop.hire(poll_seconds_max=0.02)):
        await until(begins)
        moved = len(shop.observer.of(SagaAdvanced))
        await shop.order(saga_id, "compensate")
        # The turn that sees the order saves that it has seen it.
        await shop.observer.heard(SagaAdvanced, moved + 1)
        assert log == ["create"]
        returns.set()
        await shop.observer.heard(SagaEnded)
    assert log == ["create", "charged", "compensate charge", "compensate create"]
    assert await shop.status(saga_id) is Status.COMPENSATED


async def test_a_saga_goes_on_with_the_trace_it_was_started_in() -> None:
    trace = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"
    saga = order_saga()

    @saga.local()
    def create(run: Any, tx: Any) -> None:
        run.stage(Event("order.created", {}))

    request(saga)
    shop = Shop(saga)
    async with shop.store.transaction() as tx:
        await saga.start(tx, Order("A-7"), correlation_id="A-7", traceparent=trace)
    await shop.works()
    assert {event.headers["traceparent"] for event in await shop.sent()} == {trace}


async def test_who_needs_attention_is_in_the_log_as_an_error(caplog: pytest.LogCaptureFixture) -> None:
    saga = order_saga()

    @saga.call(retry=ONCE)
    async def charge(run: Any) -> None:
        raise RuntimeError("not today")

    shop = Shop(saga)
    saga_id = await shop.start(saga, Order("A-7"))
    worker = SagaWorker(shop.store, shop.sagas, outrider.stage, observer=LogObserver(), clock=shop.clock)
    await shop.works(worker)
    [record] = [record for record in caplog.records if record.levelname == "ERROR"]
    assert record.getMessage() == "saga needs attention"
    assert vars(record)["saga_id"] == saga_id
    assert "not today" in vars(record)["error"]


async def test_a_worker_looks_for_mail_when_a_consumer_has_handled_something() -> None:
    saga = order_saga()
    request(saga)
    shop = Shop(saga)
    worker = shop.hire(lease_seconds=1000, poll_seconds_min=300, poll_seconds_max=300)
    saga_id = await begun(shop, saga)
    [command] = await shop.sent()
    async with running(worker):
        await shop.observer.heard(SagaWorkerStarted)
        await idle()
        with unheard(shop):
            await shop.answer(command, "stock.reserved")
        worker.emit(Handled("saga.order", 1, 0, 0, 0, 0, 0.0))
        await shop.observer.heard(SagaEnded)
    assert await shop.status(saga_id) is Status.COMPLETED


async def idle() -> None:
    """Let everything come to rest that does not wait for time to pass; in memory, nothing else is waited for."""
    for _ in range(100):
        await asyncio.sleep(0)


@contextmanager
def unheard(shop: Shop) -> Iterator[None]:
    """Let the store tell nobody."""
    listeners, shop.outbox.sagas.listeners = shop.outbox.sagas.listeners, []
    yield
    shop.outbox.sagas.listeners = listeners
