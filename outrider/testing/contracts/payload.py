"""Contract rules for payloads: invalid rows, registered schemas, and pages over all stored documents."""

from __future__ import annotations

import json
from dataclasses import dataclass
from uuid import UUID, uuid4

import pytest

from outrider import Delivery, Event, InvalidEvent
from outrider.app import Outbox
from outrider.audit_chain import AuditCheck
from outrider.event import DeadLetterReason, InboxStream, OnDeadLetter
from outrider.inbox.model import EventOutcome, Held, InboxBlockReason, InboxDeadLettered, StreamState
from outrider.inbox.store import InboxStore
from outrider.operation_log import OperationCriteria, verify_operations
from outrider.outbox.model import Criteria, LastValue, Lease, Settlements
from outrider.outbox.relay import Relay
from outrider.outbox.settings import RelaySettings
from outrider.outbox.validation import StagingRules, validate_edit
from outrider.payload.payloads import Payloads
from outrider.payload.rules import strictly_increasing
from outrider.payload.schemas import make_schema
from outrider.payload.store import PayloadStore, StoredDocument, StoredKind
from outrider.saga.model import Phase
from outrider.saga.store import SagaStore
from outrider.testing.fakes import MemoryBroker
from outrider.testing.harness import Harness, numbers
from outrider.testing.saga_harness import new_saga, reply
from outrider.wire import decode

NUMBERED = {"type": "object", "required": ["n"], "properties": {"n": {"type": "integer"}}}

PAYLOADS = Payloads({"order.changed": {1: NUMBERED}})


@dataclass(frozen=True, slots=True)
class PayloadBench:
    """The stores of one database."""

    harness: Harness
    payloads: PayloadStore
    inbox: InboxStore
    sagas: SagaStore

    def relay(self, broker: MemoryBroker, payloads: Payloads) -> Relay:
        """Make a relay that checks payloads, and that a test runs step by step."""
        harness = self.harness
        settings = RelaySettings(workers=1)
        return Relay(harness.store, broker, settings, clock=harness.clock, observer=harness.observer, payloads=payloads)

    async def documents(self, kind: StoredKind, size: int = 2) -> list[StoredDocument]:
        """Read all documents of a kind, in pages."""
        found: list[StoredDocument] = []
        after = None
        while True:
            page = await self.payloads.page(kind, after, size)
            assert len(page.documents) <= size
            found += page.documents
            if (after := page.after) is None:
                return found


