"""What people ask about sagas in a SQLite file."""

from __future__ import annotations

import json
import sqlite3
from collections.abc import Awaitable, Callable
from typing import Any
from uuid import UUID

from outrider.clock import Clock
from outrider.saga_store import Instance, Record, SagaCriteria, Status
from outrider.stores.saga_rows import AUDIT_FACTS
from outrider.stores.sqlite import saga_verbs
from outrider.stores.sqlite.rows import load, to_moment

SQL = load("saga_desk.sql")

Work = Callable[..., Awaitable[Any]]
"""Does something in a transaction of its own."""


class SqliteSagaDesk:
    """Listing, counting and showing."""

    def __init__(self, read: Work, clock: Clock) -> None:
        self._read, self._clock = read, clock

    async def find(self, criteria: SagaCriteria) -> list[Instance]:
        names = ("saga_type", "correlation_id", "status", "needs_attention", "limit")
        wanted = {name: getattr(criteria, name) for name in names}
        ids = json.dumps([str(saga_id) for saga_id in criteria.ids]) if criteria.ids else None
        stuck = criteria.stuck_seconds
        before = None if stuck is None else self._clock.now().timestamp() - stuck
        rows = await self._read(_rows, "find", {**wanted, "ids": ids, "before": before})
        return [saga_verbs.to_instance(row) for row in rows]

    async def counts(self) -> dict[str, int]:
        rows = await self._read(_rows, "counts", {})
        counts = {status.value: 0 for status in Status} | {status: count for status, count, _ in rows}
        return {**counts, "needs_attention": sum(needing for *_, needing in rows)}

    async def show(self, saga_id: UUID) -> Record | None:
        record: Record | None = await self._read(saga_verbs.load, saga_id, self._clock.now().timestamp())
        return record

    async def audit(self, saga_id: UUID, limit: int = 1000) -> list[dict[str, Any]]:
        rows = await self._read(_rows, "audit", {"saga_id": str(saga_id), "limit": limit})
        return [dict(zip(AUDIT_FACTS, (to_moment(at), *rest), strict=True)) for at, *rest in rows]


def _rows(cursor: sqlite3.Cursor, query: str, values: dict[str, Any]) -> list[Any]:
    return cursor.execute(SQL[query], values).fetchall()
