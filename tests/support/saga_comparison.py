"""A comparison of two saga stores, step by step, whatever is started, delivered and saved."""

from __future__ import annotations

import random
from dataclasses import replace
from typing import Any
from uuid import UUID

from outrider.errors import ConcurrencyError
from outrider.saga.model import (
    AuditEntry,
    Claim,
    Instance,
    JournalEntry,
    MessageKind,
    NewSagaMessage,
    Phase,
    SagaChange,
    SagaCriteria,
    SagaRecord,
    Status,
    StepStatus,
)
from outrider.stores.memory import MemoryStore
from outrider.testing import ManualClock
from outrider.testing.contracts import SagaBench
from outrider.testing.saga_harness import claim_of, new_saga
from tests.support.memory_benches import MemorySagaBench

STEPS = 120
NAMES = [f"A-{number}" for number in range(6)]
DEFINITIONS = [("order", 1), ("order", 2), ("refund", 1)]


class Pair:
    """Two stores that get the same calls; every answer is compared."""

    def __init__(self, known: SagaBench, other: SagaBench, rng: random.Random) -> None:
        self.benches = (known, other)
        self.rng = rng
        self.events = [UUID(int=rng.getrandbits(128), version=4) for _ in range(12)]
        self.claims: list[tuple[SagaRecord, SagaRecord]] = []
        """Sagas that both have claimed at some time, and may have lost since."""

    async def start(self) -> None:
        saga_type, version = self.rng.choice(DEFINITIONS)
        saga, stays = new_saga(self.rng.choice(NAMES), saga_type, version), self.rng.random() < 0.8
        answers = []
        for bench in self.benches:
            async with bench.store.transaction() if stays else bench.rolled_back() as tx:
                answers.append(await bench.store.start(tx, saga))
        assert answers[0] == answers[1]

    async def deliver(self) -> None:
        rng = self.rng
        ids = [new_saga(rng.choice(NAMES), rng.choice(["order", "refund"])).saga_id for _ in range(3)]
        messages = [
            NewSagaMessage(i, rng.choice(list(MessageKind)), "said", None, b"{}", rng.choice(self.events)) for i in ids
        ]
        answers = [await bench.deliver(*messages) for bench in self.benches]
        assert answers[0] == answers[1]

    async def claim(self) -> None:
        worker, wanted = self.rng.choice(["ann", "bob"]), self.rng.sample(DEFINITIONS, self.rng.randrange(4))
        claimed = [
            sorted(
                await bench.claim(worker, wanted, limit=100, suspects=100), key=lambda record: record.instance.saga_id
            )
            for bench in self.benches
        ]
        assert [_plain(record) for record in claimed[0]] == [_plain(record) for record in claimed[1]]
        self.claims += zip(*claimed, strict=True)

    async def renew(self) -> None:
        chosen = self.rng.sample(self.claims, min(3, len(self.claims)))
        answers = [
            await bench.store.renew([claim_of(pair[side]) for pair in chosen], 20)
            for side, bench in enumerate(self.benches)
        ]
        assert answers[0] == answers[1]

    async def save(self) -> None:
        if not self.claims:
            return
        rng, pair = self.rng, self.rng.choice(self.claims[-6:])
        status, entry = rng.choice(list(Status)), self._entry()
        fields: dict[str, Any] = {
            "status": status,
            "needs_attention": rng.random() < 0.2,
            "retry_count": rng.randrange(5),
            "losses": rng.randrange(3),
        }
        note = AuditEntry(pair[0].instance.status, status, entry.step, "saved", "ann")
        release, wake = rng.random() < 0.7, rng.choice([None, 0.0, 30.0])
        taken, seen = ([n for n in range(2) if rng.random() < 0.4] for _ in range(2))
        # Sometimes decided on what is stored, sometimes on what was claimed.
        newest = rng.random() < 0.8
        answers: list[bool] = []
        for side, bench in enumerate(self.benches):
            now = await bench.store.admin.show(pair[side].instance.saga_id)
            record = now if now and newest else pair[side]
            numbers = [message.message_id for message in record.messages]
            turn = SagaChange(
                replace(record.instance, **fields),
                [entry],
                [numbers[n] for n in taken if n < len(numbers)],
                [numbers[n] for n in seen if n < len(numbers)],
                [note],
                release,
                wake,
            )
            answers.append(await _saved(bench, claim_of(pair[side]), turn))
        assert answers[0] == answers[1]

    def _entry(self) -> JournalEntry:
        rng = self.rng
        return JournalEntry(rng.choice("xyz"), rng.choice(list(Phase)), rng.choice(list(StepStatus)), rng.randrange(9))

    async def enter_participant(self) -> None:
        key, phase, stays = self.rng.choice("kl"), self.rng.choice(list(Phase)), self.rng.random() < 0.7
        answers = []
        for bench in self.benches:
            async with bench.store.transaction() if stays else bench.rolled_back() as tx:
                answers.append(await bench.call_driver("participant_enter", tx, "stock", key, phase))
                await bench.call_driver("participant_save_reply", tx, "stock", key, phase, b'"kept"')
        assert answers[0] == answers[1]

    async def apply_deadlines(self) -> None:
        seconds = self.rng.choice([1, 10, 40, 5 * 86_400])
        for bench in self.benches:
            await bench.advance(seconds=seconds)

    async def prune(self) -> None:
        days = {name: self.rng.choice([1, 8, 30]) for name in ("saga_days", "audit_days", "participant_memory_days")}
        answers = [await bench.store.prune(**days) for bench in self.benches]
        assert answers[0] == answers[1]

    async def compare(self) -> None:
        states = [await self._state(bench) for bench in self.benches]
        assert states[1] == states[0]

    async def _state(self, bench: SagaBench) -> Any:
        admin = bench.store.admin
        sagas = await admin.find(SagaCriteria(limit=1000))
        stuck = [saga.saga_id for saga in await admin.find(SagaCriteria(limit=1000, stuck_seconds=5))]
        shown = [_plain(await bench.show(saga.saga_id)) for saga in sagas]
        ids = [new_saga(name, kind).saga_id for name in NAMES for kind in ("order", "refund")]
        trails = [[_untimed(line) for line in await admin.audit(saga_id)] for saga_id in ids]
        return await admin.counts(), stuck, shown, trails