class PayloadContract:
    """All rules of a store of payloads. Subclass it and give it a `bench` fixture."""

    async def test_a_bad_event_is_refused_at_staging_with_the_path(self, bench: PayloadBench) -> None:
        outbox, bad = Outbox(payloads=PAYLOADS), Event("order.changed", {"n": "1"}, aggregate_id="A")
        with pytest.raises(InvalidEvent, match=r"payload\.n: .*integer"):
            await bench.harness.transact(lambda conn: outbox.stage(conn, bad))
        assert await bench.documents(StoredKind.EVENT) == []

    async def test_a_bad_plain_insert_is_dead_lettered_corrected_and_replayed_in_order(
        self, bench: PayloadBench
    ) -> None:
        harness, broker, ids = bench.harness, MemoryBroker(ordered=True), [uuid4() for _ in range(3)]
        for event_id, n in zip(ids, ("1", '"two"', "3"), strict=True):
            await harness.insert(event_id, "order.changed", f'{{"n": {n}}}', "A")
        relay = bench.relay(broker, PAYLOADS)
        await harness.works(relay)
        assert numbers(broker.log) == [1]
        [letter] = await harness.store.admin.dead_letters(Criteria())
        assert (letter["event_id"], letter["reason"]) == (ids[1], "schema_validation_failed")
        assert letter["failure"]["error"] == 'payload.n: the value is not of type "integer"'
        edit = validate_edit(letter, StagingRules(payloads=PAYLOADS), payload='{"n": 2}')
        assert await harness.store.admin.edit(ids[1], "ann", edit)
        assert await harness.store.admin.replay([ids[1]], "ann") == 1
        await harness.works(relay)
        assert numbers(broker.log) == [1, 2, 3]

    async def test_a_value_that_must_increase_is_compared_with_the_last_one_of_its_key_by_every_relay(
        self, bench: PayloadBench
    ) -> None:
        harness, broker = bench.harness, MemoryBroker(ordered=True)
        payloads = Payloads(rules=[strictly_increasing("order.*", "n")])
        for values in (((1, "A"), (5, "A"), (2, "B")), ((5, "A"), (3, "B"), (6, "A"))):
            relay = bench.relay(broker, payloads)
            for n, key in values:
                await harness.insert(uuid4(), "order.changed", f'{{"n": {n}}}', key)
            await harness.works(relay)
            await harness.store.leave(relay.name)
        assert (numbers(broker.log), numbers(broker.log, "B")) == ([1, 5], [2, 3])
        [letter] = await harness.store.admin.dead_letters(Criteria())
        assert letter["reason"] == "schema_validation_failed"
        # Its stream waits behind the dead letter, and goes on from the last published value.
        assert await harness.store.admin.discard([letter["event_id"]], "ann") == 1
        await harness.works(bench.relay(broker, payloads))
        assert numbers(broker.log) == [1, 5, 6]

    async def test_a_last_value_never_falls_and_is_written_with_its_event_or_not_at_all(
        self, bench: PayloadBench
    ) -> None:
        harness, relay = bench.harness, bench.relay(MemoryBroker(), PAYLOADS)
        await harness.stage(*(Event("order.changed", {"n": n}, key="A", topic="orders") for n in range(3)))
        await relay.heartbeat()
        store, lease = harness.store, relay.lease
        events = (await store.fetch(lease, dict.fromkeys(lease.epochs, 10))).events
        stream = events[0].stream
        for event, value in zip(events[:2], (9, 4), strict=True):
            values = {event.event_id: [LastValue("rule", stream, value)]}
            assert await store.settle(lease, Settlements([event], last_values=values)) == 1
        wanted = ("rule", stream)
        assert await store.last_values([wanted, ("other", stream)]) == {wanted: 9}
        lost = Lease(lease.owner, {lane: epoch + 1 for lane, epoch in lease.epochs.items()})
        values = {events[2].event_id: [LastValue("rule", stream, 99)]}
        assert await store.settle(lost, Settlements([events[2]], last_values=values)) == 0
        assert await store.last_values([wanted]) == {wanted: 9}

    async def test_a_schema_is_registered_once_and_replaced_on_request(self, bench: PayloadBench) -> None:
        first = make_schema("order.changed", 2, NUMBERED)
        other = make_schema("order.changed", "2.1.0", True)
        assert await bench.payloads.register(first, "ann")
        assert not await bench.payloads.register(first._replace(document={}), "bob")
        assert await bench.payloads.register(other, "ann")
        assert await bench.payloads.register(make_schema("order.closed", 1, {}), "ann")
        found = await bench.payloads.schemas("order.changed")
        assert [(each.version, each.document, each.registered_by) for each in found] == [
            (2, NUMBERED, "ann"),
            ("2.1.0", True, "ann"),
        ]
        await bench.payloads.replace(first._replace(document={}), "bob")
        replaced, _, _ = await bench.payloads.schemas()
        assert (replaced.document, replaced.registered_by) == ({}, "bob")
        operations = bench.harness.store.operations
        lines = (await operations.find(OperationCriteria()))[::-1]
        assert [(line.actor, line.verb) for line in lines] == [("ann", "schema_register")] * 3 + [
            ("bob", "schema_replace")
        ]
        assert json.loads(lines[1].detail)["version"] == "2.1.0"
        assert (await verify_operations(operations, AuditCheck())).findings == []
        assert replaced.registered_at.tzinfo is not None

    async def test_pages_hold_every_undelivered_event_and_dead_letter_once(self, bench: PayloadBench) -> None:
        harness = bench.harness
        events = [Event("order.changed", {"n": n}, key=f"k{n}", schema_version="1.2.0") for n in range(5)]
        ids = await harness.stage(*events)
        found = await bench.documents(StoredKind.EVENT)
        assert {UUID(document.id) for document in found} == set(ids)
        assert len(found) == 5
        assert {document.facts["schema_version"] for document in found} == {"1.2.0"}
        assert {json.loads(document.body)["n"] for document in found} == set(range(5))
        assert await harness.store.admin.dead_letter(ids[0], "ann", {"kind": "by_hand", "error": "", "at": ""}, "skip")
        [dead] = await bench.documents(StoredKind.DEAD_LETTER)
        assert (UUID(dead.id), dead.facts["reason"]) == (ids[0], "by_hand")
        assert len(await bench.documents(StoredKind.EVENT)) == 4

    async def test_pages_hold_the_events_that_wait_at_consumers_as_they_were_received(
        self, bench: PayloadBench
    ) -> None:
        received = [decode(_delivery(n)) for n in range(3)]
        letter = InboxDeadLettered(DeadLetterReason.POISON_MESSAGE, {"error": "it"}, OnDeadLetter.BLOCK, 0)
        stream = InboxStream("orders", "A")
        async with bench.inbox.transaction() as tx:
            await bench.inbox.record_receipts(tx, "billing", received, ordered=False)
            entries = [EventOutcome(received[0], letter), *(EventOutcome(each, Held()) for each in received[1:])]
            state = StreamState(cause=InboxBlockReason.DEAD_LETTER, waiting=2)
            await bench.inbox.record_outcomes(tx, "billing", entries, {stream: state})
        held = await bench.documents(StoredKind.HELD_EVENT, size=1)
        assert [json.loads(document.facts["delivery"].body)["n"] for document in held] in ([1, 2], [2, 1])
        [dead] = await bench.documents(StoredKind.CONSUMER_DEAD_LETTER)
        assert decode(dead.facts["delivery"]).event == received[0].event
        assert (dead.facts["consumer"], dead.facts["reason"]) == ("billing", "poison_message")

    async def test_pages_hold_saga_states_unread_replies_and_participants(self, bench: PayloadBench) -> None:
        sagas = [new_saga(f"A-{n}") for n in range(3)]
        async with bench.sagas.transaction() as tx:
            for saga in sagas:
                await bench.sagas.start(tx, saga)
            mail = [reply(saga.saga_id)._replace(schema_version="3") for saga in sagas]
            assert await bench.sagas.deliver(tx, mail) == 3
        states = await bench.documents(StoredKind.SAGA_STATE)
        assert {UUID(document.id) for document in states} == {saga.saga_id for saga in sagas}
        assert json.loads(states[0].body) == {"amount": 12}
        messages = await bench.documents(StoredKind.SAGA_MESSAGE)
        assert len({document.id for document in messages}) == 3
        assert {document.facts["schema_version"] for document in messages} == {"3"}
        outbox = Outbox()

        async def answer(conn: object) -> None:
            for key in ("one", "two", "three"):
                await outbox.perform(conn, "participant_enter", "stock", key, Phase.ACTION)
                await outbox.perform(conn, "participant_save_reply", "stock", key, Phase.ACTION, b'{"reply": {}}')
            await outbox.perform(conn, "participant_enter", "stock", "unanswered", Phase.ACTION)

        await bench.harness.transact(answer)
        replies = await bench.documents(StoredKind.PARTICIPANT_REPLY)
        assert {document.id for document in replies} == {f"stock {key} action" for key in ("one", "two", "three")}


def _delivery(n: int) -> Delivery:
    headers = {"message_id": str(UUID(int=n + 1)), "event_type": "order.changed", "key": "A"}
    body = json.dumps({"n": n}).encode()
    return Delivery("orders", b"A", body, {name: text.encode() for name, text in headers.items()}, position=str(n))
