"""Installing and upgrading the schema.

Each step commits together with its record, so a run that broke off resumes. Two migrators take turns by BEGIN
IMMEDIATE, and each step asks again, inside its transaction, whether it is still to be done.
"""

from __future__ import annotations

import asyncio
import sqlite3
from contextlib import closing
from pathlib import Path
from typing import TypeVar

from outrider.stores import migrations
from outrider.stores.migrations import Progress, Step
from outrider.stores.recipe import Script, check_lanes, perform
from outrider.stores.sqlite.database import connect, transaction, translated
from outrider.stores.sqlite.install import recipe

T = TypeVar("T")


class SqliteSchema:
    """The schema of one database file. `lanes` counts at the first install only; later the database's own holds.

    >>> asyncio.run(SqliteSchema("absent.db").status())[0].state
    'pending'
    """

    def __init__(self, path: str | Path, lanes: int = 32) -> None:
        check_lanes(lanes)
        self._path = Path(path)
        self._lanes = lanes
        self._recipe = recipe()

    async def status(self) -> list[Progress]:
        """Say how far each migration has come; changes nothing."""
        return migrations.progress(self._recipe.steps(self._lanes), await asyncio.to_thread(self._applied))

    async def plan(self) -> list[Step]:
        """Return the steps that `migrate` would run; changes nothing."""
        return migrations.pending(self._recipe.steps(self._lanes), await asyncio.to_thread(self._applied))

    async def migrate(self) -> list[Step]:
        """Run what is still to be done, and return it."""
        return await asyncio.to_thread(self._migrate)

    def _applied(self) -> dict[tuple[int, str], str]:
        if not self._path.exists():
            return {}
        with translated(), closing(sqlite3.connect(f"{self._path.absolute().as_uri()}?mode=ro", uri=True)) as conn:
            return _perform(conn, self._recipe.applied())

    def _migrate(self) -> list[Step]:
        with translated(), closing(connect(self._path)) as conn:
            with transaction(conn):
                _perform(conn, self._recipe.prepare())
            todo = migrations.pending(self._recipe.steps(self._lanes), _perform(conn, self._recipe.applied()))
            return [step for step in todo if self._apply(conn, step)]

    def _apply(self, conn: sqlite3.Connection, step: Step) -> bool:
        """Run one step, unless another migrator was faster."""
        with transaction(conn):
            return _perform(conn, self._recipe.apply(step, self._lanes))


def _perform(conn: sqlite3.Connection, script: Script[T]) -> T:
    return perform(script, lambda text: conn.execute(text).fetchall())
