"""The inbox in a SQLite file: what a consumer needs.

One connection and one transaction at a time: whoever is in it has everything locked. A handler that is a plain function
runs on the connection's own thread, one that is a coroutine on the event loop, with the same connection; that is safe
because nobody else touches it until the transaction ends.
"""

from __future__ import annotations

import asyncio
import inspect
import sqlite3
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractAsyncContextManager, asynccontextmanager, contextmanager
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any, Concatenate, ParamSpec, TypeVar
from uuid import UUID

from outrider.clock import Clock, SystemClock
from outrider.delivery import Arrival, InboxStream
from outrider.errors import Misuse, OutriderError, Permanent, Transient
from outrider.inbox_store import (
    Admitted,
    Cause,
    Entry,
    InboxDesk,
    InboxPruned,
    Overdue,
    Resumed,
    Standing,
    TransactionLost,
    UnfitHandler,
)
from outrider.stores.inbox_rows import ENDED
from outrider.stores.sqlite import inbox_verbs
from outrider.stores.sqlite.database import open_existing, translated, translation
from outrider.stores.sqlite.inbox_desk import SqliteInboxDesk
from outrider.stores.sqlite.inbox_verbs import SQL

ADOPT_MAX = 100
PRUNE_MAX = 1_000

P = ParamSpec("P")
T = TypeVar("T")


