"""Contract rules for turns: fenced, guarded by version, and atomic."""

from __future__ import annotations

import asyncio
import json
from dataclasses import replace
from datetime import timedelta
from typing import Any
from uuid import UUID, uuid4

import pytest

import outrider
from outrider.errors import ConcurrencyError, InvalidHandler
from outrider.event import Event, OnDeadLetter
from outrider.outbox.model import Settlements
from outrider.outbox.store import OutboxStore
from outrider.saga.model import (
    AuditEntry,
    JournalEntry,
    Phase,
    SagaRecord,
    Status,
    StepStatus,
    Uncertainty,
    Undelivered,
)
from outrider.testing.saga_harness import LEASE_SECONDS, TRACE, SagaBench, claim_of, new_saga, reply

RESERVE = JournalEntry("reserve", Phase.ACTION, StepStatus.STARTED, 1, attempts=1)

RUNNING = AuditEntry(Status.STARTED, Status.RUNNING, "reserve", "started", "ann", "first attempt")

ODD = "j\udcf6rg\0"

FAILURE = {"error": "too large"}


async def _untouched(bench: SagaBench, record: SagaRecord) -> None:
    shown = await bench.show(record.instance.saga_id)
    assert (shown.instance.version, shown.instance.status, shown.journal) == (0, Status.STARTED, ())
    assert len(shown.messages) == len(record.messages)
    assert len(await bench.store.admin.audit(record.instance.saga_id)) == 1


