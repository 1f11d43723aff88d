"""Query plans of PostgreSQL for 100,000 sagas, most of them ended, with stale statistics too."""

from __future__ import annotations

from collections.abc import AsyncIterator
from datetime import UTC, datetime
from typing import Any
from uuid import UUID, uuid4

import pytest

from outrider.saga.model import AuditEntry, Claim, JournalEntry, Phase, SagaChange, Status, StepStatus
from outrider.stores.postgres import PostgresSagas
from outrider.stores.postgres.statements import message_parameters, save_parameters
from outrider.stores.rows import close_sagas, instance_of
from outrider.testing.saga_harness import new_saga, reply
from tests.support.postgres_plans import indexed_tables, used_indexes

pytestmark = pytest.mark.postgres

TABLES = ("saga_instance", "saga_step", "saga_mailbox", "saga_audit_log", "saga_barrier", "saga_audit_head")
# In 100,000 sagas, 2,000 are due, 1,000 are owned, 1,000 wait for messages and 500 of these have some; the rest ended.
# As many of a definition that no worker here holds are due and have messages.
FILL = """
INSERT INTO outrider.saga_instance (saga_id, saga_type, definition_version, correlation_id, state, status, started_at,
    updated_at, ended_at, wake_at, owner, claimed_from, epoch, needs_attention)
SELECT md5('order' || i)::uuid, CASE WHEN i % 50 = 9 THEN 'other' ELSE 'order' END, 1, 'A-' || i, '{}',
    CASE WHEN i % 50 < 2 OR i % 100 IN (2, 3) OR i % 50 = 9 THEN 'running' WHEN i % 1000 = 4 THEN 'failed'
         ELSE 'completed' END,
    now(), now() - i * interval '1 second',
    CASE WHEN NOT (i % 50 < 2 OR i % 100 IN (2, 3) OR i % 50 = 9) THEN now() - i * interval '1 minute' END,
    CASE WHEN i % 50 = 0 OR i % 50 = 9 THEN now() - i * interval '1 second'
         WHEN i % 100 = 2 THEN now() + interval '1 hour' END,
    CASE WHEN i % 100 = 2 THEN 'ann' END, CASE WHEN i % 100 = 2 THEN now() - interval '1 hour' END, 1, i % 1000 = 4
FROM generate_series(1, 100000) AS i; INSERT INTO outrider.saga_step SELECT md5('order' || i)::uuid, 'step1', 'action',
'done', 1, 1, NULL, NULL, now(), now() FROM generate_series(1, 100000) AS i; INSERT INTO outrider.saga_mailbox (saga_id,
event_id, kind, name, body, delivered_at, seen, saga_type, definition_version) SELECT md5('order' || i)::uuid,
gen_random_uuid(), 'reply', 'stock.reserved', '{}', now(), i % 200 <> 3 AND i % 50 <> 9,
    CASE WHEN i % 50 = 9 THEN 'other' ELSE 'order' END, 1
FROM generate_series(1, 100000) AS i WHERE i % 50 < 10;
INSERT INTO outrider.saga_audit_log (saga_id, line, at, new_status, what, actor, detail)
SELECT CASE WHEN i % 2 = 0 THEN md5('order' || i)::uuid ELSE gen_random_uuid() END, 1, now() - i * interval '1 minute',
    'running', 'started', 'ann', ''
FROM generate_series(1, 50000) AS i;
INSERT INTO outrider.saga_barrier
SELECT 'stock', md5('order' || i) || ':reserve', 'action', false, '{}', now() - i * interval '1 minute'
FROM generate_series(1, 20000) AS i;
"""
ORDER = ["order"], [1]


@pytest.fixture(params=[True, False], ids=["analyzed", "statistics of empty tables"])
async def sagas(request: pytest.FixtureRequest, postgres_url: str, conn: Any) -> AsyncIterator[PostgresSagas]:
    """Tables that filled after they were last analyzed, or that were analyzed since."""
    analyze = "; ".join(f"ANALYZE outrider.{table}" for table in TABLES)
    await conn.execute("; ".join(f"ALTER TABLE outrider.{table} SET (autovacuum_enabled = off)" for table in TABLES))
    await conn.execute(analyze)
    await conn.execute(FILL)
    if request.param:
        await conn.execute(analyze)
    sagas = await PostgresSagas.open(postgres_url)
    yield sagas
    await sagas.close()


async def _owned(conn: Any, count: int) -> list[Any]:
    rows = await conn.fetch("SELECT saga_id FROM outrider.saga_instance WHERE owner = 'ann' LIMIT $1", count)
    return [row["saga_id"] for row in rows]


