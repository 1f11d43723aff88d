"""One object for staging, the relay and consumers: what each of them does about an invalid payload."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from typing import Any
from uuid import UUID, uuid4

import pytest

import outrider
from outrider import Delivery, Event, Inbox, InvalidEvent, UsageError
from outrider.app import Outbox
from outrider.errors import InvalidPayload, SchemaUnavailable
from outrider.event import OnDeadLetter, OutboxRow
from outrider.inbox.inbox import Result
from outrider.outbox.model import Criteria
from outrider.outbox.optimistic import OptimisticWriter
from outrider.outbox.relay import Relay
from outrider.outbox.settings import RelaySettings
from outrider.outbox.validation import StagingRules, validate_edit
from outrider.payload import PayloadFacts, Payloads, PayloadSchema, Rule, Upcaster, required_fields
from outrider.payload.schemas import make_schema
from outrider.retry import RetryPolicy
from outrider.stores.memory import MemoryInbox, MemoryStore
from outrider.telemetry.events import InvalidPayloadPublished, SchemaSourceUnavailable
from outrider.testing import ManualClock, MemoryBroker
from outrider.testing.fakes import RecordingObserver
from tests.support.memory_benches import MemoryHarness

ORDER = {"type": "object", "required": ["total"], "properties": {"total": {"type": "integer"}}}
SCHEMAS = {"order.placed": {1: ORDER}}
BAD = Event("order.placed", {"total": "12"}, topic="orders", key="A")
GOOD = Event("order.placed", {"total": 12}, topic="orders", key="A")
FACTS = PayloadFacts(None, "order.placed", 1, "orders", "A")


@pytest.fixture
def clock() -> ManualClock:
    return ManualClock()


@pytest.fixture
def store(clock: ManualClock) -> MemoryStore:
    return MemoryStore(clock=clock)


@pytest.fixture
def harness(store: MemoryStore, clock: ManualClock) -> MemoryHarness:
    return MemoryHarness(store, clock)


class Cipher:
    """A cipher that can be read: it turns a text round."""

    def encrypt(self, facts: PayloadFacts, payload: Any) -> Any:
        return {**payload, "email": {"hidden": payload["email"][::-1], "of": facts.event_type}}

    def decrypt(self, facts: PayloadFacts, payload: Any) -> Any:
        if not isinstance(payload["email"], dict):
            return payload
        if payload["email"]["of"] != facts.event_type:
            raise InvalidPayload("payload.email", "it was moved", "schema_validation_failed")
        return {**payload, "email": payload["email"]["hidden"][::-1]}

    async def load(self, subjects: Iterable[tuple[str, str]], payloads: Iterable[Any]) -> None: ...

    def encrypt_whole(self, facts: PayloadFacts, payload: Any) -> Any:
        return {"hidden": json.dumps(payload)[::-1]}

    def is_sensitive(self, event_type: str) -> bool:
        return not event_type.startswith("\0")

    def plaintext_path(self, facts: PayloadFacts, payload: Any) -> str | None:
        return "payload.email" if isinstance(payload.get("email"), str) else None


class Source:
    """A source of one schema, which a test can break, change and count."""

    refresh_seconds: float | None = 0.0

    def __init__(self, document: Any = None) -> None:
        self.document: Any = document
        self.broken: Exception | None = None
        self.asked = 0

    def find(self, event_type: str, version: Any) -> PayloadSchema | None:
        self.asked += 1
        if self.broken:
            raise self.broken
        return (
            None
            if self.document is None or event_type != "order.placed"
            else make_schema(event_type, version, self.document)
        )

    def versions(self, event_type: str) -> Sequence[Any]:
        return [1]

    def event_types(self) -> Sequence[str]:
        return ["order.placed"]


def relay(harness: MemoryHarness, broker: MemoryBroker, payloads: Payloads, **settings: Any) -> Relay:
    made = RelaySettings(workers=1, retry=RetryPolicy(jitter=0, max_attempts=3), **settings)
    return Relay(harness.store, broker, made, clock=harness.clock, observer=harness.observer, payloads=payloads)


async def stage(harness: MemoryHarness, payloads: Payloads, *events: Event) -> list[UUID]:
    return await harness.transact(lambda conn: Outbox(payloads=payloads).stage(conn, *events))


async def dead(harness: MemoryHarness) -> list[tuple[str, str]]:
    found = await harness.store.admin.dead_letters(Criteria())
    return [(row["reason"], row["failure"]["error"]) for row in found]


async def test_a_bad_event_is_refused_at_staging_with_the_path_and_nothing_is_written(harness: MemoryHarness) -> None:
    with pytest.raises(InvalidEvent, match=r"events\[1\]\.payload\.total: .*integer") as raised:
        await stage(harness, Payloads(SCHEMAS), GOOD, BAD)
    assert raised.value.path == "events[1].payload.total"
    assert await harness.store.admin.counts(sent=False) == {"dead_letter": 0}


async def test_a_bad_row_of_another_program_is_dead_lettered_corrected_and_replayed_in_order(
    harness: MemoryHarness,
) -> None:
    payloads, broker = Payloads(SCHEMAS), MemoryBroker(ordered=True)
    [first] = await harness.stage(GOOD)
    [bad] = await harness.stage(BAD)
    await harness.stage(GOOD)
    runs = relay(harness, broker, payloads)
    await harness.works(runs)
    assert [message.message_id for message in broker.log] == [str(first)]
    assert await dead(harness) == [
        ("schema_validation_failed", 'payload.total: the value is not of type "integer"'),
    ]
    [letter] = await harness.store.admin.dead_letters(Criteria())
    with pytest.raises(InvalidEvent, match=r"payload\.total"):
        validate_edit(letter, StagingRules(payloads=payloads), payload='{"total": "13"}')
    edit = validate_edit(letter, StagingRules(payloads=payloads), payload='{"total": 13}')
    assert await harness.store.admin.edit(bad, "ann", edit)
    await harness.store.admin.replay([bad], "ann")
    await harness.works(runs)
    assert [json.loads(message.body)["total"] for message in broker.log] == [12, 13, 12]


async def test_with_dead_letter_staging_accepts_the_event_and_the_relay_acts(harness: MemoryHarness) -> None:
    payloads, broker = Payloads(SCHEMAS, on_invalid="dead-letter"), MemoryBroker()
    await stage(harness, payloads, BAD)
    await harness.works(relay(harness, broker, payloads))
    assert [reason for reason, _ in await dead(harness)] == ["schema_validation_failed"]
    assert not broker.log


async def test_with_warn_the_event_is_published_and_both_sides_say_so(harness: MemoryHarness) -> None:
    observer, broker = RecordingObserver(), MemoryBroker()
    payloads = Payloads(SCHEMAS, on_invalid="warn", observer=observer)
    [bad] = await stage(harness, payloads, BAD)
    await harness.works(relay(harness, broker, payloads))
    assert [message.message_id for message in broker.log] == [str(bad)]
    said = [(each.event_id, each.problem) for each in observer.of(InvalidPayloadPublished)]
    assert said == [(bad, 'payload.total: the value is not of type "integer"')] * 2


async def test_an_event_that_became_invalid_after_a_schema_changed_is_dead_lettered(harness: MemoryHarness) -> None:
    source, broker = Source({}), MemoryBroker()
    await stage(harness, Payloads(source), BAD)
    source.document = ORDER
    await harness.works(relay(harness, broker, Payloads(source)))
    assert [reason for reason, _ in await dead(harness)] == ["schema_validation_failed"]


@pytest.mark.parametrize("ordered", [True, False])
async def test_a_bad_event_stops_no_other_stream_and_costs_one_publish(harness: MemoryHarness, ordered: bool) -> None:
    payloads, broker = Payloads(SCHEMAS), MemoryBroker(ordered=ordered)
    await harness.stage(GOOD, BAD, GOOD)
    await harness.stage(*(Event("order.placed", {"total": 1}, topic="orders", key=f"B{n}") for n in range(20)))
    await harness.works(relay(harness, broker, payloads, on_dead_letter=OnDeadLetter.SKIP))
    assert len(broker.of_key("A")) == 2
    assert len({message.message_id for message in broker.log}) == len(broker.log) == 22
    assert len(await dead(harness)) == 1


async def test_a_document_that_cannot_be_read_is_a_poison_message(harness: MemoryHarness, store: MemoryStore) -> None:
    [broken] = await harness.stage(GOOD)
    row = store.tables.rows[store.tables.ids[broken]]
    row.event = row.event._replace(payload=b"{")
    await harness.works(relay(harness, MemoryBroker(), Payloads(SCHEMAS)))
    assert [letter.reason for letter in store.tables.dead.values()] == ["poison_message"]


async def test_events_wait_while_their_schema_cannot_be_read_and_are_not_charged(harness: MemoryHarness) -> None:
    source, broker, observer = Source(ORDER), MemoryBroker(), RecordingObserver()
    source.broken = SchemaUnavailable("the registry does not answer")
    payloads = Payloads(source, observer=observer)
    await harness.stage(GOOD, Event("parcel.sent", {}, topic="parcels", key="P"))
    runs = relay(harness, broker, payloads)
    await harness.works(runs)
    assert not broker.log
    assert await dead(harness) == []
    [waiting, _] = await harness.store.admin.events(Criteria())
    assert (waiting["state"], waiting["attempts"]) == ("deferred", 0)
    assert observer.of(SchemaSourceUnavailable)[0].error == "the registry does not answer"
    source.broken = None
    payloads._checks.clear()
    await harness.works_for(runs, seconds=10)
    assert len(broker.log) == 2


async def test_a_source_that_fails_is_not_asked_for_every_event_and_the_last_schema_counts() -> None:
    source, observer = Source(ORDER), RecordingObserver()
    payloads = Payloads(source, observer=observer)
    payloads.stage(FACTS, '{"total": 1}')
    source.broken = SchemaUnavailable("down")
    for _ in range(10):
        with pytest.raises(InvalidEvent):
            payloads.stage(FACTS, '{"total": "1"}')
    assert source.asked == 2


async def test_staging_is_refused_clearly_while_the_schema_is_not_known(harness: MemoryHarness) -> None:
    source = Source(ORDER)
    source.broken = SchemaUnavailable("the registry does not answer, and nothing is cached")
    with pytest.raises(SchemaUnavailable, match="nothing is cached"):
        await stage(harness, Payloads(source, observer=RecordingObserver()), GOOD)
    assert await harness.store.admin.counts(sent=False) == {"dead_letter": 0}


async def test_a_warning_check_never_stops_an_event_although_its_schema_is_unknown(harness: MemoryHarness) -> None:
    source, broker = Source(ORDER), MemoryBroker()
    source.broken = SchemaUnavailable("down")
    payloads = Payloads(source, on_invalid="warn", observer=RecordingObserver())
    await stage(harness, payloads, GOOD)
    await harness.works(relay(harness, broker, payloads))
    assert len(broker.log) == 1


async def test_a_type_without_a_schema_passes_unless_schemas_are_required() -> None:
    facts = FACTS._replace(event_type="parcel.sent")
    assert Payloads(SCHEMAS).stage(facts, "{}") == "{}"
    with pytest.raises(InvalidEvent, match="schema_version: there is no schema"):
        Payloads(SCHEMAS, schemas_required=True).stage(facts, "{}")
    with pytest.raises(UsageError, match="needs schemas"):
        Payloads(schemas_required=True)


async def test_the_markers_of_skipped_events_need_no_schema(harness: MemoryHarness) -> None:
    broker = MemoryBroker()
    payloads = Payloads(SCHEMAS, schemas_required=True)
    events = [Event("order.placed", {"total": n}, topic="orders", key="A", sequence="auto") for n in ("bad", 1)]
    await harness.stage(*events)
    await harness.works(relay(harness, broker, payloads, on_dead_letter=OnDeadLetter.SKIP))
    assert [message.headers["event_type"] for message in broker.log] == ["outrider.skipped", "order.placed"]


async def test_the_uri_of_a_schema_travels_as_a_header_unless_the_event_has_one(harness: MemoryHarness) -> None:
    uri, broker = "https://shop.example/order.placed/1", MemoryBroker()
    payloads = Payloads({"order.placed": {1: {**ORDER, "$id": uri}}})
    own = Event("order.placed", {"total": 1}, topic="orders", key="B", headers={"dataschema": "urn:mine"})
    await harness.stage(GOOD, own, Event("parcel.sent", {}, key="C"))
    await harness.works(relay(harness, broker, payloads))
    found = {message.key: message.headers.get("dataschema") for message in broker.log}
    assert found == {"A": uri, "B": "urn:mine", "C": None}


def test_rules_are_named_predicates_by_type_or_prefix_with_their_own_treatment() -> None:
    observer = RecordingObserver()
    payloads = Payloads(
        rules=[
            Rule("total is positive", "order.placed", lambda _, payload: payload["total"] > 0, path="payload.total"),
            Rule("known shop", "order.*", lambda facts, _: None if facts.key == "A" else "the shop is unknown"),
            required_fields("order.*", "customer.id", on_invalid="warn"),
        ],
        observer=observer,
    )
    with pytest.raises(InvalidEvent, match=r"payload\.total: the rule 'total is positive' is broken"):
        payloads.stage(FACTS, '{"total": 0}')
    with pytest.raises(InvalidEvent, match="payload: the shop is unknown"):
        payloads.stage(FACTS._replace(key="B"), '{"total": 1}')
    assert payloads.stage(FACTS, '{"total": 1}') == '{"total": 1}'
    assert "payload.customer.id: it is required" in {each.problem for each in observer.of(InvalidPayloadPublished)}
    other = FACTS._replace(event_type="parcel.sent", key="B")
    assert payloads.stage(other, '{"total": 0}') == '{"total": 0}'


def test_a_rule_that_raises_is_broken_and_does_not_repeat_the_payload() -> None:
    payloads = Payloads(rules=[Rule("total", "*", lambda _, payload: payload["canary"] > 0)])
    with pytest.raises(InvalidEvent, match="the rule 'total' raised KeyError") as raised:
        payloads.stage(FACTS, "{}")
    assert "canary" not in str(raised.value)


@pytest.mark.parametrize(
    ("make", "said"),
    [
        (lambda: Rule("", "order.*", lambda *_: True), "cannot work"),
        (lambda: Rule("odd", "order.*.placed", lambda *_: True), "cannot work"),
        (lambda: Rule("odd", "order", lambda *_: True, on_invalid="drop"), "is not known"),
        (lambda: required_fields("order.*"), "names no field"),
        (lambda: Payloads(on_invalid="drop"), "is not known"),
        (lambda: Payloads(7), "is no source"),
    ],
)
def test_a_wrong_setting_is_refused_with_the_remedy(make: Any, said: str) -> None:
    with pytest.raises(UsageError, match=said):
        make()


async def test_a_handler_gets_every_version_as_the_current_one_and_the_store_keeps_the_received_one() -> None:
    store, handled = MemoryInbox(MemoryStore()), list[Event]()
    payloads = Payloads(upcasters={"order.placed": {1: lambda payload: {**payload, "currency": "EUR"}}})
    inbox = Inbox(store, payloads=payloads)

    async def bill(event: Event, tx: Any) -> None:
        handled.append(event)

    for version, body in (("1", b'{"total": 1}'), ("2", b'{"total": 2, "currency": "SEK"}')):
        headers = {"message_id": str(uuid4()), "event_type": "order.placed", "schema_version": version}
        raw = {name: text.encode() for name, text in headers.items()}
        assert await inbox.process(Delivery("orders", b"A", body, raw), bill, consumer="billing") is Result.APPLIED
    assert [(event.schema_version, event.payload["currency"]) for event in handled] == [(2, "EUR"), (2, "SEK")]


async def test_an_event_that_does_not_open_is_a_dead_letter_at_once() -> None:
    store = MemoryInbox(MemoryStore())
    inbox = Inbox(store, payloads=Payloads(upcasters={"order.placed": {1: dict}}))

    async def bill(event: Event, tx: Any) -> None:
        raise AssertionError("an event that does not open reaches no handler")

    raw = {"message_id": str(uuid4()).encode(), "event_type": b"order.placed", "schema_version": b"3"}
    done = await inbox.process(Delivery("orders", b"A", b"{}", raw), bill, consumer="billing")
    assert done is Result.DEAD_LETTERED
    [letter] = store.tables.dead.values()
    assert letter.outcome.reason == "schema_validation_failed"
    assert "version 3 does not open" in letter.outcome.failure["error"]


async def test_the_optimistic_writer_leaves_an_invalid_event_to_the_relay(harness: MemoryHarness) -> None:
    broker, payloads = MemoryBroker(), Payloads(SCHEMAS, on_invalid="dead-letter")
    writer = OptimisticWriter(
        harness.store,
        broker,
        outrider.Outbox().insert,
        clock=harness.clock,
        rules=StagingRules(payloads=payloads),
    )
    batch = writer.batch()
    async with harness.transaction() as conn:
        await batch.stage(conn, BAD)
    await writer.send(batch)
    assert not broker.log
    await harness.works(relay(harness, broker, payloads))
    assert [reason for reason, _ in await dead(harness)] == ["schema_validation_failed"]


async def test_a_cipher_hides_fields_from_the_store_and_opens_them_for_checks_and_handlers() -> None:
    payloads = Payloads({"user.joined": {1: {"properties": {"email": {"type": "string"}}}}}, encryption=Cipher())
    facts = FACTS._replace(event_type="user.joined")
    stored = payloads.stage(facts, '{"email": "ann@shop.example"}')
    assert "ann" not in stored
    assert payloads.open(Event("user.joined", json.loads(stored))).payload == {"email": "ann@shop.example"}
    with pytest.raises(InvalidEvent):
        Payloads({"user.joined": {1: False}}, encryption=Cipher()).stage(facts, '{"email": ""}')
    row = MemoryRow(stored.encode())
    payloads.check_row(row.made)
    with pytest.raises(InvalidPayload, match=r"payload\.email: it must be encrypted"):
        payloads.check_row(MemoryRow(b'{"email": "ann@shop.example"}').made)


class MemoryRow:
    """A stored event of a user."""

    def __init__(self, payload: bytes) -> None:
        empty: dict[str, Any] = dict.fromkeys(OutboxRow._fields)
        facts = {
            "event_id": UUID(int=7),
            "event_type": "user.joined",
            "schema_version": 1,
            "topic": "users",
            "key": "U",
            "headers": b"{}",
        }
        self.made = OutboxRow(**{**empty, **facts, "payload": payload})


def test_a_type_without_checks_costs_one_look_into_a_dictionary() -> None:
    source = Source(None)
    source.refresh_seconds = None
    payloads = Payloads(source)
    payloads.load_sync([("user.joined", 1)])
    row = MemoryRow(b"this is never parsed").made
    for _ in range(1000):
        payloads.check_row(row)
    assert source.asked == 1


async def test_a_chain_is_checked_against_the_versions_of_a_source_that_is_read_later() -> None:
    source = Source({})
    payloads = Payloads(source, upcasters=[Upcaster("order.placed", "1.0.0", "2.0.0", dict)])
    with pytest.raises(UsageError, match="version 1 does not open"):
        await payloads.check()