class TurnRules:
    """Rules for saving a turn."""

    async def test_a_turn_stores_every_reason_of_uncertainty(self, bench: SagaBench) -> None:
        record = await bench.start_and_claim()
        entries = [replace(RESERVE, step=reason.value, uncertainty=reason) for reason in Uncertainty]
        await bench.save(record, entries=entries)
        shown = await bench.show(record.instance.saga_id)
        assert {entry.step: entry.uncertainty for entry in shown.journal} == {each.value: each for each in Uncertainty}

    async def test_a_turn_is_written_whole_and_read_back_as_it_was(self, bench: SagaBench) -> None:
        record = await bench.start_and_claim()
        await bench.advance(seconds=2)
        later = record.now + timedelta(seconds=90.25)
        entry = replace(
            RESERVE,
            due_at=later,
            error="no answer",
            started_at=record.now,
            ended_at=later,
            uncertainty=Uncertainty.OUTCOME_UNKNOWN,
            undelivered=Undelivered.DEAD_LETTER,
            command_event_id=uuid4(),
            reply_event_id=uuid4(),
            unavailable_since=record.now,
            data=json.dumps(["caf\u00e9", {"room": 7}]),
        )
        now = await bench.save(
            record,
            state=b'{"amount": 13, "name": "\xc3\xa9"}',
            status=Status.RUNNING,
            current_step="reserve",
            last_error="no answer",
            retry_count=3,
            needs_attention=True,
            entries=[entry],
            notes=[RUNNING],
        )
        shown = await bench.show(record.instance.saga_id)
        saved = shown.instance
        assert (saved.state, saved.status) == (b'{"amount": 13, "name": "\xc3\xa9"}', Status.RUNNING)
        assert (saved.current_step, saved.last_error, saved.retry_count) == ("reserve", "no answer", 3)
        assert (saved.needs_attention, saved.version, saved.ended_at) == (True, 1, None)
        assert saved.updated_at == now == record.now + timedelta(seconds=2)
        assert saved.started_at == record.now
        assert shown.journal == (entry,)

    async def test_what_another_has_claimed_meanwhile_cannot_be_saved(self, bench: SagaBench) -> None:
        await bench.start(new_saga())
        await bench.deliver(reply(new_saga().saga_id))
        late = await bench.claim_one()
        await bench.advance(seconds=LEASE_SECONDS)
        await bench.claim_one("bob")
        messages = [message.message_id for message in late.messages]
        with pytest.raises(ConcurrencyError):
            await bench.save(late, status=Status.RUNNING, entries=[RESERVE], taken=messages, notes=[RUNNING])
        await _untouched(bench, late)

    async def test_a_worker_of_the_same_name_with_an_older_claim_is_late_too(self, bench: SagaBench) -> None:
        late = await bench.start_and_claim()
        await bench.advance(seconds=LEASE_SECONDS)
        await bench.claim_one("ann")
        with pytest.raises(ConcurrencyError):
            await bench.save(late, status=Status.RUNNING, entries=[RESERVE], notes=[RUNNING])
        await _untouched(bench, late)

    async def test_a_saga_that_was_given_back_cannot_be_saved(self, bench: SagaBench) -> None:
        record = await bench.start_and_claim()
        await bench.release(record)
        with pytest.raises(ConcurrencyError):
            await bench.save(record, version=1)

    async def test_a_turn_decided_on_an_older_version_is_rejected(self, bench: SagaBench) -> None:
        record = await bench.start_and_claim()
        await bench.save(record, status=Status.RUNNING)
        with pytest.raises(ConcurrencyError):
            await bench.save(record, status=Status.COMPENSATING, entries=[RESERVE], notes=[RUNNING])
        shown = await bench.show(record.instance.saga_id)
        assert (shown.instance.version, shown.instance.status, shown.journal) == (1, Status.RUNNING, ())
        await bench.save(shown, status=Status.COMPENSATING)
        assert (await bench.show(record.instance.saga_id)).instance.version == 2

    async def test_of_two_turns_at_once_one_is_rejected(self, bench: SagaBench) -> None:
        record = await bench.start_and_claim()
        turns = [bench.save(record, retry_count=number, notes=[RUNNING]) for number in (1, 2)]
        ended = await asyncio.gather(*turns, return_exceptions=True)
        assert sum(isinstance(end, ConcurrencyError) for end in ended) == 1
        assert (await bench.show(record.instance.saga_id)).instance.version == 1
        assert len(await bench.store.admin.audit(record.instance.saga_id)) == 2

    async def test_a_turn_is_rolled_back_with_its_transaction(self, bench: SagaBench) -> None:
        await bench.start(new_saga())
        await bench.deliver(reply(new_saga().saga_id))
        record = await bench.claim_one()
        turn: dict[str, Any] = {"entries": [RESERVE], "taken": [record.messages[0].message_id], "notes": [RUNNING]}
        async with bench.rolled_back() as tx:
            await bench.save_in(tx, record, status=Status.RUNNING, release=True, **turn)
        await _untouched(bench, record)
        await bench.save(record, status=Status.RUNNING, **turn)

    async def test_a_transaction_sees_what_it_saved(self, bench: SagaBench) -> None:
        record = await bench.start_and_claim()
        async with bench.store.transaction() as tx:
            await bench.save_in(tx, record, status=Status.RUNNING, entries=[RESERVE])
            seen = await bench.store.load(tx, record.instance.saga_id)
            assert seen is not None
            assert (seen.instance.status, seen.instance.version, seen.journal) == (Status.RUNNING, 1, (RESERVE,))
            await bench.save_in(tx, seen, status=Status.COMPENSATING)
        assert (await bench.show(record.instance.saga_id)).instance.version == 2

    async def test_a_turn_without_release_keeps_the_claim_for_another_lease(self, bench: SagaBench) -> None:
        record = await bench.start_and_claim()
        await bench.advance(seconds=LEASE_SECONDS - 1)
        now = await bench.save(record)
        shown = await bench.show(record.instance.saga_id)
        assert (shown.instance.owner, shown.instance.epoch) == ("ann", 1)
        assert shown.instance.wake_at == now + timedelta(seconds=LEASE_SECONDS)

    async def test_a_released_saga_is_due_when_it_was_said(self, bench: SagaBench) -> None:
        record = await bench.start_and_claim()
        await bench.release(record, wake_seconds=60)
        await bench.advance(seconds=59)
        assert await bench.claim("bob") == []
        await bench.advance(seconds=1)
        assert (await bench.claim_one("bob")).instance.epoch == 2

    async def test_a_saga_released_without_a_time_is_due_never_again(self, bench: SagaBench) -> None:
        record = await bench.start_and_claim()
        await bench.release(record)
        shown = await bench.show(record.instance.saga_id)
        assert (shown.instance.owner, shown.instance.wake_at) == (None, None)
        await bench.advance(seconds=10**6)
        assert await bench.claim("bob") == []

    async def test_the_journal_has_one_line_for_a_step_and_phase_and_the_last_one_counts(
        self, bench: SagaBench
    ) -> None:
        record = await bench.start_and_claim()
        compensate = JournalEntry("reserve", Phase.COMPENSATION, StepStatus.PLANNED, 1)
        await bench.save(record, entries=[RESERVE, JournalEntry("charge", Phase.ACTION, StepStatus.STARTED, 2)])
        done = replace(RESERVE, status=StepStatus.DONE, attempts=2, reply_event_id=uuid4())
        await bench.save(await bench.show(record.instance.saga_id), entries=[RESERVE, done, compensate])
        journal = (await bench.show(record.instance.saga_id)).journal
        assert journal == (done, JournalEntry("charge", Phase.ACTION, StepStatus.STARTED, 2), compensate)

    async def test_items_of_a_list_are_lines_of_the_journal_with_data_of_their_own(self, bench: SagaBench) -> None:
        record = await bench.start_and_claim()
        group = replace(RESERVE, data=json.dumps(["a"] * 1000), started_at=record.now)
        items = [JournalEntry(f"reserve[{n}]", Phase.ACTION, StepStatus.DONE, n + 2, data=str(n)) for n in range(1000)]
        await bench.save(record, entries=[group, *items])
        shown = await bench.show(record.instance.saga_id)
        assert shown.journal == (group, *items)
        await bench.save(shown, entries=[replace(items[7], data=None)])
        assert (await bench.show(record.instance.saga_id)).journal[8].data is None

    async def test_a_skipped_step_is_kept_without_a_start(self, bench: SagaBench) -> None:
        record = await bench.start_and_claim()
        skipped = JournalEntry("reserve", Phase.ACTION, StepStatus.SKIPPED, 1, ended_at=record.now)
        await bench.save(record, entries=[skipped])
        assert (await bench.show(record.instance.saga_id)).journal == (skipped,)

    async def test_the_time_of_the_end_is_the_first_one_and_goes_when_a_saga_goes_on(self, bench: SagaBench) -> None:
        record = await bench.start_and_claim()
        ended = await bench.save(record, status=Status.FAILED)
        await bench.advance(seconds=5)
        await bench.save(await bench.show(record.instance.saga_id), status=Status.FAILED)
        shown = await bench.show(record.instance.saga_id)
        assert shown.instance.ended_at == ended
        await bench.save(shown, status=Status.RUNNING)
        assert (await bench.show(record.instance.saga_id)).instance.ended_at is None

    async def test_what_is_not_there_cannot_be_loaded(self, bench: SagaBench) -> None:
        async with bench.store.transaction() as tx:
            assert await bench.store.load(tx, new_saga().saga_id) is None
            assert await bench.store.load(tx, new_saga().saga_id, for_update=True) is None

    async def test_any_text_of_an_error_can_be_saved(self, bench: SagaBench) -> None:
        record = await bench.start_and_claim()
        odd = "a\0b\ud800c"
        note = RUNNING._replace(detail=odd)
        await bench.save(record, last_error=odd, entries=[replace(RESERVE, error=odd)], notes=[note])
        shown = await bench.show(record.instance.saga_id)
        assert shown.instance.last_error == shown.journal[0].error == "a\\0b?c"
        assert (await bench.store.admin.audit(record.instance.saga_id))[-1]["detail"] == "a\\0b?c"

    async def test_notes_are_kept_in_order_with_time_actor_and_trace(self, bench: SagaBench) -> None:
        record = await bench.start_and_claim()
        await bench.advance(seconds=1)
        ignored = AuditEntry(Status.RUNNING, Status.RUNNING, None, "ignored", "bob")
        await bench.save(record, status=Status.RUNNING, notes=[RUNNING, ignored])
        _, first, second = await bench.store.admin.audit(record.instance.saga_id)
        assert first == {
            "at": record.now,
            "old_status": "started",
            "new_status": "running",
            "step": "reserve",
            "what": "started",
            "actor": "ann",
            "detail": "first attempt",
            "traceparent": TRACE,
        }
        assert (second["what"], second["actor"], second["step"], second["detail"]) == ("ignored", "bob", None, "")

    async def test_a_claim_reads_what_the_owner_before_has_written(self, bench: SagaBench) -> None:
        record = await bench.start_and_claim()
        await bench.release(record, entries=[RESERVE], state=b'{"amount": 99}', wake_seconds=0)
        again = await bench.claim_one("bob")
        assert (again.journal, again.instance.state, again.instance.version) == ((RESERVE,), b'{"amount": 99}', 1)
        assert claim_of(again).epoch == 2

    async def test_a_steps_function_works_in_the_turns_transaction(self, bench: SagaBench) -> None:
        record = await bench.start_and_claim()

        async with bench.store.transaction() as tx:

            async def act(saved: SagaRecord, connection: Any) -> str:
                assert connection is tx.connection
                await bench.save_in(tx, saved, status=Status.RUNNING)
                return "what it returns"

            assert await tx.call(act, record) == "what it returns"
        assert (await bench.show(record.instance.saga_id)).instance.status is Status.RUNNING


