"""The outbox in a SQLite file. Each operation is one transaction, run in one call to the store's thread."""

from __future__ import annotations

import json
import sqlite3
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager
from datetime import datetime, timedelta
from pathlib import Path
from typing import Any
from uuid import UUID

from outrider.checks import CheckResult
from outrider.clock import Clock, SystemClock
from outrider.event import OutboxRow, Readiness, Stream, TopicRule, default_topic, lane_of, resolve_topic
from outrider.operation_log import OperationLog
from outrider.outbox.model import (
    BlockReason,
    Due,
    DueStream,
    Fetched,
    HeartbeatResult,
    Lease,
    OptimisticClaim,
    Settlements,
)
from outrider.outbox.store import OutboxAdmin, OutboxJournal, OutboxMaintenance
from outrider.stores.sqlite import outbox_settle, staging
from outrider.stores.sqlite.checks import check
from outrider.stores.sqlite.database import SqliteDatabase, installation
from outrider.stores.sqlite.journal import SqliteJournal
from outrider.stores.sqlite.operation_log import SqliteOperationLog
from outrider.stores.sqlite.outbox_admin import SqliteMaintenance, SqliteOutboxAdmin
from outrider.stores.sqlite.rows import load, to_event, to_seconds
from outrider.stores.sqlite.wakeup import SqliteListener

SQL = load()

FILL_MAX = 10_000
"""The maximum of foreign rows that get their lane in one transaction."""


class SqliteStore:
    """Events in a SQLite file prepared by `outrider db migrate`. The clock gives the time of the host."""

    def __init__(
        self,
        path: str | Path,
        *,
        clock: Clock | None = None,
        archive: bool = True,
        topic_rule: TopicRule = default_topic,
    ) -> None:
        self.clock = clock or SystemClock()
        self.archive = archive
        self.topic_rule = topic_rule
        self.database = SqliteDatabase(path)
        self.lanes = _prepare(self.database.connection)
        self.admin: OutboxAdmin = SqliteOutboxAdmin(self)
        self.maintenance: OutboxMaintenance = SqliteMaintenance(self.database, self.clock)
        self.operations: OperationLog = SqliteOperationLog(self.database, self.clock)
        self.journal: OutboxJournal = SqliteJournal(self.database, self.clock)
        self._listeners: list[Callable[[], None]] = []

    async def heartbeat(self, relay: str, lease_seconds: float, *, first: bool) -> HeartbeatResult | None:
        return await self.database.write(_heartbeat, relay, lease_seconds, first, self.clock.now())

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
        return fetched._replace(events=[resolve_topic(event, self.topic_rule) for event in fetched.events])

    async def blocked(self, streams: Sequence[Stream]) -> set[Stream]:
        return await self.database.read(_blocked, streams)

    async def due(self, lease: Lease, events_max: int) -> Due:
        return await self.database.read(_due, lease, events_max, self.clock.now())

    async def last_values(self, wanted: Sequence[tuple[str, Stream]]) -> dict[tuple[str, Stream], int]:
        return await self.database.read(_last_values, wanted)

    async def settle(self, lease: Lease, settlements: Settlements) -> int:
        return await self.database.write(
            outbox_settle.settle, lease, settlements, now=self.clock.now(), archive=self.archive
        )

    async def renew_claim(self, claim: OptimisticClaim, event_ids: Sequence[UUID]) -> list[OutboxRow]:
        return await self.database.write(_renew_claim, claim, event_ids, self.clock.now())

    async def settle_claim(self, claim: OptimisticClaim, confirmed: Sequence[UUID], yielded: Sequence[UUID]) -> None:
        await self.database.write(_settle_claim, claim, confirmed, yielded, now=self.clock.now(), archive=self.archive)

    async def notify(self) -> None:
        for wake in self._listeners:
            wake()

    def listen(self, wake: Callable[[], None]) -> AbstractAsyncContextManager[None]:
        return SqliteListener(self._listeners, wake, self.database.path)

    async def check(self) -> list[CheckResult]:
        return await self.database.read(check, self.database.path)

    async def close(self) -> None:
        await self.database.close()


def _release(conn: sqlite3.Connection, rows: list[dict[str, Any]]) -> None:
    # A cursor must stay on its thread: finalising it on another thread resets a statement that is in use here.
    conn.executemany(SQL["release"], rows)


def _last_values(conn: sqlite3.Connection, wanted: Sequence[tuple[str, Stream]]) -> dict[tuple[str, Stream], int]:
    found = {}
    for rule, stream in wanted:
        row = conn.execute(SQL["last_values"], {"rule": rule, **stream._asdict()}).fetchone()
        if row is not None:
            found[rule, stream] = int(row[0])
    return found


def _prepare(conn: sqlite3.Connection) -> int:
    """Read the number of lanes, and register the SQL function that computes the lane of a foreign row."""
    try:
        lanes = installation(conn, "outbox")["lanes"]
    except BaseException:
        conn.close()
        raise
    conn.create_function("outrider_lane", 2, lambda key, priority: lane_of(key, priority, lanes), deterministic=True)
    return lanes


