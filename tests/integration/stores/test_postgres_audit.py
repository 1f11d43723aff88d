"""The audit log on PostgreSQL: the role of the workers cannot change it, and changes past the triggers are found."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import asyncpg
import pytest

from outrider.errors import OutriderError
from outrider.saga.audit import AuditCheck, verify
from outrider.saga.model import Status
from outrider.stores.postgres import PostgresSagas
from outrider.testing import ManualClock
from outrider.testing.saga_harness import new_saga
from tests.support.audit_tampering import NOTE, TAMPERING, end_audited_sagas
from tests.support.postgres_benches import OWN_THE_CLOCK, PostgresSagaBench

pytestmark = pytest.mark.postgres

REFUSED = [
    f"{change} outrider.{table}{rest}"
    for table in ("saga_audit_log", "saga_audit_anchor", "saga_audit_head")
    for change, rest in (("UPDATE", " SET lines = 0"), ("DELETE FROM", ""), ("TRUNCATE", ""))
]
REFUSED[0] = "UPDATE outrider.saga_audit_log SET actor = 'nobody'"


@pytest.fixture
async def bench(postgres_url: str) -> AsyncIterator[PostgresSagaBench]:
    async with asyncpg.create_pool(postgres_url, min_size=1, max_size=4) as pool:
        await pool.execute(OWN_THE_CLOCK)
        store = await PostgresSagas.open(postgres_url)
        yield PostgresSagaBench(store, store, ManualClock(), pool, postgres_url)
        await store.close()


@pytest.mark.parametrize(("name", "tampering"), TAMPERING.items())
async def test_a_change_past_the_triggers_is_found(
    bench: PostgresSagaBench, conn: Any, name: str, tampering: str
) -> None:
    await end_audited_sagas(bench)
    tables = ("saga_audit_log", "saga_audit_anchor", "saga_audit_head")
    await conn.execute("; ".join(f"ALTER TABLE outrider.{table} DISABLE TRIGGER ALL" for table in tables))
    await conn.execute(tampering)
    assert name in [finding.problem for finding in (await verify(bench.store.audit, AuditCheck())).findings]


@pytest.mark.parametrize("setting", ["outrider.pruning = 'on'", "session_replication_role = 'replica'"])
async def test_no_setting_of_a_session_lets_a_change_through(bench: PostgresSagaBench, conn: Any, setting: str) -> None:
    await end_audited_sagas(bench)
    await conn.execute(f"SET {setting}")
    for change in REFUSED:
        with pytest.raises(asyncpg.CheckViolationError, match="append only"):
            await conn.execute(change)
    assert (await verify(bench.store.audit, AuditCheck())).findings == []


async def test_the_role_of_workers_prunes_and_can_neither_change_nor_forge(
    bench: PostgresSagaBench, conn: Any, postgres_url: str
) -> None:
    page = (Path(__file__).parents[3] / "docs/reference/tables.md").read_text()
    [grants] = [text for text in page.split("```") if "CREATE ROLE shop_sagas" in text]
    await conn.execute(grants.removeprefix("sql") + "; GRANT SELECT ON outrider.test_clock TO shop_sagas")
    try:
        async with asyncpg.create_pool(
            postgres_url, min_size=1, max_size=2, server_settings={"role": "shop_sagas"}
        ) as pool:
            sagas = PostgresSagas.over(pool)
            work = PostgresSagaBench(sagas, sagas, bench.clock, bench._pool, postgres_url)
            await end_audited_sagas(work)
            for change in (*REFUSED, "SET session_replication_role = 'replica'"):
                with pytest.raises(asyncpg.InsufficientPrivilegeError):
                    await pool.execute(change)
            await bench.advance(seconds=900_000)
            assert await sagas.prune(saga_days=1, audit_days=10, participant_memory_days=1) == (0, 4, 0)
            assert (await verify(sagas.audit, AuditCheck())).findings == []
            await pool.execute(TAMPERING["the line was forged: its saga has not written it"])
            found = (await verify(sagas.audit, AuditCheck())).findings
            assert {(finding.saga_id, finding.line) for finding in found} == {(new_saga("runs").saga_id, 5)}
    finally:
        # Roles belong to the whole server.
        await conn.execute("DROP OWNED BY shop_sagas; DROP ROLE shop_sagas")


KILL = """
CREATE FUNCTION outrider.test_kill() RETURNS trigger LANGUAGE plpgsql AS
$$ BEGIN PERFORM pg_terminate_backend(pg_backend_pid()); RETURN NULL; END $$;
CREATE TRIGGER test_kill AFTER INSERT ON outrider.saga_audit_anchor FOR EACH ROW WHEN (new.kind = '{kind}')
EXECUTE FUNCTION outrider.test_kill()
"""


@pytest.mark.parametrize("kind", ["close", "prune"])
async def test_a_worker_that_is_killed_while_it_prunes_leaves_chains_that_verify(
    bench: PostgresSagaBench, conn: Any, kind: str
) -> None:
    await end_audited_sagas(bench)
    await bench.advance(seconds=900_000)
    await bench.save(await bench.claim_one(), notes=[NOTE], status=Status.COMPLETED, release=True)
    await bench.advance(seconds=900_000)
    await conn.execute(KILL.format(kind=kind))
    with pytest.raises(OutriderError):
        await bench.store.prune(saga_days=1, audit_days=2, participant_memory_days=1)
    killed = await verify(bench.store.audit, AuditCheck())
    assert (killed.findings, killed.lines, killed.anchors) == ([], 9, 1 if kind == "close" else 2)
    await conn.execute("DROP TRIGGER test_kill ON outrider.saga_audit_anchor")
    assert (await bench.store.prune(saga_days=1, audit_days=2, participant_memory_days=1)).notes == 9
    pruned = await verify(bench.store.audit, AuditCheck())
    assert (pruned.findings, pruned.lines, pruned.anchors) == ([], 0, 4)
