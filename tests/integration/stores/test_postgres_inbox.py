"""The inbox on PostgreSQL beyond the contract: errors, the handler's connection, odd bytes, maintenance, upgrades."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import asyncpg
import pytest

import outrider
from outrider.errors import Permanent, Transient, Unreachable, UsageError
from outrider.event import Delivery, InboxStream
from outrider.inbox.inbox import Inbox, Result
from outrider.inbox.model import Applied, EventOutcome, Held, InboxBlockReason, InboxCriteria, StreamState
from outrider.inbox.router import Route
from outrider.stores import migrations
from outrider.stores.postgres import PostgresInbox, PostgresSchema
from outrider.testing import ManualClock
from outrider.testing.contracts import delivery
from outrider.wire import decode
from tests.support.postgres_benches import EFFECTS, PostgresInboxBench

pytestmark = pytest.mark.postgres

STREAM = InboxStream("orders", "A-1")


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


async def test_a_handlers_connection_is_as_the_driver_makes_it(inbox: PostgresInbox) -> None:
    async def look(event: outrider.Event, conn: Any) -> None:
        assert await conn.fetchval("""SELECT '{"a": 1}'::json""") == '{"a": 1}'
        assert await conn.fetchval("SHOW transaction_isolation") == "read committed"
        await conn.execute("SET app.tenant = 'blue'")

    async def look_again(event: outrider.Event, conn: Any) -> None:
        assert not await conn.fetchval("SELECT current_setting('app.tenant', true)")

    service = Inbox(inbox)
    assert await service.process(delivery(1), look, consumer="billing") is Result.APPLIED
    assert await service.process(delivery(2), look_again, consumer="billing") is Result.APPLIED


async def test_a_pool_with_its_own_json_codec_works(postgres_url: str) -> None:
    async def read_json(conn: Any) -> None:
        await conn.set_type_codec("json", schema="pg_catalog", encoder=str, decoder=lambda text: {"parsed": text})

    async with asyncpg.create_pool(postgres_url, min_size=1, max_size=2, init=read_json) as pool:
        inbox = PostgresInbox.over(pool)
        poison = delivery(1)._replace(body=b"{")
        assert await Inbox(inbox).process(poison, _nothing, consumer="billing") is Result.DEAD_LETTERED
        [dead_letter] = await inbox.admin.dead_letters(InboxCriteria())
        assert dead_letter["headers"] == poison.headers
        assert dead_letter["failure"] == {"error": "body: not JSON (JSONDecodeError)"}
        await inbox.close()
        assert await pool.fetchval("SELECT 1") == 1


async def test_what_a_handler_raises_comes_back_as_it_was(inbox: PostgresInbox, conn: Any) -> None:
    async def divide(event: outrider.Event, tx: Any) -> None:
        await tx.execute("SELECT 1 / 0")

    with pytest.raises(asyncpg.DivisionByZeroError):
        await Inbox(inbox).process(delivery(1), divide, consumer="billing")

    async def raised() -> None:
        async with inbox.transaction():
            raise asyncpg.UniqueViolationError("mine")

    with pytest.raises(asyncpg.UniqueViolationError, match="mine"):
        await raised()
    assert await conn.fetchval("SELECT count(*) FROM outrider.consumer_inbox") == 0


async def test_a_connection_lost_at_commit_is_a_failure_of_the_store_and_the_next_one_works(
    inbox: PostgresInbox, conn: Any
) -> None:
    once = decode(delivery(1))

    async def cut_off() -> None:
        async with inbox.transaction() as tx:
            await inbox.record_receipts(tx, "billing", [once], ordered=False)
            await _end(conn, await tx.connection.fetchval("SELECT pg_backend_pid()"))

    with pytest.raises(Unreachable):
        await cut_off()
    async with inbox.transaction() as tx:
        assert (await inbox.record_receipts(tx, "billing", [once], ordered=False)).fresh == {once.event_id}


async def _end(conn: Any, pid: int) -> None:
    await conn.execute("SELECT pg_terminate_backend($1, 10000)", pid)


async def test_a_server_that_is_away_does_not_answer() -> None:
    pool = await asyncpg.create_pool("postgresql://postgres@127.0.0.1:1/nothing", min_size=0)
    inbox = PostgresInbox.over(pool)
    assert not await inbox.ping()
    transaction = inbox.transaction()
    with pytest.raises(Unreachable, match="does not answer"):
        await transaction.__aenter__()
    await pool.close()


async def test_a_handler_that_is_cancelled_leaves_no_trace(bench: PostgresInboxBench) -> None:
    begun, service, once = asyncio.Event(), Inbox(bench.store), delivery(1)

    async def wait(event: outrider.Event, tx: Any) -> None:
        await bench.effect(tx, "never")
        begun.set()
        await tx.execute("SELECT pg_sleep(60)")

    executor = asyncio.create_task(service.process(once, wait, consumer="billing"))
    await begun.wait()
    executor.cancel()
    with pytest.raises(asyncio.CancelledError):
        await executor
    assert await service.process(once, bench.handler, consumer="billing") is Result.APPLIED
    assert await bench.effects() == ["A-1:1"]


async def test_a_locked_receipt_is_a_transient_error(
    inbox: PostgresInbox, conn: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("outrider.stores.postgres.handler_transactions.STATEMENT_SECONDS", 0.2)
    once = decode(delivery(1))
    async with inbox.transaction() as tx:
        await inbox.record_receipts(tx, "billing", [once], ordered=False)

        async def second() -> None:
            async with inbox.transaction() as mine:
                await inbox.record_receipts(mine, "billing", [once], ordered=False)

        with pytest.raises(Transient, match="another transaction may hold the same receipt"):
            await second()


async def test_a_write_that_the_commit_rejects_counts_an_attempt(bench: PostgresInboxBench) -> None:
    pool = bench._pool
    await pool.execute("CREATE TABLE parent (id int PRIMARY KEY)")
    await pool.execute("CREATE TABLE child (id int REFERENCES parent DEFERRABLE INITIALLY DEFERRED)")
    billing = bench.consumer()

    async def orphan(event: outrider.Event, tx: Any) -> None:
        await tx.execute("INSERT INTO child VALUES (1)")

    async def swallow(event: outrider.Event, tx: Any) -> None:
        try:
            await tx.execute("SELECT 1 / 0")
        except asyncpg.DivisionByZeroError:
            return

    for number, handler in enumerate((orphan, swallow), start=1):
        billing.routes.handlers["orders", "order.placed"] = Route(handler)
        await billing.deliver_all([delivery(1, key=f"k{number}")], times=4)
    orphaned, swallowed = await bench.store.admin.dead_letters(InboxCriteria())
    assert (orphaned["attempts"], orphaned["failure"]["kind"]) == (3, "ForeignKeyViolationError")
    assert (swallowed["attempts"], swallowed["failure"]["kind"]) == (3, "InFailedSQLTransactionError")


async def test_any_bytes_and_any_names_are_kept_as_they_came(inbox: PostgresInbox) -> None:
    headers = {"\0": b"\0\xff", "\ud800": b"", "é\n": b"\x80" * 3, "key": "naïve".encode()}
    raw = Delivery("or\0ders\ud800" * 80, b"\xff\0", b"\0\xfe", headers, partition="s\0\udfff", position="p\0/7")
    service = Inbox(inbox)
    assert await service.process(raw, _nothing, consumer="billing") is Result.DEAD_LETTERED
    assert await service.process(raw, _nothing, consumer="billing") is Result.DUPLICATE
    odd_topic = delivery(1)._replace(topic="\ud800")
    assert await service.process(odd_topic, _nothing, consumer="shipping") is Result.DEAD_LETTERED
    [dead_letter] = await inbox.admin.dead_letters(InboxCriteria(consumer="billing"))
    assert (dead_letter["headers"], dead_letter["body"], dead_letter["position"]) == (headers, raw.body, "p\\0/7")
    assert await inbox.admin.replay([dead_letter["id"]], "ann") == 1
    [stream] = await inbox.draining("billing", 10)
    async with inbox.transaction() as tx:
        claimed = await inbox.claim_held(tx, "billing", stream, by_sequence=True, limit=1)
    assert claimed is not None
    back = claimed.waiting[0].delivery
    assert (back.key, back.body, back.headers) == (raw.key, raw.body, headers)
    assert (back.partition, back.position) == ("s\\0?", "p\\0/7")


async def test_old_rows_are_removed_in_small_steps_until_none_is_left(inbox: PostgresInbox, conn: Any) -> None:
    await conn.execute(
        "INSERT INTO outrider.consumer_inbox SELECT 'billing', gen_random_uuid(), 't', 'orders', 'k', i, "
        "now() - interval '20 days', 0 FROM generate_series(1, 2500) AS i"
    )
    pruned = await inbox.prune("billing", receipt_days=14, dead_letter_days=30)
    assert pruned == (2500, 0)


async def test_a_receipt_stays_as_long_as_its_dead_letter(inbox: PostgresInbox, conn: Any) -> None:
    poison = delivery(1)._replace(body=b"{")
    await Inbox(inbox).process(poison, _nothing, consumer="billing")
    await conn.execute("UPDATE outrider.consumer_inbox SET received_at = now() - interval '90 days'")
    assert (await inbox.prune("billing", receipt_days=14, dead_letter_days=30)).receipts == 0
    [dead_letter] = await inbox.admin.dead_letters(InboxCriteria())
    await inbox.admin.discard([dead_letter["id"]], "ann")
    assert (await inbox.prune("billing", receipt_days=14, dead_letter_days=30)).receipts == 1


async def test_held_events_whose_stream_is_not_blocked_are_found_by_maintenance(bench: PostgresInboxBench) -> None:
    billing = bench.consumer(ordering="strict", first_sequence="one")
    await billing.deliver_all([delivery(2), delivery(3)])
    await bench._pool.execute("UPDATE outrider.inbox_stream SET cause = NULL, waiting = 0, seen = 1")
    assert await bench.store.draining("billing", 10) == []
    await bench.store.prune("billing", receipt_days=1, dead_letter_days=1)
    await billing.drain()
    assert await bench.effects() == ["A-1:2", "A-1:3"]


async def test_maintenance_unblocks_a_stream_whose_dead_letter_is_gone(bench: PostgresInboxBench) -> None:
    billing = bench.consumer()
    bench.fail("A-1:1", Permanent("no"))
    await billing.deliver_all([delivery(1), delivery(2)])
    await bench._pool.execute("DELETE FROM outrider.inbox_dead_letter")
    await bench.store.prune("billing", receipt_days=1, dead_letter_days=1)
    await billing.drain()
    assert await bench.effects() == ["A-1:2"]
    assert await bench._pool.fetchval("SELECT count(*) FROM outrider.inbox_stream") == 0


@pytest.mark.parametrize("seen", [None, 7])
async def test_a_draining_stream_without_held_events_is_repaired(
    inbox: PostgresInbox, conn: Any, seen: int | None
) -> None:
    await conn.execute(
        "INSERT INTO outrider.inbox_stream VALUES ('billing', 'orders', 'A-1', 1, $1, 'draining', 2, now())", seen
    )
    async with inbox.transaction() as tx:
        claimed = await inbox.claim_held(tx, "billing", STREAM, by_sequence=False, limit=10)
    assert claimed == (StreamState(seen), [], frozenset())
    assert await inbox.draining("billing", 10) == []
    assert await inbox.admin.counts() == {"waiting": 0, "blocked_streams": 0, "dead_letters": 0}


async def test_since_changes_with_the_cause_and_not_otherwise(inbox: PostgresInbox, conn: Any) -> None:
    async def wait(number: int, standing: StreamState) -> Any:
        early = decode(delivery(number))
        async with inbox.transaction() as tx:
            await inbox.record_receipts(tx, "billing", [early], ordered=True)
            await inbox.record_outcomes(tx, "billing", [EventOutcome(early, Held())], {STREAM: standing})
        return await conn.fetchval("SELECT since FROM outrider.inbox_stream")

    first = await wait(3, StreamState(0, InboxBlockReason.EARLY, 1))
    assert await wait(4, StreamState(0, InboxBlockReason.EARLY, 2)) == first
    assert await wait(5, StreamState(0, InboxBlockReason.DRAINING, 3)) > first


async def test_what_people_did_is_written_down(bench: PostgresInboxBench) -> None:
    bench.fail("A-1:1", Permanent("no"))
    bench.fail("B-1:1", Permanent("no"))
    await bench.consumer().deliver_all([delivery(1), delivery(1, key="B-1")])
    first, second = [dead_letter["id"] for dead_letter in await bench.store.admin.dead_letters(InboxCriteria())]
    await bench.store.admin.replay([first], "ann")
    await bench.store.admin.discard([second], "bob")
    await bench.consumer("shipping", ordering="strict", first_sequence="one").deliver(delivery(2, key="C-1"))
    assert await bench.store.admin.skip_gap("shipping", InboxStream("orders", "C-1"), "cy")
    rows = await bench._pool.fetch("SELECT actor, verb, consumer FROM outrider.outbox_operation ORDER BY id")
    assert [tuple(row) for row in rows] == [
        ("ann", "inbox_replay", "billing"),
        ("bob", "inbox_discard", "billing"),
        ("cy", "inbox_skip_gap", "shipping"),
    ]


async def test_the_rights_that_the_documentation_names_are_enough(postgres_url: str, conn: Any) -> None:
    page = (Path(__file__).parents[3] / "docs/reference/tables.md").read_text()
    [grants] = [text for text in page.split("```") if "CREATE ROLE shop_consumer" in text]
    await conn.execute(grants.removeprefix("sql"))
    await conn.execute("GRANT INSERT ON outrider.outbox_operation TO shop_consumer")
    await conn.execute("GRANT SELECT, UPDATE ON outrider.outbox_operation_head TO shop_consumer")
    try:
        async with asyncpg.create_pool(
            postgres_url, min_size=1, max_size=2, server_settings={"role": "shop_consumer"}
        ) as pool:
            inbox = PostgresInbox.over(pool)
            service = Inbox(inbox)
            service.consumer("billing", ordering="strict", first_sequence="one")
            assert await service.process(delivery(2), _nothing, consumer="billing") is Result.WAITING
            assert await inbox.admin.skip_gap("billing", STREAM, "ann")
            poison = delivery(1, key="B-1")._replace(body=b"{")
            assert await service.process(poison, _nothing, consumer="billing") is Result.DEAD_LETTERED
            [dead_letter] = await inbox.admin.dead_letters(InboxCriteria())
            assert await inbox.admin.replay([dead_letter["id"]], "ann") == 1
            await inbox.prune("billing", receipt_days=1, dead_letter_days=1)
            # It has no participants, so no rights on their table, and needs none.
            assert await inbox.prune_participants(days=1) == 0
    finally:
        # Roles belong to the whole server.
        await conn.execute("DROP OWNED BY shop_consumer; DROP ROLE shop_consumer")


async def test_an_installation_without_an_inbox_names_the_command_to_run_and_upgrades(
    empty_database: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    schema = PostgresSchema(empty_database, schema="shop")
    with monkeypatch.context() as patch:
        every = migrations.steps
        patch.setattr(migrations, "steps", lambda *args: [step for step in every(*args) if step.version == 1])
        await schema.migrate()
    with pytest.raises(UsageError, match="run: outrider db migrate"):
        await PostgresInbox.open(empty_database, schema="shop")
    async with asyncpg.create_pool(empty_database, min_size=1, max_size=1) as pool:
        over = Inbox(PostgresInbox.over(pool, schema="shop"))
        with pytest.raises(UsageError, match="run: outrider db migrate"):
            await over.process(delivery(1), _nothing, consumer="billing")
    assert {step.version for step in await schema.migrate()} == {2, 3, 4, 5, 6, 7, 9}
    inbox = await PostgresInbox.open(empty_database, schema="shop")
    assert await Inbox(inbox).process(delivery(1), _nothing, consumer="billing") is Result.APPLIED
    await inbox.close()


async def _nothing(event: outrider.Event, tx: Any) -> None:
    assert isinstance(event, outrider.Event)


@pytest.mark.parametrize(
    ("ordered", "size", "statements"), [(False, 1, 2), (True, 1, 2), (False, 100, 3), (True, 100, 4)]
)
async def test_an_inbox_adds_few_statements_to_those_of_the_handlers(
    inbox: PostgresInbox, ordered: bool, size: int, statements: int
) -> None:
    events = [[decode(delivery(number, key=f"k{n}")) for n in range(size)] for number in (1, 2)]
    first = await _statements(inbox, events[0], ordered, 1)
    # With ordering, the first event of a stream inserts a row; a single event looks for the row first.
    assert first == statements + (2 if ordered and size == 1 else 0)
    assert await _statements(inbox, events[1], ordered, 2) == statements


async def _statements(inbox: PostgresInbox, events: Any, ordered: bool, seen: int) -> int:
    ran: list[Any] = []
    async with inbox.transaction() as tx:
        tx.connection.add_query_logger(ran.append)
        await inbox.record_receipts(tx, "billing", events, ordered=ordered)
        standings = {a.stream: StreamState(seen) for a in events} if ordered else {}
        await inbox.record_outcomes(tx, "billing", [EventOutcome(a, Applied(0.1)) for a in events], standings)
        tx.connection.remove_query_logger(ran.append)
    # The driver asks for types of its own accord, once per connection.
    return sum("outrider." in record.query for record in ran)
