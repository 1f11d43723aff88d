"""Staging through a connection of the caller, in the caller's transaction.

Staging takes the write lock first. No other writer can then interfere: unknown ids stay unknown, counters keep their
values, and new positions follow the last position. Staging reads back only numbers, because the caller may have set any
row or text factory.
"""

from __future__ import annotations

import json
import sqlite3
from collections.abc import Sequence
from datetime import datetime, timedelta
from typing import Any
from uuid import UUID

from outrider.event import Stream, band_of, lane_of
from outrider.outbox.model import NewEvent, OptimisticClaim, StagedRow, StageRequest, State
from outrider.stores.sqlite.database import translated
from outrider.stores.sqlite.rows import load, to_seconds

SQL = load()

Counter = tuple[str, str, int]
"""The key of a counter: topic, key and band."""


def stage(
    conn: sqlite3.Connection, request: StageRequest, claim: OptimisticClaim | None, now: datetime
) -> list[StagedRow]:
    """Stage events in the caller's open transaction. Known ids are left out; the first of two equal ids wins."""
    cursor = conn.cursor()
    cursor.row_factory = None
    with translated():
        cursor.execute(SQL["lock"])
        lanes = read_lanes(cursor)
        fresh = _new_events(cursor, [*request.plain, *request.numbered], request.supplied)
        streams = [_stream(new, lanes) for new in fresh]
        numbered = {id(new) for new in request.numbered}
        sequences = _number(cursor, fresh, streams, numbered)
        quiet = _quiet(cursor, streams) if claim else set()
        last = cursor.execute(SQL["last_position"]).fetchone()[0]
        has_claim = [claim if stream in quiet else None for stream in streams]
        rows = [
            _row(*parts, position=last + index, now=now)
            for index, parts in enumerate(zip(fresh, streams, sequences, has_claim, strict=True), 1)
        ]
        cursor.executemany(SQL["stage"], rows)
    return [StagedRow(d.event_id, row["claimed_by"] is not None) for d, row in zip(fresh, rows, strict=True)]


def read_lanes(cursor: sqlite3.Connection | sqlite3.Cursor) -> int:
    """Return the number of lanes per band, as fixed at installation."""
    return int(cursor.execute(SQL["lanes"]).fetchone()[0])


def has_laneless(conn: sqlite3.Connection) -> bool:
    """Return whether foreign writers have inserted rows without a lane."""
    return bool(conn.execute(SQL["laneless"]).fetchone()[0])


def fill_lanes(conn: sqlite3.Connection, limit: int) -> int:
    """Assign lanes to the oldest rows without a lane; return the number of rows."""
    return conn.execute(SQL["fill_lanes"], {"limit": limit}).rowcount


def _new_events(cursor: sqlite3.Cursor, events: list[NewEvent], supplied: bool) -> list[NewEvent]:
    if not supplied:
        return events
    unique: dict[UUID, NewEvent] = {}
    for new in events:
        unique.setdefault(new.event_id, new)
    known = _indexes(cursor, "known", {"ids": json.dumps([str(event_id) for event_id in unique])})
    return [new for index, new in enumerate(unique.values()) if index not in known]


def _stream(new: NewEvent, lanes: int) -> Stream:
    key = new.key or new.aggregate_id or str(new.event_id)
    return Stream(lane_of(key, new.priority, lanes), new.topic, key)


def _number(
    cursor: sqlite3.Cursor, events: Sequence[NewEvent], streams: Sequence[Stream], numbered: set[int]
) -> list[int | None]:
    """Return the sequence of each event: the next number of a numbered stream, otherwise its own sequence."""
    counters = [(s.topic, s.key, band_of(d.priority)) for d, s in zip(events, streams, strict=True)]
    wanted = list(dict.fromkeys(c for d, c in zip(events, counters, strict=True) if id(d) in numbered))
    if not wanted:
        return [new.sequence for new in events]
    last: dict[Counter, int] = dict.fromkeys(wanted, 0)
    for index, sequence in cursor.execute(SQL["counters"], {"streams": json.dumps(wanted)}):
        last[wanted[index]] = sequence
    sequences = []
    for new, counter in zip(events, counters, strict=True):
        if id(new) in numbered:
            last[counter] += 1
        sequences.append(last[counter] if id(new) in numbered else new.sequence)
    cursor.executemany(
        SQL["count"], [{"topic": t, "key": k, "band": b, "sequence": n} for (t, k, b), n in last.items()]
    )
    return sequences


def _quiet(cursor: sqlite3.Cursor, streams: Sequence[Stream]) -> set[Stream]:
    """Return the streams in which no undelivered event lies before a new event."""
    unique = list(dict.fromkeys(streams))
    return {unique[index] for index in _indexes(cursor, "quiet", {"streams": json.dumps(unique)})}


def _indexes(cursor: sqlite3.Cursor, query: str, values: dict[str, str]) -> set[int]:
    return {row[0] for row in cursor.execute(SQL[query], values)}


def _row(
    new: NewEvent, stream: Stream, sequence: int | None, claim: OptimisticClaim | None, *, position: int, now: datetime
) -> dict[str, Any]:
    return {
        **new._asdict(),
        "id": position,
        "event_id": str(new.event_id),
        "sequence": sequence,
        "created_at": to_seconds(new.created_at or now),
        "available_at": to_seconds(new.available_at),
        "lane": stream.lane,
        "state": str(State.OPTIMISTIC if claim else State.PENDING),
        "claimed_by": claim.owner if claim else None,
        "claimed_until": to_seconds(now + timedelta(seconds=claim.seconds)) if claim else None,
    }
