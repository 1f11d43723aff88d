"""Erasure on PostgreSQL: the gate of the audit log, roles, locked rows, and parts of large tables."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import asyncpg
import pytest

from outrider.audit_chain import digest_of
from outrider.event import subject_hash
from outrider.privacy.erasure_store import ErasurePlace
from outrider.saga.audit import AuditCheck, verify
from outrider.stores.postgres import erasure
from outrider.stores.postgres.database import PostgresDatabase
from outrider.stores.postgres.erasure import PostgresErasure
from outrider.testing.contracts.erasure import ANN, BOB, CANARY, NEIGHBOUR, ErasureBench, event
from tests.support.erasure_benches import postgres_bench

pytestmark = pytest.mark.postgres

LINE = "UPDATE outrider.saga_audit_log SET {change} WHERE line = 2"

WHOLE = "detail = '', state_hash = NULL, salt = NULL, digest = '\\x{digest}'"


@pytest.fixture
async def bench(postgres_url: str) -> AsyncIterator[ErasureBench]:
    async with postgres_bench(postgres_url) as bench:
        yield bench


async def test_the_owner_can_only_replace_details_by_a_digest_while_a_run_is_open(
    bench: ErasureBench, conn: Any
) -> None:
    saga_id = await bench.end_saga("A-7", ANN)
    _, lines = await bench.sagas.audit.chain(saga_id)
    right = WHOLE.format(digest=digest_of(lines[1]).hex())
    with pytest.raises(asyncpg.CheckViolationError, match="append only"):
        await conn.execute(LINE.format(change=right))
    run = await bench.erasure.open_run(subject_hash(ANN), "ann")
    others = ("actor = 'nobody'", "hash = NULL", "saga_id = gen_random_uuid()", "what = 'x'", "line = 9")
    changes = "detail = ''", "digest = '\\x00'", WHOLE.format(digest="00"), *(f"{right}, {other}" for other in others)
    for change in changes:
        with pytest.raises(asyncpg.CheckViolationError, match="append only"):
            await conn.execute(LINE.format(change=change))
    with pytest.raises(asyncpg.NoDataFoundError, match="no run"):
        await conn.execute("SELECT outrider.saga_audit_erase($1, $2, '{2}', '{}')", run.id + 1, saga_id)
    await conn.execute(LINE.format(change=right))
    assert (await verify(bench.sagas.audit, AuditCheck())).findings == []
    with pytest.raises(asyncpg.CheckViolationError, match="append only"):
        await conn.execute(LINE.format(change=right))


SPELLINGS = (
    """{"subject": "customer\\u003a42"}""",
    """{"subj\\u0065ct" : "customer:42"}""",
    """{"note": "x", "subject":"customer:\\u0034\\u0032"}""",
)

INSERT = "INSERT INTO outrider.outbox (event_type, topic, payload, headers) VALUES ('t', 'orders', $1, $2)"


async def test_a_subject_is_found_in_every_spelling_of_json(bench: ErasureBench, conn: Any) -> None:
    for headers in SPELLINGS:
        await conn.execute(INSERT, f'{{"email": "{CANARY}"}}', headers)
    [stopped] = await bench.run("customer:42").run()
    assert len(stopped.blocking) == len(SPELLINGS)
    await bench.publish()
    [result] = await bench.run("customer:42").run()
    assert result.is_complete
    assert await bench.readable(CANARY) == []


async def test_a_number_is_a_subject_as_on_the_wire(bench: ErasureBench, conn: Any) -> None:
    long = "9" * 5_000
    for headers in ('{"subject": 42}', '{"subject":42}', f'{{"subject": "42", "n": {long}}}'):
        await conn.execute(INSERT, f'{{"email": "{CANARY}"}}', headers)
    await conn.execute(INSERT, f'{{"email": "{NEIGHBOUR}"}}', '{"subject": 421}')
    assert len((await bench.run("42").run())[0].blocking) == 3
    await conn.execute(f"UPDATE outrider.outbox SET headers = '{{}}' WHERE headers::text LIKE '%{long}%'")
    await bench.publish()
    [result] = await bench.run("42").run()
    assert result.is_complete
    assert len(await bench.readable(CANARY)) == 1
    assert await bench.readable(NEIGHBOUR) != []


async def test_a_wrong_digest_is_found(bench: ErasureBench, conn: Any) -> None:
    saga_id = await bench.end_saga("A-7", ANN)
    run = await bench.erasure.open_run(subject_hash(ANN), "ann")
    _, lines = await bench.sagas.audit.chain(saga_id)
    call = "SELECT outrider.saga_audit_erase($1, $2, $3, $4)"
    assert await conn.fetchval(call, run.id, saga_id, [lines[1].place], [bytes(32)]) == 1
    report = await verify(bench.sagas.audit, AuditCheck())
    assert (report.findings[0].saga_id, report.findings[0].line) == (saga_id, 2)


@asynccontextmanager
async def _role(conn: Any, url: str, name: str) -> AsyncIterator[asyncpg.Pool]:
    """Make a role with the rights of the documentation."""
    page = (Path(__file__).parents[3] / "docs/reference/tables.md").read_text()
    [grants] = [text for text in page.split("```") if f"CREATE ROLE {name}" in text]
    await conn.execute(grants.removeprefix("sql") + f"; GRANT SELECT ON outrider.test_clock TO {name}")
    try:
        async with asyncpg.create_pool(url, min_size=1, max_size=2, server_settings={"role": name}) as pool:
            yield pool
    finally:
        # Roles belong to the whole server.
        await conn.execute(f"DROP OWNED BY {name}; DROP ROLE {name}")


async def test_the_role_of_workers_cannot_remove_details(bench: ErasureBench, conn: Any, postgres_url: str) -> None:
    saga_id = await bench.end_saga("A-7", ANN)
    run = await bench.erasure.open_run(subject_hash(ANN), "ann")
    async with _role(conn, postgres_url, "shop_sagas") as pool:
        for change in (
            LINE.format(change=WHOLE.format(digest="00" * 32)),
            f"SELECT outrider.saga_audit_erase({run.id}, '{saga_id}', '{{2}}', '{{}}')",
            "INSERT INTO outrider.gdpr_erasure_log (subject_hash, actor, started_at) VALUES ('x', 'x', now())",
        ):
            with pytest.raises(asyncpg.InsufficientPrivilegeError):
                await pool.execute(change)


async def test_the_role_of_the_documentation_erases(bench: ErasureBench, conn: Any, postgres_url: str) -> None:
    await bench.fill(ANN)
    await bench.fill(BOB)
    before = await bench.readable(NEIGHBOUR)
    async with _role(conn, postgres_url, "shop_erasure") as pool:
        store = PostgresErasure(PostgresDatabase.over(pool))
        for change in ("DELETE FROM outrider.gdpr_erasure_log", LINE.format(change="detail = ''")):
            with pytest.raises(asyncpg.InsufficientPrivilegeError):
                await pool.execute(change)
        [result] = await bench.run(store=store).run()
        assert result.is_complete
    assert await bench.readable(CANARY) == []
    assert await bench.readable(NEIGHBOUR) == before
    await bench.audit_is_sound()


async def test_rows_that_another_transaction_has_locked_are_left_for_the_next_run(
    bench: ErasureBench, conn: Any
) -> None:
    await bench.fill(ANN)
    async with conn.transaction():
        assert await conn.fetch("SELECT FROM outrider.outbox_dead_letter FOR UPDATE")
        assert await conn.fetch("SELECT FROM outrider.saga_instance FOR UPDATE")
        [result] = await bench.run().run()
        assert (result.left, result.is_complete) == (2, False)
        assert len(await bench.privacy.subject_keys([ANN], [])) == 1
    [result] = await bench.run().run()
    assert result.is_complete
    assert await bench.readable(CANARY) == []


async def test_large_tables_are_read_in_parts_over_all_partitions(
    bench: ErasureBench, conn: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(erasure, "BLOCKS", 1)
    await bench.publish(*[event(ANN, key=f"{n}", headers={"note": CANARY * 100}) for n in range(40)])
    moved = "UPDATE outrider.outbox_archive SET sent_at = sent_at + interval '1 day' WHERE id % 2 = 0"
    await conn.execute(moved)
    part, patterns = bench.erasure._sql["archived_event_part"], ['%"customer:ann"%']  # type: ignore[attr-defined]
    plan = await conn.fetch(f"EXPLAIN {part}", (0, 0), (1, 0), patterns)
    scans = [line.strip() for [line] in plan if "Scan" in line]
    assert scans
    assert all("Tid Range Scan" in line for line in scans)
    after, parts, rows = None, 0, 0
    while True:
        page = await bench.erasure.page(ErasurePlace.ARCHIVED_EVENT, [ANN], after)
        parts, rows, after = parts + 1, rows + len(page.rows), page.after
        if after is None:
            break
    assert rows == 40
    assert parts > 3
    [result] = await bench.run().run()
    assert result.is_complete
    assert result.run
    assert result.run.erased == {"archived event": 40}
    assert await bench.readable(CANARY) == []
