"""Keys and stored payloads in a SQLite file."""

from __future__ import annotations

import json
import sqlite3
from collections.abc import Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any

from outrider.clock import Clock, SystemClock
from outrider.errors import Transient, UsageError
from outrider.event import erased_name
from outrider.privacy.store import (
    CopyKind,
    CopyPage,
    NewSubjectKey,
    Rewrite,
    SubjectKeyCounts,
    WrappedKey,
    WrappedSubjectKey,
)
from outrider.stores.privacy_rows import FILE_SHAPES, KEY_VERBS, stored_text, to_copies, to_keys, to_subject_keys
from outrider.stores.sqlite.database import SqliteDatabase, installation
from outrider.stores.sqlite.operation_log import record
from outrider.stores.sqlite.rows import load_privacy, to_moment, to_seconds

SQL = load_privacy()

BUSY_SECONDS = 5.0
"""The wait for another writer: less than staging waits for a key, so that its error says what to do."""

KEEP_APART = (
    "a new key is committed before the event that needs it, and a file has one writer: keep the keys of subjects in a "
    "file of their own"
)


class SqlitePrivacy:
    """The table of keys in a SQLite file prepared by `outrider db migrate`, and all payloads."""

    def __init__(self, path: str | Path, *, clock: Clock | None = None) -> None:
        self.clock = clock or SystemClock()
        self.database = SqliteDatabase(path)
        try:
            self.database.connection.execute(f"PRAGMA busy_timeout = {int(BUSY_SECONDS * 1000)}")
            installation(self.database.connection, "table of keys")
            if not self.database.connection.execute("PRAGMA table_info(subject_key)").fetchall():
                raise UsageError("the database has no table of keys; run `outrider db migrate`")
        except BaseException:
            self.database.connection.close()
            raise

    async def keys(self) -> list[WrappedKey]:
        return await self.database.read(_keys)

    async def insert_key(self, key_id: str, wrapped: str, actor: str) -> bool:
        return await self._change("insert_key", key_id=key_id, wrapped=wrapped, actor=actor)

    async def activate_key(self, key_id: str, actor: str) -> bool:
        return await self._change("activate_key", key_id=key_id, actor=actor)

    async def rewrap_key(self, key_id: str, before: str, after: str, actor: str) -> bool:
        return await self._change("rewrap_key", key_id=key_id, before=before, after=after, actor=actor)

    async def subject_keys(self, subjects: Sequence[str], key_ids: Sequence[str]) -> list[WrappedSubjectKey]:
        wanted = {"subjects": json.dumps(list(subjects)), "key_ids": json.dumps(list(key_ids))}
        return await self.database.read(_subject_keys, "subject_keys", wanted)

    async def insert_subject_keys(self, keys: Sequence[NewSubjectKey]) -> None:
        now = to_seconds(self.clock.now())
        try:
            await self.database.write(_insert_subject_keys, [(*key, now) for key in keys])
        except Transient as error:
            # The caller's own transaction may be the one that writes.
            raise Transient(f"{error}; {KEEP_APART}") from error

    async def destroy_subject_key(self, subject: str) -> list[str]:
        facts = {"subject": subject, "erased": erased_name(subject), "now": to_seconds(self.clock.now())}
        return await self.database.write(_destroy_subject_key, facts)

    async def subject_key_page(self, after: str, limit: int) -> list[WrappedSubjectKey]:
        return await self.database.read(_subject_keys, "subject_key_page", {"after": after, "limit": limit})

    async def rewrap_subject_keys(self, changes: Sequence[tuple[str, str, str]]) -> int:
        return await self.database.write(_rewrap_subject_keys, changes)

    async def count_subject_keys(self) -> SubjectKeyCounts:
        return await self.database.read(_count_subject_keys)

    async def copies(self, kind: CopyKind, after: tuple[Any, ...] | None, limit: int) -> CopyPage:
        return await self.database.read(_copies, kind, after, limit)

    async def rewrite(self, kind: CopyKind, rewrites: Sequence[Rewrite]) -> int:
        return await self.database.write(_rewrite, kind, rewrites)

    async def close(self) -> None:
        await self.database.close()

    async def _change(self, name: str, **values: Any) -> bool:
        return await self.database.write(_change, name, values, self.clock.now())


def _change(conn: sqlite3.Connection, name: str, values: Mapping[str, Any], now: datetime) -> bool:
    if not conn.execute(SQL[name], {**values, "now": to_seconds(now)}).rowcount:
        return False
    record(conn, now, values["actor"], KEY_VERBS[name], key=values["key_id"])
    return True


def _keys(conn: sqlite3.Connection) -> list[WrappedKey]:
    rows = conn.execute(SQL["keys"]).fetchall()
    return to_keys([(*row[:3], to_moment(row[3]), row[4], to_moment(row[5]), row[6]) for row in rows])


def _subject_keys(conn: sqlite3.Connection, name: str, values: Mapping[str, Any]) -> list[WrappedSubjectKey]:
    rows = conn.execute(SQL[name], values).fetchall()
    return to_subject_keys([(*row[:3], to_moment(row[3]), to_moment(row[4])) for row in rows])


def _insert_subject_keys(conn: sqlite3.Connection, rows: Sequence[tuple[Any, ...]]) -> None:
    conn.executemany(SQL["insert_subject_keys"], rows)


def _destroy_subject_key(conn: sqlite3.Connection, facts: Mapping[str, Any]) -> list[str]:
    return [key_id for (key_id,) in conn.execute(SQL["destroy_subject_key"], facts).fetchall()]


def _rewrap_subject_keys(conn: sqlite3.Connection, changes: Sequence[tuple[str, str, str]]) -> int:
    rows = [(after, key_id, before) for key_id, before, after in changes]
    return conn.executemany(SQL["rewrap_subject_keys"], rows).rowcount


def _count_subject_keys(conn: sqlite3.Connection) -> SubjectKeyCounts:
    return SubjectKeyCounts(*conn.execute(SQL["count_subject_keys"]).fetchone())


def _copies(conn: sqlite3.Connection, kind: CopyKind, after: tuple[Any, ...] | None, limit: int) -> CopyPage:
    shape = FILE_SHAPES[kind]
    cursor = conn.execute(SQL[f"{shape.name}_copies"], [*(after or shape.start), limit])
    names = [column[0] for column in cursor.description]
    return to_copies(kind, [dict(zip(names, row, strict=True)) for row in cursor], limit, shape.key)


def _rewrite(conn: sqlite3.Connection, kind: CopyKind, rewrites: Sequence[Rewrite]) -> int:
    done = 0
    for each in rewrites:
        texts = stored_text(kind, each.text), stored_text(kind, each.copy.text)
        done += conn.execute(SQL[f"rewrite_{FILE_SHAPES[kind].name}"], (texts[0], *each.copy.key, texts[1])).rowcount
    return done
