"""Contract rules for children: stored with their parent, kept as long as it, and ended with it after any crash."""

from __future__ import annotations

import asyncio
import random
from collections import Counter
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import dataclass, field
from datetime import datetime
from typing import Any
from uuid import UUID

import pytest

import outrider
from outrider.errors import StepRejected
from outrider.event import Event
from outrider.handler_transactions import TransactionSource
from outrider.outbox.model import Criteria
from outrider.saga.definition.saga import Saga, SagaRegistry
from outrider.saga.execution.worker import SagaWorker
from outrider.saga.model import (
    Claim,
    Instance,
    MessageKind,
    NewSagaMessage,
    SagaChange,
    SagaCriteria,
    Status,
)
from outrider.saga.store import SagaStore
from outrider.testing.fakes import RecordingObserver
from outrider.testing.saga_harness import LEASE_SECONDS, SagaBench, new_saga

DAY = 86_400

NEVER = 10_000

ROUNDS_MAX = 600

TurnName = tuple[UUID, Status, tuple[tuple[str, str, str], ...]]
"""A turn of a saga: its status, and the journal entries that it writes."""


class ChildRules:
    """A child knows its parent, is removed after the end of its parent, and before its parent."""

    async def test_a_child_is_stored_with_its_parent_and_found_by_it(self, bench: SagaBench) -> None:
        parent, other = new_saga("A-1"), new_saga("A-2")
        children = [_child(parent.saga_id, step) for step in ("ship[0]", "ship[1]")]
        await bench.start(parent, other, *children, _child(other.saga_id, "ship"))
        found = await bench.store.admin.find(SagaCriteria(parent_id=parent.saga_id))
        assert sorted(child.parent_step or "" for child in found) == ["ship[0]", "ship[1]"]
        assert {child.parent_id for child in found} == {parent.saga_id}
        claimed = {record.instance.saga_id: record.instance for record in await bench.claim()}
        assert claimed[children[0].saga_id].parent_step == "ship[0]"
        assert (claimed[parent.saga_id].parent_id, claimed[parent.saga_id].parent_step) == (None, None)

    async def test_a_child_is_kept_until_its_parent_has_ended(self, bench: SagaBench) -> None:
        parents = {status: new_saga(status) for status in (Status.RUNNING, Status.FAILED, Status.COMPLETED)}
        children = {status: _child(parent.saga_id, "ship") for status, parent in parents.items()}
        orphan = _child(new_saga("gone").saga_id, "ship")
        await bench.start(*parents.values(), *children.values(), orphan)
        records = {record.instance.saga_id: record for record in await bench.claim()}
        for status, parent in parents.items():
            needs_attention = status is Status.FAILED
            await bench.release(records[parent.saga_id], status=status, needs_attention=needs_attention)
            await bench.release(records[children[status].saga_id], status=Status.COMPENSATED)
        await bench.release(records[orphan.saga_id], status=Status.COMPENSATED)
        await bench.advance(seconds=10 * DAY)
        pruned = await bench.store.prune(saga_days=9, audit_days=NEVER, participant_memory_days=NEVER)
        assert pruned.sagas == 3
        left = {saga.saga_id for saga in await bench.store.admin.find(SagaCriteria())}
        kept = (Status.RUNNING, Status.FAILED)
        assert left == {saga.saga_id for status in kept for saga in (parents[status], children[status])}

    async def test_a_parent_is_kept_until_its_children_and_theirs_are_removed(self, bench: SagaBench) -> None:
        parent = new_saga("A-1")
        child = _child(parent.saga_id, "ship")
        last = _child(child.saga_id, "pack")
        await bench.start(parent, child, last)
        records = {record.instance.saga_id: record for record in await bench.claim()}
        await bench.release(records[parent.saga_id], status=Status.COMPLETED)
        await bench.release(records[child.saga_id], status=Status.COMPLETED)
        await bench.advance(seconds=DAY)
        await bench.release(records[last.saga_id], status=Status.COMPLETED)
        await bench.advance(seconds=9 * DAY - 60)
        days = {"saga_days": 9, "audit_days": NEVER, "participant_memory_days": NEVER}
        assert (await bench.store.prune(**days)).sagas == 0
        async with bench.store.transaction() as tx:
            assert not await bench.store.start(tx, parent), "its children would have the names of those that are left"
        await bench.advance(seconds=120)
        assert (await bench.store.prune(**days)).sagas == 3
        async with bench.store.transaction() as tx:
            assert [await bench.store.start(tx, saga) for saga in (parent, child, last)] == [True] * 3

    @pytest.mark.parametrize("end", ["completed", "bill", "compensate"])
    async def test_parents_and_children_end_together_though_a_worker_dies_before_and_after_each_commit(
        self, bench: SagaBench, end: str
    ) -> None:
        family = Family(fault=end)
        async with bench.store.transaction() as tx:
            await bench.store.start(tx, family.trip.new(Trip("T"), "T"))
        workers = MortalWorkers(bench, family.sagas)
        await workers.run(lambda sagas: end == "compensate" and len(sagas) == family.size)
        sagas = await bench.store.admin.find(SagaCriteria())
        expected = Status.COMPLETED if end == "completed" else Status.COMPENSATED
        assert {saga.status for saga in sagas} == {expected}
        assert len(sagas) == family.size
        # A turn that was lost may be planned together with the next message, and is then another turn.
        assert min(len(workers.deaths.before), len(workers.deaths.after)) >= 3 * family.size
        assert [(await bench.show(saga.saga_id)).messages for saga in sagas] == [()] * family.size
        family.check(expected)
        async with bench.outbox() as outbox:
            staged = Counter(row["event_type"] for row in await outbox.admin.events(Criteria(limit=100)))
        assert staged["trip.began"] == 1
        assert staged["trip.undone"] == (0 if expected is Status.COMPLETED else 1)


