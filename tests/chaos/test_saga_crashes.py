"""Saga workers that are killed at every point of their work: every saga ends well, and nothing happens twice."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest

from tests.support.crashing_saga_worker import POINTS
from tests.support.relay_process import at
from tests.support.saga_ledger import FINE, SOLD_OUT, TABLES, UNDELIVERABLE, balanced
from tests.support.saga_worker_process import Orders, Shop, all_ended, end
from tests.support.sizes import sized

pytestmark = [pytest.mark.postgres, pytest.mark.chaos, pytest.mark.timeout(300)]

KINDS = (FINE, FINE, UNDELIVERABLE, UNDELIVERABLE, SOLD_OUT)
PASSES_MAX = 2
"""How often every point is passed for certain, with these orders."""
REPEATED = "SELECT count(*) FROM bank_calls AS c WHERE c.what = $1"
EFFECTS = "SELECT count(*) FROM bank_keys AS k WHERE k.what = $1"


@pytest.mark.parametrize("half", [0, 1])
@pytest.mark.parametrize("seed", range(sized(5, 1)))
async def test_a_worker_killed_at_every_point_leaves_no_saga_half_done(
    conn: Any, postgres_url: str, tmp_path: Path, seed: int, half: int
) -> None:
    rng = random.Random(seed)
    await conn.execute(TABLES)
    shop, orders = Shop(postgres_url, at(tmp_path / "log.db"), tmp_path), Orders(rng)
    async with shop.services():
        # Each half has one of the two moments of every call, so that calls are repeated in both.
        for point in rng.sample(POINTS[half::2], len(POINTS[half::2])):
            await orders.place(conn, KINDS)
            await shop.crash(conn, point, rng.randint(1, PASSES_MAX))
        async with shop.working() as last:
            await all_ended(conn, len(orders.ids))
            last.terminate()
            assert await end(last) == 0
    await balanced(conn, orders.ids)
    for what in ("charge", "refund", "ship"):
        assert await conn.fetchval(REPEATED, what) > await conn.fetchval(EFFECTS, what), f"no {what} was repeated"
