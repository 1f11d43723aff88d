"""Registered schemas and stored documents in PostgreSQL."""

from __future__ import annotations

import json
from typing import Any

from outrider.payload.model import PayloadSchema
from outrider.payload.store import RegisteredSchema, StoredKind, StoredPage
from outrider.stores.payload_rows import SCHEMA_VERBS, SHAPES, object_of, to_page, to_schemas
from outrider.stores.postgres import statements
from outrider.stores.postgres.database import PostgresDatabase
from outrider.stores.postgres.handler_transactions import open_installed
from outrider.stores.postgres.operation_log import record
from outrider.stores.queries import identifier

CONNECTIONS_MAX = 2


class PostgresPayloads:
    """The tables of payloads in PostgreSQL. Open them with `await PostgresPayloads.open(url)`."""

    def __init__(self, database: PostgresDatabase, *, schema: str = "outrider") -> None:
        self.database, self._schema, self._sql = database, schema, statements.load_payload(identifier(schema))

    @classmethod
    async def open(
        cls, url: str, *, schema: str = "outrider", pooled: bool = False, connections_max: int | None = None
    ) -> PostgresPayloads:
        """Connect to an installed store. A missing installation and a replica are rejected.

        `connections_max` is for the pools of relays and handlers; two connections are enough here.
        """
        installed = {"what": "table of schemas", "last_step": "payload_schema"}
        size = min(CONNECTIONS_MAX, connections_max or CONNECTIONS_MAX)
        database = await open_installed(url, schema, **installed, connections_max=size, pooled=pooled)
        return cls(database, schema=schema)

    async def register(self, schema: PayloadSchema, actor: str) -> bool:
        return await self._write("register", schema, actor)

    async def replace(self, schema: PayloadSchema, actor: str) -> None:
        await self._write("replace_schema", schema, actor)

    async def schemas(self, event_type: str | None = None) -> list[RegisteredSchema]:
        return to_schemas([tuple(row) for row in await self.database.fetch(self._sql["schemas"], event_type)])

    async def page(self, kind: StoredKind, after: tuple[Any, ...] | None, limit: int) -> StoredPage:
        shape = SHAPES[kind]
        rows = await self.database.fetch(self._sql[shape.query], *(after or shape.start), limit)
        return to_page(kind, [dict(row) for row in rows], limit, shape.key)

    async def close(self) -> None:
        await self.database.close()

    async def _write(self, name: str, schema: PayloadSchema, actor: str) -> bool:
        async with self.database.transaction() as conn:
            if not await conn.fetch(self._sql[name], *_columns(schema, actor)):
                return False
            await record(conn, self._schema, actor, SCHEMA_VERBS[name], **object_of(schema))
        return True


def _columns(schema: PayloadSchema, actor: str) -> tuple[str, str, str, str]:
    return schema.event_type, str(schema.version), json.dumps(schema.document), actor
