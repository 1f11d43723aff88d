"""Objects that cannot stage are rejected with the remedy. Every object here is a real one."""

from __future__ import annotations

import sqlite3
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import aiosqlite
import asyncpg
import psycopg_pool
import pytest
import sqlalchemy as sa
from django.db import connections, transaction
from django.db.utils import ConnectionHandler
from pymongo import AsyncMongoClient, MongoClient
from sqlalchemy.ext.asyncio import AsyncSession, async_sessionmaker, create_async_engine
from sqlalchemy.orm import Session, scoped_session, sessionmaker

import outrider
from outrider import Event, NotInTransaction, UsageError
from outrider.outbox.staging import Outbox
from outrider.saga import Saga
from outrider.stores.memory import MemoryStore
from tests.contract.drivers.django_case import ALIAS

EVENT = Event("order.placed", {})
NOWHERE = "postgresql://localhost:1/nothing"
ENGINE = sa.create_engine("sqlite://")
MONGO = "mongodb://localhost:1/?connect=false"


@contextmanager
def closing(thing: Any) -> Iterator[Any]:
    try:
        yield thing
    finally:
        thing.close()


def _closed_connection() -> sa.Connection:
    conn = ENGINE.connect()
    conn.close()
    return conn


def _closed_sqlite() -> sqlite3.Connection:
    conn = sqlite3.connect(":memory:")
    conn.close()
    return conn


def _sqlite_cursor() -> sqlite3.Cursor:
    with closing(sqlite3.connect(":memory:")) as conn:
        return conn.cursor()  # type: ignore[no-any-return]


def _session_transaction() -> Any:
    return Session(ENGINE).begin()


def _django(engine: str = "django.db.backends.sqlite3") -> Any:
    return ConnectionHandler({"default": {"ENGINE": engine, "NAME": ":memory:"} if engine else {}})["default"]


# The object, and the words that name the remedy.
REFUSED: dict[str, tuple[Callable[[], Any], str]] = {
    "nothing": (lambda: None, "pass a connection of asyncpg, psycopg, sqlite3, aiosqlite or Django"),
    "a URL": (lambda: NOWHERE, "pass a connection of"),
    "a psycopg pool": (lambda: psycopg_pool.ConnectionPool(open=False), r"with pool.connection\(\) as conn"),
    "an async psycopg pool": (
        lambda: psycopg_pool.AsyncConnectionPool(open=False),
        r"async with pool.connection\(\) as conn",
    ),
    "an engine": (lambda: ENGINE, r"with engine.begin\(\) as conn"),
    "an async engine": (lambda: create_async_engine("sqlite+aiosqlite://"), r"async with engine.begin\(\) as conn"),
    "a sessionmaker": (lambda: sessionmaker(ENGINE), r"with Session.begin\(\) as session"),
    "an async sessionmaker": (async_sessionmaker, r"async with Session.begin\(\) as session"),
    "a session's transaction": (_session_transaction, "pass the session that the transaction is open on"),
    "a cursor of sqlite3": (_sqlite_cursor, "pass the connection it came from"),
    "all of Django's connections": (lambda: connections, r"django.db.connections\['default'\]"),
    "a MongoDB client": (lambda: MongoClient(MONGO), r"client.start_session\(\)"),
    "a MongoDB database": (lambda: MongoClient(MONGO)["shop"], r"client.start_session\(\)"),
    "an async MongoDB client": (lambda: AsyncMongoClient(MONGO), r"client.start_session\(\)"),
    "a memory store": (MemoryStore, r"async with store.transaction\(\) as tx"),
}
REFUSED_SYNC: dict[str, tuple[Callable[[], Any], str]] = {
    "a closed sqlite3 connection": (_closed_sqlite, "take another and begin again"),
    "an idle sqlite3 connection": (lambda: sqlite3.connect(":memory:"), 'execute "BEGIN IMMEDIATE" first'),
    "an idle session": (lambda: Session(ENGINE), r"with session.begin\(\):.*write your change first"),
    "an idle scoped session": (lambda: scoped_session(sessionmaker(ENGINE)), r"with session.begin\(\):"),
    "an idle connection": (ENGINE.connect, r"with connection.begin\(\):"),
    "a closed connection": (_closed_connection, "take another and begin again"),
    "a Django connection outside atomic": (_django, r"with transaction.atomic\(\):"),
    "a database that Django knows and we do not": (lambda: _django(""), "use django.db.backends.postgresql or sqlite3"),
    "an async session": (AsyncSession, r"is asynchronous; use: await outrider.stage\(conn, ...\)"),
}
REFUSED_ASYNC: dict[str, tuple[Callable[[], Any], str]] = {
    "a session": (lambda: Session(ENGINE), r"would block the event loop; use: outrider.stage_sync\(conn, ...\)"),
    "a Django connection": (_django, r"use: outrider.stage_sync\(conn, ...\)"),
    "an idle async session": (
        lambda: AsyncSession(create_async_engine("sqlite+aiosqlite://")),
        r"async with session.begin\(\):",
    ),
    "an asyncpg pool": (lambda: asyncpg.create_pool(NOWHERE), r"async with pool.acquire\(\) as conn"),
    "an asyncpg connection to come": (lambda: asyncpg.create_pool(NOWHERE).acquire(), r"async with pool.acquire\(\)"),
    "an aiosqlite connection to come": (lambda: aiosqlite.connect(":memory:"), r"async with aiosqlite.connect\(path\)"),
}


