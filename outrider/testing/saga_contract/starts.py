"""Rules about starting: in the caller's transaction, once for a name."""

from __future__ import annotations

import asyncio
from uuid import uuid4

import pytest

from outrider.errors import NotInTransaction
from outrider.saga_store import Status
from outrider.testing.saga_contract.bench import OUTLINE, TRACE, SagaBench, new_saga, reply


class StartRules:
    """A saga begins with the caller's commit."""

    async def test_a_started_saga_is_due_at_once(self, bench: SagaBench) -> None:
        saga = new_saga()
        await bench.start(saga)
        record = await bench.take()
        instance = record.instance
        assert (instance.saga_id, instance.saga_type, instance.definition_version) == (saga.saga_id, "order", 1)
        assert (instance.correlation_id, instance.state, instance.status) == ("A-7", saga.state, Status.STARTED)
        assert (instance.version, instance.retry_count, instance.needs_attention) == (0, 0, False)
        assert (instance.current_step, instance.last_error, instance.ended_at) == (None, None, None)
        assert instance.traceparent == TRACE
        assert instance.outline == OUTLINE
        assert instance.started_at == instance.updated_at == record.now
        assert (record.journal, record.mail) == ((), ())

    async def test_starting_twice_is_one_start(self, bench: SagaBench) -> None:
        await bench.start(new_saga())
        async with bench.store.transaction() as tx:
            assert not await bench.store.start(tx, new_saga())
            assert not await bench.store.start(tx, new_saga()._replace(saga_id=uuid4()))
        assert len(await bench.claim()) == 1
        assert len(await bench.store.desk.audit(new_saga().saga_id)) == 1

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
        assert await bench.store.desk.show(new_saga().saga_id) is None
        assert await bench.store.desk.audit(new_saga().saga_id) == []

    async def test_an_application_starts_and_posts_through_its_driver(self, bench: SagaBench) -> None:
        saga = new_saga()
        async with bench.store.transaction() as tx:
            assert await bench.drive("start_saga", tx, saga) is True
            assert await bench.drive("start_saga", tx, saga) is False
            assert await bench.drive("post_mail", tx, [reply(saga.saga_id), reply(saga.saga_id)]) == 2
        record = await bench.take()
        assert record.instance.state == saga.state
        assert len(record.mail) == 2

    async def test_a_driver_refuses_to_start_outside_a_transaction(self, bench: SagaBench) -> None:
        async with bench.outside() as conn:
            with pytest.raises(NotInTransaction, match="saga"):
                await bench.drive("start_saga", conn, new_saga())
            with pytest.raises(NotInTransaction):
                await bench.drive("post_mail", conn, [reply(new_saga().saga_id)])

    async def test_a_start_is_the_first_line_of_the_trail(self, bench: SagaBench) -> None:
        [saga_id] = await bench.start(new_saga())
        [line] = await bench.store.desk.audit(saga_id)
        assert (line["old_status"], line["new_status"], line["what"]) == (None, "started", "started")
        assert line["traceparent"] == TRACE
