"""Handlers on PostgreSQL: what they must be, and whose fault it is when their transaction fails."""

from __future__ import annotations

import asyncio
import functools
from collections.abc import AsyncIterator, Awaitable
from contextlib import suppress
from typing import Any

import asyncpg
import pytest

import outrider
from outrider.errors import InvalidHandler, Transient, UsageError
from outrider.inbox.consumer import Consumer
from outrider.inbox.inbox import Inbox, Result
from outrider.inbox.model import InboxCriteria
from outrider.inbox.router import Route
from outrider.retry import RetryPolicy
from outrider.stores.postgres import PostgresInbox
from outrider.telemetry.events import ConsumerUnavailable, HandlerRetried
from outrider.testing import ManualClock
from outrider.testing.contracts import delivery
from tests.support.postgres_benches import EFFECTS, PostgresInboxBench
from tests.support.scripted_source import ScriptedSource, Signal

pytestmark = pytest.mark.postgres


@pytest.fixture
async def inbox(postgres_url: str) -> AsyncIterator[PostgresInbox]:
    inbox = await PostgresInbox.open(postgres_url)
    yield inbox
    await inbox.close()


@pytest.fixture
async def bench(inbox: PostgresInbox, postgres_url: str) -> AsyncIterator[PostgresInboxBench]:
    async with asyncpg.create_pool(postgres_url, min_size=1, max_size=2) as pool:
        await pool.execute(EFFECTS)
        yield PostgresInboxBench(inbox, ManualClock(), pool)


async def _nothing(event: outrider.Event, tx: Any) -> None:
    assert isinstance(event, outrider.Event)


async def _end(conn: Any, pid: int) -> None:
    await conn.execute("SELECT pg_terminate_backend($1, 10000)", pid)


async def test_a_handler_that_ends_the_transaction_is_reported(inbox: PostgresInbox) -> None:
    async def commit(event: outrider.Event, tx: Any) -> None:
        await tx.execute("COMMIT")

    with pytest.raises(UsageError, match="leave commit and rollback to outrider"):
        await Inbox(inbox).process(delivery(1), commit, consumer="billing")


async def test_a_connection_lost_under_a_handler_counts_no_attempt_and_the_next_one_works(
    bench: PostgresInboxBench, conn: Any
) -> None:
    async def cut_off(event: outrider.Event, tx: Any) -> None:
        await bench.effect(tx, "never")
        await _end(conn, await tx.fetchval("SELECT pg_backend_pid()"))
        await tx.execute("SELECT 1")

    billing, once = bench.consumer(retry=RetryPolicy(max_attempts=1)), delivery(1)
    billing.routes.handlers["orders", "order.placed"] = Route(cut_off)
    assert await billing.deliver(once) == 0
    with pytest.raises(Transient, match="lost under a handler"):
        await Inbox(bench.store).process(once, cut_off, consumer="billing")
    assert await bench.store.ping()
    billing.routes.handlers["orders", "order.placed"] = Route(bench.handler)
    assert await billing.deliver(once) == 1
    assert await bench.effects() == ["A-1:1"]
    assert bench.observer.of(HandlerRetried) == []


async def test_another_connection_that_is_lost_is_the_handlers_own_affair(bench: PostgresInboxBench, conn: Any) -> None:
    async def cut_off(event: outrider.Event, tx: Any) -> None:
        async with bench._pool.acquire() as other:
            await _end(conn, await other.fetchval("SELECT pg_backend_pid()"))
            await other.execute("SELECT 1")

    billing = bench.consumer()
    billing.routes.handlers["orders", "order.placed"] = Route(cut_off)
    assert await billing.deliver(delivery(1)) == 0
    assert len(bench.observer.of(HandlerRetried)) == 1


