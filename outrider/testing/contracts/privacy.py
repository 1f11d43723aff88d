"""Contract rules for encrypted fields: what a store holds, and plain rows of other programs."""

from __future__ import annotations

import asyncio
import json
import logging
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any
from uuid import UUID, uuid4

import pytest

from outrider import Event
from outrider.app import Outbox
from outrider.audit_chain import AuditCheck
from outrider.errors import KeysUnavailable, UsageError
from outrider.event import DeadLetterReason, Delivery, OnDeadLetter
from outrider.inbox.model import EventOutcome, Held, InboxDeadLettered
from outrider.inbox.store import InboxStore
from outrider.operation_log import OperationCriteria, verify_operations
from outrider.outbox.model import Criteria
from outrider.outbox.relay import Relay
from outrider.outbox.settings import RelaySettings
from outrider.outbox.validation import StagingRules, validate_edit
from outrider.payload.payloads import Payloads
from outrider.privacy.encryption import FieldEncryption
from outrider.privacy.keys import DataKey, EnvironmentKeys, KeyRing
from outrider.privacy.reencryption import Reencryption, facts_of
from outrider.privacy.store import CopyKind, PrivacyStore, Rewrite, StoredKeys
from outrider.privacy.subjects import SubjectKeys
from outrider.saga.definition.saga import Saga, SagaRegistry
from outrider.saga.execution.step_executor import KEY_HEADER, PHASE_HEADER
from outrider.saga.execution.turn import KEYS_SECONDS
from outrider.saga.model import (
    JournalEntry,
    MessageKind,
    NewSagaMessage,
    Phase,
    SagaChange,
    SagaCriteria,
    SagaRecord,
    Status,
    StepStatus,
)
from outrider.saga.participant import CommandOutcome, Participant
from outrider.saga.state.encryption import encrypt_new, encrypt_turn, open_record
from outrider.saga.store import SagaStore
from outrider.stores.memory import MemorySubjectKeys
from outrider.telemetry.events import Observers, SagaReleased
from outrider.telemetry.log_observer import LogObserver
from outrider.testing.fakes import MemoryBroker
from outrider.testing.harness import Harness
from outrider.testing.saga_harness import SagaHarness, claim_of, new_saga
from outrider.wire import decode

CANARY = "canary@example.com"
"""The value that nothing but a holder of the keys may see."""

SENSITIVE = {"order.placed": ["customer.email", "items[*].note"]}

OF_SAGAS = {"order": ["customer.email", "items[*].note", "packed", "tracked"], "parcel": ["address"]}


def order(email: Any = CANARY) -> dict[str, Any]:
    """Return a payload with two sensitive fields."""
    return {"customer": {"email": email, "id": 7}, "items": [{"note": email, "sku": "x"}], "total": 12}


def encrypting(keys: KeyRing) -> Payloads:
    """Return payloads that encrypt two fields, and the same in states of sagas."""
    return Payloads(encryption=FieldEncryption(keys=keys, sensitive=SENSITIVE, sagas=OF_SAGAS))


