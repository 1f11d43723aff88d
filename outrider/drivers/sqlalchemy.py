"""Staging and saga operations through SQLAlchemy's sessions and connections, which delegate to the raw driver.

A session is flushed first: its rows take their locks before the event gets its position. SQLAlchemy begins late: a
transaction that is open in SQLAlchemy may not have reached the database. The driver therefore begins the transaction in
the database before staging. With SQLite and Python's own transaction control one case remains: a savepoint opened
before the first write is a separate transaction, and its release commits business rows and events. SQLAlchemy's page on
SQLite transactions describes the correct configuration.
"""

from __future__ import annotations

import sqlite3
from collections.abc import Callable
from contextlib import suppress
from typing import Any

from sqlalchemy import Connection, Engine
from sqlalchemy.exc import DBAPIError, UnboundExecutionError
from sqlalchemy.orm import Session, scoped_session
from sqlalchemy.pool import QueuePool

from outrider.drivers.async_transactions import AsyncTransactionSource, OpenTransaction
from outrider.drivers.connections import raw_connection
from outrider.drivers.detect import Mode, driver, driver_of
from outrider.drivers.threaded_transactions import ThreadedTransactionSource
from outrider.errors import NotInTransaction, UsageError
from outrider.stores.sqlite.database import translation

DRIVERS = frozenset({"asyncpg", "psycopg", "psycopg_async", "pysqlite", "aiosqlite"})

IDLE = (
    "this {0} is not in a transaction, so event or saga could not share your change's fate; use `{1} {0}.begin():`, "
    "or write your change first"
)

AUTOCOMMIT = (
    "this connection commits every statement by itself (isolation level AUTOCOMMIT), so event or saga could not share "
    "your change's fate; use an engine or a connection without it"
)

SEVERAL = (
    "this session works on several databases, and it is unclear which one has the outbox; pass its connection: "
    "session.connection(bind_arguments={'mapper': Order})"
)

FLUSHING = (
    "this session is being flushed, and must be flushed before the event is inserted; stage in "
    "`before_commit` instead, or pass session.connection()"
)

Args = tuple[Any, ...]

TRANSACTIONS_MAX = 10
"""The limit of concurrent transactions if the pool of the engine has no size."""


def run(target: Any, operation: str, args: Args, schema: str) -> Any:
    """Run an operation in the open transaction of the caller."""
    if driver_of(target).mode is Mode.ASYNC:
        return _run_async(target, operation, args, schema)
    found = target() if isinstance(target, scoped_session) else target
    return (_within_session if isinstance(found, Session) else _within)(found, operation, args, schema)


def _run_async(target: Any, operation: str, args: Args, schema: str) -> Any:
    # The import needs greenlet, which applications without asyncio may not have.
    from sqlalchemy.ext.asyncio import AsyncConnection, async_scoped_session

    if isinstance(target, AsyncConnection):
        _check_open(target)
        return target.run_sync(_within, operation, args, schema, awaited=True)
    session = target() if isinstance(target, async_scoped_session) else target
    return session.run_sync(_within_session, operation, args, schema, awaited=True)


def _within_session(session: Session, operation: str, args: Args, schema: str, *, awaited: bool = False) -> Any:
    if not session.in_transaction():
        raise NotInTransaction(IDLE.format("session", "async with" if awaited else "with"))
    check_bind(session)
    if session._flushing:
        raise UsageError(FLUSHING)
    session.flush()
    return _within(_only_connection(session), operation, args, schema)


def _only_connection(session: Session) -> Connection:
    """Return the connection of a session.

    Reject a session with several connections: it could write events elsewhere.
    """
    connection, transaction = session.connection(), session.get_transaction()
    # No public API lists the connections. Each connection is listed twice: by itself and by its engine.
    if transaction and any(each[0] is not connection for each in transaction._connections.values()):
        raise UsageError(SEVERAL)
    return connection


