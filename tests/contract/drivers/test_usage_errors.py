"""Objects of PostgreSQL's drivers that cannot stage are rejected with the remedy. Every object is a real one."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import asyncpg
import psycopg
import psycopg2
import psycopg_pool
import pytest
import sqlalchemy as sa

import outrider
from outrider import NotInTransaction, UsageError
from tests.contract.drivers.connection_case import placed
from tests.contract.drivers.databases import PostgresDatabase

pytestmark = pytest.mark.postgres


@pytest.fixture
def conn(postgres_database: PostgresDatabase) -> Iterator[psycopg.Connection[Any]]:
    with psycopg.connect(postgres_database.url, autocommit=True) as conn:
        yield conn


def test_psycopgs_cursors_and_transactions_are_rejected(conn: psycopg.Connection[Any]) -> None:
    with conn.transaction() as transaction, conn.cursor() as cursor:
        with pytest.raises(UsageError, match="pass the connection it came from"):
            outrider.stage_sync(cursor, placed())
        with pytest.raises(UsageError, match="pass the connection that the transaction is open on"):
            outrider.stage_sync(transaction, placed())


async def test_psycopg_is_not_awaited(conn: psycopg.Connection[Any]) -> None:
    with conn.transaction(), pytest.raises(UsageError, match=r"use: outrider.stage_sync"):
        await outrider.stage(conn, placed())


def test_a_closed_psycopg_connection_is_rejected(conn: psycopg.Connection[Any]) -> None:
    conn.close()
    with pytest.raises(UsageError, match="take another and begin again"):
        outrider.stage_sync(conn, placed())


async def test_a_psycopg_connection_that_the_pool_has_taken_back_is_rejected(
    postgres_database: PostgresDatabase,
) -> None:
    with psycopg_pool.ConnectionPool(postgres_database.url, min_size=1, max_size=1) as pool:
        with pool.connection() as conn:
            outrider.stage_sync(conn, placed("in time"))
        with pytest.raises(UsageError, match="given back to its pool"):
            outrider.stage_sync(conn, placed("late"))
    async with psycopg_pool.AsyncConnectionPool(postgres_database.url, min_size=1, max_size=1) as awaited:
        async with awaited.connection() as other:
            await outrider.stage(other, placed("in time"))
        with pytest.raises(UsageError, match="given back to its pool"):
            await outrider.stage(other, placed("late"))
    assert await postgres_database.types() == ["in time"] * 2


def test_a_pipeline_without_a_transaction_is_rejected(conn: psycopg.Connection[Any]) -> None:
    with conn.pipeline(), pytest.raises(NotInTransaction, match=r"with conn.transaction\(\):"):
        outrider.stage_sync(conn, placed())
    with conn.pipeline():
        conn.execute("SELECT 1")
        with pytest.raises(NotInTransaction, match=r"with conn.transaction\(\):"):
            outrider.stage_sync(conn, placed())


async def test_a_pipeline_with_a_transaction_will_do(
    conn: psycopg.Connection[Any], postgres_database: PostgresDatabase
) -> None:
    with conn.pipeline(), conn.transaction():
        conn.execute("INSERT INTO notes VALUES ('A')")
        outrider.stage_sync(conn, placed("one"))
        outrider.stage_sync(conn, placed("two"))
    assert await postgres_database.types() == ["one", "two"]


async def test_an_asynchronous_pipeline_is_asked_too(postgres_database: PostgresDatabase) -> None:
    async with await psycopg.AsyncConnection.connect(postgres_database.url, autocommit=True) as conn:
        async with conn.pipeline():
            await conn.execute("SELECT 1")
            with pytest.raises(NotInTransaction, match=r"async with conn.transaction\(\):"):
                await outrider.stage(conn, placed())
        async with conn.pipeline(), conn.transaction():
            await conn.execute("INSERT INTO notes VALUES ('A')")
            await outrider.stage(conn, placed("one"))
    assert await postgres_database.types() == ["one"]


async def test_asyncpgs_closed_connections_and_transactions_are_rejected(postgres_database: PostgresDatabase) -> None:
    conn = await asyncpg.connect(postgres_database.url)
    with pytest.raises(UsageError, match="pass the connection that the transaction is open on"):
        await outrider.stage(conn.transaction(), placed())
    with pytest.raises(UsageError, match=r"use: await outrider.stage"):
        outrider.stage_sync(conn, placed())
    await conn.close()
    with pytest.raises(UsageError, match="take another and begin again"):
        await outrider.stage(conn, placed())


async def test_a_connection_that_the_pool_has_taken_back_is_rejected(postgres_database: PostgresDatabase) -> None:
    async with asyncpg.create_pool(postgres_database.url, min_size=1) as pool:
        async with pool.acquire() as conn:
            pass
        with pytest.raises(UsageError, match="take another and begin again"):
            await outrider.stage(conn, placed())


def test_psycopg2_is_rejected_by_itself_and_under_sqlalchemy(postgres_database: PostgresDatabase) -> None:
    old = psycopg2.connect(postgres_database.url)
    with pytest.raises(UsageError, match="use psycopg 3"):
        outrider.stage_sync(old, placed())
    old.close()
    engine = sa.create_engine(postgres_database.sqlalchemy_url("psycopg2"))
    with engine.begin() as conn, pytest.raises(UsageError, match=r"postgresql\+psycopg2; use postgresql\+psycopg"):
        outrider.stage_sync(conn, placed())
    engine.dispose()