class EncryptionContract:
    """All rules of encrypted fields in a store. Subclass it, and give it a `harness` fixture, and one named `keys`."""

    def relay(self, harness: Harness, broker: MemoryBroker, payloads: Payloads) -> Relay:
        """Make a relay that logs, and that a test runs step by step."""
        observer = Observers([harness.observer, LogObserver()])
        settings = RelaySettings(workers=1)
        return Relay(harness.store, broker, settings, clock=harness.clock, observer=observer, payloads=payloads)

    async def test_a_store_and_a_broker_hold_encrypted_values_which_a_consumer_opens(
        self, harness: Harness, keys: KeyRing
    ) -> None:
        payloads, broker = encrypting(keys), MemoryBroker(ordered=True)
        outbox = Outbox(payloads=payloads)
        event = Event("order.placed", order(), topic="orders", key="A")
        [event_id] = await harness.transact(lambda conn: outbox.stage(conn, event))
        stored = await harness.store.admin.event(event_id)
        assert CANARY not in json.dumps(stored, default=str)
        assert stored["payload"]["total"] == 12
        await harness.works(self.relay(harness, broker, payloads))
        [message] = broker.log
        assert CANARY.encode() not in message.body
        headers = {name: text.encode() for name, text in message.headers.items()}
        received = decode(Delivery("orders", b"A", message.body, headers)).event
        assert received is not None
        assert payloads.open(received).payload == order()

    async def test_plain_text_of_another_program_is_dead_lettered_and_never_shown(
        self, harness: Harness, keys: KeyRing, caplog: pytest.LogCaptureFixture
    ) -> None:
        caplog.set_level(logging.DEBUG, logger="outrider")
        payloads, broker, ids = encrypting(keys), MemoryBroker(ordered=True), [uuid4(), uuid4()]
        await harness.insert(ids[0], "order.placed", json.dumps(order()), "A")
        await harness.insert(ids[1], "order.placed", json.dumps({"n": 1}), "A")
        relay = self.relay(harness, broker, payloads)
        await harness.works(relay)
        assert broker.log == []
        [letter] = await harness.store.admin.dead_letters(Criteria())
        assert (letter["event_id"], letter["reason"]) == (ids[0], "encryption_failed")
        assert letter["failure"]["error"] == "payload.customer.email: it must be encrypted, and is stored as plain text"
        assert CANARY not in json.dumps({**letter, "payload": None}, default=str)
        logged = repr([vars(record) for record in caplog.records if record.name.startswith("outrider")])
        assert "encryption_failed" in logged
        assert CANARY not in logged + repr(harness.observer.events)
        edit = validate_edit(letter, StagingRules(payloads=payloads), payload=json.dumps(order()))
        assert await harness.store.admin.edit(ids[0], "ann", edit)
        assert await harness.store.admin.replay([ids[0]], "ann") == 1
        await harness.works(relay)
        assert [message.message_id for message in broker.log] == [str(event_id) for event_id in ids]
        assert CANARY.encode() not in broker.log[0].body


@dataclass(frozen=True, slots=True)
class PrivacyBench:
    """The stores of one database."""

    harness: Harness
    privacy: PrivacyStore
    inbox: InboxStore
    sagas: SagaStore

    async def copies(self, kind: CopyKind, size: int = 2) -> list[tuple[str, str]]:
        """Read the ids and texts of all copies of a kind, in pages."""
        found, after = list[tuple[str, str]](), None
        while True:
            page = await self.privacy.copies(kind, after, size)
            assert len(page.copies) <= size
            found += [(str(copy.event_id), copy.text or "") for copy in page.copies]
            if (after := page.after) is None:
                return found

    async def fill(self, payloads: Payloads, subject: str | None = None) -> None:
        """Store five payloads of every kind, perhaps of a subject."""
        harness, outbox, broker = self.harness, Outbox(payloads=payloads), MemoryBroker()
        relay = Relay(harness.store, broker, RelaySettings(workers=1), clock=harness.clock, payloads=payloads)
        events = [Event("order.placed", order(), topic="orders", key=f"k{n}", subject=subject) for n in range(5)]
        stock = Participant("stock", outbox=outbox)
        for n, event in enumerate(events):
            command = Event("stock.reserve", {}, event_id=uuid4(), headers={KEY_HEADER: f"A-{n}:reserve"})
            command = replace(command, headers={**command.headers, PHASE_HEADER: Phase.ACTION.value})

            async def answer(conn: Any, command: Event = command, event: Event = event) -> None:
                assert await stock.execute(conn, command, lambda *_: event) is CommandOutcome.DONE

            await harness.transact(answer)
        await harness.works(relay)
        dead = await harness.transact(lambda conn: outbox.stage(conn, *events))
        for event_id in dead:
            failure = {"kind": "by_hand", "error": "", "at": ""}
            assert await harness.store.admin.dead_letter(event_id, "ann", failure, "skip")
        await harness.transact(lambda conn: outbox.stage(conn, *events))
        received = []
        for message in broker.log * 2:
            headers = {name: text.encode() for name, text in message.headers.items()}
            key = message.headers["key"].encode()
            received.append(decode(Delivery("orders", key, message.body, headers)))
        letter = InboxDeadLettered(DeadLetterReason.POISON_MESSAGE, {"error": ""}, OnDeadLetter.SKIP, 0)
        async with self.inbox.transaction() as tx:
            await self.inbox.record_receipts(tx, "billing", received[:5], ordered=False)
            await self.inbox.record_outcomes(tx, "billing", [EventOutcome(each, Held()) for each in received[:5]], {})
        async with self.inbox.transaction() as tx:
            await self.inbox.record_receipts(tx, "shipping", received[5:], ordered=False)
            await self.inbox.record_outcomes(tx, "shipping", [EventOutcome(each, letter) for each in received[5:]], {})
        state = json.dumps(order()).encode()
        sagas = [new_saga(f"A-{n}")._replace(state=state, subject=subject) for n in range(5)]
        saga, kind = sagas[0], MessageKind.REPLY
        async with self.sagas.transaction() as tx:
            for each in sagas:
                assert await self.sagas.start(tx, encrypt_new(payloads, each))
            mail = [
                NewSagaMessage(
                    saga.saga_id, kind, "order.placed", None, each.delivery.body, each.event_id, "order", "1"
                )
                for each in received[:5]
            ]
            assert await self.sagas.deliver(tx, mail) == 5
        [record] = await self.sagas.claim("worker", {("order", 1)}, limit=1, lease_seconds=30)
        lines = [
            JournalEntry(f"reserve[{n}]", Phase.ACTION, StepStatus.DONE, n, data=json.dumps(order())) for n in range(5)
        ]
        change = SagaChange(open_record(payloads, record).instance, lines, release=True)
        async with self.sagas.transaction() as tx:
            await self.sagas.save(tx, claim_of(record), encrypt_turn(payloads, change, (), ()).change, 30)


