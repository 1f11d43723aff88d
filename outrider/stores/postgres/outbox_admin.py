"""Admin operations and maintenance of the outbox in PostgreSQL."""

from __future__ import annotations

import json
import re
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from datetime import UTC, date, datetime, time, timedelta
from typing import TYPE_CHECKING, Any
from uuid import UUID

import asyncpg

from outrider.errors import NotFound, Transient
from outrider.event import DeadLetterReason, OnDeadLetter, Stream, topic_of
from outrider.outbox.model import (
    EXPIRE_ACTOR,
    EXPIRE_VERB,
    BlockedStream,
    Criteria,
    DeadLettered,
    DeadLetterEdit,
    DeadRelay,
    Pruned,
    Retention,
    State,
)
from outrider.stores.postgres import statements
from outrider.stores.postgres.database import STATEMENT_SECONDS, PostgresDatabase
from outrider.stores.postgres.journal import PostgresJournal
from outrider.stores.postgres.operation_log import PostgresOperationLog, record
from outrider.stores.postgres.outbox_settle import DeadLetterRow, PostgresSettlement
from outrider.stores.postgres.statements import DAYS_AHEAD

if TYPE_CHECKING:
    from outrider.stores.postgres.outbox import PostgresStore


LOOK_PER_LANE, LOOK_MAX = 100, 10_000
"""The maximum of events of a lane, and of blocked streams, that are read to list topics."""

_JSON = ("payload", "headers", "retry", "failure")

_DAILY = re.compile(r"outbox_archive_\d{8}")

BATCH_MAX = 1000

LOCK_TIMEOUT_MS = 200


