"""Many sagas at a time on two worker processes, as people run them, while steps fail and answers do not come."""

from __future__ import annotations

import asyncio
import os
import random
import sys
from collections import Counter
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from functools import cache
from pathlib import Path
from typing import Any

import asyncpg
import pytest

from outrider.event import Message
from outrider.saga import SagaRegistry
from tests.support.relay_process import at
from tests.support.saga_ledger import FINE, SOLD_OUT, TABLES, UNDELIVERABLE, balanced, order_saga
from tests.support.saga_worker_process import Orders, Shop, all_ended
from tests.support.sizes import FULL, sized

pytestmark = [pytest.mark.postgres, pytest.mark.chaos, pytest.mark.timeout(300)]

ROOT = Path(__file__).parents[2]
DATABASE = "SAGA_TEST_DATABASE"
"""Where workers find the database that the outside services keep."""
KINDS = {FINE: sized(800, 160), UNDELIVERABLE: sized(100, 20), SOLD_OUT: sized(100, 20)}
FAILURES, TIMEOUTS = 0.10, 0.02 if FULL else 0.10
FAILED_SHARE_MIN, LATE_SHARE_MIN = 0.8 if FULL else 0.5, 0.25
"""The share of faults that must be seen. Faults are drawn at random, and few draws spread further."""
BROKEN = "out of order"
LOCALS = ("create effected", "cancel effected", "confirm effected")
CALL_SECONDS, REPLY_SECONDS = 3.0, 15.0 if FULL else 5.0
OPTIONS = ("--processes", "2", "--concurrency", "500", "--poll-seconds-max", "0.2", "--log-level", "error")
ATTEMPTS = "SELECT step, sum(attempts) FROM outrider.saga_step WHERE phase = 'action' GROUP BY step"
ERRORS = "SELECT detail FROM outrider.saga_audit_log WHERE what LIKE '%retrying'"


def luck(*about: object) -> float:
    """Return a number from 0 to 1 that is always the same for the same thing."""
    return random.Random(" ".join(map(str, about))).random()


async def stumble(name: str, run: Any) -> None:
    """Let a share of the attempts fail, and of the calls another never come back.

    A local function has one moment to do so. A call has two, one before its effect and one after it.
    """
    drawn = luck(name, run.key, run.attempt)
    if name in LOCALS:
        drawn, patience = drawn / FAILURES, 1.0
    else:
        drawn, patience = 2 * drawn / FAILURES, 1.0 + TIMEOUTS / FAILURES
    if drawn < 1:
        raise RuntimeError(BROKEN)
    if drawn < patience:
        await asyncio.Event().wait()


@cache
def _pool() -> asyncio.Future[Any]:
    return asyncio.ensure_future(_open_pool())


async def _open_pool() -> Any:
    return await asyncpg.create_pool(os.environ[DATABASE], min_size=1, max_size=6)


async def _connect() -> Any:
    return await _pool()


sagas = SagaRegistry(order_saga(_connect, stumble, call_seconds=CALL_SECONDS, reply_seconds=REPLY_SECONDS))
"""The sagas of the worker processes."""


def losing() -> Callable[[Message], bool]:
    """Lose a share of the messages about each step, commands or what answers them, the first of their kind only."""
    seen: set[str] = set()

    def decide(message: Message) -> bool:
        about = f"{message.headers['event_type']} {message.headers['saga_key']}"
        first = about not in seen
        seen.add(about)
        return first and luck(about) < TIMEOUTS / 2

    return decide


@asynccontextmanager
async def workers(shop: Shop) -> AsyncIterator[asyncio.subprocess.Process]:
    """Run `outrider saga run` around the block."""
    target = f"{__name__}:sagas"
    command = [sys.executable, "-m", "outrider", "saga", "run", target, "--store", shop.store, "--broker", shop.broker]
    environment = {**os.environ, DATABASE: shop.store, "PYTHONPATH": str(ROOT)}
    with (shop.folder / "workers.log").open("ab") as log_file:
        process = await asyncio.create_subprocess_exec(
            *command, *OPTIONS, stdout=log_file, stderr=log_file, cwd=ROOT, env=environment
        )
    try:
        yield process
    except BaseException:
        print((shop.folder / "workers.log").read_text()[-20_000:])
        raise
    finally:
        if process.returncode is None:
            process.terminate()
            await process.wait()


async def test_many_sagas_end_well_while_steps_fail_and_answers_are_lost(
    conn: Any, postgres_url: str, tmp_path: Path
) -> None:
    await conn.execute(TABLES)
    shop, orders = Shop(postgres_url, at(tmp_path / "log.db"), tmp_path), Orders(random.Random(7))
    await orders.place(conn, Counter(KINDS).elements())
    async with shop.services(losing()), workers(shop) as running:
        await all_ended(conn, len(orders.ids), seconds_max=240)
        running.terminate()
        assert await running.wait() == 0
    await balanced(conn, orders.ids)
    attempts = dict(await conn.fetch(ATTEMPTS))
    errors = "\n".join(row["detail"] for row in await conn.fetch(ERRORS))
    calls = attempts["charge"] + attempts["ship"]
    broken = errors.count(f"RuntimeError: {BROKEN}")
    assert broken > FAILED_SHARE_MIN * FAILURES * (calls + attempts["create"] + attempts["confirm"])
    assert errors.count(f"no result within {CALL_SECONDS} s") > LATE_SHARE_MIN * TIMEOUTS * calls
    assert errors.count(f"no answer within {REPLY_SECONDS} s") > LATE_SHARE_MIN * TIMEOUTS * attempts["reserve"]
