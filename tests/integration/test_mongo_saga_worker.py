"""Saga workers over MongoDB: three local steps, every effect exactly once, whatever the server does meanwhile.

All sagas change one document and stage into one stream, so their transactions lose against each other all the time.
The ledger forbids nothing: what happened twice would be seen.
"""

from __future__ import annotations

import asyncio
import json
from collections import defaultdict
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any
from uuid import uuid4

import pytest
from pymongo import AsyncMongoClient

import outrider
from outrider import Event, RetryPolicy
from outrider.errors import Unreachable
from outrider.saga import Saga, SagaRegistry, SagaSettings, SagaWorker, StepContext, StepRejected
from outrider.saga.model import SagaCriteria
from outrider.stores.mongo import MongoSagas
from outrider.stores.mongo.database import MongoDatabase
from outrider.stores.mongo.handler_transactions import MongoHandlerTransaction, MongoTransactionSource
from outrider.telemetry.events import SagaNeedsAttention, SagaStepFailed, SagaWorkerUnavailable
from outrider.testing import RecordingObserver

pytestmark = pytest.mark.mongo

ORDERS = 12
SHOP = "test_saga_shop"
FINE = {"order": [1], "money": [1], "parcel": [1]}
COMPENSATED = {"order": [1, -1], "money": [1, -1]}
SOON = RetryPolicy(base_seconds=0.02, cap_seconds=0.2, max_attempts=50)
SETTINGS = SagaSettings(concurrency=6, lease_seconds=15, poll_seconds_max=0.2, shutdown_timeout_seconds=5)
SHORT = SagaSettings(concurrency=6, lease_seconds=3, poll_seconds_max=0.2, shutdown_timeout_seconds=5)

WRITES = ["insert", "update", "delete", "findAndModify"]
UNHEARD = {"code": 64, "errmsg": "waiting for replication timed out"}


@dataclass(frozen=True, slots=True)
class Fault:
    """What goes wrong, and how often."""

    data: dict[str, Any]
    probability: float


FAULTS: Mapping[str, Fault | None] = {
    "nothing": None,
    "conflicts": Fault({"failCommands": WRITES, "errorCode": 112}, 0.125),
    # A driver that has lost a connection takes half a second to look for the server, so this is rare.
    "connections": Fault({"failCommands": [*WRITES, "find", "commitTransaction"], "closeConnection": True}, 0.01),
    "commits in doubt": Fault({"failCommands": ["commitTransaction"], "writeConcernError": UNHEARD}, 0.25),
}


@dataclass
class Order:
    """What an order keeps."""

    order_id: str
    rejected: bool
    paid: bool = False


async def _write(run: StepContext[Order], session: Any, account: str, amount: int) -> None:
    line = {"order": run.state.order_id, "account": account, "amount": amount, "attempt": run.attempt}
    await session.client[SHOP]["ledger"].insert_one(line, session=session)
    run.stage(Event("ledger.written", {"order": run.state.order_id, "line": f"{account} {amount}"}, key="all"))


async def _pay(session: Any, amount: int) -> None:
    await session.client[SHOP]["account"].update_one({"_id": "till"}, {"$inc": {"balance": amount}}, session=session)


def _saga() -> Saga[Order]:
    order = Saga("order", Order, version=1)

    @order.local(retry=SOON)
    async def create(run: StepContext[Order], session: Any) -> None:
        await _write(run, session, "order", 1)

    @create.compensate(retry=SOON)
    async def cancel(run: StepContext[Order], session: Any) -> None:
        await _write(run, session, "order", -1)

    @order.local(retry=SOON)
    async def pay(run: StepContext[Order], session: Any) -> None:
        await _write(run, session, "money", 1)
        await _pay(session, 1)
        run.state.paid = True

    @pay.compensate(retry=SOON)
    async def pay_back(run: StepContext[Order], session: Any) -> None:
        await _pay(session, -1)
        await _write(run, session, "money", -1)
        run.state.paid = False

    @order.local(retry=SOON)
    async def ship(run: StepContext[Order], session: Any) -> None:
        await _write(run, session, "parcel", 1)
        if run.state.rejected:
            raise StepRejected("there is no way to send it there")

    return order


class UnheardTransactions(MongoTransactionSource):
    """Transactions of which every third commits, and the answer is lost."""

    _count = 0

    @asynccontextmanager
    async def open(self) -> AsyncIterator[MongoHandlerTransaction]:
        async with super().open() as tx:
            yield tx
        self._count += 1
        if self._count % 3 == 0:
            raise Unreachable("the answer to a commit was lost")


class UnheardSagas(MongoSagas):
    """A saga store whose turns, those with a local step too, run in `UnheardTransactions`."""

    def __init__(self, database: MongoDatabase) -> None:
        super().__init__(database)
        self.transactions = UnheardTransactions(database)


@pytest.fixture
async def client(mongo_default: str) -> AsyncIterator[AsyncMongoClient[Any]]:
    """A client as an application has one, and a shop to write to."""
    async with AsyncMongoClient[Any](mongo_default) as client:
        await client[SHOP]["ledger"].insert_one({"order": "opening"})
        await client[SHOP]["account"].insert_one({"_id": "till", "balance": 0})
        yield client
        await client.drop_database(SHOP)


