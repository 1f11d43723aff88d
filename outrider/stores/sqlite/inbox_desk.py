"""What people do with a consumer's trouble in a SQLite file."""

from __future__ import annotations

import json
import sqlite3
from collections.abc import Awaitable, Callable, Sequence
from typing import Any, NamedTuple
from uuid import UUID

from outrider.clock import Clock
from outrider.delivery import InboxStream
from outrider.inbox_store import InboxCriteria
from outrider.outcome import Policy
from outrider.stores.inbox_rows import headers_of, place_of
from outrider.stores.sqlite.rows import load, to_moment

SQL = load("inbox_desk.sql")

Work = Callable[..., Awaitable[Any]]
"""Does something in a transaction of its own."""


class Chosen(NamedTuple):
    """A dead letter that a person named."""

    id: int
    event_id: str
    policy: str
    sequence: int | None
    consumer: str
    topic: str
    key: str
    band: int


class SqliteInboxDesk:
    """Listing, replaying, discarding and releasing."""

    def __init__(self, read: Work, write: Work, clock: Clock) -> None:
        self._read, self._write, self._clock = read, write, clock

    async def counts(self, consumer: str | None = None) -> dict[str, int]:
        [row] = await self._read(_rows, "counts", {"consumer": consumer})
        return dict(zip(("waiting", "blocked_streams", "dead_letters"), row, strict=True))

    async def receipts(self, consumer: str, event_ids: Sequence[UUID]) -> list[dict[str, Any]]:
        ids = json.dumps([str(event_id) for event_id in event_ids])
        return await self._facts("receipts", {"consumer": consumer, "ids": ids})

    async def dead_letters(self, criteria: InboxCriteria) -> list[dict[str, Any]]:
        wanted = {name: getattr(criteria, name) for name in ("consumer", "topic", "key", "reason", "limit")}
        ids = json.dumps(list(criteria.ids)) if criteria.ids else None
        return await self._facts("dead_letters", {**wanted, "ids": ids})

    async def streams(self, consumer: str | None, limit: int) -> list[dict[str, Any]]:
        return await self._facts("streams", {"consumer": consumer, "limit": limit})

    async def replay(self, ids: Sequence[int], actor: str) -> int:
        count: int = await self._write(_replay, ids, actor, self._now())
        return count

    async def discard(self, ids: Sequence[int], actor: str) -> int:
        count: int = await self._write(_discard, ids, actor, self._now())
        return count

    async def release(self, consumer: str, stream: InboxStream, actor: str) -> bool:
        released: bool = await self._write(_release, consumer, stream, actor, self._now())
        return released

    def _now(self) -> float:
        return self._clock.now().timestamp()

    async def _facts(self, query: str, values: dict[str, Any]) -> list[dict[str, Any]]:
        facts: list[dict[str, Any]] = await self._read(_facts, query, values)
        return facts


_READ: dict[str, Callable[[Any], Any]] = {
    "event_id": UUID,
    "headers": headers_of,
    "failure": json.loads,
    "received_at": to_moment,
    "buried_at": to_moment,
    "since": to_moment,
}


def _rows(cursor: sqlite3.Cursor, query: str, values: dict[str, Any]) -> list[Any]:
    return cursor.execute(SQL[query], values).fetchall()


def _facts(cursor: sqlite3.Cursor, query: str, values: dict[str, Any]) -> list[dict[str, Any]]:
    rows = cursor.execute(SQL[query], values).fetchall()
    names = [column[0] for column in cursor.description]
    return [
        {name: _READ[name](value) if name in _READ else value for name, value in zip(names, row, strict=True)}
        for row in rows
    ]


def _replay(cursor: sqlite3.Cursor, ids: Sequence[int], actor: str, now: float) -> int:
    chosen = _chosen(cursor, ids)
    for dead in chosen:
        cursor.execute(SQL["bring_back"], dead._asdict())
        cursor.execute(SQL["forget_receipt"], dead._asdict())
        _settle(cursor, dead, "inbox_replay", actor, now, added=1)
    return len(chosen)


def _discard(cursor: sqlite3.Cursor, ids: Sequence[int], actor: str, now: float) -> int:
    chosen = _chosen(cursor, ids)
    for dead in chosen:
        _settle(cursor, dead, "inbox_discard", actor, now, added=0)
    return len(chosen)


def _settle(cursor: sqlite3.Cursor, dead: Chosen, verb: str, actor: str, now: float, *, added: int) -> None:
    """Take a dead letter away; its stream goes on, if it held it or comes back to it."""
    facts = dead._asdict()
    cursor.execute(SQL["remove"], facts)
    if added or dead.policy == Policy.HOLD:
        passed = None if added else dead.sequence
        cursor.execute(SQL["go_on"], {**facts, "passed": passed, "added": added, "now": now})
        cursor.execute(SQL["forget"], facts)
    _record(cursor, verb, actor, now, facts)


def _release(cursor: sqlite3.Cursor, consumer: str, stream: InboxStream, actor: str, now: float) -> bool:
    facts = {"consumer": consumer, **place_of(stream)._asdict()}
    row = cursor.execute(SQL["first_early"], facts).fetchone()
    if row is None:
        return False
    event_id, sequence = row
    cursor.execute(SQL["release"], {**facts, "sequence": sequence, "now": now})
    _record(cursor, "inbox_release", actor, now, {"event_id": event_id, "consumer": consumer})
    return True


def _chosen(cursor: sqlite3.Cursor, ids: Sequence[int]) -> list[Chosen]:
    return [Chosen(*row) for row in cursor.execute(SQL["chosen"], {"ids": json.dumps(list(ids))})]


def _record(cursor: sqlite3.Cursor, verb: str, actor: str, now: float, event: dict[str, Any]) -> None:
    cursor.execute(SQL["record"], {**event, "verb": verb, "actor": actor, "now": now})
