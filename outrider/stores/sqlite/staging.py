"""Staging through a caller's connection, in the caller's transaction.

The write lock is taken first. From then on no other writer can come between, so ids that are looked up stay unknown,
counters stay as read, and positions can be counted on from the last one. Only numbers are read back, because the caller
may have set any row or text factory.
"""

from __future__ import annotations

import json
import sqlite3
from collections.abc import Sequence
from datetime import datetime, timedelta
from typing import Any
from uuid import UUID

from outrider.event import Stream, band_of, lane_of
from outrider.lifecycle import State
from outrider.store import Draft, Drafts, Hold, Placed
from outrider.stores.sqlite.database import translated
from outrider.stores.sqlite.rows import load, to_seconds

SQL = load("staging.sql")

Counter = tuple[str, str, int]
"""What is counted: topic, key and band."""


def stage(conn: sqlite3.Connection, drafts: Drafts, hold: Hold | None, now: datetime) -> list[Placed]:
    """Place drafts in the caller's open transaction; known ids are left out, and the first of two equal ones wins."""
    cursor = conn.cursor()
    cursor.row_factory = None
    with translated():
        cursor.execute(SQL["lock"])
        lanes = read_lanes(cursor)
        fresh = _fresh(cursor, [*drafts.plain, *drafts.numbered], drafts.supplied)
        streams = [_stream(draft, lanes) for draft in fresh]
        numbered = {id(draft) for draft in drafts.numbered}
        sequences = _number(cursor, fresh, streams, numbered)
        quiet = _quiet(cursor, streams) if hold else set()
        last = cursor.execute(SQL["last_position"]).fetchone()[0]
        holds = [hold if stream in quiet else None for stream in streams]
        rows = [
            _row(*parts, position=last + place, now=now)
            for place, parts in enumerate(zip(fresh, streams, sequences, holds, strict=True), 1)
        ]
        cursor.executemany(SQL["stage"], rows)
    return [Placed(d.event_id, row["held_by"] is not None) for d, row in zip(fresh, rows, strict=True)]


def read_lanes(cursor: sqlite3.Connection | sqlite3.Cursor) -> int:
    """Return the number of lanes per band, as fixed at install."""
    return int(cursor.execute(SQL["lanes"]).fetchone()[0])


def has_laneless(conn: sqlite3.Connection) -> bool:
    """Tell whether rows came from elsewhere and have no lane yet."""
    return bool(conn.execute(SQL["laneless"]).fetchone()[0])


def fill_lanes(conn: sqlite3.Connection, limit: int) -> int:
    """Give lanes to the oldest rows that have none; return how many."""
    return conn.execute(SQL["fill_lanes"], {"limit": limit}).rowcount


def _fresh(cursor: sqlite3.Cursor, drafts: list[Draft], supplied: bool) -> list[Draft]:
    if not supplied:
        return drafts
    unique: dict[UUID, Draft] = {}
    for draft in drafts:
        unique.setdefault(draft.event_id, draft)
    known = _places(cursor, "known", {"ids": json.dumps([str(event_id) for event_id in unique])})
    return [draft for place, draft in enumerate(unique.values()) if place not in known]


def _stream(draft: Draft, lanes: int) -> Stream:
    key = draft.key or draft.aggregate_id or str(draft.event_id)
    return Stream(lane_of(key, draft.priority, lanes), draft.topic, key)


def _number(
    cursor: sqlite3.Cursor, drafts: Sequence[Draft], streams: Sequence[Stream], numbered: set[int]
) -> list[int | None]:
    """Return each draft's sequence: the next of its stream if it is to be numbered, else its own."""
    counters = [(s.topic, s.key, band_of(d.priority)) for d, s in zip(drafts, streams, strict=True)]
    wanted = list(dict.fromkeys(c for d, c in zip(drafts, counters, strict=True) if id(d) in numbered))
    if not wanted:
        return [draft.sequence for draft in drafts]
    last: dict[Counter, int] = dict.fromkeys(wanted, 0)
    for place, sequence in cursor.execute(SQL["counters"], {"streams": json.dumps(wanted)}):
        last[wanted[place]] = sequence
    sequences = []
    for draft, counter in zip(drafts, counters, strict=True):
        if id(draft) in numbered:
            last[counter] += 1
        sequences.append(last[counter] if id(draft) in numbered else draft.sequence)
    cursor.executemany(
        SQL["count"], [{"topic": t, "key": k, "band": b, "sequence": n} for (t, k, b), n in last.items()]
    )
    return sequences


def _quiet(cursor: sqlite3.Cursor, streams: Sequence[Stream]) -> set[Stream]:
    """Return the streams in which nothing undelivered lies before a new event."""
    unique = list(dict.fromkeys(streams))
    return {unique[place] for place in _places(cursor, "quiet", {"streams": json.dumps(unique)})}


def _places(cursor: sqlite3.Cursor, query: str, values: dict[str, str]) -> set[int]:
    return {row[0] for row in cursor.execute(SQL[query], values)}


def _row(
    draft: Draft, stream: Stream, sequence: int | None, hold: Hold | None, *, position: int, now: datetime
) -> dict[str, Any]:
    return {
        **draft._asdict(),
        "id": position,
        "event_id": str(draft.event_id),
        "sequence": sequence,
        "created_at": to_seconds(draft.created_at or now),
        "available_at": to_seconds(draft.available_at),
        "lane": stream.lane,
        "state": str(State.OPTIMISTIC if hold else State.PENDING),
        "held_by": hold.owner if hold else None,
        "held_until": to_seconds(now + timedelta(seconds=hold.seconds)) if hold else None,
    }
