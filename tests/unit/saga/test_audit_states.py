"""States in the audit log: what each turn leaves, and a state that was changed."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any

import pytest

from outrider.audit_chain import AuditLine
from outrider.saga import Saga, SagaRegistry
from outrider.saga.audit import AuditCheck, verify
from outrider.saga.settings import SagaSettings
from outrider.saga.state.encryption import open_state
from outrider.stores.memory import MemorySagas, MemoryStore
from outrider.testing import ManualClock, SagaHarness
from tests.unit.saga.test_encrypted_state import CANARY, KEY, payloads


@dataclass
class Order:
    email: str = CANARY
    total: int = 0


def order_saga() -> Saga[Order]:
    saga = Saga("order", Order)

    @saga.call()
    async def look(context: Any) -> None:
        """Change nothing."""

    @saga.call()
    async def add(context: Any) -> None:
        context.state.total += 12

    saga.wait("parcel.collected")
    return saga


@dataclass
class Case:
    harness: SagaHarness
    store: MemorySagas
    saga: Saga[Order]

    async def lines(self) -> list[AuditLine]:
        saga_id = self.saga.new(Order(), "A-7").saga_id
        return (await self.store.audit.chain(saga_id))[1]


async def run(*, encrypted: bool = False, settings: SagaSettings | None = None) -> Case:
    saga, clock = order_saga(), ManualClock()
    store = MemorySagas(MemoryStore(clock=clock))
    registry = SagaRegistry(saga, payloads=payloads(KEY) if encrypted else None)
    harness = SagaHarness(registry, store, clock=clock, settings=settings)
    await harness.start(saga, Order(), "A-7")
    await harness.event("parcel.collected", correlation_id="A-7")
    return Case(harness, store, saga)


async def test_the_first_state_and_every_changed_state_is_kept_once_with_the_last_line_of_its_turn() -> None:
    case = await run()
    kept = [(line.line, json.loads(line.state)["total"]) for line in await case.lines() if line.state]
    assert [total for _, total in kept] == [0, 12]
    assert all(line.state_hash for line in await case.lines() if line.state)
    report = await verify(case.store.audit, AuditCheck())
    assert report.findings == []


async def test_without_the_setting_no_state_is_kept() -> None:
    case = await run(settings=SagaSettings(audit_states=False))
    assert [line.state for line in await case.lines() if line.state] == []


async def test_a_sensitive_field_is_kept_encrypted() -> None:
    case = await run(encrypted=True)
    states = [line.state for line in await case.lines() if line.state]
    assert len(states) == 2
    assert CANARY not in repr(await case.lines())
    saga_id = case.saga.new(Order(), "A-7").saga_id
    opened = [json.loads(open_state(payloads(KEY), saga_id, "order", state.encode())) for state in states]
    assert opened == [{"email": CANARY, "total": 0}, {"email": CANARY, "total": 12}]


@pytest.mark.parametrize(
    ("state", "problem"),
    [
        ('{"email":"eve@example.com","total":0}', "the state of the line was changed, or is another"),
        (None, "the line, or the line before, was changed or forged"),
    ],
)
async def test_a_state_that_was_changed_or_removed_is_found(state: str | None, problem: str) -> None:
    case = await run()
    [row] = case.store.tables.sagas.rows.values()
    place = next(index for index, line in enumerate(row.audit) if line.state)
    row.audit[place] = row.audit[place]._replace(state=state)
    report = await verify(case.store.audit, AuditCheck())
    assert [finding.problem for finding in report.findings] == [problem]
