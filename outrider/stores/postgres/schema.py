"""Installing and upgrading the PostgreSQL store."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import asyncpg

from outrider.errors import BadSetting
from outrider.stores import migrations
from outrider.stores.migrations import Progress, Step
from outrider.stores.postgres.database import Database, translated
from outrider.stores.postgres.queries import constants
from outrider.stores.postgres.upkeep import PostgresUpkeep
from outrider.stores.queries import identifier

LANES_MAX = 1024
_PACKAGE = "outrider.stores.postgres"


class PostgresSchema:
    """Migrations of one schema. The number of lanes counts at the first migration only.

    >>> PostgresSchema("postgresql://localhost/shop", schema="shop").schema
    'shop'
    """

    def __init__(self, url: str, *, schema: str = "outrider", lanes: int = 32, pooled: bool = False) -> None:
        if not 1 <= lanes <= LANES_MAX:
            raise BadSetting(f"lanes = {lanes} cannot work; use 1 to {LANES_MAX}, 32 suits most")
        self.url, self.schema, self._lanes, self._pooled = url, identifier(schema), lanes, pooled
        self._where = Database(url).where

    async def status(self) -> list[Progress]:
        """Say how far each migration has come."""
        async with self._connected() as conn, conn.transaction():
            return migrations.progress(await self._steps(conn), await self._applied(conn))

    async def plan(self) -> list[Step]:
        """Return the steps that `migrate` would run."""
        async with self._connected() as conn, conn.transaction():
            return migrations.pending(await self._steps(conn), await self._applied(conn))

    async def migrate(self) -> list[Step]:
        """Run what is pending, each step with its record in one transaction, and make the archive's partitions."""
        async with self._connected() as conn:
            await self._ready(conn)
            async with conn.transaction():
                known = await self._steps(conn)
            done = [step for step in known if await self._apply(conn, step)]
        await self._prepare()
        return done

    async def _apply(self, conn: Any, step: Step) -> bool:
        async with conn.transaction():
            # One migrator at a time; whoever waited finds the step recorded and goes on.
            await conn.execute("SELECT pg_advisory_xact_lock(hashtextextended($1, 0))", f"outrider:{self.schema}")
            if not migrations.pending([step], await self._applied(conn)):
                return False
            # Who waited for the lock may have planned with another number of lanes than the one installed meanwhile.
            await conn.execute(await self._current_sql(conn, step))
            record = f"INSERT INTO {self.schema}.outrider_migration (version, step, checksum) VALUES ($1, $2, $3)"  # noqa: S608
            await conn.execute(record, step.version, step.name, step.checksum)
            return True

    async def _current_sql(self, conn: Any, step: Step) -> str:
        return next(s.sql for s in await self._steps(conn) if (s.version, s.name) == (step.version, step.name))

    async def _ready(self, conn: Any) -> None:
        async with conn.transaction():
            await conn.execute("SELECT pg_advisory_xact_lock(hashtextextended($1, 0))", f"outrider:{self.schema}")
            await conn.execute(f"CREATE SCHEMA IF NOT EXISTS {self.schema}")
            await conn.execute(
                f"CREATE TABLE IF NOT EXISTS {self.schema}.outrider_migration (version integer, step text, "
                "checksum text NOT NULL, applied_at timestamptz NOT NULL DEFAULT now(), PRIMARY KEY (version, step))"
            )

    async def _steps(self, conn: Any) -> list[Step]:
        return migrations.steps(_PACKAGE, constants(self.schema, await self._installed_lanes(conn)))

    async def _installed_lanes(self, conn: Any) -> int:
        """Return the number fixed at install; ours only if there is none yet."""
        if not await conn.fetchval("SELECT to_regclass($1) IS NOT NULL", f"{self.schema}.outbox_meta"):
            return self._lanes
        value = await conn.fetchval(f"SELECT value FROM {self.schema}.outbox_meta WHERE name = 'lanes'")  # noqa: S608
        return int(value) if value else self._lanes

    async def _applied(self, conn: Any) -> dict[tuple[int, str], str]:
        if not await conn.fetchval("SELECT to_regclass($1) IS NOT NULL", f"{self.schema}.outrider_migration"):
            return {}
        rows = await conn.fetch(f"SELECT version, step, checksum FROM {self.schema}.outrider_migration")  # noqa: S608
        return {(row["version"], row["step"]): row["checksum"] for row in rows}

    async def _prepare(self) -> None:
        database = Database(self.url, connections_max=1, pooled=self._pooled)
        await database.open()
        try:
            await PostgresUpkeep(database, self.schema).prepare()
        finally:
            await database.close()

    @asynccontextmanager
    async def _connected(self) -> AsyncIterator[Any]:
        with translated(self._where):
            # Statements without a name, in transactions only: so it works through a pooler that shares sessions.
            conn = await asyncpg.connect(self.url, timeout=10, statement_cache_size=0)
            try:
                yield conn
            finally:
                await conn.close()
