"""Rules of Django alone: it commits by itself or not at all, and keeps a connection for each thread."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from django.db import DatabaseError, connections, transaction
from django.db.utils import ConnectionHandler

import outrider
from outrider import Outbox
from outrider.drivers.commit_hooks import after_commit
from tests.contract.drivers.connection_case import placed
from tests.contract.drivers.databases import SqliteDatabase
from tests.contract.drivers.django_case import ALIAS, described

WAIT_SECONDS = 10


@pytest.fixture(autouse=True)
def _beside_an_event_loop(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DJANGO_ALLOW_ASYNC_UNSAFE", "1")


@pytest.fixture
def conn(request: pytest.FixtureRequest, sqlite_database: SqliteDatabase) -> Iterator[Any]:
    """A connection; the parameter is whether it commits by itself."""
    facts = described(sqlite_database) | {"AUTOCOMMIT": getattr(request, "param", True)}
    connections[ALIAS] = ConnectionHandler({"default": {}, ALIAS: facts})[ALIAS]
    yield connections[ALIAS]
    connections[ALIAS].close()
    del connections[ALIAS]


@pytest.mark.parametrize("conn", [False], indirect=True)
async def test_relays_are_woken_where_autocommit_is_off_and_no_hook_reports_the_commit(
    conn: Any, sqlite_database: SqliteDatabase
) -> None:
    woken = asyncio.Event()
    with conn.cursor() as cursor:
        cursor.execute("INSERT INTO notes VALUES ('A')")
    Outbox(wake=woken.set).stage_sync(conn, placed())
    conn.commit()
    async with asyncio.timeout(WAIT_SECONDS):
        await woken.wait()
    assert await sqlite_database.types() == ["order.placed"]


def test_outside_of_a_block_no_hook_is_called(conn: Any) -> None:
    calls: list[str] = []
    assert not after_commit(conn, lambda: calls.append("too early"))
    assert calls == []


def test_a_connection_of_another_thread_is_rejected_as_django_rejects_it(conn: Any) -> None:
    with (
        transaction.atomic(using=ALIAS),
        ThreadPoolExecutor(1) as other,
        pytest.raises(DatabaseError, match="created in a thread can only be used in that same thread"),
    ):
        other.submit(outrider.stage_sync, conn, placed()).result()
