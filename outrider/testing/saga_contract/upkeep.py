"""Rules about what is kept, and for how long."""

from __future__ import annotations

from outrider.saga_store import Entry, Phase, Progress, Record, Status
from outrider.testing.saga_contract.bench import SagaBench, new_saga, reply

DAY = 86_400
NEVER = 10_000


async def _end(bench: SagaBench, record: Record, status: Status = Status.COMPLETED, **turn: object) -> None:
    entry = Entry("reserve", Phase.ACTION, Progress.DONE, 1)
    await bench.release(record, status=status, entries=[entry], **turn)


class UpkeepRules:
    """Nothing grows without bound."""

    async def test_sagas_that_ended_long_ago_are_removed_with_their_journals_and_mail(self, bench: SagaBench) -> None:
        old = await bench.taken("old")
        await bench.post(reply(old.instance.saga_id), reply(old.instance.saga_id))
        await _end(bench, old, seen=[(await bench.shown(old.instance.saga_id)).mail[0].mail_id])
        await bench.advance(seconds=10 * DAY)
        young = await bench.taken("young")
        await _end(bench, young)
        pruned = await bench.store.prune(saga_days=9, audit_days=NEVER, barrier_days=NEVER)
        assert pruned == (1, 0, 0)
        assert await bench.store.desk.show(old.instance.saga_id) is None
        assert (await bench.shown(young.instance.saga_id)).journal != ()
        again = await bench.taken("old")
        assert (again.journal, again.mail, again.instance.version) == ((), (), 0)

    async def test_a_saga_that_has_not_ended_or_needs_attention_stays(self, bench: SagaBench) -> None:
        await bench.start(new_saga("A-1"), new_saga("A-2"), new_saga("A-3"))
        failed, settled, running = sorted(await bench.claim(), key=lambda record: record.instance.correlation_id)
        await _end(bench, failed, Status.FAILED, needs_attention=True)
        await _end(bench, settled, Status.FAILED)
        await bench.release(running, status=Status.RUNNING)
        await bench.advance(seconds=400 * DAY)
        assert (await bench.store.prune(saga_days=1, audit_days=1, barrier_days=1)).sagas == 1
        assert await bench.store.desk.show(settled.instance.saga_id) is None
        for record in (failed, running):
            assert len(await bench.store.desk.audit(record.instance.saga_id)) == 1
            await bench.shown(record.instance.saga_id)

    async def test_a_trail_outlives_its_saga_and_goes_when_it_is_old(self, bench: SagaBench) -> None:
        record = await bench.taken()
        await _end(bench, record)
        await bench.advance(seconds=10 * DAY)
        assert await bench.store.prune(saga_days=1, audit_days=20, barrier_days=1) == (1, 0, 0)
        assert len(await bench.store.desk.audit(record.instance.saga_id)) == 1
        await bench.advance(seconds=11 * DAY)
        assert await bench.store.prune(saga_days=1, audit_days=20, barrier_days=1) == (0, 1, 0)
        assert await bench.store.desk.audit(record.instance.saga_id) == []

    async def test_more_than_a_batch_is_removed(self, bench: SagaBench) -> None:
        await bench.start(*[new_saga(f"A-{n}") for n in range(1_050)])
        records = await bench.claim(limit=2_000)
        async with bench.store.transaction() as tx:
            for record in records:
                await bench.save_in(tx, record, status=Status.COMPLETED, release=True)
        await bench.advance(seconds=2 * DAY)
        assert await bench.store.prune(saga_days=1, audit_days=1, barrier_days=1) == (1_050, 1_050, 0)

    async def test_barriers_are_kept_for_as_long_as_was_said(self, bench: SagaBench) -> None:
        for key in ("old", "young"):
            async with bench.store.transaction() as tx:
                await bench.drive("barrier_enter", tx, "stock", key, Phase.COMPENSATION)
            await bench.advance(seconds=10 * DAY)
        assert await bench.store.prune(saga_days=1, audit_days=1, barrier_days=15) == (0, 0, 2)
        async with bench.store.transaction() as tx:
            assert (await bench.drive("barrier_enter", tx, "stock", "old", Phase.ACTION)).fresh
            assert not (await bench.drive("barrier_enter", tx, "stock", "young", Phase.ACTION)).fresh

    async def test_mail_that_nobody_will_read_is_removed(self, bench: SagaBench) -> None:
        record = await bench.taken()
        await bench.post(reply(record.instance.saga_id))
        await _end(bench, record)
        assert len((await bench.shown(record.instance.saga_id)).mail) == 1
        await bench.store.prune(saga_days=NEVER, audit_days=NEVER, barrier_days=NEVER)
        assert (await bench.shown(record.instance.saga_id)).mail == ()
