"""Effect and receipt are committed or rolled back together, whatever the connection's settings and the function are."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

import pytest
from django.db import connections, transaction
from psycopg_pool import AsyncNullConnectionPool, NullConnectionPool
from sqlalchemy import create_engine
from sqlalchemy.ext.asyncio import async_sessionmaker, create_async_engine
from sqlalchemy.orm import sessionmaker

from outrider import Inbox, app
from outrider.errors import InvalidHandler, UsageError
from outrider.inbox.inbox import Result
from outrider.testing.harness import delivery
from tests.contract.drivers.databases import Database, PostgresDatabase, SqliteDatabase
from tests.contract.drivers.django_case import ALIAS
from tests.contract.handler_transactions.contract_benches import AdaptedStore
from tests.contract.handler_transactions.test_errors import doing
from tests.contract.handler_transactions.transaction_kinds import (
    KINDS,
    POSTGRES_ONLY,
    REPEATED,
    AsyncEngines,
    Django,
    Engines,
    Kind,
    PlainSessions,
    Sessions,
)

WAIT_SECONDS = 10


class ManualDjango(Django):
    """Django's, with AUTOCOMMIT off."""

    age_max = 0

    def made(self) -> Any:
        source = super().made()
        connections.databases[ALIAS]["AUTOCOMMIT"] = False
        return source


class KeptManualDjango(ManualDjango):
    """The same, with connections that are kept."""

    age_max = 60


MANUAL = pytest.mark.parametrize("kind", [ManualDjango, KeptManualDjango], ids=["not kept", "kept"])


async def test_djangos_functions_are_committed_where_autocommit_is_off_in_sqlite(sqlite: SqliteDatabase) -> None:
    await _committed(ManualDjango(sqlite))


@pytest.mark.postgres
@MANUAL
async def test_djangos_functions_are_committed_where_autocommit_is_off(
    postgres: PostgresDatabase, kind: type[Kind]
) -> None:
    await _committed(kind(postgres))


async def _committed(kind: Kind) -> None:
    store = await app.open_inbox(kind.database.url, transactions=kind.source)
    for number in (1, 2):
        result = await Inbox(store).process(
            delivery(number), lambda _, conn: kind.write(conn, "done"), consumer="billing"
        )
        assert result is Result.APPLIED
    assert await _there(kind.database) == (2, 2)
    await store.close()
    await kind.close()


@pytest.mark.postgres
@pytest.mark.parametrize("raises", [False, True], ids=["returns", "raises"])
async def test_an_atomic_block_that_is_not_left_commits_nothing_is_reported_and_harms_no_later_call(
    postgres: PostgresDatabase, raises: bool
) -> None:
    kind = Django(postgres)
    store = await app.open_inbox(postgres.url, transactions=kind.source)

    def leave_open(_: Any, conn: Any) -> None:
        transaction.atomic(using=conn.alias).__enter__()
        kind.write(conn, "half")
        if raises:
            raise ValueError("of its own")

    with pytest.raises(
        ValueError if raises else transaction.TransactionManagementError,
        match="of its own" if raises else "entered and not left",
    ):
        await Inbox(store).process(delivery(1), leave_open, consumer="billing")
    assert await _there(postgres) == (0, 0)
    await Inbox(store).process(delivery(1), lambda _, conn: kind.write(conn, "done"), consumer="billing")
    assert await _there(postgres) == (1, 1)
    await store.close()
    await kind.close()


@pytest.mark.postgres
@pytest.mark.parametrize("postgres_kind", [*KINDS, *REPEATED], indirect=True, ids=lambda kind: kind.__name__)
@pytest.mark.parametrize("raises", [False, True], ids=["returns", "raises"])
async def test_a_function_that_closes_what_it_was_given_has_ended_its_transaction(
    postgres_kind: Kind, raises: bool
) -> None:
    store = await app.open_inbox(postgres_kind.database.url, transactions=postgres_kind.source)

    async def close(_: Any, given: Any) -> None:
        await doing(postgres_kind, "INSERT INTO effects (what) VALUES ('never')")(None, given)
        if isinstance(closing := given.close(), Awaitable):
            await closing
        if raises:
            raise ValueError("of its own")

    with pytest.raises(InvalidHandler, match="leave commit and rollback to outrider"):
        await Inbox(AdaptedStore(store, plain=postgres_kind.plain)).process(delivery(1), close, consumer="billing")
    assert await _there(postgres_kind.database) == (0, 0)
    await store.close()


