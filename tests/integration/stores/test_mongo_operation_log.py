"""The operation log on MongoDB: changes by others are found, kills leave whole chains, and lines from before stay."""

from __future__ import annotations

import asyncio
import signal
import subprocess
import sys
from collections.abc import AsyncIterator
from datetime import UTC, datetime
from functools import partial
from typing import Any
from uuid import UUID, uuid4

import pytest
from bson import Int64
from pymongo import AsyncMongoClient
from pymongo.errors import WriteError

from outrider.drivers.pymongo import OPERATIONS
from outrider.operation_log import verify_operations
from outrider.outbox.model import Retention
from outrider.saga.audit import AuditCheck
from outrider.saga.model import Status
from outrider.stores.mongo import MongoSagas, MongoSchema, MongoStore, schema, staging
from outrider.stores.mongo.database import CODEC
from outrider.testing import ManualClock
from tests.contract.outbox.test_mongo import MongoHarness
from tests.contract.saga.test_mongo import MongoBench
from tests.support.audit_tampering import DAY_SECONDS, NOTE, end_audited_sagas, log_operations, problems

pytestmark = pytest.mark.mongo

LOG, HEAD, ANCHORS = "outbox_operation", "outbox_operation_head", "saga_audit_anchor"


@pytest.fixture
async def client(mongo_default: str) -> AsyncIterator[AsyncMongoClient[Any]]:
    async with AsyncMongoClient[Any](mongo_default) as client:
        yield client


@pytest.fixture
async def harness(
    mongo_default: str, client: AsyncMongoClient[Any], monkeypatch: pytest.MonkeyPatch
) -> AsyncIterator[MongoHarness]:
    clock = ManualClock(start=datetime.now(UTC))
    # Staging asks the server what time it is, and here the server's time is the test's.
    monkeypatch.setitem(OPERATIONS, "stage", partial(staging.stage, clock=clock))
    store = await MongoStore.open(mongo_default, clock=clock)
    yield MongoHarness(store, clock, client)
    await store.close()


@pytest.fixture
async def sagas(mongo_default: str, harness: MongoHarness) -> AsyncIterator[MongoSagas]:
    sagas = await MongoSagas.open(mongo_default, clock=harness.clock)
    yield sagas
    await sagas.close()


async def test_a_change_by_somebody_with_all_rights_is_found(
    harness: MongoHarness, sagas: MongoSagas, client: AsyncMongoClient[Any]
) -> None:
    await log_operations(harness)
    found = partial(problems, harness.store, sagas)
    assert await found() == []
    database = client.get_database("outrider", codec_options=CODEC)
    log, head = database[LOG], database[HEAD]
    lines = {line["line"]: line async for line in log.find()}
    [ended] = await head.find().to_list()
    await log.update_one({"line": 4}, {"$set": {"actor": "nobody"}})
    assert await found() == ["the line, or the line before, was changed or forged"]
    await log.replace_one({"line": 4}, lines[4])
    forged = {**lines[6], "_id": uuid4(), "line": Int64(7)}
    await log.insert_one(forged)
    assert "the line was forged: no command has written it" in await found()
    await log.update_one({"_id": forged["_id"]}, {"$set": {"line": Int64(6)}})
    assert "line 7 is missing, or a line was forged or moved" in await found()
    await log.delete_one({"_id": forged["_id"]})
    await log.delete_one({"line": 4})
    assert "line 4 is missing, or a line was forged or moved" in await found()
    await log.insert_one(lines[4])
    with pytest.raises(WriteError, match="failed validation"):
        await log.insert_one({**forged, "line": None})
    await log.insert_one({**forged, "line": None}, bypass_document_validation=True)
    assert await found() == ["1 lines have no number, and 0 are from before the chain"]
    await log.delete_one({"_id": forged["_id"]})
    await head.update_one({}, {"$set": {"hash": b"another"}})
    assert await found() == ["the line, or the head of the chain, was changed"]
    await head.replace_one({}, {**ended, "lines": Int64(5)})
    assert "the line was forged: no command has written it" in await found()
    await head.replace_one({}, ended)
    await log.delete_one({"line": 6})
    assert await found() == ["lines 6 to 6 were removed from the end"]
    await log.delete_many({})
    assert await found() == ["lines 3 to 6 were removed from the end"]
    await head.delete_many({})
    assert await found() == ["the head of the operation log was removed"]
    await database[ANCHORS].update_one({}, {"$set": {"lines": 6}})
    assert "the anchor, or the anchor before, was changed or forged" in await found()


