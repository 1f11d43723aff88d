"""The operation log on SQLite: append only by triggers, changes past them are found, and kills leave whole chains."""

from __future__ import annotations

import asyncio
import signal
import sqlite3
import subprocess
import sys
from collections.abc import AsyncIterator
from contextlib import closing
from datetime import UTC, datetime
from pathlib import Path

import pytest

from outrider.operation_log import verify_operations
from outrider.outbox.model import Retention
from outrider.saga.audit import AuditCheck
from outrider.saga.model import Status
from outrider.stores import migrations
from outrider.stores.sqlite import SqliteSagas, SqliteSchema, SqliteStore
from outrider.testing import ManualClock
from tests.contract.outbox.test_sqlite import SqliteHarness
from tests.support.audit_tampering import (
    DAY_SECONDS,
    NOTE,
    OPERATION_REFUSED,
    OPERATION_TAMPERING,
    end_audited_sagas,
    log_operations,
    problems,
)
from tests.support.sqlite_benches import SqliteSagaBench

REPLACED = [
    "REPLACE INTO outbox_operation (id, line, at, actor, verb, event_id) "
    "SELECT id, line, at, 'nobody', verb, event_id FROM outbox_operation",
    "REPLACE INTO outbox_operation_head SELECT id, 0, hash, unchained FROM outbox_operation_head",
]

DROP_TRIGGERS = "SELECT group_concat('DROP TRIGGER ' || name, ';') FROM sqlite_schema WHERE type = 'trigger'"


@pytest.fixture
async def harness(sqlite_path: Path) -> AsyncIterator[SqliteHarness]:
    clock = ManualClock(start=datetime.now(UTC))
    store = SqliteStore(sqlite_path, clock=clock)
    yield SqliteHarness(store, clock, sqlite_path)
    await store.close()


@pytest.fixture
async def sagas(sqlite_path: Path, harness: SqliteHarness) -> AsyncIterator[SqliteSagas]:
    sagas = SqliteSagas(sqlite_path, clock=harness.clock)
    yield sagas
    await sagas.close()


@pytest.mark.parametrize("change", [*OPERATION_REFUSED, *REPLACED])
async def test_the_operation_log_is_append_only(
    harness: SqliteHarness, sagas: SqliteSagas, sqlite_path: Path, change: str
) -> None:
    await log_operations(harness)
    with closing(sqlite3.connect(sqlite_path)) as conn, pytest.raises(sqlite3.IntegrityError, match="append only"):
        conn.execute(change.replace("outrider.", ""))
    assert await problems(harness.store, sagas) == []


@pytest.mark.parametrize(("name", "tampering"), OPERATION_TAMPERING.items())
async def test_a_change_past_the_triggers_is_found(
    harness: SqliteHarness, sagas: SqliteSagas, sqlite_path: Path, name: str, tampering: str
) -> None:
    await log_operations(harness)
    with closing(sqlite3.connect(sqlite_path, isolation_level=None)) as conn:
        conn.executescript(conn.execute(DROP_TRIGGERS).fetchone()[0])
        conn.executescript(tampering.replace("outrider.", "").replace("'another'", "x'00'"))
    assert name in await problems(harness.store, sagas)


async def test_lines_from_before_the_chain_stay_are_counted_and_leave_an_anchor(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "old.db"
    with monkeypatch.context() as patch:
        every = migrations.steps
        patch.setattr(migrations, "steps", lambda *args: [step for step in every(*args) if step.version < 9])
        await SqliteSchema(path).migrate()
    old = datetime.now(UTC).timestamp() - 92 * DAY_SECONDS
    with closing(sqlite3.connect(path)) as conn, conn:
        rows = [(old, "ann", "replay", f"00000000-0000-4000-8000-00000000000{number}") for number in range(3)]
        conn.executemany("INSERT INTO outbox_operation (at, actor, verb, event_id) VALUES (?, ?, ?, ?)", rows)
    assert {step.version for step in await SqliteSchema(path).migrate()} == {9, 10}
    store, sagas = SqliteStore(path), SqliteSagas(path)
    await store.operations.record("ann", "key_add", key="k1")
    report = await verify_operations(store.operations, AuditCheck())
    assert (report.lines, report.unchained, report.findings) == (1, 3, [])
    assert (await store.maintenance.prune(Retention())).operations == 3
    report = await verify_operations(store.operations, AuditCheck())
    assert (report.lines, report.unchained, await problems(store, sagas)) == (1, 0, [])
    await store.close()
    await sagas.close()


KILLED = """
import asyncio, os, signal, sys
from datetime import datetime
from pathlib import Path
from outrider.outbox.model import Retention
from outrider.stores.sqlite import SqliteSagas, SqliteStore, audit, operation_log
from outrider.testing import ManualClock

path, start, kind = Path(sys.argv[1]), datetime.fromisoformat(sys.argv[2]), sys.argv[3]
insert = audit.add_anchor

def insert_and_die(cursor, anchor):
    insert(cursor, anchor)
    if (anchor.kind if anchor.chains else "operations") == kind:
        os.kill(os.getpid(), signal.SIGKILL)

audit.add_anchor = operation_log.add_anchor = insert_and_die

async def prune():
    clock = ManualClock(start=start)
    await SqliteSagas(path, clock=clock).prune(saga_days=1, audit_days=2, participant_memory_days=1)
    await SqliteStore(path, clock=clock).maintenance.prune(Retention())

asyncio.run(prune())
"""


@pytest.mark.parametrize("kind", ["close", "prune", "operations"])
async def test_a_process_that_is_killed_while_it_prunes_leaves_chains_that_verify(
    harness: SqliteHarness, sagas: SqliteSagas, sqlite_path: Path, kind: str
) -> None:
    await log_operations(harness)
    bench = SqliteSagaBench(sagas, sagas, harness.clock, sqlite_path)
    await end_audited_sagas(bench)
    await bench.advance(seconds=900_000)
    await bench.save(await bench.claim_one(), notes=[NOTE], status=Status.COMPLETED, release=True)
    await bench.advance(seconds=91 * DAY_SECONDS)
    arguments = [str(sqlite_path), harness.clock.now().isoformat(), kind]
    killed = await asyncio.to_thread(subprocess.run, [sys.executable, "-c", KILLED, *arguments], check=False)
    assert killed.returncode == -signal.SIGKILL
    assert await problems(harness.store, sagas) == []
    left = (await verify_operations(harness.store.operations, AuditCheck())).lines
    pruned = await sagas.prune(saga_days=1, audit_days=2, participant_memory_days=1)
    operations = (await harness.store.maintenance.prune(Retention())).operations
    assert (left, operations) == (4, 4)
    assert pruned.notes == (0 if kind == "operations" else 9)
    assert await problems(harness.store, sagas) == []
