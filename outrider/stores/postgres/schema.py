"""Installing and upgrading the PostgreSQL store."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any, TypeVar

import asyncpg

from outrider.stores import migrations
from outrider.stores.migrations import Progress, Step
from outrider.stores.postgres.database import Database, translated
from outrider.stores.postgres.install import recipe
from outrider.stores.postgres.upkeep import PostgresUpkeep
from outrider.stores.queries import identifier
from outrider.stores.recipe import Script, check_lanes

T = TypeVar("T")


class PostgresSchema:
    """Migrations of one schema. The number of lanes counts at the first migration only.

    >>> PostgresSchema("postgresql://localhost/shop", schema="shop").schema
    'shop'
    """

    def __init__(self, url: str, *, schema: str = "outrider", lanes: int = 32, pooled: bool = False) -> None:
        check_lanes(lanes)
        self.url, self.schema, self._lanes, self._pooled = url, identifier(schema), lanes, pooled
        self._where = Database(url).where
        self._recipe = recipe(schema)

    async def status(self) -> list[Progress]:
        """Say how far each migration has come."""
        async with self._connected() as conn:
            return await _perform(conn, self._recipe.status())

    async def plan(self) -> list[Step]:
        """Return the steps that `migrate` would run."""
        async with self._connected() as conn:
            known = self._recipe.steps(await _perform(conn, self._recipe.lanes(self._lanes)))
            return migrations.pending(known, await _perform(conn, self._recipe.applied()))

    async def migrate(self) -> list[Step]:
        """Run what is pending, each step with its record in one transaction, and make the archive's partitions."""
        async with self._connected() as conn:
            await _perform(conn, self._recipe.prepare())
            known = self._recipe.steps(await _perform(conn, self._recipe.lanes(self._lanes)))
            done = [step for step in known if await _perform(conn, self._recipe.apply(step, self._lanes))]
        await self._prepare()
        return done

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


async def _perform(conn: Any, script: Script[T]) -> T:
    """Run a script in a transaction of its own, and return its result."""
    async with conn.transaction():
        try:
            text = next(script)
            while True:
                text = script.send(await conn.fetch(text))
        except StopIteration as end:
            result: T = end.value
            return result
