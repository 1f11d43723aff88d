"""The driver's own connection under a lent transaction: our statements, whether it is there still, and its end."""

from __future__ import annotations

import os
import socket
import sqlite3
from collections.abc import Callable
from contextlib import suppress
from functools import lru_cache
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

from outrider.errors import Permanent
from outrider.stores.sqlite import lending as sqlite

if TYPE_CHECKING:
    import psycopg

T = TypeVar("T")
Job = Callable[[sqlite3.Cursor], T]

BUSY = "wait for every query before the handler returns"
ANSWER_SECONDS = 5.0
STATEMENT_SECONDS = 60.0
"""How long a step of ours may take, its waiting for locks included."""


class Below(Protocol):
    """A driver's connection. `execute` and `probe` are awaited if the driver is asynchronous."""

    @property
    def closed(self) -> bool:
        """Whether it is gone."""
        ...

    @property
    def begun(self) -> bool:
        """Whether the database has a transaction open on it."""
        ...

    def execute(self, *what: Any) -> Any:
        """Run a statement with its parameters and return its rows; or a job with a cursor."""
        ...

    def probe(self) -> Any:
        """Make the driver notice whether the connection is gone. Raises nothing."""
        ...

    def sever(self) -> None:
        """End it, whoever is using it."""
        ...


class Asyncpg:
    """asyncpg's."""

    def __init__(self, raw: Any) -> None:
        self.raw = raw

    @property
    def closed(self) -> bool:
        return bool(self.raw.is_closed())

    @property
    def begun(self) -> bool:
        return bool(self.raw.is_in_transaction())

    async def execute(self, sql: str, *args: Any) -> Any:
        import asyncpg

        try:
            return await self.raw.fetch(sql, *args, timeout=STATEMENT_SECONDS)
        except asyncpg.InterfaceError as error:
            if self.closed:
                raise
            error.add_note(BUSY)
            raise Permanent(f"a handler left its connection in use ({error}); {BUSY}") from error

    async def probe(self) -> None:
        with suppress(Exception):
            await self.raw.execute("SELECT 1", timeout=ANSWER_SECONDS)

    def sever(self) -> None:
        self.raw.terminate()


class _Psycopg:
    def __init__(self, raw: Any) -> None:
        self.raw = raw

    @property
    def closed(self) -> bool:
        return bool(self.raw.closed)

    @property
    def begun(self) -> bool:
        return self.raw.info.transaction_status.name in {"INTRANS", "INERROR", "ACTIVE"}

    def sever(self) -> None:
        """Cut the wire, which is safe on any thread; whoever waits for the server is told that it is gone."""
        with suppress(Exception), socket.socket(fileno=os.dup(self.raw.fileno())) as wire:
            wire.shutdown(socket.SHUT_RDWR)


class Psycopg(_Psycopg):
    """psycopg's."""

    def execute(self, sql: str, *args: Any) -> Any:
        import psycopg

        with psycopg.RawCursor(self.raw, row_factory=named_rows) as cursor:
            cursor.execute(sql.encode(), args)
            return cursor.fetchall() if cursor.description else []

    def probe(self) -> None:
        with suppress(Exception):
            self.execute("SELECT 1")


class AsyncPsycopg(_Psycopg):
    """psycopg's that is awaited."""

    async def execute(self, sql: str, *args: Any) -> Any:
        import psycopg

        async with psycopg.AsyncRawCursor(self.raw, row_factory=named_rows) as cursor:
            await cursor.execute(sql.encode(), args)
            return await cursor.fetchall() if cursor.description else []

    async def probe(self) -> None:
        with suppress(Exception):
            await self.execute("SELECT 1")


class _Sqlite:
    closed = False
    """A file does not go away."""

    def __init__(self, raw: Any) -> None:
        self.raw = raw

    def sever(self) -> None:
        # Nobody can stop a thread, but what it is asking of SQLite right now ends.
        with suppress(sqlite3.Error, ValueError):
            self._connection.interrupt()

    @property
    def begun(self) -> bool:
        with suppress(sqlite3.Error, ValueError):
            return self._connection.in_transaction
        return False

    @property
    def _connection(self) -> sqlite3.Connection:
        connection: sqlite3.Connection = getattr(self.raw, "_conn", self.raw)
        return connection


class Sqlite(_Sqlite):
    """The standard library's sqlite3."""

    def execute(self, job: Job[T]) -> T:
        return sqlite.run(self._connection, job)

    def probe(self) -> None:
        """There is nothing to notice."""


class Aiosqlite(_Sqlite):
    """aiosqlite's, which works on a thread of its own."""

    async def execute(self, job: Job[T]) -> T:
        done: T = await self.raw._execute(sqlite.run, self._connection, job)
        return done

    async def probe(self) -> None:
        """There is nothing to notice."""


def below(raw: Any) -> Any:
    """Return how to work through a driver's connection.

    >>> type(below(sqlite3.connect(":memory:"))).__name__
    'Sqlite'
    """
    package = type(raw).__module__.partition(".")[0].removeprefix("_")
    kinds: dict[str, Callable[[Any], Below]] = {"asyncpg": Asyncpg, "sqlite3": Sqlite, "aiosqlite": Aiosqlite}
    if isinstance(raw, sqlite3.Connection):
        return Sqlite(raw)
    if package in kinds:
        return kinds[package](raw)
    return (AsyncPsycopg if hasattr(raw, "set_autocommit") and _awaits(raw) else Psycopg)(raw)


def _awaits(raw: Any) -> bool:
    import psycopg

    return isinstance(raw, psycopg.AsyncConnection)


def named_rows(cursor: psycopg.Cursor[Any] | psycopg.AsyncCursor[Any]) -> Callable[[Any], Any]:
    """Make rows that are read by position and by name, as asyncpg's are; psycopg calls it for every result."""
    return _row(tuple(column.name for column in cursor.description or ()))


@lru_cache(256)
def _row(names: tuple[str, ...]) -> type[tuple[Any, ...]]:
    places = {name: place for place, name in enumerate(names)}

    class Row(tuple[Any, ...]):
        __slots__ = ()

        def __getitem__(self, key: Any) -> Any:
            return tuple.__getitem__(self, places[key] if isinstance(key, str) else key)

    return Row
