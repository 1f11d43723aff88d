"""Rules about what people are told."""

from __future__ import annotations

from uuid import UUID, uuid4

from outrider.saga_store import Note, SagaCriteria, Status
from outrider.testing.saga_contract.bench import LEASE_SECONDS, SagaBench, claim_of, new_saga, reply


async def _found(bench: SagaBench, **criteria: object) -> list[str]:
    sagas = await bench.store.desk.find(SagaCriteria(**criteria))  # type: ignore[arg-type]
    return [saga.correlation_id for saga in sagas]


async def _three(bench: SagaBench) -> list[UUID]:
    """Make a saga that has failed, one that has completed and one that is under way, in this order."""
    ids = await bench.start(new_saga("A-1"), new_saga("A-2"), new_saga("A-3", "refund"))
    records = {r.instance.correlation_id: r for r in await bench.claim(definitions=[("order", 1), ("refund", 1)])}
    await bench.release(records["A-1"], status=Status.FAILED, needs_attention=True)
    await bench.advance(seconds=1)
    await bench.release(records["A-2"], status=Status.COMPLETED)
    await bench.advance(seconds=1)
    await bench.save(records["A-3"], status=Status.RUNNING)
    return ids


class DeskRules:
    """Listing, counting and showing."""

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
        record = await bench.taken()
        [found] = await bench.store.desk.find(SagaCriteria())
        assert found == (await bench.shown(record.instance.saga_id)).instance == record.instance

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
        record = await bench.taken()
        await bench.release(record, status=Status.RUNNING)
        await bench.post(reply(record.instance.saga_id))
        assert await _found(bench, stuck_seconds=60.0) == []
        await bench.advance(seconds=61)
        assert await _found(bench, stuck_seconds=60.0) == ["A-7"]
        again = await bench.take()
        await bench.release(again, seen=[piece.mail_id for piece in again.mail])
        assert await _found(bench, stuck_seconds=60.0) == []

    async def test_sagas_are_counted_by_status(self, bench: SagaBench) -> None:
        nothing = {"started": 0, "running": 0, "compensating": 0, "completed": 0, "compensated": 0, "failed": 0}
        assert await bench.store.desk.counts() == {**nothing, "needs_attention": 0}
        await _three(bench)
        some = {"running": 1, "completed": 1, "failed": 1, "needs_attention": 1}
        assert await bench.store.desk.counts() == {**nothing, **some}

    async def test_what_is_not_there_is_not_shown(self, bench: SagaBench) -> None:
        assert await bench.store.desk.show(uuid4()) is None
        assert await bench.store.desk.audit(uuid4()) == []

    async def test_a_trail_is_told_oldest_first_and_no_longer_than_asked(self, bench: SagaBench) -> None:
        record = await bench.taken()
        notes = [Note(Status.STARTED, Status.STARTED, None, f"note {n}", "ann") for n in range(5)]
        await bench.save(record, notes=notes)
        trail = await bench.store.desk.audit(record.instance.saga_id, limit=3)
        assert [line["what"] for line in trail] == ["started", "note 0", "note 1"]
