"""Staging and saga operations through the caller's psycopg connection, synchronous or asynchronous.

A connection without autocommit begins a transaction with the first statement, which may be a statement of Outrider. The
driver uses a separate cursor: the row and cursor factories of the caller have no effect.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from typing import Any

import psycopg
from psycopg.pq import TransactionStatus
from psycopg.rows import tuple_row

from outrider.drivers.async_transactions import AsyncTransactionSource, OpenTransaction
from outrider.drivers.base import translating, translating_async
from outrider.drivers.connections import RawAsyncPsycopg, RawPsycopg
from outrider.drivers.threaded_transactions import ThreadedTransactionSource
from outrider.errors import NotInTransaction, UsageError
from outrider.stores.postgres.statements import OPERATIONS, Rows, Statements
from outrider.stores.statements import run_statements, run_statements_async

NO_TRANSACTION = (
    "this connection is in autocommit mode and not in a transaction, so event or saga could not share your change's "
    "fate; stage inside `{block} conn.transaction():`"
)

_BEGUN = (TransactionStatus.INTRANS, TransactionStatus.INERROR)

TRANSACTIONS_MAX = 10
"""The limit of concurrent transactions without a pool, or with an unlimited pool."""

READ_COMMITTED = psycopg.IsolationLevel.READ_COMMITTED

FORBIDDEN = "forbidden within a Transaction context"


def run(conn: Any, operation: str, args: tuple[Any, ...], schema: str) -> Any:
    """Run an operation in the open transaction of the caller."""
    if conn.closed:
        raise UsageError("this connection is closed, and its transaction with it; take another and begin again")
    # The pool sets this attribute: None for a connection in the pool, missing for a connection without a pool.
    if getattr(conn, "_pool", conn) is None:
        raise UsageError(
            "this connection was given back to its pool, and is no longer yours; take another and begin again"
        )
    statements = OPERATIONS[operation](schema, *args)
    if isinstance(conn, psycopg.AsyncConnection):
        return _run_async(conn, statements, schema)
    if _unclear(conn):
        with conn.pipeline():
            pass
    _check(conn, "with")
    with psycopg.RawCursor(conn, row_factory=tuple_row) as cursor:
        return run_statements(statements, translating(partial(_execute, cursor), schema))


async def _run_async(conn: psycopg.AsyncConnection[Any], statements: Statements[Any], schema: str) -> Any:
    if _unclear(conn):
        async with conn.pipeline():
            pass
    _check(conn, "async with")
    async with psycopg.AsyncRawCursor(conn, row_factory=tuple_row) as cursor:
        return await run_statements_async(statements, translating_async(partial(_execute_async, cursor), schema))


def _execute(cursor: psycopg.RawCursor[Any], sql: str, *args: Any) -> Rows:
    # Encoded as bytes, because psycopg's types accept only literal strings.
    cursor.execute(sql.encode(), args)
    return cursor.fetchall() if cursor.description else []


async def _execute_async(cursor: psycopg.AsyncRawCursor[Any], sql: str, *args: Any) -> Rows:
    await cursor.execute(sql.encode(), args)
    return await cursor.fetchall() if cursor.description else []


def _unclear(conn: psycopg.Connection[Any] | psycopg.AsyncConnection[Any]) -> bool:
    """Return whether only a pipeline knows of a transaction.

    Leaving a nested pipeline waits for the server's answer.
    """
    return conn.autocommit and conn.info.transaction_status == TransactionStatus.ACTIVE


def _check(conn: psycopg.Connection[Any] | psycopg.AsyncConnection[Any], block: str) -> None:
    if conn.autocommit and conn.info.transaction_status not in _BEGUN:
        raise NotInTransaction(NO_TRANSACTION.format(block=block))


class _RollBack(Exception):
    """Raised in a block to roll back."""


class PsycopgTransaction(OpenTransaction):
    """A transaction of a connection."""

    SAVEPOINT = "with conn.transaction(): ..."

    def __init__(self, conn: Any, give_back: Callable[[Any], Any]) -> None:
        self.connection, self.raw, self._give_back = conn, RawPsycopg(conn), give_back
        self._level = conn.isolation_level
        if self._level is not READ_COMMITTED:
            conn.isolation_level = READ_COMMITTED
        self._block = conn.transaction()
        self._block.__enter__()

    @property
    def is_lost(self) -> bool:
        # A lost connection is marked as broken.
        return bool(self.connection.closed and not self.connection.broken)

    def begin(self) -> None:
        """Do nothing: the transaction has begun."""

    def settle(self) -> None:
        """Do nothing: psycopg has no pending writes."""

    def commit(self) -> None:
        self._block.__exit__(None, None, None)

    def rollback(self) -> None:
        self._block.__exit__(_RollBack, _RollBack(), None)

    def release(self) -> None:
        with suppress(psycopg.Error):
            if self._level is not READ_COMMITTED:
                self.connection.isolation_level = self._level
        self._give_back(self.connection)

    def forbidden(self, error: BaseException) -> bool:
        return isinstance(error, psycopg.ProgrammingError) and FORBIDDEN in str(error)


class AsyncPsycopgTransaction(PsycopgTransaction):
    """An asynchronous transaction of a connection.

    Use `has_begun` to create a transaction, because the begin is awaited.
    """

    SAVEPOINT = "async with conn.transaction(): ..."

    def __init__(self, conn: Any, give_back: Callable[[Any], Any]) -> None:
        self.connection, self.raw, self._give_back = conn, RawAsyncPsycopg(conn), give_back
        self._level = conn.isolation_level

    async def has_begun(self) -> OpenTransaction:
        """Begin the transaction and return the object."""
        if self._level is not READ_COMMITTED:
            await self.connection.set_isolation_level(READ_COMMITTED)
        self._block = self.connection.transaction()
        await self._block.__aenter__()
        return self

    async def begin(self) -> None:  # type: ignore[override]
        """Do nothing: the transaction has begun."""

    async def settle(self) -> None:  # type: ignore[override]
        """Do nothing: psycopg has no pending writes."""

    async def commit(self) -> None:  # type: ignore[override]
        await self._block.__aexit__(None, None, None)

    async def rollback(self) -> None:  # type: ignore[override]
        await self._block.__aexit__(_RollBack, _RollBack(), None)

    async def release(self) -> None:  # type: ignore[override]
        with suppress(psycopg.Error):
            if self._level is not READ_COMMITTED:
                await self.connection.set_isolation_level(self._level)
        await self._give_back(self.connection)


class PsycopgSource(ThreadedTransactionSource):
    """A `ConnectionPool`, or a plain function that returns a connection. A pool that is still closed is opened."""

    vendor = "postgresql"

    def __init__(self, source: Any) -> None:
        self._pool = None if callable(source) else source
        self._connect = source if callable(source) else source.getconn
        self._opened = False
        super().__init__(getattr(self._pool, "max_size", 0) or TRANSACTIONS_MAX)

    def begin(self) -> OpenTransaction:
        if self._pool is not None and self._pool.closed:
            self._pool.open()
            self._opened = True
        conn = self._connect()
        if not isinstance(conn, psycopg.Connection):
            raise _no_connection(conn)
        give_back = self._pool.putconn if self._pool is not None else psycopg.Connection.close
        try:
            return PsycopgTransaction(conn, give_back)
        except BaseException:
            give_back(conn)
            raise

    async def close(self) -> None:
        await super().close()
        if self._opened and self._pool is not None:
            self._pool.close()


class AsyncPsycopgSource(AsyncTransactionSource):
    """An `AsyncConnectionPool`, or an asynchronous function that returns a connection."""

    vendor = "postgresql"

    def __init__(self, source: Any) -> None:
        self._pool = None if callable(source) else source
        self._connect = source if callable(source) else source.getconn
        self._opened = False
        super().__init__(getattr(self._pool, "max_size", 0) or TRANSACTIONS_MAX)

    async def begin(self) -> OpenTransaction:
        if self._pool is not None and self._pool.closed:
            await self._pool.open()
            self._opened = True
        conn = await self._connect()
        if not isinstance(conn, psycopg.AsyncConnection):
            raise _no_connection(conn)
        give_back = self._pool.putconn if self._pool is not None else psycopg.AsyncConnection.close
        try:
            return await AsyncPsycopgTransaction(conn, give_back).has_begun()
        except BaseException:
            await give_back(conn)
            raise

    async def close(self) -> None:
        if self._opened and self._pool is not None:
            await self._pool.close()


def _no_connection(found: Any) -> UsageError:
    if inspect.iscoroutine(found):
        found.close()
    return UsageError(
        f"the function given as `transactions` returned a {type(found).__name__}; let a plain function return a "
        "psycopg.Connection, and one with `async def` a psycopg.AsyncConnection"
    )
