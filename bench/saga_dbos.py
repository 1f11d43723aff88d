"""The same sagas as DBOS workflows, started and run in this process. It has no compensations; none are needed here."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager

import asyncpg
import sqlalchemy
from dbos import DBOS, DBOSConfig, SQLAlchemyDatasource

from bench.saga import BODY, BUSINESS, CONNECTIONS, STEPS, Marks, RunOne

ROW = sqlalchemy.text("INSERT INTO saga_rows (saga, step, body) VALUES (:saga, :step, :body)")


def _configured(url: str) -> None:
    config: DBOSConfig = {
        "name": "bench",
        "system_database_url": url,
        "sys_db_pool_size": CONNECTIONS,
        "log_level": "ERROR",
        "max_executor_threads": 128,
    }
    DBOS(config=config)


@asynccontextmanager
async def transactions(url: str, marks: Marks) -> AsyncIterator[RunOne]:
    """Steps in transactions that record them: the row is written exactly once. With threads, as that is faster here."""
    _configured(url)
    source = SQLAlchemyDatasource.create(url, engine_kwargs={"pool_size": CONNECTIONS})

    @source.transaction(isolation_level="READ COMMITTED")
    def write(saga: str, step: str) -> None:
        marks.pass_step(saga)
        source.sql_session().execute(ROW, {"saga": saga, "step": step, "body": BODY})

    @DBOS.workflow()
    def run_once(saga: str) -> None:
        for step in STEPS:
            write(saga, step)

    threads = ThreadPoolExecutor(128)
    loop = asyncio.get_running_loop()

    async def run_one(name: str) -> None:
        await loop.run_in_executor(threads, lambda: DBOS.start_workflow(run_once, name).get_result())

    DBOS.launch()
    try:
        yield run_one
    finally:
        threads.shutdown()
        DBOS.destroy(destroy_registry=True)


@asynccontextmanager
async def steps(url: str, marks: Marks) -> AsyncIterator[RunOne]:
    """Steps outside: the row is written at least once, and a step's result is recorded when it returns."""
    _configured(url)
    async with asyncpg.create_pool(url, max_size=CONNECTIONS) as pool:

        @DBOS.step()
        async def write(saga: str, step: str) -> None:
            marks.pass_step(saga)
            await pool.execute(BUSINESS, saga, step, BODY)

        @DBOS.workflow()
        async def run_once(saga: str) -> None:
            for step in STEPS:
                await write(saga, step)

        async def run_one(name: str) -> None:
            handle = await DBOS.start_workflow_async(run_once, name)
            await handle.get_result()

        DBOS.launch()
        try:
            yield run_one
        finally:
            DBOS.destroy(destroy_registry=True)
