"""Databases with a table of the application, and kinds of transactions in them."""

from __future__ import annotations

import sqlite3
from collections.abc import AsyncIterator
from contextlib import closing
from pathlib import Path
from typing import Any
from uuid import UUID

import asyncpg
import pytest

import outrider
from outrider import Event
from outrider.handler_transactions import HandlerTransaction
from tests.contract.drivers.databases import PostgresDatabase, SqliteDatabase
from tests.contract.handler_transactions.transaction_kinds import Kind
from tests.support.postgres_benches import EFFECTS, OWN_THE_CLOCK


@pytest.fixture
async def postgres(postgres_url: str) -> PostgresDatabase:
    """A database of PostgreSQL."""
    conn = await asyncpg.connect(postgres_url)
    await conn.execute(OWN_THE_CLOCK + EFFECTS)
    await conn.close()
    return PostgresDatabase(postgres_url)


@pytest.fixture
async def sqlite(sqlite_path: Path) -> SqliteDatabase:
    """A database in a file."""
    with closing(sqlite3.connect(sqlite_path)) as conn:
        conn.execute("CREATE TABLE effects (id INTEGER PRIMARY KEY, what TEXT NOT NULL)")
    return SqliteDatabase(sqlite_path)


@pytest.fixture
async def postgres_kind(
    request: pytest.FixtureRequest, postgres: PostgresDatabase, adapted: None
) -> AsyncIterator[Kind]:
    """A kind of transactions in PostgreSQL; the parameter is its class."""
    made: Kind = request.param(postgres)
    yield made
    await made.close()


@pytest.fixture
async def sqlite_kind(request: pytest.FixtureRequest, sqlite: SqliteDatabase, adapted: None) -> AsyncIterator[Kind]:
    """A kind of transactions in SQLite; the parameter is its class."""
    made: Kind = request.param(sqlite)
    yield made
    await made.close()


@pytest.fixture
def adapted(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the asynchronous functions of the suites work with what is not: see `contract_benches.plainly`."""
    # Event loops on threads run them, and Django rejects work beside an event loop.
    monkeypatch.setenv("DJANGO_ALLOW_ASYNC_UNSAFE", "1")
    awaited = outrider.stage

    async def stage(conn: Any, *events: Event) -> list[UUID]:
        plain = not isinstance(conn, HandlerTransaction) and not type(conn).__name__.startswith("Async")
        return outrider.stage_sync(conn, *events) if plain else await awaited(conn, *events)

    monkeypatch.setattr(outrider, "stage", stage)
