"""The transaction that a handler works in: a connection of the driver's own kind, and errors told apart.

What is raised inside the block passes through as it is: it is the handler's. What goes wrong at the beginning or at the
commit is the store's, and comes in our words.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from typing import Any

import asyncpg

from outrider.stores.postgres.calling import told
from outrider.stores.postgres.database import STATEMENT_SECONDS, Database, translated

_LOST = (asyncpg.PostgresError, asyncpg.InterfaceError, asyncpg.InternalClientError, OSError, TimeoutError)

CLOSE_SECONDS = 5.0


@asynccontextmanager
async def handling(database: Database) -> AsyncIterator[Any]:
    """Lend a connection with a transaction open; commit when the block ends, roll back when it raises."""
    with translated(database.where):
        conn = await database.pool.acquire()
    try:
        # Each statement must see what was committed before it began; a stricter level would look at an old moment.
        work = conn.transaction(isolation="read_committed")
        with translated(database.where):
            await _in_time(work.start(), conn)
        try:
            yield conn
        except BaseException:
            await _undo(work, conn)
            raise
        with told(database.where, conn):
            await _in_time(work.commit(), conn)
    finally:
        # What was decided is decided. A connection that cannot be given back has been thrown away by the pool.
        with suppress(*_LOST):
            await database.pool.release(conn)


async def _in_time(step: Any, conn: Any) -> None:
    """Begin or commit. If it is not known how that ended, nobody may go on with the connection."""
    try:
        async with asyncio.timeout(STATEMENT_SECONDS):
            await step
    except (TimeoutError, asyncio.CancelledError):
        conn.terminate()
        raise


async def _undo(work: Any, conn: Any) -> None:
    """Roll back. Where that is not possible, the server does it once the connection is gone; the block's own error is
    the one to be told.
    """
    try:
        async with asyncio.timeout(STATEMENT_SECONDS):
            await work.rollback()
    except _LOST:
        # Closing also calls off a query that a handler has left running; it would keep the receipt locked.
        with suppress(*_LOST):
            await conn.close(timeout=CLOSE_SECONDS)
    except BaseException:
        conn.terminate()
        raise
