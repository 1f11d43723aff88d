"""Our side of the sagas: a worker in this process, which claims what clients start in transactions of their own."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any
from uuid import UUID

import asyncpg

import outrider
from bench.saga import BODY, BUSINESS, CONNECTIONS, STEPS, Marks, RunOne
from outrider.saga import Saga, SagaRegistry, SagaWorker
from outrider.stores.postgres import PostgresSagas
from outrider.telemetry.events import SagaEnded, TelemetryEvent


@dataclass
class State:
    """What a saga keeps."""

    name: str


@dataclass(slots=True)
class Ends:
    """Tells whoever waits that a saga has ended."""

    waiting: dict[UUID, asyncio.Future[str]] = field(default_factory=dict)

    def emit(self, event: TelemetryEvent) -> None:
        """Wake its client."""
        if isinstance(event, SagaEnded):
            self.waiting.pop(event.saga_id).set_result(event.status)


@asynccontextmanager
async def local_steps(url: str, marks: Marks) -> AsyncIterator[RunOne]:
    """Steps in the transaction that saves the saga: the row is written exactly once."""
    saga = Saga("bench-local", State)

    def writing(step: str) -> Any:
        async def write(context: Any, tx: Any) -> None:
            marks.pass_step(context.state.name)
            await tx.execute(BUSINESS, context.state.name, step, BODY)

        return write

    for step in STEPS:
        saga.local(name=step)(writing(step))
    async with asyncpg.create_pool(url, max_size=CONNECTIONS) as pool, _running(url, pool, saga) as run_one:
        yield run_one


@asynccontextmanager
async def calls(url: str, marks: Marks) -> AsyncIterator[RunOne]:
    """Steps outside: the row is written at least once, under one idempotency key, and what was intended is known."""
    saga = Saga("bench-call", State)
    async with asyncpg.create_pool(url, max_size=CONNECTIONS) as pool:

        def writing(step: str) -> Any:
            async def write(context: Any) -> None:
                marks.pass_step(context.state.name)
                await pool.execute(BUSINESS, context.state.name, step, BODY)

            return write

        for step in STEPS:
            saga.call(name=step)(writing(step))
        async with _running(url, pool, saga) as run_one:
            yield run_one


@asynccontextmanager
async def _running(url: str, pool: Any, saga: Saga[State]) -> AsyncIterator[RunOne]:
    """Run a worker around the block."""
    store, ends = await PostgresSagas.open(url, connections_max=CONNECTIONS), Ends()
    worker = SagaWorker(store, SagaRegistry(saga), outrider.stage, observer=ends)

    async def run_one(name: str) -> None:
        ended: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        async with pool.acquire() as conn, conn.transaction():
            ends.waiting[await saga.start(conn, State(name), correlation_id=name)] = ended
        worker.wake()
        assert await ended == "completed"

    running = asyncio.create_task(worker.run())
    try:
        yield run_one
    finally:
        worker.stop()
        await running
        await store.close()
