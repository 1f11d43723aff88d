"""What staging adds to a business transaction."""

from __future__ import annotations

import time
from collections.abc import Awaitable, Callable
from typing import Any, NamedTuple

import asyncpg

import outrider
from outrider import Event
from outrider.stores.postgres import PostgresSchema

BUSINESS = "INSERT INTO orders (id, body) VALUES ($1, $2)"
BODY = {"order": 1, "pad": "x" * 480}


class Cost(NamedTuple):
    """Mean time of one transaction."""

    what: str
    microseconds: float


async def run(url: str, transactions: int) -> list[Cost]:
    """Measure a transaction with and without staging, in turns, so that both see the same machine."""
    await PostgresSchema(url).migrate()
    conn = await asyncpg.connect(url)
    await conn.execute("DROP TABLE IF EXISTS orders; CREATE TABLE orders (id bigint PRIMARY KEY, body text)")
    kinds: dict[str, Callable[[Any, int], Awaitable[Any]]] = {
        "business write alone": _nothing,
        "and one staged event": _one,
        "and one numbered event": _numbered,
        "and ten staged events": _ten,
    }
    spent = dict.fromkeys(kinds, 0.0)
    number = 0
    rounds = max(1, transactions // 50)
    for _ in range(rounds):
        for name, stage in kinds.items():
            started = time.perf_counter()
            for _ in range(50):
                number += 1
                async with conn.transaction():
                    await conn.execute(BUSINESS, number, "x" * 200)
                    await stage(conn, number)
            spent[name] += time.perf_counter() - started
    await conn.execute("TRUNCATE outrider.outbox")
    await conn.close()
    return [Cost(name, seconds / (rounds * 50) * 1e6) for name, seconds in spent.items()]


async def _nothing(conn: Any, number: int) -> None:
    """Only the business write."""


async def _one(conn: Any, number: int) -> None:
    await outrider.stage(conn, Event("order.placed", BODY, aggregate_id=f"k{number % 100}"))


async def _numbered(conn: Any, number: int) -> None:
    await outrider.stage(conn, Event("order.placed", BODY, aggregate_id=f"k{number % 100}", sequence="auto"))


async def _ten(conn: Any, number: int) -> None:
    await outrider.stage(conn, *[Event("order.placed", BODY, aggregate_id=f"k{n}") for n in range(10)])
