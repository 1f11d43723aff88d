"""Rules for stores in which two transactions can be open for writing at once."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Sequence
from uuid import UUID

import pytest

from outrider.errors import ConcurrencyError
from outrider.saga_store import Status
from outrider.testing.saga_contract.bench import LEASE_SECONDS, SagaBench, claim_of, new_saga, reply

RACED, WORKERS, IDLE_MAX = 40, 8, 5
Owned = Counter[tuple[UUID, int]]
"""How many have owned a saga under one epoch."""


class ConcurrencyRules:
    """Who waits for whom."""

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
            # The one that is locked is overdue, and nobody can take it; the other has been renewed.
            assert await bench.claim("bob") == []
            await bench.save_in(tx, slow)

    async def test_loading_for_update_keeps_others_from_writing(self, bench: SagaBench) -> None:
        record = await bench.taken()
        async with bench.store.transaction() as tx:
            assert await bench.store.load(tx, record.instance.saga_id, for_update=True)
            saving = asyncio.create_task(bench.save(record, status=Status.RUNNING))
            await bench.advance(seconds=LEASE_SECONDS)
            assert await bench.claim("bob") == []
            assert not saving.done()
            await bench.save_in(tx, record, status=Status.COMPENSATING)
        with pytest.raises(ConcurrencyError):
            await saving

    async def test_mail_that_commits_after_the_release_is_found(self, bench: SagaBench) -> None:
        record = await bench.taken()
        async with bench.store.transaction() as tx:
            assert await bench.store.post(tx, [reply(record.instance.saga_id)]) == 1
            # Posting keeps no owner from writing, and what is not committed is seen by nobody.
            async with asyncio.timeout(10):
                await bench.release(record)
            assert await bench.claim("bob") == []
        assert len((await bench.take("bob")).mail) == 1

    async def test_workers_that_race_never_own_the_same_epoch_and_finish_everything(self, bench: SagaBench) -> None:
        ids = await bench.start(*(new_saga(f"A-{number}") for number in range(RACED)))
        owned: Owned = Counter()
        async with asyncio.timeout(100):
            await asyncio.gather(*(_race(bench, f"worker-{number}", ids, owned) for number in range(WORKERS)))
        assert set(owned.values()) == {1}
        assert (await bench.store.desk.counts())["completed"] == RACED


async def _race(bench: SagaBench, worker: str, ids: Sequence[UUID], owned: Owned) -> None:
    """Take three turns of each saga; each posts mail to another one, so that saves meet posts, and both are claimed."""
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
                    taken=[piece.mail_id for piece in record.mail],
                    release=True,
                    wake_seconds=None if ends else 0.0,
                )
                await bench.store.post(tx, [reply(other)])
