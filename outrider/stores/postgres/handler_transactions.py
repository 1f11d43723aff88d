"""Handler transactions on asyncpg connections, for the inbox and the saga store of PostgreSQL.

The connections have the defaults of the driver. They come from a pool of the store or of the application.
"""

from __future__ import annotations

import asyncio
import inspect
import secrets
from collections.abc import AsyncIterator, Callable, Iterator, Mapping
from contextlib import asynccontextmanager, contextmanager, nullcontext, suppress
from dataclasses import dataclass
from typing import Any

import asyncpg

from outrider import handler_transactions
from outrider.errors import InvalidHandler, OutriderError, Permanent, TransactionLost, Transient, UsageError
from outrider.handler_transactions import (
    TRANSACTION_ENDED,
    HandlerTransaction,
    TransactionSource,
    WrappedTransaction,
    returns_awaitable,
)
from outrider.stores.postgres.database import STATEMENT_SECONDS, PostgresDatabase, translated
from outrider.stores.queries import identifier

BATCH_MAX = 1000

ELSEWHERE = (
    "`transactions` leads to another database than the store, {0}; what a handler writes and the receipt for it could "
    "not be committed together: let both lead to the same one"
)

NOT_ASYNCHRONOUS = (
    "is a plain function, so its calls to PostgreSQL would not be awaited; write it as `async def`, with `await` "
    "before every call of the transaction"
)

SAVEPOINT = "a statement that may fail needs a savepoint of its own: async with tx.transaction(): ..."

BUSY = "wait for every query before the handler returns"

ANSWER_SECONDS = 5.0

_FAREWELLS = (asyncpg.PostgresConnectionError, asyncpg.AdminShutdownError, asyncpg.CrashShutdownError)

_LOST = (asyncpg.PostgresError, asyncpg.InterfaceError, asyncpg.InternalClientError, OSError, TimeoutError)

CLOSE_SECONDS = 5.0


class PostgresHandlerTransaction(HandlerTransaction):
    """A transaction on an asyncpg connection."""

    def __init__(self, connection: Any, where: str) -> None:
        self.connection, self._where = connection, where

    async def execute(self, *statement: Any) -> list[Any]:
        sql, *args = statement
        with translate_errors(self._where, self.connection):
            try:
                rows: list[Any] = await self.connection.fetch(sql, *args, timeout=STATEMENT_SECONDS)
                return rows
            except TimeoutError as error:
                late = error
        raise late

    async def call(self, function: Callable[..., Any], argument: Any) -> Any:
        conn = self.connection
        try:
            result = function(argument, conn)
            if not inspect.isawaitable(result):
                raise InvalidHandler(
                    handler_transactions.GENERATOR if handler_transactions.lazy(result) else NOT_ASYNCHRONOUS
                )
            return await result
        except Exception as error:
            if await _lost(conn, error):
                raise TransactionLost(f"the connection was lost under a handler ({error})") from error
            if isinstance(error, asyncpg.InFailedSQLTransactionError):
                error.add_note(SAVEPOINT)
            raise
        finally:
            if not closed(conn) and not conn.is_in_transaction():
                raise InvalidHandler(TRANSACTION_ENDED)

    async def through(self, function: Callable[..., Any], *args: Any) -> Any:
        with translate_errors(self._where, self.connection):
            return await function(self.connection, *args)

    def abort(self) -> None:
        # Without its connection, a handler that continues has no effect, not even between the rollback and the pool.
        self.connection.terminate()


class PostgresTransactionSource:
    """A source of transactions on pool connections, with some connections reserved for the store."""

    vendor = "postgresql"

    def __init__(self, database: PostgresDatabase, *, reserved: int = 0) -> None:
        self._database = database
        room = max(1, database.pool.get_max_size() - reserved) if reserved else 0
        self._room = asyncio.Semaphore(room) if room else nullcontext()

    @asynccontextmanager
    async def open(self) -> AsyncIterator[HandlerTransaction]:
        async with self._room, open_transaction(self._database) as tx:
            yield tx

    def check_handler(self, function: Callable[..., Any]) -> str | None:
        return check_handler(function)

    async def close(self) -> None:
        """Do nothing: the store closes the database."""