async def _yields(_: Any, tx: Any) -> Any:
    yield tx


class HandlerTransactionRules:
    """Rules for the transaction of a step function."""

    async def test_what_a_function_returns_comes_back_and_its_transaction_is_saved(self, bench: SagaBench) -> None:
        record = await bench.start_and_claim()

        async def create(argument: int, tx: Any) -> int:
            return argument + 1

        async with bench.store.transactions.open() as tx:
            loaded = await bench.store.load(tx, record.instance.saga_id, for_update=True)
            assert loaded is not None
            assert await tx.call(create, 1) == 2
            await bench.save_in(tx, loaded, status=Status.RUNNING)
        assert (await bench.show(record.instance.saga_id)).instance.status is Status.RUNNING

    async def test_a_function_that_ends_its_transaction_is_unfit(self, bench: SagaBench) -> None:
        async def commits(_: Any, tx: Any) -> None:
            await bench.commit(tx)

        with pytest.raises(InvalidHandler, match="leave commit and rollback to outrider"):
            async with bench.store.transactions.open() as tx:
                await tx.call(commits, None)

    async def test_a_function_that_nobody_would_run_is_objected_to_and_unfit(self, bench: SagaBench) -> None:
        assert "yield" in (bench.store.transactions.check_handler(_yields) or "")
        assert bench.store.transactions.check_handler(_nothing) is None
        with pytest.raises(InvalidHandler, match="yield"):
            async with bench.store.transactions.open() as tx:
                await tx.call(_yields, None)

    async def test_an_exit_that_a_function_asks_for_reaches_whoever_called_it(self, bench: SagaBench) -> None:
        async def leave(_: Any, tx: Any) -> None:
            raise SystemExit("bye")

        with pytest.raises(SystemExit):
            async with bench.store.transactions.open() as tx:
                await tx.call(leave, None)
        # The store continues as before.
        async with bench.store.transactions.open() as tx:
            await tx.call(_nothing, None)

    async def test_a_function_that_is_cut_off_leaves_the_store_as_it_was(self, bench: SagaBench) -> None:
        async def hangs(_: Any, tx: Any) -> None:
            await asyncio.Event().wait()

        with pytest.raises(TimeoutError):
            async with bench.store.transactions.open() as tx, asyncio.timeout(0.01):
                await tx.call(hangs, None)
        async with bench.store.transactions.open() as tx:
            await tx.call(_nothing, None)

    async def test_whatever_people_call_themselves_can_be_written(self, bench: SagaBench) -> None:
        record = await bench.start_and_claim()
        entry = JournalEntry("reserve", Phase.ACTION, StepStatus.FAILED, 1, error=ODD)
        note = AuditEntry(Status.STARTED, Status.FAILED, "reserve", f"operator {ODD}", ODD, ODD)
        await bench.save(record, claim=claim_of(record), last_error=ODD, entries=[entry], notes=[note])
        line = (await bench.store.admin.audit(record.instance.saga_id))[-1]
        assert (line["actor"], line["detail"], line["what"]) == ("j?rg\\0", "j?rg\\0", "operator j?rg\\0")
        assert (await bench.show(record.instance.saga_id)).instance.last_error == "j?rg\\0"


