"""Settling: writes outcomes to rows that still exist in lanes that the lease still owns.

One write transaction does all writes and starts with the fence. Rows move first, and streams are blocked or released
after, so the order of outcomes within a call cannot strand an event. A stream that a call blocks stays blocked despite
other confirmed events. Only an operator releases a stream that is blocked by a dead letter.
"""

from __future__ import annotations

import json
import sqlite3
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from datetime import datetime, timedelta
from typing import Any, NamedTuple

from outrider.brokers.base import Confirmed
from outrider.event import SKIPPED_TYPE, OnDeadLetter, ResolvedRow, Stream, uuid7
from outrider.outbox import model
from outrider.outbox.model import (
    BlockReason,
    DeadLettered,
    Defer,
    JournalKind,
    Lease,
    Park,
    Retry,
    Settlement,
    Settlements,
    State,
)
from outrider.stores.sqlite import journal
from outrider.stores.sqlite.rows import load, to_seconds

SQL = load()


class SqliteBlock(NamedTuple):
    """The reason of a block, the position of the blocking event, and the due time (None: until an operator acts)."""

    cause: BlockReason
    head: int | None
    until: datetime | None


class RowPosition(NamedTuple):
    """A row to be moved to the dead letters."""

    position: int
    event_id: str
    stream: Stream


class SqliteFence(NamedTuple):
    """The lanes that the lease still owns, and the subset with blocked streams."""

    owned: frozenset[int]
    blocked: frozenset[int]


@dataclass(slots=True)
class SqliteWriteSet:
    """The writes of one call: rows by statement, and changes of streams."""

    now: datetime
    rows: dict[str, list[dict[str, Any]]] = field(default_factory=lambda: {"retry": [], "defer": [], "park": []})
    confirmed: list[Settlement] = field(default_factory=list)
    dead_lettered: list[tuple[Settlement, DeadLettered]] = field(default_factory=list)
    blocks: dict[Stream, SqliteBlock] = field(default_factory=dict)

    def add(self, settlement: Settlement) -> None:
        """Add one settlement."""
        event, stream, outcome = settlement
        row = {"id": event.position, "lane": stream.lane, "topic": stream.topic}
        match outcome:
            case Confirmed():
                self.confirmed.append(settlement)
            case Retry(delay_seconds, failure):
                suspect = failure.get("kind") == "unknown"
                self.rows["retry"].append({**row, "failure": json.dumps(failure), "suspect": suspect})
                self.block(
                    stream, SqliteBlock(BlockReason.FAILED, event.position, self.now + timedelta(seconds=delay_seconds))
                )
            case Defer(delay_seconds):
                self.rows["defer"].append(row)
                due = event.available_at if delay_seconds is None else self.now + timedelta(seconds=delay_seconds)
                self.block(stream, SqliteBlock(BlockReason.DEFERRED, event.position, due or self.now))
            case Park():
                self.rows["park"].append(row)
            case DeadLettered():
                self.dead_lettered.append((settlement, outcome))

    def block(self, stream: Stream, block: SqliteBlock) -> None:
        """Block a stream behind a row; the last of several rows decides."""
        self.blocks[stream] = block

    def block_dead_lettered(self, stream: Stream, block: SqliteBlock) -> None:
        """Block a stream for a dead letter.

        A block overrides every other reason; a skip yields to the delay of another row.
        """
        if block.cause is BlockReason.DEAD_LETTER or stream not in self.blocks:
            self.blocks[stream] = block


def fence(conn: sqlite3.Connection, lease: Lease) -> SqliteFence:
    """Read the lanes that the lease still owns. The result is valid until the end of the transaction."""
    rows = conn.execute(SQL["owned"], {"owner": lease.owner}).fetchall()
    mine = [(lane, blocked) for lane, epoch, blocked in rows if lease.epochs.get(lane) == epoch]
    return SqliteFence(frozenset(lane for lane, _ in mine), frozenset(lane for lane, blocked in mine if blocked))


def settle(conn: sqlite3.Connection, lease: Lease, settlements: Settlements, *, now: datetime, archive: bool) -> int:
    """Write outcomes; return the number of applied outcomes."""
    owned = fence(conn, lease).owned
    writes = SqliteWriteSet(now)
    live = _live(conn, settlements.outcomes(), owned, now)
    for settlement in live:
        writes.add(settlement)
    _write_rows(conn, writes, archive)
    maybe_empty = {s.stream for s in writes.confirmed if s.event.state in model.WAITING}
    maybe_empty |= {stream for stream in settlements.emptied if stream.lane in owned}
    write_streams(conn, writes.blocks, maybe_empty, now)
    ensure_blocked(conn, {s.stream for s in live if isinstance(s.outcome, Park)}, now)
    values = settlements.raised_values(owned)
    # Tables of an older version have no values to raise, and an outbox without such a rule goes on with them.
    if values:
        rows = [{"rule": v.rule, **v.stream._asdict(), "value": v.value} for v in values]
        conn.executemany(SQL["raise_values"], rows)
    return len(live)


