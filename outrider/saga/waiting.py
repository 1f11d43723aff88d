"""Waiting for something to happen, for a while."""

from __future__ import annotations

import asyncio

SECONDS_MIN = 0.001


async def wait_for(event: asyncio.Event, seconds: float) -> bool:
    """Wait for an event, or for time to pass; tell whether it has happened.

    >>> asyncio.run(wait_for(asyncio.Event(), 0.001))
    False
    """
    try:
        async with asyncio.timeout(max(seconds, SECONDS_MIN)):
            await event.wait()
    except TimeoutError:
        return False
    return True
