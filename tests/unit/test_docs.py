"""Every Python snippet of the documentation runs, and every SQL snippet too."""

from __future__ import annotations

import asyncio
import os
import re
import signal
import sqlite3
import sys
from contextlib import closing
from inspect import iscoroutinefunction, signature
from pathlib import Path
from types import ModuleType
from typing import Any
from uuid import UUID, uuid4

import asyncpg
import pytest

from outrider import Delivery, Event, Inbox, Saga
from outrider.app import open_inbox
from outrider.brokers.rabbitmq.routing import takes
from outrider.brokers.rabbitmq.settings import RabbitSettings
from outrider.event import default_topic
from outrider.inbox.router import Handler, Route
from outrider.stores.sqlite import SqliteSchema
from outrider.testing import MemoryBroker

ROOT = Path(__file__).parent.parent.parent
PAGES = sorted([ROOT / "README.md", *(ROOT / "docs").glob("*.md")])
PHASES = {"stock.release": "compensation"}
"""Commands of sagas that undo something."""
SNIPPET = re.compile(r"^```(python|sql|console)\n(.*?)^```", re.MULTILINE | re.DOTALL)


def _snippets(*languages: str) -> list[tuple[str, str]]:
    return [
        (f"{page.name}:{page.read_text()[: match.start()].count(chr(10)) + 2}", match[2])
        for page in PAGES
        for match in SNIPPET.finditer(page.read_text())
        if match[1] in languages
    ]


@pytest.mark.postgres
@pytest.mark.parametrize(("place", "code"), _snippets("python"), ids=lambda value: value if ":" in value[:40] else "")
async def test_a_python_snippet_runs(
    place: str, code: str, postgres_url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each in an empty directory; then what it defines is called, with what its parameters are named after."""
    monkeypatch.chdir(tmp_path)
    given = await _surroundings(postgres_url, tmp_path / "shop.db")
    # A module of its own, since dataclasses look for theirs; and without what this file imports from the future.
    module = ModuleType("snippet")
    monkeypatch.setitem(sys.modules, "snippet", module)
    names: dict[str, Any] = vars(module)
    await asyncio.to_thread(exec, compile(code, place, "exec", dont_inherit=True), names)
    for defined in [value for value in names.values() if _to_be_called(value, code)]:
        async with asyncio.timeout(20):
            calling = asyncio.ensure_future(defined(*(given[name] for name in signature(defined).parameters)))
            _stop_if_it_runs_for_ever(code)
            await calling
    for inbox in [value for value in names.values() if isinstance(value, Inbox)]:
        await _deliver(inbox, postgres_url)
    for saga in [value for value in names.values() if isinstance(value, Saga)]:
        saga.check()
    await given["conn"].close()


async def _deliver(inbox: Inbox, url: str) -> None:
    """Give each handler that a snippet registers an event of its type, in a transaction of its own."""
    store = await open_inbox(url)
    for routes in inbox.consumers.values():
        for (topic, event_type), route in routes.handlers.items():
            headers = {"message_id": uuid4(), "event_type": event_type, "aggregate_id": "A-7", "sequence": 1}
            headers |= {"saga_key": f"{UUID(int=7)}:reserve", "saga_phase": PHASES.get(event_type, "action")}
            delivery = Delivery(topic, b"A-7", b"{}", {name: str(value).encode() for name, value in headers.items()})
            assert await Inbox(store).process(delivery, _one_by_one(route), consumer=routes.consumer) == "applied"
    await store.close()


def _one_by_one(route: Route) -> Handler:
    async def handle(event: Event, tx: Any) -> None:
        await route.handler([event], tx)

    return handle if route.batch else route.handler


async def _surroundings(url: str, path: Path) -> dict[str, Any]:
    await SqliteSchema(path).migrate()
    with closing(sqlite3.connect(path)) as local:
        local.execute("CREATE TABLE orders (id TEXT PRIMARY KEY, shipped INTEGER)")
    conn = await asyncpg.connect(url)
    await conn.execute("CREATE TABLE orders (id text PRIMARY KEY, shipped boolean)")
    await conn.execute("CREATE TABLE invoices (order_id text PRIMARY KEY)")
    return {"conn": conn, "url": url, "path": str(path), "order_id": "A-7", "broker": MemoryBroker()}


def _to_be_called(value: Any, code: str) -> bool:
    if not iscoroutinefunction(value) or value.__module__ != "snippet" or "asyncio.run(" in code:
        return False
    # A handler is called by an inbox, and a step by a worker.
    return not {"tx", "run"} & signature(value).parameters.keys()


def _stop_if_it_runs_for_ever(code: str) -> None:
    if "SIGTERM" in code:
        asyncio.get_running_loop().call_later(0.2, os.kill, os.getpid(), signal.SIGTERM)


@pytest.mark.postgres
@pytest.mark.parametrize(("place", "code"), _snippets("sql"), ids=lambda value: value if ":" in value[:40] else "")
async def test_a_sql_snippet_runs(place: str, code: str, postgres_url: str) -> None:
    conn = await asyncpg.connect(postgres_url)
    # Rolled back, because a snippet may make a role, and roles belong to the whole server.
    trial = conn.transaction()
    await trial.start()
    await conn.execute(code)
    await trial.rollback()
    await conn.close()


def test_every_url_that_a_shell_would_take_apart_is_quoted() -> None:
    lines = [line for _, text in _snippets("console") for line in text.splitlines()]
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
    shown = "\n".join(text for _, text in _snippets("console"))
    commands = re.findall(r"^\$ (outrider [a-z]+(?: [a-z]+)?)", shown, re.MULTILINE)
    reference = (ROOT / "docs" / "command-line.md").read_text()
    assert commands
    for command in commands:
        assert f"## `{command}`" in reference or f"## `{command.rsplit(' ', 1)[0]}`" in reference, command