def _within(connection: Connection, operation: str, args: Args, schema: str, *, awaited: bool = False) -> Any:
    """Work through the raw connection; coroutines of the driver are awaited inside SQLAlchemy's greenlet."""
    _check_open(connection)
    if not connection.in_transaction():
        raise NotInTransaction(IDLE.format("connection", "async with" if awaited else "with"))
    raw = has_begun(connection)
    info = driver_of(raw)
    try:
        done = driver(info).run(raw, operation, args, schema)
        return _awaited(done) if info.mode is Mode.ASYNC else done
    except NotInTransaction as error:
        raise NotInTransaction(AUTOCOMMIT) from error


def _awaited(work: Any) -> Any:
    from sqlalchemy.util import await_only

    return await_only(work)


def has_begun(connection: Connection) -> Any:
    """Return the raw connection, and begin the transaction that SQLAlchemy regards as open::

    with engine.begin() as connection:
        raw = begun(connection)
    """
    dialect = connection.dialect
    if dialect.driver not in DRIVERS:
        raise UsageError(
            f"cannot work through {dialect.name}+{dialect.driver}; use postgresql+psycopg, postgresql+asyncpg, sqlite "
            "or sqlite+aiosqlite"
        )
    raw = connection.connection.driver_connection
    if dialect.driver == "asyncpg" and not raw.is_in_transaction():  # type: ignore[union-attr]
        connection.exec_driver_sql("SELECT 1")
    elif dialect.name == "sqlite" and _begins_late(raw):
        _begin_immediate(connection)
    return raw


def _begins_late(raw: Any) -> bool:
    """Return whether Python's sqlite3 begins a transaction with the first write, which is the default."""
    conn = getattr(raw, "_conn", raw)
    legacy = getattr(conn, "autocommit", -1) == -1 and conn.isolation_level is not None
    return legacy and not conn.in_transaction


def _begin_immediate(connection: Connection) -> None:
    try:
        connection.exec_driver_sql("BEGIN IMMEDIATE")
    except DBAPIError as error:
        ours = translation(error.orig) if isinstance(error.orig, sqlite3.Error) else None
        if ours is None:
            raise
        raise ours from error


def _check_open(connection: Any) -> None:
    if connection.closed:
        raise UsageError("this connection is closed, and its transaction with it; take another and begin again")


def check_bind(session: Session) -> None:
    """Reject a session that may write its rows to one database and the event to another::

    check_bind(Session())
    """
    try:
        usual = session.get_bind()
    except UnboundExecutionError as error:
        raise UsageError(SEVERAL) from error
    # The binds of single tables are public since SQLAlchemy 2.1.
    binds = getattr(session, "binds", None) or getattr(session, "_Session__binds", {})
    if any(bind.engine is not usual.engine for bind in binds.values()):
        raise UsageError(SEVERAL)


class SqlalchemyTransaction(OpenTransaction):
    """A transaction of a session or of a connection."""

    SAVEPOINT = "with session.begin_nested(): ..."

    def __init__(self, target: Session | Connection) -> None:
        self.connection = self._target = target
        connection = target if isinstance(target, Connection) else None
        if isinstance(target, Session):
            check_bind(target)
            # A session without autobegin needs an explicit begin.
            if not target.in_transaction():
                target.begin()
            self._transaction: Any = target.get_transaction()
            connection = target.connection(execution_options=_level(target.get_bind()))
        else:
            target.execution_options(**_level(target.engine))
            self._transaction = target.begin()
        assert connection is not None
        self._connection, self.raw = connection, raw_connection(has_begun(connection))
        if connection.dialect.name == "sqlite" and not self.raw.has_begun:
            raise UsageError(AUTOCOMMIT)

    @property
    def is_lost(self) -> bool:
        return self._target.get_transaction() is not self._transaction

    @property
    def is_aborted(self) -> bool:
        return isinstance(self._target, Session) and not self._target.is_active

    def begin(self) -> None:
        # psycopg begins with the first statement.
        if not self.raw.has_begun:
            self._connection.exec_driver_sql("SELECT 1")

    def settle(self) -> None:
        if isinstance(self._target, Session):
            self._target.flush()
            # A session raises here after a swallowed flush error.
            self._target.connection()
        # Savepoints that are still open are released now, as the commit would do.
        while savepoint := self._target.get_nested_transaction():
            savepoint.commit()

    def commit(self) -> None:
        self._target.commit()

    def rollback(self) -> None:
        self._target.rollback()

    def release(self) -> None:
        self._target.close()


