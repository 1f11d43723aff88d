"""A backlog to drain, and what its draining cost."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

import asyncpg

PAYLOAD = "json_build_object('order', i, 'pad', repeat('x', 480))"
KEYS = 5_000
POLL_SECONDS = 0.05

HELD = {
    "none": "",
    "read-only snapshot": "BEGIN ISOLATION LEVEL REPEATABLE READ READ ONLY; SELECT count(*) FROM pg_class",
    "write transaction": "BEGIN; SELECT pg_current_xact_id()",
}
"""What another session holds open since before the load."""


@dataclass(frozen=True, slots=True)
class Drain:
    """One measurement."""

    design: str
    held: str
    events: int
    seconds: float
    wal_bytes_per_event: float

    @property
    def events_per_second(self) -> float:
        """Return the rate."""
        return self.events / self.seconds


@asynccontextmanager
async def holding(url: str, what: str) -> AsyncIterator[None]:
    """Keep a transaction open around the block."""
    conn = await asyncpg.connect(url)
    try:
        if HELD[what]:
            await conn.execute(HELD[what])
        yield
    finally:
        await conn.close()


async def measure(
    url: str,
    design: str,
    held: str,
    left: str,
    drain: Callable[[], Awaitable[Any]],
    *,
    seconds_max: float,
    warm: bool = False,
) -> Drain:
    """Run a drain until nothing is left or the time is up, and count what it moved. `left` counts the backlog.

    With `warm` the measurement begins at the first movement, so that starting processes is not counted.
    """
    conn = await asyncpg.connect(url)
    before = full = await conn.fetchval(left)
    while warm and before == full:
        before = await conn.fetchval(left)
    start_lsn = await conn.fetchval("SELECT pg_current_wal_lsn()")
    begun = time.monotonic()
    task = asyncio.ensure_future(drain())
    while not task.done() and time.monotonic() - begun < seconds_max and await conn.fetchval(f"SELECT ({left}) > 0"):
        await asyncio.wait([task], timeout=POLL_SECONDS)
    seconds = time.monotonic() - begun
    after = await conn.fetchval(left)
    wal = await conn.fetchval("SELECT pg_current_wal_lsn() - $1::pg_lsn", start_lsn)
    await conn.close()
    if not task.done():
        task.cancel()
    await asyncio.gather(task, return_exceptions=True)
    moved = max(1, before - after)
    return Drain(design, held, moved, seconds, float(wal) / moved)
