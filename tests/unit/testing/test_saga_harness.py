"""The harness for an application's own tests of its sagas."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from outrider import Event
from outrider.errors import UsageError
from outrider.saga import Saga, StepRejected
from outrider.saga.model import Status
from outrider.stores.sqlite import SqliteSagas, SqliteSchema
from outrider.testing import ManualClock, SagaHarness
from tests.support.saga_shop import ONCE, Order, order_saga, request


def _order() -> Saga[Order]:
    saga = order_saga()

    @saga.local(name="create")
    async def create(run: Any, tx: Any) -> None:
        run.stage(Event("order.created", {"id": run.state.order_id}))

    @create.compensate()
    async def cancel(run: Any, tx: Any) -> None:
        run.stage(Event("order.cancelled", {}))

    reserve = request(saga)

    @reserve.on("stock.reserved")
    def reserved(run: Any, reply: Any) -> None:
        run.state.reservation = reply.payload["reservation"]

    @saga.call(name="charge", retry=ONCE)
    async def charge(run: Any) -> None:
        if run.state.amount > 1000:
            raise StepRejected("the card was declined")

    saga.wait("parcel.collected", correlate=lambda event: event.payload.get("order"), timeout_seconds=60, name="parcel")
    return saga


async def test_a_saga_is_started_answered_and_completes() -> None:
    order = _order()
    harness = SagaHarness(order)
    await harness.start(order, Order("A-7", 12), "A-7")
    assert [event.event_type for event in harness.commands] == ["stock.reserve"]
    await harness.reply("reserve", {"reservation": "R-1"})
    assert await harness.event("parcel.collected", {"order": "A-7"})
    seen = await harness.saga("A-7")
    assert (seen.status, seen.state, seen.current_step) == (Status.COMPLETED, Order("A-7", 12, "R-1"), None)
    assert [event.event_type for event in harness.staged] == ["order.created"]


async def test_a_rejection_is_compensated_as_far_as_it_was_done() -> None:
    order = _order()
    harness = SagaHarness([order])
    await harness.start(order, Order("A-7"), "A-7")
    await harness.reject("reserve", {"reason": "sold out"})
    seen = await harness.saga("A-7")
    assert seen.status is Status.COMPENSATED
    assert any("sold out" in reason for reason in seen.reasons)
    assert harness.staged[-1].event_type == "order.cancelled"


async def test_what_compensates_a_step_is_answered_like_what_does_it() -> None:
    order = _order()
    harness = SagaHarness(order)
    await harness.start(order, Order("A-7", 5000), "A-7")
    await harness.reply("reserve", {"reservation": "R-1"})
    assert harness.commands[-1].event_type == "stock.release"
    assert (await harness.saga("A-7")).status is Status.COMPENSATING
    await harness.reply("reserve")
    assert (await harness.saga("A-7")).status is Status.COMPENSATED


async def test_time_is_the_tests_own() -> None:
    order = _order()
    harness = SagaHarness(order)
    await harness.start(order, Order("A-7"), "A-7")
    await harness.advance(seconds=29)
    assert len(harness.commands) == 1
    await harness.advance(seconds=10)
    await harness.advance(seconds=10)
    assert len(harness.commands) == 2


async def test_a_person_can_give_operator_commands_and_set_missing_fields() -> None:
    order = _order()
    harness = SagaHarness(order)
    await harness.start(order, Order("A-7"), "A-7")
    await harness.send_command("mark_done", "A-7", reservation="R-9")
    seen = await harness.saga("A-7")
    assert (seen.state.reservation, seen.current_step) == ("R-9", "parcel")


async def test_sagas_with_the_same_request_are_distinguished_by_their_correlation_ids() -> None:
    order = _order()
    harness = SagaHarness(order)
    for name in ("A-1", "A-2"):
        await harness.start(order, Order(name), name)
    await harness.reply("reserve", {"reservation": "R-1"}, correlation_id="A-1")
    assert (await harness.saga("A-1")).current_step == "parcel"
    assert (await harness.saga("A-2")).current_step == "reserve"


async def test_an_answer_without_a_request_fails_the_test() -> None:
    order = _order()
    harness = SagaHarness(order)
    await harness.start(order, Order("A-7"), "A-7")
    await harness.reply("reserve", {"reservation": "R-1"})
    with pytest.raises(AssertionError, match=r"no command of reserve waits for an answer; sent so far: stock.reserve"):
        await harness.reply("reserve", {"reservation": "R-1"})
    assert not await harness.event("parcel.collected", {"order": "B-1"})
    with pytest.raises(AssertionError, match="no saga was started"):
        await harness.saga("B-1")


async def test_what_a_failed_attempt_has_staged_was_never_staged() -> None:
    saga, tries = order_saga(), list[int]()

    @saga.local(name="create")
    async def create(run: Any, tx: Any) -> None:
        run.stage(Event("order.created", {}))
        tries.append(1)
        if len(tries) == 1:
            raise ConnectionError("once")

    harness = SagaHarness(saga)
    await harness.start(saga, Order("A-7"), "A-7")
    assert harness.staged == []
    await harness.advance(seconds=60)
    assert [event.event_type for event in harness.staged] == ["order.created"]


async def test_a_store_of_ones_own_is_driven_in_the_same_way(tmp_path: Path) -> None:
    await SqliteSchema(tmp_path / "shop.db").migrate()
    clock, order = ManualClock(), _order()
    store = SqliteSagas(tmp_path / "shop.db", clock=clock)
    harness = SagaHarness(order, store, clock=clock)
    await harness.start(order, Order("A-7", 12), "A-7")
    await harness.reply("reserve", {"reservation": "R-1"})
    await harness.advance(seconds=60)
    assert (await harness.saga("A-7")).status is Status.COMPENSATING
    await harness.reply("reserve")
    assert (await harness.saga("A-7")).status is Status.COMPENSATED
    with pytest.raises(UsageError, match="keeps its own time"):
        await SagaHarness(order, store).advance(seconds=1)
    await store.close()
