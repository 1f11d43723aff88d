"""Staging through the caller's asyncpg connection."""

from __future__ import annotations

from typing import Any

import asyncpg

from outrider.errors import Misuse, NotInTransaction, Transient
from outrider.store import Drafts, Hold, Placed
from outrider.stores.postgres import queries
from outrider.stores.postgres.staging import counter_parameters, stage_parameters


async def stage(conn: Any, drafts: Drafts, hold: Hold | None, schema: str) -> list[Placed]:
    """Stage in the connection's open transaction: one statement, or two where known ids must be looked up."""
    if not hasattr(conn, "is_in_transaction"):
        raise Misuse("a pool is not a connection; use: async with pool.acquire() as conn, conn.transaction(): ...")
    if not conn.is_in_transaction():
        raise NotInTransaction(
            "this connection is not in a transaction, so the event could not share the fate of your change; "
            "stage inside `async with conn.transaction():`"
        )
    try:
        return await _stage(conn, drafts, hold, schema)
    except (asyncpg.UndefinedTableError, asyncpg.InvalidSchemaNameError) as error:
        raise Misuse(f"the outbox is not installed in schema {schema}; run: outrider db migrate") from error


async def _stage(conn: Any, drafts: Drafts, hold: Hold | None, schema: str) -> list[Placed]:
    sql = queries.load(schema)
    placed = await _stage_plain(conn, sql, drafts, hold) if drafts.plain else []
    return placed + (await _stage_numbered(conn, sql, drafts, hold) if drafts.numbered else [])


async def _stage_plain(conn: Any, sql: dict[str, str], drafts: Drafts, hold: Hold | None) -> list[Placed]:
    if hold is None and len(drafts.plain) == 1:
        rows = await conn.fetch(sql["stage_one"], *drafts.plain[0])
    else:
        rows = await conn.fetch(sql["stage"], *stage_parameters(drafts.plain, hold))
    placed = [Placed(row[0], row[1] == "optimistic") for row in rows]
    if not drafts.supplied or not placed:
        return placed
    taken_back = {row[0] for row in await conn.fetch(sql["retract"], [row.event_id for row in placed])}
    return [row for row in placed if row.event_id not in taken_back]


async def _stage_numbered(conn: Any, sql: dict[str, str], drafts: Drafts, hold: Hold | None) -> list[Placed]:
    if hold is None and len(drafts.numbered) == 1 and not drafts.supplied:
        rows = await conn.fetch(sql["stage_numbered_one"], *drafts.numbered[0])
        return [Placed(row[0], row[1] == "optimistic") for row in rows]
    await conn.execute(sql["lock_counters"], *counter_parameters(drafts.numbered))
    try:
        rows = await conn.fetch(sql["stage_numbered"], *stage_parameters(drafts.numbered, hold))
    except asyncpg.UniqueViolationError as error:
        raise Transient(
            "the same event_id is being staged for another stream at this moment; retry the transaction, and give "
            "each event an id of its own"
        ) from error
    return [Placed(row[0], row[1] == "optimistic") for row in rows]
