"""Errors around handler transactions on PostgreSQL, in every kind: which side failed, and what is left."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import psycopg
import pytest
from django.db import IntegrityError as DjangoIntegrityError
from django.db import transaction as django_transaction
from sqlalchemy import Column, Integer, MetaData, Table, Text, create_engine, insert, text
from sqlalchemy.exc import IntegrityError, PendingRollbackError
from sqlalchemy.ext.asyncio import async_sessionmaker, create_async_engine
from sqlalchemy.orm import Session, registry, sessionmaker

from outrider import app
from outrider.errors import InvalidHandler, Permanent, TransactionLost, Transient, UsageError
from outrider.stores.postgres import PostgresInbox
from tests.contract.drivers.databases import PostgresDatabase
from tests.contract.handler_transactions.contract_benches import AdaptedStore
from tests.contract.handler_transactions.transaction_kinds import (
    KINDS,
    REPEATED,
    BriefDjango,
    Django,
    Kind,
    PlainPsycopgPool,
    PlainSessions,
    Sessions,
)

pytestmark = pytest.mark.postgres

EVERY = pytest.mark.parametrize("postgres_kind", [*KINDS, *REPEATED], indirect=True, ids=lambda kind: kind.__name__)
ONLY_DJANGO = pytest.mark.parametrize("postgres_kind", [Django], indirect=True)
ONLY_SESSIONS = pytest.mark.parametrize("postgres_kind", [PlainSessions], indirect=True)
PID = "SELECT pg_terminate_backend(pg_backend_pid())"


@pytest.fixture
async def store(postgres_kind: Kind) -> AsyncIterator[Any]:
    store = await app.open_inbox(postgres_kind.database.url, transactions=postgres_kind.source)
    yield AdaptedStore(store, plain=postgres_kind.plain)
    await store.close()


def doing(kind: Kind, *statements: str) -> Callable[[Any, Any], Awaitable[None]]:
    """Return a function that runs statements."""

    async def act(_: Any, given: Any) -> None:
        for statement in statements:
            done = kind.run(given, statement)
            if isinstance(done, Awaitable):
                await done

    return act


async def run_handler(
    store: Any, function: Callable[..., Any], then: Callable[[Any], Awaitable[Any]] | None = None
) -> None:
    """Let a function work in a transaction, and something else be done after it; then commit."""
    async with store.transaction() as tx:
        await tx.call(function, None)
        if then:
            await then(tx)


async def effects(kind: Kind) -> list[str]:
    return [row[0] for row in await kind.database.fetch("SELECT what FROM effects ORDER BY id")]


@EVERY
async def test_a_connection_that_is_lost_under_a_handler_is_not_its_fault_and_is_replaced(
    postgres_kind: Kind, store: Any
) -> None:
    with pytest.raises(TransactionLost):
        await run_handler(store, doing(postgres_kind, PID))
    await run_handler(store, doing(postgres_kind, "INSERT INTO effects (what) VALUES ('again')"))
    assert await effects(postgres_kind) == ["again"]


@EVERY
async def test_a_connection_that_is_lost_before_the_commit_leaves_nothing_and_may_pass_later(
    postgres_kind: Kind, store: Any
) -> None:
    async def end(_: Any) -> None:
        await postgres_kind.database.fetch(
            "SELECT pg_terminate_backend(pid, 10000) FROM pg_stat_activity "
            "WHERE datname = current_database() AND state = 'idle in transaction'"
        )

    with pytest.raises(Transient):
        await run_handler(store, doing(postgres_kind, "INSERT INTO effects (what) VALUES ('lost')"), end)
    assert await effects(postgres_kind) == []
    await run_handler(store, doing(postgres_kind, "SELECT 1"))


@EVERY
async def test_an_error_of_the_database_is_the_handlers_own_and_rolls_back_all_it_did(
    postgres_kind: Kind, store: Any
) -> None:
    insert = "INSERT INTO effects (what) VALUES ({0})"
    with pytest.raises(Exception, match="null value") as caught:
        await run_handler(store, doing(postgres_kind, insert.format("'half'"), insert.format("NULL")))
    assert not isinstance(caught.value, InvalidHandler | TransactionLost)
    assert await effects(postgres_kind) == []


@EVERY
async def test_a_handlers_swallowed_error_is_reported_with_what_to_do(postgres_kind: Kind, store: Any) -> None:
    async def swallow(_: Any, given: Any) -> None:
        with pytest.raises(Exception, match="zero"):
            await doing(postgres_kind, "SELECT 1 / 0")(None, given)

    with pytest.raises(Permanent, match="aborted") as caught:
        await run_handler(store, swallow, lambda tx: tx.execute("SELECT 1"))
    assert "needs a savepoint" in str(getattr(caught.value.__cause__, "__notes__", ""))


@EVERY
async def test_a_deferred_constraint_is_reported_at_the_commit_as_permanent(postgres_kind: Kind, store: Any) -> None:
    await postgres_kind.database.fetch("CREATE TABLE once (what text UNIQUE DEFERRABLE INITIALLY DEFERRED)")
    with pytest.raises(Permanent, match="once_what_key"):
        await run_handler(store, doing(postgres_kind, "INSERT INTO once VALUES ('a'), ('a')"))
    await run_handler(store, doing(postgres_kind, "INSERT INTO once VALUES ('a')"))


@EVERY
async def test_functions_of_the_other_mode_are_rejected(postgres_kind: Kind, store: Any) -> None:
    async def awaited(_: Any, given: Any) -> None:
        """Be awaited."""

    def plain(_: Any, given: Any) -> None:
        """Be plain."""

    adapt, unfit = (plain, awaited) if postgres_kind.plain else (awaited, plain)
    inner = store._store
    assert inner.transactions.check_handler(adapt) is None
    assert "write it as" in inner.transactions.check_handler(unfit)
    with pytest.raises(InvalidHandler, match="write it as"):
        await run_handler(inner, unfit)


@EVERY
async def test_an_interrupted_handler_is_rolled_back_and_the_store_goes_on(postgres_kind: Kind, store: Any) -> None:
    entered = threading.Event()

    async def hang(_: Any, given: Any) -> None:
        await doing(postgres_kind, "INSERT INTO effects (what) VALUES ('half')")(None, given)
        entered.set()
        await asyncio.Event().wait()

    async def cut_off() -> None:
        async with store.transaction() as tx:
            hanging = asyncio.create_task(tx.call(hang, None))
            await asyncio.to_thread(entered.wait, 10)
            tx.abort()
            hanging.cancel()
            await hanging

    with pytest.raises(asyncio.CancelledError):
        await cut_off()
    await run_handler(store, doing(postgres_kind, "INSERT INTO effects (what) VALUES ('next')"))
    assert await effects(postgres_kind) == ["next"]


@pytest.mark.parametrize("driver", ["psycopg", "asyncpg"])
async def test_statements_see_what_was_committed_before_them_whatever_the_engine_says(
    postgres: PostgresDatabase, driver: str
) -> None:
    engine = create_async_engine(postgres.sqlalchemy_url(driver), isolation_level="SERIALIZABLE")
    store = await app.open_inbox(postgres.url, transactions=async_sessionmaker(engine))
    async with store.transaction() as tx:
        [[level]] = await tx.execute("SELECT current_setting('transaction_isolation')")
    async with engine.connect() as conn:
        after = (await conn.execute(text("SHOW transaction_isolation"))).scalar()
    assert (level, after) == ("read committed", "serializable")
    await store.close()
    await engine.dispose()


effect_table = Table("effects", MetaData(), Column("id", Integer, primary_key=True), Column("what", Text))


class Effect:
    """A row of the application's."""

    id: Any
    what: Any


