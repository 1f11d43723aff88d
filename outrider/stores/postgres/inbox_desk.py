"""What people do with a consumer's trouble in PostgreSQL.

Whoever decides about a stream locks its row first, as consumers do.
"""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from typing import Any
from uuid import UUID

from outrider.delivery import InboxStream
from outrider.inbox_store import Cause, InboxCriteria
from outrider.outcome import Policy
from outrider.stores.inbox_rows import headers_of, place_of
from outrider.stores.postgres import queries
from outrider.stores.postgres.database import STATEMENT_SECONDS, Database
from outrider.stores.postgres.settling import STALL_MS


class PostgresInboxDesk:
    """Listing, replaying, discarding and releasing."""

    def __init__(self, database: Database, schema: str) -> None:
        self._database = database
        self._sql = queries.load_inbox(schema, "inbox_desk")

    async def counts(self, consumer: str | None = None) -> dict[str, int]:
        [row] = await self._database.fetch(self._sql["counts"], consumer)
        return dict(row)

    async def receipts(self, consumer: str, event_ids: Sequence[UUID]) -> list[dict[str, Any]]:
        rows = await self._database.fetch(self._sql["receipts"], consumer, list(event_ids))
        return [dict(row) for row in rows]

    async def dead_letters(self, criteria: InboxCriteria) -> list[dict[str, Any]]:
        wanted = criteria.consumer, criteria.topic, criteria.key, criteria.reason, criteria.limit
        rows = await self._database.fetch(self._sql["dead_letters"], list(criteria.ids), *wanted)
        return [{**row, "headers": headers_of(row["headers"]), "failure": json.loads(row["failure"])} for row in rows]

    async def streams(self, consumer: str | None, limit: int) -> list[dict[str, Any]]:
        return [dict(row) for row in await self._database.fetch(self._sql["streams"], consumer, limit)]

    async def replay(self, ids: Sequence[int], actor: str) -> int:
        async with self._transaction() as conn:
            await self._run(conn, "make_streams", list(ids))
            back = await self._run(conn, "replay", list(ids))
            await self._go_on(conn, back, added=1)
            await self._record(conn, actor, "inbox_replay", back)
        return len(back)

    async def discard(self, ids: Sequence[int], actor: str) -> int:
        async with self._transaction() as conn:
            await self._run(conn, "lock_streams", list(ids))
            gone = await self._run(conn, "discard", list(ids))
            await self._go_on(conn, [row for row in gone if row["policy"] == Policy.HOLD], added=0)
            await self._record(conn, actor, "inbox_discard", gone)
        return len(gone)

    async def release(self, consumer: str, stream: InboxStream, actor: str) -> bool:
        place = place_of(stream)
        async with self._transaction() as conn:
            locked = await self._run(conn, "lock_stream", consumer, *place)
            if not locked or locked[0]["cause"] != Cause.EARLY:
                return False
            first = await self._run(conn, "first_early", consumer, *place, locked[0]["seen"])
            for row in first:
                await self._run(conn, "release", consumer, *place, row["sequence"])
                await self._record(conn, actor, "inbox_release", [{**row, "consumer": consumer}])
        return bool(first)

    async def _go_on(self, conn: Any, rows: Sequence[Any], *, added: int) -> None:
        """Let streams drain that no dead letter holds any more; forget those of which nothing is left."""
        touched: dict[tuple[Any, ...], tuple[int | None, int]] = {}
        for row in rows:
            stream = row["consumer"], row["topic"], row["key"], row["band"]
            passed, more = touched.get(stream, (None, 0))
            numbers = [number for number in (passed, row["passed"]) if number is not None]
            touched[stream] = max(numbers, default=None), more + added
        if touched:
            streams = [list(column) for column in zip(*touched, strict=True)]
            changes = [list(column) for column in zip(*touched.values(), strict=True)]
            await self._run(conn, "go_on", *streams, *changes)
            await self._run(conn, "forget", *streams)

    async def _record(self, conn: Any, actor: str, verb: str, rows: Sequence[Any]) -> None:
        ids, consumers = [row["event_id"] for row in rows], [row["consumer"] for row in rows]
        await self._run(conn, "record", actor, verb, ids, consumers)

    async def _run(self, conn: Any, verb: str, *args: Any) -> list[Any]:
        rows: list[Any] = await conn.fetch(self._sql[verb], *args, timeout=STATEMENT_SECONDS)
        return rows

    @asynccontextmanager
    async def _transaction(self) -> AsyncIterator[Any]:
        """A transaction that cannot keep streams from their consumers for long, even if its client stands still."""
        async with self._database.transaction() as conn:
            await conn.execute(f"SET LOCAL idle_in_transaction_session_timeout = {STALL_MS}")
            yield conn