async def _nothing(_: Any, tx: Any) -> None:
    pass


async def _staged(bench: SagaBench, *keys: str) -> list[UUID]:
    async with bench.store.transaction() as tx:
        return await outrider.stage(tx, *(Event("stock.reserve", {}, topic="stock", key=key) for key in keys))


async def _undelivered(bench: SagaBench, *event_ids: UUID) -> dict[UUID, Undelivered]:
    async with bench.store.transaction() as tx:
        return dict(await bench.store.undelivered(tx, event_ids))


async def _publish_all(outbox: OutboxStore) -> None:
    await outbox.heartbeat("relay", 30, first=True)
    lease = await outbox.claim("relay", range(3 * outbox.lanes))
    fetched = await outbox.fetch(lease, dict.fromkeys(lease.epochs, 10))
    assert await outbox.settle(lease, Settlements(fetched.events)) == len(fetched.events)


class OutboxRules:
    """Rules for the commands of sagas in the outbox."""

    async def test_an_event_that_is_staged_is_undelivered_until_it_is_confirmed(self, bench: SagaBench) -> None:
        [event_id] = await _staged(bench, "A-7")
        assert await _undelivered(bench, event_id) == {event_id: Undelivered.WAITING}
        async with bench.outbox() as outbox:
            await _publish_all(outbox)
        assert await _undelivered(bench, event_id) == {}

    async def test_a_dead_letter_is_told_from_what_waits_and_waits_again_after_a_replay(self, bench: SagaBench) -> None:
        dead_lettered, waiting = await _staged(bench, "A-7", "A-8")
        async with bench.outbox() as outbox:
            assert await outbox.admin.dead_letter(dead_lettered, "ann", FAILURE, OnDeadLetter.BLOCK)
            found = await _undelivered(bench, dead_lettered, waiting, uuid4())
            assert found == {dead_lettered: Undelivered.DEAD_LETTER, waiting: Undelivered.WAITING}
            await outbox.admin.replay([dead_lettered], "ann")
        assert await _undelivered(bench, dead_lettered) == {dead_lettered: Undelivered.WAITING}

    async def test_what_was_never_staged_is_not_undelivered(self, bench: SagaBench) -> None:
        assert await _undelivered(bench, uuid4()) == {}
        assert await _undelivered(bench) == {}
