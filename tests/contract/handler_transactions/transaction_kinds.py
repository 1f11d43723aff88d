"""Kinds of transactions under test: what an application gives, and what its functions do with what they get."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any

from django.db import connections
from psycopg_pool import AsyncConnectionPool, ConnectionPool
from sqlalchemy import create_engine, text
from sqlalchemy.ext.asyncio import async_sessionmaker, create_async_engine
from sqlalchemy.orm import sessionmaker

from outrider.drivers.django import DjangoTransactions
from tests.contract.drivers.databases import Database, PostgresDatabase
from tests.contract.drivers.django_case import ALIAS, described


class Kind(ABC):
    """One kind. Its functions are awaited if the kind is asynchronous."""

    plain = False
    """Whether functions are plain, and run on a thread."""

    def __init__(self, database: Database) -> None:
        self.database = database
        self.source = self.made()

    @abstractmethod
    def made(self) -> Any:
        """Return what `transactions` is."""

    @abstractmethod
    def run(self, given: Any, sql: str) -> Any:
        """Run a statement."""

    def write(self, given: Any, what: str) -> Any:
        """Write an effect."""
        return self.run(given, f"INSERT INTO effects (what) VALUES ('{what}')")

    def end(self, given: Any, *, commit: bool) -> Any:
        """End the transaction, as no handler should."""
        return given.commit() if commit else given.rollback()

    @abstractmethod
    async def close(self) -> None:
        """Close the connections."""

    def url(self, driver: str) -> str:
        if isinstance(self.database, PostgresDatabase):
            return self.database.sqlalchemy_url(driver)
        return self.database.url.replace("sqlite://", f"sqlite+{driver}://")


class Sessions(Kind):
    """An `async_sessionmaker`."""

    drivers = ("asyncpg", "aiosqlite")

    def made(self) -> Any:
        postgres, sqlite = self.drivers
        self.engine = create_async_engine(self.url(postgres if isinstance(self.database, PostgresDatabase) else sqlite))
        return async_sessionmaker(self.engine)

    async def run(self, given: Any, sql: str) -> None:
        await given.execute(text(sql))

    async def close(self) -> None:
        await self.engine.dispose()


class PsycopgSessions(Sessions):
    """The same, with psycopg below."""

    drivers = ("psycopg", "aiosqlite")


class AsyncEngines(Sessions):
    """An `AsyncEngine`."""

    def made(self) -> Any:
        super().made()
        return self.engine


class PlainSessions(Kind):
    """A `sessionmaker`."""

    plain = True

    def made(self) -> Any:
        driver = "psycopg" if isinstance(self.database, PostgresDatabase) else "pysqlite"
        self.engine = create_engine(self.url(driver))
        return sessionmaker(self.engine)

    def run(self, given: Any, sql: str) -> None:
        given.execute(text(sql))

    async def close(self) -> None:
        self.engine.dispose()


class Engines(PlainSessions):
    """An `Engine`."""

    def made(self) -> Any:
        super().made()
        return self.engine


class PsycopgSource(Kind):
    """An `AsyncConnectionPool` that is not open."""

    def made(self) -> Any:
        return AsyncConnectionPool(self.database.url, min_size=1, max_size=10, open=False)

    async def run(self, given: Any, sql: str) -> None:
        await given.execute(sql)

    async def end(self, given: Any, *, commit: bool) -> None:
        await given.execute("COMMIT" if commit else "ROLLBACK")

    async def close(self) -> None:
        """The transaction source has opened the pool, and closes it."""


class PlainPsycopgPool(Kind):
    """A `ConnectionPool` of connections that would commit every statement."""

    plain = True

    def made(self) -> Any:
        kwargs = {"autocommit": True}
        return ConnectionPool(self.database.url, min_size=1, max_size=10, open=False, kwargs=kwargs)

    def run(self, given: Any, sql: str) -> None:
        given.execute(sql)

    def end(self, given: Any, *, commit: bool) -> None:
        given.execute("COMMIT" if commit else "ROLLBACK")

    async def close(self) -> None:
        """The transaction source has opened the pool, and closes it."""


class Django(Kind):
    """Django's, by alias."""

    plain = True
    age_max = 60

    def made(self) -> Any:
        connections.databases[ALIAS] = {**described(self.database), "CONN_MAX_AGE": self.age_max}
        connections.configure_settings(connections.databases)
        return DjangoTransactions(ALIAS)

    def run(self, given: Any, sql: str) -> None:
        with given.cursor() as cursor:
            cursor.execute(sql)

    def end(self, given: Any, *, commit: bool) -> None:
        self.run(given, "COMMIT" if commit else "ROLLBACK")

    async def close(self) -> None:
        del connections.databases[ALIAS]


class BriefDjango(Django):
    """Django's, with connections that are not kept."""

    age_max = 0


KINDS = [Sessions, PlainSessions]
"""The whole of both suites: one kind that is awaited and one that runs on threads, the two implementations."""
REPEATED = [Django, PsycopgSessions, AsyncEngines, Engines, PsycopgSource, PlainPsycopgPool]
"""They differ in how a transaction begins, ends and breaks, and get the rules about that; all else is the same code."""
POSTGRES_ONLY = {PsycopgSessions, PsycopgSource, PlainPsycopgPool}
