"""Staging, and what sagas need, through the caller's psycopg connection, asynchronous or not.

A connection that is not in autocommit mode begins by itself with the first statement, which may be ours. The cursor is
our own, so the caller's row and cursor factories do not matter.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import psycopg
from psycopg.pq import TransactionStatus
from psycopg.rows import tuple_row

from outrider.drivers.pump import pump, pump_async
from outrider.drivers.verbs import Verbs
from outrider.errors import Misuse, NotInTransaction
from outrider.stores.postgres.statements import SCRIPTS, Rows, Script

NO_TRANSACTION = (
    "this connection is in autocommit mode and not in a transaction, so event or saga could not share your change's "
    "fate; stage inside `{block} conn.transaction():`"
)

_BEGUN = (TransactionStatus.INTRANS, TransactionStatus.INERROR)


def _perform(conn: Any, verb: str, args: tuple[Any, ...], schema: str) -> Any:
    if conn.closed:
        raise Misuse("this connection is closed, and its transaction with it; take another and begin again")
    # psycopg's own mark: a connection in its pool has None there, and one that never was in a pool has nothing.
    if getattr(conn, "_pool", conn) is None:
        raise Misuse("this connection was given back to its pool, and is no longer yours; take another and begin again")
    script = SCRIPTS[verb](schema, *args)
    if isinstance(conn, psycopg.AsyncConnection):
        return _pump_async(conn, script, schema)
    if _unclear(conn):
        with conn.pipeline():
            pass
    _check(conn, "with")
    with psycopg.RawCursor(conn, row_factory=tuple_row) as cursor:
        return pump(script, partial(_execute, cursor), schema)


async def _pump_async(conn: psycopg.AsyncConnection[Any], script: Script[Any], schema: str) -> Any:
    if _unclear(conn):
        async with conn.pipeline():
            pass
    _check(conn, "async with")
    async with psycopg.AsyncRawCursor(conn, row_factory=tuple_row) as cursor:
        return await pump_async(script, partial(_execute_async, cursor), schema)


def _execute(cursor: psycopg.RawCursor[Any], sql: str, *args: Any) -> Rows:
    # As bytes, since its types take only texts that stand in the source.
    cursor.execute(sql.encode(), args)
    return cursor.fetchall() if cursor.description else []


async def _execute_async(cursor: psycopg.AsyncRawCursor[Any], sql: str, *args: Any) -> Rows:
    await cursor.execute(sql.encode(), args)
    return await cursor.fetchall() if cursor.description else []


def _unclear(conn: psycopg.Connection[Any] | psycopg.AsyncConnection[Any]) -> bool:
    """Tell whether only a pipeline knows of a transaction. Leaving one inside it waits for the server's word."""
    return conn.autocommit and conn.info.transaction_status == TransactionStatus.ACTIVE


def _check(conn: psycopg.Connection[Any] | psycopg.AsyncConnection[Any], block: str) -> None:
    if conn.autocommit and conn.info.transaction_status not in _BEGUN:
        raise NotInTransaction(NO_TRANSACTION.format(block=block))


_verbs = Verbs(_perform)
stage, start_saga, post_mail = _verbs.stage, _verbs.start_saga, _verbs.post_mail
barrier_enter, barrier_keep = _verbs.barrier_enter, _verbs.barrier_keep
