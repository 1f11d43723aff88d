"""Outages of the services that steps call: the circuit breakers of a worker, and sagas at a service that is down."""

from __future__ import annotations

import asyncio
from collections import Counter
from dataclasses import dataclass
from typing import Any

import pytest

from outrider.errors import InvalidSetting, UsageError
from outrider.saga import Saga, SagaSettings, StepRejected, StepUnavailable
from outrider.saga.execution.outages import StepOutages
from outrider.saga.model import Phase, Status, StepStatus
from outrider.saga.planner.actions import CallAction, Outage, Raised, RejectedResult, Succeeded, TimedOut
from outrider.saga.planner.actions import UnavailableResult as Unavailable
from outrider.telemetry.events import SagaStepAvailable, SagaStepFailed, SagaStepRaised, SagaStepUnavailable
from outrider.telemetry.log_observer import words
from outrider.testing import ManualClock, RecordingObserver
from tests.support.saga_shop import TWICE, Order, Shop, begun, local, order_saga

ACTION = Phase.ACTION
DOWN = Unavailable("charge", ACTION, "503")
PROBE = CallAction("charge", ACTION, 1, "key")


class Breakers:
    """The outages of a worker, and the time."""

    def __init__(self, **settings: Any) -> None:
        self.clock, self.observer = ManualClock(), RecordingObserver()
        self.outages = StepOutages(SagaSettings(**settings), self.observer, self.clock)

    def wait_seconds(self) -> float | None:
        """Return the time until the next attempt, or None if an attempt may be made now."""
        found: Outage | None = self.outages.current("order").get(("charge", ACTION))
        return found.seconds if found and not found.allows_probe else None

    def down(self, times: int = 1) -> None:
        for _ in range(times):
            self.outages.record("order", DOWN)

    def probes(self) -> None:
        self.outages.started("order", [PROBE])

    def passes(self, seconds: float) -> None:
        self.clock.advance(seconds=seconds)


def test_a_breaker_opens_after_so_many_unavailable_results_in_a_row() -> None:
    breakers = Breakers(breaker_failures=3)
    breakers.down(2)
    breakers.outages.record("order", Succeeded("charge", ACTION))
    breakers.down(2)
    assert breakers.wait_seconds() is None
    breakers.down()
    assert breakers.wait_seconds() == 1
    assert breakers.observer.of(SagaStepUnavailable) == [SagaStepUnavailable("order", "charge", "action", "503", 1.0)]


def test_one_probe_goes_through_at_growing_intervals_whatever_becomes_of_it() -> None:
    breakers = Breakers(breaker_seconds_max=10)
    breakers.down(5)
    waits = []
    for _ in range(6):
        waits.append(seconds := breakers.wait_seconds())
        assert seconds
        breakers.passes(seconds)
        assert breakers.wait_seconds() is None
        breakers.probes()
        breakers.down(2)
    assert waits == [1, 2, 4, 8, 10, 10]
    assert len(breakers.observer.of(SagaStepUnavailable)) == 1


@pytest.mark.parametrize("answer", [Succeeded("charge", ACTION), RejectedResult("charge", ACTION, "no")])
def test_an_answer_of_the_service_closes_the_breaker(answer: Any) -> None:
    breakers = Breakers()
    breakers.down(5)
    breakers.passes(7)
    breakers.outages.record("order", answer)
    assert (breakers.wait_seconds(), breakers.outages._steps) == (None, {})
    assert breakers.observer.of(SagaStepAvailable) == [SagaStepAvailable("order", "charge", "action", 7.0)]
    breakers.down(4)
    assert breakers.wait_seconds() is None


@pytest.mark.parametrize("result", [Raised("charge", ACTION, "KeyError"), TimedOut("charge", ACTION)])
def test_an_error_proves_neither_an_outage_nor_its_end(result: Any) -> None:
    breakers = Breakers()
    for _ in range(9):
        breakers.outages.record("order", result)
    assert breakers.wait_seconds() is None
    breakers.down(5)
    breakers.outages.record("order", result)
    assert breakers.wait_seconds() == 1


def test_a_breaker_stops_one_step_in_one_phase_of_one_type_of_saga() -> None:
    breakers = Breakers()
    breakers.down(5)
    assert breakers.outages.current("refund") == {}
    assert list(breakers.outages.current("order")) == [("charge", ACTION)]


def test_the_log_names_the_step_and_its_service_in_plain_words() -> None:
    assert (words(SagaStepUnavailable), SagaStepUnavailable.level) == ("saga step unavailable", "warning")
    assert (words(SagaStepAvailable), SagaStepAvailable.level) == ("saga step available", "info")


@pytest.mark.parametrize("wrong", [-1, float("inf"), float("nan"), "30", True])
def test_a_time_that_is_no_time_is_rejected_with_the_remedy(wrong: Any) -> None:
    with pytest.raises(UsageError, match="use a number from 0, or None"):
        StepUnavailable("503", retry_after_seconds=wrong)


def test_the_settings_of_the_breaker_are_checked_against_each_other() -> None:
    with pytest.raises(InvalidSetting, match="breaker_seconds_base"):
        SagaSettings(breaker_seconds_base=9, breaker_seconds_max=8)