def _heartbeat(
    conn: sqlite3.Connection, relay: str, lease_seconds: float, first: bool, now: datetime
) -> HeartbeatResult | None:
    lease = timedelta(seconds=lease_seconds)
    times = {"from": to_seconds(now - lease), "until": to_seconds(now + lease), "now": to_seconds(now)}
    values = {"relay": relay, **times}
    if not conn.execute(SQL["join" if first else "heartbeat"], values).rowcount:
        return None
    relays = conn.execute(SQL["alive"], values).fetchone()[0]
    return HeartbeatResult(relays, [lane for (lane,) in conn.execute(SQL["free_lanes"], values)])


def _claim(conn: sqlite3.Connection, relay: str, lanes: Sequence[int], now: datetime) -> Lease:
    values = {"relay": relay, "owner": relay, "lanes": json.dumps(sorted(set(lanes))), "now": to_seconds(now)}
    before = {lane: epoch for lane, epoch, _ in conn.execute(SQL["owned"], values)}
    conn.execute(SQL["claim"], values)
    after = {lane: epoch for lane, epoch, _ in conn.execute(SQL["owned"], values)}
    return Lease(relay, {lane: epoch for lane, epoch in sorted(after.items()) if before.get(lane) != epoch})


def _leave(conn: sqlite3.Connection, relay: str) -> None:
    conn.execute(SQL["leave"], {"relay": relay})
    conn.execute(SQL["leave_lanes"], {"relay": relay})


def _fetch_if_laned(conn: sqlite3.Connection, lease: Lease, quotas: Mapping[int, int], now: datetime) -> Fetched | None:
    """Read the lanes. Return None if a row without a lane might come before the rows of the fetch."""
    return None if staging.has_laneless(conn) else _fetch(conn, lease, quotas, now)


def _fill_and_fetch(conn: sqlite3.Connection, lease: Lease, quotas: Mapping[int, int], now: datetime) -> Fetched | None:
    """Fill in lanes and read them in the same transaction; None if there are too many rows for one transaction."""
    return None if staging.fill_lanes(conn, FILL_MAX) == FILL_MAX else _fetch(conn, lease, quotas, now)


def _fetch(conn: sqlite3.Connection, lease: Lease, quotas: Mapping[int, int], now: datetime) -> Fetched:
    owned, blocked = outbox_settle.fence(conn, lease)
    found: list[OutboxRow] = []
    for lane in sorted(owned & quotas.keys()):
        values = {"lane": lane, "limit": quotas[lane], "now": to_seconds(now)}
        found += map(to_event, conn.execute(SQL["fetch"], values))
    return Fetched(found, owned, blocked)


def _blocked(conn: sqlite3.Connection, streams: Sequence[Stream]) -> set[Stream]:
    return {streams[index] for (index,) in conn.execute(SQL["blocked"], {"streams": json.dumps(list(streams))})}


def _due(conn: sqlite3.Connection, lease: Lease, events_max: int, now: datetime) -> Due:
    owned = outbox_settle.fence(conn, lease).owned
    streams: list[DueStream] = []
    room = events_max
    for *names, cause, until in conn.execute(SQL["due"], {"lanes": json.dumps(list(owned))}):
        if until > now.timestamp() or room <= 0:
            return Due(streams, max(0.0, round(until - now.timestamp(), 6)))
        stream = Stream(*names)
        values = {**stream._asdict(), "limit": room if cause == BlockReason.DRAINING else 1, "now": to_seconds(now)}
        events = [to_event(row) for row in conn.execute(SQL["waiting"], values)]
        streams.append(DueStream(stream, BlockReason(cause), events))
        room -= len(events)
    return Due(streams, None)


def _renew_claim(
    conn: sqlite3.Connection, claim: OptimisticClaim, event_ids: Sequence[UUID], now: datetime
) -> list[OutboxRow]:
    until = now + timedelta(seconds=claim.seconds)
    ids = _id_list(event_ids)
    values = {"ids": ids, "owner": claim.owner, "now": to_seconds(now), "until": to_seconds(until)}
    mine = [to_event(row)._replace(readiness=Readiness.READY) for row in conn.execute(SQL["claimed_rows"], values)]
    conn.execute(SQL["renew_claim"], values)
    return mine


def _settle_claim(
    conn: sqlite3.Connection,
    claim: OptimisticClaim,
    confirmed: Sequence[UUID],
    yielded: Sequence[UUID],
    *,
    now: datetime,
    archive: bool,
) -> None:
    mine = conn.execute(
        SQL["claimed_positions"], {"ids": _id_list(confirmed), "owner": claim.owner, "now": to_seconds(now)}
    ).fetchall()
    outbox_settle.depart(conn, [position for (position,) in mine], now, archive)
    conn.execute(SQL["yield_claim"], {"ids": _id_list(yielded), "owner": claim.owner, "now": to_seconds(now)})


def _id_list(event_ids: Sequence[UUID]) -> str:
    return json.dumps([str(event_id) for event_id in event_ids])
