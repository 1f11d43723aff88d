"""The relay's verbs on SQLite. Each is one transaction, run in one hop to the store's own thread."""

from __future__ import annotations

import json
import sqlite3
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager
from datetime import datetime, timedelta
from pathlib import Path
from typing import Any
from uuid import UUID

from outrider.clock import Clock, SystemClock
from outrider.errors import Misuse
from outrider.event import Readiness, StagedEvent, Stream, default_topic, lane_of
from outrider.finding import Finding
from outrider.outcome import CONFIRMED
from outrider.store import Cause, Desk, Due, DueStream, Fetched, Hold, Lease, Pulse, Settlement, Upkeep
from outrider.stores.sqlite import settling, staging
from outrider.stores.sqlite.database import Database, translated
from outrider.stores.sqlite.desk import SqliteDesk
from outrider.stores.sqlite.examine import examine
from outrider.stores.sqlite.rows import load, to_event, to_seconds
from outrider.stores.sqlite.upkeep import SqliteUpkeep
from outrider.stores.sqlite.wakeups import Listening

LANES = load("lanes.sql")
SQL = load("relay.sql")

FILL_MAX = 10_000
"""How many rows from elsewhere get their lane in one transaction."""


class SqliteStore:
    """Events in a SQLite file that `outrider db migrate` has prepared. Time is the host's, given by the clock."""

    def __init__(self, path: str | Path, *, clock: Clock | None = None, archive: bool = True) -> None:
        self.clock = clock or SystemClock()
        self.archive = archive
        self.database = Database(path)
        self.lanes = _prepare(self.database.connection)
        self.desk: Desk = SqliteDesk(self.database, self.clock)
        self.upkeep: Upkeep = SqliteUpkeep(self.database, self.clock)
        self._listeners: list[Callable[[], None]] = []

    async def beat(self, relay: str, lease_seconds: float, *, joining: bool) -> Pulse | None:
        return await self.database.write(_beat, relay, lease_seconds, joining, self.clock.now())

    async def claim(self, relay: str, lanes: Sequence[int]) -> Lease:
        return await self.database.write(_claim, relay, lanes, self.clock.now())

    async def release(self, lease: Lease) -> None:
        rows = [{"owner": lease.owner, "lane": lane, "epoch": epoch} for lane, epoch in lease.epochs.items()]
        await self.database.write(_release, rows)

    async def leave(self, relay: str) -> None:
        await self.database.write(_leave, relay)

    async def fetch(self, lease: Lease, quotas: Mapping[int, int]) -> Fetched:
        now = self.clock.now()
        fetched = await self.database.read(_fetch_if_laned, lease, quotas, now)
        while fetched is None:
            fetched = await self.database.write(_fill_and_fetch, lease, quotas, now)
        return fetched

    async def blocked(self, streams: Sequence[Stream]) -> set[Stream]:
        return await self.database.read(_blocked, streams)

    async def due(self, lease: Lease, events_max: int) -> Due:
        return await self.database.read(_due, lease, events_max, self.clock.now())

    async def confirm(self, lease: Lease, events: Sequence[StagedEvent]) -> int:
        topics = [default_topic(event.event_type, event.topic, event.routing_key) for event in events]
        streams = [Stream(event.lane, topic, event.key) for event, topic in zip(events, topics, strict=True)]
        return await self.settle(lease, [Settlement(e, s, CONFIRMED) for e, s in zip(events, streams, strict=True)])

    async def settle(self, lease: Lease, settlements: Sequence[Settlement], emptied: Sequence[Stream] = ()) -> int:
        return await self.database.write(
            settling.settle, lease, settlements, emptied, now=self.clock.now(), archive=self.archive
        )

    async def renew_hold(self, hold: Hold, event_ids: Sequence[UUID]) -> list[StagedEvent]:
        return await self.database.write(_renew_hold, hold, event_ids, self.clock.now())

    async def settle_hold(self, hold: Hold, confirmed: Sequence[UUID], yielded: Sequence[UUID]) -> None:
        await self.database.write(_settle_hold, hold, confirmed, yielded, now=self.clock.now(), archive=self.archive)

    async def hint(self) -> None:
        for wake in self._listeners:
            wake()

    def wakeups(self, wake: Callable[[], None]) -> AbstractAsyncContextManager[None]:
        return Listening(self._listeners, wake, self.database.path)

    async def examine(self) -> list[Finding]:
        return await self.database.read(examine, self.database.path)

    async def close(self) -> None:
        await self.database.close()


def _release(conn: sqlite3.Connection, rows: list[dict[str, Any]]) -> None:
    # A cursor must not leave its thread: whoever finalises it elsewhere resets a statement that is in use here.
    conn.executemany(LANES["release"], rows)


def _prepare(conn: sqlite3.Connection) -> int:
    """Read the number of lanes, and teach the connection to compute a lane for rows from elsewhere."""
    try:
        with translated():
            lanes = staging.read_lanes(conn)
    except (Misuse, TypeError) as error:
        conn.close()
        raise Misuse("the database has no outbox, or half of one; run `outrider db migrate`") from error
    conn.create_function("outrider_lane", 2, lambda key, priority: lane_of(key, priority, lanes), deterministic=True)
    return lanes