class PostgresOutboxAdmin:
    """The admin of the outbox: lists, replays, dead-letters and discards events."""

    def __init__(self, store: PostgresStore) -> None:
        self._store = store

    async def counts(self, *, sent: bool = True) -> dict[str, int]:
        rows = await self._fetch("count_states") + (await self._fetch("count_sent") if sent else [])
        return {row[0]: row[1] for row in rows}

    async def events(self, criteria: Criteria) -> list[dict[str, Any]]:
        verb = "sent" if criteria.state == State.SENT else "events"
        return [_facts(row) for row in await self._fetch(verb, *_filter(criteria))]

    async def event(self, event_id: UUID) -> dict[str, Any]:
        criteria = Criteria(event_ids=(event_id,))
        for verb, extra in (("events", ()), ("sent", ()), ("dead_letters", (None,))):
            if rows := await self._fetch(verb, *_filter(criteria), *extra):
                return _facts(rows[0])
        raise NotFound(f"no event {event_id} in outbox, archive or dead letters; it may have been pruned or deleted")

    async def dead_letters(self, criteria: Criteria) -> list[dict[str, Any]]:
        return [_facts(row) for row in await self._fetch("dead_letters", *_filter(criteria), criteria.reason)]

    async def dead_letter_groups(self, criteria: Criteria) -> list[dict[str, Any]]:
        return [dict(row) for row in await self._fetch("dead_letter_groups", *_filter(criteria), criteria.reason)]

    async def has_due(self) -> bool:
        [[due]] = await self._fetch("has_due")
        return bool(due)

    async def topics(self, limit: int) -> list[str]:
        rows = await self._fetch("topics", LOOK_PER_LANE, LOOK_MAX)
        return sorted({topic_of(self._store.topic_rule, *row) for row in rows})[:limit]

    async def relays(self) -> int:
        [[alive]] = await self._fetch("alive")
        return int(alive)

    async def lane_owner(self, lane: int) -> str | None:
        rows = await self._fetch("lane_owner", lane)
        return rows[0][0] if rows else None

    async def blocked_streams(self, limit: int) -> list[BlockedStream]:
        rows = await self._fetch("blocked_streams", limit)
        return [BlockedStream(Stream(*row[:3]), row["cause"], row["until"], row["waiting"]) for row in rows]

    async def replay(self, event_ids: Sequence[UUID], actor: str) -> int:
        async with self._store.database.transaction() as conn:
            await conn.execute(self._store.sql["lock_streams"], list(event_ids))
            replayed = await conn.fetch(self._store.sql["resume"], list(event_ids))
            again = await conn.fetch(self._store.sql["stage_again"], list(event_ids))
            await self._unblock(conn, replayed)
            await self._record(conn, actor, "replay", [*replayed, *again])
        return len(replayed) + len(again)

    async def dead_letter(self, event_id: UUID, actor: str, failure: dict[str, Any], policy: str) -> bool:
        async with self._store.database.transaction() as conn:
            row = await conn.fetchrow(self._store.sql["position_of"], event_id)
            if row is None:
                return False
            # First the lane, then the event again: the owner of the lane may have settled the event in between.
            await conn.execute(self._store.sql["take_lane"], row["lane"])
            topic = topic_of(self._store.topic_rule, row["event_type"], row["topic"], row["routing_key"])
            stream, outcome = (
                Stream(row["lane"], topic, row["key"]),
                DeadLettered(DeadLetterReason.BY_HAND, failure, OnDeadLetter(policy)),
            )
            writing = PostgresSettlement(self._store, conn)
            if await self._park_before(conn, stream, row["id"]):
                writing.parked.append(stream)
            dead_lettered = await writing.dead_letter(
                [DeadLetterRow(event_id, row["id"], stream, outcome, row["event_type"], row["sequence"])], spent=0
            )
            await writing.streams()
            await self._record(conn, actor, "dead_letter", [{"event_id": event_id}] * dead_lettered, policy=policy)
            return dead_lettered > 0

    async def _park_before(self, conn: Any, stream: Stream, position: int) -> int:
        """Park earlier events of the stream as well; otherwise the relay would publish the skip marker before them."""
        rows = await conn.fetch(self._store.sql["pending_before"], stream.lane, stream.key, position)
        rule = self._store.topic_rule
        mine = [
            row for row in rows if topic_of(rule, row["event_type"], row["topic"], row["routing_key"]) == stream.topic
        ]
        if any(row["state"] == State.OPTIMISTIC for row in mine):
            raise Transient("an earlier event of its stream is being sent by its writer; try again in a few seconds")
        ids = [row["event_id"] for row in mine]
        count = len(ids)
        return len(await conn.fetch(self._store.sql["wait"], ids, [stream.topic] * count, [State.PARKED] * count))

    async def edit(self, event_id: UUID, actor: str, edit: DeadLetterEdit) -> bool:
        async with self._store.database.transaction() as conn:
            await conn.execute(self._store.sql["lock_streams"], [event_id])
            row = await conn.fetchrow(self._store.sql["editable"], event_id)
            if row is None:
                return False
            moved = edit.topic not in (None, row["topic"])
            if moved:
                await conn.execute(self._store.sql["leave_marker"], event_id)
            headers = edit.headers_over(row["headers"], moved=moved)
            await conn.execute(self._store.sql["edit"], event_id, edit.payload, headers, edit.topic, moved)
            await self._unblock(conn, [row] if moved else [])
            await self._record(conn, actor, "edit", [row], **edit.changes(row["payload"], row["topic"]))
            return True

    async def discard(self, event_ids: Sequence[UUID], actor: str) -> int:
        async with self._store.database.transaction() as conn:
            await conn.execute(self._store.sql["lock_streams"], list(event_ids))
            removed = await conn.fetch(self._store.sql["discard"], list(event_ids))
            await self._unblock(conn, removed)
            await self._record(conn, actor, "discard", removed)
        return len(removed)

    async def _unblock(self, conn: Any, rows: list[Any]) -> None:
        if rows:
            streams = [(row["lane"], row["topic"], row["stream_key"]) for row in rows]
            await conn.execute(self._store.sql["drain_held"], *(list(column) for column in zip(*streams, strict=True)))

    async def _record(self, conn: Any, actor: str, verb: str, rows: Sequence[Any], **detail: Any) -> None:
        await record(conn, self._store.schema, actor, verb, [(row["event_id"], None) for row in rows], **detail)

    async def _fetch(self, verb: str, *args: Any) -> list[Any]:
        return await self._store.database.fetch(self._store.sql[verb], *args)


def _filter(criteria: Criteria) -> tuple[Any, ...]:
    ids = list(criteria.event_ids)
    return ids, criteria.state, criteria.event_type, criteria.topic, criteria.key, criteria.limit


def _facts(row: Any) -> dict[str, Any]:
    facts = dict(row)
    for name in _JSON:
        if facts.get(name) is not None:
            facts[name] = json.loads(facts[name])
    facts["key"] = facts.pop("stream_key", None) or facts["key"]
    facts["position"] = facts.pop("id")
    return facts