async def _saved(bench: SagaBench, claim: Claim, turn: SagaChange) -> bool:
    try:
        async with bench.store.transaction() as tx:
            await bench.store.save(tx, claim, turn, 15)
    except ConcurrencyError:
        return False
    return True


def _plain(record: SagaRecord) -> Any:
    """All of a saga that stores must agree on; times only in relation to now, and no ids of messages."""
    untimed: dict[str, Any] = dict.fromkeys(("started_at", "updated_at", "ended_at", "wake_at"))
    # The hash has a random salt.
    untimed["audit_hash"] = None
    instance = replace(record.instance, **untimed)
    return instance, _times(record.instance, record), record.journal, [message[1:6] for message in record.messages]


def _times(instance: Instance, record: SagaRecord) -> list[float | None]:
    times = instance.started_at, instance.updated_at, instance.ended_at, instance.wake_at
    return [None if time is None else round((time - record.now).total_seconds(), 3) for time in times]


def _untimed(line: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in line.items() if name != "at"}


async def compare_with_memory(bench: SagaBench, seed: int) -> None:
    rng, clock = random.Random(seed), ManualClock()
    pair = Pair(MemorySagaBench(MemoryStore(clock=clock), clock), bench, rng)
    often = [pair.start, pair.deliver, pair.claim, pair.claim, pair.save, pair.save, pair.save, pair.save]
    verbs = [*often, pair.renew, pair.enter_participant, pair.apply_deadlines, pair.prune]
    for _ in range(STEPS):
        await rng.choice(verbs)()
        await pair.compare()
