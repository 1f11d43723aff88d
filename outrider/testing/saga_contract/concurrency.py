"""Rules for stores in which two transactions can be open for writing at once."""

from __future__ import annotations

import asyncio

import pytest

from outrider.errors import ConcurrencyError
from outrider.saga_store import Status
from outrider.testing.saga_contract.bench import LEASE_SECONDS, SagaBench, claim_of, new_saga, reply


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
