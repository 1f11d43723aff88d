"""Claims of a saga worker: kept, lost, given back; and a store that does not answer."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Sequence
from typing import Any
from uuid import UUID

import pytest

import outrider
from outrider import Event, RetryPolicy
from outrider.saga import Saga
from outrider.saga.model import Claim, SagaChange, Status, StepStatus
from outrider.telemetry.events import SagaAdvanced, SagaEnded, SagaReleased, SagaWorkerRecovered, SagaWorkerUnavailable
from tests.support.saga_shop import (
    LEASE_SECONDS,
    ONCE,
    PATIENCE_SECONDS,
    PLAIN,
    Order,
    Shop,
    begun,
    local,
    order_saga,
    request,
    running,
    until,
)

DONE, RETRYING, REJECTED = StepStatus.DONE, StepStatus.RETRYING, StepStatus.REJECTED


async def test_what_a_lost_worker_had_begun_is_begun_again_by_another_with_the_same_key() -> None:
    saga, calls, begins = order_saga(), list[tuple[str, int]](), asyncio.Event()

    @saga.call(retry=PLAIN)
    async def charge(run: Any) -> None:
        calls.append((run.key, run.attempt))
        if len(calls) == 1:
            begins.set()
            await asyncio.Event().wait()

    shop = Shop(saga)
    saga_id = await shop.start(saga, Order("A-7"))
    async with running(shop.worker) as task:
        await until(begins)
        task.cancel()
    other = shop.new_worker(seed=1)
    await shop.works(other)
    assert await shop.status(saga_id) is Status.RUNNING
    shop.clock.advance(seconds=LEASE_SECONDS)
    await shop.works(other)
    assert calls == [(f"{saga_id}:charge", 1)] * 2
    assert await shop.status(saga_id) is Status.COMPLETED


async def test_a_saga_that_is_lost_before_its_first_turn_is_not_renewed_for_ever() -> None:
    saga = order_saga()
    saga.sleep(60, name="nap")
    shop = Shop(saga)
    await shop.start(saga, Order("A-7"))
    assert await shop.worker.run_once() == 1
    for task in list(shop.worker._tasks.values()):
        task.cancel()
    await shop.worker.rest()
    assert shop.worker.busy == 0


async def test_who_has_lost_its_claim_drops_the_saga_at_once() -> None:
    saga, begins, attempts = order_saga(), asyncio.Event(), list[int]()
    ended = asyncio.Event()

    @saga.call(retry=PLAIN)
    async def charge(run: Any) -> None:
        attempts.append(run.attempt)
        if len(attempts) == 1:
            begins.set()
            try:
                await asyncio.Event().wait()
            finally:
                ended.set()

    shop = Shop(saga)
    saga_id = await shop.start(saga, Order("A-7"))
    # It looks for messages so seldom that only the renewal can show the loss in time.
    worker = shop.new_worker(lease_seconds=100 * PATIENCE_SECONDS, poll_seconds_max=10 * PATIENCE_SECONDS)
    await worker.run_once()
    await until(begins)
    shop.clock.advance(seconds=100 * PATIENCE_SECONDS)
    await shop.works(shop.new_worker(seed=1))
    await worker.renew()
    await until(ended)
    await worker.rest()
    assert attempts == [1, 1]
    assert await shop.status(saga_id) is Status.COMPLETED
    assert [fact.saga_id for fact in shop.observer.of(SagaReleased)] == [saga_id]


async def test_the_result_of_who_has_lost_its_claim_is_thrown_away() -> None:
    saga, begins, goes_on, log = order_saga(), asyncio.Event(), asyncio.Event(), list[str]()
    calls = itertools.count(1)

    @saga.call(retry=PLAIN)
    async def charge(run: Any) -> None:
        call = next(calls)
        run.state.charge = f"call {call}"
        run.stage(Event("order.charged", {"call": call}))
        if call == 1:
            begins.set()
            await goes_on.wait()

    local(saga, log)
    shop = Shop(saga)
    saga_id = await shop.start(saga, Order("A-7"))
    await shop.worker.run_once()
    await until(begins)
    shop.clock.advance(seconds=LEASE_SECONDS)
    await shop.works(shop.new_worker(seed=1))
    goes_on.set()
    await shop.worker.rest()
    assert (await shop.state(saga_id))["charge"] == "call 2"
    assert [event.payload for event in await shop.sent()] == [{"call": 2}]
    assert log == ["create"]
    assert len(shop.observer.of(SagaReleased)) == 1


async def test_a_renewed_claim_outlasts_its_lease() -> None:
    saga, begins, goes_on = order_saga(), asyncio.Event(), asyncio.Event()

    @saga.call()
    async def charge(run: Any) -> None:
        begins.set()
        await goes_on.wait()

    shop = Shop(saga)
    saga_id = await shop.start(saga, Order("A-7"))
    await shop.worker.run_once()
    await until(begins)
    for _ in range(4):
        shop.clock.advance(seconds=LEASE_SECONDS / 2)
        await shop.worker.renew()
        assert await shop.new_worker(seed=1).run_once() == 0
    goes_on.set()
    await shop.worker.rest()
    assert await shop.progress(saga_id, "charge") == (DONE, 1)


async def test_a_saga_is_not_claimed_while_its_local_function_runs_however_long_that_takes() -> None:
    saga, begins, goes_on, attempts = order_saga(), asyncio.Event(), asyncio.Event(), list[int]()

    @saga.local()
    async def create(run: Any, tx: Any) -> None:
        attempts.append(run.attempt)
        begins.set()
        await goes_on.wait()

    shop = Shop(saga)
    saga_id = await shop.start(saga, Order("A-7"))
    await shop.worker.run_once()
    await until(begins)
    shop.clock.advance(seconds=2 * LEASE_SECONDS)
    assert await shop.new_worker(seed=1).run_once() == 0
    goes_on.set()
    await shop.worker.rest()
    assert attempts == [1]
    assert await shop.status(saga_id) is Status.COMPLETED


async def test_a_call_that_cannot_begin_since_the_claim_may_have_ended_costs_no_attempt() -> None:
    saga, log = order_saga(), list[int]()

    @saga.local()
    async def create(run: Any, tx: Any) -> None:
        # The machine is suspended for so long after this turn is saved, that the claim may have ended.
        tx.on_commit.append(lambda: shop.clock.advance(seconds=LEASE_SECONDS * 0.95))

    @saga.call(retry=ONCE)
    async def charge(run: Any) -> None:
        log.append(run.attempt)

    shop = Shop(saga)
    saga_id = await begun(shop, saga)
    assert "action handed over" in await shop.audit_log(saga_id)
    assert log == [1]
    assert await shop.status(saga_id) is Status.COMPLETED


async def test_a_local_step_may_take_nearly_as_long_as_a_lease_before_a_call_begins() -> None:
    saga, log = order_saga(), list[int]()

    @saga.local()
    async def create(run: Any, tx: Any) -> None:
        shop.clock.advance(seconds=LEASE_SECONDS * 0.95)

    @saga.call(retry=ONCE)
    async def charge(run: Any) -> None:
        log.append(run.attempt)

    shop = Shop(saga)
    saga_id = await begun(shop, saga)
    assert log == [1]
    assert await shop.status(saga_id) is Status.COMPLETED
    assert "action handed over" not in await shop.audit_log(saga_id)


async def test_a_worker_that_claims_anew_what_it_still_drives_goes_on_with_it() -> None:
    saga, begins, goes_on, attempts = order_saga(), asyncio.Event(), asyncio.Event(), list[int]()

    @saga.call(retry=ONCE)
    async def charge(run: Any) -> None:
        attempts.append(run.attempt)
        begins.set()
        await goes_on.wait()

    shop = Shop(saga)
    saga_id = await shop.start(saga, Order("A-7"))
    await shop.worker.run_once()
    await until(begins)
    shop.clock.advance(seconds=LEASE_SECONDS)
    assert await shop.worker.run_once() == 1
    await shop.worker.renew()
    goes_on.set()
    await shop.worker.rest()
    assert attempts == [1]
    assert await shop.progress(saga_id, "charge") == (DONE, 1)
    assert not shop.observer.of(SagaReleased)


async def test_a_worker_lets_go_of_what_another_has_written_before_it_claims_it_anew() -> None:
    saga, begins, attempts = order_saga(), asyncio.Event(), list[int]()

    @saga.call(retry=PLAIN)
    async def charge(run: Any) -> None:
        attempts.append(run.attempt)
        begins.set()
        if len(attempts) < 3:
            await asyncio.Event().wait()

    shop, other = Shop(saga), None
    saga_id = await shop.start(saga, Order("A-7"))
    for worker in (shop.worker, other := shop.new_worker(seed=1), shop.worker):
        begins.clear()
        await worker.run_once()
        await until(begins)
        shop.clock.advance(seconds=LEASE_SECONDS)
    await shop.worker.rest()
    await other.renew()
    await other.rest()
    assert attempts == [1, 1, 1]
    assert await shop.progress(saga_id, "charge") == (DONE, 1)


async def test_calls_keep_their_claims_while_a_local_step_keeps_a_whole_store_waiting() -> None:
    saga, begins, goes_on = order_saga(), asyncio.Event(), asyncio.Event()
    slow = Saga("slow", Order)

    @saga.call(retry=ONCE)
    async def charge(run: Any) -> None:
        begins.set()
        await goes_on.wait()

    @slow.local(timeout_seconds=2 * LEASE_SECONDS)
    async def create(run: Any, tx: Any) -> None:
        # No renewal is possible meanwhile, and another worker looks as soon as it ends.
        shop.clock.advance(seconds=2 * LEASE_SECONDS)
        tx.on_commit.append(lambda: found.append(1))

    shop, found = Shop(saga, slow), list[int]()
    shop.store.one_at_a_time = True
    saga_id = await shop.start(saga, Order("A-7"))
    await shop.worker.run_once()
    await until(begins)
    await shop.start(slow, Order("A-8"))
    await shop.worker.run_once()
    await shop.observer.until_emitted(SagaEnded)
    assert found == [1]
    assert await shop.new_worker(seed=1).run_once() == 0
    goes_on.set()
    await shop.worker.rest()
    assert await shop.progress(saga_id, "charge") == (DONE, 1)


async def test_claims_that_a_local_step_made_longer_are_those_of_calls_and_are_moved_back_when_it_is_over(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    saga, begins, goes_on, moved_back = order_saga(), asyncio.Event(), asyncio.Event(), asyncio.Event()
    slow = Saga("slow", Order)

    @saga.call()
    async def charge(run: Any) -> None:
        begins.set()
        await goes_on.wait()

    @slow.local(timeout_seconds=600)
    async def create(run: Any, tx: Any) -> None:
        """Take no time at all."""

    shop, renewed = Shop(saga, slow), list[tuple[int, float]]()
    shop.store.one_at_a_time = True
    renew = shop.store.renew

    async def renewing(claims: Sequence[Claim], lease_seconds: float) -> frozenset[UUID]:
        renewed.append((len(claims), lease_seconds))
        if len(renewed) == 2:
            moved_back.set()
        return await renew(claims, lease_seconds)

    monkeypatch.setattr(shop.store, "renew", renewing)
    await shop.start(saga, Order("A-7"))
    async with running(shop.new_worker(lease_seconds=60)):
        await until(begins)
        await shop.start(slow, Order("A-8"), "A-8")
        await until(moved_back)
        assert renewed == [(1, 660), (1, 60)]
        goes_on.set()


async def test_no_more_sagas_are_claimed_than_may_run_at_a_time() -> None:
    saga, busy, most, goes_on = order_saga(), list[int](), list[int](), asyncio.Event()
    both = asyncio.Barrier(3)

    @saga.call()
    async def charge(run: Any) -> None:
        busy.append(1)
        most.append(len(busy))
        if not goes_on.is_set():
            await both.wait()
        await goes_on.wait()
        busy.pop()

    shop = Shop(saga)
    for number in range(5):
        await shop.start(saga, Order("A-7"), f"A-{number}")
    worker = shop.new_worker(concurrency=2)
    async with running(worker):
        async with asyncio.timeout(PATIENCE_SECONDS):
            await both.wait()
        assert worker.busy == 2
        goes_on.set()
        await shop.observer.until_emitted(SagaEnded, 5)
    assert max(most) == 2


async def test_what_this_worker_gave_back_is_claimed_when_it_is_due_without_waiting_for_the_next_look() -> None:
    saga, attempts = order_saga(), list[int]()

    @saga.local(retry=RetryPolicy(base_seconds=0.01, cap_seconds=0.01))
    async def create(run: Any, tx: Any) -> None:
        attempts.append(run.attempt)
        if run.attempt == 1:
            raise RuntimeError("not today")

    shop = Shop(saga, own_time=False)
    await shop.start(saga, Order("A-7"))
    seldom = 10 * PATIENCE_SECONDS
    async with running(shop.new_worker(lease_seconds=3 * seldom, poll_seconds_min=seldom, poll_seconds_max=seldom)):
        await shop.observer.until_emitted(SagaEnded)
    assert attempts == [1, 2]


async def test_a_stop_lets_a_call_finish_and_hands_over_what_comes_next_at_no_cost() -> None:
    saga, begins, goes_on, attempts = order_saga(), asyncio.Event(), asyncio.Event(), list[int]()

    @saga.call()
    async def charge(run: Any) -> None:
        begins.set()
        await goes_on.wait()

    @saga.call(retry=ONCE)
    async def ship(run: Any) -> None:
        attempts.append(run.attempt)

    shop = Shop(saga)
    saga_id = await shop.start(saga, Order("A-7"))
    async with running(shop.worker) as task:
        await until(begins)
        shop.worker.stop()
        goes_on.set()
        await task
    instance = (await shop.shown(saga_id)).instance
    assert (instance.owner, instance.wake_at) == (None, shop.clock.now())
    assert await shop.progress(saga_id, "charge") == (DONE, 1)
    assert await shop.progress(saga_id, "ship") == (RETRYING, 0)
    assert "action handed over" in await shop.audit_log(saga_id)
    assert attempts == []
    await shop.works(shop.new_worker(seed=1))
    assert attempts == [1]
    assert await shop.status(saga_id) is Status.COMPLETED
    assert (await shop.shown(saga_id)).instance.retry_count == 0


async def test_a_stop_waits_for_all_that_is_under_way_side_by_side() -> None:
    saga, both, first, second = order_saga(), asyncio.Barrier(3), asyncio.Event(), asyncio.Event()
    with saga.parallel():

        @saga.call(retry=ONCE)
        async def hotel(run: Any) -> None:
            await both.wait()
            await first.wait()

        @saga.call(retry=ONCE)
        async def car(run: Any) -> None:
            await both.wait()
            await second.wait()

    shop = Shop(saga)
    saga_id = await shop.start(saga, Order("A-7"))
    async with running(shop.worker) as task:
        async with asyncio.timeout(PATIENCE_SECONDS):
            await both.wait()
        shop.worker.stop()
        first.set()
        await shop.observer.until_emitted(SagaAdvanced, 2)
        second.set()
        await task
    assert await shop.progress(saga_id, "hotel") == (DONE, 1)
    assert await shop.progress(saga_id, "car") == (DONE, 1)
    assert await shop.status(saga_id) is Status.COMPLETED


async def test_a_stop_that_takes_too_long_abandons_a_call_and_gives_its_saga_back() -> None:
    saga, begins, attempts = order_saga(), asyncio.Event(), list[int]()

    @saga.call(retry=PLAIN)
    async def charge(run: Any) -> None:
        attempts.append(run.attempt)
        if len(attempts) == 1:
            begins.set()
            await asyncio.Event().wait()

    shop = Shop(saga)
    saga_id = await shop.start(saga, Order("A-7"))
    worker = shop.new_worker(shutdown_timeout_seconds=0.01)
    async with running(worker):
        await until(begins)
    assert (await shop.shown(saga_id)).instance.owner is None
    await shop.works(shop.new_worker(seed=1))
    assert attempts == [1, 1]
    assert await shop.status(saga_id) is Status.COMPLETED


async def test_a_store_that_does_not_answer_is_logged_once_and_counts_no_attempt() -> None:
    saga, tries = order_saga(), list[int]()

    @saga.local(retry=ONCE)
    async def create(run: Any, tx: Any) -> None:
        tries.append(1)
        if len(tries) == 1:
            shop.store.away = 3
            raise ConnectionError("the connection is gone")

    shop = Shop(saga)
    saga_id = await begun(shop, saga)
    assert await shop.status(saga_id) is Status.COMPLETED
    assert await shop.progress(saga_id, "create") == (DONE, 1)
    assert len(shop.observer.of(SagaWorkerUnavailable)) == 1
    assert len(shop.observer.of(SagaWorkerRecovered)) == 1


@pytest.mark.parametrize("turn", [1, 2, 3])
async def test_a_commit_with_a_lost_answer_loses_no_step_and_repeats_none(turn: int) -> None:
    saga, log = order_saga(), list[str]()
    local(saga, log, "a")

    @saga.call(retry=ONCE)
    async def charge(run: Any) -> None:
        log.append("charge")

    local(saga, log, "b")
    shop = Shop(saga)
    saga_id = await shop.start(saga, Order("A-7"))
    turns = iter(range(1, 100))

    def saving(_: SagaChange) -> None:
        shop.store.unheard = int(next(turns) == turn)

    shop.store.saving = saving
    await shop.works()
    assert await shop.status(saga_id) is Status.COMPLETED
    assert log == ["a", "charge", "b"]


async def test_a_saga_that_cannot_be_saved_is_dropped_and_does_not_spin() -> None:
    saga, log = order_saga(), list[str]()
    request(saga)
    shop = Shop(saga)

    def broken(_: SagaChange) -> None:
        log.append("save")
        if len(log) == 1:
            raise RuntimeError("a bug")

    shop.store.saving = broken
    saga_id = await begun(shop, saga)
    assert log == ["save"]
    [fact] = shop.observer.of(SagaReleased)
    assert fact.error.startswith("RuntimeError: a bug (tests/unit/saga/test_claims.py:")
    await shop.passes(LEASE_SECONDS)
    assert len(await shop.sent()) == 1
    assert await shop.status(saga_id) is Status.RUNNING


async def test_a_local_function_that_breaks_its_transaction_has_failed() -> None:
    saga, log = order_saga(), list[str]()
    local(saga, log, "a")

    @saga.local(retry=ONCE)
    async def breaks(run: Any, tx: Any) -> None:
        log.append("breaks")

    shop = Shop(saga)

    def failing(turn: SagaChange) -> None:
        if any((entry.step, entry.status) == ("breaks", DONE) for entry in turn.entries):
            raise outrider.Permanent("a row breaks a rule")

    shop.store.saving = failing
    saga_id = await begun(shop, saga)
    assert await shop.status(saga_id) is Status.COMPENSATED
    assert (await shop.progress(saga_id, "breaks")) == (REJECTED, 1)
    assert log == ["a", "breaks", "compensate a"]


async def test_a_saga_of_an_unknown_version_is_not_claimed() -> None:
    saga, log = order_saga(), list[str]()
    local(saga, log)
    shop = Shop(saga)
    new = saga.new(Order("A-7"), "A-7")._replace(definition_version=2)
    async with shop.store.transaction() as tx:
        await shop.store.start(tx, new)
    await shop.works()
    assert await shop.status(new.saga_id) is Status.STARTED
