"""The documented role of workers on a MongoDB that checks rights: everything works, and the server keeps the logs."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from pymongo import AsyncMongoClient
from pymongo.errors import OperationFailure
from typer.testing import CliRunner

import outrider
from outrider.brokers.base import Confirmed, PublishResult, Rejected
from outrider.cli import app
from outrider.event import DeadLetterReason, OnDeadLetter
from outrider.inbox.inbox import Inbox
from outrider.inbox.model import InboxCriteria
from outrider.outbox.model import Criteria, Retention
from outrider.outbox.relay import Relay
from outrider.outbox.settings import RelaySettings
from outrider.saga import Saga, SagaRegistry, SagaSettings, SagaWorker, StepContext
from outrider.saga.model import Status
from outrider.stores.mongo import MongoInbox, MongoSagas, MongoSchema, MongoStore
from outrider.testing import RecordingObserver
from outrider.testing.fakes import MemoryBroker
from outrider.testing.harness import delivery
from outrider.testing.servers.mongo import MongoServer
from tests.support.audit_tampering import problems

pytestmark = pytest.mark.mongo

USER, PASSWORD = "shop", "not-a-secret"

LOGS = ("saga_audit_log", "saga_audit_anchor", "saga_audit_head", "outbox_operation")

UNAUTHORIZED = 13


@dataclass
class Order:
    """The state of the sagas of these tests."""

    order_id: str


@pytest.fixture(scope="module")
def server() -> Iterator[MongoServer]:
    with MongoServer(authorization=True) as server:
        yield server


@pytest.fixture
async def administrator(server: MongoServer) -> AsyncIterator[AsyncMongoClient[Any]]:
    """The installed collections, and a user with the role of the documentation."""
    page = (Path(__file__).parents[3] / "docs/how-to/audit.md").read_text()
    [role] = [json.loads(text.removeprefix("json")) for text in page.split("```") if '"createRole"' in text]
    await MongoSchema(server.url).migrate()
    async with AsyncMongoClient[Any](server.url) as client:
        await client["outrider"].command(role)
        granted = [{"role": role["createRole"], "db": "outrider"}, {"role": "readWrite", "db": "shop"}]
        await client.admin.command("createUser", USER, pwd=PASSWORD, roles=granted)
        yield client
        await client.admin.command("dropUser", USER)
        await client["outrider"].command("dropRole", role["createRole"])
        await client.drop_database("outrider")


@pytest.fixture
def url(server: MongoServer, administrator: object) -> str:
    return server.url_of(USER, PASSWORD)


def _saga() -> Saga[Order]:
    order = Saga("order", Order)

    @order.local()
    async def create(run: StepContext[Order], session: Any) -> None:
        await session.client["shop"]["orders"].insert_one({"_id": run.state.order_id}, session=session)
        run.stage(outrider.Event("order.placed", {"order_id": run.state.order_id}, topic="orders"))

    @create.compensate()
    async def cancel(run: StepContext[Order], session: Any) -> None: ...

    @order.call()
    async def ship(run: StepContext[Order]) -> None: ...

    return order


async def _run_sagas(url: str, client: AsyncMongoClient[Any], count: int) -> MongoSagas:
    sagas, saga = await MongoSagas.open(url), _saga()
    for number in range(count):
        async with client.start_session() as session, await session.start_transaction():
            await saga.start(session, Order(f"A-{number}"), correlation_id=f"A-{number}")
    worker = SagaWorker(sagas, SagaRegistry(saga), outrider.stage, SagaSettings(), RecordingObserver())
    async with sagas.listen(lambda: None):
        while await worker.run_once():
            await worker.rest()
    return sagas


async def _relay_all(store: MongoStore, broker: MemoryBroker) -> Relay:
    settings = RelaySettings(workers=1, on_dead_letter=OnDeadLetter.SKIP)
    relay = Relay(store, broker, settings, observer=RecordingObserver())
    await relay.heartbeat()
    async with store.listen(lambda: None):
        while await relay.run_once():
            pass
    return relay


async def test_relay_consumer_sagas_and_operators_work_with_the_documented_role_and_the_server_keeps_the_logs(
    url: str, administrator: AsyncMongoClient[Any]
) -> None:
    async with AsyncMongoClient[Any](url) as client:
        sagas = await _run_sagas(url, client, 3)
        assert (await sagas.admin.counts())[Status.COMPLETED] == 3
        store, rejected = await MongoStore.open(url), [True]

        def answer(_: object) -> PublishResult:
            return Rejected("no") if rejected else Confirmed()

        broker = MemoryBroker(script=answer)
        relay = await _relay_all(store, broker)
        dead = [row["event_id"] for row in await store.admin.dead_letters(Criteria())]
        assert len(dead) == 3
        rejected.clear()
        assert await store.admin.replay(dead[:2], "ann") == 2
        assert await store.admin.discard(dead[2:], "ann") == 1
        await relay.run_maintenance()
        while await relay.run_once():
            pass
        assert len(broker.log) == 2
        inbox = await MongoInbox.open(url)
        service = Inbox(inbox)
        poison = delivery(1)._replace(body=b"{")
        await service.process(poison, _handle, consumer="billing")
        [letter] = await inbox.admin.dead_letters(InboxCriteria())
        assert letter["reason"] == DeadLetterReason.POISON_MESSAGE
        assert await inbox.admin.discard([letter["id"]], "ann") == 1
        # The sagas are removed, and their lines stay: this role may not remove them.
        pruned = await sagas.prune(saga_days=0, audit_days=0, participant_memory_days=0)
        assert (pruned.sagas, pruned.notes) == (3, 0)
        assert (await store.maintenance.prune(Retention(operation_days=-1))).operations == 0
        for name in LOGS:
            assert await client["outrider"][name].find_one({}) is not None
            for change in ("update_many", "delete_many", "drop", "rename"):
                await _is_refused(client, name, change)
        await _is_refused(client, "outbox_operation_head", "delete_many")
        assert await problems(store, sagas) == []
        # Work goes on.
        again = await _run_sagas(url, client, 0)
        assert await store.admin.replay(dead, "ann") == 0
        for each in (store, sagas, inbox, again):
            await each.close()


async def _is_refused(client: AsyncMongoClient[Any], name: str, change: str) -> None:
    collection = client["outrider"][name]
    changes: dict[str, Callable[[], Awaitable[Any]]] = {
        "update_many": lambda: collection.update_many({}, {"$set": {"actor": "eve"}}),
        "delete_many": lambda: collection.delete_many({}),
        "drop": lambda: client["outrider"].command("drop", name),
        "rename": lambda: collection.rename("other"),
    }
    with pytest.raises(OperationFailure) as refused:
        await changes[change]()
    assert refused.value.code == UNAUTHORIZED


async def _handle(event: object, session: object) -> None:
    """Handle nothing."""


def test_the_commands_for_relays_and_the_audit_log_run_with_the_documented_role(
    url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OUTRIDER_STORE", url)
    monkeypatch.setenv("OUTRIDER_ACTOR", "ann")
    for command in (
        ["relay", "--until-empty", "--broker", "null://"],
        ["audit", "verify"],
        ["audit", "list", "--operations"],
        ["db", "status"],
    ):
        result = CliRunner().invoke(app, command)
        assert result.exit_code == 0, result.output
