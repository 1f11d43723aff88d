"""A consumer of the log: writes down what arrives, then moves its place forward."""

from __future__ import annotations

import asyncio
import sqlite3
from collections.abc import Sequence
from contextlib import closing
from pathlib import Path

from outrider.brokers.embedded import Delivery, EmbeddedBroker
from outrider.demo.places import Places

NAME = "demo"
READ_MAX = 500
IDLE_SECONDS = 0.05

_TABLE = 'CREATE TABLE IF NOT EXISTS received ("offset" INTEGER PRIMARY KEY, event_id TEXT NOT NULL)'
_INSERT = 'INSERT INTO received ("offset", event_id) VALUES (?, ?) ON CONFLICT DO NOTHING'


class Consumer:
    """Reads until it is asked to finish and there is nothing left. `received` counts what it has written down."""

    def __init__(self, places: Places) -> None:
        self._path = places.received
        self._log = EmbeddedBroker(places.log)
        self._finishing = asyncio.Event()
        self.received = 0

    def finish(self) -> None:
        """Ask for the end: everything is in the log by now."""
        self._finishing.set()

    async def run(self) -> None:
        """Take what comes. Whether to finish is asked before looking, so that the last look comes after the wish."""
        await self._log.start()
        try:
            while True:
                finishing = self._finishing.is_set()
                if not await self.take():
                    if finishing:
                        return
                    await asyncio.sleep(IDLE_SECONDS)
        finally:
            await self._log.close()

    async def take(self) -> int:
        """Take one batch; return how many."""
        batch = await self._log.read(NAME, None, READ_MAX)
        if batch:
            await asyncio.to_thread(_write, self._path, batch)
            # The place moves last: a crash in between delivers the batch again, and its offsets are known by then.
            await self._log.commit(NAME, batch[-1].offset)
            self.received += len(batch)
        return len(batch)


def _write(path: Path, batch: Sequence[Delivery]) -> None:
    with closing(sqlite3.connect(path)) as conn, conn:
        conn.execute(_TABLE)
        conn.executemany(_INSERT, [(delivery.offset, delivery.message.message_id) for delivery in batch])
