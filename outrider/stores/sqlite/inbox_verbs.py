"""A consumer's verbs on SQLite, inside a transaction that has the whole database locked."""

from __future__ import annotations

import sqlite3
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from typing import Any
from uuid import UUID

from outrider.delivery import Arrival, InboxStream
from outrider.inbox_store import Admitted, Cause, Entry, Overdue, Resumed, Standing, Waiting
from outrider.stores.inbox_rows import (
    Sheet,
    WaitingRow,
    check_receipts,
    delivery_of,
    failure_text,
    may_go,
    place_of,
    standing_of,
)
from outrider.stores.sqlite.rows import load

SQL = load("inbox.sql")

Facts = dict[str, Any]


def admit(cursor: sqlite3.Cursor, consumer: str, arrivals: Sequence[Arrival], *, gated: bool, now: float) -> Admitted:
    """Insert receipts, and read where streams stand."""
    fresh = frozenset(a.event_id for a in arrivals if _receive(cursor, consumer, a, now))
    numbered = {arrival.stream for arrival in arrivals if gated and arrival.sequence is not None}
    standings = dict.fromkeys(numbered, Standing())
    for stream in {arrival.stream for arrival in arrivals}:
        if known := _standing(cursor, consumer, stream):
            standings[stream] = known
    return Admitted(fresh, standings)


def resume(
    cursor: sqlite3.Cursor,
    consumer: str,
    stream: InboxStream,
    *,
    by_sequence: bool,
    limit: int,
    early: bool,
    now: float,
) -> Resumed | None:
    """Take the first waiting events of a stream that drains."""
    standing = _standing(cursor, consumer, stream)
    if standing is None or not may_go(standing.cause, early=early):
        return None
    facts = _named(consumer, stream)
    verb = "waiting_by_sequence" if by_sequence or standing.cause is Cause.EARLY else "waiting_in_turn"
    rows = cursor.execute(SQL[verb], {**facts, "limit": limit}).fetchall()
    if not rows:
        cursor.execute(SQL["forget" if standing.seen is None else "mend"], {**facts, "now": now})
        standing = Standing(standing.seen)
    waiting, fresh = [], set()
    for number, text, replayed, event_type, sequence, *columns in rows:
        event_id = UUID(text)
        waiting.append(Waiting(number, event_id, delivery_of(columns), bool(replayed)))
        receipt = {**facts, "event_id": text, "event_type": event_type, "sequence": sequence, "now": now}
        if cursor.execute(SQL["receive"], {**receipt, "waits": True}).rowcount:
            fresh.add(event_id)
    return Resumed(standing, waiting, frozenset(fresh))


def conclude(
    cursor: sqlite3.Cursor,
    consumer: str,
    entries: Sequence[Entry],
    standings: Mapping[InboxStream, Standing],
    now: float,
) -> dict[UUID, int]:
    """Write what becomes of arrivals, and where their streams stand; return the ids of dead letters."""
    sheet, dead_letters = Sheet.of(entries), {}
    for event_id, seconds in sheet.seconds.items():
        receipt = {"consumer": consumer, "event_id": str(event_id), "seconds": seconds}
        check_receipts(cursor.execute(SQL["finish"], receipt).rowcount, 1)
    for event_id in sheet.withdrawn:
        cursor.execute(SQL["withdraw"], {"consumer": consumer, "event_id": str(event_id)})
    for arrival in sheet.parked:
        facts = WaitingRow.of(arrival)._asdict()
        cursor.execute(SQL["park"], {**facts, "event_id": str(arrival.event_id), "consumer": consumer, "now": now})
    for arrival, buried in sheet.buried:
        why = {"reason": buried.reason, "failure": failure_text(buried.failure), "policy": buried.policy}
        event = {"consumer": consumer, "event_id": str(arrival.event_id), "now": now}
        [[dead_letters[arrival.event_id]]] = cursor.execute(SQL["bury"], {**event, **why, "attempts": buried.attempts})
    for event_id in [*sheet.left, *(arrival.event_id for arrival, _ in sheet.buried)]:
        cursor.execute(SQL["leave"], {"consumer": consumer, "event_id": str(event_id)})
    for stream, at in standings.items():
        verb = "forget" if at == Standing() else "stand"
        cursor.execute(SQL[verb], {**_named(consumer, stream), **at._asdict(), "now": now})
    return dead_letters


def draining(cursor: sqlite3.Cursor, consumer: str, cause: Cause, limit: int) -> list[InboxStream]:
    """List streams whose events wait for a cause."""
    facts = {"consumer": consumer, "cause": cause, "limit": limit}
    return [InboxStream(*row) for row in cursor.execute(SQL["draining"], facts)]


def overdue(cursor: sqlite3.Cursor, consumer: str, before: float, limit: int) -> list[Overdue]:
    """List streams that have waited longer for a predecessor."""
    rows = cursor.execute(SQL["overdue"], {"consumer": consumer, "before": before, "limit": limit})
    return [Overdue(InboxStream(*row[:3]), row[3], row[4], datetime.fromtimestamp(row[5], UTC)) for row in rows]


def change(cursor: sqlite3.Cursor, verb: str, facts: Facts) -> int:
    """Run one statement; return how many rows it changed."""
    return cursor.execute(SQL[verb], facts).rowcount


def installed(cursor: sqlite3.Cursor) -> bool:
    """Tell whether there is an inbox."""
    return bool(cursor.execute(SQL["installed"]).fetchone()[0])


def _receive(cursor: sqlite3.Cursor, consumer: str, arrival: Arrival, now: float) -> bool:
    event = {"event_id": str(arrival.event_id), "event_type": arrival.event_type, "sequence": arrival.sequence}
    receipt = {**_named(consumer, arrival.stream), **event, "now": now, "waits": False}
    return cursor.execute(SQL["receive"], receipt).rowcount == 1


def _standing(cursor: sqlite3.Cursor, consumer: str, stream: InboxStream) -> Standing | None:
    row = cursor.execute(SQL["standing"], _named(consumer, stream)).fetchone()
    return standing_of(*row) if row else None


def _named(consumer: str, stream: InboxStream) -> Facts:
    topic, key, band = place_of(stream)
    return {"consumer": consumer, "topic": topic, "key": key, "band": band}