KEYLESS = FieldEncryption(keys=KeyRing(EnvironmentKeys("ABSENT_KEYS")), sensitive={})


@dataclass
class Customer:
    """A person."""

    email: str


@dataclass
class DeliveryOrder:
    """The state of a saga with a sensitive field."""

    customer: Customer
    packed: list[str] = field(default_factory=list)
    tracked: str = ""


@dataclass
class Parcel:
    """The state of a child with a sensitive field."""

    address: str


def delivery(payloads: Payloads | None) -> SagaRegistry:
    """Return a saga with items, a child and a command, in all of which a sensitive value passes."""
    parcel, saga = Saga("parcel", Parcel), Saga("order", DeliveryOrder)

    @parcel.call()
    async def send(context: Any) -> None:
        context.state.address = f"parcel to {context.state.address}"

    @saga.call(for_each=lambda state: [f"{state.customer.email} {n}" for n in (1, 2)], into="packed")
    async def pack(context: Any) -> str:
        return str(context.item)

    def tracked(context: Any, child: Parcel) -> None:
        context.state.tracked = child.address

    saga.child(parcel, input=lambda state: Parcel(state.customer.email), result=tracked)
    saga.request("reserve", topic="stock", reply="reserved")
    return SagaRegistry(saga, parcel, payloads=payloads)


class Killed(Exception):
    """The end of a process in the middle of its work."""


class InterruptedStore:
    """A store that dies after some pages were written, before or after the commit of the next."""

    def __init__(self, store: PrivacyStore, pages: int, *, committed: bool) -> None:
        self._store, self._pages, self._committed = store, pages, committed

    def __getattr__(self, name: str) -> Any:
        return getattr(self._store, name)

    async def rewrite(self, kind: CopyKind, rewrites: Sequence[Rewrite]) -> int:
        """Write a page, or die."""
        self._pages -= 1
        if self._pages >= 0 or self._committed:
            done = await self._store.rewrite(kind, rewrites)
            if self._pages >= 0:
                return done
        raise Killed


