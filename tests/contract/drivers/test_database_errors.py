"""Errors of the database while staging, through every driver of PostgreSQL."""

from __future__ import annotations

import asyncio
from contextlib import suppress
from typing import Any
from uuid import uuid4

import asyncpg
import psycopg
import pytest

from outrider import Outbox, Transient, UsageError
from tests.contract.drivers.connection_case import Case, RollBack, placed
from tests.contract.drivers.connection_kinds import POSTGRES, Chosen, chosen_of, params
from tests.contract.drivers.databases import PostgresDatabase
from tests.contract.drivers.driver_cases import AsyncpgConnection, Psycopg, PsycopgAsync

WAITING = "SELECT count(*) FROM pg_stat_activity WHERE datname = current_database() AND wait_event_type = 'Lock'"
POLLS_MAX = 500


@pytest.fixture(params=params(POSTGRES, {}, pooled=False))
def chosen(request: pytest.FixtureRequest) -> Chosen:
    return chosen_of(request)


async def test_a_schema_that_is_not_installed_is_reported_with_the_remedy(case: Case) -> None:
    with suppress(RollBack):
        async with case.transaction() as conn:
            with pytest.raises(UsageError, match="not installed in schema absent; run: outrider db migrate"):
                await case.stage(conn, placed(), outbox=Outbox(schema="absent"))
            raise RollBack


async def test_an_error_that_is_the_applications_own_passes_as_it_is(case: Case) -> None:
    with suppress(RollBack):
        async with case.transaction() as conn:
            with suppress(UsageError):
                await case.stage(conn, placed(), outbox=Outbox(schema="absent"))
            # The server has given the transaction up; what it says to that is not ours to reword.
            with pytest.raises((asyncpg.PostgresError, psycopg.Error, UsageError), match=r"aborted|atomic block"):
                await case.stage(conn, placed())
            raise RollBack
    assert await case.database.types() == []


@pytest.mark.postgres
@pytest.mark.parametrize("kind", [AsyncpgConnection, Psycopg, PsycopgAsync])
async def test_an_id_staged_for_two_streams_at_once_may_be_tried_again(
    postgres_database: PostgresDatabase, kind: type[Case]
) -> None:
    known = uuid4()
    first, second = kind(postgres_database), kind(postgres_database)

    async def crossing() -> None:
        async with second.transaction() as conn:
            await second.stage(conn, placed("b", key="B", event_id=known, sequence="auto"))

    async with first.transaction() as conn:
        await first.stage(conn, placed("a", event_id=known, sequence="auto"))
        late = asyncio.create_task(crossing())
        await blocked(postgres_database)
    with pytest.raises(Transient, match="retry the transaction"):
        await late
    assert await postgres_database.types() == ["a"]
    await first.close()
    await second.close()


async def blocked(database: PostgresDatabase) -> None:
    """Wait until somebody waits for a lock; the server gives no signal of that."""
    conn = await asyncpg.connect(database.direct)
    try:
        for _ in range(POLLS_MAX):
            if await conn.fetchval(WAITING):
                return
            await asyncio.sleep(0.01)
        raise AssertionError("nobody waits")
    finally:
        await conn.close()


@pytest.mark.postgres
async def test_the_driver_is_asked_once_for_one_event(postgres_database: PostgresDatabase) -> None:
    conn = await asyncpg.connect(postgres_database.url)
    asked: list[Any] = []
    conn.add_query_logger(asked.append)
    async with conn.transaction():
        begun = len(asked)
        await Outbox().stage(conn, placed())
        assert len(asked) - begun == 1
    await conn.close()
