"""Admin operations and maintenance of the outbox in a SQLite file."""

from __future__ import annotations

import json
import sqlite3
from collections.abc import Callable, Sequence
from datetime import datetime, timedelta
from typing import TYPE_CHECKING, Any, NamedTuple
from uuid import UUID

from outrider.clock import Clock
from outrider.errors import NotFound, Transient
from outrider.event import DeadLetterReason, OnDeadLetter, Stream, TopicRule, topic_of
from outrider.outbox.model import (
    EXPIRE_ACTOR,
    EXPIRE_VERB,
    BlockedStream,
    Criteria,
    DeadLettered,
    DeadLetterEdit,
    DeadRelay,
    JournalKind,
    Pruned,
    Retention,
    State,
)
from outrider.stores.sqlite import journal, outbox_settle, staging
from outrider.stores.sqlite.database import SqliteDatabase
from outrider.stores.sqlite.operation_log import SqliteOperationLog, record
from outrider.stores.sqlite.rows import load, to_facts, to_moment, to_seconds

if TYPE_CHECKING:
    from outrider.stores.sqlite.outbox import SqliteStore

SQL = load()

LOOK_MAX = 10_000
"""The maximum of events, and of blocked streams, that are read to list topics."""

PRUNE_MAX = 1_000

Remove = Callable[[sqlite3.Connection, str, dict[str, Any], datetime], int]
"""Runs the statement that removes some old rows; returns their number."""
"""The maximum of rows removed in one transaction."""


class ChosenEvents(NamedTuple):
    """A dead letter that an operator selected."""

    event_id: str
    stream: Stream
    policy: str


class SqliteOutboxAdmin:
    """The admin of the outbox: lists, replays, dead-letters and discards events."""

    def __init__(self, store: SqliteStore) -> None:
        self._store, self._database, self._clock = store, store.database, store.clock

    async def counts(self, *, sent: bool = True) -> dict[str, int]:
        counts = await self._database.read(_counts)
        return counts if sent else {state: count for state, count in counts.items() if state != State.SENT}

    async def events(self, criteria: Criteria) -> list[dict[str, Any]]:
        if criteria.reason is not None:
            return []
        return await self._database.read(_list, "sent" if criteria.state == State.SENT else "events", criteria)

    async def event(self, event_id: UUID) -> dict[str, Any]:
        if (found := await self._database.read(_find, event_id)) is None:
            raise NotFound(
                f"no event {event_id} in outbox, archive or dead letters; it may have been pruned or deleted"
            )
        return found

    async def dead_letters(self, criteria: Criteria) -> list[dict[str, Any]]:
        if criteria.state not in (None, State.DEAD_LETTER):
            return []
        return await self._database.read(_list, "dead_letters", criteria)

    async def dead_letter_groups(self, criteria: Criteria) -> list[dict[str, Any]]:
        if criteria.state not in (None, State.DEAD_LETTER):
            return []
        return await self._database.read(_groups, criteria)

    async def has_due(self) -> bool:
        return await self._database.read(_has_due, self._clock.now())

    async def topics(self, limit: int) -> list[str]:
        return await self._database.read(_topics, limit, self._store.topic_rule)

    async def relays(self) -> int:
        return await self._database.read(_relays, self._clock.now())

    async def lane_owner(self, lane: int) -> str | None:
        return await self._database.read(_lane_owner, lane, self._clock.now())

    async def blocked_streams(self, limit: int) -> list[BlockedStream]:
        return await self._database.read(_blocked_streams, limit)

    async def replay(self, event_ids: Sequence[UUID], actor: str) -> int:
        return await self._database.write(_replay, event_ids, actor, self._clock.now())

    async def dead_letter(self, event_id: UUID, actor: str, failure: dict[str, Any], policy: str) -> bool:
        outcome = DeadLettered(DeadLetterReason.BY_HAND, failure, OnDeadLetter(policy))
        rule, now = self._store.topic_rule, self._clock.now()
        return await self._database.write(_dead_letter, str(event_id), actor, outcome, rule=rule, now=now)

    async def edit(self, event_id: UUID, actor: str, edit: DeadLetterEdit) -> bool:
        return await self._database.write(_edit, str(event_id), actor, edit, self._clock.now())

    async def discard(self, event_ids: Sequence[UUID], actor: str) -> int:
        return await self._database.write(_discard, event_ids, actor, self._clock.now())


def _counts(conn: sqlite3.Connection) -> dict[str, int]:
    sent, dead = conn.execute(SQL["count_settled"]).fetchone()
    return {**dict(conn.execute(SQL["count_states"]).fetchall()), State.SENT: sent, State.DEAD_LETTER: dead}


def _list(conn: sqlite3.Connection, query: str, criteria: Criteria) -> list[dict[str, Any]]:
    return _facts(conn.execute(SQL[query], _filter(criteria)))