class AsyncSqlalchemyTransaction(OpenTransaction):
    """A transaction of the synchronous session or connection inside an asynchronous one."""

    SAVEPOINT = "async with session.begin_nested(): ..."

    def __init__(self, given: Any, inner: SqlalchemyTransaction) -> None:
        self.connection, self._inner, self.raw = given, inner, inner.raw

    @property
    def is_lost(self) -> bool:
        return self._inner.is_lost

    @property
    def is_aborted(self) -> bool:
        return self._inner.is_aborted

    async def begin(self) -> None:
        if not self.raw.has_begun:
            await _there(self._inner.begin)

    async def settle(self) -> None:
        await _there(self._inner.settle)

    async def commit(self) -> None:
        await _there(self._inner.commit)

    async def rollback(self) -> None:
        await _there(self._inner.rollback)

    async def release(self) -> None:
        await _there(self._inner.release)


class SqlalchemySource(ThreadedTransactionSource):
    """A transaction source over a `sessionmaker` or an `Engine`."""

    def __init__(self, source: Any) -> None:
        engine = _engine(source)
        self.vendor, self._make = engine.dialect.name, source.connect if source is engine else source
        super().__init__(_check_engine(engine))

    def begin(self) -> OpenTransaction:
        target = self._make()
        try:
            return SqlalchemyTransaction(target)
        except BaseException:
            target.close()
            raise


class AsyncSqlalchemySource(AsyncTransactionSource):
    """A transaction source over an `async_sessionmaker` or an `AsyncEngine`."""

    def __init__(self, source: Any) -> None:
        self._source = source
        engine = getattr(source, "sync_engine", None)
        self._connects = engine is not None
        engine = engine or _engine(lambda: source().sync_session)
        self.vendor = engine.dialect.name
        super().__init__(_check_engine(engine))

    async def begin(self) -> OpenTransaction:
        given = await self._source.connect() if self._connects else self._source()
        inner = given.sync_connection if self._connects else given.sync_session
        try:
            return AsyncSqlalchemyTransaction(given, await _there(SqlalchemyTransaction, inner))
        except BaseException:
            with suppress(Exception):
                await given.close()
            raise


async def _there(job: Callable[..., Any], *args: Any) -> Any:
    """Run a function in a greenlet, where SQLAlchemy's synchronous classes can wait for an asynchronous driver."""
    from sqlalchemy.util import greenlet_spawn

    return await greenlet_spawn(job, *args)


def _level(bind: Any) -> dict[str, str]:
    # Each statement must see all earlier commits; a stricter isolation level would read an old snapshot. SQLite has no
    # such level, and needs none.
    return {"isolation_level": "READ COMMITTED"} if bind.dialect.name == "postgresql" else {}


def _engine(source: Any) -> Engine:
    """Return the engine of a factory. Creating a session opens no connection."""
    try:
        bind = source if isinstance(source, Engine) else source().get_bind()
    except UnboundExecutionError as error:
        raise UsageError(SEVERAL) from error
    if not isinstance(bind, Engine):
        raise UsageError(
            "the sessions of `transactions` are bound to one connection, not to an engine; bind them to one"
        )
    return bind


def _check_engine(engine: Engine) -> int:
    """Return the limit of concurrent handler transactions; the overflow of a pool stays with the application."""
    return (engine.pool.size() if isinstance(engine.pool, QueuePool) else 0) or TRANSACTIONS_MAX