class Bank:
    """A service that is down for a while, and counts what reaches it."""

    def __init__(self) -> None:
        self.is_down, self.asked, self.charged = True, 0, Counter[str]()

    async def charge(self, run: Any) -> None:
        self.asked += 1
        if self.is_down:
            raise StepUnavailable("503 from the bank")
        self.charged[run.key] += 1


async def test_sagas_outlast_an_outage_of_hours_and_a_dead_service_is_asked_by_one_of_them_at_a_time() -> None:
    saga, log, bank = order_saga(), list[str](), Bank()
    local(saga, log)
    saga.call(name="charge", retry=TWICE)(bank.charge)
    shop = Shop(saga)
    ids = [await shop.start(saga, Order(f"A-{number}"), f"A-{number}") for number in range(12)]
    await shop.works()
    first = bank.asked
    for _ in range(45):
        await shop.passes(240)
    assert [await shop.status(saga_id) for saga_id in ids] == [Status.RUNNING] * 12
    assert [await shop.progress(saga_id, "charge") for saga_id in ids] == [(StepStatus.RETRYING, 0)] * 12
    # Three hours in 45 looks: without the breaker, each of the 12 sagas would ask each time.
    assert 40 <= bank.asked - first <= 45
    assert len(shop.observer.of(SagaStepUnavailable)) == 1
    bank.is_down = False
    for _ in range(3):
        await shop.passes(240)
    assert [await shop.status(saga_id) for saga_id in ids] == [Status.COMPLETED] * 12
    assert list(bank.charged.values()) == [1] * 12
    assert len(shop.observer.of(SagaStepAvailable)) == 1


@dataclass
class Trip:
    rooms: list[str]


async def test_the_items_of_a_step_share_its_breaker_and_one_of_them_probes_the_service() -> None:
    saga, bank, rooms = Saga("order", Trip), Bank(), [f"room {number}" for number in range(20)]
    saga.call(name="book", for_each=lambda state: state.rooms, parallel_max=20)(bank.charge)
    shop = Shop(saga)
    saga_id = await shop.start(saga, Trip(rooms))
    await shop.works()
    assert bank.asked == 20
    for _ in range(9):
        await shop.passes(600)
    assert bank.asked == 20 + 9
    bank.is_down = False
    for _ in range(2):
        await shop.passes(600)
    assert (await shop.status(saga_id), len(bank.charged)) == (Status.COMPLETED, 20)


async def test_a_saga_that_waits_for_a_service_is_claimed_by_no_worker() -> None:
    saga, bank = order_saga(), Bank()
    saga.call(name="charge")(bank.charge)
    shop = Shop(saga)
    saga_id = await begun(shop, saga)
    instance = (await shop.shown(saga_id)).instance
    assert (instance.owner, instance.needs_attention, instance.last_error) == (None, False, "503 from the bank")
    assert instance.wake_at
    assert instance.wake_at > shop.clock.now()
    assert shop.observer.of(SagaStepRaised) == []
    assert len(shop.observer.of(SagaStepFailed)) == 1


async def test_a_local_step_that_finds_its_service_unavailable_is_rolled_back_at_no_cost() -> None:
    saga, log, down = order_saga(), list[str](), [True, True, True]

    @saga.local(retry=TWICE)
    async def create(run: Any, tx: Any) -> None:
        run.stage(*())
        if down:
            down.pop()
            raise StepUnavailable("the search index is being rebuilt")
        log.append("created")

    shop = Shop(saga)
    saga_id = await begun(shop, saga)
    for _ in range(5):
        await shop.passes(60)
    assert (await shop.status(saga_id), log) == (Status.COMPLETED, ["created"])
    assert await shop.progress(saga_id, "create") == (StepStatus.DONE, 1)


async def test_a_compensation_waits_for_its_service_before_the_earlier_steps_are_compensated() -> None:
    saga, log, down = order_saga(), list[str](), [True] * 8
    local(saga, log)

    @saga.call(retry=TWICE)
    async def charge(run: Any) -> None:
        log.append("charge")

    @charge.compensate(retry=TWICE)
    async def refund(run: Any) -> None:
        if down:
            down.pop()
            raise StepUnavailable
        log.append("refund")

    @saga.call()
    async def ship(run: Any) -> None:
        raise StepRejected("no truck")

    shop = Shop(saga)
    saga_id = await begun(shop, saga)
    for _ in range(20):
        await shop.passes(60)
    assert (await shop.status(saga_id), log) == (
        Status.COMPENSATED,
        ["create", "charge", "refund", "compensate create"],
    )


async def test_a_call_that_says_unavailable_only_when_its_time_is_over_has_an_unknown_outcome() -> None:
    saga = order_saga()

    @saga.call(timeout_seconds=0.05, retry=TWICE)
    async def charge(run: Any) -> None:
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            raise StepUnavailable("cancelled on the way") from None

    shop = Shop(saga)
    saga_id = await begun(shop, saga)
    [entry] = (await shop.shown(saga_id)).journal
    assert (entry.attempts, entry.uncertainty, entry.unavailable_since) == (1, "outcome_unknown", None)
