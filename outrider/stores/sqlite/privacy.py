"""Keys and stored payloads in a SQLite file."""

from __future__ import annotations

import sqlite3
from collections.abc import Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any

from outrider.clock import Clock, SystemClock
from outrider.errors import UsageError
from outrider.privacy.store import CopyKind, CopyPage, Rewrite, WrappedKey
from outrider.stores.privacy_rows import FILE_SHAPES, KEY_VERBS, stored_text, to_copies, to_keys
from outrider.stores.sqlite.database import SqliteDatabase, installation
from outrider.stores.sqlite.operation_log import record
from outrider.stores.sqlite.rows import load_privacy, to_moment, to_seconds

SQL = load_privacy()


class SqlitePrivacy:
    """The table of keys in a SQLite file prepared by `outrider db migrate`, and all payloads."""

    def __init__(self, path: str | Path, *, clock: Clock | None = None) -> None:
        self.clock = clock or SystemClock()
        self.database = SqliteDatabase(path)
        try:
            installation(self.database.connection, "table of keys")
            if not self.database.connection.execute("PRAGMA table_info(encryption_key)").fetchall():
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


def _copies(conn: sqlite3.Connection, kind: CopyKind, after: tuple[Any, ...] | None, limit: int) -> CopyPage:
    shape = FILE_SHAPES[kind]
    cursor = conn.execute(SQL[f"{shape.name}_copies"], [*(after or shape.start), limit])
    names = [column[0] for column in cursor.description]
    return to_copies([dict(zip(names, row, strict=True)) for row in cursor], limit, shape.key)


def _rewrite(conn: sqlite3.Connection, kind: CopyKind, rewrites: Sequence[Rewrite]) -> int:
    done = 0
    for each in rewrites:
        texts = stored_text(kind, each.text), stored_text(kind, each.copy.text)
        done += conn.execute(SQL[f"rewrite_{FILE_SHAPES[kind].name}"], (texts[0], *each.copy.key, texts[1])).rowcount
    return done
