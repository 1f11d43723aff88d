"""Contract rules for the erasure of subjects: all of the subject goes, nothing of others, and a kill is harmless."""

from __future__ import annotations

import json
import random
from base64 import b64encode
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any
from uuid import UUID, uuid4

import pytest

from outrider import Event, Outbox
from outrider.errors import Permanent
from outrider.event import SKIPPED_TYPE, DeadLetterReason, Delivery, OnDeadLetter, erased_name, is_erased, subject_hash
from outrider.inbox.consumer import ConsumerMaintenance
from outrider.inbox.executor import HandlerExecutor
from outrider.inbox.model import EventOutcome, Held, InboxCriteria, InboxDeadLettered
from outrider.inbox.router import Route, Routes
from outrider.inbox.settings import ConsumerSettings
from outrider.inbox.store import InboxStore
from outrider.outbox.model import Criteria
from outrider.outbox.relay import Relay
from outrider.privacy.erasure import BLOCKING_MAX, Erasure, ErasureResult, KeyDestruction
from outrider.privacy.erasure_store import Blocker, Blocking, ErasurePlace, ErasureStore
from outrider.privacy.store import NewSubjectKey, SubjectKeyStore
from outrider.saga.audit import AuditCheck, verify
from outrider.saga.model import (
    AuditEntry,
    Claim,
    JournalEntry,
    MessageKind,
    NewSagaMessage,
    Phase,
    SagaChange,
    SagaRecord,
    Status,
    StepStatus,
)
from outrider.saga.participant import CommandOutcome, Participant
from outrider.saga.store import SagaStore
from outrider.testing.fakes import MemoryBroker, RecordingObserver
from outrider.testing.harness import Harness
from outrider.testing.saga_harness import LEASE_SECONDS, ORDER, new_saga
from outrider.wire import decode

ANN, BOB = "customer:ann", "customer:bob"
"""The subject that is erased, and a neighbour."""

CANARY, NEIGHBOUR = "ann@example.com", "bob@example.com"
"""The values that go, and stay."""

EMAIL = {ANN: CANARY, BOB: NEIGHBOUR}

Dump = Callable[[], Awaitable[Mapping[str, list[str]]]]
"""Returns every row of every table, as text; bytes as hexadecimal digits."""


