"""The interface of every driver module, and the driver of handler transactions.

A driver module has one function, `run(conn, operation, args, schema)`. It performs an operation in the caller's open
transaction: `stage`, `start_saga`, `deliver_messages`, `participant_enter` or `participant_save_reply`. The function
returns the result, or something to await if the connection is asynchronous; `detect` knows which.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any

from outrider.drivers.detect import driver, driver_of
from outrider.errors import OutriderError, Transient, UsageError
from outrider.handler_transactions import HandlerTransaction
from outrider.stores.postgres.statements import Rows, Statement

NOT_INSTALLED = frozenset({"42P01", "3F000"})
"""Undefined table, undefined schema."""


async def run(tx: HandlerTransaction, operation: str, args: tuple[Any, ...], schema: str) -> Any:
    """Perform an operation in a handler transaction, through the driver of its connection."""
    return await tx.through(driver(driver_of(tx.connection)).run, operation, args, schema)


def translating(execute: Callable[..., Rows], schema: str) -> Callable[[Statement], Rows]:
    """Return a function that executes a statement of PostgreSQL and translates errors.

    >>> translating(lambda sql, *args: [args], "outrider")(Statement("SELECT $1", (7,)))
    [(7,)]
    """

    def run_one(statement: Statement) -> Rows:
        try:
            return execute(statement.sql, *statement.args)
        except Exception as error:
            if (ours := translation(error, statement, schema)) is None:
                raise
            raise ours from error

    return run_one


def translating_async(execute: Callable[..., Awaitable[Rows]], schema: str) -> Callable[[Statement], Awaitable[Rows]]:
    """Return an asynchronous function that executes a statement of PostgreSQL and translates errors::

    execute = translating_async(conn.fetch, "outrider")
    """

    async def run_one(statement: Statement) -> Rows:
        try:
            return await execute(statement.sql, *statement.args)
        except Exception as error:
            if (ours := translation(error, statement, schema)) is None:
                raise
            raise ours from error

    return run_one


def translation(error: Exception, statement: Statement, schema: str) -> OutriderError | None:
    """Return Outrider's error for an error of the driver; None if the caller should see the original."""
    code: str = getattr(error, "sqlstate", None) or ""
    if code in NOT_INSTALLED:
        return UsageError(f"the outbox is not installed in schema {schema}; run: outrider db migrate")
    return Transient(statement.transient[code]) if code in statement.transient else None
