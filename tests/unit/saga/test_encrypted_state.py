"""Encrypted states: values that were moved or changed, states that cannot be encrypted, and kept replies."""

from __future__ import annotations

import json
from dataclasses import dataclass, field, replace
from typing import Any
from uuid import uuid4

import pytest

from outrider import Event
from outrider.app import Outbox
from outrider.errors import InvalidEvent, InvalidPayload, KeyMissing
from outrider.payload import Payloads
from outrider.privacy import DataKey, FieldEncryption, KeyRing
from outrider.saga import Participant, Saga, SagaRegistry
from outrider.saga.model import JournalEntry, Phase, SagaChange, Status, StepStatus
from outrider.saga.participant import CommandOutcome
from outrider.saga.state.encryption import encrypt_new, encrypt_turn, open_record, without_encrypted_data
from outrider.stores.memory import MemorySagas, MemoryStore
from outrider.testing import ManualClock, SagaHarness
from tests.support.key_rings import ListedKeys

CANARY = "ann@example.com"


@dataclass
class Order:
    email: Any
    total: int = 12
    seen: list[str] = field(default_factory=list)


def payloads(*keys: DataKey) -> Payloads:
    sensitive = {"stock.reserved": ["person"]}
    ring = KeyRing(ListedKeys(*keys))
    return Payloads(encryption=FieldEncryption(keys=ring, sensitive=sensitive, sagas={"order": ["email", "seen"]}))


KEY = DataKey.new("first")


def order_saga(version: int = 1) -> Saga[Order]:
    saga = Saga("order", Order, version=version)

    @saga.call()
    async def look(context: Any) -> None:
        context.state.seen.append(context.state.email)

    saga.wait("parcel.collected")
    return saga


def running(saga: Saga[Order], payloads: Payloads | None = None) -> tuple[SagaHarness, MemorySagas]:
    clock = ManualClock()
    store = MemorySagas(MemoryStore(clock=clock))
    return SagaHarness(SagaRegistry(saga, payloads=payloads), store, clock=clock), store


async def waiting(harness: SagaHarness, saga: Saga[Order], email: Any = CANARY, correlation_id: str = "A-7") -> Any:
    saga_id = await harness.start(saga, Order(email), correlation_id)
    record = await harness.store.admin.show(saga_id)
    assert record is not None
    return record


async def test_a_state_is_encrypted_from_its_start_and_open_in_the_test_harness() -> None:
    saga = order_saga()
    harness = SagaHarness(SagaRegistry(saga, payloads=payloads(KEY)))
    record = await waiting(harness, saga)
    stored = json.loads(record.instance.state)
    assert (set(stored["email"]), stored["total"]) == ({"$encrypted", "key", "nonce", "data"}, 12)
    assert (await harness.saga("A-7")).state == Order(CANARY, seen=[CANARY])


@pytest.mark.parametrize("change", ["another saga", "another type", "another field", "changed"])
async def test_a_value_that_was_moved_or_changed_does_not_open(change: str) -> None:
    saga, cipher = order_saga(), payloads(KEY)
    harness = SagaHarness(SagaRegistry(saga, payloads=cipher))
    record = await waiting(harness, saga)
    instance, stored = record.instance, json.loads(record.instance.state)
    if change == "another saga":
        instance = replace(instance, saga_id=uuid4())
    elif change == "another type":
        instance = replace(instance, saga_type="refund")
    elif change == "another field":
        stored["seen"] = stored["email"]
    else:
        data = stored["email"]["data"]
        stored["email"]["data"] = ("B" if data[0] == "A" else "A") + data[1:]
    record = record._replace(instance=replace(instance, state=json.dumps(stored).encode()))
    with pytest.raises(InvalidPayload, match=r"state\.\w+: it does not open with the key first"):
        open_record(cipher, record)


