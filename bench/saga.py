"""Sagas of three steps, each of which writes one row: ours beside DBOS, on the same PostgreSQL and in the same run.

As many clients as there are workers start a saga, wait for its end, and start the next. Runners take turns, and the
median of the rounds counts, so that all of them see the same machine. A step takes from its function's beginning to
that of the next one, or to the end: what it does itself, and what is written so that it need not be done again.
"""

from __future__ import annotations

import asyncio
import os
import statistics
import time
from collections import defaultdict
from collections.abc import Awaitable, Callable, Sequence
from contextlib import AbstractAsyncContextManager
from itertools import pairwise
from typing import NamedTuple
from uuid import uuid4

import asyncpg

from bench.processes import Watch
from outrider.stores.postgres import PostgresSchema
from outrider.testing.servers import PostgresServer

STEPS = ("first", "second", "third")
BODY = "x" * 100
SETUP = "DROP TABLE IF EXISTS saga_rows; CREATE TABLE saga_rows (saga text, step text, body text)"
BUSINESS = "INSERT INTO saga_rows (saga, step, body) VALUES ($1, $2, $3)"
CONNECTIONS = 20
"""How many connections everybody may have, for each of the things they connect for."""
WARM = 0.2
"""The share of sagas that goes before, so that connections are open and statements prepared."""

RunOne = Callable[[str], Awaitable[None]]
"""Starts a saga under a name, and waits for its end."""


class Marks:
    """When each step of each saga began."""

    def __init__(self) -> None:
        self._started: dict[str, list[float]] = defaultdict(list)

    def pass_step(self, saga: str) -> None:
        """Note that a step begins, or that the last one has ended."""
        self._started[saga].append(time.perf_counter())

    def clear(self) -> None:
        """Forget what was noted."""
        self._started.clear()

    def milliseconds(self) -> list[float]:
        """Return how long each step took."""
        return [1000 * (after - before) for times in self._started.values() for before, after in pairwise(times)]


Runner = Callable[[str, Marks], AbstractAsyncContextManager[RunOne]]
"""Opens everything that running sagas takes, at a URL, and notes steps."""


class Rate(NamedTuple):
    """How fast one way was: the medians of its rounds."""

    what: str
    workers: int
    sagas: int
    sagas_per_second: float
    step_p50_milliseconds: float
    step_p99_milliseconds: float
    client_cpu_milliseconds: float
    database_cpu_milliseconds: float


def runners() -> dict[str, Runner]:
    """Return everybody who takes part."""
    from bench import saga_dbos, saga_ours

    return {
        "outrider, local steps": saga_ours.local_steps,
        "DBOS, transactions": saga_dbos.transactions,
        "outrider, calls": saga_ours.calls,
        "DBOS, steps": saga_dbos.steps,
    }


async def run(server: PostgresServer, sagas: int, workers: int, rounds: int) -> list[Rate]:
    """Measure every way with so many sagas a round."""
    await PostgresSchema(server.url).migrate()
    conn = await asyncpg.connect(server.url)
    await conn.execute(SETUP)
    chosen = runners()
    rates: dict[str, list[Rate]] = {what: [] for what in chosen}
    for _ in range(rounds):
        for what, runner in chosen.items():
            await conn.execute("TRUNCATE saga_rows")
            rates[what].append(await _measure(server, what, runner, sagas, workers))
            rows = await conn.fetchval("SELECT count(DISTINCT (saga, step)) FROM saga_rows")
            assert rows == len(STEPS) * (sagas + int(WARM * sagas)), f"{what} did not do every step"
    await conn.close()
    return [_median(each) for each in rates.values()]


async def _measure(server: PostgresServer, what: str, runner: Runner, sagas: int, workers: int) -> Rate:
    marks = Marks()
    async with runner(server.url, marks) as run_one:
        await _run_clients(run_one, marks, int(WARM * sagas), workers)
        marks.clear()
        with Watch({"client": os.getpid(), "database": server.pid}) as watch:
            await _run_clients(run_one, marks, sagas, workers)
    cuts = statistics.quantiles(marks.milliseconds(), n=100)
    spent = (1000 * watch.cpu_seconds[client] / sagas for client in ("client", "database"))
    return Rate(what, workers, sagas, sagas / watch.seconds, cuts[49], cuts[98], *spent)


async def _run_clients(run_one: RunOne, marks: Marks, sagas: int, workers: int) -> None:
    """Let so many clients run sagas, one after the other each, until all are done."""
    names = iter([f"bench-{uuid4()}" for _ in range(sagas)])

    async def client() -> None:
        for name in names:
            await run_one(name)
            marks.pass_step(name)

    await asyncio.gather(*(client() for _ in range(workers)))


def _median(rates: Sequence[Rate]) -> Rate:
    first = rates[0]
    figures = [statistics.median(column) for column in zip(*(rate[3:] for rate in rates), strict=True)]
    return Rate(first.what, first.workers, first.sagas, *figures)
