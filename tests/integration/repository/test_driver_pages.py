"""The pages of the drivers: every program runs on the real server, before the change and after it, and stages what it
says. A comment at the end of a program says what that is: `# staged: order.placed`.
"""

from __future__ import annotations

import asyncio
import sqlite3
from collections.abc import Awaitable, Callable
from contextlib import AsyncExitStack, closing
from inspect import isawaitable, isfunction, signature
from pathlib import Path
from typing import Any, get_origin

import aiosqlite
import asyncpg
import psycopg
import pytest
from pymongo import AsyncMongoClient, MongoClient
from sqlalchemy import create_engine
from sqlalchemy.ext.asyncio import async_sessionmaker, create_async_engine
from sqlalchemy.orm import sessionmaker

from outrider import Inbox
from outrider.app import open_schema
from outrider.brokers.base import Broker
from outrider.testing import MemoryBroker
from tests.support.doc_snippets import ROOT, Snippet, compare, deliver, load, sides, snippets

DRIVERS = ROOT / "docs" / "how-to" / "drivers"
PAGES = [page for page in sorted(DRIVERS.glob("*.md")) if page.name != "django.md"]
"""Django's programs need a project, and run in `tests/integration/django`."""
SERVERS = {"sqlite.md": "sqlite_url", "mongodb.md": "mongo_default"}
"""The fixture that gives the database of a page; PostgreSQL, unless it is named here."""
MARKS = {"sqlite_url": [], "mongo_default": [pytest.mark.mongo], "postgres_url": [pytest.mark.postgres]}
TABLES = ("CREATE TABLE orders (id text PRIMARY KEY)", "CREATE TABLE invoices (order_id text NOT NULL PRIMARY KEY)")


def cases(language: str) -> list[Any]:
    found = snippets(language, pages=PAGES)
    return [pytest.param(snippet, id=str(snippet), marks=MARKS[_server(snippet)]) for snippet in found]


def _server(snippet: Snippet) -> str:
    return SERVERS.get(snippet.page.name, "postgres_url")


@pytest.fixture
def sqlite_url(tmp_path: Path) -> str:
    """A fresh file with the outbox installed."""
    url = f"sqlite:///{tmp_path / 'store.db'}"
    asyncio.run(open_schema(url).migrate())
    return url


@pytest.fixture
def run(
    request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Callable[[Snippet, str], None]:
    """Run a program of a page on the page's server."""
    monkeypatch.chdir(tmp_path)

    def run_it(snippet: Snippet, code: str) -> None:
        url: str = request.getfixturevalue(_server(snippet))
        # One for programs that name a file, whatever the page's server is.
        path = request.getfixturevalue("sqlite_url").removeprefix("sqlite:///")
        asyncio.run(_Run(url, path).run(load(code, str(snippet), monkeypatch), code))

    return run_it


@pytest.mark.parametrize("snippet", cases("python"))
def test_a_program_stages_what_it_says(snippet: Snippet, run: Callable[[Snippet, str], None]) -> None:
    run(snippet, snippet.code)


@pytest.mark.parametrize("snippet", cases("diff"))
def test_a_program_stages_nothing_before_the_change(snippet: Snippet, run: Callable[[Snippet, str], None]) -> None:
    run(snippet, f"{sides(snippet.code)[0]}\n# staged: nothing")


@pytest.mark.parametrize("snippet", cases("diff"))
def test_a_program_stages_its_event_after_the_change(snippet: Snippet, run: Callable[[Snippet, str], None]) -> None:
    run(snippet, f"{sides(snippet.code)[1]}\n# staged: order.placed")


class _Run:
    """One program on one database: its functions are called with what their parameters are annotated with."""

    def __init__(self, url: str, path: str) -> None:
        self.url, self.path, self.stack = url, path, AsyncExitStack()

    async def run(self, names: dict[str, Any], code: str) -> None:
        await self._make_tables()
        async with self.stack, asyncio.timeout(30):
            for function in [value for value in names.values() if _to_be_called(value)]:
                await self._call(function)
            for inbox in [value for value in names.values() if isinstance(value, Inbox)]:
                await deliver(inbox, self.url)
        await compare(code, {self.url, f"sqlite:///{self.path}"})

    async def _make_tables(self) -> None:
        for url in {self.url, f"sqlite:///{self.path}"}:
            if url.startswith("sqlite:"):
                with closing(sqlite3.connect(url.removeprefix("sqlite:///"))) as local:
                    local.executescript(";".join(TABLES))
            elif url.startswith("postgresql:"):
                conn = await asyncpg.connect(url)
                await conn.execute(";".join(TABLES))
                await conn.close()
            else:
                async with AsyncMongoClient[dict[str, Any]](url) as client:
                    await client.drop_database("shop")

    async def _call(self, function: Any) -> None:
        given = [await self._given(name, parameter) for name, parameter in signature(function).parameters.items()]
        # A plain function has no event loop around it.
        done = await asyncio.to_thread(function, *given)
        if isawaitable(done):
            await done

    async def _given(self, name: str, parameter: Any) -> Any:
        kind = get_origin(parameter.annotation) or parameter.annotation
        if kind is str:
            return {"url": self.url, "path": self.path, "order_id": "A-7"}[name]
        return await OPENERS[kind](self)


def _to_be_called(value: Any) -> bool:
    # A handler is called by an inbox.
    return isfunction(value) and value.__module__ == "snippet" and "tx" not in signature(value).parameters


async def _asyncpg(run: _Run) -> Any:
    conn = await asyncpg.connect(run.url)
    run.stack.push_async_callback(conn.close)
    return conn


async def _psycopg(run: _Run) -> Any:
    return run.stack.enter_context(psycopg.connect(run.url))


async def _psycopg_async(run: _Run) -> Any:
    return await run.stack.enter_async_context(await psycopg.AsyncConnection.connect(run.url))


async def _sqlite(run: _Run) -> Any:
    return run.stack.enter_context(closing(sqlite3.connect(run.path, check_same_thread=False)))


async def _aiosqlite(run: _Run) -> Any:
    return await run.stack.enter_async_context(aiosqlite.connect(run.path))


async def _sessions(run: _Run) -> Any:
    engine = create_engine(run.url.replace("postgresql:", "postgresql+psycopg:"))
    run.stack.callback(engine.dispose)
    return sessionmaker(engine)


async def _async_sessions(run: _Run) -> Any:
    engine = create_async_engine(run.url.replace("postgresql:", "postgresql+asyncpg:"))
    run.stack.push_async_callback(engine.dispose)
    return async_sessionmaker(engine)


async def _mongo(run: _Run) -> Any:
    return run.stack.enter_context(MongoClient[dict[str, Any]](run.url))


async def _mongo_async(run: _Run) -> Any:
    return await run.stack.enter_async_context(AsyncMongoClient[dict[str, Any]](run.url))


async def _broker(run: _Run) -> Any:
    return MemoryBroker()


OPENERS: dict[Any, Callable[[_Run], Awaitable[Any]]] = {
    asyncpg.Connection: _asyncpg,
    psycopg.Connection: _psycopg,
    psycopg.AsyncConnection: _psycopg_async,
    sqlite3.Connection: _sqlite,
    aiosqlite.Connection: _aiosqlite,
    sessionmaker: _sessions,
    async_sessionmaker: _async_sessions,
    MongoClient: _mongo,
    AsyncMongoClient: _mongo_async,
    Broker: _broker,
}
