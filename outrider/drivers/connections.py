"""The raw connection of the driver under a handler transaction: statements of the store, health check, and abort."""

from __future__ import annotations

import asyncio
import os
import socket
import sqlite3
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import lru_cache
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

from outrider.errors import OutriderError, Permanent, Transient, Unreachable, UsageError
from outrider.redaction import without_values
from outrider.stores.sqlite.database import translation as sqlite_translation
from outrider.stores.sqlite.handler_transactions import run as run_sqlite

if TYPE_CHECKING:
    import psycopg


T = TypeVar("T")

Job = Callable[[sqlite3.Cursor], T]

BUSY = "wait for every query before the handler returns"

ANSWER_SECONDS = 5.0

STATEMENT_SECONDS = 60.0
"""The time limit of a statement of the store, including lock waits."""

WHERE = "the database of `transactions`"

FAILED = "25P02"
"""The SQLSTATE of a transaction that rejects statements after a swallowed error."""

_FAREWELLS = ("08", "57P01", "57P02")

# Prefixes of error codes; the first match counts.
_BY_SQLSTATE: tuple[tuple[tuple[str, ...], type[OutriderError], str], ...] = (
    (
        ("42P01", "42883", "3F000"),
        UsageError,
        "the outbox is not installed in {where} ({error}); run: outrider db migrate",
    ),
    (("25006",), UsageError, "{where} is a read replica; let `transactions` lead to the primary"),
    (("28", "3D000"), UsageError, "{where} rejected the connection: {error}; check user, password and database"),
    (("42501",), UsageError, "{where}: {error}; grant the role USAGE on the schema and rights on its tables"),
    (("08P01",), UsageError, "{where} does not accept the protocol ({error}); behind a pooler, prepare no statements"),
    (("08", "57P03"), Unreachable, "{where} does not answer ({error}); is it running?"),
    (("40001", "40P01", "55P03", "53", "57", "25P03"), Transient, "{where}: {error}"),
)

_AWAY_NAMES = frozenset({"OperationalError", "InterfaceError", "InternalClientError", "OSError", "TimeoutError"})


class RawConnection(Protocol):
    """A driver's connection. An asynchronous driver awaits `execute` and `probe`."""

    @property
    def closed(self) -> bool:
        """Whether the connection is closed."""
        ...

    @property
    def has_begun(self) -> bool:
        """Whether the database has a transaction open on the connection."""
        ...

    def execute(self, *what: Any) -> Any:
        """Run a statement with its parameters and return its rows; or run a job with a cursor."""
        ...

    def probe(self) -> Any:
        """Make the driver notice a closed connection. Raises no errors."""
        ...

    def abort(self) -> None:
        """End the connection, from any thread."""
        ...


class RawAsyncpg:
    """A raw connection of asyncpg."""

    def __init__(self, raw: Any) -> None:
        self.raw = raw

    @property
    def closed(self) -> bool:
        return bool(self.raw.is_closed())

    @property
    def has_begun(self) -> bool:
        return bool(self.raw.is_in_transaction())

    async def execute(self, sql: str, *args: Any) -> Any:
        import asyncpg

        try:
            return await self.raw.fetch(sql, *args, timeout=STATEMENT_SECONDS)
        except asyncpg.InterfaceError as error:
            if self.closed:
                raise
            error.add_note(BUSY)
            raise Permanent(f"a handler left its connection in use ({without_values(error)}); {BUSY}") from error

    async def probe(self) -> None:
        with suppress(Exception):
            await self.raw.execute("SELECT 1", timeout=ANSWER_SECONDS)

    def abort(self) -> None:
        self.raw.terminate()


class _Psycopg:
    def __init__(self, raw: Any) -> None:
        self.raw = raw

    @property
    def closed(self) -> bool:
        return bool(self.raw.closed)

    @property
    def has_begun(self) -> bool:
        return self.raw.info.transaction_status.name in {"INTRANS", "INERROR", "ACTIVE"}

    def abort(self) -> None:
        """Shut the socket down, which is safe on any thread; a call that waits for the server fails."""
        with suppress(Exception), socket.socket(fileno=os.dup(self.raw.fileno())) as wire:
            wire.shutdown(socket.SHUT_RDWR)


class RawPsycopg(_Psycopg):
    """A raw connection of psycopg."""

    def execute(self, sql: str, *args: Any) -> Any:
        import psycopg

        with psycopg.RawCursor(self.raw, row_factory=named_rows) as cursor:
            cursor.execute(sql.encode(), args)
            return cursor.fetchall() if cursor.description else []

    def probe(self) -> None:
        with suppress(Exception):
            self.execute("SELECT 1")


class RawAsyncPsycopg(_Psycopg):
    """A raw asynchronous connection of psycopg."""

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
    """The common part of SQLite connections: a file cannot be disconnected."""

    def __init__(self, raw: Any) -> None:
        self.raw = raw

    def abort(self) -> None:
        # A thread cannot be stopped, but its current statement in SQLite is interrupted.
        with suppress(sqlite3.Error, ValueError):
            self._connection.interrupt()

    @property
    def has_begun(self) -> bool:
        with suppress(sqlite3.Error, ValueError):
            return self._connection.in_transaction
        return False

    @property
    def _connection(self) -> sqlite3.Connection:
        connection: sqlite3.Connection = getattr(self.raw, "_conn", self.raw)
        return connection


