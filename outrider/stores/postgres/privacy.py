"""Keys and stored payloads in PostgreSQL."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

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
from outrider.stores.postgres import statements
from outrider.stores.postgres.database import PostgresDatabase
from outrider.stores.postgres.handler_transactions import open_installed
from outrider.stores.postgres.operation_log import record
from outrider.stores.privacy_rows import KEY_VERBS, SHAPES, stored_text, to_copies, to_keys, to_subject_keys
from outrider.stores.queries import identifier


class PostgresPrivacy:
    """The table of keys in PostgreSQL, and all payloads. Open it with `await PostgresPrivacy.open(url)`."""

    def __init__(self, database: PostgresDatabase, *, schema: str = "outrider") -> None:
        self.database, self._schema, self._sql = database, schema, statements.load_privacy(identifier(schema))

    @classmethod
    async def open(
        cls, url: str, *, schema: str = "outrider", pooled: bool = False, connections_max: int | None = None
    ) -> PostgresPrivacy:
        """Connect to an installed store. A missing installation and a replica are rejected.

        `connections_max` is for the pools of relays and handlers; one connection is enough here.
        """
        installed = {"what": "table of keys", "last_step": "subject_key_destroyed"}
        database = await open_installed(url, schema, **installed, connections_max=1, pooled=pooled)
        return cls(database, schema=schema)

    async def keys(self) -> list[WrappedKey]:
        return to_keys([tuple(row) for row in await self.database.fetch(self._sql["keys"])])

    async def insert_key(self, key_id: str, wrapped: str, actor: str) -> bool:
        return await self._write("insert_key", key_id, wrapped, actor, actor=actor)

    async def activate_key(self, key_id: str, actor: str) -> bool:
        return await self._write("activate_key", key_id, actor, actor=actor)

    async def rewrap_key(self, key_id: str, before: str, after: str, actor: str) -> bool:
        return await self._write("rewrap_key", key_id, before, after, actor=actor)

    async def subject_keys(self, subjects: Sequence[str], key_ids: Sequence[str]) -> list[WrappedSubjectKey]:
        rows = await self.database.fetch(self._sql["subject_keys"], list(subjects), list(key_ids))
        return to_subject_keys([tuple(row) for row in rows])

    async def insert_subject_keys(self, keys: Sequence[NewSubjectKey]) -> None:
        columns = [list(column) for column in zip(*keys, strict=True)]
        await self.database.fetch(self._sql["insert_subject_keys"], *columns)

    async def destroy_subject_key(self, subject: str) -> list[str]:
        rows = await self.database.fetch(self._sql["destroy_subject_key"], subject, erased_name(subject))
        return [key_id for (key_id,) in rows]

    async def subject_key_page(self, after: str, limit: int) -> list[WrappedSubjectKey]:
        rows = await self.database.fetch(self._sql["subject_key_page"], after, limit)
        return to_subject_keys([tuple(row) for row in rows])

    async def rewrap_subject_keys(self, changes: Sequence[tuple[str, str, str]]) -> int:
        columns = [list(column) for column in zip(*changes, strict=True)]
        return len(await self.database.fetch(self._sql["rewrap_subject_keys"], *columns))

    async def count_subject_keys(self) -> SubjectKeyCounts:
        [[live, destroyed]] = await self.database.fetch(self._sql["count_subject_keys"])
        return SubjectKeyCounts(live, destroyed)

    async def copies(self, kind: CopyKind, after: tuple[Any, ...] | None, limit: int) -> CopyPage:
        shape = SHAPES[kind]
        rows = await self.database.fetch(self._sql[f"{shape.name}_copies"], *(after or shape.start), limit)
        return to_copies(kind, [dict(row) for row in rows], limit, shape.key)

    async def rewrite(self, kind: CopyKind, rewrites: Sequence[Rewrite]) -> int:
        keys = [list(column) for column in zip(*(each.copy.key for each in rewrites), strict=True)]
        before = [stored_text(kind, each.copy.text) for each in rewrites]
        after = [stored_text(kind, each.text) for each in rewrites]
        return len(await self.database.fetch(self._sql[f"rewrite_{SHAPES[kind].name}"], *keys, before, after))

    async def close(self) -> None:
        await self.database.close()

    async def _write(self, name: str, key_id: str, *columns: str, actor: str) -> bool:
        async with self.database.transaction() as conn:
            if not await conn.fetch(self._sql[name], key_id, *columns):
                return False
            await record(conn, self._schema, actor, KEY_VERBS[name], key=key_id)
        return True
