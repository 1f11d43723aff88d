"""Threads that carry transactions, and the translation of drivers' errors."""

from __future__ import annotations

import asyncio
import sqlite3
import threading
from typing import Any

import asyncpg
import psycopg
import pytest
from sqlalchemy.exc import DBAPIError, OperationalError
from sqlalchemy.exc import TimeoutError as NoConnection

from outrider.drivers import threaded_transactions
from outrider.drivers.connections import is_farewell, translate_errors, translation
from outrider.drivers.detect import transaction_source
from outrider.drivers.threaded_transactions import Thread, Threads
from outrider.errors import OutriderError, Permanent, Transient, Unreachable, UsageError


async def test_a_job_is_done_even_if_its_caller_is_gone() -> None:
    thread, may, done = Thread("test"), threading.Event(), threading.Event()
    first = asyncio.ensure_future(thread.do(may.wait, 10))
    second = asyncio.ensure_future(thread.do(done.set))
    await asyncio.sleep(0)
    second.cancel()
    may.set()
    assert await first
    assert await asyncio.to_thread(done.wait, 10)
    thread.end()


async def test_a_job_that_raises_an_error_that_no_future_carries_is_reported() -> None:
    thread = Thread("test")
    with pytest.raises(RuntimeError, match="StopIteration"):
        await thread.do(lambda: next(iter([])))
    with pytest.raises(SystemExit):
        await thread.do(_leave)
    assert await thread.do(lambda: 7) == 7
    thread.end()


async def test_a_thread_that_is_busy_is_one_less_until_it_is_done(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(threaded_transactions, "WAIT_SECONDS", 0.05)
    pool, may = Threads(1, "test"), threading.Event()
    thread = await pool.get()
    pool.put_when_done(thread, thread.submit(may.wait, 10))
    with pytest.raises(Transient, match="give what your handlers wait for a time limit"):
        await pool.get()
    may.set()
    monkeypatch.setattr(threaded_transactions, "WAIT_SECONDS", 10)
    assert await pool.get() is thread
    pool.put(thread)
    said = list[str]()
    await pool.close(lambda: said.append(threading.current_thread().name))
    assert said == ["test"]


def _wrapped(error: Exception) -> DBAPIError:
    """Return an error as SQLAlchemy hands it on."""
    return OperationalError("SELECT 1", {}, error)


@pytest.mark.parametrize(
    ("error", "kind", "words"),
    [
        (asyncpg.SerializationError("crossed"), Transient, "crossed"),
        (psycopg.errors.DeadlockDetected("crossed"), Transient, "crossed"),
        (psycopg.errors.UndefinedTable("no table"), UsageError, "outrider db migrate"),
        (psycopg.errors.ReadOnlySqlTransaction("no"), UsageError, "primary"),
        (psycopg.errors.InvalidPassword("no"), UsageError, "check user, password"),
        (psycopg.errors.InsufficientPrivilege("no"), UsageError, "grant the role"),
        (psycopg.errors.CannotConnectNow("starting"), Unreachable, "is it running"),
        (psycopg.errors.UniqueViolation("twice"), Permanent, "twice"),
        (psycopg.OperationalError("the connection is closed"), Unreachable, "is it running"),
        (asyncpg.InterfaceError("connection is closed"), Unreachable, "is it running"),
        (ConnectionRefusedError("refused"), Unreachable, "refused"),
        (sqlite3.IntegrityError("twice"), Permanent, "twice"),
    ],
    ids=lambda value: type(value).__name__ if isinstance(value, Exception) else "",
)
@pytest.mark.parametrize("wrap", [lambda error: error, _wrapped], ids=["as it is", "wrapped"])
def test_errors_are_distinguished_whatever_has_wrapped_them(
    error: Exception, kind: type[OutriderError], words: str, wrap: Any
) -> None:
    ours = translation(wrap(error))
    assert type(ours) is kind
    assert words in str(ours)


def test_what_is_no_drivers_error_is_the_applications_own_and_permanent() -> None:
    assert type(translation(ZeroDivisionError("of a hook"))) is Permanent


def test_a_pool_without_a_free_connection_may_have_one_later() -> None:
    assert isinstance(translation(NoConnection("QueuePool limit reached")), Unreachable)


def test_only_what_ends_a_connection_is_a_farewell() -> None:
    assert is_farewell(_wrapped(psycopg.errors.AdminShutdown("bye")))
    assert not is_farewell(psycopg.errors.UniqueViolation("twice"))


def test_what_is_ours_and_a_plain_timeout_pass_as_they_are() -> None:
    for error in (UsageError("ours"), TimeoutError("late")):
        with pytest.raises(type(error)) as caught, translate_errors():
            raise error
        assert caught.value is error


def test_an_unknown_kind_of_transactions_is_rejected_and_the_kinds_are_named() -> None:
    with pytest.raises(UsageError, match=r"cannot be a builtins\.str; give a sessionmaker"):
        transaction_source("default")


def _leave() -> None:
    raise SystemExit("bye")
