"""Which driver an object belongs to, told by where its type comes from, so that no driver is imported needlessly.

What is not a connection but looks like the way to one, such as a pool, has a sentence that says what to pass instead.
"""

from __future__ import annotations

import inspect
from enum import Enum
from functools import cache, lru_cache
from importlib import import_module
from types import ModuleType
from typing import Any, NamedTuple

from outrider.errors import Misuse


class Manner(Enum):
    """How a driver is called: awaited, or not, or not but so briefly that a coroutine may call it too."""

    ASYNC = "async"
    SYNC = "sync"
    BRIEF = "brief"


class Way(NamedTuple):
    """The module that works through a kind of connection, and how it is called."""

    module: str
    manner: Manner


_ASYNC, _SYNC, _BRIEF = Manner.ASYNC, Manner.SYNC, Manner.BRIEF

# By the package a type comes from and its name: packages move their types between modules, and rename none.
WAYS = {
    ("asyncpg", "Connection"): Way("outrider.drivers.asyncpg", _ASYNC),
    ("asyncpg", "PoolConnectionProxy"): Way("outrider.drivers.asyncpg", _ASYNC),
    ("psycopg", "Connection"): Way("outrider.drivers.psycopg", _SYNC),
    ("psycopg", "AsyncConnection"): Way("outrider.drivers.psycopg", _ASYNC),
    ("sqlite3", "Connection"): Way("outrider.drivers.sqlite3", _BRIEF),
    ("aiosqlite", "Connection"): Way("outrider.drivers.aiosqlite", _ASYNC),
    ("sqlalchemy", "Session"): Way("outrider.drivers.sqlalchemy", _SYNC),
    ("sqlalchemy", "scoped_session"): Way("outrider.drivers.sqlalchemy", _SYNC),
    ("sqlalchemy", "Connection"): Way("outrider.drivers.sqlalchemy", _SYNC),
    ("sqlalchemy", "AsyncSession"): Way("outrider.drivers.sqlalchemy", _ASYNC),
    ("sqlalchemy", "async_scoped_session"): Way("outrider.drivers.sqlalchemy", _ASYNC),
    ("sqlalchemy", "AsyncConnection"): Way("outrider.drivers.sqlalchemy", _ASYNC),
    ("django", "BaseDatabaseWrapper"): Way("outrider.drivers.django", _SYNC),
    ("django", "ConnectionProxy"): Way("outrider.drivers.django", _SYNC),
    ("pymongo", "ClientSession"): Way("outrider.drivers.pymongo", _SYNC),
    ("pymongo", "AsyncClientSession"): Way("outrider.drivers.pymongo", _ASYNC),
    ("outrider", "MemoryTransaction"): Way("outrider.drivers.memory", _ASYNC),
    ("outrider", "Loan"): Way("outrider.drivers.lent", _ASYNC),
}

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


def way_of(conn: Any) -> Way:
    """Return how to work through a connection; refuse what is none, and say what to pass instead.

    >>> import sqlite3
    >>> way_of(sqlite3.connect(":memory:")).module
    'outrider.drivers.sqlite3'
    """
    kind: Any = type(conn)
    found = _find(kind)
    if isinstance(found, Way):
        return found
    remedy = found
    if remedy is None and inspect.isawaitable(conn):
        remedy = "await it first"
    raise Misuse(f"cannot stage through a {kind_of(conn)}: {remedy or SUPPORTED}")


@lru_cache(256)
def _find(kind: Any) -> Way | str | None:
    """Return the way through objects of a type, or what to do instead."""
    for base in kind.__mro__:
        name = (_package(base), base.__qualname__)
        if name in WAYS:
            return WAYS[name]
        if name in REMEDIES:
            return REMEDIES[name]
    return None


@cache
def driver(way: Way) -> ModuleType:
    """Import the module of a driver."""
    return import_module(way.module)


def kind_of(conn: Any) -> str:
    """Name an object's type in full.

    >>> kind_of(7)
    'builtins.int'
    """
    return f"{type(conn).__module__}.{type(conn).__qualname__}"


def _package(kind: type) -> str:
    # The extension module behind a package, such as _sqlite3, goes by the package's name.
    return kind.__module__.partition(".")[0].removeprefix("_")
