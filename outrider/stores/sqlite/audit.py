"""The audit log of sagas in a SQLite file: lines, anchors, and the removal of old sagas and lines.

A trigger lets a line go once an anchor records its removal.
"""

from __future__ import annotations

import sqlite3
from collections.abc import Awaitable, Callable, Collection, Sequence
from datetime import UTC, datetime
from typing import Any
from uuid import UUID

from outrider.audit_chain import AuditAnchor, AuditHead, AuditLine, first_line, prune_anchor
from outrider.clock import Clock
from outrider.saga.model import AuditCriteria, Instance
from outrider.stores.rows import close_sagas, head_of_row, instance_of
from outrider.stores.sqlite.rows import load_saga, to_moment, to_seconds

SAGAS_MAX = 200
"""The most sagas that are removed together, and whose lines are removed together later."""

DAY_SECONDS = 86_400

SQL = load_saga()

Work = Callable[..., Awaitable[Any]]
"""Runs work in a separate transaction."""


def save_lines(cursor: sqlite3.Cursor, lines: Sequence[AuditLine]) -> None:
    """Insert lines of the audit log."""
    rows = [
        (str(line.saga_id), line.line, to_seconds(line.at), *line[4:11], *line[11:14], line.state) for line in lines
    ]
    cursor.executemany(SQL["save_audit"], rows)


def save_first_line(cursor: sqlite3.Cursor, saga_id: UUID, now: float, traceparent: str | None) -> None:
    """Insert the first line of a saga, which has no hash."""
    save_lines(cursor, [first_line(saga_id, datetime.fromtimestamp(now, UTC), traceparent)])


def to_instance(row: Sequence[Any]) -> Instance:
    """Return the instance of a row selected with the shared column list."""
    cells = list(row)
    cells[0], cells[10] = UUID(cells[0]), bool(cells[10])
    cells[12:16] = [to_moment(seconds) for seconds in cells[12:16]]
    cells[20], cells[21] = to_moment(cells[20]), UUID(cells[21]) if cells[21] else None
    return instance_of(cells)


def to_line(row: Sequence[Any]) -> AuditLine:
    """Return the audit line of a row selected with the shared column list."""
    saga_id, place, line, at, *rest = row
    return AuditLine(UUID(saga_id), place, line, datetime.fromtimestamp(at, UTC), *rest)


def _head(row: Sequence[Any]) -> AuditHead:
    saga_id, *columns, started_at, traceparent = row
    return head_of_row((UUID(saga_id), *columns, to_moment(started_at), traceparent))


def to_anchor(row: Sequence[Any]) -> AuditAnchor:
    """Return the anchor of a row."""
    anchor = AuditAnchor(*row)
    moments = [datetime.fromtimestamp(seconds, UTC) for seconds in (row[1], row[6])]
    return anchor._replace(at=moments[0], until=moments[1])


def add_anchor(cursor: sqlite3.Cursor, anchor: AuditAnchor) -> None:
    """Insert the next anchor."""
    cursor.execute(SQL["add_anchor"], anchor._replace(at=anchor.at.timestamp(), until=anchor.until.timestamp()))  # type: ignore[arg-type]


def last_anchor(cursor: sqlite3.Cursor) -> AuditAnchor | None:
    """Return the end of the chain of anchors."""
    row = cursor.execute(SQL["last_anchor"]).fetchone()
    return to_anchor(row) if row else None


def remove_sagas(cursor: sqlite3.Cursor, before: float, now: datetime) -> int:
    """Remove ended sagas with their journals and messages; an anchor and the heads of their chains stay."""
    old = cursor.execute(SQL["prunable_sagas"], {"before": before, "limit": SAGAS_MAX}).fetchall()
    if not old:
        return 0
    anchor, heads = close_sagas(last_anchor(cursor), [(to_instance(row[:-1]), row[-1]) for row in old], now)
    add_anchor(cursor, anchor)
    ids = [(row[0],) for row in old]
    rows = [(str(head.saga_id), anchor.number, head.lines, head.hash, head.place, head.subject_hash) for head in heads]
    cursor.executemany(SQL["add_head"], rows)
    for verb in ("prune_journal", "prune_messages", "prune_sagas"):
        cursor.executemany(SQL[verb], ids)
    return len(old)


