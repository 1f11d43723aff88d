"""Staging, and what sagas need, through the caller's asyncpg connection."""

from __future__ import annotations

from typing import Any

import asyncpg

from outrider.drivers.pump import pump_async
from outrider.drivers.verbs import Verbs
from outrider.errors import Misuse, NotInTransaction
from outrider.stores.postgres.statements import SCRIPTS

NO_TRANSACTION = (
    "this connection is not in a transaction, so event or saga could not share your change's fate; "
    "stage inside `async with conn.transaction():`"
)


def _perform(conn: Any, verb: str, args: tuple[Any, ...], schema: str) -> Any:
    _check(conn)
    return pump_async(SCRIPTS[verb](schema, *args), conn.fetch, schema)


def _check(conn: Any) -> None:
    try:
        closed, begun = conn.is_closed(), conn.is_in_transaction()
    except asyncpg.InterfaceError as error:
        raise Misuse(f"this connection is no longer yours ({error}); take another and begin again") from error
    if closed:
        raise Misuse("this connection is closed, and its transaction with it; take another and begin again")
    if not begun:
        raise NotInTransaction(NO_TRANSACTION)


_verbs = Verbs(_perform)
stage, start_saga, post_mail = _verbs.stage, _verbs.start_saga, _verbs.post_mail
barrier_enter, barrier_keep = _verbs.barrier_enter, _verbs.barrier_keep
