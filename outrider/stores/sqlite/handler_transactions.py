"""Handler transactions on a SQLite file, for its inbox and its saga store.

There is one connection and one transaction at a time, because a transaction locks the whole file, including a
transaction of the application's own kind. On the connection of the store, a plain function runs on the connection's
thread and a coroutine on the event loop. Both ways are safe, because no other code uses the connection until the
transaction ends.
"""

from __future__ import annotations

import asyncio
import inspect
import sqlite3
from collections.abc import AsyncIterator, Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager, contextmanager
from contextvars import copy_context
from pathlib import Path
from typing import Any, Concatenate, ParamSpec, TypeVar

from outrider import handler_transactions
from outrider.errors import InvalidHandler, OutriderError, Permanent, TransactionLost, Transient, UsageError
from outrider.handler_transactions import (
    GENERATOR,
    TRANSACTION_ENDED,
    HandlerTransaction,
    TransactionSource,
    WrappedTransaction,
)
from outrider.redaction import without_values
from outrider.stores.sqlite.database import installation, open_existing, translated, translation

P = ParamSpec("P")
T = TypeVar("T")

MARK = "outrider_handler"
"""The name of a savepoint that exists as long as the transaction of the handler."""

ELSEWHERE = (
    "`transactions` leads to another database than the store, the file {0}; what a handler writes and the receipt for "
    "it could not be committed together: let both lead to the same one"
)


class SqliteHandlerTransaction(HandlerTransaction):
    """A transaction on the connection of a store."""

    def __init__(self, connection: sqlite3.Connection, thread: ThreadPoolExecutor) -> None:
        self.connection, self._thread = connection, thread

    async def execute(self, *statement: Any) -> Any:
        [job] = statement
        return await asyncio.get_running_loop().run_in_executor(self._thread, run, self.connection, job)

    async def call(self, function: Callable[..., Any], argument: Any) -> Any:
        conn = self.connection
        conn.execute(f"SAVEPOINT {MARK}")
        try:
            result = await self._call(function, argument)
        except BaseException as error:
            if not conn.in_transaction:
                raise _ended_by(error) from error
            # An abandoned thread may still use the connection.
            if not isinstance(error, asyncio.CancelledError) and not _is_the_same(conn):
                raise InvalidHandler(TRANSACTION_ENDED) from error
            raise
        if not conn.in_transaction or not _is_the_same(conn):
            raise InvalidHandler(TRANSACTION_ENDED)
        return result

    async def through(self, function: Callable[..., Any], *args: Any) -> Any:
        with translated():
            return function(self.connection, *args)

    def abort(self) -> None:
        self.connection.interrupt()

    async def _call(self, function: Callable[..., Any], argument: Any) -> Any:
        if inspect.iscoroutinefunction(function):
            return await function(argument, self.connection)
        loop, context = asyncio.get_running_loop(), copy_context()
        try:
            result = await loop.run_in_executor(
                self._thread, context.run, _plainly, function, argument, self.connection
            )
        except asyncio.CancelledError:
            # The thread cannot be stopped, but its running statement ends.
            self.connection.interrupt()
            raise
        if handler_transactions.lazy(result):
            raise InvalidHandler(GENERATOR)
        return await result if inspect.isawaitable(result) else result


class SqliteTransactionSource:
    """A source of transactions on one connection, one at a time."""

    vendor = "sqlite"

    def __init__(self, path: str | Path, *, what: str, installed: str) -> None:
        """Create a source.

        `what` names the store in errors; the statement `installed` checks for the completed migration.
        """
        self.path, self._what = Path(path), what
        self._connection = open_existing(self.path)
        _check_installed(self._connection, what, installed)
        self._thread = ThreadPoolExecutor(1, thread_name_prefix=f"outrider-{what.replace(' ', '-')}")
        self._turn = asyncio.Lock()
        self._within: asyncio.Task[Any] | None = None

    @asynccontextmanager
    async def open(self, begin: str = "BEGIN IMMEDIATE") -> AsyncIterator[SqliteHandlerTransaction]:
        """Open a transaction. The block commits at its end and rolls back after an exception."""
        async with self.exclusive():
            try:
                await self._on_thread(_begin, self._connection, begin)
                yield SqliteHandlerTransaction(self._connection, self._thread)
                await self._on_thread(_commit, self._connection)
            except BaseException:
                # The end also follows a cancelled call: its job may have run on the thread. The end runs after that
                # job.
                await asyncio.shield(self._on_thread(_end, self._connection))
                raise

    @asynccontextmanager
    async def exclusive(self) -> AsyncIterator[None]:
        """Lock out all other transactions of the store."""
        task = asyncio.current_task()
        if self._within is not None and self._within is task:
            raise UsageError(
                f"a handler of this {self._what} cannot open another transaction of it; use the one that it was given"
            )
        async with self._turn:
            self._within = task
            try:
                yield
            finally:
                self._within = None

    async def read(self, job: Callable[Concatenate[sqlite3.Cursor, P], T], *args: P.args, **kwargs: P.kwargs) -> T:
        """Run a job in a separate read transaction, which blocks no writer."""
        async with self.open("BEGIN") as tx:
            return await run_job(tx, job, *args, **kwargs)

    async def write(self, job: Callable[Concatenate[sqlite3.Cursor, P], T], *args: P.args, **kwargs: P.kwargs) -> T:
        """Run a job in a separate transaction."""
        async with self.open() as tx:
            return await run_job(tx, job, *args, **kwargs)

    def check_handler(self, function: Callable[..., Any]) -> str | None:
        return handler_transactions.check_handler(function)

    async def close(self) -> None:
        """Close the connection and end the thread. A second call does nothing."""
        await asyncio.to_thread(self._thread.shutdown)
        self._connection.close()

    async def _on_thread(self, job: Callable[..., Any], *args: Any) -> Any:
        return await asyncio.get_running_loop().run_in_executor(self._thread, job, *args)