@pytest.mark.parametrize("sqlite_kind", [Sessions, PlainSessions, AsyncEngines, Engines], indirect=True)
async def test_a_savepoint_that_is_left_open_is_committed_with_all_else(sqlite_kind: Kind) -> None:
    store = await app.open_inbox(sqlite_kind.database.url, transactions=sqlite_kind.source)

    async def leave_open(_: Any, given: Any) -> None:
        savepoint = given.begin_nested()
        if not sqlite_kind.plain:
            await savepoint.start()
        await doing(sqlite_kind, "INSERT INTO effects (what) VALUES ('done')")(None, given)

    await Inbox(AdaptedStore(store, plain=sqlite_kind.plain)).process(delivery(1), leave_open, consumer="billing")
    assert await _there(sqlite_kind.database) == (1, 1)
    await store.close()


THEN = pytest.mark.parametrize("then", ["SELECT 1", "SELECT nothing"], ids=["returns", "raises"])


@pytest.mark.postgres
@THEN
@pytest.mark.parametrize("postgres_kind", [*KINDS, *REPEATED], indirect=True, ids=lambda kind: kind.__name__)
async def test_a_function_that_commits_and_begins_another_transaction_is_reported(
    postgres_kind: Kind, then: str
) -> None:
    await _reported(postgres_kind, then)


@THEN
@pytest.mark.parametrize(
    "sqlite_kind",
    [kind for kind in [*KINDS, *REPEATED] if kind not in POSTGRES_ONLY],
    indirect=True,
    ids=lambda kind: kind.__name__,
)
async def test_a_function_that_commits_and_begins_another_transaction_is_reported_in_sqlite(
    sqlite_kind: Kind, then: str
) -> None:
    await _reported(sqlite_kind, then)


async def _reported(kind: Kind, then: str) -> None:
    store = await app.open_inbox(kind.database.url, transactions=kind.source)
    again = doing(kind, "COMMIT", "BEGIN", "INSERT INTO effects (what) VALUES ('never')", then)
    with pytest.raises(InvalidHandler, match=r"leave commit and rollback to outrider; the event was order\.placed"):
        await Inbox(AdaptedStore(store, plain=kind.plain)).process(delivery(1), again, consumer="billing")
    assert (await _there(kind.database))[0] == 0
    await store.close()


COMMITTING = pytest.mark.parametrize(
    "how", [{"isolation_level": "AUTOCOMMIT"}, {"connect_args": {"isolation_level": None}}], ids=["level", "driver"]
)


@COMMITTING
async def test_an_engine_that_commits_every_statement_in_sqlite_is_rejected(
    sqlite: SqliteDatabase, how: dict[str, Any]
) -> None:
    engine = create_engine(sqlite.url, **how)
    await _rejected(sqlite, sessionmaker(engine))
    engine.dispose()


@COMMITTING
async def test_an_asynchronous_engine_that_commits_every_statement_in_sqlite_is_rejected(
    sqlite: SqliteDatabase, how: dict[str, Any]
) -> None:
    engine = create_async_engine(sqlite.url.replace("sqlite:", "sqlite+aiosqlite:"), **how)
    await _rejected(sqlite, async_sessionmaker(engine))
    await engine.dispose()


async def _rejected(sqlite: SqliteDatabase, source: Any) -> None:
    for opening in (app.open_inbox, app.open_sagas):
        with pytest.raises(UsageError, match="commits every statement by itself"):
            await opening(sqlite.url, transactions=source)


@pytest.mark.postgres
@pytest.mark.parametrize("made", [NullConnectionPool, AsyncNullConnectionPool])
async def test_a_pool_that_keeps_nothing_and_has_no_limit_will_do(
    postgres: PostgresDatabase, made: Callable[..., Any]
) -> None:
    async with asyncio.timeout(WAIT_SECONDS):
        store = await app.open_inbox(postgres.url, transactions=made(postgres.url, open=False))
        async with store.transaction() as tx:
            [[seven]] = await tx.execute("SELECT 7")
    assert seven == 7
    await store.close()


async def _there(database: Database) -> tuple[int, int]:
    """Count effects and receipts."""
    tables = "effects", f"{database.prefix}consumer_inbox"
    [[effects]], [[receipts]] = [await database.fetch(f"SELECT count(*) FROM {table}") for table in tables]
    return int(effects), int(receipts)
