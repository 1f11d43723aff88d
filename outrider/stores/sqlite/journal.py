"""The journal of the outbox in a SQLite file. Times are those of the host, or for settled events of a test clock."""

from __future__ import annotations

import json
import sqlite3
from collections.abc import Sequence
from datetime import datetime, timedelta
from typing import Any
from uuid import UUID

from outrider.clock import Clock
from outrider.outbox.model import EventPlace, JournalKind, JournalPage, JournalSwitch
from outrider.stores.journal_rows import (
    FIRST_EVENT,
    INSTALLED,
    check_installed,
    to_histories,
    to_milliseconds,
    to_switch,
    whole_events,
    without_entry,
)
from outrider.stores.sqlite.database import SqliteDatabase
from outrider.stores.sqlite.rows import load_journal, to_moment, to_seconds

SQL = load_journal()

BATCH_MAX = 1_000


def add(conn: sqlite3.Connection, kind: JournalKind, event_ids: Sequence[str], now: datetime | float) -> None:
    """Journal events that leave a table, if the journal is on."""
    _add(conn, "add", kind, event_ids, now)


def add_positions(conn: sqlite3.Connection, kind: JournalKind, positions: Sequence[int], now: datetime) -> None:
    """Journal events that are about to leave the outbox, if the journal is on."""
    _add(conn, "add_positions", kind, positions, now)


def _add(conn: sqlite3.Connection, verb: str, kind: JournalKind, ids: Sequence[Any], now: datetime | float) -> None:
    if ids and (conn.execute(SQL["is_on"]).fetchone() or [0])[0]:
        seconds = to_seconds(now) if isinstance(now, datetime) else now
        conn.execute(SQL[verb], {"kind": kind, "ids": json.dumps(list(ids)), "now": seconds})


class SqliteJournal:
    """The switch and the pages of the journal."""

    def __init__(self, database: SqliteDatabase, clock: Clock) -> None:
        self._database, self._clock = database, clock

    async def switch(self) -> JournalSwitch:
        return to_switch(await self._database.read(_facts))

    async def turn(self, *, on: bool) -> bool:
        return await self._database.write(_turn, on, to_milliseconds(self._clock.now()))

    async def histories(self, after: UUID | None, limit: int) -> JournalPage:
        page = await self._database.read(_histories, after, limit)
        return page if page is not None else await self.histories(after, 2 * limit)

    async def unjournaled(self, place: EventPlace, after: UUID | None, limit: int) -> JournalPage:
        return await self._database.read(_unjournaled, place, after, limit)

    async def note_prune(self, days: float) -> None:
        """Note that maintenance is about to remove events of this age from the archive."""
        before = to_milliseconds(self._clock.now() - timedelta(days=days))
        await self._database.write(_note_prune, before)

    async def prune(self, days: float) -> int:
        """Remove old entries of events that are in no table; return their number."""
        before = to_seconds(self._clock.now() - timedelta(days=days))
        total = 0
        after: int | None = 0 if INSTALLED in await self._database.read(_facts) else None
        while after is not None:
            after, removed = await self._database.write(_prune, {"before": before, "after": after, "limit": BATCH_MAX})
            total += removed
        return total


def _facts(conn: sqlite3.Connection) -> dict[str, int]:
    return dict(conn.execute(SQL["switch"]).fetchall())


def _turn(conn: sqlite3.Connection, on: bool, now: int) -> bool:
    """Turn the switch. The write lock of the file excludes every other writer."""
    facts = _facts(conn)
    check_installed(facts)
    if to_switch(facts).is_on == on:
        return False
    conn.execute(SQL["start_staged" if on else "end_staged"])
    conn.execute(SQL["turn"], {"on": int(on), "now": now})
    return True


def _histories(conn: sqlite3.Connection, after: UUID | None, limit: int) -> JournalPage | None:
    """Return a page, None if one event has more entries than the page."""
    facts = _facts(conn)
    values = {"after": str(after or FIRST_EVENT), "entry": facts.get("journal_entry", 0), "limit": limit}
    rows = conn.execute(SQL["entries"], values).fetchall()
    entries = whole_events(rows, limit)
    if rows and not entries:
        return None
    placed = conn.execute(SQL["places"], {"ids": json.dumps(sorted({row[0] for row in entries}))}).fetchall()
    histories = to_histories(
        [(UUID(event_id), kind, None, str(number), to_moment(at)) for event_id, kind, number, at in entries],
        [(place, UUID(event_id), position) for place, event_id, position in placed],
    )
    return JournalPage(to_switch(facts), histories, histories[-1].event_id if len(rows) == limit else None)


def _unjournaled(conn: sqlite3.Connection, place: EventPlace, after: UUID | None, limit: int) -> JournalPage:
    facts = _facts(conn)
    marks = {"position": facts.get("journal_position", 0), "entry": facts.get("journal_entry", 0)}
    found = conn.execute(SQL[f"in_{place}"], {"after": str(after or FIRST_EVENT), "limit": limit, **marks}).fetchall()
    rows = [(UUID(event_id), *rest) for event_id, *rest in found]
    last = rows[-1][0] if len(rows) == limit else None
    return JournalPage(to_switch(facts), without_entry(rows, place), last)


def _note_prune(conn: sqlite3.Connection, before: int) -> None:
    conn.execute(SQL["note_prune"], {"before": before})


def _prune(conn: sqlite3.Connection, values: dict[str, Any]) -> tuple[int | None, int]:
    """Look at some entries; return the id to go on after, None at the end, and the number of removed entries."""
    aged = [number for number, is_old in conn.execute(SQL["aged"], values) if is_old]
    removed = conn.execute(SQL["prune"], {"ids": json.dumps(aged)}).rowcount if aged else 0
    return max(aged, default=None), removed