class SqliteInbox:
    """Receipts in a SQLite file that `outrider db migrate` has prepared, beside the data that handlers change.

    Handlers get a `sqlite3.Connection` in an open transaction. Time is the host's, given by the clock::

        inbox_store = SqliteInbox("shop.db")
    """

    def __init__(self, path: str | Path, *, clock: Clock | None = None) -> None:
        self.clock = clock or SystemClock()
        self._connection = open_existing(Path(path))
        _check(self._connection)
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="outrider-inbox")
        self._turn = asyncio.Lock()
        self._within: asyncio.Task[Any] | None = None
        self.desk: InboxDesk = SqliteInboxDesk(self.read, self.write, self.clock)

    def transaction(self) -> AbstractAsyncContextManager[sqlite3.Connection]:
        return self._transaction("BEGIN IMMEDIATE")

    @asynccontextmanager
    async def _transaction(self, begin: str) -> AsyncIterator[sqlite3.Connection]:
        task = asyncio.current_task()
        if self._within is not None and self._within is task:
            raise Misuse("a handler of this inbox cannot open another transaction of it; use the one that it was given")
        async with self._turn:
            self._within = task
            try:
                await self._hop(_begin, self._connection, begin)
                yield self._connection
                await self._hop(_commit, self._connection)
            except BaseException:
                # Also after a hop that was cancelled: its job may have run all the same. This one comes after it.
                await asyncio.shield(self._hop(_end, self._connection))
                raise
            finally:
                self._within = None

    async def read(self, job: Callable[Concatenate[sqlite3.Cursor, P], T], *args: P.args, **kwargs: P.kwargs) -> T:
        """Do something in a transaction of its own that only reads, and keeps no writer waiting."""
        async with self._transaction("BEGIN") as conn:
            return await self._in(conn, job, *args, **kwargs)

    async def write(self, job: Callable[Concatenate[sqlite3.Cursor, P], T], *args: P.args, **kwargs: P.kwargs) -> T:
        """Do something in a transaction of its own."""
        async with self.transaction() as conn:
            return await self._in(conn, job, *args, **kwargs)

    def objection(self, handler: Callable[..., Any]) -> str | None:
        return None

    async def call(self, handler: Callable[..., Any], argument: Any, tx: sqlite3.Connection) -> None:
        try:
            await self._call(handler, argument, tx)
        except BaseException as error:
            if not tx.in_transaction:
                raise _verdict(error) from error
            raise
        if not tx.in_transaction:
            raise UnfitHandler(ENDED)

    async def _call(self, handler: Callable[..., Any], argument: Any, tx: sqlite3.Connection) -> None:
        if inspect.iscoroutinefunction(handler):
            await handler(argument, tx)
            return
        result = await asyncio.get_running_loop().run_in_executor(self._thread, _plainly, handler, argument, tx)
        if inspect.isawaitable(result):
            await result

    async def answers(self) -> bool:
        try:
            await self.read(inbox_verbs.installed)
        except OutriderError:
            return False
        return True

    async def admit(
        self, tx: sqlite3.Connection, consumer: str, arrivals: Sequence[Arrival], *, gated: bool
    ) -> Admitted:
        return await self._in(tx, inbox_verbs.admit, consumer, arrivals, gated=gated, now=self._now())

    async def conclude(
        self,
        tx: sqlite3.Connection,
        consumer: str,
        entries: Sequence[Entry],
        standings: Mapping[InboxStream, Standing],
    ) -> Mapping[UUID, int]:
        return await self._in(tx, inbox_verbs.conclude, consumer, entries, standings, self._now())

    async def draining(self, consumer: str, limit: int, *, cause: Cause = Cause.DRAINING) -> list[InboxStream]:
        return await self.read(inbox_verbs.draining, consumer, cause, limit)

    async def resume(
        self,
        tx: sqlite3.Connection,
        consumer: str,
        stream: InboxStream,
        *,
        by_sequence: bool,
        limit: int,
        early: bool = False,
    ) -> Resumed | None:
        resume = partial(inbox_verbs.resume, by_sequence=by_sequence, limit=limit, early=early, now=self._now())
        return await self._in(tx, resume, consumer, stream)

    async def overdue(self, consumer: str, seconds: float, limit: int) -> list[Overdue]:
        return await self.read(inbox_verbs.overdue, consumer, self._now() - seconds, limit)

    async def prune(self, consumer: str, *, receipt_days: float, dead_letter_days: float) -> InboxPruned:
        """Remove what is older; also find again what should never have been lost from sight."""
        facts = {"consumer": consumer, "now": self._now(), "limit": ADOPT_MAX}
        await self.write(inbox_verbs.change, "release_holds", facts)
        await self.write(inbox_verbs.change, "adopt_orphans", facts)
        dead_letters = await self._in_batches("prune_dead_letters", consumer, dead_letter_days)
        return InboxPruned(await self._in_batches("prune_receipts", consumer, receipt_days), dead_letters)

    async def close(self) -> None:
        """Close the connection and end the thread. A second call does nothing."""
        await asyncio.to_thread(self._thread.shutdown)
        self._connection.close()

    def _now(self) -> float:
        return self.clock.now().timestamp()

    async def _in(
        self,
        conn: sqlite3.Connection,
        job: Callable[Concatenate[sqlite3.Cursor, P], T],
        *args: P.args,
        **kwargs: P.kwargs,
    ) -> T:
        return await self._hop(lambda: _run(conn, lambda cursor: job(cursor, *args, **kwargs)))

    async def _hop(self, job: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        return await asyncio.get_running_loop().run_in_executor(self._thread, lambda: job(*args, **kwargs))

    async def _in_batches(self, verb: str, consumer: str, days: float) -> int:
        before = (self.clock.now() - timedelta(days=days)).timestamp()
        facts = {"consumer": consumer, "before": before, "limit": PRUNE_MAX}
        total, removed = 0, PRUNE_MAX
        while removed == PRUNE_MAX:
            removed = await self.write(inbox_verbs.change, verb, facts)
            total += removed
        return total


def _run(conn: sqlite3.Connection, job: Callable[[sqlite3.Cursor], T]) -> T:
    with _told():
        cursor = conn.cursor()
        # A handler may have set any row factory. The cursor must end with the job, on this thread.
        cursor.row_factory = None
        try:
            return job(cursor)
        finally:
            cursor.close()


def _plainly(handler: Callable[..., Any], argument: Any, tx: sqlite3.Connection) -> Any:
    """Run a handler that is a plain function, on the connection's thread."""
    try:
        return handler(argument, tx)
    except StopIteration as error:
        # No future can carry one, and whoever waits for it would wait for ever.
        raise RuntimeError("the handler raised StopIteration") from error


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


def _check(conn: sqlite3.Connection) -> None:
    """Refuse a database without an inbox: the last step of its migration must be there."""
    try:
        with translated():
            found = conn.execute(SQL["installed"]).fetchone()[0]
        if not found:
            raise Misuse("the database has no inbox, or half of one; run `outrider db migrate`")
    except BaseException:
        conn.close()
        raise
