"""The operation log in a SQLite file: the lines of commands, and the removal of old ones.

A trigger lets a line go once an anchor covers it.
"""

from __future__ import annotations

import sqlite3
from collections.abc import Iterable, Sequence
from datetime import UTC, datetime
from typing import Any
from uuid import UUID

from outrider.audit_chain import AuditAnchor
from outrider.clock import Clock
from outrider.operation_log import (
    LINES_MAX,
    OperationCriteria,
    OperationEnd,
    OperationHead,
    OperationLine,
    anchor_of_removed,
    lines_of,
    oldest_kept,
    removable,
    seal_operations,
)
from outrider.stores.sqlite.audit import add_anchor, last_anchor, to_anchor
from outrider.stores.sqlite.database import SqliteDatabase
from outrider.stores.sqlite.rows import load_operation_log, to_seconds

SQL = load_operation_log()

START = 0, -1
"""The place before all lines: numbers begin with 1."""

Connection = sqlite3.Connection | sqlite3.Cursor


def record(
    conn: Connection,
    now: datetime,
    actor: str,
    verb: str,
    events: Iterable[tuple[UUID | None, str | None]] = ((None, None),),
    **detail: Any,
) -> None:
    """Write the lines of a command, in its transaction."""
    head = OperationHead(*conn.execute(SQL["lock_head"]).fetchone())
    head, lines = seal_operations(head, lines_of(now, actor, verb, events, **detail))
    if lines:
        rows = [
            (to_seconds(line.at), *line[1:3], str(line.event_id or ""), *line[4:8], line.salt, line.hash)
            for line in lines
        ]
        conn.executemany(SQL["add_operations"], rows)
        conn.execute(SQL["move_head"], (head.lines, head.hash))


def remove_operations(conn: sqlite3.Connection, before: datetime, now: datetime) -> int:
    """Remove some of the oldest lines, and leave an anchor."""
    former = _anchor(conn)
    lines = removable(before, former, _lines(conn, "oldest_unchained", {"limit": LINES_MAX}))
    if not lines:
        first = {"line": former.lines if former else 0, "limit": LINES_MAX}
        lines = removable(before, former, _lines(conn, "oldest_operations", first))
    if not lines:
        return 0
    anchor = anchor_of_removed(last_anchor(conn.cursor()), former, lines, now)
    add_anchor(conn.cursor(), anchor)
    if lines[0].line is not None:
        return conn.execute(SQL["prune_operations"], {"line": anchor.lines}).rowcount
    removed = conn.execute(SQL["prune_unchained"], {"until": to_seconds(anchor.until)}).rowcount
    conn.execute(SQL["count_unchained"], {"removed": removed})
    return removed


class SqliteOperationLog:
    """The operation log of a file."""

    def __init__(self, database: SqliteDatabase, clock: Clock) -> None:
        self._database, self._clock = database, clock

    async def find(self, criteria: OperationCriteria) -> list[OperationLine]:
        event_id = str(criteria.event_id) if criteria.event_id else None
        facts = {**criteria._asdict(), "event_id": event_id, "since": to_seconds(criteria.since)}
        return await self._database.read(_lines, "operation_find", facts)

    async def record(self, actor: str, verb: str, **detail: Any) -> None:
        await self._database.write(lambda conn: record(conn, self._clock.now(), actor, verb, **detail))

    async def lines(self, after: tuple[int, Any] | None, limit: int) -> list[OperationLine]:
        return await self._database.read(_page, after, limit)

    async def end(self, after: tuple[int, Any] | None) -> OperationEnd:
        return await self._database.read(_end, after)

    async def last_anchor(self) -> AuditAnchor | None:
        return await self._database.read(_anchor)

    async def remove_lines(self, days: float) -> int:
        before = oldest_kept(self._clock.now(), days)
        oldest = await self._database.read(lambda conn: conn.execute(SQL["operation_age"]).fetchone()[0])
        total, removed = 0, oldest is not None and oldest < before.timestamp()
        while removed:
            removed = await self._database.write(remove_operations, before, self._clock.now())
            total += removed
        return total


def _anchor(conn: sqlite3.Connection) -> AuditAnchor | None:
    row = conn.execute(SQL["operation_anchor"]).fetchone()
    return to_anchor(row) if row else None


def _lines(conn: sqlite3.Connection, query: str, values: dict[str, Any]) -> list[OperationLine]:
    return [_line(row) for row in conn.execute(SQL[query], values)]


def _line(row: Sequence[Any]) -> OperationLine:
    line = OperationLine(*row)
    event_id = UUID(row[3]) if row[3] else None
    return line._replace(at=datetime.fromtimestamp(row[0], UTC), event_id=event_id)


def _page(conn: sqlite3.Connection, after: tuple[int, Any] | None, limit: int) -> list[OperationLine]:
    number, place = after or START
    return _lines(conn, "operation_page", {"line": number, "place": place, "limit": limit})


def _end(conn: sqlite3.Connection, after: tuple[int, Any] | None) -> OperationEnd:
    head = conn.execute(SQL["lock_head"]).fetchone()
    [unchained] = conn.execute(SQL["operation_unchained"]).fetchone()
    return OperationEnd(OperationHead(*head) if head else None, unchained, _page(conn, after, -1))
