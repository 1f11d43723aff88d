"""Orders from start to end, over a store, a relay, a broker, inboxes and barriers; with trouble in between."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from outrider import app
from outrider.saga.model import Phase, Status, StepStatus
from outrider.telemetry.events import SagaStepFailed
from tests.support.saga_services import Town, stock_inbox, town
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
async def place(store_url: str, broker_url: str) -> AsyncIterator[Town]:
    async with town(store_url, broker_url) as built:
        yield built


async def test_orders_complete_and_everything_happens_once(place: Town) -> None:
    names = [f"A-{number:02}" for number in range(12)]
    async with place.consuming(stock_inbox()), place.working(), place.working():
        ids = [await place.start(name) for name in names]
        assert await place.start(names[0]) == ids[0]
        assert await place.ended(12) == {"completed": 12}
    assert await place.rows(ORDERS) == [(name,) for name in names]
    assert await place.rows(MOVES) == [(name, "taken") for name in names]
    assert sorted(place.bank.charges) == sorted(f"{saga_id}:charge" for saga_id in ids)
    assert set(place.bank.calls.values()) == {1}
    state = (await place.shown(ids[3])).instance.state
    assert (b"R-A-03" in state, b"paid 12" in state) == (True, True)


async def test_what_the_stock_refuses_is_compensated_and_what_the_bank_declines_is_put_back(place: Town) -> None:
    place.bank.declines = {"B-1", "B-2"}
    async with place.consuming(stock_inbox(sold_out={"A-1", "A-2"})), place.working():
        for name in ("A-1", "A-2", "B-1", "B-2", "C-1"):
            await place.start(name)
        assert await place.ended(5) == {"compensated": 4, "completed": 1}
    assert await place.rows(ORDERS) == [("C-1",)]
    compensated = [(name, what) for name in ("B-1", "B-2") for what in ("taken", "put back")]
    assert await place.rows(MOVES) == [*compensated, ("C-1", "taken")]
    assert len(place.bank.charges) == 1


async def test_a_request_without_an_answer_is_asked_again_and_has_one_effect(store_url: str, broker_url: str) -> None:
    async with town(store_url, broker_url, reserve_seconds=0.1) as place:
        async with place.working():
            saga_id = await place.start("A-1")
            await place.bell.heard(SagaStepFailed, 2)
            async with place.consuming(stock_inbox()):
                assert await place.ended(1) == {"completed": 1}
        assert await place.rows(MOVES) == [("A-1", "taken")]
        [reserve] = [entry for entry in (await place.shown(saga_id)).journal if entry.step == "reserve"]
        assert reserve.status is StepStatus.DONE
        assert reserve.attempts > 1


async def test_another_worker_goes_on_where_one_was_lost(place: Town) -> None:
    place.bank.silent.set()
    async with place.consuming(stock_inbox()):
        async with place.working(lost=True):
            saga_id = await place.start("A-1")
            await until(place.bank.called)
        assert (await place.shown(saga_id)).instance.owner is not None
        async with place.working():
            assert await place.ended(1) == {"completed": 1}
    assert place.bank.calls == {f"{saga_id}:charge": 2}
    assert await place.rows(MOVES) == [("A-1", "taken")]
    [charge] = [entry for entry in (await place.shown(saga_id)).journal if entry.step == "charge"]
    assert (charge.phase, charge.status, charge.attempts) == (Phase.ACTION, StepStatus.DONE, 2)


async def test_a_worker_that_stops_gives_back_what_it_has(place: Town) -> None:
    place.bank.silent.set()
    async with place.consuming(stock_inbox()):
        async with place.working():
            saga_id = await place.start("A-1")
            await until(place.bank.called)
        instance = (await place.shown(saga_id)).instance
        assert (instance.owner, instance.status) == (None, Status.RUNNING)
        async with place.working():
            assert await place.ended(1) == {"completed": 1}
    assert place.bank.calls == {f"{saga_id}:charge": 2}