async def test_a_claim_reads_what_it_takes_and_nothing_else(sagas: PostgresSagas, conn: Any) -> None:
    read = {"saga_instance", "saga_step", "saga_mailbox"}
    # The functions keep the plan of the sixth execution, at the latest.
    for _ in range(7):
        assert await indexed_tables(conn, 64, sagas._sql["claim"], "bob", *ORDER, 64, 15.0, 1) == read
    # A worker for whom there is nothing reads nothing.
    nothing = "bob", ["order", "refund"], [2, 1], 64, 15.0, 1
    assert await indexed_tables(conn, 0, sagas._sql["claim"], *nothing) == set()
    async with sagas.transaction() as tx:
        await sagas.start(tx, new_saga("mine", "mine"))
    [record] = await sagas.claim("bob", [("mine", 1)], limit=64, lease_seconds=15)
    assert record.instance.correlation_id == "mine"


async def test_a_turn_reads_what_it_is_about_and_nothing_else(sagas: PostgresSagas, conn: Any) -> None:
    ids, instance = await _owned(conn, 64), {"saga_instance_pkey"}
    for name in ("load", "load_for_update"):
        read = await indexed_tables(conn, 2, sagas._sql[name], ids[0])
        assert read == {"saga_instance", "saga_step", "saga_mailbox"}
    assert await used_indexes(conn, 64, sagas._sql["renew"], ids, ["ann"] * 64, [1] * 64, 15.0) == instance
    messages = message_parameters([reply(saga_id) for saga_id in [*ids[:50], *(uuid4() for _ in range(50))]])
    assert await used_indexes(conn, 100, sagas._sql["deliver"], *messages) == instance
    outbox = {"outbox_pkey", "outbox_dead_letter_pkey"}
    assert await used_indexes(conn, 64, sagas._sql["undelivered"], ids) == outbox
    assert await used_indexes(conn, 1, sagas._sql["participant_reply"], "stock", "k", "action") == {"saga_barrier_pkey"}
    assert await used_indexes(conn, 1, sagas._sql["save_reply"], "stock", "k", "action", "{}") == {"saga_barrier_pkey"}


async def test_saving_reads_what_it_writes_and_nothing_else(sagas: PostgresSagas, conn: Any) -> None:
    [saga_id] = await _owned(conn, 1)
    record = await sagas.admin.show(saga_id)
    assert record is not None
    numbers = [message.message_id for message in record.messages]
    assert numbers
    entries = [JournalEntry(f"step{n}", Phase.ACTION, StepStatus.DONE, n) for n in range(5)]
    note = AuditEntry(Status.RUNNING, Status.RUNNING, None, "started", "ann")
    for taken, seen in ((numbers, []), ([], numbers)):
        turn = SagaChange(record.instance, entries=entries, notes=[note], taken=taken, seen=seen)
        parameters = save_parameters(Claim("ann", saga_id, 1), turn, 15.0)
        used = await used_indexes(conn, 5, sagas._sql["save"], *parameters)
        # Its queries are in a function, which plans no scans.
        assert used == set()


async def test_children_are_found_by_their_parent(sagas: PostgresSagas, conn: Any) -> None:
    criteria: tuple[Any, ...] = [], None, None, None, None, None, 50, uuid4()
    assert await used_indexes(conn, 1, sagas.admin._sql["find"], *criteria) == {"saga_instance_parent"}  # type: ignore[attr-defined]


async def test_pruning_reads_the_oldest_and_nothing_else(sagas: PostgresSagas, conn: Any) -> None:
    old = await used_indexes(conn, 200, sagas._sql["prunable_sagas"], 1.0, 200)
    assert old == {"saga_instance_age", "saga_instance_parent", "saga_instance_pkey", "saga_audit_log_pkey"}
    rows = await conn.fetch(sagas._sql["prunable_sagas"], 1.0, 200)
    anchor, heads = close_sagas(None, [(instance_of(tuple(row)[:-1]), row["place"]) for row in rows], datetime.now(UTC))
    columns = zip(*[(head.saga_id, head.lines, head.hash, head.place) for head in heads], strict=True)
    hashes = [head.subject_hash for head in heads]
    removed = await used_indexes(conn, 200, sagas._sql["close_sagas"], *map(list, columns), *anchor, hashes)
    assert removed == {"saga_instance_pkey", "saga_step_pkey", "saga_mailbox_event"}
    assert await sagas.audit.remove_sagas(60.0) > 400
    prunable = await used_indexes(conn, 200, sagas._sql["prunable_audit"], 1.0)
    assert prunable == {"saga_audit_head_anchor", "saga_audit_anchor_pkey"}
    page = await used_indexes(conn, 100, sagas._sql["audit_lines"], UUID(int=0), 0, 100)
    assert page == {"saga_audit_log_pkey"}
    barriers = await used_indexes(conn, 1000, sagas._sql["prune_participants"], 1.0, 1000)
    assert barriers == {"saga_barrier_age", "saga_barrier"}