class CommitCheckingSource:
    """A source of transactions whose `call` detects that a failed handler has committed before its failure."""

    vendor = "postgresql"

    def __init__(self, source: TransactionSource, database: PostgresDatabase) -> None:
        self._source, self._database = source, database

    @asynccontextmanager
    async def open(self) -> AsyncIterator[HandlerTransaction]:
        async with self._source.open() as tx:
            yield _CommitChecking(tx, self._database)

    def check_handler(self, function: Callable[..., Any]) -> str | None:
        return self._source.check_handler(function)

    async def close(self) -> None:
        await self._source.close()


class _CommitChecking(WrappedTransaction):
    def __init__(self, inner: HandlerTransaction, database: PostgresDatabase) -> None:
        super().__init__(inner)
        self._database = database

    async def call(self, function: Callable[..., Any], argument: Any) -> Any:
        try:
            return await self._inner.call(function, argument)
        except InvalidHandler:
            raise
        except Exception as error:
            if not await has_committed(self._database, self.transaction_id):
                raise
            raise InvalidHandler(TRANSACTION_ENDED) from error


def check_handler(handler: Callable[..., Any]) -> str | None:
    """Return the reason why a handler cannot use asyncpg. None: suitable, or only a call can tell, as with a lambda.

    >>> def bill(event, tx): tx.execute("SELECT 1")
    >>> check_handler(bill)[:19]
    'is a plain function'
    """
    if generator := handler_transactions.check_handler(handler):
        return generator
    return None if returns_awaitable(handler) else NOT_ASYNCHRONOUS


@contextmanager
def translate_errors(where: str, tx: Any) -> Iterator[None]:
    """Translate errors of the store's statements around a handler. Only a handler can cause some of the errors."""
    with translated(where):
        try:
            yield
        except asyncpg.InFailedSQLTransactionError as error:
            error.add_note(SAVEPOINT)
            raise
        except asyncpg.InterfaceError as error:
            if closed(tx):
                raise
            error.add_note(BUSY)
            raise Permanent(f"a handler left its connection in use ({error}); {BUSY}") from error


@dataclass(frozen=True, slots=True)
class StatementRunner:
    """Runs named statements of a store in a handler transaction."""

    sql: Mapping[str, str]
    where: str
    locked: str
    """The rows that another transaction may have locked when a statement times out."""

    async def run(self, tx: HandlerTransaction, name: str, *args: Any) -> list[Any]:
        """Run a statement by its name and return its rows."""
        try:
            rows: list[Any] = await tx.execute(self.sql[name], *args)
        except TimeoutError as error:
            raise Transient(
                f"{self.where}: {name} did not end within {STATEMENT_SECONDS:.0f} s; another transaction may hold the "
                f"same {self.locked}"
            ) from error
        return rows


INSTALLED = """SELECT to_regclass($1) IS NOT NULL AND ($2 = '' OR EXISTS (SELECT FROM pg_attribute
WHERE attrelid = to_regclass($1) AND attname = $2 AND NOT attisdropped))"""


async def open_installed(
    url: str, schema: str, *, what: str, last_step: str, connections_max: int, pooled: bool
) -> PostgresDatabase:
    """Connect to a database. A replica and a schema without the last step of the migration are rejected.

    The step is the name of a table or an index, or of a column after that of its table: `saga_audit_log.state`.
    """
    identifier(schema)
    database = PostgresDatabase(url, connections_max=connections_max, pooled=pooled, plain=True)
    await database.open()
    try:
        relation, _, column = last_step.partition(".")
        [[installed]] = await database.fetch(INSTALLED, f"{schema}.{relation}", column)
        if not installed:
            where = f"{database.where}, schema {schema}"
            raise UsageError(f"the {what} is not installed in {where}; run: outrider db migrate")
        await database.installation(schema)
    except BaseException:
        await database.close()
        raise
    return database


