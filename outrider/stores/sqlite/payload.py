"""Registered schemas and stored documents in a SQLite file."""

from __future__ import annotations

import json
import sqlite3
from datetime import datetime
from pathlib import Path
from typing import Any

from outrider.clock import Clock, SystemClock
from outrider.payload.model import PayloadSchema
from outrider.payload.store import RegisteredSchema, StoredKind, StoredPage
from outrider.stores.payload_rows import SCHEMA_VERBS, SHAPES, object_of, to_page, to_schemas
from outrider.stores.sqlite.database import SqliteDatabase, installation
from outrider.stores.sqlite.operation_log import record
from outrider.stores.sqlite.rows import load_payload, to_moment, to_seconds

SQL = load_payload()


class SqlitePayloads:
    """The tables of payloads in a SQLite file prepared by `outrider db migrate`."""

    def __init__(self, path: str | Path, *, clock: Clock | None = None) -> None:
        self.clock = clock or SystemClock()
        self.database = SqliteDatabase(path)
        try:
            installation(self.database.connection, "payload tables")
        except BaseException:
            self.database.connection.close()
            raise

    async def register(self, schema: PayloadSchema, actor: str) -> bool:
        return await self.database.write(_write, "register", schema, actor, self.clock.now())

    async def replace(self, schema: PayloadSchema, actor: str) -> None:
        await self.database.write(_write, "replace_schema", schema, actor, self.clock.now())

    async def schemas(self, event_type: str | None = None) -> list[RegisteredSchema]:
        return await self.database.read(_schemas, event_type)

    async def page(self, kind: StoredKind, after: tuple[Any, ...] | None, limit: int) -> StoredPage:
        return await self.database.read(_page, kind, after, limit)

    async def close(self) -> None:
        await self.database.close()


def _write(conn: sqlite3.Connection, name: str, schema: PayloadSchema, actor: str, now: datetime) -> bool:
    columns = schema.event_type, str(schema.version), json.dumps(schema.document), to_seconds(now), actor
    if not conn.execute(SQL[name], columns).rowcount:
        return False
    record(conn, now, actor, SCHEMA_VERBS[name], **object_of(schema))
    return True


def _schemas(conn: sqlite3.Connection, event_type: str | None) -> list[RegisteredSchema]:
    rows = conn.execute(SQL["schemas"], (event_type,)).fetchall()
    return to_schemas([(*row[:3], to_moment(row[3]), row[4]) for row in rows])


def _page(conn: sqlite3.Connection, kind: StoredKind, after: tuple[Any, ...] | None, limit: int) -> StoredPage:
    shape = SHAPES[kind]
    # Ids are text here.
    start = [value if isinstance(value, int) else str(value) for value in after or shape.start]
    cursor = conn.execute(SQL[shape.query], [*start, limit])
    names = [column[0] for column in cursor.description]
    return to_page(kind, [dict(zip(names, row, strict=True)) for row in cursor], limit, shape.key)
