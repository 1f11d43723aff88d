"""The example of a FastAPI shop: few lines change, and an order and its event are committed or rolled back together."""

from __future__ import annotations

import difflib
import doctest
import re
import subprocess
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import httpx
import pytest
from fastapi import FastAPI

from examples.fastapi_shop import before, run, shop
from outrider import app
from outrider.outbox.model import Criteria

ROOT = Path(__file__).parent.parent.parent
FOLDER = ROOT / "examples" / "fastapi_shop"
CHANGED_LINES_MAX = 5
FIRST, REFUSED = run.ORDERS[0], {"number": "A-9", "customer": "ann", "cents": 90_000}


@pytest.fixture(params=["sqlite", pytest.param("postgres", marks=pytest.mark.postgres)])
def store_url(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    if request.param == "postgres":
        url: str = request.getfixturevalue("empty_database")
        return url
    return f"sqlite:///{tmp_path / 'shop.db'}"


@asynccontextmanager
async def serving(application: FastAPI) -> AsyncIterator[httpx.AsyncClient]:
    transport = httpx.ASGITransport(application)
    async with (
        application.router.lifespan_context(application),
        httpx.AsyncClient(transport=transport, base_url="http://shop") as client,
    ):
        yield client


async def staged(url: str) -> list[str]:
    """Return the numbers of the orders whose events are staged."""
    store = await app.open_store(url)
    rows = await store.admin.events(Criteria())
    await store.close()
    return [row["payload"]["number"] for row in rows]


def changes() -> list[str]:
    """Return the lines that differ between the two shops, without blank ones."""
    old, new = ((FOLDER / name).read_text().splitlines() for name in ("before.py", "shop.py"))
    found = [line for line in difflib.ndiff(old, new) if line[:2] in ("- ", "+ ")]
    return [line for line in found if line[2:].strip()]


def test_at_most_five_lines_change_and_none_is_lost() -> None:
    assert 0 < len(changes()) <= CHANGED_LINES_MAX
    assert all(line.startswith("+ ") for line in changes())


def test_the_readme_shows_the_whole_difference() -> None:
    page = (FOLDER / "README.md").read_text()
    shown = re.findall(r"^\+(.*\S.*)$", page, re.MULTILINE)
    assert shown == [line[2:] for line in changes()]


async def test_an_order_that_is_kept_has_an_event_and_one_that_is_rejected_has_none(store_url: str) -> None:
    await app.open_schema(store_url).migrate()
    async with serving(shop.create_app(run.alchemy_url(store_url))) as client:
        assert (await client.post("/orders", json=FIRST)).status_code == 201
        assert (await client.post("/orders", json=REFUSED)).status_code == 409
        assert (await client.get("/orders")).json() == [FIRST]
    assert await staged(store_url) == [FIRST["number"]]


async def test_the_shop_as_it_was_answers_the_same_and_stages_nothing(store_url: str) -> None:
    await app.open_schema(store_url).migrate()
    async with serving(before.create_app(run.alchemy_url(store_url))) as client:
        assert (await client.post("/orders", json=FIRST)).status_code == 201
        assert (await client.post("/orders", json=REFUSED)).status_code == 409
        assert (await client.get("/orders")).json() == [FIRST]
    assert await staged(store_url) == []


async def test_a_run_delivers_the_orders_that_are_kept_in_each_customers_order(store_url: str, tmp_path: Path) -> None:
    report = await run.run(store_url, tmp_path)
    assert [status for _, status in report.answers] == [201, 201, 409, 201]
    delivered = [event.payload["number"] for event in report.delivered]
    assert sorted(delivered) == report.orders == ["A-1", "A-3", "B-1"]
    assert [number for number in delivered if number.startswith("A")] == ["A-1", "A-3"]


def test_the_command_prints_what_the_readme_shows() -> None:
    command = [sys.executable, "-m", "examples.fastapi_shop"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr
    # Customers do not wait for each other, so only the order within one is certain.
    assert all(line in (FOLDER / "README.md").read_text().splitlines() for line in done.stdout.splitlines())
    assert done.stdout.count("delivered: ") == 3


def test_the_examples_in_its_docstrings_hold() -> None:
    assert doctest.testmod(run).failed == 0
    assert doctest.testmod(run).attempted > 0
