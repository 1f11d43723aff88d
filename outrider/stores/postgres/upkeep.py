"""Upkeep in PostgreSQL: daily archive partitions made ahead and dropped when old, everything else in small batches."""

from __future__ import annotations

import re
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from datetime import UTC, date, datetime, time, timedelta
from typing import Any

import asyncpg

from outrider.errors import Transient
from outrider.store import Pruned, Retention, Swept
from outrider.stores.postgres import queries
from outrider.stores.postgres.database import Database
from outrider.stores.postgres.install import DAYS_AHEAD

_DAILY = re.compile(r"outbox_archive_\d{8}")
BATCH_MAX = 1000
LOCK_TIMEOUT_MS = 200


class PostgresUpkeep:
    """Keeps the tables bounded."""

    def __init__(self, database: Database, schema: str) -> None:
        self._database, self._schema = database, schema
        self._sql = queries.load(schema)

    async def sweep(self) -> list[Swept]:
        return [Swept(row["relay_id"], row["lanes"]) for row in await self._database.fetch(self._sql["sweep"])]

    async def take_duty(self, name: str, every_seconds: float) -> bool:
        return bool(await self._database.fetch(self._sql["take_duty"], name, every_seconds))

    async def prepare(self) -> None:
        """Make the partitions of today and the coming days."""
        today, existing = await self._calendar()
        for day in (today + timedelta(days=ahead) for ahead in range(DAYS_AHEAD + 1)):
            if day not in existing:
                await self._make(day)

    async def prune(self, retention: Retention) -> Pruned:
        """Drop old partitions; delete other old rows until a batch comes back short; mend holds without a reason."""
        await self._database.execute(self._sql["release_holds"])
        await self._database.execute(self._sql["adopt_orphans"])
        dropped = await self._drop_older_than(retention.archive_days)
        netted = await self._in_batches("prune_net", retention.archive_days)
        dead = await self._in_batches("prune_dead_letters", retention.dead_letter_days)
        operations = await self._in_batches("prune_operations", retention.operation_days)
        return Pruned(dropped + netted, dead, operations)

    async def _calendar(self) -> tuple[date, dict[date, str]]:
        [[today]] = await self._database.fetch(self._sql["today"])
        names = [row["relname"] for row in await self._database.fetch(self._sql["partitions"])]
        days = {_day(name): name for name in names if _DAILY.fullmatch(name)}
        return today, days

    async def _make(self, day: date) -> None:
        start, end = _midnight(day), _midnight(day + timedelta(days=1))
        [[netted]] = await self._database.fetch(self._sql["netted"], start, end)
        if netted:
            return
        async with self._alone() as conn:
            await conn.execute(
                f"CREATE TABLE IF NOT EXISTS {self._schema}.outbox_archive_{day:%Y%m%d} "
                f"PARTITION OF {self._schema}.outbox_archive FOR VALUES FROM ('{start}') TO ('{end}')"
            )

    async def _drop_older_than(self, days: float) -> int:
        today, existing = await self._calendar()
        # The whole day must be older than the retention, not just its first hour.
        old = [name for day, name in existing.items() if day + timedelta(days=1) <= today - timedelta(days=days)]
        return sum([await self._drop(name) for name in old])

    async def _drop(self, name: str) -> int:
        rows = 0
        async with self._alone() as conn:
            # Another relay may have been faster.
            if await conn.fetchval("SELECT to_regclass($1) IS NOT NULL", f"{self._schema}.{name}"):
                rows = await conn.fetchval(f"SELECT count(*) FROM {self._schema}.{name}")  # noqa: S608
                await conn.execute(f"DROP TABLE {self._schema}.{name}")
        return rows

    @asynccontextmanager
    async def _alone(self) -> AsyncIterator[Any]:
        """Change the archive only if its locks are to be had at once, else next time: no relay must queue behind us."""
        try:
            async with self._database.transaction() as conn:
                await conn.execute(f"SET LOCAL lock_timeout = {LOCK_TIMEOUT_MS}")
                await conn.execute("SELECT pg_advisory_xact_lock(hashtextextended($1, 1))", f"outrider:{self._schema}")
                yield conn
        except Transient as error:
            if not isinstance(error.__cause__, asyncpg.LockNotAvailableError):
                raise

    async def _in_batches(self, verb: str, days: float) -> int:
        total, count = 0, BATCH_MAX
        while count == BATCH_MAX:
            count = await self._database.execute(self._sql[verb], days, BATCH_MAX)
            total += count
        return total


def _day(partition: str) -> date:
    return datetime.strptime(partition[-8:], "%Y%m%d").replace(tzinfo=UTC).date()


def _midnight(day: date) -> datetime:
    return datetime.combine(day, time(), UTC)