@pytest.mark.parametrize("what", [*REFUSED, *REFUSED_SYNC])
def test_staging_is_rejected_with_the_remedy(what: str) -> None:
    make, remedy = (REFUSED | REFUSED_SYNC)[what]
    thing = make()
    with pytest.raises(UsageError, match=f"(?s){remedy}"):
        outrider.stage_sync(thing, EVENT)
    if isinstance(thing, sqlite3.Connection | sa.Connection | MongoClient):
        thing.close()


@pytest.mark.parametrize("what", [*REFUSED, *REFUSED_ASYNC])
async def test_awaited_staging_is_rejected_with_the_remedy(what: str) -> None:
    make, remedy = (REFUSED | REFUSED_ASYNC)[what]
    with pytest.raises(UsageError, match=f"(?s){remedy}"):
        await outrider.stage(make(), EVENT)


async def test_what_was_not_awaited_is_rejected_with_the_remedy() -> None:
    connecting = asyncpg.connect(NOWHERE)
    with pytest.raises(UsageError, match="await it first"):
        await outrider.stage(connecting, EVENT)
    connecting.close()


async def test_a_closed_aiosqlite_connection_is_rejected_with_the_remedy() -> None:
    async with aiosqlite.connect(":memory:") as conn:
        cursor = await conn.cursor()
        with pytest.raises(UsageError, match="pass the connection it came from"):
            await outrider.stage(cursor, EVENT)
        with pytest.raises(NotInTransaction, match="BEGIN IMMEDIATE"):
            await outrider.stage(conn, EVENT)
        with pytest.raises(UsageError, match=r"use: await outrider.stage"):
            outrider.stage_sync(conn, EVENT)
    with pytest.raises(UsageError, match="is not open"):
        await outrider.stage(conn, EVENT)


@dataclass
class Order:
    """The state of a saga."""


async def test_starting_a_saga_names_its_own_counterpart() -> None:
    saga = Saga("order", Order)
    saga.sleep(60, name="cool_down")
    with pytest.raises(UsageError, match=r"use: order.start_sync\(conn, ...\)"):
        await saga.start(Session(ENGINE), Order(), correlation_id="A-7")
    with pytest.raises(UsageError, match=r"use: await order.start\(conn, ...\)"):
        saga.start_sync(AsyncSession(), Order(), correlation_id="A-7")
    with pytest.raises(UsageError, match="use: an asynchronous connection"):
        await Outbox().perform(Session(ENGINE), "deliver_messages", [])
    with pytest.raises(UsageError, match="use: a connection that is not asynchronous"):
        Outbox().perform_sync(AsyncSession(), "deliver_messages", [])


def test_an_atomic_block_that_will_be_rolled_back_is_rejected_with_the_remedy(tmp_path: Path) -> None:
    described = {"ENGINE": "django.db.backends.sqlite3", "NAME": tmp_path / "shop.db"}
    connections[ALIAS] = ConnectionHandler({"default": {}, ALIAS: described})[ALIAS]
    try:
        with transaction.atomic(using=ALIAS):
            # Nothing is installed, so this fails; as with Django's own queries, the block is lost.
            with pytest.raises(UsageError, match=r"run `outrider db migrate`; or .* run: manage\.py migrate outrider"):
                outrider.stage_sync(connections[ALIAS], EVENT)
            with pytest.raises(UsageError, match=r"put what may fail into a `with transaction.atomic\(\):` of its own"):
                outrider.stage_sync(connections[ALIAS], EVENT)
    finally:
        connections[ALIAS].close()
        del connections[ALIAS]


def test_sqlalchemy_without_transactions_is_rejected_with_the_remedy() -> None:
    rejected = pytest.raises(NotInTransaction, match="isolation level AUTOCOMMIT")
    with ENGINE.execution_options(isolation_level="AUTOCOMMIT").begin() as conn, rejected:
        outrider.stage_sync(conn, EVENT)


def test_nothing_of_other_drivers_is_imported_for_one() -> None:
    script = (
        "import sqlite3, sys, outrider\n"
        "conn = sqlite3.connect(':memory:')\n"
        "try:\n    outrider.stage_sync(conn, outrider.Event('a', {}))\n"
        "except outrider.NotInTransaction: pass\n"
        "import outrider.drivers.psycopg\n"
        "print([name for name in ('asyncpg', 'sqlalchemy', 'django', 'aiosqlite', 'pymongo') if name in sys.modules])\n"
    )
    said = subprocess.run([sys.executable, "-c", script], capture_output=True, check=True, text=True)
    assert said.stdout.strip() == "[]"


def test_sqlalchemy_needs_no_greenlet_for_plain_sessions() -> None:
    script = (
        "import sys\n"
        "sys.modules['greenlet'] = None\n"
        "import sqlalchemy, outrider\n"
        "from sqlalchemy.orm import Session\n"
        "from outrider.drivers.commit_hooks import after_commit\n"
        "with Session(sqlalchemy.create_engine('sqlite://')) as session, session.begin():\n"
        "    print(after_commit(session, print))\n"
        "    try:\n        outrider.stage_sync(session, outrider.Event('a', {}))\n"
        "    except outrider.UsageError as error: print(error)\n"
    )
    said = subprocess.run([sys.executable, "-c", script], capture_output=True, check=True, text=True)
    assert said.stdout.startswith("True\nthe database has no outbox")