def remove_lines(cursor: sqlite3.Cursor, before: float, now: datetime) -> int | None:
    """Remove the lines of sagas that were removed together; None if the oldest are not old enough."""
    row, last = cursor.execute(SQL["prunable_audit"], {"before": before}).fetchone(), last_anchor(cursor)
    if row is None or last is None:
        return None
    closed = to_anchor(row)
    # A trigger refuses to delete before the anchor is there.
    add_anchor(cursor, prune_anchor(last, closed, now))
    removed = cursor.execute(SQL["prune_audit"], {"number": closed.number}).rowcount
    cursor.execute(SQL["prune_heads"], {"number": closed.number})
    return removed


class SqliteAudit:
    """The audit log of all sagas."""

    def __init__(self, read: Work, write: Work, clock: Clock) -> None:
        self._read, self._write, self._clock = read, write, clock

    async def find(self, criteria: AuditCriteria) -> list[AuditLine]:
        since = criteria.since.timestamp() if criteria.since else None
        saga_id = str(criteria.saga_id) if criteria.saga_id else None
        facts = {"saga_id": saga_id, "actor": criteria.actor, "since": since, "limit": criteria.limit}
        return [to_line(row) for row in await self._read(_rows, "audit_find", facts)]

    async def lines(self, after: tuple[UUID, int], limit: int) -> list[AuditLine]:
        facts = {"saga_id": str(after[0]), "place": after[1], "limit": limit}
        return [to_line(row) for row in await self._read(_rows, "audit_lines", facts)]

    async def heads(self, saga_ids: Collection[UUID]) -> list[AuditHead]:
        heads: list[AuditHead] = await self._read(_heads, sorted(saga_ids))
        return heads

    async def chain(self, saga_id: UUID) -> tuple[list[AuditHead], list[AuditLine]]:
        chain: tuple[list[AuditHead], list[AuditLine]] = await self._read(_chain, saga_id)
        return chain

    async def missing(self, limit: int) -> list[UUID]:
        return [UUID(saga_id) for (saga_id,) in await self._read(_rows, "audit_missing", {"limit": limit})]

    async def anchors(self, after: int, limit: int) -> list[AuditAnchor]:
        rows = await self._read(_rows, "audit_anchors", {"after": after, "limit": limit})
        return [to_anchor(row) for row in rows]

    async def anchor_heads(self, number: int) -> list[AuditHead] | None:
        # The heads are read first: if they are removed in between, the second statement sees it.
        rows = await self._read(_rows, "anchor_heads", {"number": number})
        [[pruned]] = await self._read(_rows, "audit_pruned", {"number": number})
        return None if pruned else [AuditHead(UUID(row[0]), *row[1:]) for row in rows]

    async def remove_sagas(self, days: float) -> int:
        """Remove ended sagas in batches, children first; their anchors and the heads of their chains stay."""
        total, count = 0, 1
        while count:
            now = self._clock.now()
            count = await self._write(remove_sagas, now.timestamp() - days * DAY_SECONDS, now)
            total += count
        return total

    async def remove_lines(self, days: float) -> int:
        """Remove the lines of sagas that were removed together, once all are old; return the number of lines."""
        total: int = 0
        removed: int | None = 0
        while removed is not None:
            now = self._clock.now()
            total += removed
            removed = await self._write(remove_lines, now.timestamp() - days * DAY_SECONDS, now)
        return total


def _rows(cursor: sqlite3.Cursor, query: str, values: dict[str, Any]) -> list[Any]:
    return cursor.execute(SQL[query], values).fetchall()


def _heads(cursor: sqlite3.Cursor, saga_ids: Sequence[UUID]) -> list[AuditHead]:
    return [_head(row) for saga_id in saga_ids for row in _rows(cursor, "audit_heads", {"saga_id": str(saga_id)})]


def _chain(cursor: sqlite3.Cursor, saga_id: UUID) -> tuple[list[AuditHead], list[AuditLine]]:
    lines = [to_line(row) for row in _rows(cursor, "audit_chain", {"saga_id": str(saga_id)})]
    return _heads(cursor, [saga_id]), lines
