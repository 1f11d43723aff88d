"""Contract rules for the operator's view of sagas, and for maintenance."""

from __future__ import annotations

from datetime import timedelta
from uuid import UUID, uuid4

from outrider.audit_chain import state_hash_of
from outrider.saga.audit import AuditCheck, verify
from outrider.saga.model import (
    AuditCriteria,
    AuditEntry,
    JournalEntry,
    Phase,
    SagaCriteria,
    SagaRecord,
    Status,
    StepStatus,
)
from outrider.testing.saga_harness import LEASE_SECONDS, SagaBench, claim_of, new_saga, reply

DAY = 86_400

NEVER = 10_000


async def _found(bench: SagaBench, **criteria: object) -> list[str]:
    sagas = await bench.store.admin.find(SagaCriteria(**criteria))  # type: ignore[arg-type]
    return [saga.correlation_id for saga in sagas]


async def _three(bench: SagaBench) -> list[UUID]:
    """Make a failed, a completed and a running saga, in this order."""
    ids = await bench.start(new_saga("A-1"), new_saga("A-2"), new_saga("A-3", "refund"))
    records = {r.instance.correlation_id: r for r in await bench.claim(definitions=[("order", 1), ("refund", 1)])}
    await bench.release(records["A-1"], status=Status.FAILED, needs_attention=True)
    await bench.advance(seconds=1)
    await bench.release(records["A-2"], status=Status.COMPLETED)
    await bench.advance(seconds=1)
    await bench.save(records["A-3"], status=Status.RUNNING)
    return ids


class SagaAdminRules:
    """Rules for listing, counting and showing sagas."""

    async def test_those_that_need_attention_come_first_then_the_latest_change(self, bench: SagaBench) -> None:
        await _three(bench)
        assert await _found(bench) == ["A-1", "A-3", "A-2"]
        assert await _found(bench, limit=2) == ["A-1", "A-3"]

    async def test_sagas_are_found_by_what_is_known_of_them(self, bench: SagaBench) -> None:
        ids = await _three(bench)
        assert await _found(bench, ids=(ids[1], uuid4())) == ["A-2"]
        assert await _found(bench, saga_type="refund") == ["A-3"]
        assert await _found(bench, correlation_id="A-2") == ["A-2"]
        assert await _found(bench, status="running") == ["A-3"]
        assert await _found(bench, needs_attention=True) == ["A-1"]
        assert await _found(bench, needs_attention=False) == ["A-3", "A-2"]
        assert await _found(bench, saga_type="order", status="running") == []

    async def test_what_is_found_is_what_is_shown(self, bench: SagaBench) -> None:
        record = await bench.start_and_claim()
        [found] = await bench.store.admin.find(SagaCriteria())
        assert found == (await bench.show(record.instance.saga_id)).instance == record.instance

    async def test_stuck_are_those_that_nobody_works_on(self, bench: SagaBench) -> None:
        await bench.start(new_saga("forgotten"))
        await bench.advance(seconds=100)
        await bench.start(new_saga("fresh"))
        assert await _found(bench, stuck_seconds=60.0) == ["forgotten"]
        assert await _found(bench, stuck_seconds=101.0) == []
        records = {record.instance.correlation_id: record for record in await bench.claim()}
        assert await _found(bench, stuck_seconds=0.0) == []
        await bench.advance(seconds=LEASE_SECONDS + 61)
        assert sorted(await _found(bench, stuck_seconds=60.0)) == ["forgotten", "fresh"]
        await bench.release(records["fresh"], status=Status.FAILED, wake_seconds=0.0)
        await bench.advance(seconds=61)
        await bench.store.renew([claim_of(records["forgotten"])], LEASE_SECONDS)
        assert await _found(bench, stuck_seconds=60.0) == []

    async def test_a_saga_whose_mail_nobody_reads_is_stuck(self, bench: SagaBench) -> None:
        record = await bench.start_and_claim()
        await bench.release(record, status=Status.RUNNING)
        await bench.deliver(reply(record.instance.saga_id))
        assert await _found(bench, stuck_seconds=60.0) == []
        await bench.advance(seconds=61)
        assert await _found(bench, stuck_seconds=60.0) == ["A-7"]
        again = await bench.claim_one()
        await bench.release(again, seen=[message.message_id for message in again.messages])
        assert await _found(bench, stuck_seconds=60.0) == []

    async def test_sagas_are_counted_by_status(self, bench: SagaBench) -> None:
        nothing = {"started": 0, "running": 0, "compensating": 0, "completed": 0, "compensated": 0, "failed": 0}
        assert await bench.store.admin.counts() == {**nothing, "needs_attention": 0}
        await _three(bench)
        some = {"running": 1, "completed": 1, "failed": 1, "needs_attention": 1}
        assert await bench.store.admin.counts() == {**nothing, **some}

    async def test_what_is_not_there_is_not_shown(self, bench: SagaBench) -> None:
        assert await bench.store.admin.show(uuid4()) is None
        assert await bench.store.admin.audit(uuid4()) == []

    async def test_a_trail_is_told_oldest_first_and_no_longer_than_asked(self, bench: SagaBench) -> None:
        record = await bench.start_and_claim()
        notes = [AuditEntry(Status.STARTED, Status.STARTED, None, f"note {n}", "ann") for n in range(5)]
        await bench.save(record, notes=notes)
        audit = await bench.store.admin.audit(record.instance.saga_id, limit=3)
        assert [line["what"] for line in audit] == ["started", "note 0", "note 1"]

    async def test_the_last_line_of_a_turn_keeps_the_state_if_the_turn_says_so(self, bench: SagaBench) -> None:
        record = await bench.start_and_claim()
        notes = [AuditEntry(Status.STARTED, Status.STARTED, None, f"note {n}", "ann") for n in range(2)]
        await bench.save(record, notes=notes, state=b'{"amount": 13}', keep_state=True)
        again = await bench.show(record.instance.saga_id)
        await bench.save(again, notes=notes, state=b'{"amount": 14}')
        saga_id = record.instance.saga_id
        lines = (await bench.store.audit.chain(saga_id))[1]
        assert [line.state for line in lines] == [None, None, '{"amount": 13}', None, None]
        assert [line.state_hash for line in lines if line.state] == [state_hash_of(b'{"amount": 13}')]
        assert lines == list(reversed(await bench.store.audit.find(AuditCriteria(saga_id))))
        assert (await verify(bench.store.audit, AuditCheck())).findings == []


