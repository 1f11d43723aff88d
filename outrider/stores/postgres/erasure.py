"""Erasure of subjects in PostgreSQL."""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Mapping, Sequence
from typing import Any
from uuid import UUID

from outrider.audit_chain import AuditLine, digest_of
from outrider.privacy.erasure_store import (
    Blocker,
    Blocking,
    ErasurePlace,
    ErasureRun,
    Replacement,
    Runs,
    SubjectPage,
    SubjectRow,
    add_counts,
)
from outrider.stores.erasure_rows import (
    BLOCKING,
    NAMES,
    by_run,
    counted,
    hashes_of,
    needles,
    open_counts,
    to_blocking,
    to_rows,
    to_run,
)
from outrider.stores.postgres import statements
from outrider.stores.postgres.database import STATEMENT_SECONDS, PostgresDatabase
from outrider.stores.postgres.handler_transactions import open_installed
from outrider.stores.postgres.operation_log import record
from outrider.stores.queries import identifier

BLOCKS = 4_096
"""The blocks that a statement reads, of 8 kB each, in all partitions together."""

CANDIDATES_MAX = 1_000
"""The rows with the text of a subject that are read at a time; some only mention the subject."""

REMOVED_MAX = 200
"""The removed sagas of a page."""

KEYS: Mapping[ErasurePlace, tuple[str, ...]] = {
    ErasurePlace.DEAD_LETTER: ("event_id",),
    ErasurePlace.CONSUMER_DEAD_LETTER: ("id",),
    ErasurePlace.ARCHIVED_EVENT: ("event_id", "sent_at"),
}
"""The columns that identify a row."""

TABLES: Mapping[ErasurePlace, str] = {
    ErasurePlace.DEAD_LETTER: "outbox_dead_letter",
    ErasurePlace.CONSUMER_DEAD_LETTER: "inbox_dead_letter",
    ErasurePlace.ARCHIVED_EVENT: "outbox_archive",
    ErasurePlace.SAGA: "saga_instance",
}
"""The tables that are read by their blocks."""


_NO_ID = UUID(int=0)

_SPECIAL, _ESCAPED = re.compile(r"([%_\\])"), r"\\\1"


