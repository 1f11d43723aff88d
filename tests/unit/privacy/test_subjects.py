"""Subjects: the header of an event, the keys in memory, the events of sagas, and the event loop that goes on."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from uuid import UUID, uuid4

import pytest
from hypothesis import given
from hypothesis import strategies as st

from outrider import Event, InvalidEvent
from outrider.app import Outbox, stored_subject_keys
from outrider.errors import InvalidPayload, KeyMissing, KeysUnavailable, SubjectErased, UsageError
from outrider.event import Delivery
from outrider.outbox.validation import StagingRules, validate_edit, validate_events
from outrider.payload import PayloadFacts, Payloads
from outrider.privacy import DataKey, FieldEncryption, KeyRing, SubjectKeys
from outrider.privacy import subjects as subjects_module
from outrider.privacy.store import NewSubjectKey, WrappedSubjectKey
from outrider.saga import Participant, Saga, SagaRegistry
from outrider.saga.model import Status
from outrider.stores.memory import MemoryStore, MemorySubjectKeys
from outrider.telemetry.events import ErasedEventSkipped
from outrider.testing import ManualClock
from outrider.testing.saga_harness import SagaHarness
from outrider.wire import decode
from tests.support.key_rings import ListedKeys
from tests.support.memory_benches import MemoryHarness
from tests.unit.privacy.test_encryption import VALUES

ANN, BOB = "customer:1", "customer:2"
RING, MASTER = DataKey.new("ring"), DataKey.new("m1")
SENSITIVE = {"order.*": ["email"]}


class CountedKeys(MemorySubjectKeys):
    """A table of keys that counts its readings, and can be closed until a test opens it."""

    def __init__(self) -> None:
        super().__init__()
        self.readings, self.closed = 0, 0
        self.error: Exception | None = None
        self.gate = threading.Event()
        self.gate.set()

    async def subject_keys(self, subjects: Sequence[str], key_ids: Sequence[str]) -> list[WrappedSubjectKey]:
        self.readings += 1
        await asyncio.to_thread(self.gate.wait)
        if self.error is not None:
            raise self.error
        return await super().subject_keys(subjects, key_ids)

    async def close(self) -> None:
        self.closed += 1


@pytest.fixture
def table() -> CountedKeys:
    return CountedKeys()


@pytest.fixture
def subjects(table: CountedKeys) -> Iterator[SubjectKeys]:
    found = keys_of(table)
    yield found
    found.close()


def keys_of(table: MemorySubjectKeys, *master: DataKey) -> SubjectKeys:
    async def opening() -> MemorySubjectKeys:
        return table

    return SubjectKeys(opening, "the test", KeyRing(ListedKeys(*(master or (MASTER,)))))


def cipher(subjects: SubjectKeys | None) -> FieldEncryption:
    return FieldEncryption(keys=KeyRing(ListedKeys(RING)), sensitive=SENSITIVE, subjects=subjects)


def facts(subject: str | None = ANN, event_id: UUID | None = None) -> PayloadFacts:
    return PayloadFacts(event_id or UUID(int=7), "order.placed", 1, "orders", "A", subject)


def headers(event: Event) -> Any:
    [new] = validate_events([event], StagingRules()).plain
    return json.loads(new.headers)


@pytest.mark.parametrize(
    ("given", "kept"), [("customer:42", "customer:42"), (42, "42"), (UUID(int=1), str(UUID(int=1))), ("Zoë", "Zoë")]
)
def test_the_subject_travels_as_a_header_and_a_consumer_gets_it_back(given: Any, kept: str) -> None:
    named = headers(Event("order.placed", {}, subject=given))
    assert named == {"subject": kept}
    assert headers(Event("order.placed", {}, headers={"subject": kept})) == named
    assert headers(Event("order.placed", {}, subject=given, headers={"subject": kept})) == named
    said = {"message_id": str(uuid4()), "event_type": "order.placed", **named}
    received = decode(Delivery("orders", b"A", b"{}", {name: text.encode() for name, text in said.items()})).event
    assert received is not None
    assert received.subject == kept


def test_an_event_without_a_subject_has_none() -> None:
    assert headers(Event("order.placed", {})) == {}
    said = {"message_id": str(uuid4()), "event_type": "order.placed", "ce_subject": "A-7", "subject": ""}
    received = decode(Delivery("orders", b"A", b"{}", {name: text.encode() for name, text in said.items()})).event
    assert received is not None
    assert received.subject is None


@pytest.mark.parametrize(
    ("fields", "path"),
    [
        ({"subject": ""}, "subject"),
        ({"subject": "a\nb"}, "subject"),
        ({"subject": "a\0b"}, "subject"),
        ({"subject": "\ud800"}, "subject"),
        ({"subject": "x" * 401}, "subject"),
        ({"subject": True}, "subject"),
        ({"subject": ["a"]}, "subject"),
        ({"headers": {"subject": ""}}, "headers.subject"),
        ({"headers": {"subject": "a\x7fb"}}, "headers.subject"),
        ({"headers": {"subject": "ann"}, "subject": "bob"}, "headers.subject"),
    ],
)
def test_staging_refuses_a_bad_subject_with_the_path(fields: Any, path: str) -> None:
    with pytest.raises(InvalidEvent) as refused:
        headers(Event("order.placed", {}, **fields))
    assert refused.value.path == path
    with pytest.raises(InvalidEvent) as refused:
        validate_events([Event("order.placed", {}), Event("order.placed", {}, **fields)], StagingRules())
    assert refused.value.path == f"events[1].{path}"


@given(email=VALUES, subject=st.sampled_from([ANN, BOB]))
def test_any_value_survives_the_key_of_its_subject_and_opens_for_no_other(email: Any, subject: str) -> None:
    sealing, payload, other = SHARED, {"email": email, "n": 1}, BOB if subject == ANN else ANN
    sealed = json.loads(json.dumps(sealing.encrypt(facts(subject), payload)))
    assert sealing.plaintext_path(facts(subject), sealed) is None
    assert repr(sealing.decrypt(facts(subject), sealed)) == repr(payload)
    with pytest.raises(InvalidPayload, match="another subject"):
        sealing.decrypt(facts(other), sealed)
    with pytest.raises(InvalidPayload, match="another event or field"):
        sealing.decrypt(facts(subject, uuid4()), sealed)
    moved = {"email": sealing.encrypt(facts(other), payload)["email"], "n": 1}
    moved["email"]["key"] = sealed["email"]["key"]
    with pytest.raises(InvalidPayload, match="another event or field"):
        sealing.decrypt(facts(subject), moved)


SHARED = cipher(keys_of(MemorySubjectKeys()))


async def test_a_value_of_an_erased_subject_in_the_event_of_another_is_damaged_and_not_erased() -> None:
    keys = keys_of(MemorySubjectKeys())
    sealed = cipher(keys).encrypt(facts(ANN), {"email": "ann@example.com"})
    await keys.destroy(ANN)
    with pytest.raises(SubjectErased):
        cipher(keys).decrypt(facts(ANN), sealed)
    with pytest.raises(InvalidPayload, match="another subject") as refused:
        cipher(keys).decrypt(facts(BOB), sealed)
    assert not isinstance(refused.value, SubjectErased)
    keys.close()


def test_staging_refuses_what_an_erasure_leaves_of_a_payload() -> None:
    with pytest.raises(InvalidEvent, match="erasure leaves") as refused:
        validate_events([Event("order.placed", {"$erased": True})], StagingRules())
    assert refused.value.path == "payload"
    validate_events([Event("order.placed", {"$erased": True, "id": 7})], StagingRules())


def test_without_subjects_the_ring_encrypts_and_old_values_of_the_ring_still_open(subjects: SubjectKeys) -> None:
    sealed = cipher(None).encrypt(facts(), {"email": "a"})
    assert sealed["email"]["key"] == "ring"
    assert cipher(subjects).decrypt(facts(), sealed) == {"email": "a"}
    assert cipher(subjects).encrypt(facts(None), {"email": "a"})["email"]["key"] == "ring"
    own = cipher(subjects).encrypt(facts(), {"email": "a"})
    assert own["email"]["key"].startswith("s-")
    with pytest.raises(KeyMissing, match="which the list does not have"):
        cipher(None).decrypt(facts(), own)


def test_reencryption_brings_values_of_the_ring_to_the_key_of_the_subject_and_leaves_them_there(
    subjects: SubjectKeys, table: CountedKeys
) -> None:
    before, now = cipher(None), cipher(subjects)
    text = json.dumps(before.encrypt(facts(), {"email": "a", "n": 1.0}))
    assert not now.is_current(facts(), text)
    assert table.table == {}
    written = now.reencrypt(facts(), text)
    assert written is not None
    assert now.decrypt(facts(), json.loads(written)) == {"email": "a", "n": 1.0}
    assert json.loads(written)["email"]["key"] == next(iter(table.table))
    assert now.reencrypt(facts(), written) is None
    assert now.is_current(facts(), written)
    # The mailbox of a saga does not know the subject.
    assert now.reencrypt(facts(None), written) is None
    assert now.is_current(facts(None), text)


def test_a_key_is_read_once_and_then_kept_in_memory(subjects: SubjectKeys, table: CountedKeys) -> None:
    key = subjects.key_of(ANN)
    assert key is not None
    found = subjects.find(key.id)
    assert found is not None
    assert (found.key, subjects.key_of(ANN)) == (key, key)
    assert (table.readings, table.closed) == (2, 0)
    assert subjects.find("s-0000000000000000") is None
    assert subjects.find("s-0000000000000000") is None
    assert table.readings == 3


def test_memory_has_a_limit_and_forgets_the_key_that_was_not_used_for_the_longest_time(
    subjects: SubjectKeys, table: CountedKeys, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(subjects_module, "CACHED_MAX", 2)
    keys = {name: subjects.key_of(name) for name in (ANN, BOB)}
    assert subjects.key_of(ANN) == keys[ANN]
    assert subjects.key_of("customer:3") is not None
    before = table.readings
    assert subjects.key_of(ANN) == keys[ANN]
    assert table.readings == before
    assert subjects.key_of(BOB) == keys[BOB]
    assert table.readings > before
    assert len(subjects._keys) == len(subjects._live) == 2


async def test_staging_with_a_slow_table_of_keys_lets_the_event_loop_go_on(
    subjects: SubjectKeys, table: CountedKeys
) -> None:
    clock = ManualClock()
    store = MemoryStore(clock=clock)
    outbox = Outbox(payloads=Payloads(encryption=cipher(subjects)))
    table.gate.clear()

    async def stage() -> list[UUID]:
        return await MemoryHarness(store, clock).transact(
            lambda conn: outbox.stage(conn, Event("order.placed", {"email": "a"}, subject=ANN))
        )

    staging = asyncio.create_task(stage())
    ticks = 0
    while table.readings == 0 or ticks < 1_000:
        await asyncio.sleep(0)
        ticks += 1
    assert not staging.done()
    table.gate.set()
    [event_id] = await staging
    stored = await store.admin.event(event_id)
    assert stored["headers"] == {"subject": ANN}
    assert stored["payload"]["email"]["key"] in table.table


async def test_a_table_that_cannot_be_read_refuses_staging_clearly_and_is_opened_again_later(
    subjects: SubjectKeys, table: CountedKeys, monkeypatch: pytest.MonkeyPatch
) -> None:
    harness = MemoryHarness(MemoryStore(clock=(clock := ManualClock())), clock)
    outbox, event = Outbox(payloads=Payloads(encryption=cipher(subjects))), Event("order.placed", {"email": "a"})
    table.error = KeysUnavailable("the disk is full")
    with pytest.raises(KeysUnavailable, match=r"keys of subjects in the test.* cannot be read .the disk is full"):
        await harness.transact(lambda conn: outbox.stage(conn, Event("order.placed", {"email": "a"}, subject=ANN)))
    assert (table.readings, table.closed) == (1, 1)
    assert await harness.transact(lambda conn: outbox.stage(conn, event))
    table.error = None
    with pytest.raises(KeysUnavailable):
        subjects.key_of(ANN)
    assert table.readings == 1
    monkeypatch.setattr(subjects_module, "PAUSE_SECONDS", 0.0)
    assert subjects.key_of(ANN) is not None


async def test_the_key_is_stored_before_the_event_and_not_for_types_without_sensitive_fields(
    subjects: SubjectKeys, table: CountedKeys
) -> None:
    harness = MemoryHarness(MemoryStore(clock=(clock := ManualClock())), clock)
    outbox = Outbox(payloads=Payloads(encryption=cipher(subjects)))
    await harness.transact(lambda conn: outbox.stage(conn, Event("stock.moved", {"email": "a"}, subject=ANN)))
    assert table.table == {}

    async def roll_back(conn: Any) -> None:
        await outbox.stage(conn, Event("order.placed", {"email": "a"}, subject=ANN))
        raise LookupError

    with pytest.raises(LookupError):
        await harness.transact(roll_back)
    assert [key.subject for key in table.table.values()] == [ANN]


def test_without_a_master_key_nothing_is_read_and_staging_is_refused(table: CountedKeys) -> None:
    async def opening() -> CountedKeys:
        return table

    subjects = SubjectKeys(opening, "the test", KeyRing(ListedKeys()))
    with pytest.raises(InvalidEvent, match="email: it must be encrypted, and the table of the keys of subjects in"):
        cipher(subjects).encrypt(facts(), {"email": "a"})
    assert subjects.find("s-0000000000000000") is None
    assert table.readings == 0


def test_a_table_without_its_migration_or_of_no_store_is_named(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="names no store"):
        stored_subject_keys("ftp://shop", master=KeyRing(ListedKeys(MASTER)))
    subjects = stored_subject_keys(f"sqlite:///{tmp_path}/absent.db", master=KeyRing(ListedKeys(MASTER)))
    with pytest.raises(KeysUnavailable, match="run `outrider db migrate`"):
        subjects.key_of(ANN)
    subjects.close()


def test_the_payload_of_a_dead_letter_is_edited_under_the_key_of_its_subject(
    subjects: SubjectKeys, table: CountedKeys
) -> None:
    letter = {"event_type": "order.placed", "topic": "orders", "event_id": UUID(int=7), "headers": {"subject": ANN}}
    rules = StagingRules(payloads=Payloads(encryption=cipher(subjects)))
    edit = validate_edit(letter, rules, payload='{"email": "b"}')
    [key] = table.table.values()
    assert key.subject == ANN
    assert json.loads(edit.payload or "")["email"]["key"] == key.id
    with pytest.raises(InvalidEvent, match="belong to the subject that the event has"):
        validate_edit(letter, rules, headers={"subject": BOB})
    assert validate_edit(letter, rules, headers={"tenant": "blue"}).headers == {"tenant": "blue"}


@dataclass
class Order:
    order_id: str
    paid: bool = False


def order_saga() -> Saga[Order]:
    saga = Saga("order", Order)

    @saga.local()
    async def create(context: Any, tx: Any) -> None:
        context.stage(Event("order.created", {}), Event("courier.booked", {}, subject=BOB))

    return saga


async def start(at: SagaHarness, saga: Saga[Order], **options: Any) -> UUID:
    async with at.store.transaction() as tx:
        return await saga.start(tx, Order("A-7"), correlation_id="A-7", outbox=at.outbox, **options)


async def test_events_and_commands_of_a_saga_have_its_subject_unless_they_have_their_own() -> None:
    saga = order_saga()
    saga.request("stock.reserve", topic="stock", reply="stock.reserved")
    at = SagaHarness(SagaRegistry(saga))
    saga_id = await start(at, saga, subject=42)
    await at.run()
    assert (await at.store.admin.show(saga_id)).instance.subject == "42"
    assert [(event.event_type, event.subject) for event in at.store.staged] == [
        ("order.created", "42"),
        ("courier.booked", BOB),
        ("stock.reserve", "42"),
    ]


async def test_a_saga_without_a_subject_gives_its_events_none_and_a_bad_subject_is_refused() -> None:
    saga = order_saga()
    at = SagaHarness(SagaRegistry(saga))
    await start(at, saga)
    await at.run()
    assert [event.subject for event in at.store.staged] == [None, BOB]
    for bad in ("", "a\nb", True, 1.5):
        with pytest.raises(UsageError, match=r"starting order: .*subject"):
            saga.new(Order("A-8"), "A-8", subject=bad)


async def test_a_child_has_the_subject_of_its_parent() -> None:
    child = Saga("shipping", Order)

    @child.local()
    async def pack(context: Any, tx: Any) -> None:
        context.stage(Event("parcel.packed", {}))

    saga = Saga("order", Order)
    saga.child(child, name="ship", input=lambda state: Order(state.order_id))
    at = SagaHarness(SagaRegistry(saga, child))
    await start(at, saga, subject=ANN)
    await at.run()
    assert [(event.event_type, event.subject) for event in at.store.staged] == [("parcel.packed", ANN)]


async def test_the_reply_of_a_participant_has_the_subject_of_the_command_unless_it_has_its_own() -> None:
    store = MemoryStore(clock=ManualClock())
    participant, own = Participant("stock"), Event("stock.reserved", {}, subject=BOB)
    for number, reply in enumerate((Event("stock.reserved", {}), own)):
        said = {"saga_key": f"{UUID(int=number)}:reserve", "saga_phase": "action", "subject": ANN}
        command = Event("stock.reserve", {}, saga_id=str(UUID(int=number)), headers=said, subject=ANN, event_id=uuid4())
        for _ in range(2):
            async with store.transaction() as tx:
                await participant.execute(tx, command, lambda *_, reply=reply: reply)
    events = [json.loads(row.event.headers)["subject"] for row in store.tables.rows.values()]
    assert events == [ANN, ANN, BOB, BOB]


async def test_a_reply_of_an_erased_subject_is_dropped_and_told(subjects: SubjectKeys) -> None:
    saga = Saga("order", Order)

    @saga.wait("order.paid", correlate=lambda event: event.payload["order"]).on("order.paid")
    def paid(context: Any, reply: Any) -> None:
        context.state.paid = True

    sealing = FieldEncryption(keys=KeyRing(ListedKeys(RING)), sensitive={"order.paid": ["card"]}, subjects=subjects)
    at = SagaHarness(SagaRegistry(saga, payloads=Payloads(encryption=sealing)))
    await start(at, saga, subject=ANN)
    event_id = uuid4()
    about = PayloadFacts(event_id, "order.paid", 1, "orders", None, ANN)
    await sealing.load([("order.paid", ANN)], [])
    sealed = sealing.encrypt(about, {"order": "A-7", "card": "4111"})
    assert len(await subjects.destroy(ANN)) == 1
    async with at.store.transaction() as tx:
        event = Event("order.paid", sealed, event_id=event_id, subject=ANN)
        assert not await at._replies.deliver("order", event, tx)
    assert [(fact.consumer, fact.event_type) for fact in at.observer.of(ErasedEventSkipped)] == [
        ("saga.order", "order.paid")
    ]
    await at.run()
    assert (await at.saga("A-7")).status is Status.RUNNING


async def test_a_reply_that_is_erased_in_its_mailbox_stops_its_step_and_does_not_count_as_a_rejection(
    subjects: SubjectKeys,
) -> None:
    saga = order_saga()
    reserve = saga.request("stock.reserve", topic="stock", reply="stock.reserved")

    @reserve.on("stock.reserved")
    def reserved(context: Any, reply: Any) -> None:
        context.state.paid = True

    sealing = FieldEncryption(keys=KeyRing(ListedKeys(RING)), sensitive={"stock.*": ["name"]}, subjects=subjects)
    at = SagaHarness(SagaRegistry(saga, payloads=Payloads(encryption=sealing)))
    saga_id = await start(at, saga, subject=ANN)
    await at.run()
    event_id = uuid4()
    await sealing.load([("stock.reserved", ANN)], [])
    sealed = sealing.encrypt(PayloadFacts(event_id, "stock.reserved", 1, "", None, ANN), {"name": "Ann"})
    said = {"saga_key": at.commands[0].headers["saga_key"]}
    async with at.store.transaction() as tx:
        event = Event("stock.reserved", sealed, event_id=event_id, subject=ANN, saga_id=str(saga_id), headers=said)
        assert await at._replies.deliver("order", event, tx)
    await subjects.destroy(ANN)
    await at.run()
    found = await at.saga("A-7")
    assert (found.needs_attention, found.status) == (True, Status.FAILED)
    assert "payload.name: its subject was erased" in (found.last_error or "")
    assert not found.state.paid


async def test_of_two_keys_that_are_inserted_for_a_subject_the_first_one_stays(table: CountedKeys) -> None:
    await table.insert_subject_keys([NewSubjectKey("s-1", ANN, "{}"), NewSubjectKey("s-2", ANN, "{}")])
    assert list(table.table) == ["s-1"]
