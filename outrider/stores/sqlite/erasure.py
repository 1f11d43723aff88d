"""Erasure of subjects in a SQLite file."""

from __future__ import annotations

import json
import sqlite3
from collections.abc import Collection, Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any
from uuid import UUID

from outrider.audit_chain import digest_of
from outrider.clock import Clock, SystemClock
from outrider.errors import UsageError
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
from outrider.stores.sqlite.audit import to_line
from outrider.stores.sqlite.database import SqliteDatabase, installation
from outrider.stores.sqlite.operation_log import record
from outrider.stores.sqlite.rows import load_erasure, to_moment, to_seconds

SQL = load_erasure()

ROWS = 5_000
"""The rows that a statement reads."""

REMOVED_MAX = 200
"""The removed sagas of a page."""

KEYS: Mapping[ErasurePlace, str] = {
    ErasurePlace.DEAD_LETTER: "event_id",
    ErasurePlace.CONSUMER_DEAD_LETTER: "id",
    ErasurePlace.ARCHIVED_EVENT: "event_id",
}
"""The column that identifies a row."""


class SqliteErasure:
    """All rows of subjects in a SQLite file prepared by `outrider db migrate`."""

    def __init__(self, path: str | Path, *, clock: Clock | None = None) -> None:
        self.clock = clock or SystemClock()
        self.database = SqliteDatabase(path)
        try:
            installation(self.database.connection, "log of erasures")
            # Erased content must not stay in the free parts of the file.
            self.database.connection.execute("PRAGMA secure_delete = ON")
            if not self.database.connection.execute("PRAGMA table_info(gdpr_erasure_log)").fetchall():
                raise UsageError("the database has no log of erasures; run `outrider db migrate`")
        except BaseException:
            self.database.connection.close()
            raise

    async def runs(self, hashes: Collection[str]) -> list[ErasureRun]:
        rows = await self.database.read(_rows, "runs", {"hashes": json.dumps(list(hashes))})
        return [to_run((*row[:3], to_moment(row[3]), to_moment(row[4]), *row[5:])) for row in map(tuple, rows)]

    async def open_run(self, hash: str, actor: str) -> ErasureRun:
        await self.database.write(_execute, "open_run", {"hash": hash, "actor": actor, "now": self._now})
        return (await self.runs([hash]))[-1]

    async def finish_run(self, run_id: Any, receipt: Mapping[str, Any]) -> bool:
        facts = {"id": run_id, "receipt": json.dumps(receipt), "now": self._now}
        return bool(await self.database.write(_execute, "finish_run", facts))

    async def blocking(self, subjects: Collection[str], limit: int) -> list[Blocking]:
        return await self.database.read(_blocking, subjects, limit)

    async def skip_held(self, row: Blocking, headers: str, actor: str) -> bool:
        return await self.database.write(_skip_held, row, headers, actor, self.clock.now())

    async def count(self, run_id: Any, place: str, count: int) -> None:
        await self.database.write(_count, run_id, place, count)

    async def page(self, place: ErasurePlace, subjects: Collection[str], after: Any) -> SubjectPage:
        if place is ErasurePlace.REMOVED_SAGA:
            return await self.database.read(_removed, subjects, after or "")
        return await self.database.read(_page, place, subjects, after or 0)

    async def erase_events(self, place: ErasurePlace, rows: Sequence[Replacement], runs: Runs) -> int:
        return await self.database.write(_erase_events, place, rows, runs)

    async def erase_saga(self, place: ErasurePlace, row: SubjectRow, run_id: Any) -> bool:
        return await self.database.write(_erase_saga, place, row, run_id)

    async def close(self) -> None:
        await self.database.close()

    @property
    def _now(self) -> float | None:
        return to_seconds(self.clock.now())


def _rows(conn: sqlite3.Connection, name: str, values: Mapping[str, Any]) -> list[Any]:
    return conn.execute(SQL[name], values).fetchall()


def _named(conn: sqlite3.Connection, name: str, values: Mapping[str, Any]) -> list[dict[str, Any]]:
    cursor = conn.execute(SQL[name], values)
    names = [column[0] for column in cursor.description]
    return [dict(zip(names, row, strict=True)) for row in cursor]


def _execute(conn: sqlite3.Connection, name: str, values: Mapping[str, Any]) -> int:
    return conn.execute(SQL[name], values).rowcount


