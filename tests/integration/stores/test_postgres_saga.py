"""Sagas on PostgreSQL beyond the contract: real races, the audit log's triggers, wake-ups, poolers, upgrades."""

from __future__ import annotations

import asyncio
import json
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any
from urllib.parse import urlsplit
from uuid import UUID

import asyncpg
import pytest
from typer.testing import CliRunner

import outrider
from outrider import Event, RetryPolicy, app, cli
from outrider.drivers import asyncpg as driver
from outrider.errors import ConcurrencyError, InvalidHandler, UsageError
from outrider.saga import Saga, SagaRegistry, SagaWorker
from outrider.saga.execution import runner
from outrider.saga.model import Instance, Phase, SagaChange, Status
from outrider.stores import migrations
from outrider.stores.postgres import PostgresSagas, PostgresSchema
from outrider.telemetry.events import SagaStepRolledBack, SagaWorkerUnavailable
from outrider.testing import RecordingObserver
from outrider.testing.saga_harness import claim_of, new_saga, reply
from tests.support.migrations import VERSIONS

pytestmark = pytest.mark.postgres

ORDER = [("order", 1)]


@dataclass
class Placed:
    blob: str = ""


async def _start(sagas: PostgresSagas, count: int) -> list[UUID]:
    ids = [new_saga(f"A-{number}") for number in range(count)]
    async with sagas.transaction() as tx:
        for saga in ids:
            await sagas.start(tx, saga)
    return [saga.saga_id for saga in ids]


def _ended(instance: Instance) -> Instance:
    return replace(instance, status=Status.COMPLETED)


async def _until_one_waits(conn: Any) -> None:
    """Wait until the server says that a session waits for a lock; there is no signal for it."""
    sql = "SELECT count(*) FROM pg_stat_activity WHERE wait_event_type = 'Lock' AND datname = current_database()"
    async with asyncio.timeout(30):
        while not await conn.fetchval(sql):  # noqa: ASYNC110
            await asyncio.sleep(0.01)


async def test_a_save_that_waited_for_a_claim_is_rejected(postgres_url: str, conn: Any) -> None:
    sagas = await PostgresSagas.open(postgres_url)
    await _start(sagas, 1)
    [late] = await sagas.claim("ann", ORDER, limit=1, lease_seconds=0)
    claiming = conn.transaction()
    await claiming.start()
    await conn.fetch(sagas._sql["claim"], "bob", ["order"], [1], 1, 60.0, 1)

    async def save() -> None:
        async with sagas.transaction() as tx:
            await sagas.save(tx, claim_of(late), SagaChange(late.instance), 60)

    saving = asyncio.create_task(save())
    await _until_one_waits(conn)
    await claiming.commit()
    with pytest.raises(ConcurrencyError):
        await saving
    await sagas.close()


@pytest.mark.parametrize(
    "change",
    [
        "UPDATE outrider.saga_audit_log SET actor = 'nobody'",
        "DELETE FROM outrider.saga_audit_log",
        "TRUNCATE outrider.saga_audit_log",
    ],
)
async def test_the_audit_log_is_append_only(postgres_url: str, conn: Any, change: str) -> None:
    sagas = await PostgresSagas.open(postgres_url, connections_max=1)
    [saga_id] = await _start(sagas, 1)
    await sagas.prune(saga_days=0, audit_days=0, participant_memory_days=0)
    with pytest.raises(asyncpg.CheckViolationError, match="append only"):
        await conn.execute(change)
    async with sagas.transaction() as tx:
        # Pruning has left nothing behind in the session that would let others delete.
        with pytest.raises(asyncpg.CheckViolationError, match="append only"):
            async with tx.connection.transaction():
                await tx.connection.execute(change)
    assert [line["actor"] for line in await sagas.admin.audit(saga_id)] == ["application"]
    await sagas.close()


async def test_a_notification_wakes_workers_of_other_processes(postgres_url: str) -> None:
    here, there = await PostgresSagas.open(postgres_url), await PostgresSagas.open(postgres_url)
    woken = asyncio.Event()
    async with there.listen(woken.set), asyncio.timeout(30):
        while not woken.is_set():
            await here.notify()
            await asyncio.sleep(0.01)
    await here.close()
    await there.close()


