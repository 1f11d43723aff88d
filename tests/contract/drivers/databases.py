"""The databases that applications stage into, looked at from outside: by another connection than the one under test."""

from __future__ import annotations

import sqlite3
from abc import ABC, abstractmethod
from contextlib import closing
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import asyncpg

NOTES = "CREATE TABLE notes (what text NOT NULL)"
STAGED = "SELECT event_type, sequence, state FROM {0}outbox ORDER BY id"
SAGAS = "SELECT correlation_id FROM {0}saga_instance ORDER BY correlation_id"
MAIL = "SELECT count(*) FROM {0}saga_mailbox"


class Database(ABC):
    """An installed outbox beside a table of an application."""

    url: str

    @abstractmethod
    async def fetch(self, sql: str) -> list[tuple[Any, ...]]:
        """Run a query on a connection of its own."""

    async def notes(self) -> list[str]:
        """Return what the application has written and committed."""
        return [row[0] for row in await self.fetch("SELECT what FROM notes ORDER BY what")]

    async def staged(self) -> list[tuple[str, int | None, str]]:
        """Return type, sequence and state of what was staged and committed."""
        rows = await self.fetch(STAGED.format(self.prefix))
        return [(row[0], row[1], row[2]) for row in rows]

    async def types(self) -> list[str]:
        """Return the types of what was staged and committed."""
        return [row[0] for row in await self.staged()]

    async def sagas(self) -> list[str]:
        """Return the correlation ids of sagas that were started."""
        return [row[0] for row in await self.fetch(SAGAS.format(self.prefix))]

    async def messages(self) -> int:
        """Count the messages for sagas."""
        return int((await self.fetch(MAIL.format(self.prefix)))[0][0])

    @property
    @abstractmethod
    def prefix(self) -> str:
        """The prefix of our tables."""


class PostgresDatabase(Database):
    """In PostgreSQL, which may be reached through a pooler."""

    prefix = "outrider."

    def __init__(self, url: str, pooler: str | None = None) -> None:
        self.direct, self.pooled = url, pooler is not None
        path = urlsplit(url).path
        self.url = urlsplit(pooler)._replace(path=path).geturl() if pooler else url

    async def fetch(self, sql: str) -> list[tuple[Any, ...]]:
        conn = await asyncpg.connect(self.direct)
        try:
            return [tuple(row) for row in await conn.fetch(sql)]
        finally:
            await conn.close()

    def sqlalchemy_url(self, driver: str) -> str:
        """Return the URL that SQLAlchemy takes."""
        return self.url.replace("postgresql://", f"postgresql+{driver}://")


class SqliteDatabase(Database):
    """In a file."""

    prefix = ""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.url = f"sqlite:///{path}"

    async def fetch(self, sql: str) -> list[tuple[Any, ...]]:
        with closing(sqlite3.connect(self.path)) as conn:
            return conn.execute(sql).fetchall()
