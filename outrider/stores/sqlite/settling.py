"""Settling: writing outcomes, in lanes still owned, into rows that are still there.

All of it runs in one write transaction that starts with the fence. Rows move first and streams are blocked or let go
after, so the order of outcomes within a call cannot strand an event. A stream that this very call blocks stays blocked,
whatever else of it was confirmed; and only a person lifts a hold.
"""

from __future__ import annotations

import json
import sqlite3
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from datetime import datetime, timedelta
from typing import Any, NamedTuple

from outrider import lifecycle
from outrider.event import SKIPPED_TYPE, Stream, uuid7
from outrider.lifecycle import State
from outrider.outcome import Bury, Confirmed, Defer, Park, Policy, Retry
from outrider.store import Cause, Lease, Settlement
from outrider.stores.sqlite.rows import load, to_seconds

SQL = load("settle.sql")
LANES = load("lanes.sql")


class Block(NamedTuple):
    """Why a stream waits, behind which event, and until when (None: until a person acts)."""

    cause: Cause
    head: int | None
    until: datetime | None


class Place(NamedTuple):
    """A row that is to be buried."""

    position: int
    event_id: str
    stream: Stream


class Fence(NamedTuple):
    """The lanes that are still the lease's own, and those of them with blocked streams."""

    owned: frozenset[int]
    blocked: frozenset[int]


@dataclass(slots=True)
class Sheet:
    """What a call will write: rows by verb, and what becomes of their streams."""

    now: datetime
    rows: dict[str, list[dict[str, Any]]] = field(default_factory=lambda: {"retry": [], "defer": [], "park": []})
    confirmed: list[Settlement] = field(default_factory=list)
    buried: list[tuple[Settlement, Bury]] = field(default_factory=list)
    blocks: dict[Stream, Block] = field(default_factory=dict)

    def add(self, settlement: Settlement) -> None:
        """Enter one settlement."""
        event, stream, outcome = settlement
        row = {"id": event.position, "lane": stream.lane, "topic": stream.topic}
        match outcome:
            case Confirmed():
                self.confirmed.append(settlement)
            case Retry(delay_seconds, failure):
                suspect = failure.get("kind") == "unresolved"
                self.rows["retry"].append({**row, "failure": json.dumps(failure), "suspect": suspect})
                self.block(stream, Block(Cause.FAILED, event.position, self.now + timedelta(seconds=delay_seconds)))
            case Defer(delay_seconds):
                self.rows["defer"].append(row)
                due = event.available_at if delay_seconds is None else self.now + timedelta(seconds=delay_seconds)
                self.block(stream, Block(Cause.DEFERRED, event.position, due or self.now))
            case Park():
                self.rows["park"].append(row)
            case Bury():
                self.buried.append((settlement, outcome))

    def block(self, stream: Stream, block: Block) -> None:
        """Block a stream behind a row; the last of several rows decides."""
        self.blocks[stream] = block

    def block_buried(self, stream: Stream, block: Block) -> None:
        """Block a stream for a dead letter: a hold outlasts everything, a skip gives way to another row's delay."""
        if block.cause is Cause.HELD or stream not in self.blocks:
            self.blocks[stream] = block


def fence(conn: sqlite3.Connection, lease: Lease) -> Fence:
    """Read which lanes are still the lease's own; true until the transaction ends."""
    rows = conn.execute(LANES["owned"], {"owner": lease.owner}).fetchall()
    mine = [(lane, blocked) for lane, epoch, blocked in rows if lease.epochs.get(lane) == epoch]
    return Fence(frozenset(lane for lane, _ in mine), frozenset(lane for lane, blocked in mine if blocked))


def settle(
    conn: sqlite3.Connection,
    lease: Lease,
    settlements: Sequence[Settlement],
    emptied: Sequence[Stream],
    *,
    now: datetime,
    archive: bool,
) -> int:
    """Write outcomes; return how many were applied."""
    owned = fence(conn, lease).owned
    sheet = Sheet(now)
    live = _live(conn, settlements, owned, now)
    for settlement in live:
        sheet.add(settlement)
    _write_rows(conn, sheet, archive)
    loose = {s.stream for s in sheet.confirmed if s.event.state in lifecycle.WAITING}
    loose |= {stream for stream in emptied if stream.lane in owned}
    write_streams(conn, sheet.blocks, loose, now)
    ensure_blocked(conn, {s.stream for s in live if isinstance(s.outcome, Park)}, now)
    return len(live)


