"""Rules about what sagas have staged: whether it has left the store can always be told."""

from __future__ import annotations

from uuid import UUID, uuid4

import outrider
from outrider.event import Event
from outrider.outcome import Policy
from outrider.saga_store import Undelivered
from outrider.store import Store
from outrider.testing.saga_contract.bench import SagaBench

FAILURE = {"error": "too large"}


async def _staged(bench: SagaBench, *keys: str) -> list[UUID]:
    async with bench.store.transaction() as tx:
        return await outrider.stage(tx, *(Event("stock.reserve", {}, topic="stock", key=key) for key in keys))


async def _undelivered(bench: SagaBench, *event_ids: UUID) -> dict[UUID, Undelivered]:
    async with bench.store.transaction() as tx:
        return dict(await bench.store.undelivered(tx, event_ids))


async def _publish_all(outbox: Store) -> None:
    await outbox.beat("relay", 30, joining=True)
    lease = await outbox.claim("relay", range(3 * outbox.lanes))
    fetched = await outbox.fetch(lease, dict.fromkeys(lease.epochs, 10))
    assert await outbox.confirm(lease, fetched.events) == len(fetched.events)


class OutboxRules:
    """Looking after commands."""

    async def test_an_event_that_is_staged_is_undelivered_until_it_is_confirmed(self, bench: SagaBench) -> None:
        [event_id] = await _staged(bench, "A-7")
        assert await _undelivered(bench, event_id) == {event_id: Undelivered.WAITING}
        async with bench.outbox() as outbox:
            await _publish_all(outbox)
        assert await _undelivered(bench, event_id) == {}

    async def test_a_dead_letter_is_told_from_what_waits_and_waits_again_after_a_replay(self, bench: SagaBench) -> None:
        buried, waiting = await _staged(bench, "A-7", "A-8")
        async with bench.outbox() as outbox:
            assert await outbox.desk.bury(buried, "ann", FAILURE, Policy.HOLD)
            found = await _undelivered(bench, buried, waiting, uuid4())
            assert found == {buried: Undelivered.BURIED, waiting: Undelivered.WAITING}
            await outbox.desk.replay([buried], "ann")
        assert await _undelivered(bench, buried) == {buried: Undelivered.WAITING}

    async def test_what_nobody_staged_is_not_undelivered(self, bench: SagaBench) -> None:
        assert await _undelivered(bench, uuid4()) == {}
        assert await _undelivered(bench) == {}
