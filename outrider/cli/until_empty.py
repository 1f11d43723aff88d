"""Stopping a relay when there is nothing left to do."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from datetime import UTC, datetime

from outrider.errors import Transient
from outrider.lifecycle import FETCHABLE, WAITING
from outrider.outbox.relay import Relay
from outrider.store import Desk

LOOK_SECONDS = 0.2
LOOK_SHARE = 10
STREAMS_MAX = 10_000


@asynccontextmanager
async def stop_when_empty(desk: Desk, relay: Relay, *, enabled: bool) -> AsyncIterator[None]:
    """While the block runs, look for what is due, and stop the relay once there is nothing."""
    watching = asyncio.create_task(_watch(desk, relay)) if enabled else None
    try:
        yield
    finally:
        if watching is not None:
            watching.cancel()
            await asyncio.gather(watching, return_exceptions=True)


async def _watch(desk: Desk, relay: Relay) -> None:
    loop = asyncio.get_running_loop()
    while True:
        begun = loop.time()
        if not await _something_due(desk):
            relay.stop()
            return
        # Counting a large backlog takes a while; the relay should have most of the database.
        await asyncio.sleep(max(LOOK_SECONDS, LOOK_SHARE * (loop.time() - begun)))


async def _something_due(desk: Desk) -> bool:
    """Tell whether a relay has work now: not what waits for its time or for a person, nor what waits behind that."""
    try:
        counts = await desk.counts(sent=False)
        if any(counts.get(state) for state in FETCHABLE):
            return True
        if not any(counts.get(state) for state in WAITING):
            return False
        now = datetime.now(UTC)
        return any(held.due_at and held.due_at <= now for held in await desk.blocked_streams(STREAMS_MAX))
    except Transient:  # Not known, so go on; the relay itself reports trouble with the store.
        return True
