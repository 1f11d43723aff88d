"""The operation log in PostgreSQL: the lines of commands, and the removal of old ones.

The role of relays has no right to delete lines. It may run the function `outbox_operation_prune`, which leaves an
anchor.
"""

from __future__ import annotations

from collections.abc import Iterable
from datetime import datetime
from typing import Any
from uuid import UUID

from outrider.audit_chain import AuditAnchor
from outrider.operation_log import (
    LINES_MAX,
    OperationCriteria,
    OperationEnd,
    OperationHead,
    OperationLine,
    anchor_of_removed,
    lines_of,
    oldest_kept,
    removable,
    seal_operations,
)
from outrider.stores.postgres import statements
from outrider.stores.postgres.database import STATEMENT_SECONDS, PostgresDatabase

START = 0, -1
"""The place before all lines: numbers begin with 1."""


async def record(
    conn: Any,
    schema: str,
    actor: str,
    verb: str,
    events: Iterable[tuple[UUID | None, str | None]] = ((None, None),),
    **detail: Any,
) -> None:
    """Write the lines of a command, as the last work of its transaction: others wait for the head of the chain."""
    if not (chosen := list(events)):
        return
    sql = statements.load_operation_log(schema)
    *columns, now = await conn.fetchrow(sql["lock_head"], timeout=STATEMENT_SECONDS)
    head, lines = seal_operations(OperationHead(*columns), lines_of(now, actor, verb, chosen, **detail))
    rows = [(*line[:8], line.salt, line.hash) for line in lines]
    columns = [list(column) for column in zip(*rows, strict=True)]
    await conn.execute(sql["add_operations"], head.lines, head.hash, *columns, timeout=STATEMENT_SECONDS)


class PostgresOperationLog:
    """The operation log of a schema."""

    def __init__(self, database: PostgresDatabase, schema: str) -> None:
        self._database, self._schema = database, schema
        self._sql = statements.load_operation_log(schema)

    async def find(self, criteria: OperationCriteria) -> list[OperationLine]:
        return [OperationLine(*row) for row in await self._database.fetch(self._sql["operation_find"], *criteria)]

    async def record(self, actor: str, verb: str, **detail: Any) -> None:
        async with self._database.transaction() as conn:
            await record(conn, self._schema, actor, verb, **detail)

    async def lines(self, after: tuple[int, Any] | None, limit: int) -> list[OperationLine]:
        rows = await self._database.fetch(self._sql["operation_page"], *(after or START), limit)
        return [OperationLine(*row) for row in rows]

    async def end(self, after: tuple[int, Any] | None) -> OperationEnd:
        async with (
            self._database.connection() as conn,
            conn.transaction(isolation="repeatable_read", readonly=True),
        ):
            found, *head = await conn.fetchrow(self._sql["operation_head"], timeout=STATEMENT_SECONDS)
            rows = await conn.fetch(self._sql["operation_rest"], *(after or START), timeout=STATEMENT_SECONDS)
        return OperationEnd(
            None if head[0] is None else OperationHead(*head), found, [OperationLine(*row) for row in rows]
        )

    async def last_anchor(self) -> AuditAnchor | None:
        rows = await self._database.fetch(self._sql["operation_anchor"])
        return AuditAnchor(*rows[0]) if rows else None

    async def remove_lines(self, days: float) -> int:
        # Without old lines, nothing is locked.
        [(now, oldest)] = await self._database.fetch(self._sql["operation_age"])
        before = oldest_kept(now, days)
        if oldest is None or oldest >= before:
            return 0
        total, removed = 0, await self._prune(before)
        while removed:
            total, removed = total + removed, await self._prune(before)
        return total

    async def _prune(self, before: datetime) -> int:
        async with self._database.transaction() as conn:
            await conn.execute(self._sql["anchor_turn"])
            row = await conn.fetchrow(self._sql["operation_anchor"])
            former = AuditAnchor(*row) if row else None
            rows = await conn.fetch(self._sql["oldest_unchained"], LINES_MAX)
            if not (lines := removable(before, former, [OperationLine(*row) for row in rows])):
                rows = await conn.fetch(self._sql["oldest_operations"], former.lines if former else 0, LINES_MAX)
                lines = removable(before, former, [OperationLine(*row) for row in rows])
            if not lines:
                return 0
            now, *columns = await conn.fetchrow(self._sql["last_anchor"])
            last = None if columns[0] is None else AuditAnchor(*columns)
            anchor = anchor_of_removed(last, former, lines, now)
            facts = anchor.number, anchor.at, anchor.lines, anchor.until, anchor.digest, anchor.hash
            removed: int = await conn.fetchval(self._sql["prune_operations"], *facts, timeout=STATEMENT_SECONDS)
        return removed