async def test_a_pool_with_codecs_of_its_own_makes_no_difference(postgres_url: str) -> None:
    async def init(conn: Any) -> None:
        for kind in ("json", "jsonb"):
            await conn.set_type_codec(kind, schema="pg_catalog", encoder=json.dumps, decoder=json.loads)

    async with asyncpg.create_pool(postgres_url, min_size=1, max_size=2, init=init) as pool:
        sagas = PostgresSagas.over(pool)
        async with pool.acquire() as conn, conn.transaction():
            assert await driver.run(conn, "start_saga", (new_saga(),), "outrider")
            await driver.run(conn, "deliver_messages", ([reply(new_saga().saga_id)],), "outrider")
            assert (await driver.run(conn, "participant_enter", ("stock", "k", Phase.ACTION), "outrider")).fresh
            await driver.run(conn, "participant_save_reply", ("stock", "k", Phase.ACTION, b'"yes"'), "outrider")
            assert (
                await driver.run(conn, "participant_enter", ("stock", "k", Phase.ACTION), "outrider")
            ).reply == b'"yes"'
        [record] = await sagas.claim("ann", ORDER, limit=1, lease_seconds=15)
        assert (record.instance.state, record.messages[0].body) == (new_saga().state, b'{"ok": true}')


@pytest.mark.pgbouncer
async def test_sagas_work_through_a_pooler(postgres_url: str, pgbouncer_url: str) -> None:
    through = urlsplit(pgbouncer_url)._replace(path=urlsplit(postgres_url).path).geturl()
    sagas = await app.open_sagas(f"{through}?pooled=true")
    async with sagas.transaction() as tx:
        assert await sagas.start(tx, new_saga())
    [record] = await sagas.claim("ann", ORDER, limit=1, lease_seconds=15)
    assert await sagas.renew([claim_of(record)], 15) == {record.instance.saga_id}
    async with sagas.transaction() as tx:
        await sagas.save(tx, claim_of(record), SagaChange(_ended(record.instance), release=True), 15)
    assert await sagas.prune(saga_days=0, audit_days=0, participant_memory_days=0) == (1, 1, 0)
    await sagas.close()


async def test_a_step_that_ends_the_transaction_is_reported(postgres_url: str) -> None:
    sagas = await PostgresSagas.open(postgres_url)

    async def commit(_: object, tx: Any) -> None:
        await tx.execute("COMMIT")

    with pytest.raises(UsageError, match="leave commit and rollback to outrider"):
        async with sagas.transaction() as tx:
            await tx.call(commit, None)
    await sagas.close()


@pytest.mark.parametrize("end", ["COMMIT", "ROLLBACK"])
async def test_a_step_that_begins_another_transaction_is_reported_when_it_is_saved(postgres_url: str, end: str) -> None:
    sagas = await PostgresSagas.open(postgres_url)
    [saga_id] = await _start(sagas, 1)
    [record] = await sagas.claim("ann", ORDER, limit=1, lease_seconds=15)

    async def another(_: object, tx: Any) -> None:
        await tx.execute(f"{end}; BEGIN")

    async def turn() -> None:
        async with sagas.transactions.open() as tx:
            assert await sagas.load(tx, saga_id, for_update=True)
            await tx.call(another, None)
            await sagas.save(tx, claim_of(record), SagaChange(_ended(record.instance)), 15)

    with pytest.raises(InvalidHandler, match="leave commit and rollback to outrider"):
        await turn()
    shown = await sagas.admin.show(saga_id)
    assert shown is not None
    assert shown.instance.version == 0
    await sagas.close()


@pytest.mark.parametrize("then", ["SELECT 1 / 0", "SELECT pg_terminate_backend(pg_backend_pid())"])
async def test_a_step_that_commits_and_then_fails_is_reported(postgres_url: str, then: str) -> None:
    sagas = await PostgresSagas.open(postgres_url)
    [saga_id] = await _start(sagas, 1)

    async def another(_: object, tx: Any) -> None:
        await tx.execute("COMMIT; BEGIN")
        await tx.execute(then)

    async def turn() -> None:
        async with sagas.transactions.open() as tx:
            assert await sagas.load(tx, saga_id, for_update=True)
            await tx.call(another, None)

    with pytest.raises(InvalidHandler, match="leave commit and rollback to outrider"):
        await turn()
    await sagas.close()


async def test_claims_renewals_and_turns_never_wait_for_functions_that_hang(postgres_url: str) -> None:
    sagas = await PostgresSagas.open(postgres_url, connections_max=4)
    await _start(sagas, 1)
    hung, goes_on = asyncio.Barrier(3), asyncio.Event()

    async def hangs() -> None:
        async with sagas.transactions.open():
            await hung.wait()
            await goes_on.wait()

    async def waits() -> None:
        async with sagas.transactions.open():
            pass

    async with asyncio.timeout(10), asyncio.TaskGroup() as tasks:
        for work in (hangs, hangs, waits, waits):
            tasks.create_task(work())
        await hung.wait()
        [record] = await sagas.claim("ann", ORDER, limit=1, lease_seconds=15)
        assert await sagas.renew([claim_of(record)], 15) == {record.instance.saga_id}
        async with sagas.transaction() as tx:
            await sagas.save(tx, claim_of(record), SagaChange(record.instance), 15)
        goes_on.set()
    await sagas.close()