def _blocking(conn: sqlite3.Connection, subjects: Collection[str], limit: int) -> list[Blocking]:
    found = list[Blocking]()
    for kind, query in BLOCKING.items():
        texts = json.dumps([] if kind is Blocker.SAGA else needles(subjects, kind))
        wanted = {"needles": texts, "subjects": json.dumps(list(subjects))}
        # Some rows only mention a subject, so the limit is for those that are left.
        for each in to_blocking(_named(conn, query, wanted), subjects, kind)[:limit]:
            found.append(each if isinstance(each.id, int) else each._replace(id=UUID(each.id)))
    return found


def _skip_held(conn: sqlite3.Connection, row: Blocking, headers: str, actor: str, now: datetime) -> bool:
    facts = {"event_id": str(row.id), "consumer": row.consumer, "before": row.headers, "headers": headers}
    if not _execute(conn, "skip_held", facts):
        return False
    record(conn, now, actor, "inbox_skip", [(row.id, row.consumer)])
    return True


def _page(conn: sqlite3.Connection, place: ErasurePlace, subjects: Collection[str], after: int) -> SubjectPage:
    name, end = NAMES[place], after + ROWS
    [[last]] = _rows(conn, f"{name}_last", {})
    saga = place is ErasurePlace.SAGA
    wanted = json.dumps(list(subjects) if saga else needles(subjects, place))
    rows = _named(conn, f"{name}_part", {"after": after, "end": end, "needles": wanted})
    if saga:
        found = [SubjectRow((row["saga_id"],), row["subject"], row["saga_type"]) for row in rows]
    else:
        found = to_rows(rows, (KEYS[place],), subjects, place)
    is_last = last is None or end >= last
    return SubjectPage(found, None if is_last else end, 1.0 if is_last else end / last)


def _removed(conn: sqlite3.Connection, subjects: Collection[str], after: str) -> SubjectPage:
    names = hashes_of(subjects)
    wanted = {"hashes": json.dumps(list(names)), "after": after, "limit": REMOVED_MAX}
    rows = _rows(conn, "removed_saga_part", wanted)
    found = [SubjectRow((saga_id,), names[hash], "removed saga") for saga_id, hash in rows]
    return SubjectPage(found, found[-1].key[0] if len(found) == REMOVED_MAX else None, 1.0)


def _erase_events(conn: sqlite3.Connection, place: ErasurePlace, rows: Sequence[Replacement], runs: Runs) -> int:
    total = 0
    for run_id, group in by_run(rows, runs).items():
        counts, erased = _counts(conn, run_id), list[Replacement]()
        for each in group:
            values = {"key": each.row.key[0], "headers": each.headers, "before": each.row.headers}
            if _execute(conn, f"erase_{NAMES[place]}", values):
                erased.append(each)
        for each in erased:
            if each.saga_key:
                _execute(conn, "erase_replies", {"key": each.saga_key})
        _save(conn, run_id, counted(counts, place, erased))
        total += len(erased)
    return total


def _erase_saga(conn: sqlite3.Connection, place: ErasurePlace, row: SubjectRow, run_id: Any) -> bool:
    [saga_id] = row.key
    facts, counts = {"saga_id": saga_id, "subject": row.subject}, _counts(conn, run_id)
    if place is ErasurePlace.SAGA and not _rows(conn, "lock_saga", facts):
        return False
    for line in map(to_line, _rows(conn, "detailed_lines", facts)):
        _execute(conn, "erase_details", {"id": line.place, "digest": digest_of(line)})
    if place is ErasurePlace.SAGA:
        for (step,) in _rows(conn, "saga_steps", facts):
            _execute(conn, "erase_replies", {"key": f"{saga_id}:{step}"})
        for verb in ("erase_journal", "erase_mailbox", "erase_saga"):
            _execute(conn, verb, facts)
    _save(conn, run_id, add_counts(counts, {place: 1}))
    return True


def _count(conn: sqlite3.Connection, run_id: Any, place: str, count: int) -> None:
    _save(conn, run_id, add_counts(_counts(conn, run_id), {place: count}))


def _counts(conn: sqlite3.Connection, run_id: Any) -> str:
    rows = _rows(conn, "run_counts", {"id": run_id})
    return open_counts(rows[0][0] if rows else None)


def _save(conn: sqlite3.Connection, run_id: Any, counts: str) -> None:
    _execute(conn, "save_counts", {"id": run_id, "counts": counts})
