"""Upkeep of the SQLite store: everything old leaves in small transactions, so that writers never wait long."""

from __future__ import annotations

import sqlite3
from datetime import timedelta

from outrider.clock import Clock
from outrider.store import Pruned, Retention, Swept
from outrider.stores.sqlite.database import Database
from outrider.stores.sqlite.rows import load

SQL = load("upkeep.sql")

PRUNE_MAX = 1_000
"""Rows removed in one transaction."""


class SqliteUpkeep:
    """Keeps the tables bounded."""

    def __init__(self, database: Database, clock: Clock) -> None:
        self._database = database
        self._clock = clock

    async def sweep(self) -> list[Swept]:
        return await self._database.write(_sweep, self._clock.now().timestamp())

    async def take_duty(self, name: str, every_seconds: float) -> bool:
        now = self._clock.now()
        due = (now + timedelta(seconds=every_seconds)).timestamp()
        values = {"name": name, "now": now.timestamp(), "next": due}
        return await self._database.write(lambda conn: conn.execute(SQL["take_duty"], values).rowcount == 1)

    async def prepare(self) -> None:
        """Nothing to make ahead of time: the archive is one table."""

    async def prune(self, retention: Retention) -> Pruned:
        return Pruned(
            await self._prune("prune_archive", retention.archive_days),
            await self._prune("prune_dead_letters", retention.dead_letter_days),
            await self._prune("prune_operations", retention.operation_days),
        )

    async def _prune(self, query: str, days: float) -> int:
        before = (self._clock.now() - timedelta(days=days)).timestamp()
        values = {"before": before, "limit": PRUNE_MAX}
        total, removed = 0, PRUNE_MAX
        while removed == PRUNE_MAX:
            removed = await self._database.write(lambda conn: conn.execute(SQL[query], values).rowcount)
            total += removed
        return total


def _sweep(conn: sqlite3.Connection, now: float) -> list[Swept]:
    dead = [Swept(relay, lanes) for relay, lanes in conn.execute(SQL["dead_relays"], {"now": now})]
    conn.execute(SQL["sweep"], {"now": now})
    return dead
