"""`outrider explain` on PostgreSQL, whose tables of delivered events and of dead letters have other columns."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from typing import Any
from uuid import uuid4

import asyncpg
import pytest
from typer.testing import CliRunner

import outrider
from outrider import Event
from outrider.app import open_schema
from outrider.cli import app
from outrider.testing.servers.postgres import PostgresServer


@pytest.fixture(scope="module")
def server() -> Iterator[PostgresServer]:
    with PostgresServer() as running:
        yield running


def test_an_event_is_explained_wherever_it_is(server: PostgresServer, tmp_path: Any) -> None:
    url = server.database(f"test_{uuid4().hex[:12]}")

    def run(*args: str, code: int = 0) -> Any:
        environ = {"OUTRIDER_STORE": url, "OUTRIDER_BROKER": f"embedded:///{tmp_path / 'log.db'}"}
        result = CliRunner().invoke(app, [*args, "--json"], env=environ)
        assert result.exit_code == code, (result.stdout, result.stderr, result.exception)
        return json.loads(result.stdout)

    async def stage() -> list[str]:
        await open_schema(url).migrate()
        conn = await asyncpg.connect(url)
        async with conn.transaction():
            ids = await outrider.stage(conn, *(Event("order.placed", {}, topic="orders", key=key) for key in "AAB"))
        await conn.close()
        return [str(event_id) for event_id in ids]

    first, second, other = asyncio.run(stage())
    assert run("explain", first)["reasons"] == ["no relay is running"]
    run("dead-letters", "add", first)
    run("relay", "--until-empty", code=1)
    assert run("explain", first)["facts"]["event"]["state"] == "dead_letter"
    assert run("explain", second)["facts"]["blocked"]["head"] == first
    assert run("explain", "A")["summary"] == "the key A is blocked"
    assert run("explain", other)["reasons"][0].startswith("the broker confirmed it at ")
    assert run("explain", "B")["summary"] == "all events of B are delivered"