def _groups(conn: sqlite3.Connection, criteria: Criteria) -> list[dict[str, Any]]:
    rows = conn.execute(SQL["dead_letter_groups"], _filter(criteria))
    return [{"reason": reason, "topic": topic, "count": count} for reason, topic, count in rows]


def _filter(criteria: Criteria) -> dict[str, Any]:
    ids = json.dumps([str(event_id) for event_id in criteria.event_ids]) if criteria.event_ids else None
    wanted = {name: getattr(criteria, name) for name in ("state", "event_type", "topic", "key", "reason", "limit")}
    return {**wanted, "ids": ids}


def _find(conn: sqlite3.Connection, event_id: UUID) -> dict[str, Any] | None:
    for query in ("find_event", "find_sent", "find_dead_letter"):
        if found := _facts(conn.execute(SQL[query], {"event_id": str(event_id)})):
            return found[0]
    return None


def _facts(cursor: sqlite3.Cursor) -> list[dict[str, Any]]:
    names = [column[0] for column in cursor.description]
    return [to_facts(names, row) for row in cursor]


def _topics(conn: sqlite3.Connection, limit: int, rule: TopicRule) -> list[str]:
    return sorted({topic_of(rule, *row) for row in conn.execute(SQL["topics"], {"look": LOOK_MAX})})[:limit]


def _relays(conn: sqlite3.Connection, now: datetime) -> int:
    return int(conn.execute(SQL["alive"], {"now": to_seconds(now)}).fetchone()[0])


def _has_due(conn: sqlite3.Connection, now: datetime) -> bool:
    return bool(conn.execute(SQL["has_due"], {"now": to_seconds(now)}).fetchone()[0])


def _lane_owner(conn: sqlite3.Connection, lane: int, now: datetime) -> str | None:
    row = conn.execute(SQL["lane_owner"], {"lane": lane, "now": to_seconds(now)}).fetchone()
    return row[0] if row else None


def _blocked_streams(conn: sqlite3.Connection, limit: int) -> list[BlockedStream]:
    rows = conn.execute(SQL["blocked_streams"], {"limit": limit})
    return [BlockedStream(Stream(*names), cause, to_moment(until), waiting) for *names, cause, until, waiting in rows]


def _replay(conn: sqlite3.Connection, event_ids: Sequence[UUID], actor: str, now: datetime) -> int:
    chosen = _chosen(conn, event_ids)
    for dead in chosen:
        blocked = dead.policy == OnDeadLetter.BLOCK
        conn.execute(SQL["resume" if blocked else "stage_again"], {"event_id": dead.event_id})
        _remove(conn, dead, unblock=blocked, now=now)
    record(conn, now, actor, "replay", [(UUID(dead.event_id), None) for dead in chosen])
    return len(chosen)


def _discard(conn: sqlite3.Connection, event_ids: Sequence[UUID], actor: str, now: datetime) -> int:
    chosen = _chosen(conn, event_ids)
    for dead in chosen:
        if dead.policy == OnDeadLetter.BLOCK:
            outbox_settle.mark_skipped(conn, dead.event_id, State.PARKED)
        _remove(conn, dead, unblock=True, now=now)
    record(conn, now, actor, "discard", [(UUID(dead.event_id), None) for dead in chosen])
    journal.add(conn, JournalKind.DISCARDED, [dead.event_id for dead in chosen], now)
    return len(chosen)


def _edit(conn: sqlite3.Connection, event_id: str, actor: str, edit: DeadLetterEdit, now: datetime) -> bool:
    row = conn.execute(SQL["editable"], {"event_id": event_id}).fetchone()
    if row is None:
        return False
    lane, topic, key, policy, headers, payload = row
    moved = edit.topic not in (None, topic)
    if moved and policy == OnDeadLetter.BLOCK:
        outbox_settle.mark_skipped(conn, event_id, State.PARKED)
    changed = {"payload": edit.payload, "headers": edit.headers_over(headers, moved=moved), "topic": edit.topic}
    conn.execute(SQL["edit"], {**changed, "moved": moved, "event_id": event_id})
    if moved:
        conn.execute(SQL["drain_held"], {**Stream(lane, topic, key)._asdict(), "now": to_seconds(now)})
    record(conn, now, actor, "edit", [(UUID(event_id), None)], **edit.changes(payload, topic))
    return True


