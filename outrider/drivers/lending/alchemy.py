"""SQLAlchemy's sessions and connections, asynchronous or not.

All of it is written once, for what is below the asynchronous classes too: SQLAlchemy itself calls that in a greenlet.
A session is flushed before a function has ended, so that what cannot be written is the function's failure.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from typing import Any

from sqlalchemy import Connection, Engine
from sqlalchemy.exc import UnboundExecutionError
from sqlalchemy.orm import Session
from sqlalchemy.pool import QueuePool

from outrider.drivers.lending.awaited import AwaitedLender
from outrider.drivers.lending.below import below
from outrider.drivers.lending.threaded import ThreadedLender
from outrider.drivers.lending.work import Work
from outrider.drivers.sqlalchemy import AUTOCOMMIT, SEVERAL, begun, check_bind
from outrider.errors import Misuse

LENDABLE = 10
"""Transactions at a time, where the engine's pool has no size."""


class AlchemyWork(Work):
    """A transaction of a session or of a connection."""

    SAVEPOINT = "with session.begin_nested(): ..."

    def __init__(self, target: Session | Connection) -> None:
        self.given = self._target = target
        connection = target if isinstance(target, Connection) else None
        if isinstance(target, Session):
            check_bind(target)
            # One that was told not to begin by itself must be told to.
            if not target.in_transaction():
                target.begin()
            self._transaction: Any = target.get_transaction()
            connection = target.connection(execution_options=_level(target.get_bind()))
        else:
            target.execution_options(**_level(target.engine))
            self._transaction = target.begin()
        assert connection is not None
        self._connection, self.below = connection, below(begun(connection))
        if connection.dialect.name == "sqlite" and not self.below.begun:
            raise Misuse(AUTOCOMMIT)

    @property
    def gone(self) -> bool:
        return self._target.get_transaction() is not self._transaction

    @property
    def spoilt(self) -> bool:
        return isinstance(self._target, Session) and not self._target.is_active

    def begin(self) -> None:
        # psycopg begins with the first statement.
        if not self.below.begun:
            self._connection.exec_driver_sql("SELECT 1")

    def settle(self) -> None:
        if isinstance(self._target, Session):
            self._target.flush()
            # A session that has swallowed an error of a flush says so.
            self._target.connection()
        # What is left open inside is released now, as the commit would do it.
        while savepoint := self._target.get_nested_transaction():
            savepoint.commit()

    def commit(self) -> None:
        self._target.commit()

    def rollback(self) -> None:
        self._target.rollback()

    def release(self) -> None:
        self._target.close()


class AwaitedAlchemyWork(Work):
    """The same, below an asynchronous session or connection."""

    SAVEPOINT = "async with session.begin_nested(): ..."

    def __init__(self, given: Any, inner: AlchemyWork) -> None:
        self.given, self._inner, self.below = given, inner, inner.below

    @property
    def gone(self) -> bool:
        return self._inner.gone

    @property
    def spoilt(self) -> bool:
        return self._inner.spoilt

    async def begin(self) -> None:
        if not self.below.begun:
            await _there(self._inner.begin)

    async def settle(self) -> None:
        await _there(self._inner.settle)

    async def commit(self) -> None:
        await _there(self._inner.commit)

    async def rollback(self) -> None:
        await _there(self._inner.rollback)

    async def release(self) -> None:
        await _there(self._inner.release)


class Alchemy(ThreadedLender):
    """A `sessionmaker` or an `Engine`."""

    def __init__(self, source: Any) -> None:
        engine = _engine(source)
        self.vendor, self._make = engine.dialect.name, source.connect if source is engine else source
        super().__init__(_lendable(engine))

    def open(self) -> Work:
        target = self._make()
        try:
            return AlchemyWork(target)
        except BaseException:
            target.close()
            raise


class AwaitedAlchemy(AwaitedLender):
    """An `async_sessionmaker` or an `AsyncEngine`."""

    def __init__(self, source: Any) -> None:
        self._source = source
        engine = getattr(source, "sync_engine", None)
        self._connects = engine is not None
        engine = engine or _engine(lambda: source().sync_session)
        self.vendor = engine.dialect.name
        super().__init__(_lendable(engine))

    async def open(self) -> Work:
        given = await self._source.connect() if self._connects else self._source()
        below_it = given.sync_connection if self._connects else given.sync_session
        try:
            return AwaitedAlchemyWork(given, await _there(AlchemyWork, below_it))
        except BaseException:
            with suppress(Exception):
                await given.close()
            raise


async def _there(job: Callable[..., Any], *args: Any) -> Any:
    """Do something where SQLAlchemy's synchronous classes may wait for an asynchronous driver."""
    from sqlalchemy.util import greenlet_spawn

    return await greenlet_spawn(job, *args)


def _level(bind: Any) -> dict[str, str]:
    # Each statement must see what was committed before it began; a stricter level would look at an old moment. SQLite
    # has no such level, and needs none.
    return {"isolation_level": "READ COMMITTED"} if bind.dialect.name == "postgresql" else {}


def _engine(source: Any) -> Engine:
    """Return the engine of a factory. Making a session connects to nothing."""
    try:
        bind = source if isinstance(source, Engine) else source().get_bind()
    except UnboundExecutionError as error:
        raise Misuse(SEVERAL) from error
    if not isinstance(bind, Engine):
        raise Misuse("the sessions of `transactions` are bound to one connection, not to an engine; bind them to one")
    return bind


def _lendable(engine: Engine) -> int:
    """Return how many transactions may be lent at a time; a pool's overflow stays the application's."""
    return (engine.pool.size() if isinstance(engine.pool, QueuePool) else 0) or LENDABLE
