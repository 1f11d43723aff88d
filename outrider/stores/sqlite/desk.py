"""What people do with the SQLite store's events."""

from __future__ import annotations

import json
import sqlite3
from collections.abc import Sequence
from datetime import datetime
from typing import Any, NamedTuple
from uuid import UUID

from outrider.clock import Clock
from outrider.errors import NotFound, Transient
from outrider.event import Stream, default_topic
from outrider.lifecycle import State
from outrider.outcome import Bury, Policy, Reason
from outrider.store import Criteria, Held
from outrider.stores.sqlite import settling, staging
from outrider.stores.sqlite.database import Database
from outrider.stores.sqlite.rows import load, to_facts, to_moment, to_seconds

SQL = load("desk.sql")
LANES = load("lanes.sql")

LOOK_MAX = 10_000
"""How many events, and how many blocked streams, are looked at for their topics."""


class Chosen(NamedTuple):
    """A dead letter that a person named."""

    event_id: str
    stream: Stream
    policy: str


class SqliteDesk:
    """Listing, replaying, burying and discarding."""

    def __init__(self, database: Database, clock: Clock) -> None:
        self._database = database
        self._clock = clock

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

    async def topics(self, limit: int) -> list[str]:
        return await self._database.read(_topics, limit)

    async def relays(self) -> int:
        return await self._database.read(_relays, self._clock.now())

    async def blocked_streams(self, limit: int) -> list[Held]:
        return await self._database.read(_blocked_streams, limit)

    async def replay(self, event_ids: Sequence[UUID], actor: str) -> int:
        return await self._database.write(_replay, event_ids, actor, self._clock.now())

    async def bury(self, event_id: UUID, actor: str, failure: dict[str, Any], policy: str) -> bool:
        outcome = Bury(Reason.BY_HAND, failure, Policy(policy))
        return await self._database.write(_bury, str(event_id), actor, outcome, self._clock.now())

    async def discard(self, event_ids: Sequence[UUID], actor: str) -> int:
        return await self._database.write(_discard, event_ids, actor, self._clock.now())


def _counts(conn: sqlite3.Connection) -> dict[str, int]:
    sent, dead = conn.execute(SQL["count_settled"]).fetchone()
    return {**dict(conn.execute(SQL["count_states"]).fetchall()), State.SENT: sent, State.DEAD_LETTER: dead}


def _list(conn: sqlite3.Connection, query: str, criteria: Criteria) -> list[dict[str, Any]]:
    ids = json.dumps([str(event_id) for event_id in criteria.event_ids]) if criteria.event_ids else None
    wanted = {name: getattr(criteria, name) for name in ("state", "event_type", "topic", "key", "reason", "limit")}
    return _facts(conn.execute(SQL[query], {**wanted, "ids": ids}))


def _find(conn: sqlite3.Connection, event_id: UUID) -> dict[str, Any] | None:
    for query in ("find_event", "find_sent", "find_dead_letter"):
        if found := _facts(conn.execute(SQL[query], {"event_id": str(event_id)})):
            return found[0]
    return None


def _facts(cursor: sqlite3.Cursor) -> list[dict[str, Any]]:
    names = [column[0] for column in cursor.description]
    return [to_facts(names, row) for row in cursor]


def _topics(conn: sqlite3.Connection, limit: int) -> list[str]:
    return sorted({default_topic(*row) for row in conn.execute(SQL["topics"], {"look": LOOK_MAX})})[:limit]


def _relays(conn: sqlite3.Connection, now: datetime) -> int:
    return int(conn.execute(LANES["alive"], {"now": to_seconds(now)}).fetchone()[0])


def _blocked_streams(conn: sqlite3.Connection, limit: int) -> list[Held]:
    rows = conn.execute(SQL["blocked_streams"], {"limit": limit})
    return [Held(Stream(*names), cause, to_moment(until), waiting) for *names, cause, until, waiting in rows]


def _replay(conn: sqlite3.Connection, event_ids: Sequence[UUID], actor: str, now: datetime) -> int:
    chosen = _chosen(conn, event_ids)
    for dead in chosen:
        held = dead.policy == Policy.HOLD
        conn.execute(SQL["resume" if held else "stage_again"], {"event_id": dead.event_id})
        _remove(conn, dead, let_go=held, now=now)
        _record(conn, "replay", dead.event_id, actor, now)
    return len(chosen)


def _discard(conn: sqlite3.Connection, event_ids: Sequence[UUID], actor: str, now: datetime) -> int:
    chosen = _chosen(conn, event_ids)
    for dead in chosen:
        if dead.policy == Policy.HOLD:
            settling.mark_skipped(conn, dead.event_id, State.PARKED)
        _remove(conn, dead, let_go=True, now=now)
        _record(conn, "discard", dead.event_id, actor, now)
    return len(chosen)


def _bury(conn: sqlite3.Connection, event_id: str, actor: str, outcome: Bury, now: datetime) -> bool:
    if staging.has_laneless(conn):
        staging.fill_lanes(conn, -1)
    row = conn.execute(SQL["buriable"], {"event_id": event_id}).fetchone()
    if row is None:
        return False
    position, lane, event_type, topic, routing_key, key = row
    stream = Stream(lane, default_topic(event_type, topic, routing_key), key)
    conn.execute(LANES["take_lane"], {"lane": lane})
    _park_before(conn, position, stream)
    block = settling.bury(conn, settling.Place(position, event_id, stream), outcome, spent=0, now=now)
    settling.write_streams(conn, {stream: block}, (), now)
    _record(conn, "bury", event_id, actor, now)
    return True


def _park_before(conn: sqlite3.Connection, position: int, stream: Stream) -> None:
    """Let earlier events of the stream wait too, or what takes the buried one's place would go out before them."""
    rows = conn.execute(SQL["pending_before"], {**stream._asdict(), "id": position}).fetchall()
    mine = [row for row in rows if default_topic(*row[1:4]) == stream.topic]
    if any(row[4] == State.OPTIMISTIC for row in mine):
        raise Transient("an earlier event of its stream is being sent by its writer; try again in a few seconds")
    earlier = [row[0] for row in mine]
    facts = [{"id": before, "lane": stream.lane, "topic": stream.topic} for before in earlier]
    conn.executemany(settling.SQL["park"], facts)


def _chosen(conn: sqlite3.Connection, event_ids: Sequence[UUID]) -> list[Chosen]:
    rows = conn.execute(SQL["chosen"], {"ids": json.dumps([str(event_id) for event_id in event_ids])})
    return [Chosen(event_id, Stream(*names), policy) for event_id, *names, policy in rows]


def _remove(conn: sqlite3.Connection, dead: Chosen, *, let_go: bool, now: datetime) -> None:
    """Take a dead letter away. A held stream goes on once none of its dead letters is held."""
    conn.execute(SQL["remove_dead_letter"], {"event_id": dead.event_id})
    if let_go:
        conn.execute(SQL["let_go"], {**dead.stream._asdict(), "now": to_seconds(now)})


def _record(conn: sqlite3.Connection, verb: str, event_id: str, actor: str, now: datetime) -> None:
    conn.execute(SQL["record"], {"now": to_seconds(now), "actor": actor, "verb": verb, "event_id": event_id})
