"""The saga contract on SQLite, and what is SQLite's own: wake-ups, threads, the audit log's triggers, upgrades."""

from __future__ import annotations

import asyncio
import sqlite3
import threading
from collections.abc import AsyncIterator
from contextlib import closing
from datetime import UTC, datetime
from pathlib import Path

import pytest

from outrider import app
from outrider.drivers import sqlite as driver
from outrider.errors import InvalidHandler, UsageError
from outrider.saga.audit import AuditCheck, verify
from outrider.saga.model import Phase, Status
from outrider.stores import migrations
from outrider.stores.sqlite import SqliteSagas, SqliteSchema
from outrider.testing import ManualClock
from outrider.testing.contracts import SagaBench, SagaContract
from outrider.testing.saga_harness import new_saga
from tests.support.audit_tampering import TAMPERING, end_audited_sagas
from tests.support.migrations import VERSIONS
from tests.support.sqlite_benches import SqliteSagaBench


@pytest.fixture
def path(sqlite_path: Path) -> Path:
    return sqlite_path


@pytest.fixture
async def bench(path: Path) -> AsyncIterator[SagaBench]:
    clock = ManualClock(start=datetime.now(UTC))
    store, other = SqliteSagas(path, clock=clock), SqliteSagas(path, clock=clock)
    yield SqliteSagaBench(store, other, clock, path)
    await store.close()
    await other.close()


class TestSqliteSagas(SagaContract):
    pass


async def test_a_commit_of_anybody_wakes_workers(bench: SagaBench, path: Path) -> None:
    woken = asyncio.Event()
    async with bench.store.listen(woken.set), asyncio.timeout(10):
        with closing(sqlite3.connect(path, isolation_level=None)) as conn:
            conn.execute("BEGIN IMMEDIATE")
            assert driver.start_saga(conn, new_saga())
            conn.execute("COMMIT")
        await woken.wait()


@pytest.mark.parametrize(
    "change",
    [
        "UPDATE saga_audit_log SET actor = 'nobody'",
        "DELETE FROM saga_audit_log",
        "REPLACE INTO saga_audit_log (id, saga_id, line, at, new_status, what, actor, detail) "
        "SELECT id, saga_id, line, at, new_status, what, 'nobody', detail FROM saga_audit_log",
        "UPDATE saga_audit_anchor SET lines = 0",
        "DELETE FROM saga_audit_anchor",
        "REPLACE INTO saga_audit_anchor SELECT number, at, kind, covers, chains, 0, until, digest, hash "
        "FROM saga_audit_anchor",
        "UPDATE saga_audit_head SET lines = 0",
        "DELETE FROM saga_audit_head",
        "REPLACE INTO saga_audit_head SELECT saga_id, anchor, 0, hash, place, subject_hash FROM saga_audit_head",
    ],
)
async def test_the_audit_log_is_append_only(bench: SagaBench, path: Path, change: str) -> None:
    ended = await bench.start_and_claim("A-8")
    [saga_id] = await bench.start(new_saga())
    await bench.release(ended, status=Status.COMPLETED)
    await bench.advance(seconds=200_000)
    # Pruning may delete, and leaves nothing behind that would let others.
    await bench.store.prune(saga_days=1, audit_days=10, participant_memory_days=1)
    with closing(sqlite3.connect(path)) as conn, pytest.raises(sqlite3.IntegrityError, match="append only"):
        conn.execute(change)
    assert [line["actor"] for line in await bench.store.admin.audit(saga_id)] == ["application"]
    assert (await verify(bench.store.audit, AuditCheck())).findings == []


@pytest.mark.parametrize(("name", "tampering"), TAMPERING.items())
async def test_a_change_past_the_triggers_is_found(bench: SagaBench, path: Path, name: str, tampering: str) -> None:
    await end_audited_sagas(bench)
    triggers = "SELECT group_concat('DROP TRIGGER ' || name, ';') FROM sqlite_schema WHERE type = 'trigger'"
    with closing(sqlite3.connect(path, isolation_level=None)) as conn:
        conn.executescript(conn.execute(triggers).fetchone()[0])
        conn.executescript(tampering.replace("outrider.", ""))
    assert name in [finding.problem for finding in (await verify(bench.store.audit, AuditCheck())).findings]


def test_a_callers_factories_are_neither_relied_on_nor_changed(path: Path) -> None:
    with closing(sqlite3.connect(path, isolation_level=None)) as conn:
        conn.row_factory, conn.text_factory = sqlite3.Row, bytes
        conn.execute("BEGIN IMMEDIATE")
        assert driver.start_saga(conn, new_saga())
        assert driver.participant_enter(conn, "stock", "k", Phase.ACTION).fresh
        driver.participant_save_reply(conn, "stock", "k", Phase.ACTION, b'"yes"')
        assert driver.participant_enter(conn, "stock", "k", Phase.ACTION).reply == b'"yes"'
        assert (conn.row_factory, conn.text_factory) == (sqlite3.Row, bytes)


async def test_a_step_that_is_a_plain_function_runs_beside_the_event_loop(bench: SagaBench) -> None:
    async with bench.store.transaction() as tx:
        thread = await tx.call(lambda argument, conn: threading.current_thread(), None)
        assert thread.name.startswith("outrider-saga-store")
        with pytest.raises(UsageError, match="cannot open another transaction"):
            async with bench.store.transaction():
                pass
    with pytest.raises(UsageError, match="leave commit and rollback to outrider"):
        async with bench.store.transaction() as tx:
            await tx.call(lambda argument, conn: conn.commit(), None)


@pytest.mark.parametrize("end", ["COMMIT", "ROLLBACK"])
@pytest.mark.parametrize("fails", [False, True])
async def test_a_step_that_begins_another_transaction_is_invalid(bench: SagaBench, end: str, fails: bool) -> None:
    def another(_: object, conn: sqlite3.Connection) -> None:
        conn.execute(end)
        conn.execute("BEGIN")
        assert not fails

    with pytest.raises(InvalidHandler, match="leave commit and rollback to outrider"):
        async with bench.store.transactions.open() as tx:
            await tx.call(another, None)


async def test_a_statement_of_a_plain_function_ends_when_it_is_cut_off(bench: SagaBench) -> None:
    endless = "WITH RECURSIVE n (x) AS (SELECT 1 UNION ALL SELECT x + 1 FROM n) SELECT count(*) FROM n"

    with pytest.raises(TimeoutError):
        async with bench.store.transactions.open() as tx, asyncio.timeout(0.05):
            await tx.call(lambda _, conn: conn.execute(endless).fetchone(), None)
    async with asyncio.timeout(10):
        assert (await bench.store.admin.counts())["started"] == 0


async def test_an_installation_without_sagas_names_the_command_to_run_and_upgrades(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "old.db"
    with monkeypatch.context() as patch:
        every = migrations.steps
        patch.setattr(migrations, "steps", lambda *args: [step for step in every(*args) if step.version < 3])
        await SqliteSchema(path).migrate()
    with pytest.raises(UsageError, match="outrider db migrate"):
        await app.open_sagas(f"sqlite:///{path}")
    assert {step.version for step in await SqliteSchema(path).migrate()} == set(VERSIONS[2:])
    sagas = await app.open_sagas(f"sqlite:///{path}")
    assert (await sagas.admin.counts())["started"] == 0
    await sagas.close()
