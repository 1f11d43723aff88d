"""A transaction that is lost under a step: its function is not to blame, and neither is the store."""

from __future__ import annotations

from typing import Any

import outrider
from outrider import Event
from outrider.errors import TransactionLost
from outrider.saga.model import Status, StepStatus
from outrider.telemetry.events import SagaStepFailed, SagaWorkerUnavailable
from tests.unit.saga_shop import ONCE, Shop, begun, order_saga


async def test_a_transaction_that_is_lost_under_a_step_is_taken_again_and_costs_no_attempt() -> None:
    saga, tries = order_saga(), list[int]()

    @saga.local(retry=ONCE)
    async def create(run: Any, tx: Any) -> None:
        tries.append(run.attempt)
        await outrider.stage(tx, Event("order.created", {"try": len(tries)}))
        if len(tries) < 4:
            raise TransactionLost("another transaction was first")

    shop = Shop(saga)
    saga_id = await begun(shop, saga)
    assert tries == [1, 1, 1, 1]
    assert await shop.status(saga_id) is Status.COMPLETED
    assert await shop.progress(saga_id, "create") == (StepStatus.DONE, 1)
    assert [event.payload for event in await shop.sent()] == [{"try": 4}]
    assert (shop.observer.of(SagaStepFailed), shop.observer.of(SagaWorkerUnavailable)) == ([], [])
