"""Staging, and what sagas need, through the caller's aiosqlite connection: one hop to its thread for each call.

aiosqlite has no public way to run a function on a connection's thread. `Connection._execute` is what all its public
methods are made of, and has been since its beginning, so that is used; statement by statement would hop five times.
"""

from __future__ import annotations

from typing import Any

from outrider.drivers import sqlite3
from outrider.drivers.verbs import Verbs
from outrider.errors import Misuse

CLOSED = "this connection is not open; use: async with aiosqlite.connect(path) as conn: ..."


async def _perform(conn: Any, verb: str, args: tuple[Any, ...], schema: str) -> Any:
    try:
        raw = conn._conn
    except ValueError as error:
        raise Misuse(CLOSED) from error
    return await conn._execute(getattr(sqlite3, verb), raw, *args, schema)


_verbs = Verbs(_perform)
stage, start_saga, post_mail = _verbs.stage, _verbs.start_saga, _verbs.post_mail
barrier_enter, barrier_keep = _verbs.barrier_enter, _verbs.barrier_keep
