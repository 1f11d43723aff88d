"""Running a script of statements through a connection, awaited or not, and telling PostgreSQL's errors by their code.

Drivers differ in their exceptions; all of them carry the SQLSTATE, so one table serves them.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import TypeVar

from outrider.errors import Misuse, OutriderError, Transient
from outrider.stores.postgres.statements import Rows, Script, Statement

T = TypeVar("T")

NOT_INSTALLED = frozenset({"42P01", "3F000"})
"""Undefined table, undefined schema."""

_NONE = Statement("", ())


def pump(script: Script[T], execute: Callable[..., Rows], schema: str) -> T:
    """Run a script to its end and return its result; `execute` takes the text of a statement and its parameters.

    >>> def script():
    ...     return len((yield Statement("SELECT $1", (7,))))
    >>> pump(script(), lambda sql, *args: [args], "outrider")
    1
    """
    statement = _NONE
    try:
        statement = next(script)
        while True:
            statement = script.send(execute(statement.sql, *statement.args))
    except StopIteration as end:
        result: T = end.value
        return result
    except Exception as error:
        if (ours := translation(error, statement, schema)) is None:
            raise
        raise ours from error


async def pump_async(script: Script[T], execute: Callable[..., Awaitable[Rows]], schema: str) -> T:
    """Do the same with statements that are awaited::

    await pump_async(statements.stage("outrider", drafts, None), conn.fetch, "outrider")
    """
    statement = _NONE
    try:
        statement = next(script)
        while True:
            statement = script.send(await execute(statement.sql, *statement.args))
    except StopIteration as end:
        result: T = end.value
        return result
    except Exception as error:
        if (ours := translation(error, statement, schema)) is None:
            raise
        raise ours from error


def translation(error: Exception, statement: Statement, schema: str) -> OutriderError | None:
    """Return our word for a driver's error; None if it is the caller's to see as it is."""
    code: str = getattr(error, "sqlstate", None) or ""
    if code in NOT_INSTALLED:
        return Misuse(f"the outbox is not installed in schema {schema}; run: outrider db migrate")
    return Transient(statement.transient[code]) if code in statement.transient else None
