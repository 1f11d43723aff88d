"""psycopg's connections, asynchronous or not: from a pool of psycopg_pool, or made by a function.

The transaction is a block of psycopg's own, inside which it lets nobody commit or roll back.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import psycopg

from outrider.drivers.lending.awaited import AwaitedLender
from outrider.drivers.lending.below import AsyncPsycopg, Psycopg
from outrider.drivers.lending.threaded import ThreadedLender
from outrider.drivers.lending.work import Work
from outrider.errors import Misuse

LENDABLE = 10
"""Transactions at a time, where there is no pool, or one without a limit."""

READ_COMMITTED = psycopg.IsolationLevel.READ_COMMITTED
FORBIDDEN = "forbidden within a Transaction context"


class _Undo(Exception):
    """Tells a block to roll back."""


class PsycopgWork(Work):
    """A transaction of a connection."""

    SAVEPOINT = "with conn.transaction(): ..."

    def __init__(self, conn: Any, give_back: Callable[[Any], Any]) -> None:
        self.given, self.below, self._give_back = conn, Psycopg(conn), give_back
        self._level = conn.isolation_level
        if self._level is not READ_COMMITTED:
            conn.isolation_level = READ_COMMITTED
        self._block = conn.transaction()
        self._block.__enter__()

    @property
    def gone(self) -> bool:
        # One that was lost is broken.
        return bool(self.given.closed and not self.given.broken)

    def begin(self) -> None:
        """It has begun."""

    def settle(self) -> None:
        """There is nothing that it has not written yet."""

    def commit(self) -> None:
        self._block.__exit__(None, None, None)

    def rollback(self) -> None:
        self._block.__exit__(_Undo, _Undo(), None)

    def release(self) -> None:
        with suppress(psycopg.Error):
            if self._level is not READ_COMMITTED:
                self.given.isolation_level = self._level
        self._give_back(self.given)

    def forbidden(self, error: BaseException) -> bool:
        return isinstance(error, psycopg.ProgrammingError) and FORBIDDEN in str(error)


class AwaitedPsycopgWork(PsycopgWork):
    """The same, awaited. Made by `begun`, because beginning is awaited too."""

    SAVEPOINT = "async with conn.transaction(): ..."

    def __init__(self, conn: Any, give_back: Callable[[Any], Any]) -> None:
        self.given, self.below, self._give_back = conn, AsyncPsycopg(conn), give_back
        self._level = conn.isolation_level

    async def begun(self) -> Work:
        """Begin, and return this."""
        if self._level is not READ_COMMITTED:
            await self.given.set_isolation_level(READ_COMMITTED)
        self._block = self.given.transaction()
        await self._block.__aenter__()
        return self

    async def begin(self) -> None:  # type: ignore[override]
        """It has begun."""

    async def settle(self) -> None:  # type: ignore[override]
        """There is nothing that it has not written yet."""

    async def commit(self) -> None:  # type: ignore[override]
        await self._block.__aexit__(None, None, None)

    async def rollback(self) -> None:  # type: ignore[override]
        await self._block.__aexit__(_Undo, _Undo(), None)

    async def release(self) -> None:  # type: ignore[override]
        with suppress(psycopg.Error):
            if self._level is not READ_COMMITTED:
                await self.given.set_isolation_level(self._level)
        await self._give_back(self.given)


class PsycopgPool(ThreadedLender):
    """A `ConnectionPool`, or a plain function that returns a connection. A pool that nobody has opened is opened."""

    vendor = "postgresql"

    def __init__(self, source: Any) -> None:
        self._pool = None if callable(source) else source
        self._connect = source if callable(source) else source.getconn
        self._opened = False
        super().__init__(getattr(self._pool, "max_size", 0) or LENDABLE)

    def open(self) -> Work:
        if self._pool is not None and self._pool.closed:
            self._pool.open()
            self._opened = True
        conn = self._connect()
        if not isinstance(conn, psycopg.Connection):
            raise _no_connection(conn)
        give_back = self._pool.putconn if self._pool is not None else psycopg.Connection.close
        try:
            return PsycopgWork(conn, give_back)
        except BaseException:
            give_back(conn)
            raise

    async def close(self) -> None:
        await super().close()
        if self._opened and self._pool is not None:
            self._pool.close()


class AwaitedPsycopgPool(AwaitedLender):
    """An `AsyncConnectionPool`, or an asynchronous function that returns a connection."""

    vendor = "postgresql"

    def __init__(self, source: Any) -> None:
        self._pool = None if callable(source) else source
        self._connect = source if callable(source) else source.getconn
        self._opened = False
        super().__init__(getattr(self._pool, "max_size", 0) or LENDABLE)

    async def open(self) -> Work:
        if self._pool is not None and self._pool.closed:
            await self._pool.open()
            self._opened = True
        conn = await self._connect()
        if not isinstance(conn, psycopg.AsyncConnection):
            raise _no_connection(conn)
        give_back = self._pool.putconn if self._pool is not None else psycopg.AsyncConnection.close
        try:
            return await AwaitedPsycopgWork(conn, give_back).begun()
        except BaseException:
            await give_back(conn)
            raise

    async def close(self) -> None:
        if self._opened and self._pool is not None:
            await self._pool.close()


def _no_connection(found: Any) -> Misuse:
    if inspect.iscoroutine(found):
        found.close()
    return Misuse(
        f"the function given as `transactions` returned a {type(found).__name__}; let a plain function return a "
        "psycopg.Connection, and one with `async def` a psycopg.AsyncConnection"
    )