def _child(parent_id: UUID, step: str) -> Any:
    return new_saga(f"{parent_id}:{step}")._replace(parent_id=parent_id, parent_step=step)


@dataclass
class Trip:
    """The state of each saga of the family."""

    name: str


@dataclass(slots=True)
class Deaths:
    """The turns before and after whose commit a worker has died. A repeated attempt is the same turn."""

    before: set[TurnName] = field(default_factory=set)
    after: set[TurnName] = field(default_factory=set)


class Family:
    """A trip that buys an order that ships two parcels. The steps keep count of their effects by key."""

    def __init__(self, *, fault: str) -> None:
        self.fault = fault
        self.effects: set[str] = set()
        self.undone: set[str] = set()
        self.parcel, self.order, self.trip = (Saga(name, Trip) for name in ("parcel", "order", "trip"))
        self._call(self.parcel, "pack")
        self._call(self.parcel, "label")
        self.order.child(
            self.parcel,
            input=lambda state, item: Trip(f"{state.name}/{item}"),
            name="ship",
            for_each=lambda state: ["a", "b"],
        )
        self._call(self.order, "bill")
        self.trip.local(name="begin")(self._begin).compensate()(self._undo)
        self.trip.child(self.order, input=lambda state: Trip(f"{state.name}/order"), result=self._bought, name="buy")
        if fault == "compensate":
            self.parcel.sleep(1_000_000, name="rest")
        self.sagas = SagaRegistry(self.trip, self.order, self.parcel)
        self.size = 4

    def check(self, expected: Status) -> None:
        """Check that all effects stand, or that each of them is undone."""
        if expected is Status.COMPLETED:
            assert len(self.effects) == 5
            assert self.undone == set()
        else:
            assert self.effects <= self.undone

    def _call(self, saga: Saga[Trip], name: str) -> None:
        async def act(context: Any) -> None:
            if name == self.fault and not context.state.name.endswith("/b"):
                raise StepRejected("no")
            self.effects.add(context.key)

        async def undo(context: Any) -> None:
            self.undone.add(context.key)

        saga.call(name=name)(act).compensate()(undo)

    async def _begin(self, context: Any, tx: Any) -> None:
        context.stage(Event("trip.began", {}))

    async def _undo(self, context: Any, tx: Any) -> None:
        context.stage(Event("trip.undone", {}))

    def _bought(self, context: Any, child: Trip) -> None:
        assert child.name == f"{context.state.name}/order"