def ensure_blocked(conn: sqlite3.Connection, streams: Iterable[Stream], now: datetime) -> None:
    """Insert missing blocked rows of parked events, for a stream whose first event is gone."""
    conn.executemany(SQL["ensure_blocked"], [{**stream._asdict(), "now": to_seconds(now)} for stream in streams])


def _live(
    conn: sqlite3.Connection, settlements: Sequence[Settlement], owned: frozenset[int], now: datetime
) -> list[Settlement]:
    """Return the settlements to write. The first of two settlements for an event wins."""
    wanted: dict[int, Settlement] = {}
    for settlement in settlements:
        wanted.setdefault(settlement.event.position, settlement)
    values = {"ids": json.dumps(list(wanted)), "lanes": json.dumps(list(owned)), "now": to_seconds(now)}
    lanes = dict(conn.execute(SQL["settleable"], values).fetchall())
    return [s for position, s in wanted.items() if lanes.get(position) == s.stream.lane]


def _write_rows(conn: sqlite3.Connection, writes: SqliteWriteSet, archive: bool) -> None:
    for verb, rows in writes.rows.items():
        conn.executemany(SQL[verb], rows)
    if archive:
        unresolved = [s for s in writes.confirmed if isinstance(s.event, ResolvedRow)]
        facts = [{"id": e.position, "lane": s.lane, "topic": s.topic} for e, s, _ in unresolved]
        conn.executemany(SQL["resolve_topic"], facts)
    depart(conn, [s.event.position for s in writes.confirmed], writes.now, archive)
    for settlement, outcome in writes.dead_lettered:
        index = RowPosition(settlement.event.position, str(settlement.event.event_id), settlement.stream)
        writes.block_dead_lettered(index.stream, dead_letter(conn, index, outcome, spent=1, now=writes.now))


def depart(conn: sqlite3.Connection, positions: Sequence[int], now: datetime, archive: bool) -> None:
    """Remove delivered events from the outbox."""
    values = {"ids": json.dumps(positions), "now": to_seconds(now)}
    journal.add_positions(conn, JournalKind.ARCHIVED if archive else JournalKind.SENT, positions, now)
    if archive:
        conn.execute(SQL["archive"], values)
    conn.execute(SQL["confirm"], values)


def dead_letter(
    conn: sqlite3.Connection, index: RowPosition, outcome: DeadLettered, *, spent: int, now: datetime
) -> SqliteBlock:
    """Move a row to the dead letters; return the block of its stream.

    Under `skip`, a numbered event leaves a marker in its position.
    """
    position, event_id, stream = index
    facts = {"id": position, "lane": stream.lane, "topic": stream.topic, "spent": spent, "now": to_seconds(now)}
    details = {"reason": outcome.reason, "policy": outcome.policy, "failure": json.dumps(outcome.failure)}
    conn.execute(SQL["dead_letter"], {**facts, **details})
    journal.add_positions(conn, JournalKind.DEAD_LETTER, [position], now)
    conn.execute(SQL["remove_dead_lettered"], facts)
    if outcome.policy is OnDeadLetter.BLOCK:
        return SqliteBlock(BlockReason.DEAD_LETTER, position, None)
    if mark_skipped(conn, event_id, State.FAILED):
        return SqliteBlock(BlockReason.FAILED, position, now)
    return SqliteBlock(BlockReason.DRAINING, None, now)


def mark_skipped(conn: sqlite3.Connection, event_id: str, state: State) -> bool:
    """Insert a marker in the position of a dead letter; return False for a dead letter without a sequence number."""
    facts = {"event_id": event_id, "marker_id": str(uuid7()), "marker_type": SKIPPED_TYPE, "state": state}
    return conn.execute(SQL["mark_skipped"], facts).rowcount == 1


def write_streams(
    conn: sqlite3.Connection, blocks: dict[Stream, SqliteBlock], maybe_empty: Iterable[Stream], now: datetime
) -> None:
    """Block streams. Then release draining and loose streams without waiting events."""
    conn.executemany(
        SQL["block"],
        [
            {**stream._asdict(), "cause": block.cause, "head": block.head, "until": to_seconds(block.until)}
            for stream, block in blocks.items()
        ],
    )
    draining = {stream for stream, block in blocks.items() if block.cause is BlockReason.DRAINING}
    rows = [{**stream._asdict(), "now": to_seconds(now)} for stream in draining | (set(maybe_empty) - blocks.keys())]
    conn.executemany(SQL["drain"], rows)
    conn.executemany(SQL["unblock"], rows)