@pytest.mark.parametrize("size", [1, 2])
async def test_a_handler_that_begins_another_transaction_is_reported_and_leaves_no_effect(
    bench: PostgresInboxBench, size: int
) -> None:
    async def again(event: outrider.Event, conn: Any) -> None:
        await conn.execute("ROLLBACK")
        await conn.execute("BEGIN")
        await bench.effect(conn, "twice")

    billing = bench.consumer(batch_max=size)
    billing.routes.handlers["orders", "order.placed"] = Route(again)
    with pytest.raises(InvalidHandler, match=r"again ended the transaction.*leave commit and rollback"):
        await billing.deliver(*[delivery(1, key=f"k{number}") for number in range(size)])
    assert await bench.effects() == []


@pytest.mark.parametrize("then", ["SELECT 1", "SELECT 1 / 0"], ids=["returns", "raises"])
@pytest.mark.parametrize("size", [1, 2])
async def test_a_handler_that_commits_and_begins_another_transaction_is_reported(
    bench: PostgresInboxBench, size: int, then: str
) -> None:
    async def again(event: outrider.Event, conn: Any) -> None:
        await conn.execute("COMMIT")
        await conn.execute("BEGIN")
        await bench.effect(conn, "a part")
        await conn.execute(then)

    billing = bench.consumer(batch_max=size)
    billing.routes.handlers["orders", "order.placed"] = Route(again)
    with pytest.raises(InvalidHandler, match=r"again ended the transaction.*leave commit.*the event was order.placed"):
        await billing.deliver(*[delivery(1, key=f"k{number}") for number in range(size)])


async def test_a_handler_that_commits_what_had_waited_is_reported_even_if_it_fails(bench: PostgresInboxBench) -> None:
    async def again(event: outrider.Event, conn: Any) -> None:
        if event.sequence == 3:
            await conn.execute("COMMIT; BEGIN")
            raise ValueError("after all")

    inbox = Inbox(bench.store)
    inbox.consumer("billing", ordering="strict")
    await inbox.process(delivery(1), again, consumer="billing")
    assert await inbox.process(delivery(3), again, consumer="billing") is Result.WAITING
    with pytest.raises(InvalidHandler, match="again ended the transaction"):
        await inbox.process(delivery(2), again, consumer="billing")


class Asynchronous:
    """A handler that is an object."""

    async def __call__(self, event: outrider.Event, tx: Any) -> None:
        await _nothing(event, tx)


@functools.wraps(_nothing)
def _wrapped(event: outrider.Event, tx: Any) -> Any:
    return _nothing(event, tx)


def _promising(event: outrider.Event, tx: Any) -> Awaitable[None]:
    return _nothing(event, tx)


def _plain(event: outrider.Event, tx: Any) -> None:
    tx.execute("INSERT INTO effects (what) VALUES ('lost')").close()


def _lying(event: outrider.Event, tx: Any) -> Awaitable[None] | None:
    return None


@pytest.mark.parametrize(
    "handler",
    [
        _nothing,
        Asynchronous(),
        functools.partial(_nothing),
        _wrapped,
        _promising,
        lambda event, tx: tx.execute("SELECT 1"),
    ],
)
async def test_whatever_returns_something_to_wait_for_is_a_handler(inbox: PostgresInbox, handler: Any) -> None:
    assert await Inbox(inbox).process(delivery(1), handler, consumer="billing") is Result.APPLIED


async def test_a_plain_function_is_rejected_before_anything_is_received(bench: PostgresInboxBench, conn: Any) -> None:
    name = r"tests\.integration\.stores\.test_postgres_handlers\._plain"
    remedy = rf"the handler {name} is a plain function.*write it as `async def`"
    with pytest.raises(UsageError, match=remedy):
        await Inbox(bench.store).process(delivery(1), _plain, consumer="billing")
    billing = bench.routes()
    billing.handlers["orders", "order.placed"] = Route(_plain)
    with pytest.raises(UsageError, match=remedy):
        Consumer(ScriptedSource(Signal()), bench.store, billing)
    assert await conn.fetchval("SELECT count(*) FROM outrider.consumer_inbox") == 0


