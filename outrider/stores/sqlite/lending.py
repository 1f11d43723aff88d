"""A store that lends its transactions to other people's code: what inbox and sagas have in common.

One connection and one transaction at a time: whoever is in it has everything locked, also if it is of the application's
own kind. Otherwise a plain function runs on the connection's own thread, a coroutine on the event loop, with the same
connection; that is safe because nobody else touches it until the transaction ends.
"""

from __future__ import annotations

import asyncio
import inspect
import sqlite3
from collections.abc import AsyncIterator, Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import (
    AbstractAsyncContextManager,
    AbstractContextManager,
    asynccontextmanager,
    contextmanager,
    nullcontext,
)
from pathlib import Path
from typing import Any, ClassVar, Concatenate, ParamSpec, TypeVar, cast

from outrider.clock import Clock, SystemClock
from outrider.errors import Misuse, OutriderError, Permanent, TransactionLost, Transient, UnfitHandler
from outrider.stores import lending
from outrider.stores.lending import ENDED, GENERATOR
from outrider.stores.loans import Lender, Loan
from outrider.stores.sqlite.database import open_existing, translated, translation

P = ParamSpec("P")
T = TypeVar("T")

MARK = "outrider_lent"
"""A savepoint: it is there as long as the transaction is that a function was given."""

ELSEWHERE = (
    "`transactions` leads to another database than the store, the file {0}; what a handler writes and the receipt for "
    "it could not be committed together: let both lead to the same one"
)


