"""The audit log of sagas in PostgreSQL: pages of lines and anchors, and the removal of old sagas and lines.

The role of the workers has no right to delete lines. It may run the function `saga_audit_prune`, which leaves an
anchor.
"""

from __future__ import annotations

from collections.abc import Collection
from datetime import datetime
from typing import Any
from uuid import UUID

from outrider.audit_chain import AuditAnchor, AuditHead, AuditLine, prune_anchor
from outrider.saga.model import AuditCriteria
from outrider.stores.postgres import statements
from outrider.stores.postgres.database import STATEMENT_SECONDS, PostgresDatabase
from outrider.stores.rows import close_sagas, head_of_row, instance_of

SAGAS_MAX = 200
"""The most sagas that are removed together, and whose lines are removed together later."""


class PostgresAudit:
    """The audit log of all sagas."""

    def __init__(self, database: PostgresDatabase, schema: str) -> None:
        self._database = database
        self._sql = statements.load_saga(schema)

    async def find(self, criteria: AuditCriteria) -> list[AuditLine]:
        wanted = criteria.saga_id, criteria.actor, criteria.since, criteria.limit
        return [AuditLine(*row) for row in await self._database.fetch(self._sql["audit_find"], *wanted)]

    async def lines(self, after: tuple[UUID, int], limit: int) -> list[AuditLine]:
        return [AuditLine(*row) for row in await self._database.fetch(self._sql["audit_lines"], *after, limit)]

    async def heads(self, saga_ids: Collection[UUID]) -> list[AuditHead]:
        return [head_of_row(row) for row in await self._database.fetch(self._sql["audit_heads"], list(saga_ids))]

    async def chain(self, saga_id: UUID) -> tuple[list[AuditHead], list[AuditLine]]:
        async with (
            self._database.connection() as conn,
            conn.transaction(isolation="repeatable_read", readonly=True),
        ):
            heads = await conn.fetch(self._sql["audit_heads"], [saga_id], timeout=STATEMENT_SECONDS)
            lines = await conn.fetch(self._sql["audit_chain"], saga_id, timeout=STATEMENT_SECONDS)
        return [head_of_row(row) for row in heads], [AuditLine(*row) for row in lines]

    async def missing(self, limit: int) -> list[UUID]:
        return [row[0] for row in await self._database.fetch(self._sql["audit_missing"], limit)]

    async def anchors(self, after: int, limit: int) -> list[AuditAnchor]:
        return [AuditAnchor(*row) for row in await self._database.fetch(self._sql["audit_anchors"], after, limit)]

    async def anchor_heads(self, number: int) -> list[AuditHead] | None:
        # The heads are read first: if they are removed in between, the second statement sees it.
        rows = await self._database.fetch(self._sql["anchor_heads"], number)
        [[pruned]] = await self._database.fetch(self._sql["audit_pruned"], number)
        return None if pruned else [AuditHead(*row) for row in rows]

    async def remove_sagas(self, days: float) -> int:
        """Remove ended sagas in batches, children first; their anchors and the heads of their chains stay."""
        total, count = 0, 1
        while count:
            count = await self._close(days)
            total += count
        return total

    async def _close(self, days: float) -> int:
        async with self._database.transaction() as conn:
            await conn.execute(self._sql["anchor_turn"])
            rows = await conn.fetch(self._sql["prunable_sagas"], days, SAGAS_MAX, timeout=STATEMENT_SECONDS)
            if not rows:
                return 0
            now, last = await self._last_anchor(conn)
            anchor, heads = close_sagas(last, [(instance_of(row[:-1]), row[-1]) for row in map(tuple, rows)], now)
            columns = [
                list(column) for column in zip(*((h.saga_id, h.lines, h.hash, h.place) for h in heads), strict=True)
            ]
            hashes = [head.subject_hash for head in heads]
            await conn.execute(self._sql["close_sagas"], *columns, *anchor, hashes, timeout=STATEMENT_SECONDS)
        return len(rows)

    async def remove_lines(self, days: float) -> int:
        """Remove the lines of sagas that were removed together, once all are old; return the number of lines."""
        total, removed = 0, await self._prune(days)
        while removed is not None:
            total, removed = total + removed, await self._prune(days)
        return total

    async def _prune(self, days: float) -> int | None:
        # Without old lines, nothing is locked.
        if not await self._database.fetch(self._sql["prunable_audit"], days):
            return None
        async with self._database.transaction() as conn:
            await conn.execute(self._sql["anchor_turn"])
            rows = await conn.fetch(self._sql["prunable_audit"], days)
            now, last = await self._last_anchor(conn)
            if not rows or last is None:
                return None
            closed = AuditAnchor(*rows[0])
            anchor = prune_anchor(last, closed, now)
            facts = closed.number, anchor.number, anchor.at, anchor.hash
            removed: int = await conn.fetchval(self._sql["prune_audit"], *facts, timeout=STATEMENT_SECONDS)
        return removed

    async def _last_anchor(self, conn: Any) -> tuple[datetime, AuditAnchor | None]:
        now, *columns = await conn.fetchrow(self._sql["last_anchor"])
        return now, None if columns[0] is None else AuditAnchor(*columns)