class PostgresErasure:
    """All rows of subjects in PostgreSQL. Open it with `await PostgresErasure.open(url)`."""

    def __init__(self, database: PostgresDatabase, *, schema: str = "outrider") -> None:
        self.database, self._schema = database, identifier(schema)
        self._sql = statements.load_erasure(schema)

    @classmethod
    async def open(
        cls, url: str, *, schema: str = "outrider", pooled: bool = False, connections_max: int | None = None
    ) -> PostgresErasure:
        """Connect to an installed store. A missing installation and a replica are rejected."""
        installed = {"what": "log of erasures", "last_step": "saga_audit_log.state"}
        database = await open_installed(url, schema, **installed, connections_max=1, pooled=pooled)
        return cls(database, schema=schema)

    async def runs(self, hashes: Collection[str]) -> list[ErasureRun]:
        return [to_run(row) for row in await self.database.fetch(self._sql["runs"], list(hashes))]

    async def open_run(self, hash: str, actor: str) -> ErasureRun:
        await self.database.fetch(self._sql["open_run"], hash, actor)
        return (await self.runs([hash]))[-1]

    async def finish_run(self, run_id: Any, receipt: Mapping[str, Any]) -> bool:
        return bool(await self.database.fetch(self._sql["finish_run"], run_id, json.dumps(receipt)))

    async def blocking(self, subjects: Collection[str], limit: int) -> list[Blocking]:
        found = list[Blocking]()
        async with self.database.transaction() as conn:
            # The tables are read whole, and a scan by an index would read them in the wrong order.
            await conn.execute("SET LOCAL enable_seqscan = on")
            for kind, query in BLOCKING.items():
                wanted = list(subjects) if kind is Blocker.SAGA else _patterns(needles(subjects, kind))
                kept, start, rows = list[Blocking](), 0, [()] * CANDIDATES_MAX
                while len(kept) < limit and len(rows) == CANDIDATES_MAX:
                    page = wanted, CANDIDATES_MAX, start
                    rows = await conn.fetch(self._sql[query], *page, timeout=STATEMENT_SECONDS)
                    kept += to_blocking([dict(row) for row in rows], subjects, kind)
                    start += CANDIDATES_MAX
                found += kept[:limit]
        return found

    async def skip_held(self, row: Blocking, headers: str, actor: str) -> bool:
        async with self.database.transaction() as conn:
            if not await conn.fetch(self._sql["skip_held"], row.id, row.consumer, row.headers, headers):
                return False
            await record(conn, self._schema, actor, "inbox_skip", [(row.id, row.consumer)])
        return True

    async def count(self, run_id: Any, place: str, count: int) -> None:
        async with self.database.transaction() as conn:
            await self._save(conn, run_id, add_counts(await self._counts(conn, run_id), {place: count}))

    async def page(self, place: ErasurePlace, subjects: Collection[str], after: Any) -> SubjectPage:
        if place is ErasurePlace.REMOVED_SAGA:
            return await self._removed(subjects, after or _NO_ID)
        [[blocks, parts]] = await self.database.fetch(self._sql["blocks"], TABLES[place])
        start = after or 0
        end = start + max(BLOCKS // max(parts, 1), 1)
        wanted = list(subjects) if place is ErasurePlace.SAGA else _patterns(needles(subjects, place))
        rows = await self.database.fetch(self._sql[f"{NAMES[place]}_part"], (start, 0), (end, 0), wanted)
        last = blocks is None or end >= blocks
        if place is ErasurePlace.SAGA:
            found = [SubjectRow((row["saga_id"],), row["subject"], row["saga_type"]) for row in rows]
        else:
            found = to_rows([dict(row) for row in rows], KEYS[place], subjects, place)
        return SubjectPage(found, None if last else end, 1.0 if last else end / blocks)

    async def _removed(self, subjects: Collection[str], after: UUID) -> SubjectPage:
        names = hashes_of(subjects)
        rows = await self.database.fetch(self._sql["removed_saga_part"], list(names), REMOVED_MAX, after)
        found = [SubjectRow((row[0],), names[row[1]], "removed saga") for row in rows]
        return SubjectPage(found, found[-1].key[0] if len(found) == REMOVED_MAX else None, 1.0)

    async def erase_events(self, place: ErasurePlace, rows: Sequence[Replacement], runs: Runs) -> int:
        total = 0
        for run_id, group in by_run(rows, runs).items():
            keys = [list(column) for column in zip(*(each.row.key for each in group), strict=True)]
            texts = [each.row.headers for each in group], [each.headers for each in group]
            async with self.database.transaction() as conn:
                counts = await self._counts(conn, run_id)
                done = await conn.fetch(self._sql[f"erase_{NAMES[place]}"], *keys, *texts, timeout=STATEMENT_SECONDS)
                written = {row[0] for row in done}
                erased = [each for each in group if each.row.key[0] in written]
                saga_keys = [each.saga_key for each in erased if each.saga_key]
                await conn.execute(self._sql["erase_replies"], saga_keys)
                await self._save(conn, run_id, counted(counts, place, erased))
            total += len(erased)
        return total

    async def erase_saga(self, place: ErasurePlace, row: SubjectRow, run_id: Any) -> bool:
        [saga_id] = row.key
        async with self.database.transaction() as conn:
            alive, counts = place is ErasurePlace.SAGA, await self._counts(conn, run_id)
            if alive and not await conn.fetch(self._sql["lock_saga"], saga_id, row.subject):
                return False
            await self._erase_details(conn, saga_id, run_id)
            if alive:
                await conn.execute(self._sql["erase_saga"], saga_id, timeout=STATEMENT_SECONDS)
            await self._save(conn, run_id, add_counts(counts, {place: 1}))
        return True

    async def close(self) -> None:
        await self.database.close()

    async def _erase_details(self, conn: Any, saga_id: UUID, run_id: Any) -> None:
        rows = await conn.fetch(self._sql["detailed_lines"], saga_id, timeout=STATEMENT_SECONDS)
        lines = [AuditLine(*row) for row in rows]
        if lines:
            columns = [line.place for line in lines], [digest_of(line) for line in lines]
            await conn.execute(self._sql["erase_details"], run_id, saga_id, *columns, timeout=STATEMENT_SECONDS)

    async def _counts(self, conn: Any, run_id: Any) -> str:
        return open_counts(await conn.fetchval(self._sql["run_counts"], run_id))

    async def _save(self, conn: Any, run_id: Any, counts: str) -> None:
        await conn.execute(self._sql["save_counts"], run_id, counts)


def _patterns(texts: Sequence[str]) -> list[str]:
    r"""Return the patterns of LIKE for texts within a text.

    >>> _patterns(["100%"])
    ['%100\\%%']
    """
    return [f"%{_SPECIAL.sub(_ESCAPED, text)}%" for text in texts]
