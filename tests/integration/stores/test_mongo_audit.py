"""The audit log on MongoDB: the role of the workers cannot change it, and changes by others are found."""

from __future__ import annotations

from collections.abc import AsyncIterator
from dataclasses import replace
from typing import Any
from uuid import uuid4

import pytest
from pymongo import AsyncMongoClient

from outrider.saga.audit import AuditCheck, verify
from outrider.saga.model import SagaChange, Status
from outrider.stores.mongo.database import CODEC
from outrider.stores.mongo.saga import MongoSagas
from outrider.testing.saga_harness import claim_of, new_saga
from tests.support.audit_tampering import NOTE

pytestmark = pytest.mark.mongo

LOG, ANCHORS, HEADS = "saga_audit_log", "saga_audit_anchor", "saga_audit_head"


@pytest.fixture
async def client(mongo_url: str) -> AsyncIterator[AsyncMongoClient[Any]]:
    async with AsyncMongoClient[Any](mongo_url) as client:
        yield client


@pytest.fixture
async def sagas(mongo_url: str, mongo_schema: str) -> AsyncIterator[MongoSagas]:
    """A saga that runs, with four lines, and a removed saga whose four lines are still there."""
    sagas = await MongoSagas.open(mongo_url, schema=mongo_schema)
    for correlation_id in ("gone", "runs"):
        async with sagas.transaction() as tx:
            await sagas.start(tx, new_saga(correlation_id))
        [record] = await sagas.claim("ann", [("order", 1)], limit=1, lease_seconds=60)
        async with sagas.transaction() as tx:
            loaded = await sagas.load(tx, record.instance.saga_id)
            assert loaded is not None
            change = SagaChange(loaded.instance, notes=[NOTE] * 3, at=loaded.now)
            if correlation_id == "gone":
                change = replace(change, instance=replace(loaded.instance, status=Status.COMPLETED), release=True)
            await sagas.save(tx, claim_of(record), change, 60)
        await sagas.prune(saga_days=0, audit_days=10, participant_memory_days=1)
    yield sagas
    await sagas.close()


async def _problems(sagas: MongoSagas) -> set[str]:
    return {finding.problem for finding in (await verify(sagas.audit, AuditCheck())).findings}


async def test_a_change_by_somebody_with_all_rights_is_found(
    sagas: MongoSagas, client: AsyncMongoClient[Any], mongo_schema: str
) -> None:
    assert await _problems(sagas) == set()
    database = client.get_database(mongo_schema, codec_options=CODEC)
    runs = {"line": 3}
    line = await database[LOG].find_one({"line": 4})
    assert line is not None
    changed = await database[LOG].update_many(runs, {"$set": {"actor": "nobody"}})
    assert changed.modified_count == 2
    assert await _problems(sagas) == {"the line, or the line before, was changed or forged"}
    await database[LOG].update_many(runs, {"$set": {"actor": "ann"}})
    await database[LOG].insert_one({**line, "_id": uuid4(), "number": line["number"] + 1, "line": 5})
    assert "the line was forged: its saga has not written it" in await _problems(sagas)
    await database[LOG].delete_many({"line": 5})
    await database[LOG].delete_many({"line": 4})
    assert await _problems(sagas) == {"lines 4 to 4 were removed from the end"}
    await database[LOG].delete_many({})
    assert await _problems(sagas) == {"all 4 lines were removed"}
    await database[HEADS].delete_many({})
    assert "the heads of the 1 chains that the anchor covers were changed or removed" in await _problems(sagas)
    await database[ANCHORS].update_one({}, {"$set": {"lines": 0}})
    assert "the anchor, or the anchor before, was changed or forged" in await _problems(sagas)