class PrivacyContract:
    """All rules of a store of privacy. Subclass it, and give it a `bench` fixture, and one named `rings`."""

    def master(self, monkeypatch: pytest.MonkeyPatch, *keys: DataKey) -> KeyRing:
        """Return a ring of master keys in a variable."""
        monkeypatch.setenv("MASTER_KEYS", " ".join(key.text for key in keys))
        return KeyRing(EnvironmentKeys("MASTER_KEYS"))

    def subject_keys(self, monkeypatch: pytest.MonkeyPatch) -> tuple[MemorySubjectKeys, SubjectKeys]:
        """Return a table of keys of subjects, and the keys in it."""
        table = MemorySubjectKeys()

        async def opening() -> MemorySubjectKeys:
            return table

        return table, SubjectKeys(opening, "the test", self.master(monkeypatch, DataKey.new("m1")))

    def source(self, bench: PrivacyBench, master: KeyRing) -> StoredKeys:
        """Return the keys of the store, with a store that stays open."""

        class Opened:
            async def keys(self) -> Any:
                return await asyncio.wrap_future(asyncio.run_coroutine_threadsafe(bench.privacy.keys(), loop))

            async def close(self) -> None:
                """Leave the store open: it belongs to the test."""

            def __getattr__(self, name: str) -> Any:
                return getattr(bench.privacy, name)

        loop = asyncio.get_running_loop()

        async def opening() -> Any:
            return Opened()

        return StoredKeys(opening, "the test", master)

    async def test_keys_are_stored_wrapped_and_the_last_one_activated_encrypts(
        self, bench: PrivacyBench, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        masters = [DataKey.new("m1"), DataKey.new("m2")]
        source = self.source(bench, self.master(monkeypatch, masters[0]))
        one, two = DataKey.new("one"), DataKey.new("two")
        assert await source.add(one, "ann")
        assert not await source.add(DataKey.new("one"), "bob")
        assert await source.add(two, "bob")
        ring = KeyRing(source)
        assert (await asyncio.to_thread(ring.active), ring.find("two")) == (one, two)
        assert await source.activate("two", "bob")
        assert await source.activate("one", "cleo")
        assert await source.activate("two", "dora")
        assert not await source.activate("absent", "dora")
        assert (await asyncio.to_thread(ring.reload)).active == "two"
        stored = await bench.privacy.keys()
        assert not any(key.text.partition(":")[2][:20] in repr(stored) for key in (one, two, *masters))
        facts = [
            (each.id, each.active, each.created_by, each.activated_by, each.master) for each in await source.facts()
        ]
        assert facts == [("two", True, "bob", "dora", "m1"), ("one", False, "ann", "cleo", "m1")]

    async def test_a_new_master_key_takes_over_all_keys(
        self, bench: PrivacyBench, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        masters, key = [DataKey.new("m1"), DataKey.new("m2")], DataKey.new("one")
        assert await self.source(bench, self.master(monkeypatch, masters[0])).add(key, "ann")
        both = self.source(bench, self.master(monkeypatch, *reversed(masters)))
        assert (await asyncio.to_thread(both.read)).keys == {"one": key}
        assert (await both.rewrap("ann"), await both.rewrap("ann")) == (1, 0)
        new = self.source(bench, self.master(monkeypatch, masters[1]))
        assert (await asyncio.to_thread(new.read)).keys == {"one": key}
        old = self.source(bench, self.master(monkeypatch, masters[0]))
        assert await asyncio.to_thread(old.read) == ({}, None)
        with pytest.raises(UsageError, match="wrapped with the master key m2"):
            await old.rewrap("ann")
        none = self.source(bench, self.master(monkeypatch))
        assert await asyncio.to_thread(none.read) == ({}, None)
        with pytest.raises(UsageError, match="has no master key"):
            await none.add(key, "ann")

    async def test_a_wrapped_key_that_was_changed_or_exchanged_is_refused(
        self, bench: PrivacyBench, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        source = self.source(bench, self.master(monkeypatch, DataKey.new("m1")))
        await source.add(DataKey.new("one"), "ann")
        await source.add(DataKey.new("two"), "ann")
        one, two = sorted(await bench.privacy.keys())
        assert not await bench.privacy.rewrap_key("one", two.wrapped, one.wrapped, "ann")
        assert await bench.privacy.rewrap_key("one", one.wrapped, two.wrapped, "ann")
        with pytest.raises(KeysUnavailable, match="the key one was changed, or is of another ring"):
            await asyncio.to_thread(source.read)

    async def test_each_change_of_a_key_is_a_line_of_the_operation_log(self, bench: PrivacyBench) -> None:
        privacy, operations = bench.privacy, bench.harness.store.operations
        assert await privacy.insert_key("one", "{}", "ann")
        assert not await privacy.insert_key("one", "{}", "eve")
        assert await privacy.insert_key("two", "{}", "ann")
        assert await privacy.activate_key("two", "bob")
        assert not await privacy.activate_key("three", "eve")
        assert not await privacy.rewrap_key("one", '{"other": 1}', "{}", "eve")
        assert await privacy.rewrap_key("one", "{}", '{"other": 1}', "bob")
        lines = (await operations.find(OperationCriteria()))[::-1]
        assert [(line.actor, line.verb, json.loads(line.detail)["key"]) for line in lines] == [
            ("ann", "key_add", "one"),
            ("ann", "key_add", "two"),
            ("bob", "key_rotate", "two"),
            ("bob", "key_rewrap", "one"),
        ]
        assert (await verify_operations(operations, AuditCheck())).findings == []

    async def test_after_a_rotation_old_values_open_and_reencryption_brings_all_under_the_new_key(
        self, bench: PrivacyBench, rings: tuple[KeyRing, KeyRing]
    ) -> None:
        old, both = (encrypting(ring) for ring in rings)
        await bench.fill(old)
        await self._opens(bench, both)
        run = Reencryption(_cipher(both), bench.privacy, batch=2)
        assert await run.run()
        assert run.written == dict.fromkeys(CopyKind, 5)
        assert run.failed == 0
        assert await self._key_ids(bench) == {"new": 5 * len(CopyKind)}
        await self._opens(bench, both)
        again = Reencryption(_cipher(both), bench.privacy)
        assert await again.run()
        assert again.written.total() == 0

    @pytest.mark.parametrize("committed", [False, True])
    async def test_a_reencryption_that_was_killed_goes_on_where_it_ended(
        self, bench: PrivacyBench, rings: tuple[KeyRing, KeyRing], committed: bool
    ) -> None:
        old, both = (encrypting(ring) for ring in rings)
        await bench.fill(old)
        store: Any = InterruptedStore(bench.privacy, 4, committed=committed)
        with pytest.raises(Killed):
            await Reencryption(_cipher(both), store, batch=2).run()
        written = (await self._key_ids(bench))["new"]
        assert 0 < written < 5 * len(CopyKind)
        await self._opens(bench, both)
        rest = Reencryption(_cipher(both), bench.privacy, batch=2)
        assert await rest.run()
        assert rest.written.total() == 5 * len(CopyKind) - written
        assert await self._key_ids(bench) == {"new": 5 * len(CopyKind)}
        await self._opens(bench, both)

    async def test_values_of_a_subject_move_to_its_key_in_all_copies_and_stay_once_the_key_is_destroyed(
        self, bench: PrivacyBench, rings: tuple[KeyRing, KeyRing], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        subject, mailbox = "customer:42", CopyKind.SAGA_MESSAGE
        table, subjects = self.subject_keys(monkeypatch)
        await bench.fill(encrypting(rings[0]), subject)
        for kind in CopyKind:
            page = await bench.privacy.copies(kind, None, 5)
            assert {copy.subject for copy in page.copies} == {None if kind is mailbox else subject}, kind
        cipher = FieldEncryption(keys=rings[1], sensitive=SENSITIVE, subjects=subjects)
        assert not await Reencryption(cipher, bench.privacy, dry_run=True).run()
        assert table.table == {}
        run = Reencryption(cipher, bench.privacy, batch=2)
        assert await run.run()
        assert (run.written, run.failed) == (dict.fromkeys(CopyKind, 5), 0)
        [key] = table.table.values()
        # Replies are kept without headers.
        assert await self._key_ids(bench) == {key.id: 5 * (len(CopyKind) - 1), "new": 5}
        assert await subjects.destroy(subject) == [key.id]
        again = Reencryption(cipher, bench.privacy)
        assert await again.run()
        assert again.written.total() == again.failed == 0
        assert again.erased == {kind: 5 for kind in CopyKind if kind is not mailbox}
        assert await subjects.counts() == (0, 1)
        await asyncio.to_thread(subjects.close)

    async def test_a_copy_that_has_changed_meanwhile_is_not_overwritten(
        self, bench: PrivacyBench, rings: tuple[KeyRing, KeyRing]
    ) -> None:
        await bench.fill(encrypting(rings[0]))
        for kind in CopyKind:
            page = await bench.privacy.copies(kind, None, 5)
            stale = [Rewrite(copy._replace(text='{"old": 1}'), '{"new": 1}') for copy in page.copies]
            assert await bench.privacy.rewrite(kind, stale) == 0
        assert await self._key_ids(bench) == {"old": 5 * len(CopyKind)}

    async def test_plain_text_that_must_be_encrypted_by_now_is_and_a_missing_key_is_named(
        self, bench: PrivacyBench, rings: tuple[KeyRing, KeyRing]
    ) -> None:
        harness, cipher = bench.harness, _cipher(encrypting(rings[1]))
        await harness.insert(uuid4(), "order.placed", json.dumps(order()), "A")
        run = Reencryption(cipher, bench.privacy)
        assert await run.run()
        [(_, text)] = await bench.copies(CopyKind.EVENT)
        assert CANARY not in text
        lost = Reencryption(_cipher(encrypting(rings[0])), bench.privacy)
        assert await lost.run()
        [unopened] = lost.named
        assert unopened.problem.startswith("payload.customer.email: it is encrypted with the key new, which the list")

    async def test_a_saga_runs_on_plain_values_and_is_stored_encrypted(
        self, bench: PrivacyBench, rings: tuple[KeyRing, KeyRing]
    ) -> None:
        harness = SagaHarness(delivery(encrypting(rings[0])), bench.sagas)
        saga = harness.sagas.find("order", 1)
        assert saga is not None
        saga_id = await harness.start(saga, DeliveryOrder(Customer(CANARY)), "A-7")
        stored = await self._stored(bench, saga_id)
        assert [entry.step for entry in stored.journal if entry.data] == ["pack", "pack[0]", "pack[1]"]
        await harness.reply("reserve", {"shelf": 3})
        view = await harness.saga("A-7")
        assert (view.status, view.state.packed) == (Status.COMPLETED, [f"{CANARY} 1", f"{CANARY} 2"])
        assert view.state.tracked == f"parcel to {CANARY}"
        await self._stored(bench, saga_id)

    async def test_a_saga_waits_for_a_missing_key_without_an_attempt_and_goes_on_with_it(
        self, bench: PrivacyBench, rings: tuple[KeyRing, KeyRing]
    ) -> None:
        with_key = SagaHarness(delivery(encrypting(rings[1])), bench.sagas)
        saga = with_key.sagas.find("order", 1)
        assert saga is not None
        saga_id = await with_key.start(saga, DeliveryOrder(Customer(CANARY)), "A-7")
        before = await self._stored(bench, saga_id)
        reserved = NewSagaMessage(saga_id, MessageKind.REPLY, "reserved", f"{saga_id}:reserve", b"{}", uuid4(), "order")
        async with bench.sagas.transaction() as tx:
            assert await bench.sagas.deliver(tx, [reserved]) == 1
        for payloads in (encrypting(rings[0]), None):
            keyless = SagaHarness(delivery(payloads), bench.sagas)
            await keyless.run()
            [released] = keyless.observer.of(SagaReleased)
            assert released.error.startswith(
                "state.customer.email: it is encrypted" if payloads else "state: it is enc"
            )
            assert CANARY not in repr(keyless.observer.events)
            after = await self._stored(bench, saga_id)
            assert (after.journal, len(after.messages)) == (before.journal, 1)
            same = ("state", "status", "retry_count", "losses", "needs_attention", "last_error", "owner")
            assert [getattr(after.instance, name) for name in same] == [getattr(before.instance, name) for name in same]
            await bench.harness.advance(seconds=KEYS_SECONDS + 1)
        await with_key.run()
        assert (await with_key.saga("A-7")).status is Status.COMPLETED

    async def test_a_destroyed_key_of_a_subject_erases_a_saga_and_the_worker_stops_it(
        self, bench: PrivacyBench, rings: tuple[KeyRing, KeyRing], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        subject = "customer:42"
        table, subjects = self.subject_keys(monkeypatch)
        cipher = FieldEncryption(keys=rings[0], sensitive=SENSITIVE, sagas=OF_SAGAS, subjects=subjects)
        harness = SagaHarness(delivery(Payloads(encryption=cipher)), bench.sagas)
        saga = harness.sagas.find("order", 1)
        assert saga is not None
        saga_id = await harness.start(saga, DeliveryOrder(Customer(CANARY)), "A-7", subject=subject)
        before = await self._stored(bench, saga_id)
        [key] = table.table.values()
        states = [saga.state.decode() for saga in await bench.sagas.admin.find(SagaCriteria())]
        texts = [*states, *(entry.data for entry in before.journal if entry.data)]
        assert len(texts) == 5
        assert {key_id for text in texts for key_id in KEYLESS.key_ids(json.loads(text))} == {key.id}
        await subjects.destroy(subject)
        reserved = NewSagaMessage(saga_id, MessageKind.REPLY, "reserved", f"{saga_id}:reserve", b"{}", uuid4(), "order")
        async with bench.sagas.transaction() as tx:
            assert await bench.sagas.deliver(tx, [reserved]) == 1
        await harness.run()
        after = await self._stored(bench, saga_id)
        assert (after.instance.status, after.instance.needs_attention) == (Status.FAILED, True)
        assert after.instance.last_error is not None
        assert after.instance.last_error.startswith(f"its subject was erased: the key {key.id} was destroyed on ")
        assert (after.instance.state, after.journal) == (before.instance.state, before.journal)
        await bench.harness.advance(seconds=KEYS_SECONDS + 1)
        assert await harness.worker.run_once() == 0
        assert await subjects.counts() == (0, 1)
        await asyncio.to_thread(subjects.close)

    async def test_a_kept_reply_under_a_destroyed_key_is_not_sent_again(
        self, bench: PrivacyBench, rings: tuple[KeyRing, KeyRing], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        subject = "customer:42"
        table, subjects = self.subject_keys(monkeypatch)
        cipher = FieldEncryption(keys=rings[0], sensitive=SENSITIVE, subjects=subjects)
        stock = Participant("stock", outbox=Outbox(payloads=Payloads(encryption=cipher)))
        headers = {KEY_HEADER: "A-7:reserve", PHASE_HEADER: Phase.ACTION.value}
        command = Event("stock.reserve", {}, event_id=uuid4(), headers=headers, subject=subject)
        outcomes = list[CommandOutcome]()

        async def answer(conn: Any) -> None:
            outcomes.append(await stock.execute(conn, command, lambda *_: Event("order.placed", order(), topic="o")))

        await bench.harness.transact(answer)
        await bench.harness.transact(answer)
        [kept] = [text for _, text in await bench.copies(CopyKind.PARTICIPANT_REPLY)]
        [key] = table.table.values()
        assert KEYLESS.key_ids(json.loads(kept)) == {key.id}
        assert len(await bench.copies(CopyKind.EVENT)) == 2
        await subjects.destroy(subject)
        await bench.harness.transact(answer)
        assert outcomes == [CommandOutcome.DONE, CommandOutcome.REPEATED, CommandOutcome.REPEATED]
        assert len(await bench.copies(CopyKind.EVENT)) == 2
        await asyncio.to_thread(subjects.close)

    async def _stored(self, bench: PrivacyBench, saga_id: UUID) -> SagaRecord:
        """Return the saga as stored, and check that neither it nor its child holds the value."""
        record = await bench.sagas.admin.show(saga_id)
        assert record is not None
        for each in await bench.sagas.admin.find(SagaCriteria()):
            assert CANARY not in repr(await bench.sagas.admin.show(each.saga_id))
        return record

    async def _opens(self, bench: PrivacyBench, payloads: Payloads) -> None:
        """Check that every stored copy opens, and that none holds the value."""
        for kind in CopyKind:
            page = await bench.privacy.copies(kind, None, 100)
            assert len(page.copies) == 5, kind
            for copy in page.copies:
                assert CANARY not in (copy.text or "")
                opened = _cipher(payloads).decrypt(facts_of(kind, copy), json.loads(copy.text or ""))
                assert order() == (opened["reply"]["payload"] if kind is CopyKind.PARTICIPANT_REPLY else opened), kind

    async def _key_ids(self, bench: PrivacyBench) -> Counter[str]:
        """Count the copies by the key of their values."""
        texts = [text for kind in CopyKind for _, text in await bench.copies(kind)]
        found = (KEYLESS.key_ids(json.loads(text)) for text in texts)
        return Counter(key_id for [key_id] in found)


def _cipher(payloads: Payloads) -> FieldEncryption:
    assert isinstance(payloads.encryption, FieldEncryption)
    return payloads.encryption
