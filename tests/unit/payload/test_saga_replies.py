"""Replies of an old version: a saga reads each of them as the current one, and its mailbox keeps what was received."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any
from uuid import uuid4

import pytest

from outrider import Event, InvalidEvent
from outrider.app import Outbox
from outrider.errors import InvalidPayload
from outrider.payload import Payloads
from outrider.saga import Participant, Saga, SagaRegistry
from outrider.saga.model import Status
from outrider.stores.memory import MemorySagas, MemoryStore
from outrider.testing import ManualClock
from outrider.testing.saga_harness import SagaHarness


@dataclass
class Order:
    order_id: str
    euros: int = 0
    parts: list[Any] = field(default_factory=list)


def cents_to_euros(payload: Any) -> Any:
    return {"order": payload["order_id"], "euros": payload["cents"] // 100}


PAYLOADS = Payloads(upcasters={"order.paid": {1: cents_to_euros}})


def paid_saga() -> Saga[Order]:
    saga = Saga("order", Order)

    @saga.wait("order.paid", correlate=lambda event: event.payload["order"]).on("order.paid")
    def paid(context: Any, reply: Any) -> None:
        context.state.euros = reply.payload["euros"]

    return saga


async def test_correlate_and_step_get_an_old_reply_as_the_current_version() -> None:
    saga = paid_saga()
    harness = SagaHarness(SagaRegistry(saga, payloads=PAYLOADS))
    await harness.start(saga, Order("A-7"), "A-7")
    assert await harness.event("order.paid", {"order_id": "A-7", "cents": 1200})
    found = await harness.saga("A-7")
    assert (found.status, found.state.euros) == (Status.COMPLETED, 12)


async def test_the_mailbox_keeps_the_reply_as_received_until_a_step_reads_it() -> None:
    saga = paid_saga()
    harness = SagaHarness(SagaRegistry(saga, payloads=PAYLOADS))
    async with harness.store.transaction() as tx:
        saga_id = await saga.start(tx, Order("A-7"), correlation_id="A-7", outbox=harness.outbox)
        old = Event("order.paid", {"order_id": "A-7", "cents": 700}, saga_id=str(saga_id), schema_version=1)
    async with harness.store.transaction() as tx:
        assert await harness._replies.deliver("order", old, tx)
    [message] = (await harness.store.admin.show(saga_id)).messages
    assert (message.body, message.schema_version) == (b'{"order_id": "A-7", "cents": 700}', "1")
    await harness.run()
    assert (await harness.saga("A-7")).state.euros == 7


async def test_a_reply_that_does_not_open_is_not_delivered() -> None:
    saga = paid_saga()
    harness = SagaHarness(SagaRegistry(saga, payloads=PAYLOADS))
    await harness.start(saga, Order("A-7"), "A-7")
    with pytest.raises(InvalidPayload, match="raised KeyError"):
        await harness.event("order.paid", {"cents": 1200})
    assert (await harness.saga("A-7")).status == Status.RUNNING


async def test_a_delivered_reply_that_no_longer_opens_fails_its_own_step_only() -> None:
    saga, clock = paid_saga(), ManualClock()
    store = MemorySagas(MemoryStore(clock=clock))
    old = SagaHarness(SagaRegistry(saga), store, clock=clock)
    async with old.store.transaction() as tx:
        saga_id = await saga.start(tx, Order("A-7"), correlation_id="A-7", outbox=old.outbox)
    async with old.store.transaction() as tx:
        assert await old._replies.deliver("order", Event("order.paid", {"order": "A-7"}, event_id=uuid4()), tx)
    new = SagaHarness(SagaRegistry(saga, payloads=PAYLOADS), store, clock=clock)
    await new.run()
    found = await store.admin.show(saga_id)
    assert found is not None
    assert "the upcaster of order.paid from version 1 to 2 raised KeyError" in str(found.journal[0].error)
    assert (await new.saga("A-7")).state.euros == 0


async def test_a_participant_answers_with_a_model_that_its_schema_checks() -> None:
    @dataclass
    class Reserved:
        reservation: str

    outbox = Outbox(payloads=Payloads({"stock.reserved": {1: Reserved}}))
    stock = Participant("stock", outbox=outbox)
    harness = SagaHarness(_requesting())
    await harness.start(harness_saga(harness), Order("A-7"), "A-7")
    [command] = harness.commands
    received = Event("stock.reserve", {}, headers=command.headers, saga_id=command.saga_id, event_id=command.event_id)

    async def reserve(event: Event, tx: Any) -> Event:
        return Event("stock.reserved", Reserved("R-1"))

    async def careless(event: Event, tx: Any) -> Event:
        return Event("stock.reserved", {})

    store = MemoryStore()
    with pytest.raises(InvalidEvent, match=r"payload\.reservation"):
        async with store.transaction() as tx:
            await stock.execute(tx, received, careless)
    for _ in range(2):
        async with store.transaction() as tx:
            await stock.execute(tx, received, reserve)
    payloads = {row.event.payload for row in store.tables.rows.values()}
    assert payloads == {b'{"reservation":"R-1"}'}


def _requesting() -> Saga[Order]:
    saga = Saga("order", Order)
    saga.request("stock.reserve", topic="stock", reply="stock.reserved")
    return saga


def harness_saga(harness: SagaHarness) -> Saga[Any]:
    return next(iter(harness.sagas))
