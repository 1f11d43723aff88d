"""What people ask about sagas in PostgreSQL."""

from __future__ import annotations

from functools import partial
from typing import Any
from uuid import UUID

from outrider.saga_store import Instance, Record, SagaCriteria, Status
from outrider.stores.postgres import queries
from outrider.stores.postgres.database import STATEMENT_SECONDS, Database
from outrider.stores.postgres.saga_reading import records
from outrider.stores.saga_rows import instance_of


class PostgresSagaDesk:
    """Listing, counting and showing."""

    def __init__(self, database: Database, schema: str) -> None:
        self._database = database
        self._sql = {**queries.load_saga(schema), **queries.load_saga(schema, "saga_desk")}

    async def find(self, criteria: SagaCriteria) -> list[Instance]:
        about = criteria.saga_type, criteria.correlation_id, criteria.status, criteria.needs_attention
        wanted = list(criteria.ids), *about, criteria.stuck_seconds, criteria.limit
        return [instance_of(row) for row in await self._database.fetch(self._sql["find"], *wanted)]

    async def counts(self) -> dict[str, int]:
        rows = await self._database.fetch(self._sql["counts"])
        counts = {status.value: 0 for status in Status} | {row["status"]: row["sagas"] for row in rows}
        return {**counts, "needs_attention": sum(row["needing"] for row in rows)}

    async def show(self, saga_id: UUID) -> Record | None:
        # All of one moment, though nothing is locked.
        async with (
            self._database.connection() as conn,
            conn.transaction(isolation="repeatable_read", readonly=True),
        ):
            run = partial(self._run, conn)
            found = await records(run, await run("load", saga_id))
        return found[0] if found else None

    async def audit(self, saga_id: UUID, limit: int = 1000) -> list[dict[str, Any]]:
        return [dict(row) for row in await self._database.fetch(self._sql["audit"], saga_id, limit)]

    async def _run(self, conn: Any, verb: str, *args: Any) -> list[Any]:
        rows: list[Any] = await conn.fetch(self._sql[verb], *args, timeout=STATEMENT_SECONDS)
        return rows