registry().map_imperatively(Effect, effect_table)


@ONLY_SESSIONS
async def test_what_a_session_has_not_flushed_is_the_functions_failure(postgres_kind: Kind, store: Any) -> None:
    def add(_: Any, session: Session) -> None:
        session.add(Effect())

    with pytest.raises(IntegrityError):
        await run_handler(store, add)


@ONLY_SESSIONS
async def test_a_session_that_has_swallowed_a_failed_flush_is_not_committed(postgres_kind: Kind, store: Any) -> None:
    def swallow(_: Any, session: Session) -> None:
        session.add(Effect())
        with pytest.raises(IntegrityError):
            session.flush()

    with pytest.raises(PendingRollbackError):
        await run_handler(store, swallow)


@ONLY_SESSIONS
async def test_a_session_that_was_committed_and_used_again_is_another_transaction(
    postgres_kind: Kind, store: Any
) -> None:
    def commit(_: Any, session: Session) -> None:
        session.commit()
        session.execute(insert(effect_table).values(what="in another"))

    with pytest.raises(InvalidHandler, match="leave commit and rollback to outrider"):
        await run_handler(store, commit)
    assert await effects(postgres_kind) == []


@ONLY_DJANGO
async def test_an_atomic_block_that_is_marked_to_be_rolled_back_is_not_taken_for_committed(
    postgres_kind: Kind, store: Any
) -> None:
    def swallow(_: Any, conn: Any) -> None:
        try:
            with django_transaction.atomic(using=conn.alias, savepoint=False):
                postgres_kind.run(conn, "INSERT INTO effects (what) VALUES (NULL)")
        except DjangoIntegrityError:
            pass

    with pytest.raises(django_transaction.TransactionManagementError, match="of its own"):
        await run_handler(store, swallow)