async def _end(bench: SagaBench, record: SagaRecord, status: Status = Status.COMPLETED, **turn: object) -> None:
    entry = JournalEntry("reserve", Phase.ACTION, StepStatus.DONE, 1)
    await bench.release(record, status=status, entries=[entry], **turn)


class SagaMaintenanceRules:
    """The tables of sagas stay bounded."""

    async def test_sagas_that_ended_long_ago_are_removed_with_their_journals_and_messages(
        self, bench: SagaBench
    ) -> None:
        old = await bench.start_and_claim("old")
        await bench.deliver(reply(old.instance.saga_id), reply(old.instance.saga_id))
        await _end(bench, old, seen=[(await bench.show(old.instance.saga_id)).messages[0].message_id])
        await bench.advance(seconds=10 * DAY)
        young = await bench.start_and_claim("young")
        await _end(bench, young)
        pruned = await bench.store.prune(saga_days=9, audit_days=NEVER, participant_memory_days=NEVER)
        assert pruned == (1, 0, 0)
        assert await bench.store.admin.show(old.instance.saga_id) is None
        assert (await bench.show(young.instance.saga_id)).journal != ()
        again = await bench.start_and_claim("old")
        assert (again.journal, again.messages, again.instance.version) == ((), (), 0)

    async def test_a_saga_that_has_not_ended_or_needs_attention_stays(self, bench: SagaBench) -> None:
        await bench.start(new_saga("A-1"), new_saga("A-2"), new_saga("A-3"))
        failed, settled, running = sorted(await bench.claim(), key=lambda record: record.instance.correlation_id)
        await _end(bench, failed, Status.FAILED, needs_attention=True)
        await _end(bench, settled, Status.FAILED)
        await bench.release(running, status=Status.RUNNING)
        await bench.advance(seconds=400 * DAY)
        assert (await bench.store.prune(saga_days=1, audit_days=1, participant_memory_days=1)).sagas == 1
        assert await bench.store.admin.show(settled.instance.saga_id) is None
        for record in (failed, running):
            assert len(await bench.store.admin.audit(record.instance.saga_id)) == 1
            await bench.show(record.instance.saga_id)

    async def test_a_trail_outlives_its_saga_and_goes_when_it_is_old(self, bench: SagaBench) -> None:
        record = await bench.start_and_claim()
        await _end(bench, record)
        await bench.advance(seconds=10 * DAY)
        assert await bench.store.prune(saga_days=1, audit_days=20, participant_memory_days=1) == (1, 0, 0)
        assert len(await bench.store.admin.audit(record.instance.saga_id)) == 1
        await bench.advance(seconds=11 * DAY)
        assert await bench.store.prune(saga_days=1, audit_days=20, participant_memory_days=1) == (0, 1, 0)
        assert await bench.store.admin.audit(record.instance.saga_id) == []

    async def test_pruning_leaves_chains_and_anchors_that_verify(self, bench: SagaBench) -> None:
        note = AuditEntry(Status.RUNNING, Status.COMPLETED, None, "became completed", "ann")
        for turn in range(3):
            record = await bench.start_and_claim("old")
            await bench.save(record, notes=[note, note], state=b'{"turn": %d}' % turn)
            await _end(bench, await bench.show(record.instance.saga_id), notes=[note])
            await bench.advance(seconds=10 * DAY)
            assert await bench.store.prune(saga_days=1, audit_days=NEVER, participant_memory_days=1) == (1, 0, 0)
        await bench.start(new_saga("old"), new_saga("new"))
        assert await bench.store.prune(saga_days=1, audit_days=25, participant_memory_days=1) == (0, 4, 0)
        report = await verify(bench.store.audit, AuditCheck())
        assert (report.findings, report.chains, report.lines, report.anchors) == ([], 4, 10, 4)
        found = await bench.store.audit.find(AuditCriteria(saga_id=new_saga("old").saga_id, actor="ann", limit=3))
        assert [line.line for line in found] == [4, 3, 2]
        assert [line.state_hash for line in found] == [state_hash_of(b'{"turn": 2}')] * 2 + [None]
        assert await bench.store.audit.find(AuditCriteria(since=found[0].at + timedelta(days=100))) == []

    async def test_more_than_a_batch_is_removed(self, bench: SagaBench) -> None:
        await bench.start(*[new_saga(f"A-{n}") for n in range(1_050)])
        records = await bench.claim(limit=2_000)
        async with bench.store.transaction() as tx:
            for record in records:
                await bench.save_in(tx, record, status=Status.COMPLETED, release=True)
        await bench.advance(seconds=2 * DAY)
        assert await bench.store.prune(saga_days=1, audit_days=1, participant_memory_days=1) == (1_050, 1_050, 0)

    async def test_entries_are_kept_for_as_long_as_was_said(self, bench: SagaBench) -> None:
        for key in ("old", "young"):
            async with bench.store.transaction() as tx:
                await bench.call_driver("participant_enter", tx, "stock", key, Phase.COMPENSATION)
            await bench.advance(seconds=10 * DAY)
        assert await bench.store.prune(saga_days=1, audit_days=1, participant_memory_days=15) == (0, 0, 2)
        async with bench.store.transaction() as tx:
            assert (await bench.call_driver("participant_enter", tx, "stock", "old", Phase.ACTION)).fresh
            assert not (await bench.call_driver("participant_enter", tx, "stock", "young", Phase.ACTION)).fresh

    async def test_a_message_that_no_turn_will_read_is_removed(self, bench: SagaBench) -> None:
        record = await bench.start_and_claim()
        await bench.deliver(reply(record.instance.saga_id))
        await _end(bench, record)
        assert len((await bench.show(record.instance.saga_id)).messages) == 1
        await bench.store.prune(saga_days=NEVER, audit_days=NEVER, participant_memory_days=NEVER)
        assert (await bench.show(record.instance.saga_id)).messages == ()
