"""Writers: business transactions over a few streams, some of them late, rolled back, or repeated."""

from __future__ import annotations

import asyncio
import random
from contextlib import AsyncExitStack
from dataclasses import dataclass, field
from datetime import timedelta
from uuid import UUID

from outrider import Event, stage
from outrider.event import band_of
from outrider.outbox.optimistic import OptimisticBatch, OptimisticWriter
from outrider.stores.memory import MemoryStore, MemoryTransaction
from tests.simulation.record import Entry, Fate, Record


class RollBack(Exception):
    """A writer changed its mind."""


@dataclass(frozen=True, slots=True)
class StreamPlan:
    """One stream that writers write to.

    `numbered`: the store counts. `locked`: the writer holds its aggregate's row from before staging until commit.
    `free`: without coordination. `keyless`: every event is a stream of its own.
    """

    topic: str
    key: str
    priority: int
    mode: str


@dataclass(slots=True)
class Scene:
    """The state that writers share."""

    store: MemoryStore
    record: Record
    plans: list[StreamPlan]
    aggregates: dict[str, asyncio.Lock] = field(default_factory=dict)
    late: float = 0.1
    mischief: float = 1.0
    breaking: int = 0
    transactions: int = 0

    def lock_of(self, plan: StreamPlan) -> asyncio.Lock:
        return self.aggregates.setdefault(f"{plan.topic}/{plan.key}", asyncio.Lock())


class Writer:
    """One connection, one transaction after the other."""

    def __init__(self, scene: Scene, name: str, rng: random.Random, sender: OptimisticWriter) -> None:
        self.scene, self.name, self.rng, self.sender = scene, name, rng, sender
        self.sending: list[asyncio.Task[None]] = []
        self.committed: list[Event] = []
        self.count = 0

    async def run(self, transactions: int, gap_seconds: float) -> None:
        for _ in range(transactions):
            await asyncio.sleep(self.rng.expovariate(1 / gap_seconds))
            await self._transact()
            if self.rng.random() < 0.6:
                await self.scene.store.notify()
        await asyncio.gather(*self.sending)

    async def _transact(self) -> None:
        if self.committed and self.rng.random() < 0.1:
            await self._repeat(self.rng.choice(self.committed))
            return
        # Locks are taken in one order by everybody, as a careful application would.
        chosen = self.rng.sample(self.scene.plans, min(len(self.scene.plans), self.rng.choice((1, 1, 2, 3))))
        chosen.sort(key=lambda plan: (plan.topic, plan.key))
        async with AsyncExitStack() as locks:
            for plan in chosen:
                if plan.mode == "locked":
                    await locks.enter_async_context(self.scene.lock_of(plan))
            await self._commit_or_not(chosen)

    async def _repeat(self, event: Event) -> None:
        """Stage what is known already, as a caller does who never learned that it had committed."""
        # A discarded event is forgotten, so it would be a new event.
        if event.event_id not in self.scene.record.discarded:
            async with self.scene.store.transaction() as tx:
                await stage(tx, event)

    async def _commit_or_not(self, chosen: list[StreamPlan]) -> None:
        tx, batch = self.scene.store.begin(), self.sender.batch()
        self.scene.transactions += 1
        try:
            made = await self._write(tx, batch, chosen, self.scene.transactions)
        except BaseException as error:
            tx.rollback()
            self.scene.record.note(self.name, "rollback")
            if not isinstance(error, RollBack):
                raise
        else:
            self._commit(tx, made)
            # A writer that dies after its commit leaves its events to the relays.
            if self.rng.random() < 0.85:
                self.sending.append(asyncio.create_task(self.sender.send(batch)))

    async def _write(
        self, tx: MemoryTransaction, batch: OptimisticBatch, chosen: list[StreamPlan], number: int
    ) -> list[Event]:
        # A counter stays locked after the savepoint is rolled back; with a second one, locks would lose their order.
        if self.rng.random() < 0.15 and sum(plan.mode == "numbered" for plan in chosen) < 2:
            await self._rolled_back(tx, batch, chosen)
        made = await self._stage(tx, batch, chosen, number)
        drawn = self.rng.random()
        if drawn < self.scene.late:
            await asyncio.sleep(self.rng.uniform(0, 15))
        elif drawn < 0.5:
            await asyncio.sleep(self.rng.uniform(0, 0.1))
        if self.rng.random() < 0.12:
            raise RollBack
        return made

    async def _rolled_back(self, tx: MemoryTransaction, batch: OptimisticBatch, plans: list[StreamPlan]) -> None:
        try:
            async with tx.savepoint():
                await self._stage(tx, batch, plans, 0)
                raise RollBack
        except RollBack:
            self.scene.record.note(self.name, "savepoint rolled back")

    async def _stage(
        self, tx: MemoryTransaction, batch: OptimisticBatch, chosen: list[StreamPlan], number: int
    ) -> list[Event]:
        plans = [plan for plan in chosen for _ in range(self.rng.choice((1, 1, 1, 2, 3)))]
        self.rng.shuffle(plans)
        fates = [self._fate() for _ in plans]
        events = [self._event(plan, fate) for plan, fate in zip(plans, fates, strict=True)]
        # In one transaction, numbered events come behind the others; their streams are never the same.
        await batch.stage(tx, *events)
        tick = self.scene.record.tick()
        for index, (event, plan, fate) in enumerate(zip(events, plans, fates, strict=True)):
            self._enter(event, plan, fate, (number, index, tick))
        return events

    def _event(self, plan: StreamPlan, fate: Fate) -> Event:
        rng, now = self.rng, self.scene.store.clock.now()
        early = rng.random() < 0.06 * self.scene.mischief
        return Event(
            "changed",
            {},
            event_id=UUID(int=rng.getrandbits(128), version=4),
            topic=plan.topic,
            key=None if plan.mode == "keyless" else plan.key,
            priority=plan.priority,
            sequence="auto" if plan.mode == "numbered" else None,
            max_attempts=2 if fate.poison == "break" else None,
            available_at=now + timedelta(seconds=rng.uniform(0, 8)) if early else None,
        )

    def _fate(self) -> Fate:
        rng, mischief = self.rng, self.scene.mischief
        poison = "reject" if rng.random() < 0.05 * mischief else ""
        if self.scene.breaking and rng.random() < 0.1 * mischief:
            self.scene.breaking -= 1
            poison = "break"
        nacks = rng.choice((1, 1, 2)) if rng.random() < 0.15 * mischief and poison != "break" else 0
        return Fate(nacks, int(rng.random() < 0.05 * mischief), poison, rng.random() < 0.5)

    def _enter(self, event: Event, plan: StreamPlan, fate: Fate, numbers: tuple[int, int, int]) -> None:
        assert event.event_id is not None
        self.count += 1
        stream = (plan.topic, event.key or str(event.event_id), band_of(plan.priority))
        entry = Entry(f"{self.name}.{self.count}", stream, plan.mode == "numbered", *numbers, fate)
        self.scene.record.entries[event.event_id] = entry

    def _commit(self, tx: MemoryTransaction, made: list[Event]) -> None:
        record, tables = self.scene.record, self.scene.store.tables
        tx.commit()
        tick, labels = record.tick(), []
        for event in made:
            assert event.event_id is not None
            entry = record.entries[event.event_id]
            entry.committed_tick, entry.sequence = tick, tables.rows[tables.ids[event.event_id]].event.sequence
            labels.append(entry.label)
        self.committed += made
        record.note(self.name, "commit", labels)