async def test_a_plain_function_is_rejected_when_a_worker_is_made(postgres_url: str) -> None:
    sagas = await PostgresSagas.open(postgres_url)
    order: Saga[Placed] = Saga("order", Placed)

    @order.local()
    def create(run: Any, tx: Any) -> None:
        tx.execute("SELECT 1")

    error = r"the step create of order: .*create \(.*test_postgres_saga\.py:\d+\) is a plain function"
    with pytest.raises(InvalidHandler, match=error):
        SagaWorker(sagas, SagaRegistry(order), outrider.stage)
    await sagas.close()


async def test_a_connection_that_is_lost_under_a_local_step_costs_no_attempt(postgres_url: str, conn: Any) -> None:
    sagas = await PostgresSagas.open(postgres_url)
    order: Saga[Placed] = Saga("order", Placed)
    tries = list[int]()

    @order.local(retry=RetryPolicy(max_attempts=1))
    async def create(run: Any, tx: Any) -> None:
        tries.append(run.attempt)
        if len(tries) == 1:
            pid = await tx.fetchval("SELECT pg_backend_pid()")
            await conn.execute("SELECT pg_terminate_backend($1)", pid)
        await tx.execute("SELECT 1")

    async with sagas.transaction() as tx:
        saga_id = await order.start(tx, Placed(), correlation_id="A-7")
    worker = SagaWorker(sagas, SagaRegistry(order), outrider.stage)
    while await worker.run_once():
        await worker.rest()
    shown = await sagas.admin.show(saga_id)
    assert shown is not None
    assert (shown.instance.status, tries) == (Status.COMPLETED, [1, 1])
    await sagas.close()


async def test_a_local_step_that_ignores_its_end_can_do_nothing_any_more(postgres_url: str, conn: Any) -> None:
    sagas = await PostgresSagas.open(postgres_url)
    order: Saga[Placed] = Saga("order", Placed)
    goes_on, ended = asyncio.Event(), asyncio.Event()
    await conn.execute("CREATE TABLE effect (a integer)")

    @order.local(retry=RetryPolicy(max_attempts=1), timeout_seconds=0.05)
    async def create(run: Any, tx: Any) -> None:
        await tx.execute("INSERT INTO effect VALUES (1)")
        while not goes_on.is_set():
            with suppress(asyncio.CancelledError):
                await goes_on.wait()
        try:
            await tx.execute("INSERT INTO effect VALUES (2)")
        finally:
            ended.set()

    async with sagas.transaction() as tx:
        saga_id = await order.start(tx, Placed(), correlation_id="A-7")
    worker = SagaWorker(sagas, SagaRegistry(order), outrider.stage)
    while await worker.run_once():
        await worker.rest()
    goes_on.set()
    async with asyncio.timeout(10):
        await ended.wait()
    shown = await sagas.admin.show(saga_id)
    assert shown is not None
    assert shown.instance.status is Status.COMPENSATED
    assert await conn.fetchval("SELECT count(*) FROM effect") == 0
    await sagas.close()


@pytest.mark.parametrize("local", [True, False], ids=["local", "call"])
async def test_connections_lost_while_events_are_staged_count_no_attempt(
    postgres_url: str, conn: Any, *, local: bool
) -> None:
    sagas = await PostgresSagas.open(postgres_url)
    order: Saga[Placed] = Saga("order", Placed)
    lost = list[int]()

    async def create(run: Any) -> None:
        run.stage(Event("order.created", {"id": 1}))

    async def create_in(run: Any, tx: Any) -> None:
        await create(run)

    order.local()(create_in) if local else order.call()(create)

    async def stage(tx: Any, *events: Event) -> Any:
        if len(lost) < 4:
            lost.append(await tx.connection.fetchval("SELECT pg_backend_pid()"))
            await conn.execute("SELECT pg_terminate_backend($1)", lost[-1])
        return await outrider.stage(tx, *events)

    async with sagas.transaction() as tx:
        saga_id = await order.start(tx, Placed(), correlation_id="A-7")
    worker = SagaWorker(sagas, SagaRegistry(order), stage)
    while await worker.run_once():
        await worker.rest()
    shown = await sagas.admin.show(saga_id)
    assert shown is not None
    assert (shown.instance.status, shown.journal[0].attempts, len(lost)) == (Status.COMPLETED, 1, 4)
    assert await conn.fetchval("SELECT count(*) FROM outrider.outbox") == 1
    await sagas.close()


