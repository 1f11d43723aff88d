"""Staging, and what sagas need, through the standard library's sqlite3."""

from __future__ import annotations

import sqlite3
from collections.abc import Sequence

from outrider.clock import Clock, SystemClock
from outrider.errors import Misuse, NotInTransaction
from outrider.saga_store import Entered, NewMail, NewSaga, Phase
from outrider.store import Drafts, Hold, Placed
from outrider.stores.sqlite import saga_verbs, staging
from outrider.stores.sqlite.lending import run


def stage(
    conn: sqlite3.Connection, drafts: Drafts, hold: Hold | None, schema: str = "", *, clock: Clock | None = None
) -> list[Placed]:
    """Place drafts in the connection's open transaction; the caller commits.

    The connection's own settings (row factory, text factory, isolation) are neither relied on nor changed.
    SQLite has no schemas, so that argument means nothing here; the clock is for tests that own it.
    """
    _in_transaction(conn)
    return staging.stage(conn, drafts, hold, (clock or SystemClock()).now())


def start_saga(conn: sqlite3.Connection, new: NewSaga, schema: str = "", *, clock: Clock | None = None) -> bool:
    """Start a saga in the connection's open transaction; False if it is there already::

    with conn:
        conn.execute("BEGIN IMMEDIATE")
        start_saga(conn, NewSaga(saga_id, "order", 1, "A-7", b"{}"))
    """
    _in_transaction(conn, "the saga")
    return run(conn, lambda cursor: saga_verbs.start(cursor, new, _seconds(clock)))


def post_mail(
    conn: sqlite3.Connection, mail: Sequence[NewMail], schema: str = "", *, clock: Clock | None = None
) -> int:
    """Post mail to sagas in the connection's open transaction; return how many were new::

    post_mail(conn, [NewMail(saga_id, MailKind.REPLY, "stock.reserved", key, b"{}", event_id)])
    """
    _in_transaction(conn)
    return run(conn, lambda cursor: saga_verbs.post(cursor, mail, _seconds(clock)))


def barrier_enter(
    conn: sqlite3.Connection, participant: str, key: str, phase: Phase, schema: str = "", *, clock: Clock | None = None
) -> Entered:
    """Let a command through a participant's barrier, or say what became of it before::

    entered = barrier_enter(conn, "stock", command.headers["saga_key"], Phase.ACTION)
    """
    _in_transaction(conn)
    return run(conn, lambda cursor: saga_verbs.enter(cursor, participant, key, phase, _seconds(clock)))


def barrier_keep(  # noqa: PLR0917 - every driver takes the same, in the same order
    conn: sqlite3.Connection, participant: str, key: str, phase: Phase, reply: bytes, schema: str = ""
) -> None:
    """Keep what was answered to a command, as JSON::

    barrier_keep(conn, "stock", key, Phase.ACTION, b'{"reserved": 3}')
    """
    _in_transaction(conn)
    run(conn, lambda cursor: saga_verbs.keep(cursor, participant, key, phase, reply))


def _seconds(clock: Clock | None) -> float:
    return (clock or SystemClock()).now().timestamp()


def _in_transaction(conn: sqlite3.Connection, what: str = "the event") -> None:
    try:
        begun = conn.in_transaction
    except sqlite3.ProgrammingError as error:
        raise Misuse(f"this connection cannot be used ({error}); take another and begin again") from error
    if not begun:
        raise NotInTransaction(
            f"the connection has no open transaction, so {what} would not commit together with anything; "
            'execute "BEGIN IMMEDIATE" first, or write your business rows first'
        )