async def test_a_saga_whose_state_was_moved_stops_for_an_operator_and_keeps_its_state() -> None:
    saga = order_saga()
    harness, store = running(saga, payloads(KEY))
    first, second = await waiting(harness, saga), await waiting(harness, saga, correlation_id="A-8")
    row = store.tables.sagas.rows[second.instance.saga_id]
    assert row.instance is not None
    row.instance = replace(row.instance, state=first.instance.state)
    await harness.event("parcel.collected", correlation_id="A-8")
    after = await harness.store.admin.show(second.instance.saga_id)
    assert after is not None
    assert (after.instance.status, after.instance.state) == (Status.FAILED, first.instance.state)
    assert after.instance.last_error.startswith("what is stored of it does not open: state.email: it does not open")
    await harness.event("parcel.collected", correlation_id="A-7")
    assert (await harness.saga("A-7")).status is Status.COMPLETED


async def test_a_state_that_was_stored_as_plain_text_is_encrypted_by_the_next_turn() -> None:
    saga = order_saga()
    plain, store = running(saga)
    record = await waiting(plain, saga)
    assert CANARY.encode() in record.instance.state
    harness = SagaHarness(SagaRegistry(saga, payloads=payloads(KEY)), store, clock=plain.clock)
    await harness.event("parcel.collected", correlation_id="A-7")
    after = await harness.store.admin.show(record.instance.saga_id)
    assert (after.instance.status, CANARY.encode() in after.instance.state) == (Status.COMPLETED, False)


@pytest.mark.parametrize(
    ("email", "keys", "problem"),
    [
        (CANARY, (), r"state\.email: it must be encrypted, and the list has no key"),
        ({"$encrypted": 1}, (KEY,), r"state: it has the member \$encrypted, which is reserved"),
    ],
)
def test_a_saga_that_cannot_be_encrypted_is_not_started(email: Any, keys: Any, problem: str) -> None:
    with pytest.raises(InvalidEvent, match=problem) as caught:
        encrypt_new(payloads(*keys), order_saga().new(Order(email), "A-7"))
    assert CANARY not in str(caught.value)


def test_a_start_through_an_outbox_encrypts_the_state() -> None:
    class Recorder(Outbox):
        def perform_sync(self, conn: Any, operation: str, *arguments: Any, instead: str = "") -> Any:
            conn.extend(arguments)
            return True

    started: list[Any] = []
    order_saga().start_sync(started, Order(CANARY), correlation_id="A-7", outbox=Recorder(payloads=payloads(KEY)))
    assert CANARY.encode() not in started[0].state


async def test_an_explanation_does_without_journal_data_that_does_not_open() -> None:
    saga, cipher = order_saga(), payloads(KEY)
    record = await waiting(SagaHarness(SagaRegistry(saga, payloads=cipher)), saga)
    entry = JournalEntry("pack", Phase.ACTION, StepStatus.STARTED, 1, data=json.dumps([CANARY]))
    change = encrypt_turn(cipher, SagaChange(open_record(cipher, record).instance, [entry]), (), ()).change
    stored = record._replace(journal=tuple(change.entries), instance=change.instance)
    assert CANARY not in repr(stored)
    assert open_record(cipher, stored).journal[0].data == '["ann@example.com"]'
    assert without_encrypted_data(stored).journal[0].data is None
    moved = stored._replace(journal=(replace(stored.journal[0], step="other"),))
    with pytest.raises(InvalidPayload, match="the data of other: it does not open"):
        open_record(cipher, moved)
    with pytest.raises(KeyMissing, match="state: it is encrypted, and this process has no keys"):
        open_record(None, stored)


async def test_a_kept_reply_is_encrypted_and_repeated_as_it_was() -> None:
    _, store = running(order_saga())
    stock = Participant("stock", outbox=Outbox(payloads=payloads(KEY)))
    headers = {"saga_key": f"{uuid4()}:reserve", "saga_phase": "action"}
    command = Event("stock.reserve", {}, headers=headers, event_id=uuid4())
    outcomes, reply = [], Event("stock.reserved", {"person": CANARY, "shelf": 3})
    for _ in range(2):
        async with store.transaction() as tx:
            outcomes.append(await stock.execute(tx, command, lambda *_: reply))
    assert outcomes == [CommandOutcome.DONE, CommandOutcome.REPEATED]
    [passages] = store.tables.participants.rows.values()
    assert "stock.reserved" in repr(passages)
    assert CANARY not in repr(passages)
