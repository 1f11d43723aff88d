"""Contract rules for claims: a saga has one owner at a time, for a limited time."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Sequence
from uuid import UUID, uuid4

import pytest

from outrider.errors import ConcurrencyError, NotInTransaction
from outrider.saga.model import Claim, Status
from outrider.testing.saga_harness import FINGERPRINT, LEASE_SECONDS, TRACE, SagaBench, claim_of, new_saga, reply

RACED, WORKERS, IDLE_MAX = 40, 8, 5

Owned = Counter[tuple[UUID, int]]
"""The number of owners of each saga under one epoch."""


class ClaimRules:
    """Only the owner of a claim may write a saga."""

    async def test_a_claimed_saga_is_not_claimed_again(self, bench: SagaBench) -> None:
        record = await bench.start_and_claim()
        assert (record.instance.owner, record.instance.epoch) == ("ann", 1)
        assert await bench.claim("bob") == []
        assert await bench.claim("ann") == []

    async def test_an_expired_claim_is_due_again_with_another_epoch(self, bench: SagaBench) -> None:
        await bench.start_and_claim()
        await bench.advance(seconds=LEASE_SECONDS - 1)
        assert await bench.claim("bob") == []
        await bench.advance(seconds=1)
        again = await bench.claim_one("bob")
        assert (again.instance.owner, again.instance.epoch) == ("bob", 2)

    async def test_a_claim_further_ahead_than_a_lease_is_dead_because_the_clock_was_set_back(
        self, bench: SagaBench
    ) -> None:
        held = await bench.start_and_claim()
        await bench.advance(seconds=-LEASE_SECONDS + 1)
        assert await bench.claim("bob") == []
        await bench.advance(seconds=-2)
        taken = await bench.claim_one("bob")
        assert (taken.instance.owner, taken.instance.losses) == ("bob", 1)
        assert await bench.store.renew([claim_of(held)], LEASE_SECONDS) == frozenset()
        with pytest.raises(ConcurrencyError):
            await bench.save(held)
        assert await bench.claim("carl") == []

    async def test_a_worker_that_lives_keeps_its_claim_when_the_clock_is_set_back(self, bench: SagaBench) -> None:
        await bench.start(new_saga("renewed"), new_saga("saved"), new_saga("released"))
        records = {record.instance.correlation_id: record for record in await bench.claim()}
        await bench.advance(seconds=-3600)
        renewed = claim_of(records["renewed"])
        assert await bench.store.renew([renewed], LEASE_SECONDS) == {renewed.saga_id}
        await bench.save(records["saved"])
        await bench.release(records["released"])
        assert await bench.claim("bob") == []

    async def test_suspects_with_a_claim_from_before_the_clock_was_set_back_are_limited(self, bench: SagaBench) -> None:
        await bench.start(*[new_saga(f"A-{number}") for number in range(3)])
        assert len(await bench.claim()) == 3
        await bench.advance(seconds=LEASE_SECONDS)
        assert len(await bench.claim()) == 3
        await bench.advance(seconds=-3600)
        assert [len(await bench.claim("bob")) for _ in range(4)] == [1, 1, 1, 0]

    async def test_workers_who_claim_at_once_get_different_sagas(self, bench: SagaBench) -> None:
        ids = await bench.start(*[new_saga(f"A-{n}") for n in range(30)])
        stores = bench.store, bench.other()
        got = await asyncio.gather(
            *(
                stores[turn % 2].claim(f"worker-{turn}", [("order", 1)], limit=10, lease_seconds=LEASE_SECONDS)
                for turn in range(8)
            )
        )
        taken = [record.instance.saga_id for records in got for record in records]
        assert len(taken) == len(set(taken))
        # A worker that asks during another claim may get fewer sagas; the remaining sagas stay for the next claim.
        rest = await bench.claim("late", limit=30)
        assert {*taken, *(record.instance.saga_id for record in rest)} == set(ids)

    async def test_a_renewed_claim_lasts_longer(self, bench: SagaBench) -> None:
        record = await bench.start_and_claim()
        await bench.advance(seconds=LEASE_SECONDS - 1)
        assert await bench.store.renew([claim_of(record)], LEASE_SECONDS) == {record.instance.saga_id}
        await bench.advance(seconds=LEASE_SECONDS - 1)
        assert await bench.claim("bob") == []

    async def test_only_claims_that_are_held_are_renewed(self, bench: SagaBench) -> None:
        await bench.start(new_saga("A-1"), new_saga("A-2"))
        lost, released = await bench.claim()
        await bench.release(released, wake_seconds=3600)
        await bench.advance(seconds=LEASE_SECONDS)
        await bench.claim_one("bob")
        kept = await bench.start_and_claim("A-3")
        claims = [claim_of(record) for record in (lost, released, kept)]
        strangers = [Claim("ann", uuid4(), 1), claim_of(kept)._replace(worker="bob"), claim_of(kept)._replace(epoch=9)]
        assert await bench.store.renew(claims + strangers[:1], LEASE_SECONDS) == {kept.instance.saga_id}
        assert await bench.store.renew(strangers, LEASE_SECONDS) == frozenset()
        assert await bench.store.renew([], LEASE_SECONDS) == frozenset()

    async def test_only_definitions_and_versions_that_are_held_are_claimed(self, bench: SagaBench) -> None:
        old, new, other = new_saga("A-1"), new_saga("A-2", version=2), new_saga("A-3", "refund")
        await bench.start(old, new, other)
        assert await bench.claim(definitions=[]) == []
        assert await bench.claim(definitions=[("order", 3), ("invoice", 1)]) == []
        [second] = await bench.claim(definitions=[("order", 2)])
        assert second.instance.saga_id == new.saga_id
        rest = await bench.claim(definitions=[("order", 1), ("refund", 1)])
        assert {record.instance.saga_id for record in rest} == {old.saga_id, other.saga_id}

    async def test_messages_of_a_definition_that_is_not_held_wakes_no_worker_here(self, bench: SagaBench) -> None:
        record = await bench.start_and_claim()
        await bench.release(record)
        await bench.deliver(reply(record.instance.saga_id))
        assert await bench.claim(definitions=[("order", 2)]) == []
        assert len(await bench.claim(definitions=[("order", 2), ("order", 1)])) == 1

    async def test_no_more_than_the_limit_is_claimed_and_the_longest_due_first(self, bench: SagaBench) -> None:
        ids = []
        for number, saga_type in enumerate(["refund", "order", "order", "refund", "order"]):
            ids += await bench.start(new_saga(f"A-{number}", saga_type))
            await bench.advance(seconds=1)
        for first in (ids[:2], ids[2:4], ids[4:]):
            taken = await bench.claim(definitions=[("order", 1), ("refund", 1)], limit=2)
            assert {record.instance.saga_id for record in taken} == set(first)

    async def test_neither_what_is_due_nor_what_has_messages_waits_for_the_end_of_the_other(
        self, bench: SagaBench
    ) -> None:
        waiting = await bench.start(*[new_saga(f"messages-{n}") for n in range(6)])
        for record in await bench.claim():
            await bench.release(record)
        await bench.deliver(*[reply(saga_id) for saga_id in waiting])
        await bench.start(*[new_saga(f"due-{n}") for n in range(6)])
        for _ in range(3):
            taken = await bench.claim(limit=4)
            kinds = sorted(record.instance.correlation_id.partition("-")[0] for record in taken)
            assert kinds == ["due", "due", "messages", "messages"]
        assert await bench.claim() == []

    async def test_a_saga_that_is_due_and_has_messages_is_claimed_once(self, bench: SagaBench) -> None:
        [saga_id] = await bench.start(new_saga())
        await bench.deliver(reply(saga_id), reply(saga_id))
        record = await bench.claim_one()
        assert len(record.messages) == 2

    async def test_a_claim_changes_nothing_but_who_owns_it(self, bench: SagaBench) -> None:
        record = await bench.start_and_claim()
        await bench.advance(seconds=LEASE_SECONDS)
        again = await bench.claim_one("bob")
        assert again.instance.version == record.instance.version
        assert again.instance.updated_at == record.instance.updated_at
        assert again.instance.status is Status.STARTED
        assert len(await bench.store.admin.audit(record.instance.saga_id)) == 1

    async def test_a_deadline_is_a_time_from_the_start_and_no_turn_changes_it(self, bench: SagaBench) -> None:
        await bench.start(new_saga()._replace(deadline_seconds=90.5), new_saga("A-8"))
        records = {record.instance.correlation_id: record for record in await bench.claim()}
        assert records["A-8"].instance.deadline_at is None
        record = records["A-7"]
        deadline_at = record.instance.deadline_at
        assert deadline_at is not None
        assert (deadline_at - record.instance.started_at).total_seconds() == pytest.approx(90.5, abs=0.001)
        await bench.advance(seconds=1)
        await bench.release(record, deadline_at=None, wake_seconds=0)
        assert (await bench.show(record.instance.saga_id)).instance.deadline_at == deadline_at


class LossRules:
    """A worker that is lost costs a saga no attempt; losses in a row are counted, and limit what is claimed."""

    async def test_a_claim_that_was_not_released_counts_a_loss_and_a_release_ends_the_row(
        self, bench: SagaBench
    ) -> None:
        record = await bench.start_and_claim()
        assert record.instance.losses == 0
        for losses in (1, 2, 3):
            await bench.advance(seconds=LEASE_SECONDS)
            record = await bench.claim_one("bob")
            assert record.instance.losses == losses
        await bench.release(record, wake_seconds=0.0)
        assert (await bench.claim_one("bob")).instance.losses == 0

    async def test_a_turn_writes_the_losses(self, bench: SagaBench) -> None:
        await bench.start_and_claim()
        await bench.advance(seconds=LEASE_SECONDS)
        record = await bench.claim_one("bob")
        await bench.save(record, losses=0)
        shown = await bench.store.admin.show(record.instance.saga_id)
        assert shown
        assert shown.instance.losses == 0
        await bench.advance(seconds=LEASE_SECONDS)
        assert (await bench.claim_one("bob")).instance.losses == 1

    async def test_sagas_that_were_lost_once_are_claimed_together_and_after_that_one_at_a_time(
        self, bench: SagaBench
    ) -> None:
        await bench.start(*[new_saga(f"A-{number}") for number in range(4)])
        for losses in (0, 1):
            records = await bench.claim()
            assert [record.instance.losses for record in records] == [losses] * 4
            await bench.advance(seconds=LEASE_SECONDS)
        await bench.start(new_saga("B-1"))
        assert [record.instance.correlation_id for record in await bench.claim(suspects=0)] == ["B-1"]
        seen = set()
        for _ in range(4):
            [suspect] = await bench.claim()
            assert suspect.instance.is_suspect
            seen.add(suspect.instance.saga_id)
        assert len(seen) == 4
        assert await bench.claim() == []

    async def test_suspects_of_several_definitions_share_the_limit(self, bench: SagaBench) -> None:
        both = [("order", 1), ("refund", 1)]
        await bench.start(new_saga("A-1"), new_saga("A-2", "refund"))
        for _ in range(2):
            assert len(await bench.claim(definitions=both)) == 2
            await bench.advance(seconds=LEASE_SECONDS)
        assert [len(await bench.claim(definitions=both)) for _ in range(3)] == [1, 1, 0]


class ConcurrencyRules:
    """Concurrent transactions wait only for their own saga."""

    async def test_renewing_does_not_wait_for_a_turn_that_takes_long(self, bench: SagaBench) -> None:
        await bench.start(new_saga("A-1"), new_saga("A-2"))
        slow, other = await bench.claim()
        claims = [claim_of(slow), claim_of(other)]
        async with bench.store.transaction() as tx:
            await bench.store.load(tx, slow.instance.saga_id, for_update=True)
            async with asyncio.timeout(10):
                held = await bench.store.renew(claims, 10 * LEASE_SECONDS)
            assert held == {slow.instance.saga_id, other.instance.saga_id}
            await bench.advance(seconds=LEASE_SECONDS)
            # The locked saga is overdue but cannot be claimed; the other saga has been renewed.
            assert await bench.claim("bob") == []
            await bench.save_in(tx, slow)

    async def test_loading_for_update_keeps_others_from_writing(self, bench: SagaBench) -> None:
        record = await bench.start_and_claim()
        async with bench.store.transaction() as tx:
            assert await bench.store.load(tx, record.instance.saga_id, for_update=True)
            saving = asyncio.create_task(bench.save(record, status=Status.RUNNING))
            await bench.advance(seconds=LEASE_SECONDS)
            assert await bench.claim("bob") == []
            assert not saving.done()
            await bench.save_in(tx, record, status=Status.COMPENSATING)
        with pytest.raises(ConcurrencyError):
            await saving

    async def test_a_message_that_commits_after_the_release_is_found(self, bench: SagaBench) -> None:
        record = await bench.start_and_claim()
        async with bench.store.transaction() as tx:
            assert await bench.store.deliver(tx, [reply(record.instance.saga_id)]) == 1
            # A delivery blocks no owner from writing, and uncommitted messages are invisible.
            async with asyncio.timeout(10):
                await bench.release(record)
            assert await bench.claim("bob") == []
        assert len((await bench.claim_one("bob")).messages) == 1

    async def test_workers_that_race_never_own_the_same_epoch_and_finish_everything(self, bench: SagaBench) -> None:
        ids = await bench.start(*(new_saga(f"A-{number}") for number in range(RACED)))
        owned: Owned = Counter()
        async with asyncio.timeout(100):
            await asyncio.gather(*(_race(bench, f"worker-{number}", ids, owned) for number in range(WORKERS)))
        assert set(owned.values()) == {1}
        assert (await bench.store.admin.counts())["completed"] == RACED


async def _race(bench: SagaBench, worker: str, ids: Sequence[UUID], owned: Owned) -> None:
    """Save three turns of each saga; each turn posts a message to another saga.

    Saves, posts and claims then overlap.
    """
    idle = 0
    while idle < IDLE_MAX:
        records = await bench.claim(worker, limit=5)
        idle = 0 if records else idle + 1
        for record in records:
            instance = record.instance
            owned[instance.saga_id, instance.epoch] += 1
            ends = instance.version >= 2
            other = ids[(ids.index(instance.saga_id) + 7) % len(ids)]
            async with bench.store.transaction() as tx:
                await bench.save_in(
                    tx,
                    record,
                    status=Status.COMPLETED if ends else instance.status,
                    taken=[message.message_id for message in record.messages],
                    release=True,
                    wake_seconds=None if ends else 0.0,
                )
                await bench.store.deliver(tx, [reply(other)])


class StartRules:
    """A saga starts with the commit of the caller."""

    async def test_a_started_saga_is_due_at_once(self, bench: SagaBench) -> None:
        saga = new_saga()
        await bench.start(saga)
        record = await bench.claim_one()
        instance = record.instance
        assert (instance.saga_id, instance.saga_type, instance.definition_version) == (saga.saga_id, "order", 1)
        assert (instance.correlation_id, instance.state, instance.status) == ("A-7", saga.state, Status.STARTED)
        assert (instance.version, instance.retry_count, instance.needs_attention) == (0, 0, False)
        assert (instance.current_step, instance.last_error, instance.ended_at) == (None, None, None)
        assert instance.traceparent == TRACE
        assert instance.fingerprint == FINGERPRINT
        assert instance.started_at == instance.updated_at == record.now
        assert (record.journal, record.messages) == ((), ())

    async def test_a_saga_keeps_its_subject_through_its_turns(self, bench: SagaBench) -> None:
        await bench.start(new_saga()._replace(subject="customer:42"), new_saga("A-8"))
        records = {record.instance.correlation_id: record for record in await bench.claim()}
        assert records["A-8"].instance.subject is None
        record = records["A-7"]
        assert record.instance.subject == "customer:42"
        await bench.release(record, subject=None, wake_seconds=0)
        assert (await bench.show(record.instance.saga_id)).instance.subject == "customer:42"

    async def test_starting_twice_is_one_start(self, bench: SagaBench) -> None:
        await bench.start(new_saga())
        async with bench.store.transaction() as tx:
            assert not await bench.store.start(tx, new_saga())
            assert not await bench.store.start(tx, new_saga()._replace(saga_id=uuid4()))
        assert len(await bench.claim()) == 1
        assert len(await bench.store.admin.audit(new_saga().saga_id)) == 1

    async def test_starting_twice_in_one_transaction_is_one_start(self, bench: SagaBench) -> None:
        async with bench.store.transaction() as tx:
            assert await bench.store.start(tx, new_saga())
            assert not await bench.store.start(tx, new_saga())
        assert len(await bench.claim()) == 1

    async def test_two_who_start_the_same_at_once_start_one(self, bench: SagaBench) -> None:
        async def start() -> bool:
            async with bench.store.transaction() as tx:
                return await bench.store.start(tx, new_saga())

        assert sorted(await asyncio.gather(start(), start())) == [False, True]

    async def test_the_same_correlation_id_may_have_one_saga_of_each_type(self, bench: SagaBench) -> None:
        await bench.start(new_saga("A-7"), new_saga("A-7", "refund"))
        assert len(await bench.claim(definitions=[("order", 1), ("refund", 1)])) == 2

    async def test_a_start_that_is_rolled_back_never_was(self, bench: SagaBench) -> None:
        async with bench.rolled_back() as tx:
            assert await bench.store.start(tx, new_saga())
        assert await bench.claim() == []
        assert await bench.store.admin.show(new_saga().saga_id) is None
        assert await bench.store.admin.audit(new_saga().saga_id) == []

    async def test_an_application_starts_and_posts_through_its_driver(self, bench: SagaBench) -> None:
        saga = new_saga()
        async with bench.store.transaction() as tx:
            assert await bench.call_driver("start_saga", tx, saga) is True
            assert await bench.call_driver("start_saga", tx, saga) is False
            assert await bench.call_driver("deliver_messages", tx, [reply(saga.saga_id), reply(saga.saga_id)]) == 2
        record = await bench.claim_one()
        assert record.instance.state == saga.state
        assert len(record.messages) == 2

    async def test_a_driver_refuses_to_start_outside_a_transaction(self, bench: SagaBench) -> None:
        async with bench.outside() as conn:
            with pytest.raises(NotInTransaction, match="saga"):
                await bench.call_driver("start_saga", conn, new_saga())
            with pytest.raises(NotInTransaction):
                await bench.call_driver("deliver_messages", conn, [reply(new_saga().saga_id)])

    async def test_a_start_is_the_first_line_of_the_trail(self, bench: SagaBench) -> None:
        [saga_id] = await bench.start(new_saga())
        [line] = await bench.store.admin.audit(saga_id)
        assert (line["old_status"], line["new_status"], line["what"]) == (None, "started", "started")
        assert line["traceparent"] == TRACE
