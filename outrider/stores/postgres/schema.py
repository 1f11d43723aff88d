"""Installing and upgrading the stores in PostgreSQL."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any, TypeVar

import asyncpg

from outrider.stores import migrations
from outrider.stores.migrations import MigrationProgress, MigrationStep, Statements, check_lanes
from outrider.stores.postgres.database import PostgresDatabase, translated
from outrider.stores.postgres.outbox_admin import PostgresMaintenance
from outrider.stores.postgres.statements import installer
from outrider.stores.queries import identifier
from outrider.stores.statements import run_statements_async

T = TypeVar("T")


class PostgresSchema:
    """Migrations of one schema. The number of lanes is fixed by the first migration.

    >>> PostgresSchema("postgresql://localhost/shop", schema="shop").schema
    'shop'
    """

    def __init__(self, url: str, *, schema: str = "outrider", lanes: int | None = None, pooled: bool = False) -> None:
        check_lanes(lanes)
        self.url, self.schema, self._lanes, self._pooled = url, identifier(schema), lanes, pooled
        self._where = PostgresDatabase(url).where
        self._installer = installer(schema)

    async def status(self) -> list[MigrationProgress]:
        """Return the progress of all migrations."""
        async with self._connected() as conn:
            return await _perform(conn, self._installer.status())

    async def plan(self) -> list[MigrationStep]:
        """Return the pending steps, which `migrate` would run."""
        async with self._connected() as conn:
            known = self._installer.steps(await _perform(conn, self._installer.lanes(self._lanes)))
            return migrations.pending(known, await _perform(conn, self._installer.applied()))

    async def migrate(self) -> list[MigrationStep]:
        """Run the pending steps and create the archive partitions. A step and its record share one transaction."""
        async with self._connected() as conn:
            await _perform(conn, self._installer.prepare())
            known = self._installer.steps(await _perform(conn, self._installer.lanes(self._lanes, strict=True)))
            done = [step for step in known if await _perform(conn, self._installer.apply(step, self._lanes))]
        await self._prepare()
        return done

    async def _prepare(self) -> None:
        database = PostgresDatabase(self.url, connections_max=1, pooled=self._pooled)
        await database.open()
        try:
            await PostgresMaintenance(database, self.schema).prepare()
        finally:
            await database.close()

    @asynccontextmanager
    async def _connected(self) -> AsyncIterator[Any]:
        with translated(self._where):
            # Unnamed statements in transactions only: these work through a pooler that shares sessions.
            conn = await asyncpg.connect(self.url, timeout=10, statement_cache_size=0)
            try:
                yield conn
            finally:
                await conn.close()


async def _perform(conn: Any, statements: Statements[T]) -> T:
    async with conn.transaction():
        return await run_statements_async(statements, conn.fetch)
