"""The interpreter of sans-I/O scripts.

A script is a generator that yields statements and receives their results. A script knows no driver and no event loop.
Staging, the installer and the operations on MongoDB are written once as scripts and run through every driver.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Generator
from typing import Any, TypeVar

S = TypeVar("S")
T = TypeVar("T")


def run_statements(script: Generator[S, Any, T], execute: Callable[[S], Any]) -> T:
    """Run a script to its end and return its result; `execute` takes a statement and returns the rows.

    >>> def script():
    ...     [[value]] = yield "SELECT 7"
    ...     return value
    >>> run_statements(script(), lambda text: [[7]])
    7
    """
    try:
        statement = next(script)
        while True:
            statement = script.send(execute(statement))
    except StopIteration as end:
        result: T = end.value
        return result


async def run_statements_async(script: Generator[S, Any, T], execute: Callable[[S], Awaitable[Any]]) -> T:
    """Run a script whose statements are awaited::

    await run_statements_async(installer.install(version, lanes), conn.fetch)
    """
    try:
        statement = next(script)
        while True:
            statement = script.send(await execute(statement))
    except StopIteration as end:
        result: T = end.value
        return result
