"""Staging and saga operations through the standard library's sqlite3 or through aiosqlite.

With aiosqlite, each operation is a single hop to the thread of the connection, instead of one hop per statement.
aiosqlite has no public way to run a function on its thread: `Connection._execute` is the base of all its public methods
since its first release.
"""

from __future__ import annotations

import sqlite3
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from outrider.clock import Clock, SystemClock
from outrider.errors import NotInTransaction, UsageError
from outrider.outbox.model import OptimisticClaim, StagedRow, StageRequest
from outrider.saga.model import NewSaga, NewSagaMessage, ParticipantEntry, Phase
from outrider.stores.sqlite import saga, staging
from outrider.stores.sqlite.handler_transactions import run as run_job

CLOSED = "this connection is not open; use: async with aiosqlite.connect(path) as conn: ..."


def run(conn: Any, operation: str, args: tuple[Any, ...], schema: str) -> Any:
    """Run an operation in the open transaction of the caller; SQLite has no schemas."""
    if isinstance(conn, sqlite3.Connection):
        return OPERATIONS[operation](conn, *args)
    return _run_on_thread(conn, operation, args)


async def _run_on_thread(conn: Any, operation: str, args: tuple[Any, ...]) -> Any:
    try:
        raw = conn._conn
    except ValueError as error:
        raise UsageError(CLOSED) from error
    return await conn._execute(OPERATIONS[operation], raw, *args)


def stage(
    conn: sqlite3.Connection,
    request: StageRequest,
    claim: OptimisticClaim | None,
    *,
    clock: Clock | None = None,
) -> list[StagedRow]:
    """Insert events in the connection's open transaction; the caller commits.

    The settings of the connection (row factory, text factory, isolation) are neither used nor changed. Tests may pass a
    clock.
    """
    _in_transaction(conn)
    return staging.stage(conn, request, claim, (clock or SystemClock()).now())


def start_saga(conn: sqlite3.Connection, new: NewSaga, *, clock: Clock | None = None) -> bool:
    """Start a saga in the connection's open transaction; return False if the saga exists already::

    with conn:
        conn.execute("BEGIN IMMEDIATE")
        start_saga(conn, NewSaga(saga_id, "order", 1, "A-7", b"{}"))
    """
    _in_transaction(conn, "the saga")
    return run_job(conn, lambda cursor: saga.start(cursor, new, _seconds(clock)))


def deliver_messages(
    conn: sqlite3.Connection, messages: Sequence[NewSagaMessage], *, clock: Clock | None = None
) -> int:
    """Deliver messages to sagas in the connection's open transaction; return how many were new::

    deliver_messages(conn, [NewSagaMessage(saga_id, MessageKind.REPLY, "stock.reserved", key, b"{}", event_id)])
    """
    _in_transaction(conn)
    return run_job(conn, lambda cursor: saga.deliver(cursor, messages, _seconds(clock)))


def participant_enter(
    conn: sqlite3.Connection, participant: str, key: str, phase: Phase, *, clock: Clock | None = None
) -> ParticipantEntry:
    """Record a command of a participant, or return the recorded outcome of an earlier delivery::

    entered = participant_enter(conn, "stock", command.headers["saga_key"], Phase.ACTION)
    """
    _in_transaction(conn)
    return run_job(conn, lambda cursor: saga.enter(cursor, participant, key, phase, _seconds(clock)))


def participant_save_reply(conn: sqlite3.Connection, participant: str, key: str, phase: Phase, reply: bytes) -> None:
    """Store the reply to a command, as JSON::

    participant_save_reply(conn, "stock", key, Phase.ACTION, b'{"reserved": 3}')
    """
    _in_transaction(conn)
    run_job(conn, lambda cursor: saga.save_reply(cursor, participant, key, phase, reply))


def _seconds(clock: Clock | None) -> float:
    return (clock or SystemClock()).now().timestamp()


def _in_transaction(conn: sqlite3.Connection, what: str = "the event") -> None:
    try:
        has_begun = conn.in_transaction
    except sqlite3.ProgrammingError as error:
        raise UsageError(f"this connection cannot be used ({error}); take another and begin again") from error
    if not has_begun:
        raise NotInTransaction(
            f"the connection has no open transaction, so {what} would not commit together with anything; "
            'execute "BEGIN IMMEDIATE" first, or write your business rows first'
        )


OPERATIONS: Mapping[str, Callable[..., Any]] = {
    "stage": stage,
    "start_saga": start_saga,
    "deliver_messages": deliver_messages,
    "participant_enter": participant_enter,
    "participant_save_reply": participant_save_reply,
}