@dataclass(frozen=True, slots=True)
class ErasureBench:
    """The stores of one database."""

    harness: Harness
    erasure: ErasureStore
    privacy: SubjectKeyStore
    inbox: InboxStore
    sagas: SagaStore
    dump: Dump
    broker: MemoryBroker = field(default_factory=lambda: MemoryBroker(ordered=True))
    relays: list[Relay] = field(default_factory=list)

    async def publish(self, *events: Event) -> list[Any]:
        """Stage events, and let the relay publish them; return the messages that it has published."""
        if not self.relays:
            self.relays.append(self.harness.relay(self.broker))
        before = len(self.broker.log)
        await self.harness.stage(*events)
        # A lane that an operator has taken comes back with a later heartbeat.
        for _ in range(3):
            await self.harness.advance(seconds=10)
            await self.harness.works(*self.relays)
        return self.broker.log[before:]

    async def receive(self, consumer: str, outcome: Any, *events: Event) -> None:
        """Publish events, and write the same outcome of each at a consumer."""
        received = []
        for message in await self.publish(*events):
            headers = {name: text.encode() for name, text in message.headers.items()}
            received.append(decode(Delivery(message.topic, message.key.encode(), message.body, headers)))
        async with self.inbox.transaction() as tx:
            await self.inbox.record_receipts(tx, consumer, received, ordered=False)
            await self.inbox.record_outcomes(tx, consumer, [EventOutcome(each, outcome) for each in received], {})

    async def claim(self, name: str, subject: str | None, **fields: Any) -> SagaRecord:
        """Start a saga of a subject, and claim it."""
        new = new_saga(name)._replace(subject=subject, state=_text(EMAIL.get(subject or "", "")), **fields)
        async with self.sagas.transaction() as tx:
            assert await self.sagas.start(tx, new)
        claimed = await self.sagas.claim("w1", [ORDER], limit=10, lease_seconds=LEASE_SECONDS)
        return next(record for record in claimed if record.instance.saga_id == new.saga_id)

    async def save(self, record: SagaRecord, status: Status, email: str, **turn: Any) -> None:
        """Release a saga with texts that name an address."""
        to, error = replace(record.instance, status=status, last_error=email), f"no mail to {email}"
        entry = JournalEntry("reserve", Phase.ACTION, StepStatus.DONE, 1, error=error, data=json.dumps(email))
        notes = [AuditEntry(Status.STARTED, status, "reserve", "action done", "w1", f"told {email}")] * 2
        change = SagaChange(to, [entry], notes=notes, release=True, at=record.now, keep_state=True, **turn)
        claim = Claim("w1", to.saga_id, to.epoch)
        async with self.sagas.transaction() as tx:
            await self.sagas.save(tx, claim, change, LEASE_SECONDS)

    async def end_saga(self, name: str, subject: str, status: Status = Status.COMPLETED) -> UUID:
        """Leave a saga that has ended, with journal, mailbox, audit details, and a reply of its participant."""
        record, email = await self.claim(name, subject), EMAIL[subject]
        saga_id = record.instance.saga_id
        event_id, key = uuid4(), f"{saga_id}:reserve"
        message = NewSagaMessage(saga_id, MessageKind.REPLY, "stock.reserved", key, _text(email), event_id)
        async with self.sagas.transaction() as tx:
            assert await self.sagas.deliver(tx, [message])
        found = await self.sagas.admin.show(saga_id)
        assert found
        await self.save(record, status, email, seen=[each.message_id for each in found.messages])
        outbox, reply = Outbox(), json.dumps({"rejection": False, "reply": {"payload": email}}).encode()

        async def answer(conn: Any) -> None:
            await outbox.perform(conn, "participant_enter", "stock", key, Phase.ACTION)
            await outbox.perform(conn, "participant_save_reply", "stock", key, Phase.ACTION, reply)

        await self.harness.transact(answer)
        return saga_id

    async def fill(self, subject: str, name: str = "") -> None:
        """Store contents of a subject in every place where they are erased; `name` makes another filling."""
        letter = InboxDeadLettered(DeadLetterReason.POISON_MESSAGE, {"error": EMAIL[subject]}, OnDeadLetter.SKIP, 1)
        await self.publish(event(subject), event(subject))
        await self.receive("billing", letter, event(subject))
        [dead] = await self.harness.stage(event(subject))
        assert await self.harness.store.admin.dead_letter(dead, "ann", {"error": EMAIL[subject]}, "skip")
        await self.end_saga(f"of {subject}{name}", subject)
        await self.privacy.insert_subject_keys([NewSubjectKey(key_of(subject + name), subject, '{"key": "m1"}')])

    def run(self, *subjects: str, store: Any = None, keys: Any = None, discard: bool = False) -> Erasure:
        """Return a run over subjects."""
        settle = self.discard if discard else None
        return Erasure(subjects or (ANN,), store or self.erasure, keys or KeyDestruction(self.privacy), "ann", settle)

    async def discard(self, row: Blocking) -> bool:
        """Settle an undelivered event or a dead letter."""
        if row.kind is Blocker.CONSUMER_DEAD_LETTER:
            return await self.inbox.admin.discard([row.id], "ann") == 1
        admin = self.harness.store.admin
        if row.kind is Blocker.EVENT:
            assert await admin.dead_letter(row.id, "ann", {"error": ""}, "block")
        return await admin.discard([row.id], "ann") == 1

    async def readable(self, text: str) -> list[str]:
        """Return the rows in which a text can be read, in any of the forms in which stores keep texts."""
        forms = text, text.encode().hex(), b64encode(text.encode()).decode()
        rows = (f"{table}: {row}" for table, rows in (await self.dump()).items() for row in rows)
        return [row for row in rows if any(form in row for form in forms)]

    async def audit_is_sound(self) -> int:
        """Verify the audit log; return the number of lines without details."""
        report = await verify(self.sagas.audit, AuditCheck())
        assert report.findings == []
        return report.without_details


def _text(email: str) -> bytes:
    return json.dumps({"email": email}).encode()


def key_of(subject: str) -> str:
    """Return the id of the key of a subject."""
    return f"s-{subject_hash(subject)[:16]}"


def event(subject: str, **fields: Any) -> Event:
    """Return an event of a subject, with its address in the payload and in a header."""
    plain: dict[str, Any] = {"topic": "orders", "headers": {"note": EMAIL[subject]}, "subject": subject, "key": "A"}
    return Event("order.placed", {"email": EMAIL[subject]}, **{**plain, **fields})


class Killed(Exception):
    """The end of a process in the middle of its work."""


