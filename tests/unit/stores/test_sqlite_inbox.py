"""The inbox on SQLite beyond the contract: threads, the handler's connection, odd bytes, maintenance, upgrades."""

from __future__ import annotations

import asyncio
import sqlite3
import threading
from collections.abc import AsyncIterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

import outrider
from outrider.errors import InvalidHandler, Permanent, Transient, UsageError
from outrider.event import Delivery, InboxStream
from outrider.inbox.inbox import Inbox, Result
from outrider.inbox.model import InboxCriteria, StreamState
from outrider.inbox.router import Route
from outrider.stores import migrations
from outrider.stores.sqlite import SqliteInbox, SqliteSchema, database
from outrider.telemetry.events import ConsumerUnavailable, HandlerRetried
from outrider.testing import ManualClock
from outrider.testing.contracts import delivery
from tests.support.sqlite_benches import SqliteInboxBench


@pytest.fixture
def path(sqlite_path: Path) -> Path:
    with closing(sqlite3.connect(sqlite_path)) as conn:
        conn.execute("CREATE TABLE effects (id INTEGER PRIMARY KEY, what TEXT NOT NULL)")
    return sqlite_path


@pytest.fixture
async def bench(path: Path) -> AsyncIterator[SqliteInboxBench]:
    clock = ManualClock()
    store = SqliteInbox(path, clock=clock)
    yield SqliteInboxBench(store, clock, path)
    await store.close()


def _write(path: Path, sql: str, *values: Any) -> None:
    with closing(sqlite3.connect(path)) as conn, conn:
        conn.execute(sql, values)


async def test_a_plain_function_works_in_the_transaction_beside_the_event_loop(bench: SqliteInboxBench) -> None:
    threads = []

    def bill(event: outrider.Event, conn: sqlite3.Connection) -> None:
        threads.append(threading.current_thread())
        conn.execute("INSERT INTO effects (what) VALUES (?)", (event.key,))
        outrider.stage_sync(conn, outrider.Event("invoice.made", {}))
        if len(threads) == 1:
            raise RuntimeError("after everything")

    service, once = Inbox(bench.store), delivery(1)
    with pytest.raises(RuntimeError, match="after everything"):
        await service.process(once, bill, consumer="billing")
    assert (await bench.effects(), await bench.staged()) == ([], [])
    assert await service.process(once, bill, consumer="billing") is Result.APPLIED
    message_id = once.headers["message_id"].decode()
    continued = {"correlation_id": message_id, "causation_id": message_id}
    assert (await bench.effects(), await bench.staged()) == (["A-1"], [continued])
    assert threading.current_thread() not in threads


async def test_a_plain_function_that_lets_a_stop_iteration_out_has_failed(bench: SqliteInboxBench) -> None:
    def careless(event: outrider.Event, conn: sqlite3.Connection) -> None:
        next(iter(()))

    async with asyncio.timeout(10):
        with pytest.raises(RuntimeError, match="StopIteration"):
            await Inbox(bench.store).process(delivery(1), careless, consumer="billing")


async def test_a_function_that_returns_a_coroutine_is_awaited(bench: SqliteInboxBench) -> None:
    def begin(event: outrider.Event, conn: sqlite3.Connection) -> Any:
        return bench.handler(event, conn)

    assert await Inbox(bench.store).process(delivery(1), begin, consumer="billing") is Result.APPLIED
    assert await bench.effects() == ["A-1:1"]


async def test_while_a_coroutine_has_the_transaction_everybody_else_waits(bench: SqliteInboxBench) -> None:
    begun, go_on = asyncio.Event(), asyncio.Event()

    async def slow(event: outrider.Event, conn: sqlite3.Connection) -> None:
        begun.set()
        await go_on.wait()
        await bench.handler(event, conn)

    service = Inbox(bench.store)
    first = asyncio.create_task(service.process(delivery(1), slow, consumer="billing"))
    await begun.wait()
    second = asyncio.create_task(service.process(delivery(2), bench.handler, consumer="billing"))
    counting = asyncio.create_task(bench.store.admin.counts())
    # Both have begun before the first one goes on; neither may touch the connection.
    asyncio.get_running_loop().call_soon(go_on.set)
    assert [await first, await second] == [Result.APPLIED, Result.APPLIED]
    assert await bench.effects() == ["A-1:1", "A-1:2"]
    assert (await counting)["waiting"] == 0