def ensure_blocked(conn: sqlite3.Connection, streams: Iterable[Stream], now: datetime) -> None:
    """See to it that parked events can be found, even if the head they were parked behind has vanished."""
    conn.executemany(SQL["ensure_blocked"], [{**stream._asdict(), "now": to_seconds(now)} for stream in streams])


def _live(
    conn: sqlite3.Connection, settlements: Sequence[Settlement], owned: frozenset[int], now: datetime
) -> list[Settlement]:
    """Return the settlements that may be written; the first of two for the same event wins."""
    wanted: dict[int, Settlement] = {}
    for settlement in settlements:
        wanted.setdefault(settlement.event.position, settlement)
    values = {"ids": json.dumps(list(wanted)), "lanes": json.dumps(list(owned)), "now": to_seconds(now)}
    lanes = dict(conn.execute(SQL["settleable"], values).fetchall())
    return [s for position, s in wanted.items() if lanes.get(position) == s.stream.lane]


def _write_rows(conn: sqlite3.Connection, sheet: Sheet, archive: bool) -> None:
    for verb, rows in sheet.rows.items():
        conn.executemany(SQL[verb], rows)
    if archive:
        unresolved = [s for s in sheet.confirmed if s.event.topic != s.stream.topic]
        facts = [{"id": e.position, "lane": s.lane, "topic": s.topic} for e, s, _ in unresolved]
        conn.executemany(SQL["resolve_topic"], facts)
    depart(conn, [s.event.position for s in sheet.confirmed], sheet.now, archive)
    for settlement, outcome in sheet.buried:
        place = Place(settlement.event.position, str(settlement.event.event_id), settlement.stream)
        sheet.block_buried(place.stream, bury(conn, place, outcome, spent=1, now=sheet.now))


def depart(conn: sqlite3.Connection, positions: Sequence[int], now: datetime, archive: bool) -> None:
    """Take delivered events out of the outbox."""
    values = {"ids": json.dumps(positions), "now": to_seconds(now)}
    if archive:
        conn.execute(SQL["archive"], values)
    conn.execute(SQL["confirm"], values)


def bury(conn: sqlite3.Connection, place: Place, outcome: Bury, *, spent: int, now: datetime) -> Block:
    """Move a row to the dead letters; return what becomes of its stream.

    Under `skip` a marker stays in its place if the event was numbered.
    """
    position, event_id, stream = place
    facts = {"id": position, "lane": stream.lane, "topic": stream.topic, "spent": spent, "now": to_seconds(now)}
    verdict = {"reason": outcome.reason, "policy": outcome.policy, "failure": json.dumps(outcome.failure)}
    conn.execute(SQL["bury"], {**facts, **verdict})
    conn.execute(SQL["remove_buried"], facts)
    if outcome.policy is Policy.HOLD:
        return Block(Cause.HELD, position, None)
    if mark_skipped(conn, event_id, State.FAILED):
        return Block(Cause.FAILED, position, now)
    return Block(Cause.DRAINING, None, now)


def mark_skipped(conn: sqlite3.Connection, event_id: str, state: State) -> bool:
    """Put what is published instead in the place of a dead letter; False if it has no number to stand for."""
    facts = {"event_id": event_id, "marker_id": str(uuid7()), "marker_type": SKIPPED_TYPE, "state": state}
    return conn.execute(SQL["mark_skipped"], facts).rowcount == 1


def write_streams(
    conn: sqlite3.Connection, blocks: dict[Stream, Block], loose: Iterable[Stream], now: datetime
) -> None:
    """Block streams; then let go of the loose ones, and of those that only drain, if nothing of them waits."""
    conn.executemany(
        SQL["block"],
        [
            {**stream._asdict(), "cause": block.cause, "head": block.head, "until": to_seconds(block.until)}
            for stream, block in blocks.items()
        ],
    )
    draining = {stream for stream, block in blocks.items() if block.cause is Cause.DRAINING}
    rows = [{**stream._asdict(), "now": to_seconds(now)} for stream in draining | (set(loose) - blocks.keys())]
    conn.executemany(SQL["drain"], rows)
    conn.executemany(SQL["unblock"], rows)
