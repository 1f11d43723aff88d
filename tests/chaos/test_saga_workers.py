"""Workers are lost at any moment, and a bank is moody: in the end every order is whole, or compensated."""

from __future__ import annotations

import asyncio
import random
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from outrider import app
from outrider.saga.model import SagaCriteria
from outrider.telemetry.events import SagaAdvanced
from tests.support.saga_services import Bank, SagaServices, run_services, stock_inbox

pytestmark = [pytest.mark.chaos, pytest.mark.timeout(120)]

ORDERS = 24
DECLINED = {f"A-{number:02}" for number in range(0, ORDERS, 6)}
SOLD_OUT = {f"A-{number:02}" for number in range(1, ORDERS, 6)}
GOING_ON = ("started", "running", "compensating")
UNLUCKY = "A-02"
"""The answer to the first call for this one is lost in any case."""
LOSSES = 8
MOVES_MAX = 25
LOSS_SECONDS_MAX = 1.0
POLL_SECONDS = 0.05


class MoodyBank(Bank):
    """A bank that breaks before or after it has charged, or says nothing at all."""

    def __init__(self, rng: random.Random) -> None:
        super().__init__()
        self.rng, self.declines = rng, DECLINED

    async def charge(self, order_id: str, amount: int, key: str) -> str:
        """Charge once for a key, and let the caller know of it more or less often."""
        mood = self.rng.random()
        await asyncio.sleep(mood / 50)
        if mood < 0.1:
            raise ConnectionError("closed")
        paid = await super().charge(order_id, amount, key)
        if mood < 0.2 or (order_id == UNLUCKY and self.calls[key] == 1):
            raise ConnectionError("the answer was lost")
        if mood < 0.3:
            await asyncio.Event().wait()
        return paid


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


async def test_workers_that_are_lost_leave_every_order_whole_or_compensated(store_url: str, tmp_path: Path) -> None:
    rng = random.Random(7)
    bank = MoodyBank(rng)
    async with run_services(store_url, f"embedded:///{tmp_path}/log.db", bank, charge_seconds=0.3) as services:
        async with services.consuming(stock_inbox(sold_out=SOLD_OUT)):
            ids = [await services.start(f"A-{number:02}") for number in range(ORDERS)]
            for _ in range(LOSSES):
                async with services.working(), services.working(lost=True):
                    await _some_moves(services, rng)
            async with services.working(), services.working():
                await _all_ended(services)
        await _whole_or_compensated(services, [str(saga_id) for saga_id in ids])


async def _some_moves(services: SagaServices, rng: random.Random) -> None:
    """Let workers do something; less, when there is not so much left to do."""
    moves = len(services.observer.of(SagaAdvanced)) + rng.randrange(1, MOVES_MAX)
    with suppress(TimeoutError):
        async with asyncio.timeout(LOSS_SECONDS_MAX):
            await services.observer.until_emitted(SagaAdvanced, moves)


async def _all_ended(services: SagaServices) -> None:
    """Wait until no saga goes on. The store is asked, because a lost worker does not report its last save."""
    async with asyncio.timeout(60):
        while any([await _found(services, status) for status in GOING_ON]):  # noqa: ASYNC110 - no signal, see above
            await asyncio.sleep(POLL_SECONDS)


async def _found(services: SagaServices, status: str) -> list[Any]:
    return await services.sagas_store.admin.find(SagaCriteria(status=status, limit=ORDERS))


async def _whole_or_compensated(services: SagaServices, ids: list[str]) -> None:
    compensated = DECLINED | SOLD_OUT
    completed = {instance.correlation_id for instance in await _found(services, "completed")}
    assert {instance.correlation_id for instance in await _found(services, "compensated")} == compensated
    assert len(completed) == ORDERS - len(compensated)
    assert {name for (name,) in await services.rows("SELECT id FROM orders")} == completed
    moves = sorted(await services.rows("SELECT id, what FROM moves"))
    back = [(name, what) for name in DECLINED for what in ("put back", "taken")]
    assert moves == sorted([*((name, "taken") for name in completed), *back])
    keys = {f"{saga_id}:charge" for number, saga_id in enumerate(ids) if f"A-{number:02}" in completed}
    assert services.bank.charges.keys() == keys
    assert max(services.bank.calls.values()) > 1