async def test_settings_that_a_handler_changes_on_the_connection_are_reset(bench: SqliteInboxBench) -> None:
    async def dress_up(event: outrider.Event, conn: sqlite3.Connection) -> None:
        conn.row_factory, conn.text_factory = sqlite3.Row, bytes
        await bench.handler(event, conn)

    async def look(event: outrider.Event, conn: sqlite3.Connection) -> None:
        assert conn.execute("SELECT 'text'").fetchone() == ("text",)

    billing = bench.consumer(ordering="strict", first_sequence="one", batch_max=10)
    billing.routes.handlers["orders", "order.placed"] = Route(dress_up)
    await billing.deliver_all([delivery(2), delivery(3), delivery(1)])
    assert await bench.effects() == ["A-1:1", "A-1:2", "A-1:3"]
    assert await Inbox(bench.store).process(delivery(1), look, consumer="shipping") is Result.APPLIED


async def test_a_handler_that_ends_the_transaction_is_reported(bench: SqliteInboxBench) -> None:
    def commit(event: outrider.Event, conn: sqlite3.Connection) -> None:
        with conn:
            conn.execute("INSERT INTO effects (what) VALUES ('early')")

    with pytest.raises(UsageError, match="leave commit and rollback to outrider"):
        await Inbox(bench.store).process(delivery(1), commit, consumer="billing")


async def test_a_handler_that_would_wait_for_itself_is_reported(bench: SqliteInboxBench) -> None:
    service = Inbox(bench.store)

    async def again(event: outrider.Event, conn: sqlite3.Connection) -> None:
        await service.process(delivery(2), bench.handler, consumer="billing")

    with pytest.raises(UsageError, match="use the one that it was given"):
        await service.process(delivery(1), again, consumer="billing")


async def test_a_handler_that_is_cancelled_leaves_no_trace(bench: SqliteInboxBench) -> None:
    loop, begun, go_on, once = asyncio.get_running_loop(), asyncio.Event(), threading.Event(), delivery(1)

    async def wait(event: outrider.Event, conn: sqlite3.Connection) -> None:
        await bench.effect(conn, "never")
        begun.set()
        await asyncio.Event().wait()

    def block(event: outrider.Event, conn: sqlite3.Connection) -> None:
        conn.execute("INSERT INTO effects (what) VALUES ('never')")
        loop.call_soon_threadsafe(begun.set)
        go_on.wait(20)

    service = Inbox(bench.store)
    for handler in (wait, block):
        begun.clear()
        executor = asyncio.create_task(service.process(once, handler, consumer="billing"))
        await begun.wait()
        executor.cancel()
        # A thread cannot be interrupted: its work is rolled back once it has ended.
        loop.call_soon(go_on.set)
        with pytest.raises(asyncio.CancelledError):
            await executor
    assert await service.process(once, bench.handler, consumer="billing") is Result.APPLIED
    assert await bench.effects() == ["A-1:1"]