class Lending:
    """Transactions on a connection of its own, and the store's own work in them."""

    WHAT: ClassVar[str]
    """What it is called in errors, and its thread after it."""
    INSTALLED: ClassVar[str]
    """The statement that tells whether the last step of its migration was taken."""

    def __init__(self, path: str | Path, *, clock: Clock | None = None) -> None:
        self.clock = clock or SystemClock()
        self._path = Path(path)
        self._connection = open_existing(self._path)
        self._check(self._connection)
        self._thread = ThreadPoolExecutor(1, thread_name_prefix=f"outrider-{self.WHAT.replace(' ', '-')}")
        self._turn = asyncio.Lock()
        self._within: asyncio.Task[Any] | None = None
        self._lender: Lender | None = None

    async def lend_from(self, lender: Lender) -> None:
        """Lend transactions of the application's own kind from now on; refuse those of another database::

        await inbox_store.lend_from(lender_of(session_factory))
        """
        if lender.vendor != "sqlite":
            raise Misuse(ELSEWHERE.format(self._path))
        async with lender.transaction() as loan:
            files = [row[2] for row in await loan.execute(_attached)]
        if not files[0] or not self._path.samefile(files[0]):
            raise Misuse(ELSEWHERE.format(self._path))
        self._lender = lender

    def transaction(self) -> AbstractAsyncContextManager[Any]:
        return self._own("BEGIN IMMEDIATE") if self._lender is None else self._lent(self._lender)

    @asynccontextmanager
    async def _own(self, begin: str) -> AsyncIterator[sqlite3.Connection]:
        async with self._alone():
            try:
                await self._hop(_begin, self._connection, begin)
                yield self._connection
                await self._hop(_commit, self._connection)
            except BaseException:
                # Also after a hop that was cancelled: its job may have run all the same. This one comes after it.
                await asyncio.shield(self._hop(_end, self._connection))
                raise

    @asynccontextmanager
    async def _lent(self, lender: Lender) -> AsyncIterator[Loan]:
        async with self._alone(), lender.transaction() as loan:
            yield loan

    @asynccontextmanager
    async def _alone(self) -> AsyncIterator[None]:
        """Let nobody else of this store into the database."""
        task = asyncio.current_task()
        if self._within is not None and self._within is task:
            raise Misuse(
                f"a handler of this {self.WHAT} cannot open another transaction of it; use the one that it was given"
            )
        async with self._turn:
            self._within = task
            try:
                yield
            finally:
                self._within = None

    async def read(self, job: Callable[Concatenate[sqlite3.Cursor, P], T], *args: P.args, **kwargs: P.kwargs) -> T:
        """Do something in a transaction of its own that only reads, and keeps no writer waiting."""
        async with self._own("BEGIN") as conn:
            return await self._in(conn, job, *args, **kwargs)

    async def write(self, job: Callable[Concatenate[sqlite3.Cursor, P], T], *args: P.args, **kwargs: P.kwargs) -> T:
        """Do something in a transaction of its own."""
        async with self._own("BEGIN IMMEDIATE") as conn:
            return await self._in(conn, job, *args, **kwargs)

    def lend(self) -> AbstractAsyncContextManager[Any]:
        return Lending.transaction(self)

    def objection(self, function: Callable[..., Any]) -> str | None:
        return lending.objection(function) if self._lender is None else self._lender.objection(function)

    async def call(self, function: Callable[..., Any], argument: Any, tx: Any) -> Any:
        if isinstance(tx, Loan):
            return await _call_lent(function, argument, tx)
        tx.execute(f"SAVEPOINT {MARK}")
        try:
            result = await self._call(function, argument, tx)
        except BaseException as error:
            if not tx.in_transaction:
                raise _verdict(error) from error
            # A thread that was left behind may still be using the connection.
            if not isinstance(error, asyncio.CancelledError) and not _is_the_same(tx):
                raise UnfitHandler(ENDED) from error
            raise
        if not tx.in_transaction or not _is_the_same(tx):
            raise UnfitHandler(ENDED)
        return result

    def sever(self, tx: Any) -> None:
        tx.sever() if isinstance(tx, Loan) else tx.interrupt()

    def telling(self, tx: Any) -> AbstractContextManager[None]:
        return nullcontext() if isinstance(tx, Loan) else translated()

    async def _call(self, function: Callable[..., Any], argument: Any, tx: sqlite3.Connection) -> Any:
        if inspect.iscoroutinefunction(function):
            return await function(argument, tx)
        try:
            result = await asyncio.get_running_loop().run_in_executor(self._thread, _plainly, function, argument, tx)
        except asyncio.CancelledError:
            # Nobody can stop the thread, but what it is asking of SQLite right now ends.
            tx.interrupt()
            raise
        if lending.lazy(result):
            raise UnfitHandler(GENERATOR)
        return await result if inspect.isawaitable(result) else result

    async def close(self) -> None:
        """Close the connection and end the thread. A second call does nothing."""
        if self._lender is not None:
            await self._lender.close()
        await asyncio.to_thread(self._thread.shutdown)
        self._connection.close()

    def _now(self) -> float:
        return self.clock.now().timestamp()

    async def _in(
        self,
        conn: sqlite3.Connection | Loan,
        job: Callable[Concatenate[sqlite3.Cursor, P], T],
        *args: P.args,
        **kwargs: P.kwargs,
    ) -> T:
        if isinstance(conn, Loan):
            return cast(T, await conn.execute(lambda cursor: job(cursor, *args, **kwargs)))
        return await self._hop(lambda: run(conn, lambda cursor: job(cursor, *args, **kwargs)))

    async def _hop(self, job: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        return await asyncio.get_running_loop().run_in_executor(self._thread, lambda: job(*args, **kwargs))

    def _check(self, conn: sqlite3.Connection) -> None:
        """Refuse a database in which the last step of the migration was not taken."""
        try:
            with translated():
                found = conn.execute(self.INSTALLED).fetchone()[0]
            if not found:
                raise Misuse(f"the database has no {self.WHAT}, or half of one; run `outrider db migrate`")
        except BaseException:
            conn.close()
            raise


def run(conn: sqlite3.Connection, job: Callable[[sqlite3.Cursor], T]) -> T:
    """Do something with a cursor, whatever the connection's owner has set."""
    with _told():
        cursor = conn.cursor()
        # A handler may have set any row factory. The cursor must end with the job, on this thread.
        cursor.row_factory = None
        try:
            return job(cursor)
        finally:
            cursor.close()


def _attached(cursor: sqlite3.Cursor) -> list[Any]:
    """Return the databases that a connection has open: number, name and file; the first is its own."""
    return cursor.execute("PRAGMA database_list").fetchall()


async def _call_lent(function: Callable[..., Any], argument: Any, loan: Loan) -> Any:
    await loan.execute(_mark)
    try:
        result = await loan.call(function, argument)
    except UnfitHandler:
        raise
    except Exception as error:
        if not await loan.execute(_is_the_same):
            raise UnfitHandler(ENDED) from error
        raise
    if not await loan.execute(_is_the_same):
        raise UnfitHandler(ENDED)
    return result


def _mark(cursor: sqlite3.Cursor) -> None:
    cursor.execute(f"SAVEPOINT {MARK}")


def _plainly(function: Callable[..., Any], argument: Any, tx: sqlite3.Connection) -> Any:
    """Run a plain function, on the connection's thread."""
    try:
        return function(argument, tx)
    except StopIteration as error:
        # No future can carry one, and whoever waits for it would wait for ever.
        raise RuntimeError("the handler raised StopIteration") from error


def _is_the_same(tx: sqlite3.Connection | sqlite3.Cursor) -> bool:
    """Tell whether the transaction is still the one that was lent: another one has not our mark."""
    try:
        tx.execute(f"RELEASE {MARK}")
    except sqlite3.OperationalError:
        return False
    return True


def _verdict(error: BaseException) -> OutriderError:
    """Tell what ended a transaction under a handler that failed: SQLite does so by itself if the disk is full, say."""
    trouble = translation(error) if isinstance(error, sqlite3.Error) else None
    return TransactionLost(str(trouble)) if isinstance(trouble, Transient) else UnfitHandler(ENDED)


def _begin(conn: sqlite3.Connection, begin: str) -> None:
    """Begin, with the connection as the library makes it, whatever the handler before has set."""
    with _told():
        _end(conn)
        conn.row_factory, conn.text_factory, conn.isolation_level = None, str, None
        conn.execute(begin)


def _commit(conn: sqlite3.Connection) -> None:
    with _told():
        conn.execute("COMMIT")


def _end(conn: sqlite3.Connection) -> None:
    if conn.in_transaction:
        conn.rollback()


@contextmanager
def _told() -> Iterator[None]:
    """Turn every error of SQLite into one of ours: what is left is what a handler did to the connection or the data."""
    try:
        with translated():
            yield
    except sqlite3.Error as error:
        raise Permanent(f"SQLite: {type(error).__name__}: {error}") from error
