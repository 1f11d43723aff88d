"""Staging, and what sagas need, through the caller's asyncpg connection."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import asyncpg

from outrider.errors import Misuse, NotInTransaction, Transient
from outrider.saga_store import Entered, NewMail, NewSaga, Phase
from outrider.store import Drafts, Hold, Placed
from outrider.stores.postgres import queries
from outrider.stores.postgres.saga_parameters import post_parameters, start_parameters
from outrider.stores.postgres.staging import counter_parameters, stage_parameters


async def stage(conn: Any, drafts: Drafts, hold: Hold | None, schema: str) -> list[Placed]:
    """Stage in the connection's open transaction: one statement, or two where known ids must be looked up."""
    with _in_transaction(conn, schema):
        return await _stage(conn, drafts, hold, schema)


async def start_saga(conn: Any, new: NewSaga, schema: str) -> bool:
    """Start a saga in the connection's open transaction; False if it is there already::

    async with conn.transaction():
        await start_saga(conn, NewSaga(saga_id, "order", 1, "A-7", b"{}"), "outrider")
    """
    with _in_transaction(conn, schema, "the saga", "start it"):
        return bool(await conn.fetch(queries.load_saga(schema)["start"], *start_parameters(new)))


async def post_mail(conn: Any, mail: Sequence[NewMail], schema: str) -> int:
    """Post mail to sagas in the connection's open transaction; return how many were new::

    async with conn.transaction():
        await post_mail(conn, [NewMail(saga_id, MailKind.REPLY, "stock.reserved", key, b"{}", event_id)], "outrider")
    """
    with _in_transaction(conn, schema):
        return len(await conn.fetch(queries.load_saga(schema)["post"], *post_parameters(mail)))


async def barrier_enter(conn: Any, participant: str, key: str, phase: Phase, schema: str) -> Entered:
    """Let a command through a participant's barrier, or say what became of it before::

    entered = await barrier_enter(conn, "stock", command.headers["saga_key"], Phase.ACTION, "outrider")
    """
    sql = queries.load_saga(schema)
    with _in_transaction(conn, schema):
        if rows := await conn.fetch(sql[f"enter_{phase.value}"], participant, key):
            return Entered(True, rows[0]["barred"])
        [(barred, reply)] = await conn.fetch(sql["answered"], participant, key, phase)
        return Entered(False, barred, None if reply is None else reply.encode())


async def barrier_keep(  # noqa: PLR0917 - every driver takes the same, in the same order
    conn: Any, participant: str, key: str, phase: Phase, reply: bytes, schema: str
) -> None:
    """Keep what was answered to a command, as JSON::

    await barrier_keep(conn, "stock", key, Phase.ACTION, b'{"reserved": 3}', "outrider")
    """
    with _in_transaction(conn, schema):
        await conn.execute(queries.load_saga(schema)["keep"], participant, key, phase, reply.decode())


@contextmanager
def _in_transaction(conn: Any, schema: str, what: str = "the event", do: str = "stage") -> Iterator[None]:
    """Refuse what is no connection in a transaction; say what to do where nothing is installed."""
    if not hasattr(conn, "is_in_transaction"):
        raise Misuse("a pool is not a connection; use: async with pool.acquire() as conn, conn.transaction(): ...")
    if not conn.is_in_transaction():
        raise NotInTransaction(
            f"this connection is not in a transaction, so {what} could not share the fate of your change; "
            f"{do} inside `async with conn.transaction():`"
        )
    try:
        yield
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
