"""Saga workers on PostgreSQL, in a time that the test owns: outages of services, and doubtful rejections."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncIterator
from dataclasses import dataclass
from typing import Any
from uuid import UUID

import pytest

import outrider
from outrider import app
from outrider.saga import Saga, SagaRegistry, SagaSettings, SagaWorker, StepContext, StepRejected, StepUnavailable
from outrider.saga.model import SagaRecord, Status, StepStatus
from outrider.saga.store import SagaStore
from outrider.telemetry.events import SagaStepAvailable, SagaStepUnavailable
from outrider.testing import ManualClock, RecordingObserver
from tests.support.postgres_benches import OWN_THE_CLOCK

pytestmark = pytest.mark.postgres

TOGETHER = 24


@dataclass
class Invoice:
    """The state of the sagas of these tests."""

    amount: int = 12


class Office:
    """Sagas on PostgreSQL, their worker, and the time of worker and database."""

    def __init__(self, store: SagaStore, conn: Any, saga: Saga[Invoice]) -> None:
        self.store, self.saga, self._conn = store, saga, conn
        self.clock, self.observer = ManualClock(), RecordingObserver()
        sagas, settings = SagaRegistry(saga), SagaSettings(lease_seconds=60)
        self.worker = SagaWorker(store, sagas, outrider.stage, settings, self.observer, clock=self.clock)

    async def start(self, count: int) -> list[UUID]:
        async with self._conn.transaction():
            names = (f"A-{number}" for number in range(count))
            return [await self.saga.start(self._conn, Invoice(), correlation_id=name) for name in names]

    async def works(self) -> None:
        """Let the worker work until nothing is due."""
        while await self.worker.run_once():
            await self.worker.rest()

    async def passes(self, seconds: float) -> None:
        """Let time pass, and the worker do what is due then."""
        self.clock.advance(seconds=seconds)
        await self._conn.execute("UPDATE outrider.test_clock SET elapsed = $1", self.clock.boot_seconds())
        await self.works()

    async def seconds_until_due(self, saga_id: UUID) -> float:
        [record] = await self.records([saga_id])
        assert record.instance.wake_at
        return (record.instance.wake_at - record.now).total_seconds() + 0.001

    async def records(self, ids: list[UUID]) -> list[SagaRecord]:
        return [record for saga_id in ids if (record := await self.store.admin.show(saga_id))]

    async def statuses(self, ids: list[UUID]) -> Counter[Status]:
        return Counter(record.instance.status for record in await self.records(ids))


@pytest.fixture
async def opened(postgres_url: str, conn: Any) -> AsyncIterator[SagaStore]:
    """Sagas on a database whose clock the test moves."""
    await conn.execute(OWN_THE_CLOCK)
    store = await app.open_sagas(postgres_url)
    yield store
    await store.close()


async def test_sagas_outlast_an_outage_of_hours_and_complete_when_the_service_is_back(
    opened: SagaStore, conn: Any
) -> None:
    saga, is_down, asked, charged = Saga("invoice", Invoice), [True], Counter[str](), Counter[str]()

    @saga.local()
    async def create(context: StepContext[Invoice], tx: Any) -> None: ...

    @saga.call()
    async def collect(context: StepContext[Invoice]) -> None:
        asked[context.key] += 1
        if is_down:
            raise StepUnavailable("503 from the bank")
        charged[context.key] += 1

    office = Office(opened, conn, saga)
    ids = await office.start(8)
    await office.works()
    for _ in range(15):
        await office.passes(1000)
    assert await office.statuses(ids) == {Status.RUNNING: 8}
    for record in await office.records(ids):
        [entry] = [entry for entry in record.journal if entry.step == "collect"]
        assert (entry.status, entry.attempts, record.instance.owner) == (StepStatus.RETRYING, 0, None)
        assert entry.unavailable_since is not None
        assert (record.now - entry.unavailable_since).total_seconds() == 15_000
    # Four hours in 15 looks: beside the first calls, one saga asked at each look.
    assert asked.total() <= 8 + 15
    assert len(office.observer.of(SagaStepUnavailable)) == 1
    is_down.clear()
    for _ in range(2):
        await office.passes(1000)
    assert await office.statuses(ids) == {Status.COMPLETED: 8}
    assert list(charged.values()) == [1] * 8
    assert len(office.observer.of(SagaStepAvailable)) == 1


async def test_an_hour_of_errors_of_any_kind_compensates_no_saga_with_default_settings(
    opened: SagaStore, conn: Any
) -> None:
    saga, is_down = Saga("invoice", Invoice), [True]

    @saga.call()
    async def collect(context: StepContext[Invoice]) -> None:
        if is_down:
            raise ConnectionResetError("the connection was lost")

    office = Office(opened, conn, saga)
    ids = await office.start(1)
    await office.works()
    passed = 0.0
    while passed < 3600:
        # Each attempt comes as early as it may.
        passed += (seconds := await office.seconds_until_due(ids[0]))
        await office.passes(seconds)
        assert await office.statuses(ids) == {Status.RUNNING: 1}
    is_down.clear()
    await office.passes(400)
    assert await office.statuses(ids) == {Status.COMPLETED: 1}


async def test_the_audit_log_says_that_a_rejection_follows_an_attempt_of_unknown_outcome(
    opened: SagaStore, conn: Any
) -> None:
    saga, undone = Saga("invoice", Invoice), list[str]()

    @saga.call()
    async def reserve(context: StepContext[Invoice]) -> None: ...

    @reserve.compensate()
    async def release(context: StepContext[Invoice]) -> None:
        undone.append("reserve")

    @saga.call(timeout_seconds=0.05)
    async def collect(context: StepContext[Invoice]) -> None:
        if context.attempt == 1:
            await asyncio.Event().wait()
        raise StepRejected("the card was declined")

    @collect.compensate()
    async def refund(context: StepContext[Invoice]) -> None:
        undone.append("collect")

    office = Office(opened, conn, saga)
    ids = await office.start(1)
    await office.works()
    await office.passes(10)
    assert (await office.statuses(ids), undone) == ({Status.COMPENSATED: 1}, ["reserve"])
    [line] = [line for line in await opened.admin.audit(ids[0]) if line["what"] == "action rejected"]
    assert line["detail"] == (
        "the card was declined; the outcome of an earlier attempt was unknown; the rejection is believed to speak for "
        "that attempt too: it had no effect, and will have none"
    )


async def test_local_steps_run_at_the_same_time_with_the_default_sizes(postgres_url: str, conn: Any) -> None:
    saga, together = Saga("invoice", Invoice), asyncio.Barrier(TOGETHER)

    @saga.local()
    async def create(context: StepContext[Invoice], tx: Any) -> None:
        await tx.execute("SELECT 1")
        # Each of them holds its connection until all of them have one.
        await together.wait()

    settings = SagaSettings()
    store = await app.open_sagas(postgres_url, concurrency=settings.concurrency)
    office = Office(store, conn, saga)
    worker = SagaWorker(store, SagaRegistry(saga), outrider.stage, settings)
    ids = await office.start(TOGETHER)
    async with asyncio.timeout(60):
        while await worker.run_once():
            await worker.rest()
    assert await office.statuses(ids) == {Status.COMPLETED: TOGETHER}
    assert {entry.attempts for record in await office.records(ids) for entry in record.journal} == {1}
    await store.close()


@pytest.mark.parametrize(("said", "at_once"), [("", 30), ("?connections_max=12", 10), ("?connections_max=66", 64)])
async def test_the_url_sets_how_many_local_steps_run_at_the_same_time(
    postgres_url: str, caplog: pytest.LogCaptureFixture, said: str, at_once: int
) -> None:
    store = await app.open_sagas(f"{postgres_url}{said}", concurrency=64)
    begun, held = 0, asyncio.Event()

    async def hold() -> None:
        nonlocal begun
        async with store.transactions.open():
            begun += 1
            await held.wait()

    async with asyncio.timeout(60), asyncio.TaskGroup() as tasks:
        for _ in range(64):
            tasks.create_task(hold())
        while begun < at_once:  # noqa: ASYNC110
            await asyncio.sleep(0.01)
        # The rest is for the store: a claim need not wait for a step.
        assert await store.claim("ann", [("invoice", 1)], limit=1, lease_seconds=15) == []
        assert begun == at_once
        held.set()
    scarce = [record.__dict__ for record in caplog.records if record.message == "connections scarce"]
    assert [(record["connections_max"], record["concurrency"]) for record in scarce] == (
        [(12, 64)] if at_once == 10 else []
    )
    assert all("10 run at a time; write connections_max=66 in the URL" in record["remedy"] for record in scarce)
    await store.close()
