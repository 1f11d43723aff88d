"""Installing and upgrading the schema.

Each step commits together with its record, so a run that broke off resumes. Two migrators take turns by BEGIN
IMMEDIATE, and each step asks again, inside its transaction, whether it is still to be done.
"""

from __future__ import annotations

import asyncio
import sqlite3
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from urllib.parse import quote

from outrider.clock import Clock, SystemClock
from outrider.errors import BadSetting
from outrider.event import BANDS
from outrider.stores import migrations, queries
from outrider.stores.migrations import Progress, Step
from outrider.stores.sqlite.database import connect, transaction, translated
from outrider.stores.sqlite.rows import PACKAGE, load

SQL = load("schema.sql")


class SqliteSchema:
    """The schema of one database file. `lanes` counts at the first install only; later the database's own holds."""

    def __init__(self, path: str | Path, lanes: int = 32, *, clock: Clock | None = None) -> None:
        if not 1 <= lanes <= 1024:
            raise BadSetting(f"lanes = {lanes} is out of range; use 1 to 1024, 32 suits nearly everyone")
        self._path = Path(path)
        self._lanes = lanes
        self._clock = clock or SystemClock()
        self._steps = migrations.steps(PACKAGE, queries.constants())

    async def status(self) -> list[Progress]:
        """Say how far each migration has come; changes nothing."""
        return migrations.progress(self._steps, await asyncio.to_thread(self._applied))

    async def plan(self) -> list[Step]:
        """Return the steps that `migrate` would run; changes nothing."""
        return migrations.pending(self._steps, await asyncio.to_thread(self._applied))

    async def migrate(self) -> list[Step]:
        """Run what is still to be done, and return it."""
        return await asyncio.to_thread(self._migrate)

    def _applied(self) -> dict[tuple[int, str], str]:
        if not self._path.exists():
            return {}
        with translated(), closing(sqlite3.connect(f"file:{quote(str(self._path))}?mode=ro", uri=True)) as conn:
            return _recorded(conn)

    def _migrate(self) -> list[Step]:
        with self._open() as conn:
            with transaction(conn):
                conn.execute(SQL["create_record"])
            todo = migrations.pending(self._steps, _recorded(conn))
            return [step for step in todo if self._apply(conn, step)]

    def _apply(self, conn: sqlite3.Connection, step: Step) -> bool:
        """Run one step, unless another migrator was faster."""
        with transaction(conn):
            if not migrations.pending([step], _recorded(conn)):
                return False
            conn.execute(step.sql, {"lanes": self._lanes, "bands": BANDS})
            now = self._clock.now().timestamp()
            facts = {"version": step.version, "step": step.name, "checksum": step.checksum, "now": now}
            conn.execute(SQL["record"], facts)
            return True

    @contextmanager
    def _open(self) -> Iterator[sqlite3.Connection]:
        with translated(), closing(connect(self._path)) as conn:
            yield conn


def _recorded(conn: sqlite3.Connection) -> dict[tuple[int, str], str]:
    if not conn.execute(SQL["has_record"]).fetchone()[0]:
        return {}
    return {(version, step): checksum for version, step, checksum in conn.execute(SQL["applied"])}
