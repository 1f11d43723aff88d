"""Staging through the standard library's sqlite3."""

from __future__ import annotations

import sqlite3

from outrider.clock import Clock, SystemClock
from outrider.errors import NotInTransaction
from outrider.store import Drafts, Hold, Placed
from outrider.stores.sqlite import staging


def stage(
    conn: sqlite3.Connection, drafts: Drafts, hold: Hold | None, schema: str = "", *, clock: Clock | None = None
) -> list[Placed]:
    """Place drafts in the connection's open transaction; the caller commits.

    The connection's own settings (row factory, text factory, isolation) are neither relied on nor changed.
    SQLite has no schemas, so that argument means nothing here; the clock is for tests that own it.
    """
    if not conn.in_transaction:
        raise NotInTransaction(
            "the connection has no open transaction, so the event would not commit together with anything; "
            'execute "BEGIN IMMEDIATE" first, or write your business rows first'
        )
    return staging.stage(conn, drafts, hold, (clock or SystemClock()).now())
