"""Every Python snippet of the documentation runs, and every SQL snippet too."""

from __future__ import annotations

import asyncio
import os
import re
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
from outrider.brokers.rabbitmq.management import takes
from outrider.brokers.rabbitmq.settings import RabbitSettings
from outrider.event import default_topic
from outrider.stores.sqlite import SqliteSchema
from outrider.testing import MemoryBroker
from scripts import check_links
from tests.unit.snippets import PAGES, ROOT, Snippet, called, deliver, load, snippets

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


def test_every_url_that_a_shell_would_take_apart_is_quoted() -> None:
    lines = [line for snippet in snippets("console") for line in snippet.code.splitlines()]
    bare = [line for line in lines if re.search(r"://[^\s']*[?&*]", re.sub(r"'[^']*'", "", line))]
    assert bare == []
    assert any("'amqp://" in line for line in lines)


def test_every_queue_that_the_documentation_declares_takes_events_without_a_topic_of_their_own() -> None:
    declared = re.findall(r"declare=([a-z][^`'\s]*)", "\n".join(page.read_text() for page in PAGES))
    assert declared
    for text in declared:
        for name, pattern in RabbitSettings.from_url(f"amqp://localhost?declare={text}").queues:
            assert takes("topic", pattern, default_topic("order.placed", None, None)), (name, pattern)


def test_every_command_in_the_documentation_exists() -> None:
    shown = "\n".join(snippet.code for snippet in snippets("console"))
    commands = re.findall(r"^\$ (outrider [a-z-]+(?: [a-z-]+)?)", shown, re.MULTILINE)
    reference = (ROOT / "docs" / "reference" / "command-line.md").read_text()
    assert commands
    for command in commands:
        assert f"## `{command}`" in reference or f"## `{command.rsplit(' ', 1)[0]}`" in reference, command


def test_every_link_in_the_markdown_files_leads_to_a_file_and_a_heading(capsys: pytest.CaptureFixture[str]) -> None:
    assert check_links.main() == 0, capsys.readouterr().out


def test_the_glossary_has_at_most_fifteen_words_of_our_own() -> None:
    ours, of_the_field = (ROOT / "docs" / "glossary.md").read_text().split("## Words of the field")
    words = re.findall(r"^\| (\w[^|]*?) \|", ours.partition("|---|---|")[2], re.MULTILINE)
    assert 10 <= len(words) <= 15
    assert all(f"| {word} |" not in of_the_field for word in words)


def test_every_page_is_a_tutorial_a_guide_reference_or_an_explanation() -> None:
    folders = {page.relative_to(ROOT / "docs").parts[0] for page in PAGES if page != ROOT / "README.md"}
    assert folders == {"README.md", "glossary.md", "tutorial", "how-to", "reference", "explanation"}


def test_no_file_of_a_tutorial_is_left_to_the_reader() -> None:
    tutorials = [page for page in PAGES if page.parent.name == "tutorial"]
    assert len(tutorials) == 3
    # Blocks with a file's name are run by the test of the tutorials; one without would be run by nothing.
    assert snippets("python", "sql", "diff", pages=tutorials) == []
