"""Rules about turns: fenced, guarded by version, and all or nothing."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from datetime import timedelta
from typing import Any
from uuid import uuid4

import pytest

from outrider.errors import ConcurrencyError
from outrider.saga_store import Entry, Note, Phase, Progress, Record, Status
from outrider.testing.saga_contract.bench import LEASE_SECONDS, TRACE, SagaBench, claim_of, new_saga, reply

RESERVE = Entry("reserve", Phase.ACTION, Progress.INTENDED, 1, attempts=1)
RUNNING = Note(Status.STARTED, Status.RUNNING, "reserve", "intended", "ann", "first attempt")


async def _untouched(bench: SagaBench, record: Record) -> None:
    shown = await bench.shown(record.instance.saga_id)
    assert (shown.instance.version, shown.instance.status, shown.journal) == (0, Status.STARTED, ())
    assert len(shown.mail) == len(record.mail)
    assert len(await bench.store.desk.audit(record.instance.saga_id)) == 1


class TurnRules:
    """Writing a saga."""

    async def test_a_turn_is_written_whole_and_read_back_as_it_was(self, bench: SagaBench) -> None:
        record = await bench.taken()
        await bench.advance(seconds=2)
        later = record.now + timedelta(seconds=90.25)
        entry = replace(RESERVE, due_at=later, error="no answer", intended_at=record.now, ended_at=later)
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
        shown = await bench.shown(record.instance.saga_id)
        saved = shown.instance
        assert (saved.state, saved.status) == (b'{"amount": 13, "name": "\xc3\xa9"}', Status.RUNNING)
        assert (saved.current_step, saved.last_error, saved.retry_count) == ("reserve", "no answer", 3)
        assert (saved.needs_attention, saved.version, saved.ended_at) == (True, 1, None)
        assert saved.updated_at == now == record.now + timedelta(seconds=2)
        assert saved.started_at == record.now
        assert shown.journal == (entry,)

    async def test_what_another_has_claimed_meanwhile_cannot_be_saved(self, bench: SagaBench) -> None:
        await bench.start(new_saga())
        await bench.post(reply(new_saga().saga_id))
        late = await bench.take()
        await bench.advance(seconds=LEASE_SECONDS)
        await bench.take("bob")
        mail = [piece.mail_id for piece in late.mail]
        with pytest.raises(ConcurrencyError):
            await bench.save(late, status=Status.RUNNING, entries=[RESERVE], taken=mail, notes=[RUNNING])
        await _untouched(bench, late)

    async def test_a_worker_of_the_same_name_with_an_older_claim_is_late_too(self, bench: SagaBench) -> None:
        late = await bench.taken()
        await bench.advance(seconds=LEASE_SECONDS)
        await bench.take("ann")
        with pytest.raises(ConcurrencyError):
            await bench.save(late, status=Status.RUNNING, entries=[RESERVE], notes=[RUNNING])
        await _untouched(bench, late)

    async def test_a_saga_that_was_given_back_cannot_be_saved(self, bench: SagaBench) -> None:
        record = await bench.taken()
        await bench.release(record)
        with pytest.raises(ConcurrencyError):
            await bench.save(record, version=1)

    async def test_a_turn_decided_on_an_older_version_is_refused(self, bench: SagaBench) -> None:
        record = await bench.taken()
        await bench.save(record, status=Status.RUNNING)
        with pytest.raises(ConcurrencyError):
            await bench.save(record, status=Status.COMPENSATING, entries=[RESERVE], notes=[RUNNING])
        shown = await bench.shown(record.instance.saga_id)
        assert (shown.instance.version, shown.instance.status, shown.journal) == (1, Status.RUNNING, ())
        await bench.save(shown, status=Status.COMPENSATING)
        assert (await bench.shown(record.instance.saga_id)).instance.version == 2

    async def test_of_two_turns_at_once_one_is_refused(self, bench: SagaBench) -> None:
        record = await bench.taken()
        turns = [bench.save(record, retry_count=number, notes=[RUNNING]) for number in (1, 2)]
        ended = await asyncio.gather(*turns, return_exceptions=True)
        assert sum(isinstance(end, ConcurrencyError) for end in ended) == 1
        assert (await bench.shown(record.instance.saga_id)).instance.version == 1
        assert len(await bench.store.desk.audit(record.instance.saga_id)) == 2

    async def test_a_turn_is_rolled_back_with_its_transaction(self, bench: SagaBench) -> None:
        await bench.start(new_saga())
        await bench.post(reply(new_saga().saga_id))
        record = await bench.take()
        turn: dict[str, Any] = {"entries": [RESERVE], "taken": [record.mail[0].mail_id], "notes": [RUNNING]}
        async with bench.rolled_back() as tx:
            await bench.save_in(tx, record, status=Status.RUNNING, release=True, **turn)
        await _untouched(bench, record)
        await bench.save(record, status=Status.RUNNING, **turn)

    async def test_a_transaction_sees_what_it_saved(self, bench: SagaBench) -> None:
        record = await bench.taken()
        async with bench.store.transaction() as tx:
            await bench.save_in(tx, record, status=Status.RUNNING, entries=[RESERVE])
            seen = await bench.store.load(tx, record.instance.saga_id)
            assert seen is not None
            assert (seen.instance.status, seen.instance.version, seen.journal) == (Status.RUNNING, 1, (RESERVE,))
            await bench.save_in(tx, seen, status=Status.COMPENSATING)
        assert (await bench.shown(record.instance.saga_id)).instance.version == 2

    async def test_a_turn_without_release_keeps_the_claim_for_another_lease(self, bench: SagaBench) -> None:
        record = await bench.taken()
        await bench.advance(seconds=LEASE_SECONDS - 1)
        now = await bench.save(record)
        shown = await bench.shown(record.instance.saga_id)
        assert (shown.instance.owner, shown.instance.epoch) == ("ann", 1)
        assert shown.instance.wake_at == now + timedelta(seconds=LEASE_SECONDS)

    async def test_a_released_saga_is_due_when_it_was_said(self, bench: SagaBench) -> None:
        record = await bench.taken()
        await bench.release(record, wake_seconds=60)
        await bench.advance(seconds=59)
        assert await bench.claim("bob") == []
        await bench.advance(seconds=1)
        assert (await bench.take("bob")).instance.epoch == 2

    async def test_a_saga_released_without_a_time_is_due_never_again(self, bench: SagaBench) -> None:
        record = await bench.taken()
        await bench.release(record)
        shown = await bench.shown(record.instance.saga_id)
        assert (shown.instance.owner, shown.instance.wake_at) == (None, None)
        await bench.advance(seconds=10**6)
        assert await bench.claim("bob") == []

    async def test_the_journal_has_one_line_for_a_step_and_phase_and_the_last_one_counts(
        self, bench: SagaBench
    ) -> None:
        record = await bench.taken()
        undo = Entry("reserve", Phase.COMPENSATION, Progress.PLANNED, 1)
        await bench.save(record, entries=[RESERVE, Entry("charge", Phase.ACTION, Progress.INTENDED, 2)])
        done = replace(RESERVE, progress=Progress.DONE, attempts=2, event_id=uuid4())
        await bench.save(await bench.shown(record.instance.saga_id), entries=[RESERVE, done, undo])
        journal = (await bench.shown(record.instance.saga_id)).journal
        assert journal == (done, Entry("charge", Phase.ACTION, Progress.INTENDED, 2), undo)

    async def test_the_time_of_the_end_is_the_first_one_and_goes_when_a_saga_goes_on(self, bench: SagaBench) -> None:
        record = await bench.taken()
        ended = await bench.save(record, status=Status.FAILED)
        await bench.advance(seconds=5)
        await bench.save(await bench.shown(record.instance.saga_id), status=Status.FAILED)
        shown = await bench.shown(record.instance.saga_id)
        assert shown.instance.ended_at == ended
        await bench.save(shown, status=Status.RUNNING)
        assert (await bench.shown(record.instance.saga_id)).instance.ended_at is None

    async def test_what_is_not_there_cannot_be_loaded(self, bench: SagaBench) -> None:
        async with bench.store.transaction() as tx:
            assert await bench.store.load(tx, new_saga().saga_id) is None
            assert await bench.store.load(tx, new_saga().saga_id, for_update=True) is None

    async def test_any_text_of_an_error_can_be_saved(self, bench: SagaBench) -> None:
        record = await bench.taken()
        odd = "a\0b\ud800c"
        note = RUNNING._replace(detail=odd)
        await bench.save(record, last_error=odd, entries=[replace(RESERVE, error=odd)], notes=[note])
        shown = await bench.shown(record.instance.saga_id)
        assert shown.instance.last_error == shown.journal[0].error == "a\\0b?c"
        assert (await bench.store.desk.audit(record.instance.saga_id))[-1]["detail"] == "a\\0b?c"

    async def test_notes_are_kept_in_order_with_time_actor_and_trace(self, bench: SagaBench) -> None:
        record = await bench.taken()
        await bench.advance(seconds=1)
        ignored = Note(Status.RUNNING, Status.RUNNING, None, "ignored", "bob")
        now = await bench.save(record, status=Status.RUNNING, notes=[RUNNING, ignored])
        _, first, second = await bench.store.desk.audit(record.instance.saga_id)
        assert first == {
            "at": now,
            "old_status": "started",
            "new_status": "running",
            "step": "reserve",
            "what": "intended",
            "actor": "ann",
            "detail": "first attempt",
            "traceparent": TRACE,
        }
        assert (second["what"], second["actor"], second["step"], second["detail"]) == ("ignored", "bob", None, "")

    async def test_a_claim_reads_what_the_owner_before_has_written(self, bench: SagaBench) -> None:
        record = await bench.taken()
        await bench.release(record, entries=[RESERVE], state=b'{"amount": 99}', wake_seconds=0)
        again = await bench.take("bob")
        assert (again.journal, again.instance.state, again.instance.version) == ((RESERVE,), b'{"amount": 99}', 1)
        assert claim_of(again).epoch == 2

    async def test_a_steps_function_works_in_the_turns_transaction(self, bench: SagaBench) -> None:
        record = await bench.taken()

        async def act(saved: Record, tx: Any) -> str:
            await bench.save_in(tx, saved, status=Status.RUNNING)
            return "what it returns"

        async with bench.store.transaction() as tx:
            assert await bench.store.call(act, record, tx) == "what it returns"
        assert (await bench.shown(record.instance.saga_id)).instance.status is Status.RUNNING
