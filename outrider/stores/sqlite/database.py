"""The connection: one thread, one connection, a whole transaction per thread hop.

SQLite lets one writer in at a time. Writes begin with BEGIN IMMEDIATE, so they wait for their turn at the start and
never fail half-way; what such a transaction reads stays true until its commit. That is the fence of this store.
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

from outrider.errors import Misuse, OutriderError, Transient, Unreachable

BUSY_SECONDS = 10.0
"""How long a statement waits for another writer."""

P = ParamSpec("P")
T = TypeVar("T")


class Database:
    """A connection of the store's own, on a thread of its own."""

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        self.connection = open_existing(self.path)
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="outrider-sqlite")

    async def read(self, work: Callable[Concatenate[sqlite3.Connection, P], T], *args: P.args, **kwargs: P.kwargs) -> T:
        """Run the work in one read transaction: all it reads is of one moment."""
        return await self._hop(lambda: self._run("BEGIN", lambda conn: work(conn, *args, **kwargs)))

    async def write(
        self, work: Callable[Concatenate[sqlite3.Connection, P], T], *args: P.args, **kwargs: P.kwargs
    ) -> T:
        """Run the work in one write transaction, alone in the database."""
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


def connect(path: Path, *, busy_seconds: float = BUSY_SECONDS) -> sqlite3.Connection:
    """Open a connection with the settings this store relies on; transactions are begun by hand."""
    if str(path) == ":memory:":
        raise Misuse("a SQLite database in memory belongs to one connection; give the path of a file")
    if not path.parent.is_dir():
        raise Misuse(f"cannot make {path}: the directory {path.parent} does not exist; create it, or check the path")
    with translated():
        conn = sqlite3.connect(path, timeout=busy_seconds, isolation_level=None, check_same_thread=False)
        try:
            # Foreign text that is not UTF-8 must not stop its lane; it is delivered with replacement characters.
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
    """Open a database that must be there already: opening would otherwise leave an empty file behind."""
    if not _exists(path):
        raise Misuse(f"there is no database at {path}; check the path, or run `outrider db migrate` to make it")
    return connect(path, busy_seconds=busy_seconds)


def _exists(path: Path) -> bool:
    try:
        return path.exists()
    except OSError as error:
        raise Misuse(f"{path} cannot be reached ({error.strerror}); check the path and its rights") from error


def _use_wal(conn: sqlite3.Connection, busy_seconds: float) -> None:
    """Switch to the write-ahead log. SQLite does not wait for its turn when it switches, so this does."""
    give_up = time.monotonic() + busy_seconds
    while True:
        try:
            conn.execute("PRAGMA journal_mode = WAL")
            return
        except sqlite3.OperationalError as error:
            if not _named(error, "SQLITE_BUSY", "SQLITE_LOCKED") or time.monotonic() > give_up:
                raise
            time.sleep(0.01)


@contextmanager
def transaction(conn: sqlite3.Connection, begin: str = "BEGIN IMMEDIATE") -> Iterator[None]:
    """Commit when the block ends, roll back when it raises."""
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
    """Turn SQLite's errors into ours, with what to do about them."""
    try:
        yield
    except sqlite3.Error as error:
        if (ours := translation(error)) is None:
            raise
        raise ours from error


def translation(error: sqlite3.Error) -> OutriderError | None:
    """Return an error of SQLite in our words; None if it is about what somebody has written."""
    if "no such table" in str(error) or "no such column" in str(error):
        return Misuse(f"the database has no outbox of this version ({error}); run `outrider db migrate`")
    if _named(error, "SQLITE_BUSY", "SQLITE_LOCKED"):
        return Transient(
            f"another process is writing to the database ({error}); try again, and begin transactions that "
            "read before they write with BEGIN IMMEDIATE"
        )
    if _named(error, "SQLITE_CANTOPEN", "SQLITE_IOERR", "SQLITE_FULL", "SQLITE_READONLY", "SQLITE_PERM"):
        return Unreachable(f"the database file cannot be used ({error}); check its path, permissions and free space")
    if _named(error, "SQLITE_NOTADB", "SQLITE_CORRUPT"):
        return Misuse(f"the file is not a sound SQLite database ({error}); check the path, or restore a backup")
    return None


def _named(error: sqlite3.Error, *names: str) -> bool:
    # Extended codes carry the plain one as their prefix: SQLITE_BUSY_SNAPSHOT. Python's own errors have no name.
    return str(getattr(error, "sqlite_errorname", "")).startswith(names)
