"""The same statements through asyncpg and sqlite3, so that the services run on both.

A program of yours has one database, and needs none of this: `await tx.execute(...)` or `tx.execute(...)` will do.
"""

from __future__ import annotations

import sqlite3
from typing import Any


async def execute(tx: Any, sql: str, *values: Any) -> None:
    """Run a statement of the service's own, in the transaction that it was given."""
    await fetch(tx, sql, *values)


async def fetch(tx: Any, sql: str, *values: Any) -> list[tuple[Any, ...]]:
    """Run a statement and return its rows."""
    if isinstance(tx, sqlite3.Connection):
        named = {str(number): value for number, value in enumerate(values, 1)}
        return [tuple(row) for row in tx.execute(sql, named).fetchall()]
    return [tuple(row) for row in await tx.fetch(sql, *values)]