class RawSqlite(_Sqlite):
    """A raw connection of the standard library's sqlite3."""

    def execute(self, job: Job[T]) -> T:
        return run_sqlite(self._connection, job)

    def probe(self) -> None:
        """Do nothing: a file cannot be disconnected."""


class RawAiosqlite(_Sqlite):
    """A raw connection of aiosqlite, which runs on a separate thread."""

    async def execute(self, job: Job[T]) -> T:
        done: T = await self.raw._execute(run_sqlite, self._connection, job)
        return done

    async def probe(self) -> None:
        """Do nothing: a file cannot be disconnected."""


def raw_connection(raw: Any) -> Any:
    """Wrap a driver's connection.

    >>> type(raw_connection(sqlite3.connect(":memory:"))).__name__
    'RawSqlite'
    """
    package = type(raw).__module__.partition(".")[0].removeprefix("_")
    kinds: dict[str, Callable[[Any], RawConnection]] = {
        "asyncpg": RawAsyncpg,
        "sqlite3": RawSqlite,
        "aiosqlite": RawAiosqlite,
    }
    if isinstance(raw, sqlite3.Connection):
        return RawSqlite(raw)
    if package in kinds:
        return kinds[package](raw)
    return (RawAsyncPsycopg if hasattr(raw, "set_autocommit") and _awaits(raw) else RawPsycopg)(raw)


def _awaits(raw: Any) -> bool:
    import psycopg

    return isinstance(raw, psycopg.AsyncConnection)


def named_rows(cursor: psycopg.Cursor[Any] | psycopg.AsyncCursor[Any]) -> Callable[[Any], Any]:
    """Return a row factory for rows that are read by position and by name, like the rows of asyncpg."""
    return _row(tuple(column.name for column in cursor.description or ()))


@lru_cache(256)
def _row(names: tuple[str, ...]) -> type[tuple[Any, ...]]:
    positions = {name: position for position, name in enumerate(names)}

    class Row(tuple[Any, ...]):
        __slots__ = ()

        def __getitem__(self, key: Any) -> Any:
            return tuple.__getitem__(self, positions[key] if isinstance(key, str) else key)

    return Row


def chain(error: BaseException) -> list[BaseException]:
    """Return an error and its causes.

    >>> [str(each) for each in chain(ValueError("7"))]
    ['7']
    """
    found: list[BaseException] = []
    inner: BaseException | None = error
    while isinstance(inner, BaseException) and inner not in found:
        found.append(inner)
        inner = getattr(inner, "orig", None) or inner.__cause__
    return found


def sqlstate_of(error: BaseException) -> str:
    """Return the SQLSTATE of an error, or an empty text.

    >>> sqlstate_of(ValueError("7"))
    ''
    """
    return next((str(code) for each in chain(error) if (code := getattr(each, "sqlstate", None))), "")


def is_farewell(error: BaseException) -> bool:
    """Return whether the server may have closed the connection with this error; drivers notice the end a little later.

    >>> is_farewell(ValueError("7"))
    False
    """
    return sqlstate_of(error).startswith(_FAREWELLS)


@contextmanager
def translate_errors(explain: Callable[[BaseException], None] | None = None) -> Iterator[None]:
    """Translate errors of the store's own steps. A plain TimeoutError passes: the caller set the limit."""
    try:
        yield
    except (OutriderError, asyncio.CancelledError):
        raise
    except Exception as error:
        if type(error) is TimeoutError:
            raise
        if explain:
            explain(error)
        raise translation(error) from error


def translation(error: Exception) -> OutriderError:
    """Return Outrider's error for a driver's error. An unknown error was caused by the application, and is permanent.

    >>> type(translation(OSError("away"))).__name__
    'Unreachable'
    """
    if lite := [each for each in chain(error) if isinstance(each, sqlite3.Error)]:
        return sqlite_translation(lite[0]) or Permanent(f"SQLite: {type(lite[0]).__name__}: {without_values(lite[0])}")
    if code := sqlstate_of(error):
        return _by_sqlstate(code, error)
    if any(_AWAY_NAMES.intersection(kind.__name__ for kind in type(each).__mro__) for each in chain(error)):
        return Unreachable(f"{WHERE} does not answer ({type(error).__name__}: {without_values(error)}); is it running?")
    return Permanent(f"{WHERE}: {type(error).__name__}: {without_values(error)}")


def _by_sqlstate(code: str, error: Exception) -> OutriderError:
    for beginnings, kind, text in _BY_SQLSTATE:
        if code.startswith(beginnings):
            return kind(text.format(where=WHERE, error=without_values(error)))
    return Permanent(f"{WHERE}: {type(error).__name__}: {without_values(error)}")
