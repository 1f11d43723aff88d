"""Consumers and saga workers report the events that they have staged, and an observer wakes relays after the commit."""

from __future__ import annotations

import asyncio
import random
from typing import Any
from uuid import UUID

import pytest

import outrider
from outrider import Event, waker
from outrider.errors import Unreachable
from outrider.inbox.executor import HandlerExecutor
from outrider.inbox.router import Route, Routes
from outrider.inbox.settings import ConsumerSettings
from outrider.stores.memory import MemoryInbox, MemoryStore
from outrider.telemetry.events import Handled, RelayStopped, SagaAdvanced, TelemetryEvent
from outrider.testing import RecordingObserver
from outrider.testing.harness import TOPIC, TYPE, delivery
from outrider.waker import StagedObserver
from outrider.wire import decode
from tests.support.saga_shop import Shop, begun, order_saga


async def _handled(*events: Event, fails: bool = False) -> list[int]:
    """Handle one event with a handler that stages others; return the numbers of staged events that were reported."""

    async def handler(event: Event, tx: Any) -> None:
        for staged in events:
            await outrider.stage(tx, staged)
        if fails:
            raise ValueError("no")

    observer = RecordingObserver()
    routes = Routes("billing", ConsumerSettings(), {(TOPIC, TYPE): Route(handler)})
    await HandlerExecutor(MemoryInbox(MemoryStore()), routes, observer, random.Random(0)).execute([decode(delivery(1))])
    return [fact.staged for fact in observer.of(Handled)]


async def test_a_consumer_reports_the_events_that_its_handlers_have_staged() -> None:
    assert await _handled(Event("bill.sent", {}), Event("bill.filed", {})) == [2]
    assert await _handled() == [0]


async def test_a_consumer_reports_nothing_that_was_rolled_back() -> None:
    assert await _handled(Event("bill.sent", {}), fails=True) == []


async def test_a_saga_worker_reports_the_events_that_a_turn_has_staged() -> None:
    saga = order_saga()

    @saga.local()
    async def create(run: Any, tx: Any) -> None:
        await outrider.stage(tx, Event("order.filed", {}))
        run.stage(Event("order.created", {}))

    @saga.local()
    async def look(run: Any, tx: Any) -> None:
        pass

    shop = Shop(saga)
    await begun(shop, saga)
    assert sorted(fact.staged for fact in shop.observer.of(SagaAdvanced)) == [0, 0, 2]


@pytest.mark.parametrize(
    ("event", "calls"),
    [
        (Handled("billing", 1, 0, 0, 0, 0, 0.0, staged=2), 1),
        (Handled("billing", 1, 0, 0, 0, 0, 0.0), 0),
        (SagaAdvanced(UUID(int=7), "order", "running", None, 0, staged=1), 1),
        (SagaAdvanced(UUID(int=7), "order", "running", None, 0), 0),
        (RelayStopped("relay"), 0),
    ],
)
def test_relays_are_woken_after_a_commit_that_has_staged_events(event: TelemetryEvent, calls: int) -> None:
    woken: list[bool] = []
    StagedObserver(lambda: woken.append(True)).emit(event)
    assert len(woken) == calls
    StagedObserver().emit(event)


async def test_an_outage_of_the_database_is_logged_once(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(waker, "RETRY_SECONDS", 0.001)
    tries, over = 0, asyncio.Event()

    async def opening() -> Any:
        nonlocal tries
        tries += 1
        if tries == 5:
            over.set()
        raise Unreachable("the database is away")

    loop = waker._WakeLoop(opening)
    async with asyncio.timeout(30):
        while not over.is_set():
            loop.request()
            await asyncio.sleep(0)
    await loop.close()
    assert [record.getMessage() for record in caplog.records] == ["relays could not be woken"]
