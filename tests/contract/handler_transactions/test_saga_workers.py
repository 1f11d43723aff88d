"""Workers of sagas, and the commands, with transactions of the application's own kind."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import create_engine, text
from sqlalchemy.orm import Session, sessionmaker

import outrider
from outrider import Event, RetryPolicy, app
from outrider.errors import UsageError
from outrider.inbox.inbox import Inbox
from outrider.saga import Saga, SagaRegistry, SagaWorker, StepUnavailable
from outrider.saga.model import Status, StepStatus
from tests.contract.drivers.databases import PostgresDatabase, SqliteDatabase
from tests.contract.handler_transactions.contract_benches import as_plain_function
from tests.contract.handler_transactions.transaction_kinds import KINDS, POSTGRES_ONLY, REPEATED, Kind

ROOT = Path(outrider.__file__).parent.parent
EVERY = [*KINDS, *REPEATED]
ON_POSTGRES = pytest.mark.parametrize("postgres_kind", EVERY, indirect=True, ids=lambda kind: kind.__name__)
ON_SQLITE = pytest.mark.parametrize(
    "sqlite_kind", [kind for kind in EVERY if kind not in POSTGRES_ONLY], indirect=True, ids=lambda kind: kind.__name__
)
MODULE = """
from dataclasses import dataclass
from sqlalchemy import create_engine, text
from sqlalchemy.orm import sessionmaker
from outrider import Inbox
from outrider.saga import Saga, SagaRegistry

Session = sessionmaker(create_engine("{url}"))
inbox = Inbox(transactions=Session)


@inbox.handler("order.placed", consumer="billing", topic="orders")
def bill(event, session):
    session.execute(text("INSERT INTO effects (what) VALUES (:what)"), {{"what": f"billed {{event.key}}"}})


@dataclass
class Order:
    order_id: str


order = Saga("order", Order)


@order.local()
def create(run, session):
    session.execute(text("INSERT INTO effects (what) VALUES (:what)"), {{"what": f"made {{run.state.order_id}}"}})