class PostgresMaintenance:
    """The maintenance of the outbox: keeps the tables bounded."""

    def __init__(self, database: PostgresDatabase, schema: str, *, journal: bool = False) -> None:
        self._database, self._schema = database, schema
        self._sql = statements.load(schema, journal=journal)
        self._journal = PostgresJournal(database, schema)
        self._operations = PostgresOperationLog(database, schema)

    async def sweep(self) -> list[DeadRelay]:
        return [DeadRelay(row["relay_id"], row["lanes"]) for row in await self._database.fetch(self._sql["sweep"])]

    async def take_duty(self, name: str, every_seconds: float) -> bool:
        return bool(await self._database.fetch(self._sql["take_duty"], name, every_seconds))

    async def prepare(self) -> None:
        """Create the partitions of today and the coming days."""
        today, existing = await self._calendar()
        for day in (today + timedelta(days=ahead) for ahead in range(DAYS_AHEAD + 1)):
            if day not in existing:
                await self._make(day)

    async def prune(self, retention: Retention) -> Pruned:
        """Drop old partitions, delete other old rows in batches, and repair blocked streams."""
        await self._database.execute(self._sql["unblock_without_dead_letter"])
        await self._database.execute(self._sql["adopt_orphans"])
        await self._journal.note_prune(retention.archive_days)
        dropped = await self._drop_older_than(retention.archive_days)
        netted = await self._in_batches("prune_net", retention.archive_days)
        dead = 0 if retention.dead_letter_days is None else await self._expire(retention.dead_letter_days)
        operations = await self._operations.remove_lines(retention.operation_days)
        return Pruned(dropped + netted, dead, operations, await self._journal.prune(retention.journal_days))

    async def _expire(self, days: float) -> int:
        total, count = 0, BATCH_MAX
        while count == BATCH_MAX:
            async with self._database.transaction() as conn:
                gone = await conn.fetch(self._sql["prune_dead_letters"], days, BATCH_MAX, timeout=STATEMENT_SECONDS)
                events = [(row["event_id"], None) for row in gone]
                await record(conn, self._schema, EXPIRE_ACTOR, EXPIRE_VERB, events)
            count = len(gone)
            total += count
        return total

    async def _calendar(self) -> tuple[date, dict[date, str]]:
        [[today]] = await self._database.fetch(self._sql["today"])
        names = [row["relname"] for row in await self._database.fetch(self._sql["partitions"])]
        days = {_day(name): name for name in names if _DAILY.fullmatch(name)}
        return today, days

    async def _make(self, day: date) -> None:
        start, end = _midnight(day), _midnight(day + timedelta(days=1))
        [[netted]] = await self._database.fetch(self._sql["netted"], start, end)
        if netted:
            return
        async with self._alone() as conn:
            await conn.execute(
                f"CREATE TABLE IF NOT EXISTS {self._schema}.outbox_archive_{day:%Y%m%d} "
                f"PARTITION OF {self._schema}.outbox_archive FOR VALUES FROM ('{start}') TO ('{end}')"
            )

    async def _drop_older_than(self, days: float) -> int:
        today, existing = await self._calendar()
        # The whole day must be older than the retention, and not only its first hour.
        old = [name for day, name in existing.items() if day + timedelta(days=1) <= today - timedelta(days=days)]
        return sum([await self._drop(name) for name in old])

    async def _drop(self, name: str) -> int:
        rows = 0
        async with self._alone() as conn:
            # Another relay may have dropped the partition already.
            if await conn.fetchval("SELECT to_regclass($1) IS NOT NULL", f"{self._schema}.{name}"):
                rows = await conn.fetchval(f"SELECT count(*) FROM {self._schema}.{name}")  # noqa: S608
                await conn.execute(f"DROP TABLE {self._schema}.{name}")
        return rows

    @asynccontextmanager
    async def _alone(self) -> AsyncIterator[Any]:
        """Open a transaction for the archive. Busy locks postpone the change, so that no relay queues behind it."""
        try:
            async with self._database.transaction() as conn:
                await conn.execute(f"SET LOCAL lock_timeout = {LOCK_TIMEOUT_MS}")
                await conn.execute("SELECT pg_advisory_xact_lock(hashtextextended($1, 1))", f"outrider:{self._schema}")
                yield conn
        except Transient as error:
            if not isinstance(error.__cause__, asyncpg.LockNotAvailableError):
                raise

    async def _in_batches(self, verb: str, days: float) -> int:
        total, count = 0, BATCH_MAX
        while count == BATCH_MAX:
            count = await self._database.execute(self._sql[verb], days, BATCH_MAX)
            total += count
        return total


def _day(partition: str) -> date:
    return datetime.strptime(partition[-8:], "%Y%m%d").replace(tzinfo=UTC).date()


def _midnight(day: date) -> datetime:
    return datetime.combine(day, time(), UTC)