async def test_a_step_that_breaks_our_own_statements_counts_an_attempt_in_the_end(
    postgres_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(runner, "PAUSES", RetryPolicy(base_seconds=0.001, cap_seconds=0.001))
    sagas = await PostgresSagas.open(postgres_url)
    order: Saga[Placed] = Saga("order", Placed)
    observer = RecordingObserver()

    @order.local(retry=RetryPolicy(max_attempts=1))
    async def create(run: Any, tx: Any) -> None:
        await tx.execute("CREATE TABLE slow (a integer)")
        await tx.execute("SET LOCAL lock_timeout = '1ms'; SET LOCAL statement_timeout = '1ms'")
        run.state.blob = "x" * 4_000_000

    async with sagas.transaction() as tx:
        saga_id = await order.start(tx, Placed(), correlation_id="A-7")
    worker = SagaWorker(sagas, SagaRegistry(order), outrider.stage, observer=observer)
    while await worker.run_once():
        await worker.rest()
    shown = await sagas.admin.show(saga_id)
    assert shown is not None
    assert shown.instance.status is Status.COMPENSATED
    assert f"the store has failed under it {runner.ROLLED_BACK_MAX} times in a row" in (shown.journal[0].error or "")
    assert [fact.times for fact in observer.of(SagaStepRolledBack)] == [*range(1, runner.ROLLED_BACK_MAX + 1)]
    assert not observer.of(SagaWorkerUnavailable)
    await sagas.close()


async def test_a_driver_says_what_to_run_where_nothing_is_installed(empty_database: str) -> None:
    conn = await asyncpg.connect(empty_database)
    async with conn.transaction():
        with pytest.raises(UsageError, match="outrider db migrate"):
            async with conn.transaction():
                await driver.run(conn, "start_saga", (new_saga(),), "outrider")
    await conn.close()


async def test_an_installation_without_sagas_names_the_command_to_run_and_upgrades(
    empty_database: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patch:
        every = migrations.steps
        patch.setattr(migrations, "steps", lambda *args: [step for step in every(*args) if step.version < 3])
        await PostgresSchema(empty_database).migrate()
    conn = await asyncpg.connect(empty_database)
    async with conn.transaction():
        await outrider.stage(conn, Event("order.placed", {"id": 1}))
    with pytest.raises(UsageError, match="outrider db migrate"):
        await app.open_sagas(empty_database)
    migrate = await asyncio.to_thread(CliRunner().invoke, cli.app, ["db", "migrate", "--store", empty_database])
    assert migrate.exit_code == 0, migrate.output
    assert "0003_saga" in migrate.output
    sagas = await app.open_sagas(empty_database)
    async with conn.transaction():
        assert await driver.run(conn, "start_saga", (new_saga(),), "outrider")
    assert (await sagas.admin.counts())["started"] == 1
    assert await conn.fetchval("SELECT count(*) FROM outrider.outbox") == 1
    await sagas.close()
    await conn.close()


async def test_the_subject_of_sagas_is_added_beside_sessions_that_run_sagas(
    empty_database: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    schema = PostgresSchema(empty_database)
    with monkeypatch.context() as patch:
        every = migrations.steps
        patch.setattr(migrations, "steps", lambda *args: [step for step in every(*args) if step.version < 6])
        await schema.migrate()
    with pytest.raises(UsageError, match="run: outrider db migrate"):
        await PostgresSagas.open(empty_database)
    conn = await asyncpg.connect(empty_database)
    saga = new_saga()
    await conn.execute(
        "INSERT INTO outrider.saga_instance (saga_id, saga_type, definition_version, correlation_id, state, status, "
        "started_at, updated_at) VALUES ($1, 'order', 1, 'A-7', '{}', 'started', now(), now())",
        saga.saga_id,
    )
    # A statement of the version before, prepared, and a function whose plans the session keeps.
    loads = (
        "SELECT i.saga_id, i.audit_hash, f.now FROM outrider.saga_load($1, true) AS f, LATERAL (SELECT (f.saga).*) AS i"
    )
    old = await conn.prepare(loads)
    pages = "SELECT pg_relation_filenode('outrider.saga_instance')"
    before = await conn.fetchval(pages)
    assert [row["saga_id"] for row in await old.fetch(saga.saga_id)] == [saga.saga_id]
    assert {step.version for step in await schema.migrate()} == set(VERSIONS[5:])
    assert await conn.fetchval(pages) == before
    assert [row["saga_id"] for row in await old.fetch(saga.saga_id)] == [saga.saga_id]
    sagas = await PostgresSagas.open(empty_database)
    record = await sagas.admin.show(saga.saga_id)
    assert record is not None
    assert record.instance.subject is None
    await sagas.close()
    await conn.close()
