"""Orders from start to end, over a store, a relay, a broker, inboxes and participants; with failures in between."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from outrider import app
from outrider.saga.model import Phase, Status, StepStatus
from outrider.telemetry.events import SagaStepFailed
from tests.support.saga_services import SagaServices, run_services, stock_inbox
from tests.support.saga_shop import until

pytestmark = [pytest.mark.timeout(60)]
MOVES = "SELECT id, what FROM moves ORDER BY id, what DESC"
ORDERS = "SELECT id FROM orders ORDER BY id"


@pytest.fixture(params=["sqlite", pytest.param("postgresql", marks=pytest.mark.postgres)])
def store_url(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    if request.param == "sqlite":
        url = f"sqlite:///{tmp_path}/shop.db"
        asyncio.run(_migrate(url))
        return url
    found: str = request.getfixturevalue("postgres_url")
    return found


async def _migrate(url: str) -> None:
    await app.open_schema(url).migrate()


@pytest.fixture
def broker_url(tmp_path: Path) -> str:
    return f"embedded:///{tmp_path}/log.db"


@pytest.fixture
async def services(store_url: str, broker_url: str) -> AsyncIterator[SagaServices]:
    async with run_services(store_url, broker_url) as built:
        yield built


async def test_orders_complete_and_everything_happens_once(services: SagaServices) -> None:
    names = [f"A-{number:02}" for number in range(12)]
    async with services.consuming(stock_inbox()), services.working(), services.working():
        ids = [await services.start(name) for name in names]
        assert await services.start(names[0]) == ids[0]
        assert await services.ended(12) == {"completed": 12}
    assert await services.rows(ORDERS) == [(name,) for name in names]
    assert await services.rows(MOVES) == [(name, "taken") for name in names]
    assert sorted(services.bank.charges) == sorted(f"{saga_id}:charge" for saga_id in ids)
    assert set(services.bank.calls.values()) == {1}
    state = (await services.shown(ids[3])).instance.state
    assert (b"R-A-03" in state, b"paid 12" in state) == (True, True)


async def test_an_order_that_the_stock_or_the_bank_rejects_is_compensated(
    services: SagaServices,
) -> None:
    services.bank.declines = {"B-1", "B-2"}
    async with services.consuming(stock_inbox(sold_out={"A-1", "A-2"})), services.working():
        for name in ("A-1", "A-2", "B-1", "B-2", "C-1"):
            await services.start(name)
        assert await services.ended(5) == {"compensated": 4, "completed": 1}
    assert await services.rows(ORDERS) == [("C-1",)]
    compensated = [(name, what) for name in ("B-1", "B-2") for what in ("taken", "put back")]
    assert await services.rows(MOVES) == [*compensated, ("C-1", "taken")]
    assert len(services.bank.charges) == 1


async def test_a_request_without_an_answer_is_asked_again_and_has_one_effect(store_url: str, broker_url: str) -> None:
    async with run_services(store_url, broker_url, reserve_seconds=0.1) as services:
        async with services.working():
            saga_id = await services.start("A-1")
            await services.observer.until_emitted(SagaStepFailed, 2)
            async with services.consuming(stock_inbox()):
                assert await services.ended(1) == {"completed": 1}
        assert await services.rows(MOVES) == [("A-1", "taken")]
        [reserve] = [entry for entry in (await services.shown(saga_id)).journal if entry.step == "reserve"]
        assert reserve.status is StepStatus.DONE
        assert reserve.attempts > 1


async def test_another_worker_goes_on_where_one_was_lost(services: SagaServices) -> None:
    services.bank.silent.set()
    async with services.consuming(stock_inbox()):
        async with services.working(lost=True):
            saga_id = await services.start("A-1")
            await until(services.bank.called)
        assert (await services.shown(saga_id)).instance.owner is not None
        async with services.working():
            assert await services.ended(1) == {"completed": 1}
    assert services.bank.calls == {f"{saga_id}:charge": 2}
    assert await services.rows(MOVES) == [("A-1", "taken")]
    [charge] = [entry for entry in (await services.shown(saga_id)).journal if entry.step == "charge"]
    # A lost worker costs no attempt.
    assert (charge.phase, charge.status, charge.attempts) == (Phase.ACTION, StepStatus.DONE, 1)


async def test_a_worker_that_stops_gives_back_what_it_has(services: SagaServices) -> None:
    services.bank.silent.set()
    async with services.consuming(stock_inbox()):
        async with services.working():
            saga_id = await services.start("A-1")
            await until(services.bank.called)
        instance = (await services.shown(saga_id)).instance
        assert (instance.owner, instance.status) == (None, Status.RUNNING)
        async with services.working():
            assert await services.ended(1) == {"completed": 1}
    assert services.bank.calls == {f"{saga_id}:charge": 2}