async def test_a_busy_database_is_a_transient_error(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(database.open_existing, "__kwdefaults__", {"busy_seconds": 0.01})
    inbox = SqliteInbox(path)
    with closing(sqlite3.connect(path, isolation_level=None)) as other:
        other.execute("BEGIN IMMEDIATE")
        with pytest.raises(Transient, match="another process is writing"):
            await Inbox(inbox).process(delivery(1), print, consumer="billing")
        assert await inbox.ping()
        other.execute("ROLLBACK")
    assert await Inbox(inbox).process(delivery(1), lambda *_: None, consumer="billing") is Result.APPLIED
    await inbox.close()


async def test_a_write_that_the_commit_rejects_counts_an_attempt(bench: SqliteInboxBench, path: Path) -> None:
    _write(path, "CREATE TABLE parent (id INTEGER PRIMARY KEY)")
    _write(path, "CREATE TABLE child (id INTEGER REFERENCES parent DEFERRABLE INITIALLY DEFERRED)")
    bench.store._own._connection.execute("PRAGMA foreign_keys = ON")  # type: ignore[attr-defined]
    billing = bench.consumer()
    billing.routes.handlers["orders", "order.placed"] = Route(
        lambda event, conn: conn.execute("INSERT INTO child VALUES (1)") and None
    )
    await billing.deliver_all([delivery(1)], times=4)
    [dead_letter] = await bench.store.admin.dead_letters(InboxCriteria())
    assert (dead_letter["attempts"], dead_letter["failure"]["kind"]) == (3, "IntegrityError")


async def test_any_bytes_and_any_names_are_kept_as_they_came(bench: SqliteInboxBench) -> None:
    headers = {"\0": b"\0\xff", "\ud800": b"", "é\n": b"\x80" * 3, "key": "naïve".encode()}
    raw = Delivery("or\0ders\ud800" * 80, b"\xff\0", b"\0\xfe", headers, partition="s\0\udfff", position="p\0/7")
    service = Inbox(bench.store)
    assert await service.process(raw, print, consumer="billing") is Result.DEAD_LETTERED
    assert await service.process(raw, print, consumer="billing") is Result.DUPLICATE
    [dead_letter] = await bench.store.admin.dead_letters(InboxCriteria())
    assert (dead_letter["headers"], dead_letter["body"], dead_letter["position"]) == (headers, raw.body, "p\\0/7")
    assert await bench.store.admin.replay([dead_letter["id"]], "ann") == 1
    [stream] = await bench.store.draining("billing", 10)
    async with bench.store.transaction() as tx:
        claimed = await bench.store.claim_held(tx, "billing", stream, by_sequence=True, limit=1)
    assert claimed is not None
    back = claimed.waiting[0].delivery
    assert (back.key, back.body, back.headers) == (raw.key, raw.body, headers)


async def test_old_rows_are_removed_in_small_steps_and_a_receipt_stays_with_its_dead_letter(
    bench: SqliteInboxBench, path: Path
) -> None:
    await Inbox(bench.store).process(delivery(1)._replace(body=b"{"), print, consumer="billing")
    _write(
        path,
        "WITH RECURSIVE n (i) AS (SELECT 1 UNION ALL SELECT i + 1 FROM n WHERE i < 2500) "
        "INSERT INTO consumer_inbox SELECT 'billing', 'id' || i, 't', 'orders', 'k', i, 0, 0 FROM n",
    )
    await bench.advance(seconds=90 * 86_400)
    assert await bench.store.prune("billing", receipt_days=14, dead_letter_days=30) == (2500, 0)
    [dead_letter] = await bench.store.admin.dead_letters(InboxCriteria())
    await bench.store.admin.discard([dead_letter["id"]], "ann")
    assert await bench.store.prune("billing", receipt_days=14, dead_letter_days=30) == (1, 0)


async def test_held_events_whose_stream_is_not_blocked_are_found_by_maintenance(
    bench: SqliteInboxBench, path: Path
) -> None:
    billing = bench.consumer(ordering="strict", first_sequence="one")
    await billing.deliver_all([delivery(2), delivery(3)])
    _write(path, "UPDATE inbox_stream SET cause = NULL, waiting = 0, seen = 1")
    assert await bench.store.draining("billing", 10) == []
    await bench.store.prune("billing", receipt_days=1, dead_letter_days=1)
    await billing.drain()
    assert await bench.effects() == ["A-1:2", "A-1:3"]


async def test_maintenance_unblocks_a_stream_whose_dead_letter_is_gone(bench: SqliteInboxBench, path: Path) -> None:
    billing = bench.consumer()
    bench.fail("A-1:1", Permanent("no"))
    await billing.deliver_all([delivery(1), delivery(2)])
    _write(path, "DELETE FROM inbox_dead_letter")
    await bench.store.prune("billing", receipt_days=1, dead_letter_days=1)
    await billing.drain()
    assert await bench.effects() == ["A-1:2"]


async def test_a_draining_stream_without_held_events_is_repaired(bench: SqliteInboxBench, path: Path) -> None:
    _write(path, "INSERT INTO inbox_stream VALUES ('billing', 'orders', 'A-1', 1, 7, 'draining', 2, 0)")
    async with bench.store.transaction() as tx:
        claimed = await bench.store.claim_held(tx, "billing", InboxStream("orders", "A-1"), by_sequence=False, limit=10)
    assert claimed == (StreamState(7), [], frozenset())
    assert await bench.store.draining("billing", 10) == []


async def test_what_people_did_is_written_down(bench: SqliteInboxBench, path: Path) -> None:
    bench.fail("A-1:1", Permanent("no"))
    await bench.consumer().deliver_all([delivery(1)])
    [dead_letter] = await bench.store.admin.dead_letters(InboxCriteria())
    await bench.store.admin.discard([dead_letter["id"]], "bob")
    await bench.consumer("shipping", ordering="strict", first_sequence="one").deliver(delivery(2, key="C-1"))
    assert await bench.store.admin.skip_gap("shipping", InboxStream("orders", "C-1"), "cy")
    with closing(sqlite3.connect(path)) as conn:
        rows = conn.execute("SELECT actor, verb, consumer FROM outbox_operation ORDER BY id").fetchall()
    assert rows == [("bob", "inbox_discard", "billing"), ("cy", "inbox_skip_gap", "shipping")]


async def test_an_installation_without_an_inbox_names_the_command_to_run_and_upgrades(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "old.db"
    with monkeypatch.context() as patch:
        every = migrations.steps
        patch.setattr(migrations, "steps", lambda *args: [step for step in every(*args) if step.version == 1])
        await SqliteSchema(path).migrate()
    with pytest.raises(UsageError, match="outrider db migrate"):
        SqliteInbox(path)
    assert {step.version for step in await SqliteSchema(path).migrate()} == {2, 3, 4, 5, 6, 7, 9}
    inbox = SqliteInbox(path)
    assert await inbox.admin.counts() == {"waiting": 0, "blocked_streams": 0, "dead_letters": 0}
    await inbox.close()
    with pytest.raises(UsageError, match="outrider db migrate"):
        SqliteInbox(tmp_path / "absent.db")


async def test_closing_ends_the_inboxs_thread(path: Path) -> None:
    inbox = SqliteInbox(path)
    await inbox.admin.counts()
    await inbox.close()
    await inbox.close()
    assert not any(thread.name.startswith("outrider-inbox") for thread in threading.enumerate())


async def test_a_handler_that_begins_another_transaction_is_reported_and_leaves_no_effect(
    bench: SqliteInboxBench,
) -> None:
    async def again(event: outrider.Event, conn: sqlite3.Connection) -> None:
        conn.execute("ROLLBACK")
        conn.execute("BEGIN")
        await bench.effect(conn, "twice")

    with pytest.raises(InvalidHandler, match=r"again ended the transaction.*leave commit and rollback"):
        await Inbox(bench.store).process(delivery(1), again, consumer="billing")
    assert await bench.effects() == []


async def test_a_transaction_that_the_database_rolled_back_itself_counts_no_attempt(bench: SqliteInboxBench) -> None:
    async def fill(event: outrider.Event, conn: sqlite3.Connection) -> None:
        [pages] = conn.execute("PRAGMA page_count").fetchone()
        conn.execute(f"PRAGMA max_page_count = {pages}")
        try:
            conn.execute("INSERT INTO effects (what) VALUES (?)", ("x" * 10_000_000,))
        finally:
            conn.execute("PRAGMA max_page_count = 1000000")

    billing = bench.consumer()
    billing.routes.handlers["orders", "order.placed"] = Route(fill)
    assert await billing.deliver(delivery(1)) == 0
    assert bench.observer.of(HandlerRetried) == []
    assert "the database file cannot be used" in bench.observer.of(ConsumerUnavailable)[0].error
