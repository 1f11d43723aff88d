"""Calls that ignore their cancellation: they time out all the same, and no worker waits for them."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import pytest

import outrider
from outrider import Event
from outrider.saga import Saga, StepRejected
from outrider.saga.execution import step_executor
from outrider.saga.model import Status, StepStatus
from outrider.telemetry.events import SagaNeedsAttention, SagaTaskLeaked
from tests.support.saga_shop import ONCE, TWICE, Order, Shop, begun, order_saga, running, until


class Deaf:
    """A call that hears of nothing until it is let go."""

    def __init__(self) -> None:
        self.attempts = list[int]()
        self.begins, self.goes_on = asyncio.Event(), asyncio.Event()
        self.tasks = list[asyncio.Task[Any]]()

    async def __call__(self, run: Any) -> None:
        self.attempts.append(run.attempt)
        self.begins.set()
        task = asyncio.current_task()
        assert task
        self.tasks.append(task)
        while not self.goes_on.is_set():
            try:
                await self.goes_on.wait()
            except asyncio.CancelledError:
                continue


@pytest.fixture
async def deaf(monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Deaf]:
    monkeypatch.setattr(step_executor, "CANCEL_SECONDS", 0.01)
    made = Deaf()
    yield made
    made.goes_on.set()
    if made.tasks:
        await asyncio.wait(made.tasks)


def _saga(deaf: Deaf, **options: Any) -> Saga[Order]:
    saga = order_saga()
    saga.call(name="charge", timeout_seconds=0.01, **options)(deaf)
    return saga


async def test_a_call_that_ignores_its_end_is_unknown_and_made_again_beside_it(deaf: Deaf) -> None:
    shop = Shop(saga := _saga(deaf, retry=TWICE))
    saga_id = await begun(shop, saga)
    assert await shop.progress(saga_id, "charge") == (StepStatus.RETRYING, 1)
    await shop.passes(5)
    assert deaf.attempts == [1, 2]
    assert await shop.status(saga_id) is Status.FAILED
    assert [(fact.attempt, fact.tasks) for fact in shop.observer.of(SagaTaskLeaked)] == [(1, 1), (2, 2)]
    [reason] = shop.observer.of(SagaNeedsAttention)
    assert "unknown whether it happened: no result within 0.01 s" in reason.error


async def test_a_leaked_task_that_ends_is_forgotten_and_its_result_is_dropped(deaf: Deaf) -> None:
    shop = Shop(saga := _saga(deaf, retry=ONCE))
    saga_id = await begun(shop, saga)
    deaf.goes_on.set()
    await asyncio.wait(deaf.tasks)
    assert shop.worker.leaked == 0
    await shop.works()
    assert await shop.status(saga_id) is Status.FAILED


async def test_a_worker_does_not_wait_for_leaked_tasks_when_it_stops(deaf: Deaf) -> None:
    saga = order_saga()
    saga.call(name="charge", retry=TWICE)(deaf)
    shop = Shop(saga)
    saga_id = await shop.start(saga, Order("A-7"))
    worker = shop.new_worker(shutdown_timeout_seconds=0.01)
    async with running(worker) as task:
        await until(deaf.begins)
        worker.stop()
        async with asyncio.timeout(5):
            await task
    assert (await shop.shown(saga_id)).instance.owner is None
    assert worker.leaked == 1


async def test_a_step_that_leaks_too_many_tasks_is_not_called_any_more(
    deaf: Deaf, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(step_executor, "LEAKED_MAX", 1)
    shop = Shop(saga := _saga(deaf, retry=TWICE))
    saga_id = await begun(shop, saga)
    await shop.passes(5)
    instance = (await shop.shown(saga_id)).instance
    assert (instance.status, deaf.attempts) == (Status.FAILED, [1])
    assert instance.last_error is not None
    assert "ignore that they were cancelled" in instance.last_error
    assert "restart the worker, and retry the saga" in instance.last_error


async def test_a_call_that_ends_with_an_answer_when_it_is_cancelled_has_answered() -> None:
    saga = order_saga()

    @saga.call(timeout_seconds=0.01, retry=ONCE)
    async def charge(run: Any) -> None:
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            run.state.charge = "made it"

    @saga.call(timeout_seconds=0.01, retry=ONCE)
    async def ship(run: Any) -> None:
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            raise StepRejected("no parcel") from None

    shop = Shop(saga)
    saga_id = await begun(shop, saga)
    assert (await shop.state(saga_id))["charge"] == "made it"
    assert await shop.progress(saga_id, "ship") == (StepStatus.REJECTED, 1)


async def test_a_call_that_breaks_when_it_is_cancelled_is_unknown() -> None:
    saga = order_saga()

    @saga.call(timeout_seconds=0.01, retry=ONCE)
    async def charge(run: Any) -> None:
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            raise RuntimeError("the request was cut off") from None

    shop = Shop(saga)
    saga_id = await begun(shop, saga)
    error = (await shop.shown(saga_id)).instance.last_error
    assert error == "unknown whether it happened: no result within 0.01 s"


async def test_a_local_step_that_ignores_its_end_is_cut_off_from_its_transaction(deaf: Deaf) -> None:
    saga = order_saga()

    @saga.local(timeout_seconds=0.01, retry=ONCE)
    async def create(run: Any, tx: Any) -> None:
        await outrider.stage(tx, Event("order.created", {}))
        await deaf(run)

    shop = Shop(saga)
    saga_id = await begun(shop, saga)
    assert await shop.status(saga_id) is Status.COMPENSATED
    assert (await shop.shown(saga_id)).journal[0].error == (
        "raised in its last attempt, and was rolled back: no result within 0.01 s"
    )
    assert len(shop.observer.of(SagaTaskLeaked)) == 1
    deaf.goes_on.set()
    await asyncio.wait(deaf.tasks)
    assert await shop.sent() == []