async def check_same_database(source: TransactionSource, database: PostgresDatabase) -> None:
    """Reject a source of transactions that leads to another database than the store."""
    if source.vendor != "postgresql":
        raise UsageError(ELSEWHERE.format(database.where))
    # Two connections compete for an advisory lock if and only if their database is the same.
    number = secrets.randbits(62)
    async with source.open() as tx:
        await tx.execute("SELECT pg_advisory_xact_lock($1::bigint)::text", number)
        [[elsewhere]] = await database.fetch("SELECT pg_try_advisory_xact_lock($1::bigint)", number)
    if elsewhere:
        raise UsageError(ELSEWHERE.format(database.where))


async def has_committed(database: PostgresDatabase, transaction_id: int | None) -> bool:
    """Return whether a transaction has committed. If so, a failed handler must have committed it."""
    if transaction_id is None:
        return False
    try:
        [[status]] = await database.fetch("SELECT txid_status($1)", transaction_id)
    except OutriderError:
        return False
    return bool(status == "committed")


async def in_batches(database: PostgresDatabase, sql: str, *args: Any) -> int:
    """Run a statement with BATCH_MAX as its last parameter until a batch is short; return the total of rows."""
    total, count = 0, BATCH_MAX
    while count == BATCH_MAX:
        count = await database.execute(sql, *args, BATCH_MAX)
        total += count
    return total


def closed(tx: Any) -> bool:
    """Return whether a connection is closed, or back in the pool."""
    try:
        return bool(tx.is_closed())
    except asyncpg.InterfaceError:
        return True


async def _lost(tx: Any, error: Exception) -> bool:
    """Return whether a handler failed because of a lost connection. The driver may notice the loss a moment later."""
    if isinstance(error, _FAREWELLS) and not closed(tx):
        with suppress(asyncpg.PostgresError, asyncpg.InterfaceError, OSError, TimeoutError):
            await tx.execute("SELECT 1", timeout=ANSWER_SECONDS)
    return closed(tx)


@asynccontextmanager
async def open_transaction(database: PostgresDatabase) -> AsyncIterator[HandlerTransaction]:
    """Open a transaction. The block commits at its end and rolls back after an exception."""
    with translated(database.where):
        conn = await database.pool.acquire()
    try:
        # Each statement must see all earlier commits; a stricter isolation level would read an old snapshot.
        work = conn.transaction(isolation="read_committed")
        with translated(database.where):
            await _in_time(work.start(), conn)
        try:
            yield PostgresHandlerTransaction(conn, database.where)
        except BaseException:
            await _rollback(work, conn)
            raise
        with translate_errors(database.where, conn):
            await _in_time(work.commit(), conn)
    finally:
        # The outcome is final here. The pool discards a connection that cannot be returned.
        with suppress(*_LOST):
            await database.pool.release(conn)


async def _in_time(step: Any, conn: Any) -> None:
    """Begin or commit. After an unknown result the connection is closed, so that no further statement can use it."""
    try:
        async with asyncio.timeout(STATEMENT_SECONDS):
            await step
    except (TimeoutError, asyncio.CancelledError):
        conn.terminate()
        raise


async def _rollback(work: Any, conn: Any) -> None:
    """Roll back. If that fails, the server rolls back after the loss of the connection.

    The error of the block is raised in every case.
    """
    try:
        async with asyncio.timeout(STATEMENT_SECONDS):
            await work.rollback()
    except _LOST:
        # Closing also cancels a query that a handler has left running; the query would keep the receipt locked.
        with suppress(*_LOST):
            await conn.close(timeout=CLOSE_SECONDS)
    except BaseException:
        conn.terminate()
        raise
