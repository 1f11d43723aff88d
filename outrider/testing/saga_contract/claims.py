"""Rules about claims: one owner at a time, for a time."""

from __future__ import annotations

import asyncio
from uuid import uuid4

from outrider.saga_store import Claim, Status
from outrider.testing.saga_contract.bench import LEASE_SECONDS, SagaBench, claim_of, new_saga, reply


class ClaimRules:
    """Who may write a saga."""

    async def test_a_claimed_saga_is_not_claimed_again(self, bench: SagaBench) -> None:
        record = await bench.taken()
        assert (record.instance.owner, record.instance.epoch) == ("ann", 1)
        assert await bench.claim("bob") == []
        assert await bench.claim("ann") == []

    async def test_an_expired_claim_is_due_again_with_another_epoch(self, bench: SagaBench) -> None:
        await bench.taken()
        await bench.advance(seconds=LEASE_SECONDS - 1)
        assert await bench.claim("bob") == []
        await bench.advance(seconds=1)
        again = await bench.take("bob")
        assert (again.instance.owner, again.instance.epoch) == ("bob", 2)

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
        # Who came at the very moment another was claiming may have got fewer; what is left is there for the next.
        rest = await bench.claim("late", limit=30)
        assert {*taken, *(record.instance.saga_id for record in rest)} == set(ids)

    async def test_a_renewed_claim_lasts_longer(self, bench: SagaBench) -> None:
        record = await bench.taken()
        await bench.advance(seconds=LEASE_SECONDS - 1)
        assert await bench.store.renew([claim_of(record)], LEASE_SECONDS) == {record.instance.saga_id}
        await bench.advance(seconds=LEASE_SECONDS - 1)
        assert await bench.claim("bob") == []

    async def test_only_claims_that_are_held_are_renewed(self, bench: SagaBench) -> None:
        await bench.start(new_saga("A-1"), new_saga("A-2"))
        lost, released = await bench.claim()
        await bench.release(released, wake_seconds=3600)
        await bench.advance(seconds=LEASE_SECONDS)
        await bench.take("bob")
        kept = await bench.taken("A-3")
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

    async def test_mail_of_a_definition_that_is_not_held_wakes_nobody_here(self, bench: SagaBench) -> None:
        record = await bench.taken()
        await bench.release(record)
        await bench.post(reply(record.instance.saga_id))
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

    async def test_neither_what_is_due_nor_what_has_mail_waits_for_the_end_of_the_other(self, bench: SagaBench) -> None:
        waiting = await bench.start(*[new_saga(f"mail-{n}") for n in range(6)])
        for record in await bench.claim():
            await bench.release(record)
        await bench.post(*[reply(saga_id) for saga_id in waiting])
        await bench.start(*[new_saga(f"due-{n}") for n in range(6)])
        for _ in range(3):
            taken = await bench.claim(limit=4)
            kinds = sorted(record.instance.correlation_id.partition("-")[0] for record in taken)
            assert kinds == ["due", "due", "mail", "mail"]
        assert await bench.claim() == []

    async def test_a_saga_that_is_due_and_has_mail_is_claimed_once(self, bench: SagaBench) -> None:
        [saga_id] = await bench.start(new_saga())
        await bench.post(reply(saga_id), reply(saga_id))
        record = await bench.take()
        assert len(record.mail) == 2

    async def test_a_claim_changes_nothing_but_who_owns_it(self, bench: SagaBench) -> None:
        record = await bench.taken()
        await bench.advance(seconds=LEASE_SECONDS)
        again = await bench.take("bob")
        assert again.instance.version == record.instance.version
        assert again.instance.updated_at == record.instance.updated_at
        assert again.instance.status is Status.STARTED
        assert len(await bench.store.desk.audit(record.instance.saga_id)) == 1
