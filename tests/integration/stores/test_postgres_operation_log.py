"""The operation log on PostgreSQL: append only for every role, old lines leave by a function, and changes are found."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import asyncpg
import pytest

from outrider.audit_chain import KEY_VARIABLE
from outrider.errors import OutriderError
from outrider.operation_log import OperationCriteria, verify_operations
from outrider.outbox.model import Retention
from outrider.saga.audit import AuditCheck
from outrider.stores import migrations
from outrider.stores.postgres import PostgresSagas, PostgresSchema, PostgresStore
from outrider.testing import ManualClock
from outrider.testing.harness import order
from tests.support.audit_tampering import (
    DAY_SECONDS,
    OPERATION_REFUSED,
    OPERATION_TAMPERING,
    log_operations,
    problems,
)
from tests.support.postgres_benches import OWN_THE_CLOCK, PostgresHarness

pytestmark = pytest.mark.postgres

TABLES = ("outbox_operation", "outbox_operation_head", "saga_audit_anchor")

ROLE = "shop_relay"


@pytest.fixture
async def pool(postgres_url: str) -> AsyncIterator[asyncpg.Pool]:
    async with asyncpg.create_pool(postgres_url, min_size=1, max_size=4) as pool:
        await pool.execute(OWN_THE_CLOCK)
        yield pool


@pytest.fixture
async def harness(postgres_url: str, pool: asyncpg.Pool) -> AsyncIterator[PostgresHarness]:
    store = await PostgresStore.open(postgres_url)
    yield PostgresHarness(store, ManualClock(), pool)
    await store.close()


@pytest.fixture
async def sagas(postgres_url: str) -> AsyncIterator[PostgresSagas]:
    sagas = await PostgresSagas.open(postgres_url)
    yield sagas
    await sagas.close()


@pytest.mark.parametrize(("name", "tampering"), OPERATION_TAMPERING.items())
async def test_a_change_past_the_triggers_is_found(
    harness: PostgresHarness, sagas: PostgresSagas, conn: Any, name: str, tampering: str
) -> None:
    await log_operations(harness)
    assert await problems(harness.store, sagas) == []
    await conn.execute("; ".join(f"ALTER TABLE outrider.{table} DISABLE TRIGGER ALL" for table in TABLES))
    await conn.execute(tampering)
    assert name in await problems(harness.store, sagas)


@pytest.mark.parametrize("setting", ["outrider.pruning = 'on'", "session_replication_role = 'replica'"])
async def test_no_setting_of_a_session_lets_a_change_through(
    harness: PostgresHarness, sagas: PostgresSagas, conn: Any, setting: str
) -> None:
    await log_operations(harness)
    await conn.execute(f"SET {setting}")
    truncations = [f"TRUNCATE outrider.{table}" for table in TABLES]
    for change in (*OPERATION_REFUSED, *truncations):
        with pytest.raises(asyncpg.CheckViolationError):
            await conn.execute(change)
    assert await problems(harness.store, sagas) == []


async def test_the_role_of_relays_writes_and_prunes_and_can_neither_change_nor_forge(
    harness: PostgresHarness, sagas: PostgresSagas, conn: Any, postgres_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    page = (Path(__file__).parents[3] / "docs/reference/tables.md").read_text()
    [grants] = [text for text in page.split("```") if f"CREATE ROLE {ROLE}" in text]
    await conn.execute(grants.removeprefix("sql").replace(f"CREATE ROLE {ROLE}", f"CREATE ROLE {ROLE} LOGIN"))
    store = await PostgresStore.open(postgres_url.replace("postgres@", f"{ROLE}@"))
    monkeypatch.setenv(KEY_VARIABLE, "correct-horse-battery")
    try:
        work = PostgresHarness(store, harness.clock, harness._pool)
        await log_operations(work)
        assert await problems(store, sagas) == []
        await work.advance(seconds=91 * DAY_SECONDS)
        # The partitions of the archive belong to the owner of the database here.
        assert (await store.maintenance.prune(Retention(archive_days=36_500))).operations == 4
        [event_id] = await work.stage(order(2))
        assert await store.admin.dead_letter(event_id, "ann", {"error": "no"}, "skip")
        assert await problems(store, sagas) == []
        refused = [change for change in OPERATION_REFUSED if "INSERT" not in change and "head SET" not in change]
        for change in (*refused, "SET session_replication_role = 'replica'", "TRUNCATE outrider.outbox_operation"):
            with pytest.raises(OutriderError, match="permission denied"):
                await store.database.execute(change)
        with pytest.raises(OutriderError, match="append only"):
            await store.database.execute("UPDATE outrider.outbox_operation_head SET lines = lines - 1")
        with pytest.raises(OutriderError, match="has a number"):
            await store.database.execute(OLD_LINE)
        # The role may write lines and the head, but has no key.
        await store.database.execute(
            "INSERT INTO outrider.outbox_operation (line, at, actor, verb, hash) "
            "SELECT line + 1, at, 'nobody', verb, sha256(hash) FROM outrider.outbox_operation"
        )
        await store.database.execute(
            "UPDATE outrider.outbox_operation_head AS h SET lines = o.line, hash = o.hash "
            "FROM outrider.outbox_operation AS o WHERE o.actor = 'nobody'"
        )
        assert await problems(store, sagas) == ["the line, or the line before, was changed or forged"]
    finally:
        await store.close()
        # Roles belong to the whole server.
        await conn.execute(f"DROP OWNED BY {ROLE}; DROP ROLE {ROLE}")


OLD_LINE = """
INSERT INTO outrider.outbox_operation (at, actor, verb, event_id)
VALUES (now() - interval '92 days', 'ann', 'replay', gen_random_uuid())
"""

KILL = """
CREATE FUNCTION outrider.test_kill() RETURNS trigger LANGUAGE plpgsql AS
$$ BEGIN PERFORM pg_terminate_backend(pg_backend_pid()); RETURN NULL; END $$;
CREATE TRIGGER test_kill AFTER INSERT ON outrider.saga_audit_anchor FOR EACH ROW WHEN (new.chains = 0)
EXECUTE FUNCTION outrider.test_kill()
"""


async def test_a_relay_that_is_killed_while_it_prunes_leaves_a_chain_that_verifies(
    harness: PostgresHarness, sagas: PostgresSagas, conn: Any
) -> None:
    await log_operations(harness)
    await harness.advance(seconds=91 * DAY_SECONDS)
    await conn.execute(KILL)
    with pytest.raises(OutriderError):
        await harness.store.maintenance.prune(Retention())
    assert await problems(harness.store, sagas) == []
    assert (await verify_operations(harness.store.operations, AuditCheck())).lines == 4
    await conn.execute("DROP TRIGGER test_kill ON outrider.saga_audit_anchor")
    assert (await harness.store.maintenance.prune(Retention())).operations == 4
    assert await problems(harness.store, sagas) == []


async def test_two_commands_at_the_same_time_wait_for_each_other_and_none_is_lost(
    harness: PostgresHarness, sagas: PostgresSagas
) -> None:
    staged = await harness.stage(*(order(1, f"A{n}") for n in range(20)))
    admin = harness.store.admin
    await asyncio.gather(*(admin.dead_letter(event_id, "ann", {"error": "no"}, "block") for event_id in staged))
    await asyncio.gather(*(admin.replay([event_id], "ann") for event_id in staged))
    lines = await harness.store.operations.find(OperationCriteria(limit=100))
    assert sorted(line.line or 0 for line in lines) == list(range(1, 41))
    assert await problems(harness.store, sagas) == []


async def test_lines_from_before_the_chain_stay_are_counted_and_leave_an_anchor(
    empty_database: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    schema = PostgresSchema(empty_database)
    with monkeypatch.context() as patch:
        every = migrations.steps
        patch.setattr(migrations, "steps", lambda *args: [step for step in every(*args) if step.version < 9])
        await schema.migrate()
    async with asyncpg.create_pool(empty_database, min_size=1, max_size=4) as pool:
        for _ in range(3):
            await pool.execute(OLD_LINE)
        assert {step.version for step in await schema.migrate()} == {9, 10}
        with pytest.raises(asyncpg.CheckViolationError, match="has a number") as refused:
            await pool.execute(OLD_LINE)
        assert "pip install --upgrade outrider" in str(refused.value.hint)
        store, sagas = await PostgresStore.open(empty_database), await PostgresSagas.open(empty_database)
        await store.operations.record("ann", "key_add", key="k1")
        report = await verify_operations(store.operations, AuditCheck())
        assert (report.lines, report.unchained, report.findings) == (1, 3, [])
        assert (await store.maintenance.prune(Retention())).operations == 3
        report = await verify_operations(store.operations, AuditCheck())
        assert (report.lines, report.unchained, await problems(store, sagas)) == (1, 0, [])
        await store.close()
        await sagas.close()
