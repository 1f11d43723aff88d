"""Wake-ups by NOTIFY, sent after commit from a separate connection, never inside the business transaction."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress

import asyncpg

from outrider.errors import OutriderError
from outrider.stores.postgres.database import PostgresDatabase, translated

DEBOUNCE_SECONDS = 0.005
"""The minimum time between two notifications of one process; the first after a pause is sent at once."""


class NotificationListener:
    """Sends notifications in batches and listens for notifications of other processes. Behind a pooler, relays poll."""

    def __init__(self, database: PostgresDatabase, channel: str) -> None:
        self._database, self._channel = database, channel
        self._sending: asyncio.Task[None] | None = None
        self._next_at = float("-inf")

    async def send(self) -> None:
        """Notify now, or a moment after the last notification. Calls until then share one notification."""
        if self._sending is None or self._sending.done():
            self._sending = asyncio.create_task(self._send())

    async def _send(self) -> None:
        now = asyncio.get_running_loop().time
        await asyncio.sleep(max(0.0, self._next_at - now()))
        self._sending = None
        self._next_at = now() + DEBOUNCE_SECONDS
        await self._database.execute("SELECT pg_notify($1, '')", self._channel)

    async def close(self) -> None:
        """Wait for a pending notification."""
        if self._sending is not None:
            await asyncio.gather(self._sending, return_exceptions=True)

    @asynccontextmanager
    async def listening(self, wake: Callable[[], None]) -> AsyncIterator[None]:
        """Call `wake` on every notification. A lost listener is replaced; polling covers the gap."""
        if self._database.pooled:
            yield
            return
        task = asyncio.create_task(self._listen(wake))
        try:
            yield
        finally:
            task.cancel()
            with suppress(asyncio.CancelledError):
                await task

    async def _listen(self, wake: Callable[[], None]) -> None:
        while True:
            lost = asyncio.Event()
            with suppress(OSError, asyncpg.PostgresError, asyncpg.InterfaceError, OutriderError):
                await self._listen_once(wake, lost)
            await asyncio.sleep(1)

    async def _listen_once(self, wake: Callable[[], None], lost: asyncio.Event) -> None:
        conn = await asyncpg.connect(self._database.url, timeout=10)
        try:
            conn.add_termination_listener(lambda _: lost.set())
            with translated(self._database.where):
                await conn.add_listener(self._channel, lambda *_: wake())
            await lost.wait()
        finally:
            conn.terminate()