@dataclass(slots=True)
class KilledStores:
    """The stores of a run that dies at one of its commits, just before it or just after it."""

    stores: tuple[Any, ...]
    commits: int
    committed: bool
    names: list[str] = field(default_factory=list)

    WRITING = ("open_run", "finish_run", "skip_held", "count", "erase_events", "erase_saga", "destroy")

    def __getattr__(self, name: str) -> Any:
        verb = getattr(next(store for store in self.stores if hasattr(store, name)), name)
        if name not in self.WRITING:
            return verb

        async def write(*args: Any) -> Any:
            self.commits -= 1
            self.names.append(name)
            if self.commits == 0 and not self.committed:
                self.end()
            result = await verb(*args)
            if self.commits == 0:
                self.end()
            return result

        return write

    def end(self) -> None:
        """End the run, as a kill does."""
        raise Killed


class ErasureContract:
    """All rules of the erasure of subjects. Subclass it, and give it a `bench` fixture."""

    async def test_everything_of_a_subject_is_erased_and_nothing_of_others(self, bench: ErasureBench) -> None:
        await bench.fill(ANN)
        await bench.fill(BOB)
        before = await bench.readable(NEIGHBOUR)
        assert len(await bench.readable(CANARY)) == len(before) > 6
        [result] = await bench.run().run()
        assert result.is_complete
        assert await bench.readable(CANARY) == []
        assert await bench.readable(f'"{ANN}"') == []
        assert await bench.readable(NEIGHBOUR) == before
        assert result.run
        assert result.run.erased == {
            "archived event": 3,
            "dead letter": 1,
            "consumer dead letter": 1,
            "saga": 1,
        }
        assert result.run.readable == {"order.placed": 3}
        assert result.run.finished_at
        assert (result.run.receipt or {})["keys_destroyed"] == [key_of(ANN)]
        assert await bench.audit_is_sound() == 2

    async def test_rows_keep_their_place_and_say_that_they_were_erased(self, bench: ErasureBench) -> None:
        await bench.fill(ANN)
        counts = {table: len(rows) for table, rows in (await bench.dump()).items() if table != "sqlite_sequence"}
        [result] = await bench.run().run()
        assert result.is_complete
        after = {table: len(rows) for table, rows in (await bench.dump()).items() if table in counts}
        assert after == {**counts, "gdpr_erasure_log": 1}
        [letter] = await bench.harness.store.admin.dead_letters(Criteria())
        assert is_erased(letter["payload"])
        assert letter["failure"] == {"error": "erased"}
        assert (letter["event_type"], letter["topic"]) == ("order.placed", "orders")
        [dead] = await bench.inbox.admin.dead_letters(InboxCriteria())
        assert is_erased(json.loads(dead["body"]))
        assert "message_id" in dead["headers"]
        record = await bench.sagas.admin.show(new_saga(f"of {ANN}").saga_id)
        assert record
        assert is_erased(json.loads(record.instance.state))
        assert (record.instance.status, record.instance.subject) == (Status.COMPLETED, None)
        assert record.instance.last_error is None
        assert [(entry.step, entry.error, entry.data) for entry in record.journal] == [("reserve", None, None)]

    async def test_an_erased_event_that_is_replayed_gets_a_receipt_and_calls_no_handler(
        self, bench: ErasureBench
    ) -> None:
        await bench.fill(ANN)
        await bench.run().run()
        [dead] = await bench.inbox.admin.dead_letters(InboxCriteria())
        assert await bench.inbox.admin.replay([dead["id"]], "ann") == 1
        handled = list[Event]()

        async def handler(event: Event, tx: Any) -> None:
            handled.append(event)

        routes = Routes("billing", ConsumerSettings(), {("orders", "order.placed"): Route(handler)})
        observer = RecordingObserver()
        executor = HandlerExecutor(bench.inbox, routes, observer, random.Random(0))
        await ConsumerMaintenance(bench.inbox, routes, executor, observer).run_maintenance()
        await executor.wait_for_drains()
        assert handled == []
        assert await bench.inbox.admin.counts() == {"waiting": 0, "blocked_streams": 0, "dead_letters": 0}
        assert len(await bench.inbox.admin.receipts("billing", [dead["event_id"]])) == 1

    async def test_a_repeated_command_of_an_erased_saga_gets_no_reply(self, bench: ErasureBench) -> None:
        saga_id = await bench.end_saga("A-7", ANN)
        await bench.run().run()
        command = Event("stock.reserve", {}, headers={"saga_key": f"{saga_id}:reserve", "saga_phase": "action"})

        async def reserve(command: Event, tx: Any) -> Event:
            raise AssertionError("the command was executed before")

        stock = Participant("stock", outbox=Outbox())
        outcome = await bench.harness.transact(lambda conn: stock.execute(conn, command, reserve))
        assert outcome is CommandOutcome.REPEATED
        assert await bench.harness.store.admin.events(Criteria()) == []

    async def test_a_second_run_changes_nothing_and_names_the_first(self, bench: ErasureBench) -> None:
        await bench.fill(ANN)
        [first] = await bench.run().run()
        before = await bench.dump()
        [second] = await bench.run().run()
        assert second.repeated
        assert second.run == first.run
        assert await bench.dump() == before

    async def test_a_key_that_was_made_since_the_last_run_is_destroyed_by_the_next(self, bench: ErasureBench) -> None:
        await bench.fill(ANN)
        await bench.run().run()
        await bench.privacy.insert_subject_keys([NewSubjectKey("s-0000000000000001", ANN, '{"key": "m1"}')])
        [result] = await bench.run().run()
        assert not result.repeated
        assert result.run
        assert "s-0000000000000001" in (result.run.receipt or {})["keys_destroyed"]
        assert await bench.privacy.subject_keys([ANN], []) == []

    async def test_a_search_counts_and_changes_nothing(self, bench: ErasureBench) -> None:
        await bench.fill(ANN)
        before = await bench.dump()
        [found] = await bench.run().search()
        assert found.rows == {"archived event": 3, "dead letter": 1, "consumer dead letter": 1, "saga": 1}
        assert await bench.dump() == before
        await bench.run().run()
        [left] = await bench.run().search()
        assert (left.rows.total(), left.blocking) == (0, [])

    async def test_several_subjects_are_erased_together_each_with_a_run(self, bench: ErasureBench) -> None:
        await bench.fill(ANN)
        await bench.fill(BOB)
        results = await bench.run(ANN, BOB).run()
        assert [(each.subject, each.is_complete) for each in results] == [(ANN, True), (BOB, True)]
        assert await bench.readable(CANARY) + await bench.readable(NEIGHBOUR) == []
        runs = await bench.erasure.runs([subject_hash(ANN), subject_hash(BOB)])
        assert sorted(run.erased.total() for run in runs) == [6, 6]

    @pytest.mark.parametrize("committed", [False, True])
    async def test_a_run_that_was_killed_at_any_commit_is_finished_by_the_next(
        self, bench: ErasureBench, committed: bool
    ) -> None:
        await bench.fill(BOB)
        before = await bench.readable(NEIGHBOUR)
        kill, names = 1, set[str]()
        while True:
            await self._fill_again(bench, kill)
            stores: Any = KilledStores((bench.erasure, KeyDestruction(bench.privacy)), kill, committed)
            try:
                await bench.run(store=stores, keys=stores).run()
                break
            except Killed:
                names.add(stores.names[-1])
            [result] = await bench.run().run()
            assert result.is_complete
            assert await bench.readable(CANARY) == []
            assert await bench.readable(NEIGHBOUR) == before
            await bench.audit_is_sound()
            kill += 1
        assert names == {"open_run", "erase_events", "erase_saga", "destroy", "finish_run"}

    async def _fill_again(self, bench: ErasureBench, number: int) -> None:
        """Store contents of the subject once more, under new names."""
        await bench.publish(event(ANN))
        [dead] = await bench.harness.stage(event(ANN))
        assert await bench.harness.store.admin.dead_letter(dead, "ann", {"error": CANARY}, "skip")
        await bench.end_saga(f"number {number}", ANN)
        await bench.privacy.insert_subject_keys([NewSubjectKey(f"s-{number:016x}", ANN, '{"key": "m1"}')])

    async def test_an_undelivered_event_stands_in_the_way_and_nothing_is_changed(self, bench: ErasureBench) -> None:
        await bench.fill(ANN)
        [event_id] = await bench.harness.stage(event(ANN))
        before = await bench.dump()
        [result] = await bench.run().run()
        assert [(row.kind, row.id) for row in result.blocking] == [(Blocker.EVENT, event_id)]
        assert not result.is_complete
        assert await bench.dump() == before

    async def test_a_discarded_event_leaves_a_marker_in_its_place_and_the_stream_goes_on(
        self, bench: ErasureBench
    ) -> None:
        numbered = [event(each, sequence="auto", key="B") for each in (BOB, ANN, BOB)]
        await bench.harness.stage(*numbered)
        [result] = await bench.run(discard=True).run()
        assert result.is_complete
        assert result.run
        assert result.run.erased == {"discarded event": 1}
        found = [(each.headers["sequence"], each.headers["event_type"]) for each in await bench.publish()]
        assert found == [("1", "order.placed"), ("2", SKIPPED_TYPE), ("3", "order.placed")]
        assert await bench.readable(CANARY) == []

    async def test_an_event_that_waits_at_a_consumer_becomes_a_marker(self, bench: ErasureBench) -> None:
        await bench.receive("billing", Held(), event(ANN, sequence=7, key="B"))
        [result] = await bench.run().run()
        assert [row.kind for row in result.blocking] == [Blocker.HELD_EVENT]
        [result] = await bench.run(discard=True).run()
        assert result.is_complete
        assert result.run
        assert result.run.erased == {"skipped event at a consumer": 1, "archived event": 1}
        assert await bench.readable(CANARY) == []
        [held] = (await bench.dump())["inbox_held"]
        assert SKIPPED_TYPE in held

    async def test_dead_letters_that_block_their_streams_stand_in_the_way_or_are_discarded(
        self, bench: ErasureBench
    ) -> None:
        [dead] = await bench.harness.stage(event(ANN, key="C"))
        assert await bench.harness.store.admin.dead_letter(dead, "ann", {"error": CANARY}, "block")
        letter = InboxDeadLettered(DeadLetterReason.POISON_MESSAGE, {"error": CANARY}, OnDeadLetter.BLOCK, 1)
        await bench.receive("billing", letter, event(ANN, key="D"))
        [result] = await bench.run().run()
        assert {row.kind for row in result.blocking} == {Blocker.DEAD_LETTER, Blocker.CONSUMER_DEAD_LETTER}
        [result] = await bench.run(discard=True).run()
        assert result.is_complete
        assert await bench.harness.store.admin.dead_letters(Criteria()) == []
        assert await bench.inbox.admin.dead_letters(InboxCriteria()) == []
        assert await bench.readable(CANARY) == []

    @pytest.mark.parametrize("status", [Status.RUNNING, Status.COMPENSATING, Status.FAILED])
    async def test_a_saga_that_has_not_ended_always_stands_in_the_way(
        self, bench: ErasureBench, status: Status
    ) -> None:
        saga_id = await bench.end_saga("A-7", ANN, status)
        before = await bench.dump()
        [result] = await bench.run(discard=True).run()
        assert [(row.kind, row.id, row.place) for row in result.blocking] == [(Blocker.SAGA, saga_id, status.value)]
        assert await bench.dump() == before

    async def test_a_child_that_its_parent_may_still_compensate_stands_in_the_way(self, bench: ErasureBench) -> None:
        parent = await bench.claim("parent", None)
        child = await bench.claim("child", ANN, parent_id=parent.instance.saga_id, parent_step="pack")
        await bench.save(child, Status.COMPLETED, CANARY)
        [result] = await bench.run().run()
        assert [row.id for row in result.blocking] == [child.instance.saga_id]
        await bench.save(parent, Status.COMPLETED, "")
        [result] = await bench.run().run()
        assert result.is_complete
        assert await bench.readable(CANARY) == []

    async def test_an_event_that_arrives_during_a_run_keeps_key_and_run_open(self, bench: ErasureBench) -> None:
        await bench.fill(ANN)

        class Staging:
            """Stages an event of the subject once the contents are erased."""

            def __getattr__(self, name: str) -> Any:
                return getattr(bench.erasure, name)

            async def erase_saga(self, *args: Any) -> bool:
                await bench.harness.stage(event(ANN))
                return await bench.erasure.erase_saga(*args)

        store: Any = Staging()
        [result] = await bench.run(store=store).run()
        assert [row.kind for row in result.blocking] == [Blocker.EVENT]
        assert await bench.privacy.subject_keys([ANN], []) != []
        await bench.publish()
        [result] = await bench.run().run()
        assert result.is_complete
        assert await bench.readable(CANARY) == []
        assert [key.destroyed_at is None for key in await bench.privacy.subject_keys([erased_name(ANN)], [])] == [False]

    async def test_a_key_that_is_made_while_the_last_pass_runs_is_destroyed_as_well(self, bench: ErasureBench) -> None:
        await bench.fill(ANN)
        later = "s-00000000000000aa"

        class Staging(KeyDestruction):
            """Makes a key for the subject as soon as the first is destroyed, as a program that stages does."""

            async def destroy(self, subject: str) -> list[str]:
                done = await self.store.destroy_subject_key(subject)
                if done == [key_of(ANN)]:
                    await self.store.insert_subject_keys([NewSubjectKey(later, subject, '{"key": "m1"}')])
                return done

        [result] = await bench.run(keys=Staging(bench.privacy)).run()
        assert result.is_complete
        assert result.run
        assert result.run.receipt
        assert set(result.run.receipt["keys_destroyed"]) == {key_of(ANN), later}
        assert await bench.privacy.subject_keys([ANN], []) == []

    async def test_a_subject_that_gets_a_new_key_in_every_pass_is_not_complete(self, bench: ErasureBench) -> None:
        await bench.fill(ANN)
        ids = (f"s-{number:016x}" for number in range(1, 100))

        class Staging(KeyDestruction):
            """Makes a key for the subject whenever one is destroyed."""

            async def destroy(self, subject: str) -> list[str]:
                done = await self.store.destroy_subject_key(subject)
                await self.store.insert_subject_keys([NewSubjectKey(next(ids), subject, '{"key": "m1"}')])
                return done

        [result] = await bench.run(keys=Staging(bench.privacy)).run()
        assert not result.is_complete
        [result] = await bench.run().run()
        assert result.is_complete
        assert await bench.privacy.subject_keys([ANN], []) == []

    async def test_events_that_only_mention_a_subject_hide_none_that_stands_in_the_way(
        self, bench: ErasureBench
    ) -> None:
        await bench.harness.stage(*(event(BOB, headers={"about": ANN}) for _ in range(BLOCKING_MAX)))
        await bench.harness.stage(event(ANN))
        [result] = await bench.run().run()
        assert [row.kind for row in result.blocking] == [Blocker.EVENT]
        assert result.run is None

    async def test_the_details_of_removed_sagas_are_erased_and_their_anchors_verify(self, bench: ErasureBench) -> None:
        await bench.end_saga("A-7", ANN)
        await bench.end_saga("B-7", BOB)
        await bench.harness.advance(seconds=200_000)
        assert (await bench.sagas.prune(saga_days=1, audit_days=10, participant_memory_days=1)).sagas == 2
        assert await bench.readable(CANARY) != []
        [found] = await bench.run().search()
        assert found.rows == {ErasurePlace.REMOVED_SAGA: 1}
        before = await bench.readable(NEIGHBOUR)
        [result] = await bench.run().run()
        assert result.is_complete
        assert await bench.readable(CANARY) == []
        assert await bench.readable(NEIGHBOUR) == before
        assert await bench.audit_is_sound() == 2

    async def test_an_event_that_only_mentions_a_subject_is_left_alone(self, bench: ErasureBench) -> None:
        await bench.publish(event(BOB, headers={"about": ANN, "note": NEIGHBOUR}))
        before = await bench.dump()
        [found] = await bench.run().search()
        assert found.rows.total() == 0
        [result] = await bench.run().run()
        assert result.is_complete
        after, log = await bench.dump(), ("gdpr_erasure_log", "sqlite_sequence")
        assert [name for name in before if before[name] != after[name] and name not in log] == []

    @pytest.mark.parametrize("subject", ['o\'hara "x"/y\\%_', "käufer:ß", "客:1"])
    async def test_a_subject_of_any_characters_is_found(self, bench: ErasureBench, subject: str) -> None:
        for number in range(3):
            placed = Event("order.placed", {"email": CANARY}, topic="orders", key=f"k{number}", subject=subject)
            await bench.publish(placed)
        [result] = await bench.run(subject).run()
        assert result.is_complete
        assert await bench.readable(CANARY) == []
        results: list[ErasureResult] = await bench.run(subject).run()
        assert results[0].repeated

    async def test_details_can_be_removed_only_while_a_run_is_open(self, bench: ErasureBench) -> None:
        saga_id = await bench.end_saga("A-7", ANN)
        await bench.erasure.open_run(subject_hash(ANN), "ann")
        [run] = await bench.erasure.runs([subject_hash(ANN)])
        assert await bench.erasure.finish_run(run.id, {})
        assert not await bench.erasure.finish_run(run.id, {"again": True})
        [row] = (await bench.erasure.page(ErasurePlace.SAGA, [ANN], None)).rows
        assert str(row.key[0]) == str(saga_id)
        with pytest.raises(Permanent, match="there is no open run"):
            await bench.erasure.erase_saga(ErasurePlace.SAGA, row, run.id)
        assert CANARY in str(await bench.sagas.admin.audit(saga_id))