class MortalWorkers:
    """Two workers on two connections, in turn. Each of their turns is lost once, and once unnoticed by its worker."""

    def __init__(self, bench: SagaBench, sagas: SagaRegistry) -> None:
        self.bench, self.sagas, self.deaths = bench, sagas, Deaths()

    async def run(self, should_compensate: Callable[[list[Instance]], bool]) -> None:
        """Run sagas until all have ended, and command compensation of the first parent once."""
        is_commanded, sagas = False, list[Instance]()
        for number in range(ROUNDS_MAX):
            store = MortalSagas(self.bench.other() if number % 2 else self.bench.store, self.deaths)
            worker = SagaWorker(
                store,
                self.sagas,
                outrider.stage,
                observer=RecordingObserver(),
                clock=self.bench.clock,
                rng=random.Random(number),
            )
            claimed = await worker.run_once()
            await worker.rest()
            sagas = await self.bench.store.admin.find(SagaCriteria())
            if not is_commanded and should_compensate(sagas):
                is_commanded = True
                await self._compensate(next(saga for saga in sagas if saga.parent_id is None))
            elif all(saga.status in (Status.COMPLETED, Status.COMPENSATED) for saga in sagas):
                return
            elif not claimed:
                await self.bench.advance(seconds=LEASE_SECONDS + 1)
        told = [(saga.saga_type, saga.status, saga.current_step, saga.last_error) for saga in sagas]
        raise AssertionError(f"the sagas do not end: {told}")

    async def _compensate(self, saga: Instance) -> None:
        message = NewSagaMessage(
            saga.saga_id, MessageKind.OPERATOR, "compensate", None, b'{"actor": "ann"}', UUID(int=1)
        )
        assert await self.bench.deliver(message) == 1


class MortalSagas:
    """A saga store whose worker dies at each turn: first before the commit, then after it."""

    def __init__(self, store: SagaStore, deaths: Deaths) -> None:
        self._store, self._deaths = store, deaths
        self._saved: dict[int, TurnName] = {}

    def __getattr__(self, name: str) -> Any:
        return getattr(self._store, name)

    async def save(self, tx: Any, claim: Claim, turn: SagaChange, lease_seconds: float) -> datetime:
        """Save a turn, and remember which."""
        now = await self._store.save(tx, claim, turn, lease_seconds)
        entries = tuple(sorted((entry.step, entry.phase.value, entry.status.value) for entry in turn.entries))
        self._saved[id(tx)] = claim.saga_id, turn.instance.status, entries
        return now

    def transaction(self) -> AbstractAsyncContextManager[Any]:
        """Open a transaction of the store."""
        return self._mortal(self._store.transaction())

    @property
    def transactions(self) -> TransactionSource:
        """The transactions for the functions of steps."""
        return _MortalSource(self._store.transactions, self._mortal)

    @asynccontextmanager
    async def _mortal(self, context: AbstractAsyncContextManager[Any]) -> AsyncIterator[Any]:
        turn = None
        async with context as tx:
            self._saved.pop(id(tx), None)
            yield tx
            turn = self._saved.pop(id(tx), None)
            if turn and turn not in self._deaths.before:
                self._deaths.before.add(turn)
                raise asyncio.CancelledError
        if turn and turn not in self._deaths.after:
            self._deaths.after.add(turn)
            raise asyncio.CancelledError


class _MortalSource:
    """Opens transactions of a source, each inside a context of the store."""

    def __init__(self, source: TransactionSource, around: Callable[..., AbstractAsyncContextManager[Any]]) -> None:
        self.vendor, self.check_handler, self.close = source.vendor, source.check_handler, source.close
        self._source, self._around = source, around

    def open(self) -> AbstractAsyncContextManager[Any]:
        return self._around(self._source.open())
