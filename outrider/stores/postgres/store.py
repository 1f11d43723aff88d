"""The PostgreSQL store: what a relay needs."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager
from itertools import groupby
from operator import attrgetter
from typing import Any
from uuid import UUID

from outrider import lifecycle
from outrider.errors import Misuse
from outrider.event import StagedEvent, Stream, default_topic
from outrider.finding import Finding
from outrider.outcome import Confirmed
from outrider.store import Cause, Desk, Due, DueStream, Fetched, Hold, Lease, Pulse, Settlement, Upkeep
from outrider.stores.postgres import queries
from outrider.stores.postgres.database import Database, fence, touched
from outrider.stores.postgres.desk import PostgresDesk
from outrider.stores.postgres.examine import examine
from outrider.stores.postgres.settling import settle
from outrider.stores.postgres.upkeep import PostgresUpkeep
from outrider.stores.postgres.wakeup import Hints
from outrider.stores.queries import identifier

STREAM_COLUMNS = 4
_EVENT_ID = attrgetter("event_id")


class PostgresStore:
    """Events in PostgreSQL. Open it with `await PostgresStore.open(url)`."""

    def __init__(self, database: Database, *, schema: str, lanes: int, archive: bool) -> None:
        self.lanes = lanes
        self.archive = archive
        self.rule = default_topic
        self.database = database
        self.sql = queries.load(schema)
        self.desk: Desk = PostgresDesk(self)
        self.upkeep: Upkeep = PostgresUpkeep(database, schema)
        # A channel has at most 63 characters, like a schema.
        self._hints = Hints(database, f"{schema[:50]}_outbox")

    @classmethod
    async def open(
        cls, url: str, *, schema: str = "outrider", archive: bool = True, connections_max: int = 8, pooled: bool = False
    ) -> PostgresStore:
        """Connect to an installed outbox; refuse one that is not, and refuse a replica."""
        identifier(schema)
        database = Database(url, connections_max=connections_max, pooled=pooled)
        await database.open()
        try:
            lanes = await _installed_lanes(database, schema)
        except BaseException:
            await database.close()
            raise
        return cls(database, schema=schema, lanes=lanes, archive=archive)

    async def beat(self, relay: str, lease_seconds: float, *, joining: bool) -> Pulse | None:
        [row] = await self.database.fetch(self.sql["beat"], relay, lease_seconds, joining)
        return Pulse(row["others"] + 1, list(row["free"])) if row["beaten"] else None

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
        # Lanes come in order, so urgent bands come first.
        events = [StagedEvent._make(row[2:]) for row in rows if row[2] is not None]
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

    async def confirm(self, lease: Lease, events: Sequence[StagedEvent]) -> int:
        verb = "confirm_archive" if self.archive else "confirm_delete"
        async with self.database.statement() as conn:
            return touched(await conn.execute(self.sql[verb], *fence(lease), list(map(_EVENT_ID, events))))

    async def settle(self, lease: Lease, settlements: Sequence[Settlement], emptied: Sequence[Stream] = ()) -> int:
        if not emptied and all(_fresh_confirm(settlement) for settlement in settlements):
            return await self.confirm(lease, [settlement.event for settlement in settlements])
        return await settle(self, lease, settlements, emptied)

    async def renew_hold(self, hold: Hold, event_ids: Sequence[UUID]) -> list[StagedEvent]:
        rows = await self.database.fetch(self.sql["renew_hold"], hold.owner, list(event_ids), hold.seconds)
        return sorted(StagedEvent._make(row) for row in rows)

    async def settle_hold(self, hold: Hold, confirmed: Sequence[UUID], yielded: Sequence[UUID]) -> None:
        verb = "confirm_hold_archive" if self.archive else "confirm_hold_delete"
        # Nearly always everything was confirmed, and one statement needs no transaction around it.
        async with self.database.transaction() if yielded else self.database.statement() as conn:
            if confirmed:
                await conn.execute(self.sql[verb], hold.owner, list(confirmed))
            if yielded:
                await conn.execute(self.sql["yield_hold"], hold.owner, list(yielded))

    async def hint(self) -> None:
        await self._hints.send()

    def wakeups(self, wake: Callable[[], None]) -> AbstractAsyncContextManager[None]:
        return self._hints.listening(wake)

    async def examine(self) -> list[Finding]:
        return await examine(self)

    async def close(self) -> None:
        await self._hints.close()
        await self.database.close()


def _fresh_confirm(settlement: Settlement) -> bool:
    return isinstance(settlement.outcome, Confirmed) and settlement.event.state not in lifecycle.WAITING


def _due_stream(rows: list[Any]) -> DueStream:
    lane, topic, key, cause = rows[0][:STREAM_COLUMNS]
    events = [StagedEvent._make(row[STREAM_COLUMNS:]) for row in rows if row[STREAM_COLUMNS] is not None]
    return DueStream(Stream(lane, topic, key), Cause(cause), events)


async def _installed_lanes(database: Database, schema: str) -> int:
    sql = f"SELECT value, pg_is_in_recovery() FROM {schema}.outbox_meta WHERE name = 'lanes'"  # noqa: S608
    rows = await database.fetch(sql)
    if not rows:
        raise Misuse(f"the outbox in schema {schema} is half installed; run: outrider db migrate")
    value, replica = rows[0]
    if replica:
        raise Misuse(f"{database.where} is a read replica; point the store at the primary")
    return int(value)