async def test_lines_from_before_the_chain_stay_are_counted_and_leave_an_anchor(
    mongo_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    name = f"test_{uuid4().hex[:12]}"
    installer = MongoSchema(mongo_url, schema=name)
    with monkeypatch.context() as patch:
        patch.setattr(schema, "STEPS", [step for step in schema.STEPS if step.version < 9])
        await installer.migrate()
    store, sagas = await MongoStore.open(mongo_url, schema=name), await MongoSagas.open(mongo_url, schema=name)
    old = {"$add": ["$$NOW", -92 * DAY_SECONDS * 1000]}
    for number in range(3):
        facts = {"at": old, "actor": "ann", "verb": "replay", "event_id": UUID(int=number, version=4)}
        await store.database[LOG].update_one({"_id": number}, [{"$set": facts}], upsert=True)
    assert {step.version for step in await installer.migrate()} == {9}
    await store.operations.record("ann", "key_add", key="k1")
    report = await verify_operations(store.operations, AuditCheck())
    assert (report.lines, report.unchained, report.findings) == (1, 3, [])
    assert (await store.maintenance.prune(Retention())).operations == 3
    report = await verify_operations(store.operations, AuditCheck())
    assert (report.lines, report.unchained, await problems(store, sagas)) == (1, 0, [])
    await store.database.client.drop_database(name)
    await store.close()
    await sagas.close()


KILLED = """
import asyncio, os, signal, sys
from datetime import datetime
from pymongo import monitoring
from outrider.outbox.model import Retention
from outrider.stores.mongo import MongoSagas, MongoStore
from outrider.testing import ManualClock

url, start, kind = sys.argv[1], datetime.fromisoformat(sys.argv[2]), sys.argv[3]
anchors = []

class Killer(monitoring.CommandListener):
    def started(self, event):
        if event.command_name == "insert" and event.command["insert"] == "saga_audit_anchor":
            anchors.extend(event.command["documents"])

    def succeeded(self, event):
        last = anchors[-1] if anchors else {"chains": 1, "kind": "none"}
        if (last["kind"] if last["chains"] else "operations") == kind and event.command_name in ("insert", "delete"):
            os.kill(os.getpid(), signal.SIGKILL)

    def failed(self, event):
        pass

monitoring.register(Killer())

async def prune():
    clock = ManualClock(start=start)
    sagas = await MongoSagas.open(url, clock=clock)
    await sagas.prune(saga_days=1, audit_days=2, participant_memory_days=1)
    store = await MongoStore.open(url, clock=clock)
    await store.maintenance.prune(Retention())

asyncio.run(prune())
"""


@pytest.mark.parametrize("kind", ["close", "prune", "operations"])
async def test_a_process_that_is_killed_while_it_prunes_leaves_chains_that_verify(
    harness: MongoHarness, sagas: MongoSagas, mongo_default: str, client: AsyncMongoClient[Any], kind: str
) -> None:
    await log_operations(harness)
    bench = MongoBench(sagas, sagas, harness.clock, client, mongo_default)
    await end_audited_sagas(bench)
    await bench.advance(seconds=900_000)
    await bench.save(await bench.claim_one(), notes=[NOTE], status=Status.COMPLETED, release=True)
    await bench.advance(seconds=91 * DAY_SECONDS)
    arguments = [mongo_default, harness.clock.now().isoformat(), kind]
    killed = await asyncio.to_thread(subprocess.run, [sys.executable, "-c", KILLED, *arguments], check=False)
    assert killed.returncode == -signal.SIGKILL
    # The transaction of the dead process is still open, and shows nothing of what it did.
    assert await problems(harness.store, sagas) == []
    assert (await verify_operations(harness.store.operations, AuditCheck())).lines == 4
    # The server ends it after transactionLifetimeLimitSeconds, or at once by command.
    await client.admin.command("killAllSessions", [])
    assert (await harness.store.maintenance.prune(Retention())).operations == 4
    pruned = await sagas.prune(saga_days=1, audit_days=2, participant_memory_days=1)
    assert pruned.notes == (0 if kind == "operations" else 9)
    assert await problems(harness.store, sagas) == []
