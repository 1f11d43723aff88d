"""Staging and saga operations through the caller's asyncpg connection."""

from __future__ import annotations

from typing import Any

import asyncpg

from outrider.drivers.base import translating_async
from outrider.errors import NotInTransaction, UsageError
from outrider.stores.postgres.statements import OPERATIONS
from outrider.stores.statements import run_statements_async

NO_TRANSACTION = (
    "this connection is not in a transaction, so event or saga could not share your change's fate; "
    "stage inside `async with conn.transaction():`"
)


def run(conn: Any, operation: str, args: tuple[Any, ...], schema: str) -> Any:
    """Run an operation in the open transaction of the caller."""
    _check(conn)
    return run_statements_async(OPERATIONS[operation](schema, *args), translating_async(conn.fetch, schema))


def _check(conn: Any) -> None:
    try:
        closed, has_begun = conn.is_closed(), conn.is_in_transaction()
    except asyncpg.InterfaceError as error:
        raise UsageError(f"this connection is no longer yours ({error}); take another and begin again") from error
    if closed:
        raise UsageError("this connection is closed, and its transaction with it; take another and begin again")
    if not has_begun:
        raise NotInTransaction(NO_TRANSACTION)