@ONLY_DJANGO
async def test_a_hook_that_fails_after_the_commit_is_reported_and_the_commit_stands(
    postgres_kind: Kind, store: Any
) -> None:
    def hook(_: Any, conn: Any) -> None:
        postgres_kind.write(conn, "committed")
        django_transaction.on_commit(lambda: 1 / 0, using=conn.alias)

    with pytest.raises(Permanent, match="ZeroDivisionError"):
        await run_handler(store, hook)
    assert await effects(postgres_kind) == ["committed"]


@pytest.mark.parametrize("postgres_kind", [Django, BriefDjango], indirect=True, ids=["kept", "not kept"])
async def test_djangos_connections_are_kept_for_as_long_as_its_settings_say(postgres_kind: Kind, store: Any) -> None:
    found = list[int]()
    for _ in range(2):
        async with store.transaction() as tx:
            [[pid]] = await tx.execute("SELECT pg_backend_pid()")
            found.append(pid)
    assert (found[0] == found[1]) is (type(postgres_kind) is Django)


@pytest.mark.parametrize("made", [Sessions, PlainPsycopgPool, Django])
async def test_transactions_of_another_database_are_rejected(
    postgres: PostgresDatabase, empty_database: str, made: type[Kind]
) -> None:
    kind = made(PostgresDatabase(empty_database))
    for opening in (app.open_inbox, app.open_sagas):
        with pytest.raises(UsageError, match="leads to another database"):
            await opening(postgres.url, transactions=kind.source)
        if made is PlainPsycopgPool:
            kind = made(PostgresDatabase(empty_database))
    await kind.close()


async def test_transactions_of_another_vendor_are_rejected(postgres: PostgresDatabase) -> None:
    with pytest.raises(UsageError, match="leads to another database"):
        await app.open_inbox(postgres.url, transactions=sessionmaker(create_engine("sqlite:///shop.db")))


@pytest.mark.parametrize("wrong", [7, "default", object()])
async def test_an_unknown_kind_of_transactions_is_rejected_and_the_kinds_are_named(
    postgres: PostgresDatabase, wrong: object
) -> None:
    with pytest.raises(UsageError, match="give a sessionmaker, async_sessionmaker, Engine"):
        await app.open_inbox(postgres.url, transactions=wrong)


async def test_a_function_that_connects_makes_the_connection_of_each_transaction(postgres: PostgresDatabase) -> None:
    made: list[Any] = []

    def connect() -> Any:
        made.append(psycopg.connect(postgres.url))
        return made[-1]

    async def connect_awaited() -> Any:
        made.append(await psycopg.AsyncConnection.connect(postgres.url))
        return made[-1]

    for source in (connect, connect_awaited):
        store = await app.open_inbox(postgres.url, transactions=source)
        async with store.transaction() as tx:
            assert not made[-1].closed
            assert (await tx.execute("SELECT 7 AS seven"))[0]["seven"] == 7
        assert all(conn.closed for conn in made)
        await store.close()
    assert len(made) == 4


async def test_a_plain_function_that_would_have_to_be_awaited_is_rejected(postgres: PostgresDatabase) -> None:
    with pytest.raises(UsageError, match=r"`async def` a psycopg\.AsyncConnection"):
        await app.open_inbox(postgres.url, transactions=lambda: psycopg.AsyncConnection.connect(postgres.url))


async def test_without_transactions_handlers_get_the_stores_own(postgres: PostgresDatabase) -> None:
    store = await app.open_inbox(postgres.url)
    assert isinstance(store, PostgresInbox)
    async with store.transaction() as tx:
        assert await tx.connection.fetchval("SELECT 1") == 1
    await store.close()
