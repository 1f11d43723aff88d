"""Every Python snippet of the documentation runs, and every SQL snippet too."""

from __future__ import annotations

import asyncio
import os
import signal
import sqlite3
from contextlib import closing
from inspect import signature
from pathlib import Path
from typing import Any

import asyncpg
import pytest
from sqlalchemy.ext.asyncio import AsyncEngine

from outrider import Inbox, Saga
from outrider.stores.sqlite import SqliteSchema
from outrider.testing import MemoryBroker
from tests.support.doc_snippets import PAGES, ROOT, Snippet, called, deliver, load, snippets

ELSEWHERE = [ROOT / "docs" / "how-to" / "alembic.md", *(ROOT / "docs" / "how-to" / "drivers").glob("*.md")]
"""Pages whose programs need more around them: tests named after the pages run those."""
HERE = [page for page in PAGES if page not in ELSEWHERE]


@pytest.mark.postgres
@pytest.mark.parametrize("snippet", snippets("python", pages=HERE), ids=str)
async def test_a_python_snippet_runs(
    snippet: Snippet, postgres_url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each in an empty directory; then what it defines is called, with what its parameters are named after."""
    monkeypatch.chdir(tmp_path)
    given = await _surroundings(postgres_url, tmp_path / "shop.db")
    code = snippet.code.replace(
        "postgresql+asyncpg://app@db/shop", postgres_url.replace("postgresql:", "postgresql+asyncpg:")
    )
    names = await asyncio.to_thread(load, code, str(snippet), monkeypatch)
    for defined in called(names, code):
        async with asyncio.timeout(20):
            calling = asyncio.ensure_future(defined(*(given[name] for name in signature(defined).parameters)))
            _stop_if_it_runs_for_ever(snippet.code)
            await calling
    for inbox in [value for value in names.values() if isinstance(value, Inbox)]:
        await deliver(inbox, postgres_url)
    for saga in [value for value in names.values() if isinstance(value, Saga)]:
        saga.check()
    for engine in [value for value in names.values() if isinstance(value, AsyncEngine)]:
        await engine.dispose()
    await given["conn"].close()


async def _surroundings(url: str, path: Path) -> dict[str, Any]:
    await SqliteSchema(path).migrate()
    with closing(sqlite3.connect(path)) as local:
        local.execute("CREATE TABLE orders (id TEXT PRIMARY KEY, shipped INTEGER)")
    conn = await asyncpg.connect(url)
    await conn.execute("CREATE TABLE orders (id text PRIMARY KEY, shipped boolean)")
    await conn.execute("CREATE TABLE invoices (order_id text PRIMARY KEY)")
    return {"conn": conn, "url": url, "path": str(path), "order_id": "A-7", "broker": MemoryBroker()}


def _stop_if_it_runs_for_ever(code: str) -> None:
    if "SIGTERM" in code:
        asyncio.get_running_loop().call_later(0.2, os.kill, os.getpid(), signal.SIGTERM)


@pytest.mark.postgres
@pytest.mark.parametrize("snippet", snippets("sql"), ids=str)
async def test_a_sql_snippet_runs(snippet: Snippet, postgres_url: str) -> None:
    conn = await asyncpg.connect(postgres_url)
    # Rolled back, because a snippet may make a role, and roles belong to the whole server.
    trial = conn.transaction()
    await trial.start()
    await conn.execute(snippet.code)
    await trial.rollback()
    await conn.close()
