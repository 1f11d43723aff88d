"""Wake-ups: `PRAGMA data_version` changes after a commit of another connection, in any process.

The query takes microseconds (a read of shared memory), so it runs on the event loop. The query never waits: after a
busy database, the next query follows soon.
"""

from __future__ import annotations

import asyncio
import sqlite3
from collections.abc import Callable
from contextlib import AbstractAsyncContextManager, suppress
from pathlib import Path

from outrider.stores.sqlite.database import open_existing

POLL_SECONDS = 0.02


class SqliteListener(AbstractAsyncContextManager[None]):
    """Calls `wake` on notifications of the same process and on commits of any process, while open."""

    def __init__(self, listeners: list[Callable[[], None]], wake: Callable[[], None], path: Path) -> None:
        self._listeners, self._wake, self._path = listeners, wake, path

    async def __aenter__(self) -> None:
        self._connection = await asyncio.to_thread(open_existing, self._path)
        self._connection.execute("PRAGMA busy_timeout = 0")
        self._seen = self._version()
        self._listeners.append(self._wake)
        self._task = asyncio.create_task(self._watch(), name="outrider-sqlite-wakeups")

    async def __aexit__(self, *error: object) -> None:
        self._listeners.remove(self._wake)
        self._task.cancel()
        with suppress(asyncio.CancelledError):
            await self._task
        self._connection.close()

    async def _watch(self) -> None:
        while True:
            await asyncio.sleep(POLL_SECONDS)
            version = self._version()
            if version is not None and version != self._seen:
                self._seen = version
                self._wake()

    def _version(self) -> int | None:
        try:
            return int(self._connection.execute("PRAGMA data_version").fetchone()[0])
        except sqlite3.DatabaseError:
            return None
