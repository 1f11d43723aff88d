"""Staging, and what sagas need, through SQLAlchemy's sessions and connections, by way of the driver below.

A session is flushed first, so that its rows have taken their locks before the event takes its place. SQLAlchemy begins
late: a transaction that is open for it may not have reached the database, so it is begun for good before anything is
staged. With SQLite and Python's own transaction control there is one gap: a savepoint opened before the first write is
a transaction of its own, which its release commits, business rows and events alike; SQLAlchemy's page on SQLite
transactions tells how to begin properly.
"""

from __future__ import annotations

import sqlite3
from typing import Any

from sqlalchemy import Connection
from sqlalchemy.exc import DBAPIError, UnboundExecutionError
from sqlalchemy.orm import Session, scoped_session

from outrider.drivers.recognise import Manner, driver, way_of
from outrider.drivers.verbs import Verbs
from outrider.errors import Misuse, NotInTransaction
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
    "this session works on several databases, and nothing says which one holds the outbox; pass its connection: "
    "session.connection(bind_arguments={'mapper': Order})"
)

FLUSHING = (
    "this session is being flushed, and would have to be flushed before the event takes its place; stage in "
    "`before_commit` instead, or pass session.connection()"
)


def _perform(target: Any, verb: str, args: tuple[Any, ...], schema: str) -> Any:
    if way_of(target).manner is Manner.ASYNC:
        return _perform_async(target, verb, args, schema)
    found = target() if isinstance(target, scoped_session) else target
    return (_within_session if isinstance(found, Session) else _within)(found, verb, args, schema)


def _perform_async(target: Any, verb: str, args: tuple[Any, ...], schema: str) -> Any:
    # This needs greenlet, which applications without asyncio may not have.
    from sqlalchemy.ext.asyncio import AsyncConnection, async_scoped_session

    if isinstance(target, AsyncConnection):
        _check_open(target)
        return target.run_sync(_within, verb, args, schema, awaited=True)
    session = target() if isinstance(target, async_scoped_session) else target
    return session.run_sync(_within_session, verb, args, schema, awaited=True)


def _within_session(session: Session, verb: str, args: tuple[Any, ...], schema: str, *, awaited: bool = False) -> Any:
    if not session.in_transaction():
        raise NotInTransaction(IDLE.format("session", "async with" if awaited else "with"))
    check_bind(session)
    if session._flushing:
        raise Misuse(FLUSHING)
    session.flush()
    return _within(_only_connection(session), verb, args, schema)


def _only_connection(session: Session) -> Connection:
    """Return a session's connection; refuse if it has another as well, since it chooses by itself what goes where."""
    connection, transaction = session.connection(), session.get_transaction()
    # Nothing public tells. Each connection is there twice, by itself and by its engine.
    if transaction and any(each[0] is not connection for each in transaction._connections.values()):
        raise Misuse(SEVERAL)
    return connection


def _within(connection: Connection, verb: str, args: tuple[Any, ...], schema: str, *, awaited: bool = False) -> Any:
    """Work through the driver's own connection; its coroutines are awaited from inside SQLAlchemy's greenlet."""
    _check_open(connection)
    if not connection.in_transaction():
        raise NotInTransaction(IDLE.format("connection", "async with" if awaited else "with"))
    raw = begun(connection)
    way = way_of(raw)
    try:
        done = getattr(driver(way), verb)(raw, *args, schema)
        return _awaited(done) if way.manner is Manner.ASYNC else done
    except NotInTransaction as error:
        raise NotInTransaction(AUTOCOMMIT) from error


def _awaited(work: Any) -> Any:
    from sqlalchemy.util import await_only

    return await_only(work)


def begun(connection: Connection) -> Any:
    """Return the driver's connection, with the transaction begun that SQLAlchemy believes to be open::

    with engine.begin() as connection:
        raw = begun(connection)
    """
    dialect = connection.dialect
    if dialect.driver not in DRIVERS:
        raise Misuse(
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
    """Tell whether Python's sqlite3 is to begin with the first write, as it does unless told otherwise."""
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
        raise Misuse("this connection is closed, and its transaction with it; take another and begin again")


def check_bind(session: Session) -> None:
    """Refuse a session that may write its rows to one database and our event to another::

    check_bind(Session())
    """
    try:
        usual = session.get_bind()
    except UnboundExecutionError as error:
        raise Misuse(SEVERAL) from error
    # The binds of single tables are public since SQLAlchemy 2.1.
    binds = getattr(session, "binds", None) or getattr(session, "_Session__binds", {})
    if any(bind.engine is not usual.engine for bind in binds.values()):
        raise Misuse(SEVERAL)


_verbs = Verbs(_perform)
stage, start_saga, post_mail = _verbs.stage, _verbs.start_saga, _verbs.post_mail
barrier_enter, barrier_keep = _verbs.barrier_enter, _verbs.barrier_keep
