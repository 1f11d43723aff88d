"""SQLAlchemy's sessions and connections, over each driver."""

from __future__ import annotations

import sqlite3
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from typing import Any, ClassVar
from uuid import uuid4

import sqlalchemy as sa
from sqlalchemy.ext.asyncio import AsyncSession, async_scoped_session, async_sessionmaker, create_async_engine
from sqlalchemy.orm import DeclarativeBase, Mapped, Session, mapped_column, scoped_session, sessionmaker
from sqlalchemy.pool import NullPool

from outrider import Outbox
from tests.contract.drivers.connection_case import AsyncCase, SyncCase
from tests.contract.drivers.databases import Database, PostgresDatabase


class Base(DeclarativeBase):
    pass


class Note(Base):
    """The application's row, as an object."""

    __tablename__ = "notes"
    what: Mapped[str] = mapped_column(primary_key=True)


INSERT = sa.text("INSERT INTO notes VALUES (:what)")


def options(database: Database, driver: str) -> dict[str, Any]:
    """Return the options of an engine behind a pooler."""
    if not isinstance(database, PostgresDatabase) or not database.pooled:
        return {}
    if driver == "asyncpg":
        named = {"prepared_statement_name_func": lambda: f"s{uuid4().hex}"}
        return {"connect_args": {"statement_cache_size": 0, "prepared_statement_cache_size": 0, **named}}
    return {"connect_args": {"prepare_threshold": None}}


def url_of(database: Database, driver: str) -> str:
    if isinstance(database, PostgresDatabase):
        return database.sqlalchemy_url(driver)
    return database.url.replace("sqlite://", f"sqlite+{driver}://")


class AlchemySession(SyncCase):
    """A session."""

    driver: ClassVar[str] = "psycopg"
    hooked = True

    def __init__(self, database: Database) -> None:
        super().__init__(database)
        url = url_of(database, self.driver)
        self.engine = sa.create_engine(url, poolclass=NullPool, **options(database, self.driver))
        self.sessions = sessionmaker(self.engine)

    @contextmanager
    def begun(self) -> Iterator[Any]:
        with self.sessions.begin() as session:
            yield session

    @contextmanager
    def nested(self, conn: Any) -> Iterator[Any]:
        with conn.begin_nested():
            yield conn

    @contextmanager
    def unbegun(self) -> Iterator[Any]:
        with Session(self.engine.execution_options(isolation_level="AUTOCOMMIT")) as session, session.begin():
            yield session

    def insert(self, conn: Any, what: str) -> None:
        conn.add(Note(what=what))

    def end(self) -> None:
        self.engine.dispose()


class AlchemyScoped(AlchemySession):
    """A session of the thread."""

    @contextmanager
    def begun(self) -> Iterator[Any]:
        registry = scoped_session(self.sessions)
        try:
            with registry.begin():
                yield registry
        finally:
            registry.remove()


class AlchemyConnection(AlchemySession):
    """A connection."""

    hooked = False

    @contextmanager
    def begun(self) -> Iterator[Any]:
        with self.engine.begin() as conn:
            yield conn

    @contextmanager
    def unbegun(self) -> Iterator[Any]:
        with self.engine.execution_options(isolation_level="AUTOCOMMIT").begin() as conn:
            yield conn

    def insert(self, conn: Any, what: str) -> None:
        conn.execute(INSERT, {"what": what})


class AlchemySqliteSession(AlchemySession):
    driver = "pysqlite"


class AlchemySqliteConnection(AlchemyConnection):
    driver = "pysqlite"


class AlchemySqliteByHand(AlchemySqliteSession):
    """A session on SQLite whose transactions are begun as SQLAlchemy advises."""

    def __init__(self, database: Database) -> None:
        super().__init__(database)

        @sa.event.listens_for(self.engine, "connect")
        def leave_it_to_us(conn: sqlite3.Connection, record: Any) -> None:
            conn.isolation_level = None

        @sa.event.listens_for(self.engine, "begin")
        def begin(conn: sa.Connection) -> None:
            if conn.get_execution_options().get("isolation_level") != "AUTOCOMMIT":
                conn.exec_driver_sql("BEGIN")


class AlchemyAsyncSession(AsyncCase):
    """An asynchronous session."""

    driver: ClassVar[str] = "asyncpg"
    hooked = True

    def __init__(self, database: Database) -> None:
        super().__init__(database)
        url = url_of(database, self.driver)
        self.engine = create_async_engine(url, poolclass=NullPool, **options(database, self.driver))
        self.sessions = async_sessionmaker(self.engine)

    @asynccontextmanager
    async def transaction(self) -> AsyncIterator[Any]:
        async with self.sessions.begin() as session:
            yield session

    @asynccontextmanager
    async def savepoint(self, conn: Any) -> AsyncIterator[Any]:
        async with conn.begin_nested():
            yield conn

    @asynccontextmanager
    async def idle(self) -> AsyncIterator[Any]:
        engine = self.engine.execution_options(isolation_level="AUTOCOMMIT")
        async with AsyncSession(engine) as session, session.begin():
            yield session

    async def write(self, conn: Any, what: str) -> None:
        conn.add(Note(what=what))

    async def close(self) -> None:
        await self.engine.dispose()


class AlchemyAsyncScoped(AlchemyAsyncSession):
    """An asynchronous session of a scope."""

    @asynccontextmanager
    async def transaction(self) -> AsyncIterator[Any]:
        registry = async_scoped_session(self.sessions, scopefunc=lambda: 1)
        try:
            async with registry.begin():
                yield registry
        finally:
            await registry.remove()


class AlchemyAsyncConnection(AlchemyAsyncSession):
    """An asynchronous connection."""

    hooked = False

    @asynccontextmanager
    async def transaction(self) -> AsyncIterator[Any]:
        async with self.engine.begin() as conn:
            yield conn

    @asynccontextmanager
    async def idle(self) -> AsyncIterator[Any]:
        async with self.engine.execution_options(isolation_level="AUTOCOMMIT").begin() as conn:
            yield conn

    async def write(self, conn: Any, what: str) -> None:
        await conn.execute(INSERT, {"what": what})


class AlchemyRunSync(AlchemyAsyncSession):
    """A plain session inside `run_sync`, as code that was written for one has it."""

    async def call(self, outbox: Outbox, verb: str, conn: Any, *args: Any) -> Any:
        return await conn.run_sync(lambda session: getattr(outbox, f"{verb}_sync")(session, *args))


class AlchemyPsycopgAsyncSession(AlchemyAsyncSession):
    driver = "psycopg"


class AlchemyPsycopgAsyncConnection(AlchemyAsyncConnection):
    driver = "psycopg"


class AlchemyAiosqliteSession(AlchemyAsyncSession):
    driver = "aiosqlite"


class AlchemyAiosqliteConnection(AlchemyAsyncConnection):
    driver = "aiosqlite"
