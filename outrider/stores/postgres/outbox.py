"""The outbox in PostgreSQL: the operations of a relay."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from itertools import groupby
from operator import attrgetter
from typing import Any
from uuid import UUID

from outrider.checks import CheckResult
from outrider.errors import UsageError
from outrider.event import OutboxRow, Stream, TopicRule, default_topic, resolve_topic
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
from outrider.stores.postgres import statements
from outrider.stores.postgres.checks import check
from outrider.stores.postgres.database import PostgresDatabase, fence, location, pool_size
from outrider.stores.postgres.journal import PostgresJournal
from outrider.stores.postgres.operation_log import PostgresOperationLog
from outrider.stores.postgres.outbox_admin import PostgresMaintenance, PostgresOutboxAdmin
from outrider.stores.postgres.outbox_settle import confirm, settle
from outrider.stores.postgres.wakeup import NotificationListener, SequenceWatcher
from outrider.stores.queries import identifier

STREAM_COLUMNS = 4

CONNECTIONS_MIN = 8
"""The smallest pool by default: beside the workers of a relay there are heartbeats and maintenance."""

_TOPIC = attrgetter("topic")


class PostgresStore:
    """Events in PostgreSQL. Open the store with `await PostgresStore.open(url)`."""

    def __init__(
        self,
        database: PostgresDatabase,
        *,
        schema: str,
        lanes: int,
        archive: bool,
        topic_rule: TopicRule = default_topic,
        journal: bool = False,
    ) -> None:
        self.schema = schema
        self.lanes = lanes
        self.archive = archive
        self.topic_rule = topic_rule
        self.database = database
        self.sql = statements.load(schema, journal=journal)
        self.admin: OutboxAdmin = PostgresOutboxAdmin(self)
        self.maintenance: OutboxMaintenance = PostgresMaintenance(database, schema, journal=journal)
        self.operations: OperationLog = PostgresOperationLog(database, schema)
        self.journal: OutboxJournal = PostgresJournal(database, schema)
        # A channel has at most 63 characters, like a schema.
        self._notify_channel = NotificationListener(database, f"{schema[:50]}_outbox")
        self._watcher = SequenceWatcher(database, self.sql["sequence_look"], f"{schema}.outbox_id_seq")

    @classmethod
    async def open(
        cls,
        url: str,
        *,
        schema: str = "outrider",
        archive: bool = True,
        connections_max: int | None = None,
        pooled: bool = False,
        topic_rule: TopicRule = default_topic,
        concurrency: int | None = None,
    ) -> PostgresStore:
        """Connect to an installed outbox. A missing installation and a replica are rejected.

        `connections_max` limits the pool. The default is enough for the `concurrency` of a relay, its workers.
        """
        identifier(schema)
        size = pool_size(connections_max, concurrency, where=location(url), default=CONNECTIONS_MIN)
        size = max(size, CONNECTIONS_MIN) if connections_max is None else size
        database = PostgresDatabase(url, connections_max=size, pooled=pooled)
        await database.open()
        try:
            facts = await _installation(database, schema)
        except BaseException:
            await database.close()
            raise
        lanes, journal = int(facts["lanes"]), "journal" in facts
        return cls(database, schema=schema, lanes=lanes, archive=archive, topic_rule=topic_rule, journal=journal)

    async def heartbeat(self, relay: str, lease_seconds: float, *, first: bool) -> HeartbeatResult | None:
        [row] = await self.database.fetch(self.sql["heartbeat"], relay, lease_seconds, first)
        return HeartbeatResult(row["others"] + 1, list(row["free"])) if row["beaten"] else None

    async def claim(self, relay: str, lanes: Sequence[int]) -> Lease:
        rows = await self.database.fetch(self.sql["claim"], relay, list(lanes))
        return Lease(relay, {row["lane"]: row["epoch"] for row in sorted(rows)})

    async def release(self, lease: Lease) -> None:
        await self.database.execute(self.sql["release"], *fence(lease))

    async def leave(self, relay: str) -> None:
        await self.database.execute(self.sql["leave"], relay)

    async def fetch(self, lease: Lease, quotas: Mapping[int, int]) -> Fetched:
        limits = [quotas.get(lane, 0) for lane in lease.epochs]
        rows = await self.database.fetch(self.sql["fetch"], *fence(lease), limits)
        # Lanes are sorted, so bands of high priority come first.
        events = [OutboxRow._make(row[2:]) for row in rows if row[2] is not None]
        if not all(map(_TOPIC, events)):
            events = [resolve_topic(event, self.topic_rule) for event in events]
        return Fetched(events, frozenset(row[0] for row in rows), frozenset(row[0] for row in rows if row[1]))

    async def blocked(self, streams: Sequence[Stream]) -> set[Stream]:
        columns = [list(column) for column in zip(*streams, strict=True)]
        rows = await self.database.fetch(self.sql["blocked"], *columns)
        return {Stream(*row) for row in rows}

    async def due(self, lease: Lease, events_max: int) -> Due:
        rows = await self.database.fetch(self.sql["due"], *fence(lease), events_max)
        streams = [_due_stream(list(group)) for _, group in groupby(rows, key=lambda row: row[:3])]
        [[seconds]] = await self.database.fetch(self.sql["next_due"], list(lease.epochs))
        return Due(streams, seconds)

    async def last_values(self, wanted: Sequence[tuple[str, Stream]]) -> dict[tuple[str, Stream], int]:
        columns = [list(column) for column in zip(*((rule, *stream) for rule, stream in wanted), strict=True)]
        rows = await self.database.fetch(self.sql["last_values"], *columns)
        return {(rule, Stream(lane, topic, key)): value for rule, lane, topic, key, value in rows}

    async def settle(self, lease: Lease, settlements: Settlements) -> int:
        if settlements.only_confirmed and not settlements.last_values:
            # The common case is one statement, which needs no transaction.
            async with self.database.statement() as conn:
                return await confirm(self, conn, lease, settlements.confirmed)
        return await settle(self, lease, settlements)

    async def renew_claim(self, claim: OptimisticClaim, event_ids: Sequence[UUID]) -> list[OutboxRow]:
        rows = await self.database.fetch(self.sql["renew_claim"], claim.owner, list(event_ids), claim.seconds)
        return sorted(OutboxRow._make(row) for row in rows)

    async def settle_claim(self, claim: OptimisticClaim, confirmed: Sequence[UUID], yielded: Sequence[UUID]) -> None:
        verb = "confirm_claim_archive" if self.archive else "confirm_claim_delete"
        # Nearly always all events are confirmed, and one statement needs no transaction.
        async with self.database.transaction() if yielded else self.database.statement() as conn:
            if confirmed:
                await conn.execute(self.sql[verb], claim.owner, list(confirmed))
            if yielded:
                await conn.execute(self.sql["yield_claim"], claim.owner, list(yielded))

    async def notify(self) -> None:
        await self._notify_channel.send()

    @asynccontextmanager
    async def listen(self, wake: Callable[[], None]) -> AsyncIterator[None]:
        async with self._notify_channel.listening(wake), self._watcher.watching(wake):
            yield

    async def check(self) -> list[CheckResult]:
        return await check(self)

    async def close(self) -> None:
        await self._notify_channel.close()
        await self.database.close()


def _due_stream(rows: list[Any]) -> DueStream:
    lane, topic, key, cause = rows[0][:STREAM_COLUMNS]
    events = [OutboxRow._make(row[STREAM_COLUMNS:]) for row in rows if row[STREAM_COLUMNS] is not None]
    return DueStream(Stream(lane, topic, key), BlockReason(cause), events)


async def _installation(database: PostgresDatabase, schema: str) -> dict[str, str]:
    facts = await database.installation(schema)
    if "lanes" not in facts:
        raise UsageError(f"the outbox in schema {schema} is half installed; run: outrider db migrate")
    return facts
