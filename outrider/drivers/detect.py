"""Detection of a connection's driver by the package of the connection's type, without importing unused drivers.

An object that only provides connections, such as a pool, is rejected. The error names the object to pass instead.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from enum import Enum
from functools import cache, lru_cache
from importlib import import_module
from typing import Any, NamedTuple

from outrider.causation import continue_headers, is_handling, traceparent
from outrider.errors import UsageError
from outrider.handler_transactions import TransactionSource
from outrider.outbox.model import StageRequest

_CURSOR = "a cursor is not a connection; pass the connection it came from"

_TRANSACTION = "pass the connection that the transaction is open on, not the transaction itself"

_ENGINE = "an engine has no transaction; use: with engine.begin() as conn: ..., and pass conn"

_ASYNC_ENGINE = "an engine has no transaction; use: async with engine.begin() as conn: ..., and pass conn"

_MAKER = "this makes sessions and is none; use: with {0}.begin() as session: ..., and pass session"

_POOL = "a pool is not a connection; use: {0} pool.{1}() as conn, conn.transaction(): ..., and pass conn"

_MONGO = "MongoDB's transactions belong to sessions; use: client.start_session(), and pass the session"

REMEDIES = {
    ("asyncpg", "Pool"): _POOL.format("async with", "acquire"),
    ("asyncpg", "PoolAcquireContext"): "enter it first: async with pool.acquire() as conn: ..., and pass conn",
    ("asyncpg", "Transaction"): _TRANSACTION,
    ("asyncpg", "Cursor"): _CURSOR,
    ("psycopg", "Cursor"): _CURSOR,
    ("psycopg", "AsyncCursor"): _CURSOR,
    ("psycopg", "BaseCursor"): _CURSOR,
    ("psycopg", "Transaction"): _TRANSACTION,
    ("psycopg", "AsyncTransaction"): _TRANSACTION,
    ("psycopg_pool", "ConnectionPool"): _POOL.format("with", "connection"),
    ("psycopg_pool", "AsyncConnectionPool"): _POOL.format("async with", "connection"),
    ("psycopg2", "connection"): "psycopg2 is not supported; use psycopg 3: pip install 'outrider[psycopg]'",
    ("psycopg2", "cursor"): "psycopg2 is not supported; use psycopg 3: pip install 'outrider[psycopg]'",
    ("sqlite3", "Cursor"): _CURSOR,
    ("aiosqlite", "Cursor"): _CURSOR,
    ("sqlalchemy", "Engine"): _ENGINE,
    ("sqlalchemy", "AsyncEngine"): _ASYNC_ENGINE,
    ("sqlalchemy", "sessionmaker"): _MAKER.format("Session"),
    ("sqlalchemy", "async_sessionmaker"): "this makes sessions and is none; use: async with Session.begin() as session",
    ("sqlalchemy", "SessionTransaction"): "pass the session that the transaction is open on",
    ("sqlalchemy", "AsyncSessionTransaction"): "pass the session that the transaction is open on",
    ("sqlalchemy", "Transaction"): _TRANSACTION,
    ("sqlalchemy", "AsyncTransaction"): _TRANSACTION,
    ("sqlalchemy", "_ConnectionFairy"): "pass SQLAlchemy's own connection, which knows of the transaction",
    ("django", "CursorWrapper"): "pass django.db.connection, not its cursor",
    ("django", "ConnectionHandler"): "pass one of them: django.db.connections['default']",
    ("django", "Atomic"): "pass django.db.connection, inside `with transaction.atomic():`",
    ("pymongo", "MongoClient"): _MONGO,
    ("pymongo", "AsyncMongoClient"): _MONGO,
    ("pymongo", "Database"): _MONGO,
    ("pymongo", "AsyncDatabase"): _MONGO,
    ("outrider", "MemoryStore"): "use: async with store.transaction() as tx: ..., and pass tx",
}

SUPPORTED = (
    "pass a connection of asyncpg, psycopg, sqlite3, aiosqlite or Django, a session or connection of SQLAlchemy, or a "
    "session of pymongo, in a transaction"
)

_KINDS = {
    ("sqlalchemy", "sessionmaker"): ("sqlalchemy", "SqlalchemySource"),
    ("sqlalchemy", "Engine"): ("sqlalchemy", "SqlalchemySource"),
    ("sqlalchemy", "async_sessionmaker"): ("sqlalchemy", "AsyncSqlalchemySource"),
    ("sqlalchemy", "AsyncEngine"): ("sqlalchemy", "AsyncSqlalchemySource"),
    ("psycopg_pool", "ConnectionPool"): ("psycopg", "PsycopgSource"),
    ("psycopg_pool", "AsyncConnectionPool"): ("psycopg", "AsyncPsycopgSource"),
    ("outrider", "DjangoTransactions"): ("django", "DjangoSource"),
}

ACCEPTED = (
    "give a sessionmaker, async_sessionmaker, Engine or AsyncEngine of SQLAlchemy, a ConnectionPool or "
    "AsyncConnectionPool of psycopg_pool, a function that returns a psycopg connection, or "
    "outrider.django.transactions()"
)


class Mode(Enum):
    """The call style of a driver: asynchronous, synchronous, or synchronous but quick enough for coroutines."""

    ASYNC = "async"
    SYNC = "sync"
    BRIEF = "brief"


class DriverInfo(NamedTuple):
    """The driver module for a kind of connection, and the call style of the module."""

    module: str
    mode: Mode


_ASYNC, _SYNC, _BRIEF = Mode.ASYNC, Mode.SYNC, Mode.BRIEF


# Keys are package and name of the type: packages move their types between modules, but do not rename them.
DRIVERS_BY_TYPE = {
    ("asyncpg", "Connection"): DriverInfo("outrider.drivers.asyncpg", _ASYNC),
    ("asyncpg", "PoolConnectionProxy"): DriverInfo("outrider.drivers.asyncpg", _ASYNC),
    ("psycopg", "Connection"): DriverInfo("outrider.drivers.psycopg", _SYNC),
    ("psycopg", "AsyncConnection"): DriverInfo("outrider.drivers.psycopg", _ASYNC),
    ("sqlite3", "Connection"): DriverInfo("outrider.drivers.sqlite", _BRIEF),
    ("aiosqlite", "Connection"): DriverInfo("outrider.drivers.sqlite", _ASYNC),
    ("sqlalchemy", "Session"): DriverInfo("outrider.drivers.sqlalchemy", _SYNC),
    ("sqlalchemy", "scoped_session"): DriverInfo("outrider.drivers.sqlalchemy", _SYNC),
    ("sqlalchemy", "Connection"): DriverInfo("outrider.drivers.sqlalchemy", _SYNC),
    ("sqlalchemy", "AsyncSession"): DriverInfo("outrider.drivers.sqlalchemy", _ASYNC),
    ("sqlalchemy", "async_scoped_session"): DriverInfo("outrider.drivers.sqlalchemy", _ASYNC),
    ("sqlalchemy", "AsyncConnection"): DriverInfo("outrider.drivers.sqlalchemy", _ASYNC),
    ("django", "BaseDatabaseWrapper"): DriverInfo("outrider.drivers.django", _SYNC),
    ("django", "ConnectionProxy"): DriverInfo("outrider.drivers.django", _SYNC),
    ("pymongo", "ClientSession"): DriverInfo("outrider.drivers.pymongo", _SYNC),
    ("pymongo", "AsyncClientSession"): DriverInfo("outrider.drivers.pymongo", _ASYNC),
    ("outrider", "MemoryTransaction"): DriverInfo("outrider.drivers.memory", _ASYNC),
    ("outrider", "HandlerTransaction"): DriverInfo("outrider.drivers.base", _ASYNC),
}


def driver_of(conn: Any) -> DriverInfo:
    """Return the driver of a connection; reject any other object with an error that names the object to pass.

    >>> import sqlite3
    >>> driver_of(sqlite3.connect(":memory:")).module
    'outrider.drivers.sqlite'
    """
    kind: Any = type(conn)
    found = _find(kind)
    if isinstance(found, DriverInfo):
        return found
    remedy = found
    if remedy is None and inspect.isawaitable(conn):
        remedy = "await it first"
    raise UsageError(f"cannot stage through a {kind_of(conn)}: {remedy or SUPPORTED}")


@lru_cache(256)
def _find(kind: Any) -> DriverInfo | str | None:
    """Return the driver for a type, or the error text that names the object to pass instead."""
    for base in kind.__mro__:
        name = (_package(base), base.__qualname__)
        if name in DRIVERS_BY_TYPE:
            return DRIVERS_BY_TYPE[name]
        if name in REMEDIES:
            return REMEDIES[name]
    return None


class Driver(NamedTuple):
    """A driver in use: its function `run`, for which see `drivers.base`."""

    run: Callable[[Any, str, tuple[Any, ...], str], Any]


@cache
def driver(info: DriverInfo) -> Driver:
    """Import a driver. Events that it stages and sagas that it starts inside a handler continue the handled event."""
    run = import_module(info.module).run

    def run_continued(conn: Any, operation: str, args: tuple[Any, ...], schema: str) -> Any:
        return run(conn, operation, _continued(operation, args) if is_handling() else args, schema)

    return Driver(run_continued)


def _continued(operation: str, args: tuple[Any, ...]) -> tuple[Any, ...]:
    """Return the arguments of an operation with the trace and the correlation of the event that is handled."""
    subject, *rest = args
    if isinstance(subject, StageRequest):
        plain, numbered = (
            [new._replace(headers=continue_headers(new.headers)) for new in events]
            for events in (subject.plain, subject.numbered)
        )
        return subject._replace(plain=plain, numbered=numbered), *rest
    if operation == "start_saga" and subject.traceparent is None:
        return subject._replace(traceparent=traceparent()), *rest
    return args


def kind_of(conn: Any) -> str:
    """Return the full name of an object's type.

    >>> kind_of(7)
    'builtins.int'
    """
    return f"{type(conn).__module__}.{type(conn).__qualname__}"


def _package(kind: type) -> str:
    # An extension module behind a package, such as _sqlite3, counts as the package.
    return kind.__module__.partition(".")[0].removeprefix("_")


def transaction_source(source: Any) -> TransactionSource:
    """Return the transaction source for an object of the application; reject objects of unknown types.

    >>> transaction_source(7)
    Traceback (most recent call last):
    ...
    outrider.errors.UsageError: `transactions` cannot be a builtins.int; give a sessionmaker, async_sessionmaker, ...
    """
    kind: Any = type(source)
    for base in kind.__mro__:
        if found := _KINDS.get((base.__module__.partition(".")[0], base.__qualname__)):
            return _made(*found, source)
    if inspect.isfunction(source) or inspect.ismethod(source) or hasattr(source, "func"):
        return _made(
            "psycopg", "AsyncPsycopgSource" if inspect.iscoroutinefunction(source) else "PsycopgSource", source
        )
    raise UsageError(f"`transactions` cannot be a {kind.__module__}.{kind.__qualname__}; {ACCEPTED}")


def _made(module: str, name: str, source: Any) -> TransactionSource:
    made: TransactionSource = getattr(import_module(f"outrider.drivers.{module}"), name)(source)
    return made
