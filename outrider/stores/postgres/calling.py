"""Calling a handler with asyncpg: what it must be, and what has become of its transaction when it is done.

A handler that does not wait for the driver would lose its effects, and its receipt would say that they are there.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any

import asyncpg

from outrider.errors import Permanent, TransactionLost, UnfitHandler
from outrider.stores import lending
from outrider.stores.lending import ENDED, promises_to_wait
from outrider.stores.postgres.database import translated

NOT_ASYNCHRONOUS = (
    "is a plain function, and nobody would wait for what it asks of PostgreSQL; write it as `async def`, with `await` "
    "before every call of the transaction"
)
SAVEPOINT = "a statement that may fail needs a savepoint of its own: async with tx.transaction(): ..."
BUSY = "wait for every query before the handler returns"
ANSWER_SECONDS = 5.0
_FAREWELLS = (asyncpg.PostgresConnectionError, asyncpg.AdminShutdownError, asyncpg.CrashShutdownError)


def objection(handler: Callable[..., Any]) -> str | None:
    """Say why a handler cannot work with asyncpg; None if it can, or if only a call can tell, as with a lambda.

    >>> def bill(event, tx): tx.execute("SELECT 1")
    >>> objection(bill)[:19]
    'is a plain function'
    """
    if generator := lending.objection(handler):
        return generator
    return None if promises_to_wait(handler) else NOT_ASYNCHRONOUS


async def call(handler: Callable[..., Any], argument: Any, tx: Any) -> Any:
    """Run a handler to its end, and make sure that the transaction is still there; return what it returns."""
    try:
        result = handler(argument, tx)
        if not inspect.isawaitable(result):
            raise UnfitHandler(lending.GENERATOR if lending.lazy(result) else NOT_ASYNCHRONOUS)
        return await result
    except Exception as error:
        if await _lost(tx, error):
            raise TransactionLost(f"the connection was lost under a handler ({error})") from error
        if isinstance(error, asyncpg.InFailedSQLTransactionError):
            error.add_note(SAVEPOINT)
        raise
    finally:
        if not closed(tx) and not tx.is_in_transaction():
            raise UnfitHandler(ENDED)


@contextmanager
def told(where: str, tx: Any) -> Iterator[None]:
    """Turn errors of our own steps around a handler into ours, with those told apart that only a handler can cause."""
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


def closed(tx: Any) -> bool:
    """Tell whether a connection is gone. One that the pool has taken back cannot even be asked."""
    try:
        return bool(tx.is_closed())
    except asyncpg.InterfaceError:
        return True


async def _lost(tx: Any, error: Exception) -> bool:
    """Tell whether a handler failed because its connection is gone. The driver may hear of that a moment later."""
    if isinstance(error, _FAREWELLS) and not closed(tx):
        with suppress(asyncpg.PostgresError, asyncpg.InterfaceError, OSError, TimeoutError):
            await tx.execute("SELECT 1", timeout=ANSWER_SECONDS)
    return closed(tx)
