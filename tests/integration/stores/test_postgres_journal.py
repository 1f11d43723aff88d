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


POLICY = """
CREATE ROLE journal_relay LOGIN;
GRANT USAGE ON SCHEMA outrider TO journal_relay;
ALTER TABLE outrider.outbox_archive OWNER TO journal_relay;
GRANT SELECT ON outrider.outbox_archive TO journal_owner;
CREATE FUNCTION public.journal_trap() RETURNS boolean LANGUAGE plpgsql AS $$
BEGIN RAISE EXCEPTION 'ran as %', current_user; END $$;
ALTER TABLE outrider.outbox_archive ENABLE ROW LEVEL SECURITY;
CREATE POLICY trap ON outrider.outbox_archive USING (public.journal_trap());
"""
OWNER = """
CREATE ROLE journal_owner;
GRANT USAGE ON SCHEMA outrider TO journal_owner;
GRANT SELECT ON ALL TABLES IN SCHEMA outrider TO journal_owner;
GRANT DELETE ON outrider.outbox_journal TO journal_owner;
ALTER FUNCTION outrider.outbox_journal_prune(float8, bigint, integer) OWNER TO journal_owner;
"""


async def test_no_policy_of_a_relay_runs_with_the_rights_of_the_owner_of_the_journal(
    store: PostgresStore, conn: Any
) -> None:
    work = conn.transaction()
    await work.start()
    await conn.execute("INSERT INTO outrider.outbox_journal (kind, event_id) VALUES ('staged', gen_random_uuid())")
    await conn.execute(OWNER + POLICY + "SET LOCAL ROLE journal_relay")
    with pytest.raises(asyncpg.PostgresError) as refused:
        await conn.fetch("SELECT * FROM outrider.outbox_journal_prune(-1, 0, 10)")
    assert "ran as" not in str(refused.value)
    await work.rollback()


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