class ExclusiveSource:
    """A source of the application's own transactions, during which transactions of the store wait."""

    vendor = "sqlite"

    def __init__(self, source: TransactionSource, own: SqliteTransactionSource) -> None:
        self._source, self._own = source, own

    @classmethod
    async def of(cls, source: TransactionSource, own: SqliteTransactionSource) -> ExclusiveSource:
        """Wrap a source of transactions. A source for another file is rejected."""
        if source.vendor != "sqlite":
            raise UsageError(ELSEWHERE.format(own.path))
        async with source.open() as tx:
            files = [row[2] for row in await tx.execute(_attached)]
        if not files[0] or not own.path.samefile(files[0]):
            raise UsageError(ELSEWHERE.format(own.path))
        return cls(source, own)

    @asynccontextmanager
    async def open(self) -> AsyncIterator[HandlerTransaction]:
        async with self._own.exclusive(), self._source.open() as tx:
            yield _MarkedTransaction(tx)

    def check_handler(self, function: Callable[..., Any]) -> str | None:
        return self._source.check_handler(function)

    async def close(self) -> None:
        await self._source.close()


class _MarkedTransaction(WrappedTransaction):
    """Detects by its savepoint that a handler has ended the transaction and begun another."""

    async def call(self, function: Callable[..., Any], argument: Any) -> Any:
        await self._inner.execute(_mark)
        try:
            result = await self._inner.call(function, argument)
        except InvalidHandler:
            raise
        except Exception as error:
            if not await self._inner.execute(_is_the_same):
                raise InvalidHandler(TRANSACTION_ENDED) from error
            raise
        if not await self._inner.execute(_is_the_same):
            raise InvalidHandler(TRANSACTION_ENDED)
        return result


async def run_job(
    tx: HandlerTransaction,
    job: Callable[Concatenate[sqlite3.Cursor, P], T],
    *args: P.args,
    **kwargs: P.kwargs,
) -> T:
    """Run a job of the store, a function of a cursor, in a handler transaction."""
    result: T = await tx.execute(lambda cursor: job(cursor, *args, **kwargs))
    return result


def run(conn: sqlite3.Connection, job: Callable[[sqlite3.Cursor], T]) -> T:
    """Run a job with a new cursor, independent of the settings of the connection."""
    with _translate():
        cursor = conn.cursor()
        # A handler may have set any row factory. The cursor must end with the job, on the same thread.
        cursor.row_factory = None
        try:
            return job(cursor)
        finally:
            cursor.close()


def _attached(cursor: sqlite3.Cursor) -> list[Any]:
    """Return the open databases of a connection: number, name and file. The first is the main database."""
    return cursor.execute("PRAGMA database_list").fetchall()


def _mark(cursor: sqlite3.Cursor) -> None:
    cursor.execute(f"SAVEPOINT {MARK}")


def _plainly(function: Callable[..., Any], argument: Any, tx: sqlite3.Connection) -> Any:
    """Run a plain function, on the connection's thread."""
    try:
        return function(argument, tx)
    except StopIteration as error:
        # A future cannot carry a StopIteration, and its caller would wait for ever.
        raise RuntimeError("the handler raised StopIteration") from error


def _is_the_same(tx: sqlite3.Connection | sqlite3.Cursor) -> bool:
    """Return whether the transaction of the handler is still open: a new transaction has no mark."""
    try:
        tx.execute(f"RELEASE {MARK}")
    except sqlite3.OperationalError:
        return False
    return True


def _ended_by(error: BaseException) -> OutriderError:
    """Return the cause of a transaction's end under a failed handler, for instance SQLite's rollback on a full disk."""
    error_text = translation(error) if isinstance(error, sqlite3.Error) else None
    return TransactionLost(str(error_text)) if isinstance(error_text, Transient) else InvalidHandler(TRANSACTION_ENDED)


def _begin(conn: sqlite3.Connection, begin: str) -> None:
    """Begin, and reset all connection settings that an earlier handler may have changed."""
    with _translate():
        _end(conn)
        conn.row_factory, conn.text_factory, conn.isolation_level = None, str, None
        conn.execute(begin)


def _commit(conn: sqlite3.Connection) -> None:
    with _translate():
        conn.execute("COMMIT")


def _end(conn: sqlite3.Connection) -> None:
    if conn.in_transaction:
        conn.rollback()


@contextmanager
def _translate() -> Iterator[None]:
    """Translate every error of SQLite. An error without a translation comes from a handler's use of the connection."""
    try:
        with translated():
            yield
    except sqlite3.Error as error:
        raise Permanent(f"SQLite: {type(error).__name__}: {without_values(error)}") from error


def _check_installed(conn: sqlite3.Connection, what: str, installed: str) -> None:
    """Reject a database without the last step of the migration."""
    try:
        with translated():
            found = conn.execute(installed).fetchone()[0]
        if not found:
            raise UsageError(f"the database has no {what}, or half of one; run `outrider db migrate`")
        installation(conn, what)
    except BaseException:
        conn.close()
        raise