@asynccontextmanager
async def _failing(client: AsyncMongoClient[Any], app_name: str, fault: Fault | None) -> AsyncIterator[None]:
    """Let some commands of one application go wrong."""
    if fault is None:
        yield
        return
    data, mode = {**fault.data, "appName": app_name}, {"activationProbability": fault.probability}
    await client.admin.command({"configureFailPoint": "failCommand", "mode": mode, "data": data})
    try:
        yield
    finally:
        await client.admin.command({"configureFailPoint": "failCommand", "mode": "off"})


@asynccontextmanager
async def _working(
    store: MongoSagas, observer: RecordingObserver, settings: SagaSettings = SETTINGS, *, crash: bool = False
) -> AsyncIterator[None]:
    """Run a worker; at the end it is asked to stop, or it is gone at once and leaves everything as it is."""
    worker = SagaWorker(store, SagaRegistry(_saga()), outrider.stage, settings, observer)
    task = asyncio.create_task(worker.run())
    try:
        yield
    finally:
        if crash:
            task.cancel()
        worker.stop()
        await asyncio.wait([task])


async def _start(client: AsyncMongoClient[Any]) -> None:
    saga = _saga()
    for number in range(ORDERS):
        order = Order(f"A-{number}", rejected=number % 3 == 0)
        async with client.start_session() as session, await session.start_transaction():
            await saga.start(session, order, correlation_id=order.order_id)


async def _ended(sagas: MongoSagas) -> int:
    counts = await sagas.admin.counts()
    return counts["completed"] + counts["compensated"] + counts["failed"]


async def _until_ended(sagas: MongoSagas, count: int) -> None:
    """Wait until so many have ended; the workers run beside, and a fact that was lost is told by nobody."""
    async with asyncio.timeout(90):
        while await _ended(sagas) < count:  # noqa: ASYNC110
            await asyncio.sleep(0.02)


async def _check_the_books(client: AsyncMongoClient[Any], sagas: MongoSagas) -> None:
    found: dict[str, dict[str, list[int]]] = defaultdict(lambda: defaultdict(list))
    lines = await client[SHOP]["ledger"].find({"account": {"$exists": True}}).sort("_id").to_list()
    for line in lines:
        found[line["order"]][line["account"]].append(line["amount"])
    expected = {f"A-{number}": COMPENSATED if number % 3 == 0 else FINE for number in range(ORDERS)}
    assert found == expected
    till = await client[SHOP]["account"].find_one({"_id": "till"})
    assert till == {"_id": "till", "balance": sum(books is FINE for books in expected.values())}
    staged = [json.loads(row["payload"]) for row in await client["outrider"]["outbox"].find().to_list()]
    written = [{"order": line["order"], "line": f"{line['account']} {line['amount']}"} for line in lines]
    assert sorted(map(str, staged)) == sorted(map(str, written))
    for saga in await sagas.admin.find(SagaCriteria(limit=ORDERS)):
        assert saga.status == ("compensated" if json.loads(saga.state)["rejected"] else "completed")


async def _attempts(sagas: MongoSagas) -> set[int]:
    """Return how often the steps of all sagas were tried."""
    found = await sagas.admin.find(SagaCriteria(limit=ORDERS))
    shown = [await sagas.admin.show(saga.saga_id) for saga in found]
    return {entry.attempts for record in shown if record for entry in record.journal}


@pytest.mark.parametrize("fault", FAULTS)
async def test_every_effect_happens_exactly_once_and_who_lost_a_race_is_not_charged(
    client: AsyncMongoClient[Any], mongo_default: str, fault: str
) -> None:
    await _start(client)
    app_name, observer, watching = f"saga-{uuid4().hex[:8]}", RecordingObserver(), MongoSagas.over(client)
    async with (
        AsyncMongoClient[Any](mongo_default, appname=app_name) as first,
        AsyncMongoClient[Any](mongo_default, appname=app_name) as second,
        _failing(client, app_name, FAULTS[fault]),
        _working(MongoSagas.over(first), observer),
        _working(MongoSagas.over(second), observer),
    ):
        await _until_ended(watching, ORDERS)
    await _check_the_books(client, watching)
    assert await _attempts(watching) == {1}
    assert {fact.status for fact in observer.of(SagaStepFailed)} == {"rejected"}
    if fault == "nothing":
        # Losing a race is no trouble with the store.
        assert observer.of(SagaWorkerUnavailable) == []


async def test_what_a_worker_leaves_when_it_is_gone_is_done_once_by_another(
    client: AsyncMongoClient[Any], mongo_default: str
) -> None:
    await _start(client)
    watching, observer = MongoSagas.over(client), RecordingObserver()
    async with AsyncMongoClient[Any](mongo_default) as other, _working(watching, observer, SHORT):
        async with _working(MongoSagas.over(other), observer, SHORT, crash=True):
            await _until_ended(watching, ORDERS // 3)
        # The other worker has what is left, as soon as the leases end.
        await _until_ended(watching, ORDERS)
    await _check_the_books(client, watching)


async def test_a_commit_that_nobody_heard_of_is_not_done_again(client: AsyncMongoClient[Any]) -> None:
    await _start(client)
    watching, observer = MongoSagas.over(client), RecordingObserver()
    async with _working(UnheardSagas.over(client), observer), _working(UnheardSagas.over(client), observer):
        await _until_ended(watching, ORDERS)
    await _check_the_books(client, watching)
    assert observer.of(SagaNeedsAttention) == []