sagas = SagaRegistry(order, transactions=Session)
"""


@dataclass
class Order:
    """The state of an order."""

    order_id: str


async def run_a_saga(kind: Kind) -> None:
    """Run a local step, in whose transaction the child of the next step is started."""
    order: Saga[Order] = Saga("order", Order)
    note: Saga[Order] = Saga("note", Order)

    @note.call()
    async def write_down(run: Any) -> None: ...

    async def create(run: Any, given: Any) -> None:
        done = kind.write(given, run.state.order_id)
        if done is not None:
            await done
        run.stage(Event("order.made", {}, topic="orders"))

    order.local()(as_plain_function(create) if kind.plain else create)
    order.child(note, input=lambda state: state)
    sagas = SagaRegistry(order, note, transactions=kind.source)
    store = await app.open_sagas(kind.database.url, transactions=sagas.transactions)
    async with store.transaction() as tx:
        saga_id = await order.start(tx, Order("A-7"), correlation_id="A-7")
    worker = SagaWorker(store, sagas, app.Outbox().stage)
    while await worker.run_once():
        await worker.rest()
    shown = await store.admin.show(saga_id)
    assert shown is not None
    assert shown.instance.status is Status.COMPLETED
    child = await store.admin.show(note.child_id(saga_id, "note"))
    assert child is not None
    assert child.instance.status is Status.COMPLETED
    assert await kind.database.fetch("SELECT what FROM effects") == [("A-7",)]
    assert await kind.database.types() == ["order.made"]
    await store.close()


@pytest.mark.postgres
@ON_POSTGRES
async def test_a_local_step_writes_and_stages_in_its_own_kind_of_transaction(postgres_kind: Kind) -> None:
    await run_a_saga(postgres_kind)


@ON_SQLITE
async def test_a_local_step_writes_and_stages_in_its_own_kind_of_transaction_in_sqlite(sqlite_kind: Kind) -> None:
    await run_a_saga(sqlite_kind)


async def run_a_saga_during_an_outage(kind: Kind) -> None:
    order: Saga[Order] = Saga("order", Order)

    async def create(run: Any, given: Any) -> None:
        done = kind.write(given, run.state.order_id)
        if done is not None:
            await done
        run.stage(Event("order.made", {}, topic="orders"))
        raise StepUnavailable("the index is being rebuilt")

    order.local(retry=RetryPolicy(max_attempts=1))(as_plain_function(create) if kind.plain else create)
    sagas = SagaRegistry(order, transactions=kind.source)
    store = await app.open_sagas(kind.database.url, transactions=sagas.transactions)
    async with store.transaction() as tx:
        saga_id = await order.start(tx, Order("A-7"), correlation_id="A-7")
    worker = SagaWorker(store, sagas, app.Outbox().stage)
    await worker.run_once()
    await worker.rest()
    shown = await store.admin.show(saga_id)
    assert shown is not None
    [entry] = shown.journal
    assert (shown.instance.status, entry.status, entry.attempts) == (Status.RUNNING, StepStatus.RETRYING, 0)
    assert (entry.error, entry.unavailable_since is not None) == ("the index is being rebuilt", True)
    assert await kind.database.fetch("SELECT what FROM effects") == []
    assert await kind.database.types() == []
    await store.close()


@pytest.mark.postgres
@ON_POSTGRES
async def test_a_local_step_that_waits_for_a_service_is_rolled_back_at_no_cost(postgres_kind: Kind) -> None:
    await run_a_saga_during_an_outage(postgres_kind)


@ON_SQLITE
async def test_a_local_step_that_waits_for_a_service_is_rolled_back_at_no_cost_in_sqlite(sqlite_kind: Kind) -> None:
    await run_a_saga_during_an_outage(sqlite_kind)


@pytest.mark.postgres
async def test_a_plain_step_that_does_not_end_can_do_nothing_any_more(postgres: PostgresDatabase) -> None:
    engine = create_engine(postgres.sqlalchemy_url("psycopg"))
    order: Saga[Order] = Saga("order", Order)
    goes_on, failed = threading.Event(), threading.Event()

    @order.local(retry=RetryPolicy(max_attempts=1), timeout_seconds=0.2)
    def create(run: Any, session: Session) -> None:
        session.execute(text("INSERT INTO effects (what) VALUES ('half')"))
        goes_on.wait(30)
        try:
            session.execute(text("INSERT INTO effects (what) VALUES ('late')"))
        finally:
            failed.set()

    store = await app.open_sagas(postgres.url, transactions=sessionmaker(engine))
    async with store.transaction() as tx:
        saga_id = await order.start(tx, Order("A-7"), correlation_id="A-7")
    worker = SagaWorker(store, SagaRegistry(order), outrider.stage)
    while await worker.run_once():
        await worker.rest()
    goes_on.set()
    assert failed.wait(10)
    shown = await store.admin.show(saga_id)
    assert shown is not None
    assert shown.instance.status is Status.COMPENSATED
    assert await postgres.fetch("SELECT what FROM effects") == []
    await store.close()
    engine.dispose()


def _run(directory: Path, *args: str) -> str:
    foreign = {name: value for name, value in os.environ.items() if not name.startswith("OUTRIDER_")}
    done = subprocess.run(
        [sys.executable, "-m", "outrider", *args],
        cwd=directory,
        env={**foreign, "PYTHONPATH": str(ROOT)},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 0, (done.stdout, done.stderr)
    return done.stdout


async def test_the_commands_take_the_kind_from_the_inbox_and_from_the_sagas(
    sqlite: SqliteDatabase, tmp_path: Path
) -> None:
    (tmp_path / "shop.py").write_text(MODULE.format(url=sqlite.url))
    at = ("--store", sqlite.url, "--json")
    order: Saga[Order] = Saga("order", Order)
    order.local(name="create")(print)
    inbox = await app.open_inbox(sqlite.url)
    async with inbox.transaction() as tx:
        await outrider.stage(tx, Event("order.placed", {}, topic="orders", key="A-1"))
        await order.start(tx, Order("A-7"), correlation_id="A-7")
    await inbox.close()
    _run(tmp_path, "relay", "--until-empty", *at, "--broker", "embedded:///log.db")
    failed = _run(tmp_path, "consume", "shop:inbox", "--until-idle", "0.5", *at, "--broker", "embedded:///log.db")
    assert json.loads(failed)["applied"] == 1
    failed = _run(tmp_path, "saga", "run", "shop:sagas", "--until-idle", "0.5", *at)
    assert json.loads(failed)["completed"] == 1
    assert await sqlite.fetch("SELECT what FROM effects ORDER BY id") == [("billed A-1",), ("made A-7",)]


async def test_transactions_of_another_file_are_rejected(sqlite: SqliteDatabase, tmp_path: Path) -> None:
    engine = create_engine(f"sqlite:///{tmp_path / 'other.db'}")
    for opening in (app.open_inbox, app.open_sagas):
        with pytest.raises(UsageError, match="leads to another database"):
            await opening(sqlite.url, transactions=engine)
    engine.dispose()


async def test_an_inbox_with_a_store_takes_no_transactions_beside_it(sqlite: SqliteDatabase) -> None:
    store = await app.open_inbox(sqlite.url)
    with pytest.raises(UsageError, match="takes its transactions from there"):
        Inbox(store, transactions=sessionmaker())
    await store.close()
