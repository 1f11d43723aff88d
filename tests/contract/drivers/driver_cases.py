"""Drivers themselves: asyncpg, psycopg, sqlite3, aiosqlite."""

from __future__ import annotations

import sqlite3
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from typing import Any

import aiosqlite
import asyncpg
import psycopg

from tests.contract.drivers.connection_case import AsyncCase, SyncCase
from tests.contract.drivers.databases import PostgresDatabase, SqliteDatabase

INSERT = "INSERT INTO notes VALUES ($1)"


class Asyncpg(AsyncCase):
    """A connection of asyncpg's pool."""

    database: PostgresDatabase

    @asynccontextmanager
    async def transaction(self) -> AsyncIterator[Any]:
        async with self.idle() as conn, conn.transaction():
            yield conn

    @asynccontextmanager
    async def savepoint(self, conn: Any) -> AsyncIterator[Any]:
        async with conn.transaction():
            yield conn

    @asynccontextmanager
    async def idle(self) -> AsyncIterator[Any]:
        cached = 0 if self.database.pooled else 100
        made = asyncpg.create_pool(self.database.url, min_size=1, statement_cache_size=cached)
        async with made as pool, pool.acquire() as conn:
            yield conn

    async def write(self, conn: Any, what: str) -> None:
        await conn.execute(INSERT, what)

    async def close(self) -> None:
        pass


class AsyncpgConnection(Asyncpg):
    """A connection of asyncpg without a pool."""

    @asynccontextmanager
    async def idle(self) -> AsyncIterator[Any]:
        conn = await asyncpg.connect(self.database.url, statement_cache_size=0 if self.database.pooled else 100)
        try:
            yield conn
        finally:
            await conn.close()


class Psycopg(SyncCase):
    """A connection of psycopg, which begins by itself; its rows and cursors are not the usual ones."""

    database: PostgresDatabase

    @contextmanager
    def begun(self) -> Iterator[Any]:
        with self._connect(autocommit=False) as conn:
            yield conn

    @contextmanager
    def nested(self, conn: Any) -> Iterator[Any]:
        with conn.transaction():
            yield conn

    @contextmanager
    def unbegun(self) -> Iterator[Any]:
        with self._connect(autocommit=True) as conn:
            yield conn

    def insert(self, conn: Any, what: str) -> None:
        conn.execute("INSERT INTO notes VALUES (%s)", [what])

    def end(self) -> None:
        pass

    def _connect(self, *, autocommit: bool) -> psycopg.Connection[Any]:
        return psycopg.connect(
            self.database.url,
            autocommit=autocommit,
            row_factory=psycopg.rows.dict_row,
            prepare_threshold=None if self.database.pooled else 1,
        )


class PsycopgBlock(Psycopg):
    """A connection of psycopg in autocommit mode, with a block around the transaction."""

    @contextmanager
    def begun(self) -> Iterator[Any]:
        with self._connect(autocommit=True) as conn, conn.transaction():
            yield conn


class PsycopgAsync(AsyncCase):
    """An asynchronous connection of psycopg."""

    database: PostgresDatabase

    @asynccontextmanager
    async def transaction(self) -> AsyncIterator[Any]:
        async with await self._connect(autocommit=False) as conn:
            yield conn

    @asynccontextmanager
    async def savepoint(self, conn: Any) -> AsyncIterator[Any]:
        async with conn.transaction():
            yield conn

    @asynccontextmanager
    async def idle(self) -> AsyncIterator[Any]:
        async with await self._connect(autocommit=True) as conn:
            yield conn

    async def write(self, conn: Any, what: str) -> None:
        await conn.execute("INSERT INTO notes VALUES (%s)", [what])

    async def close(self) -> None:
        pass

    async def _connect(self, *, autocommit: bool) -> psycopg.AsyncConnection[Any]:
        threshold = None if self.database.pooled else 1
        return await psycopg.AsyncConnection.connect(
            self.database.url, autocommit=autocommit, prepare_threshold=threshold
        )


class Sqlite3(SyncCase):
    """A connection of the standard library; its rows and texts are not the usual ones."""

    database: SqliteDatabase

    @contextmanager
    def begun(self) -> Iterator[Any]:
        with self.unbegun() as conn, conn:
            conn.execute("BEGIN IMMEDIATE")
            yield conn

    @contextmanager
    def nested(self, conn: Any) -> Iterator[Any]:
        conn.execute("SAVEPOINT inner_one")
        try:
            yield conn
        except BaseException:
            conn.execute("ROLLBACK TO inner_one")
            raise
        finally:
            conn.execute("RELEASE inner_one")

    @contextmanager
    def unbegun(self) -> Iterator[Any]:
        conn = sqlite3.connect(self.database.path)
        conn.row_factory, conn.text_factory = sqlite3.Row, bytes
        try:
            yield conn
        finally:
            conn.close()

    def insert(self, conn: Any, what: str) -> None:
        conn.execute("INSERT INTO notes VALUES (?)", [what])

    def end(self) -> None:
        pass


class Aiosqlite(AsyncCase):
    """A connection of aiosqlite."""

    database: SqliteDatabase

    @asynccontextmanager
    async def transaction(self) -> AsyncIterator[Any]:
        async with self.idle() as conn:
            await conn.execute("BEGIN IMMEDIATE")
            try:
                yield conn
            except BaseException:
                await conn.rollback()
                raise
            await conn.commit()

    @asynccontextmanager
    async def savepoint(self, conn: Any) -> AsyncIterator[Any]:
        await conn.execute("SAVEPOINT inner_one")
        try:
            yield conn
        except BaseException:
            await conn.execute("ROLLBACK TO inner_one")
            raise
        finally:
            await conn.execute("RELEASE inner_one")

    @asynccontextmanager
    async def idle(self) -> AsyncIterator[Any]:
        async with aiosqlite.connect(self.database.path) as conn:
            yield conn

    async def write(self, conn: Any, what: str) -> None:
        await conn.execute("INSERT INTO notes VALUES (?)", [what])

    async def close(self) -> None:
        pass