def _beat(conn: sqlite3.Connection, relay: str, lease_seconds: float, joining: bool, now: datetime) -> Pulse | None:
    until = now + timedelta(seconds=lease_seconds)
    values = {"relay": relay, "until": to_seconds(until), "now": to_seconds(now)}
    if not conn.execute(LANES["join" if joining else "beat"], values).rowcount:
        return None
    relays = conn.execute(LANES["alive"], values).fetchone()[0]
    return Pulse(relays, [lane for (lane,) in conn.execute(LANES["free_lanes"], values)])


def _claim(conn: sqlite3.Connection, relay: str, lanes: Sequence[int], now: datetime) -> Lease:
    values = {"relay": relay, "owner": relay, "lanes": json.dumps(sorted(set(lanes))), "now": to_seconds(now)}
    before = {lane: epoch for lane, epoch, _ in conn.execute(LANES["owned"], values)}
    conn.execute(LANES["claim"], values)
    after = {lane: epoch for lane, epoch, _ in conn.execute(LANES["owned"], values)}
    return Lease(relay, {lane: epoch for lane, epoch in sorted(after.items()) if before.get(lane) != epoch})


def _leave(conn: sqlite3.Connection, relay: str) -> None:
    conn.execute(LANES["leave"], {"relay": relay})
    conn.execute(LANES["leave_lanes"], {"relay": relay})


def _fetch_if_laned(conn: sqlite3.Connection, lease: Lease, quotas: Mapping[int, int], now: datetime) -> Fetched | None:
    """Read the lanes, unless a row without a lane might belong before what would be read."""
    return None if staging.has_laneless(conn) else _fetch(conn, lease, quotas, now)


def _fill_and_fetch(conn: sqlite3.Connection, lease: Lease, quotas: Mapping[int, int], now: datetime) -> Fetched | None:
    """Fill lanes and read them in the same transaction; None if there are more than one transaction should fill."""
    return None if staging.fill_lanes(conn, FILL_MAX) == FILL_MAX else _fetch(conn, lease, quotas, now)


def _fetch(conn: sqlite3.Connection, lease: Lease, quotas: Mapping[int, int], now: datetime) -> Fetched:
    owned, blocked = settling.fence(conn, lease)
    found: list[StagedEvent] = []
    for lane in sorted(owned & quotas.keys()):
        values = {"lane": lane, "limit": quotas[lane], "now": to_seconds(now)}
        found += map(to_event, conn.execute(SQL["fetch"], values))
    return Fetched(found, owned, blocked)


def _blocked(conn: sqlite3.Connection, streams: Sequence[Stream]) -> set[Stream]:
    return {streams[place] for (place,) in conn.execute(SQL["blocked"], {"streams": json.dumps(list(streams))})}


def _due(conn: sqlite3.Connection, lease: Lease, events_max: int, now: datetime) -> Due:
    owned = settling.fence(conn, lease).owned
    streams: list[DueStream] = []
    room = events_max
    for *names, cause, until in conn.execute(SQL["due"], {"lanes": json.dumps(list(owned))}):
        if until > now.timestamp() or room <= 0:
            return Due(streams, max(0.0, round(until - now.timestamp(), 6)))
        stream = Stream(*names)
        values = {**stream._asdict(), "limit": room if cause == Cause.DRAINING else 1, "now": to_seconds(now)}
        events = [to_event(row) for row in conn.execute(SQL["waiting"], values)]
        streams.append(DueStream(stream, Cause(cause), events))
        room -= len(events)
    return Due(streams, None)


def _renew_hold(conn: sqlite3.Connection, hold: Hold, event_ids: Sequence[UUID], now: datetime) -> list[StagedEvent]:
    until = now + timedelta(seconds=hold.seconds)
    ids = _id_list(event_ids)
    values = {"ids": ids, "owner": hold.owner, "now": to_seconds(now), "until": to_seconds(until)}
    mine = [to_event(row)._replace(readiness=Readiness.READY) for row in conn.execute(SQL["held"], values)]
    conn.execute(SQL["renew_hold"], values)
    return mine


def _settle_hold(
    conn: sqlite3.Connection,
    hold: Hold,
    confirmed: Sequence[UUID],
    yielded: Sequence[UUID],
    *,
    now: datetime,
    archive: bool,
) -> None:
    mine = conn.execute(
        SQL["held_by"], {"ids": _id_list(confirmed), "owner": hold.owner, "now": to_seconds(now)}
    ).fetchall()
    settling.depart(conn, [position for (position,) in mine], now, archive)
    conn.execute(SQL["yield_hold"], {"ids": _id_list(yielded), "owner": hold.owner, "now": to_seconds(now)})


def _id_list(event_ids: Sequence[UUID]) -> str:
    return json.dumps([str(event_id) for event_id in event_ids])