def _dead_letter(
    conn: sqlite3.Connection, event_id: str, actor: str, outcome: DeadLettered, *, rule: TopicRule, now: datetime
) -> bool:
    if staging.has_laneless(conn):
        staging.fill_lanes(conn, -1)
    row = conn.execute(SQL["position_of"], {"event_id": event_id}).fetchone()
    if row is None:
        return False
    position, lane, event_type, topic, routing_key, key = row
    stream = Stream(lane, topic_of(rule, event_type, topic, routing_key), key)
    conn.execute(SQL["take_lane"], {"lane": lane})
    _park_before(conn, position, stream, rule)
    block = outbox_settle.dead_letter(
        conn, outbox_settle.RowPosition(position, event_id, stream), outcome, spent=0, now=now
    )
    outbox_settle.write_streams(conn, {stream: block}, (), now)
    record(conn, now, actor, "dead_letter", [(UUID(event_id), None)], policy=str(outcome.policy))
    return True


def _park_before(conn: sqlite3.Connection, position: int, stream: Stream, rule: TopicRule) -> None:
    """Park earlier events of the stream as well; otherwise the relay would publish the skip marker before them."""
    rows = conn.execute(SQL["pending_before"], {**stream._asdict(), "id": position}).fetchall()
    mine = [row for row in rows if topic_of(rule, *row[1:4]) == stream.topic]
    if any(row[4] == State.OPTIMISTIC for row in mine):
        raise Transient("an earlier event of its stream is being sent by its writer; try again in a few seconds")
    earlier = [row[0] for row in mine]
    facts = [{"id": before, "lane": stream.lane, "topic": stream.topic} for before in earlier]
    conn.executemany(outbox_settle.SQL["park"], facts)


def _chosen(conn: sqlite3.Connection, event_ids: Sequence[UUID]) -> list[ChosenEvents]:
    rows = conn.execute(SQL["chosen"], {"ids": json.dumps([str(event_id) for event_id in event_ids])})
    return [ChosenEvents(event_id, Stream(*names), policy) for event_id, *names, policy in rows]


def _remove(conn: sqlite3.Connection, dead: ChosenEvents, *, unblock: bool, now: datetime) -> None:
    """Remove a dead letter. A blocked stream drains after its last blocking dead letter."""
    conn.execute(SQL["remove_dead_letter"], {"event_id": dead.event_id})
    if unblock:
        conn.execute(SQL["drain_held"], {**dead.stream._asdict(), "now": to_seconds(now)})


class SqliteMaintenance:
    """The maintenance of the outbox: keeps the tables bounded."""

    def __init__(self, database: SqliteDatabase, clock: Clock) -> None:
        self._database = database
        self._clock = clock
        self._operations = SqliteOperationLog(database, clock)
        self._journal = journal.SqliteJournal(database, clock)

    async def sweep(self) -> list[DeadRelay]:
        return await self._database.write(_sweep, self._clock.now().timestamp())

    async def take_duty(self, name: str, every_seconds: float) -> bool:
        now = self._clock.now()
        due = (now + timedelta(seconds=every_seconds)).timestamp()
        values = {"name": name, "now": now.timestamp(), "next": due}
        return await self._database.write(lambda conn: conn.execute(SQL["take_duty"], values).rowcount == 1)

    async def prepare(self) -> None:
        """Do nothing: the archive is one table without partitions."""

    async def prune(self, retention: Retention) -> Pruned:
        await self._journal.note_prune(retention.archive_days)
        return Pruned(
            await self._prune("prune_archive", retention.archive_days),
            await self._prune("prune_dead_letters", retention.dead_letter_days, _expire),
            await self._operations.remove_lines(retention.operation_days),
            await self._journal.prune(retention.journal_days),
        )

    async def _prune(self, query: str, days: float | None, remove: Remove | None = None) -> int:
        if days is None:
            return 0
        now = self._clock.now()
        values: dict[str, Any] = {"before": to_seconds(now - timedelta(days=days)), "limit": PRUNE_MAX}
        total, removed = 0, PRUNE_MAX
        while removed == PRUNE_MAX:
            removed = await self._database.write(remove or _delete, SQL[query], values, now)
            total += removed
        return total


def _delete(conn: sqlite3.Connection, sql: str, values: dict[str, Any], _: datetime) -> int:
    return conn.execute(sql, values).rowcount


def _expire(conn: sqlite3.Connection, sql: str, values: dict[str, Any], now: datetime) -> int:
    """Remove dead letters; each leaves a line in the operation log."""
    removed = conn.execute(sql, values).fetchall()
    record(conn, now, EXPIRE_ACTOR, EXPIRE_VERB, [(UUID(event_id), None) for (event_id,) in removed])
    journal.add(conn, JournalKind.EXPIRED, [event_id for (event_id,) in removed], now)
    return len(removed)


def _sweep(conn: sqlite3.Connection, now: float) -> list[DeadRelay]:
    dead = [DeadRelay(relay, lanes) for relay, lanes in conn.execute(SQL["dead_relays"], {"now": now})]
    conn.execute(SQL["sweep"], {"now": now})
    return dead
