"""Installing and upgrading the schema.

A step and its record commit together. Therefore an interrupted run resumes. BEGIN IMMEDIATE serialises two migrators,
and every step checks inside the transaction whether the other migrator has run the step.
"""

from __future__ import annotations

import asyncio
import re
import sqlite3
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import TypeVar

from outrider.event import BANDS
from outrider.stores import migrations, queries
from outrider.stores.migrations import (
    LANES_DEFAULT,
    LATER,
    Installer,
    MigrationProgress,
    MigrationStep,
    Statements,
    check_lanes,
    choose_lanes,
)
from outrider.stores.sqlite.database import connect, transaction, translated
from outrider.stores.sqlite.rows import PACKAGE
from outrider.stores.statements import run_statements

T = TypeVar("T")

_NUMBER = re.compile(r":(lanes|bands)\b")


class SqliteSchema:
    """The schema of one database file. The first installation fixes the number of lanes.

    >>> asyncio.run(SqliteSchema("absent.db").status())[0].state
    'pending'
    """

    def __init__(self, path: str | Path, lanes: int | None = None) -> None:
        check_lanes(lanes)
        self._path = Path(path)
        self._lanes = lanes
        self._installer = installer()

    async def status(self) -> list[MigrationProgress]:
        """Return the progress of all migrations, without changes to the database."""
        return migrations.progress(self._installer.steps(LANES_DEFAULT), await asyncio.to_thread(self._applied))

    async def plan(self) -> list[MigrationStep]:
        """Return the pending steps, which `migrate` would run, without changes to the database."""
        known = self._installer.steps(choose_lanes(None, self._lanes))
        return migrations.pending(known, await asyncio.to_thread(self._applied))

    async def migrate(self) -> list[MigrationStep]:
        """Run and return the pending steps."""
        return await asyncio.to_thread(self._migrate)

    def _applied(self) -> dict[tuple[int, str], str]:
        if not self._path.exists():
            return {}
        with translated(), closing(sqlite3.connect(f"{self._path.absolute().as_uri()}?mode=ro", uri=True)) as conn:
            return _perform(conn, self._installer.applied())

    def _migrate(self) -> list[MigrationStep]:
        with translated(), closing(connect(self._path)) as conn:
            with transaction(conn):
                _perform(conn, self._installer.prepare())
            known = self._installer.steps(_perform(conn, self._installer.lanes(self._lanes, strict=True)))
            todo = migrations.pending(known, _perform(conn, self._installer.applied()))
            return [step for step in todo if self._apply(conn, step)]

    def _apply(self, conn: sqlite3.Connection, step: MigrationStep) -> bool:
        """Run one step, unless another migrator was first."""
        with transaction(conn):
            return _perform(conn, self._installer.apply(step, self._lanes))


def _perform(conn: sqlite3.Connection, statements: Statements[T]) -> T:
    return run_statements(statements, lambda text: conn.execute(text).fetchall())


def installer() -> Installer:
    """Return the installer of a database file.

    >>> len(installer().steps(32)) > 30
    True
    """
    known = {**queries.constants(), **LATER}
    texts = queries.load(PACKAGE, ["sql/schema.sql"], known)
    return Installer(steps, texts, begin=("create_record",))


def steps(lanes: int) -> list[MigrationStep]:
    """Return all steps with their numbers filled in.

    >>> [step.sql.rsplit(None, 2)[-1] for step in steps(8) if step.name == "lanes"]
    ['8);']
    """
    numbers = {"lanes": str(lanes), "bands": str(BANDS)}
    known = migrations.steps(PACKAGE, queries.constants())
    return [replace(step, sql=_NUMBER.sub(lambda found: numbers[found[1]], step.sql)) for step in known]
