"""The journal of PostgreSQL: its switch under open transactions, its rights, and a store that has none."""

from __future__ import annotations

import asyncio
from typing import Any
from uuid import uuid4

import asyncpg
import pytest

import outrider
from outrider.errors import Transient, UsageError
from outrider.outbox.journal import compare
from outrider.outbox.model import JournalKind
from outrider.stores.postgres import PostgresStore, journal
from outrider.testing.harness import order

pytestmark = pytest.mark.postgres

WAITING = "SELECT count(*) FROM pg_locks WHERE NOT granted AND relation = 'outrider.outbox'::regclass"
TRIGGERS = "SELECT count(*) FROM pg_trigger WHERE tgname = 'outbox_journal_staged'"
WRITER = """
CREATE ROLE journal_writer LOGIN;
GRANT USAGE ON SCHEMA outrider TO journal_writer;
GRANT INSERT ON outrider.outbox TO journal_writer;
"""
NO_WRITER = "DROP OWNED BY journal_writer; DROP ROLE journal_writer"


async def _kinds(store: PostgresStore) -> list[list[JournalKind]]:
    page = await store.journal.histories(None, 100)
    return [[entry.kind for entry in history.entries] for history in page.histories]


async def test_the_switch_waits_for_open_writers_and_counts_their_events_as_earlier(
    store: PostgresStore, conn: Any, postgres_url: str
) -> None:
    watcher = await asyncpg.connect(postgres_url)
    async with conn.transaction():
        await outrider.stage(conn, order(1))
        switching = asyncio.create_task(store.journal.turn(on=True))
        while not await watcher.fetchval(WAITING):
            assert not switching.done()
    assert await switching
    async with conn.transaction():
        await outrider.stage(conn, order(2))
    assert await _kinds(store) == [[JournalKind.STAGED]]
    report = await compare(store.journal, lambda report: None)
    assert (report.events, report.findings) == (1, [])
    await watcher.close()


async def test_the_switch_gives_up_on_a_writer_that_never_ends(
    store: PostgresStore, conn: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(journal, "TURN_SECONDS_MAX", 0.0)
    async with conn.transaction():
        await outrider.stage(conn, order(1))
        with pytest.raises(Transient, match="end long transactions"):
            await store.journal.turn(on=True)
    assert not (await store.journal.switch()).is_on
    assert await conn.fetchval(TRIGGERS) == 0


async def test_a_journal_that_is_off_leaves_no_trigger(store: PostgresStore, conn: Any) -> None:
    assert await conn.fetchval(TRIGGERS) == 0
    await store.journal.turn(on=True)
    assert await conn.fetchval(TRIGGERS) == 1
    await store.journal.turn(on=False)
    assert await conn.fetchval(TRIGGERS) == 0


async def test_a_role_that_may_only_insert_events_needs_no_right_to_the_journal(
    store: PostgresStore, conn: Any
) -> None:
    await store.journal.turn(on=True)
    await conn.execute(WRITER)
    try:
        await conn.execute("SET ROLE journal_writer")
        await conn.execute("INSERT INTO outrider.outbox (event_type, payload) VALUES ('order.placed', '{}')")
        with pytest.raises(asyncpg.InsufficientPrivilegeError):
            await conn.execute("DELETE FROM outrider.outbox_journal")
    finally:
        await conn.execute("RESET ROLE")
        await conn.execute(NO_WRITER)
    assert await _kinds(store) == [[JournalKind.STAGED]]


async def test_an_old_snapshot_that_takes_a_known_id_back_is_no_finding(
    store: PostgresStore, conn: Any, postgres_url: str
) -> None:
    known, writer = uuid4(), await asyncpg.connect(postgres_url)
    async with conn.transaction():
        await outrider.stage(conn, order(1, event_id=known))
    await store.admin.dead_letter(known, "ann", {"kind": "by hand"}, "skip")
    async with writer.transaction(isolation="repeatable_read"):
        # The snapshot of this transaction is older than the switch.
        assert not await writer.fetchval("SELECT value = '1' FROM outrider.outbox_meta WHERE name = 'journal'")
        await store.journal.turn(on=True)
        assert await outrider.stage(writer, order(1, event_id=known)) == [known]
    assert await _kinds(store) == [[JournalKind.STAGED, JournalKind.RETRACTED]]
    report = await compare(store.journal, lambda report: None)
    assert (report.events, report.findings) == (1, [])
    await writer.close()


async def test_a_relay_from_before_the_migration_must_be_restarted_before_the_switch(
    store: PostgresStore, conn: Any
) -> None:
    await store.heartbeat("old", 60, first=True)
    await conn.execute("UPDATE outrider.outbox_relay SET joined_at = '2020-01-01'")
    with pytest.raises(UsageError, match="restart them"):
        await store.journal.turn(on=True)
    await store.leave("old")
    assert await store.journal.turn(on=True)


async def test_a_check_stops_when_the_journal_is_switched_meanwhile(store: PostgresStore, conn: Any) -> None:
    await store.journal.turn(on=True)
    async with conn.transaction():
        await outrider.stage(conn, order(1))
    before = await store.journal.switch()

    class Journal:
        async def switch(self) -> Any:
            return before._replace(since=None)

        histories, unjournaled = store.journal.histories, store.journal.unjournaled

    with pytest.raises(Transient, match="run it again"):
        await compare(Journal(), lambda report: None)  # type: ignore[arg-type]
