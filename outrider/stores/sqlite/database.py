"""The connection: a single thread owns the connection, and a transaction is one call to the thread.

SQLite allows one writer at a time. Writes start with BEGIN IMMEDIATE, so they wait for other writers at the start and
never fail half-way. Rows that a write transaction has read stay unchanged until the commit. The write lock is the fence
of the SQLite store.
"""

from __future__ import annotations

import asyncio
import sqlite3
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Concatenate, ParamSpec, TypeVar

from outrider.errors import OutriderError, Transient, Unreachable, UsageError
from outrider.stores.migrations import check_version

BUSY_SECONDS = 10.0
"""The maximum wait of a statement for another writer."""

P = ParamSpec("P")
T = TypeVar("T")


class SqliteDatabase:
    """A connection of the store on a separate thread."""

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        self.connection = open_existing(self.path)
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="outrider-sqlite")

    async def read(self, work: Callable[Concatenate[sqlite3.Connection, P], T], *args: P.args, **kwargs: P.kwargs) -> T:
        """Run the work in a read transaction. All reads see the same snapshot."""
        return await self._hop(lambda: self._run("BEGIN", lambda conn: work(conn, *args, **kwargs)))

    async def write(
        self, work: Callable[Concatenate[sqlite3.Connection, P], T], *args: P.args, **kwargs: P.kwargs
    ) -> T:
        """Run the work in a write transaction. No other writer is active at the same time."""
        return await self._hop(lambda: self._run("BEGIN IMMEDIATE", lambda conn: work(conn, *args, **kwargs)))

    async def close(self) -> None:
        """Close the connection and end the thread. A second call does nothing."""
        await asyncio.to_thread(self._thread.shutdown)
        self.connection.close()

    async def _hop(self, job: Callable[[], T]) -> T:
        return await asyncio.get_running_loop().run_in_executor(self._thread, job)

    def _run(self, begin: str, work: Callable[[sqlite3.Connection], T]) -> T:
        with translated(), transaction(self.connection, begin):
            return work(self.connection)


def installation(conn: sqlite3.Connection, what: str) -> dict[str, int]:
    """Return the facts of an installation. Tables that this code does not understand are rejected."""
    try:
        with translated():
            facts = dict(conn.execute("SELECT name, value FROM outbox_meta").fetchall())
    except UsageError as error:
        raise UsageError(f"the database has no {what}, or half of one; run `outrider db migrate`") from error
    if "lanes" not in facts:
        raise UsageError(f"the database has no {what}, or half of one; run `outrider db migrate`")
    check_version("this file", facts)
    return facts


def connect(path: Path, *, busy_seconds: float = BUSY_SECONDS) -> sqlite3.Connection:
    """Open a connection with the settings of the store. The store begins transactions by hand."""
    if str(path) == ":memory:":
        raise UsageError("a SQLite database in memory belongs to one connection; give the path of a file")
    if not path.parent.is_dir():
        raise UsageError(
            f"cannot make {path}: the directory {path.parent} does not exist; create it, or check the path"
        )
    with translated():
        conn = sqlite3.connect(path, timeout=busy_seconds, isolation_level=None, check_same_thread=False)
        try:
            # Text of foreign writers may be invalid UTF-8 and must not stop a lane; replacement characters are
            # delivered.
            conn.text_factory = _decode
            _use_wal(conn, busy_seconds)
            conn.execute("PRAGMA synchronous = FULL")
        except BaseException:
            conn.close()
            raise
    return conn


def _decode(text: bytes) -> str:
    return text.decode(errors="replace")


def open_existing(path: Path, *, busy_seconds: float = BUSY_SECONDS) -> sqlite3.Connection:
    """Open an existing database. A plain open would create an empty file for a missing database."""
    if not _exists(path):
        raise UsageError(f"there is no database at {path}; check the path, or run `outrider db migrate` to make it")
    return connect(path, busy_seconds=busy_seconds)


def _exists(path: Path) -> bool:
    try:
        return path.exists()
    except OSError as error:
        raise UsageError(f"{path} cannot be reached ({error.strerror}); check the path and its rights") from error


def _use_wal(conn: sqlite3.Connection, busy_seconds: float) -> None:
    """Switch to the write-ahead log. The function retries, because SQLite does not wait during the switch."""
    deadline = time.monotonic() + busy_seconds
    while True:
        try:
            conn.execute("PRAGMA journal_mode = WAL")
            return
        except sqlite3.OperationalError as error:
            if not _named(error, "SQLITE_BUSY", "SQLITE_LOCKED") or time.monotonic() > deadline:
                raise
            time.sleep(0.01)


@contextmanager
def transaction(conn: sqlite3.Connection, begin: str = "BEGIN IMMEDIATE") -> Iterator[None]:
    """Open a transaction. The block commits at its end and rolls back after an exception."""
    conn.execute(begin)
    try:
        yield
        conn.execute("COMMIT")
    except BaseException:
        if conn.in_transaction:
            conn.execute("ROLLBACK")
        raise


@contextmanager
def translated() -> Iterator[None]:
    """Translate errors of SQLite, with a remedy in the text."""
    try:
        yield
    except sqlite3.Error as error:
        if (ours := translation(error)) is None:
            raise
        raise ours from error


def translation(error: sqlite3.Error) -> OutriderError | None:
    """Return the Outrider error for an error of SQLite; None for an error in the application's statement or data."""
    if "no such table" in str(error) or "no such column" in str(error):
        return UsageError(f"the database has no outbox of this version ({error}); run `outrider db migrate`")
    if _named(error, "SQLITE_BUSY", "SQLITE_LOCKED"):
        return Transient(
            f"another process is writing to the database ({error}); try again, and begin transactions that "
            "read before they write with BEGIN IMMEDIATE"
        )
    if _named(error, "SQLITE_CANTOPEN", "SQLITE_IOERR", "SQLITE_FULL", "SQLITE_READONLY", "SQLITE_PERM"):
        return Unreachable(f"the database file cannot be used ({error}); check its path, permissions and free space")
    if _named(error, "SQLITE_NOTADB", "SQLITE_CORRUPT"):
        return UsageError(f"the file is not a sound SQLite database ({error}); check the path, or restore a backup")
    return None


def _named(error: sqlite3.Error, *names: str) -> bool:
    # Extended codes have the plain code as prefix: SQLITE_BUSY_SNAPSHOT. Errors of Python itself have no name.
    return str(getattr(error, "sqlite_errorname", "")).startswith(names)
