"""Sagas on MongoDB beyond the contract: real races, deliveries during a save, sessions of both kinds, wake-ups."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import suppress
from dataclasses import replace
from typing import Any
from uuid import UUID

import pymongo
import pytest
from pymongo import AsyncMongoClient
from pymongo.errors import DuplicateKeyError, OperationFailure

from outrider import app
from outrider.drivers import pymongo as driver
from outrider.errors import ConcurrencyError, NotInTransaction, Permanent, Transient, UsageError
from outrider.saga.model import NewSagaMessage, Phase, SagaChange
from outrider.stores.mongo import MongoSchema
from outrider.stores.mongo.saga import MongoSagas
from outrider.testing.saga_harness import claim_of, new_saga, reply

pytestmark = pytest.mark.mongo

ORDER = [("order", 1)]
WRITE_CONFLICT = 112


@pytest.fixture
async def sagas(mongo_url: str, mongo_schema: str) -> AsyncIterator[MongoSagas]:
    sagas = await MongoSagas.open(mongo_url, schema=mongo_schema)
    yield sagas
    await sagas.close()


@pytest.fixture
async def client(mongo_url: str) -> AsyncIterator[AsyncMongoClient[Any]]:
    """A client as an application has one."""
    async with AsyncMongoClient[Any](mongo_url) as client:
        yield client


async def _start(sagas: MongoSagas, count: int) -> list[UUID]:
    made = [new_saga(f"A-{number}") for number in range(count)]
    async with sagas.transaction() as tx:
        for saga in made:
            assert await sagas.start(tx, saga)
    return [saga.saga_id for saga in made]


async def _deliver(sagas: MongoSagas, *messages: NewSagaMessage) -> int:
    async with sagas.transaction() as tx:
        return await sagas.deliver(tx, messages)


async def test_a_message_committed_while_its_saga_is_being_saved_is_found(sagas: MongoSagas) -> None:
    """A delivery that commits after the save is in the contract. Neither transaction waits for the other."""
    await _start(sagas, 1)
    [record] = await sagas.claim("ann", ORDER, limit=1, lease_seconds=60)
    async with sagas.transaction() as tx, asyncio.timeout(10):
        loaded = await sagas.load(tx, record.instance.saga_id, for_update=True)
        assert loaded is not None
        assert await _deliver(sagas, reply(record.instance.saga_id)) == 1
        await sagas.save(tx, claim_of(record), SagaChange(loaded.instance, release=True), 60)
    assert loaded.messages == ()
    [again] = await sagas.claim("bob", ORDER, limit=1, lease_seconds=60)
    assert len(again.messages) == 1


async def test_no_message_is_lost_between_writers_and_a_worker_that_saves_all_the_time(sagas: MongoSagas) -> None:
    [saga_id] = await _start(sagas, 1)
    messages = [reply(saga_id) for _ in range(60)]
    read: list[UUID] = []
    message_row = asyncio.Event()

    async def deliver_all() -> None:
        for first in range(0, 60, 3):
            await asyncio.gather(*(_deliver(sagas, message) for message in messages[first : first + 3]))
        message_row.set()

    async def read_all() -> None:
        while not message_row.is_set() or len(read) < 60:
            for record in await sagas.claim("ann", ORDER, limit=1, lease_seconds=60):
                read.extend(message.event_id for message in record.messages)
                taken = [message.message_id for message in record.messages]
                async with sagas.transaction() as tx:
                    await sagas.save(tx, claim_of(record), SagaChange(record.instance, taken=taken, release=True), 60)

    async with asyncio.timeout(60):
        await asyncio.gather(deliver_all(), read_all())
    assert sorted(read) == sorted(message.event_id for message in messages)


async def test_a_save_whose_transaction_began_before_another_claim_writes_nothing(
    sagas: MongoSagas, mongo_schema: str
) -> None:
    """The transaction still sees the old owner; the server rejects the write, and the next load shows the owner."""
    await _start(sagas, 1)
    [late] = await sagas.claim("ann", ORDER, limit=1, lease_seconds=0)

    async def save_late() -> None:
        async with sagas.transaction() as tx:
            await tx.session.client[mongo_schema]["business"].find_one({}, session=tx.session)
            assert len(await sagas.claim("bob", ORDER, limit=1, lease_seconds=60)) == 1
            await sagas.save(tx, claim_of(late), SagaChange(late.instance), 60)

    with pytest.raises(Transient) as lost:
        await save_late()
    assert not isinstance(lost.value, ConcurrencyError)
    with pytest.raises(ConcurrencyError):
        async with sagas.transaction() as tx:
            await sagas.save(tx, claim_of(late), SagaChange(late.instance), 60)
    shown = await sagas.admin.show(late.instance.saga_id)
    assert shown is not None
    assert (shown.instance.owner, shown.instance.version) == ("bob", 0)


async def test_a_renewal_beside_an_open_turn_does_not_keep_it_from_saving(sagas: MongoSagas) -> None:
    await _start(sagas, 1)
    [record] = await sagas.claim("ann", ORDER, limit=1, lease_seconds=60)
    async with sagas.transaction() as tx:
        loaded = await sagas.load(tx, record.instance.saga_id)
        assert loaded is not None
        assert await sagas.renew([claim_of(record)], 600) == {record.instance.saga_id}
        await sagas.save(tx, claim_of(record), SagaChange(loaded.instance), 60)


async def test_a_locked_saga_costs_the_others_nothing(sagas: MongoSagas) -> None:
    ids = await _start(sagas, 20)
    async with sagas.transaction() as tx:
        assert await sagas.load(tx, ids[7], for_update=True)
        taken = await sagas.claim("ann", ORDER, limit=20, lease_seconds=60)
        assert {record.instance.saga_id for record in taken} == set(ids) - {ids[7]}
        assert len(await sagas.renew([claim_of(record) for record in taken], 600)) == 19
    [last] = await sagas.claim("ann", ORDER, limit=20, lease_seconds=60)
    assert last.instance.saga_id == ids[7]


async def test_an_application_works_through_a_session_of_either_kind(
    mongo_url: str, sagas: MongoSagas, client: AsyncMongoClient[Any], mongo_schema: str
) -> None:
    def write(session: Any) -> None:
        assert driver.run(session, "start_saga", (new_saga("sync"),), mongo_schema) is True
        assert driver.run(session, "deliver_messages", ([reply(new_saga("sync").saga_id)],), mongo_schema) == 1
        assert driver.run(session, "participant_enter", ("stock", "k", Phase.ACTION), mongo_schema).fresh
        driver.run(session, "participant_save_reply", ("stock", "k", Phase.ACTION, b'"yes"'), mongo_schema)

    def write_in_a_thread() -> None:
        with pymongo.MongoClient[Any](mongo_url) as plain, plain.start_session() as session:
            with pytest.raises(NotInTransaction, match="with_transaction"):
                driver.run(session, "participant_enter", ("stock", "k", Phase.ACTION), mongo_schema)
            session.with_transaction(write)

    await asyncio.to_thread(write_in_a_thread)
    async with client.start_session() as session, await session.start_transaction():
        assert await driver.run(session, "start_saga", (new_saga("sync"),), mongo_schema) is False
        entered = await driver.run(session, "participant_enter", ("stock", "k", Phase.ACTION), mongo_schema)
    assert (entered.fresh, entered.reply) == (False, b'"yes"')
    [record] = await sagas.claim("ann", ORDER, limit=9, lease_seconds=60)
    assert (record.instance.correlation_id, len(record.messages)) == ("sync", 1)


async def test_a_conflict_passes_to_the_application_with_its_label(
    client: AsyncMongoClient[Any], sagas: MongoSagas, mongo_schema: str
) -> None:
    async with client.start_session() as first, client.start_session() as second:
        await first.start_transaction()
        await second.start_transaction()
        assert await driver.run(first, "start_saga", (new_saga(),), mongo_schema)
        with pytest.raises(OperationFailure) as rejected:
            await driver.run(second, "start_saga", (new_saga()._replace(saga_id=UUID(int=1)),), mongo_schema)
        await first.commit_transaction()
    assert rejected.value.code == WRITE_CONFLICT
    assert rejected.value.has_error_label("TransientTransactionError")
    # Which is what makes the driver's own helper run the whole transaction again.
    async with client.start_session() as session:
        again = await session.with_transaction(lambda s: driver.run(s, "start_saga", (new_saga(),), mongo_schema))
    assert again is False


async def test_a_step_that_swallows_an_error_of_the_server_is_reported(
    client: AsyncMongoClient[Any], sagas: MongoSagas, mongo_schema: str
) -> None:
    """The server has ended the transaction by then. Nothing of the turn is kept, and trying again would not help."""
    await client[mongo_schema]["business"].insert_one({"_id": 1})
    await _start(sagas, 1)
    [record] = await sagas.claim("ann", ORDER, limit=1, lease_seconds=60)

    async def careless(run: None, session: Any) -> None:
        with suppress(DuplicateKeyError):
            await session.client[mongo_schema]["business"].insert_one({"_id": 1}, session=session)

    async def take_a_turn() -> None:
        async with sagas.transaction() as tx:
            loaded = await sagas.load(tx, record.instance.saga_id, for_update=True)
            assert loaded is not None
            await tx.call(careless, None)
            await sagas.save(tx, claim_of(record), SagaChange(loaded.instance), 60)

    with pytest.raises(Permanent, match="look before you write"):
        await take_a_turn()
    shown = await sagas.admin.show(record.instance.saga_id)
    assert shown is not None
    assert shown.instance.version == 0


async def test_text_that_looks_like_an_expression_is_kept_as_it_is(sagas: MongoSagas) -> None:
    await _start(sagas, 1)
    [record] = await sagas.claim("ann", ORDER, limit=1, lease_seconds=60)
    odd = replace(record.instance, last_error="$owner", current_step="$$NOW", state=b'"$state"')
    async with sagas.transaction() as tx:
        await sagas.save(tx, claim_of(record), SagaChange(odd), 60)
    shown = await sagas.admin.show(record.instance.saga_id)
    assert shown is not None
    kept = shown.instance
    assert (kept.last_error, kept.current_step, kept.state) == ("$owner", "$$NOW", b'"$state"')


@pytest.mark.parametrize("what", ["a saga", "a message"])
async def test_a_commit_of_anybody_wakes_workers(
    client: AsyncMongoClient[Any], sagas: MongoSagas, mongo_schema: str, what: str
) -> None:
    await _start(sagas, 1)
    woken: asyncio.Queue[None] = asyncio.Queue()
    async with sagas.listen(lambda: woken.put_nowait(None)), asyncio.timeout(30):
        # One for each collection that is watched: the streams are open.
        await woken.get()
        await woken.get()
        async with client.start_session() as session, await session.start_transaction():
            if what == "a message":
                await driver.run(session, "deliver_messages", ([reply(new_saga("A-0").saga_id)],), mongo_schema)
            else:
                await driver.run(session, "start_saga", (new_saga("new"),), mongo_schema)
            assert woken.empty()
        await woken.get()


async def test_a_database_without_sagas_names_the_command_to_run(mongo_url: str) -> None:
    with pytest.raises(UsageError, match="outrider db migrate"):
        await app.open_sagas(mongo_url, schema="test_nothing_here")


async def test_a_saga_cannot_be_started_where_nothing_is_installed(client: AsyncMongoClient[Any]) -> None:
    async with client.start_session() as session, await session.start_transaction():
        with pytest.raises(UsageError, match="outrider db migrate"):
            await driver.run(session, "start_saga", (new_saga(),), "test_nothing_here")
    assert "test_nothing_here" not in await client.list_database_names()


async def test_migrating_twice_changes_nothing_and_the_server_rejects_what_no_saga_has(
    mongo_url: str, mongo_schema: str, client: AsyncMongoClient[Any]
) -> None:
    assert await MongoSchema(mongo_url, schema=mongo_schema).migrate() == []
    with pytest.raises(OperationFailure, match="validation"):
        await client[mongo_schema]["saga_instance"].insert_one({"saga_type": "order", "status": "lost"})
