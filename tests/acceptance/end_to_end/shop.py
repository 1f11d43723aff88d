"""A business with purchases and their events, written in the same transactions; some of them are rolled back."""

from __future__ import annotations

import asyncio
import random
import sqlite3
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self
from uuid import UUID

import asyncpg

import outrider
from outrider.event import Event
from outrider.outbox.validation import StagingRules

OUTBOX = outrider.Outbox(rules=StagingRules(payload_bytes_max=4_000_000))
PURCHASES = "CREATE TABLE IF NOT EXISTS purchase (event_id text PRIMARY KEY, key text NOT NULL)"


@dataclass(frozen=True, slots=True)
class Deal:
    """One transaction of the business: an event for each key, and whether it commits."""

    keys: tuple[str, ...]
    commits: bool = True


def deals(events: int, keys: int, *, seed: int = 7) -> list[Deal]:
    """Divide events evenly among keys, and into transactions of several; one more in ten is rolled back."""
    rng = random.Random(seed)
    names = [f"k{number:03}" for number in range(keys)]
    left = names * (events // keys)
    rng.shuffle(left)
    made: list[Deal] = []
    while left:
        size = rng.randint(2, 20)
        made.append(Deal(tuple(left[:size])))
        left = left[size:]
        if rng.random() < 0.1:
            made.append(Deal(tuple(rng.choices(names, k=size)), commits=False))
    return made


class Compensated(Exception):
    """The business changed its mind."""


class Shop(ABC):
    """The business and its database."""

    writers = 1

    def __init__(self, url: str) -> None:
        self.url = url
        self.compensated: set[str] = set()
        """The events of transactions that were rolled back."""

    @abstractmethod
    async def transact(self, events: Sequence[Event], *, commits: bool = True) -> list[UUID]:
        """Write purchases and stage their events, all in one transaction."""

    @abstractmethod
    async def count(self, table: str) -> int:
        """Count what is in a table. The tables have the same names in all databases."""

    @abstractmethod
    async def owners(self) -> int:
        """Count the relays that own lanes."""

    @abstractmethod
    async def attempts(self, table: str) -> int:
        """Add up the failed attempts of the events in a table."""

    @abstractmethod
    async def purchases(self) -> dict[str, str]:
        """Return what was sold: the events that there must be, with their keys."""

    @abstractmethod
    async def close(self) -> None:
        """Let go of the database."""

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    async def work(self, plan: Iterable[Deal], topic: str) -> None:
        """Do deals, several at once if the database lets several write."""
        waiting = iter(plan)

        async def write() -> None:
            for deal in waiting:
                made = [event(key, topic) for key in deal.keys]
                ids = await self.transact(made, commits=deal.commits)
                if not deal.commits:
                    self.compensated |= {str(event_id) for event_id in ids}

        async with asyncio.TaskGroup() as tasks:
            for _ in range(self.writers):
                tasks.create_task(write())

    async def failed_attempts(self) -> int:
        """Count the failed attempts of all events, whatever table they are in."""
        return sum([await self.attempts(table) for table in ("outbox", "outbox_archive", "outbox_dead_letter")])


class SqlShop(Shop):
    """A business whose database speaks SQL."""

    @abstractmethod
    async def rows(self, sql: str) -> list[Any]:
        """Ask the database."""

    async def ask(self, sql: str) -> Any:
        """Ask for one value."""
        return (await self.rows(sql))[0][0]

    async def count(self, table: str) -> int:
        return int(await self.ask(f"SELECT count(*) FROM {table}"))

    async def owners(self) -> int:
        return int(await self.ask("SELECT count(DISTINCT owner) FROM outbox_lane"))

    async def attempts(self, table: str) -> int:
        return int(await self.ask(f"SELECT coalesce(sum(attempts), 0) FROM {table}"))

    async def purchases(self) -> dict[str, str]:
        return {row[0]: row[1] for row in await self.rows("SELECT event_id, key FROM purchase")}


class PostgresShop(SqlShop):
    """A business on PostgreSQL, with several writers."""

    writers = 4

    def __init__(self, url: str, pool: Any) -> None:
        super().__init__(url)
        self._pool = pool

    @classmethod
    async def open(cls, url: str) -> Self:
        """Open for business in a database that has an outbox."""
        size = cls.writers + 1
        path = {"search_path": "public, outrider"}
        pool = await asyncpg.create_pool(url, min_size=size, max_size=size, server_settings=path)
        await pool.execute(PURCHASES)
        return cls(url, pool)

    async def transact(self, events: Sequence[Event], *, commits: bool = True) -> list[UUID]:
        ids: list[UUID] = []
        try:
            async with self._pool.acquire() as conn, conn.transaction():
                for some in in_two(events):
                    ids += await OUTBOX.stage(conn, *some)
                await conn.executemany("INSERT INTO purchase VALUES ($1, $2)", purchases(ids, events))
                if not commits:
                    raise Compensated
        except Compensated:
            pass
        return ids

    async def rows(self, sql: str) -> list[Any]:
        found: list[Any] = await self._pool.fetch(sql)
        return found

    async def close(self) -> None:
        await self._pool.close()


class SqliteShop(SqlShop):
    """A business on SQLite, which has one writer at a time."""

    def __init__(self, path: Path) -> None:
        super().__init__(f"sqlite:///{path}")
        # Two connections: a question asked through the writer's would be part of its transaction.
        self._conn, self._reader = (
            sqlite3.connect(path, isolation_level=None, timeout=60, check_same_thread=False) for _ in range(2)
        )
        self._conn.execute(PURCHASES)

    async def transact(self, events: Sequence[Event], *, commits: bool = True) -> list[UUID]:
        return await asyncio.to_thread(self._transact, events, commits)

    def _transact(self, events: Sequence[Event], commits: bool) -> list[UUID]:
        self._conn.execute("BEGIN IMMEDIATE")
        ids: list[UUID] = []
        for some in in_two(events):
            ids += OUTBOX.stage_sync(self._conn, *some)
        self._conn.executemany("INSERT INTO purchase VALUES (?, ?)", purchases(ids, events))
        self._conn.execute("COMMIT" if commits else "ROLLBACK")
        return ids

    async def rows(self, sql: str) -> list[Any]:
        return await asyncio.to_thread(lambda: self._reader.execute(sql).fetchall())

    async def close(self) -> None:
        self._conn.close()
        self._reader.close()


def event(key: str, topic: str, payload: Any = None) -> Event:
    """Say that something was purchased."""
    return Event("purchase.made", payload or {"by": key}, key=key, topic=topic, sequence="auto")


def in_two(events: Sequence[Event]) -> list[Sequence[Event]]:
    """Stage in two calls, with the keys in one order, as callers must that lock several streams bit by bit."""
    ordered = sorted(events, key=lambda one: one.key or "")
    half = len(ordered) // 2
    return [some for some in (ordered[:half], ordered[half:]) if some]


def purchases(ids: Sequence[UUID], events: Sequence[Event]) -> list[tuple[str, str | None]]:
    """Return the rows of the business's own table."""
    keys = [one.key for some in in_two(events) for one in some]
    return [(str(event_id), key) for event_id, key in zip(ids, keys, strict=True)]


def totals(sold: Iterable[str]) -> dict[str, list[int]]:
    """Return the sequence that each key's events must have, given the keys of what was sold."""
    return {key: list(range(1, count + 1)) for key, count in Counter(sold).items()}