@pytest.mark.parametrize("handler", [_lying, lambda event, tx: None])
async def test_a_handler_that_returns_nothing_to_wait_for_leaves_no_receipt(
    bench: PostgresInboxBench, handler: Any
) -> None:
    once = delivery(1)
    with pytest.raises(InvalidHandler, match=r"(_lying|<lambda>) is a plain function"):
        await Inbox(bench.store).process(once, handler, consumer="billing")
    assert await Inbox(bench.store).process(once, bench.handler, consumer="billing") is Result.APPLIED


async def test_a_query_left_running_counts_an_attempt(bench: PostgresInboxBench) -> None:
    left: list[asyncio.Task[Any]] = []

    async def leave(event: outrider.Event, tx: Any) -> None:
        left.append(asyncio.create_task(tx.execute("SELECT pg_sleep(3)")))
        await asyncio.sleep(0)

    dead_letter = await _dead_lettered(bench, leave)
    assert "another operation is in progress" in dead_letter["failure"]["error"]
    assert "wait for every query" in dead_letter["failure"]["error"]
    assert len(left) == 3
    await asyncio.gather(*left, return_exceptions=True)


async def test_a_role_set_by_a_handler_counts_an_attempt(bench: PostgresInboxBench) -> None:
    await bench._pool.execute("CREATE ROLE shop_guest")

    async def change(event: outrider.Event, tx: Any) -> None:
        await tx.execute("SET LOCAL ROLE shop_guest")

    try:
        dead_letter = await _dead_lettered(bench, change)
    finally:
        await bench._pool.execute("DROP ROLE shop_guest")
    assert "permission denied" in dead_letter["failure"]["error"]


async def test_missing_rights_count_no_attempt(bench: PostgresInboxBench, postgres_url: str) -> None:
    await bench._pool.execute(
        "CREATE ROLE shop_half; GRANT USAGE ON SCHEMA outrider TO shop_half;"
        "GRANT SELECT, INSERT ON ALL TABLES IN SCHEMA outrider TO shop_half"
    )
    try:
        async with asyncpg.create_pool(
            postgres_url, min_size=1, max_size=2, server_settings={"role": "shop_half"}
        ) as pool:
            half = PostgresInboxBench(PostgresInbox.over(pool), bench.clock, pool)
            billing = half.consumer()
            billing.routes.handlers["orders", "order.placed"] = Route(_nothing)
            assert await billing.deliver(delivery(1)) == 0
    finally:
        await bench._pool.execute("DROP OWNED BY shop_half; DROP ROLE shop_half")
    assert half.observer.of(HandlerRetried) == []
    assert "permission denied" in half.observer.of(ConsumerUnavailable)[0].error


async def test_a_transaction_aborted_by_an_error_is_reported_with_the_remedy(bench: PostgresInboxBench) -> None:
    async def swallow(event: outrider.Event, tx: Any) -> None:
        with suppress(asyncpg.DivisionByZeroError):
            await tx.execute("SELECT 1 / 0")
        await bench.effect(tx, "never")

    dead_letter = await _dead_lettered(bench, swallow)
    assert "current transaction is aborted" in dead_letter["failure"]["error"]
    assert "async with tx.transaction()" in dead_letter["failure"]["error"]


async def _dead_lettered(bench: PostgresInboxBench, handler: Any) -> dict[str, Any]:
    """Let a handler fail until its event is dead-lettered after its last attempt; return the dead letter."""
    billing = bench.consumer()
    billing.routes.handlers["orders", "order.placed"] = Route(handler)
    await billing.deliver_all([delivery(1)], times=4)
    assert bench.observer.of(ConsumerUnavailable) == []
    [dead_letter] = await bench.store.admin.dead_letters(InboxCriteria())
    assert dead_letter["attempts"] == 3
    return dead_letter
