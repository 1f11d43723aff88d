"""A backlog to drain, and what its draining cost."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

import asyncpg

from outrider.telemetry.events import PassCompleted, TelemetryEvent

PAYLOAD = "json_build_object('order', i, 'pad', repeat('x', 480))"
KEYS = 5_000

OPEN_TRANSACTION = {
    "none": "",
    "read-only snapshot": "BEGIN ISOLATION LEVEL REPEATABLE READ READ ONLY; SELECT count(*) FROM pg_class",
    "write transaction": "BEGIN; SELECT pg_current_xact_id()",
}
"""What another session holds open since before the load."""


@dataclass(frozen=True, slots=True)
class Drain:
    """One measurement."""

    design: str
    open_transaction: str
    events: int
    seconds: float
    wal_bytes_per_event: float

    @property
    def events_per_second(self) -> float:
        """Return the rate."""
        return self.events / self.seconds


@asynccontextmanager
async def hold_transaction(url: str, what: str) -> AsyncIterator[None]:
    """Keep a transaction open around the block."""
    conn = await asyncpg.connect(url)
    try:
        if OPEN_TRANSACTION[what]:
            await conn.execute(OPEN_TRANSACTION[what])
        yield
    finally:
        await conn.close()


@dataclass(slots=True)
class Tally:
    """Counts what a relay has settled, so that watching it costs the database nothing."""

    goal: int
    settled: int = 0
    reached: asyncio.Event = field(default_factory=asyncio.Event)

    def emit(self, event: TelemetryEvent) -> None:
        """Count a pass."""
        if isinstance(event, PassCompleted):
            self.settled += event.settled
            if self.settled >= self.goal:
                self.reached.set()


async def measure(
    url: str, design: str, open_transaction: str, left: str, drain: Callable[[], Awaitable[Any]], *, seconds_max: float
) -> Drain:
    """Run a drain until it ends or the time is up, and count what it moved. `left` counts the backlog."""
    conn = await asyncpg.connect(url)
    before = await conn.fetchval(left)
    start_lsn = await conn.fetchval("SELECT pg_current_wal_lsn()")
    started = time.monotonic()
    task = asyncio.ensure_future(drain())
    await asyncio.wait([task], timeout=seconds_max)
    seconds = time.monotonic() - started
    task.cancel()
    settled = max(1, before - await conn.fetchval(left))
    wal = await conn.fetchval("SELECT pg_current_wal_lsn() - $1::pg_lsn", start_lsn)
    await conn.close()
    await asyncio.gather(task, return_exceptions=True)
    return Drain(design, open_transaction, settled, seconds, float(wal) / settled)
