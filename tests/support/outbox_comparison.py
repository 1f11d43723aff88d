"""A comparison of the memory store with another one, step by step, whatever happens to events."""

from __future__ import annotations

import random
import sqlite3
from collections.abc import Sequence
from contextlib import closing
from datetime import UTC, datetime, timedelta
from typing import Any
from uuid import UUID

from outrider.brokers.base import CONFIRMED
from outrider.drivers.sqlite import stage
from outrider.event import DeadLetterReason, OnDeadLetter, OutboxRow, Readiness, Stream
from outrider.outbox.model import (
    PARK,
    DeadLettered,
    Defer,
    Due,
    DueStream,
    Fetched,
    Lease,
    NewEvent,
    OptimisticClaim,
    Outcome,
    Retry,
    Settlement,
    Settlements,
    StageRequest,
)
from outrider.stores.memory import MemoryStore
from outrider.stores.sqlite import SqliteStore

LANES = 2
BLOCK = OptimisticClaim("writer", 5)


class TestClock:
    """A clock that moves when the test says so."""

    __test__ = False

    def __init__(self) -> None:
        self.time = datetime(2024, 5, 1, 12, tzinfo=UTC)

    def now(self) -> datetime:
        return self.time

    def boot_seconds(self) -> float:
        return self.time.timestamp()


class Pair:
    """Two stores that get the same calls; every answer is compared."""

    def __init__(self, sqlite: SqliteStore, clock: TestClock, rng: random.Random) -> None:
        self.memory = MemoryStore(lanes=LANES, clock=clock)
        self.sqlite = sqlite
        self.stores: tuple[Any, Any] = (self.memory, sqlite)
        self.clock = clock
        self.rng = rng
        self.lease = Lease("relay")
        self.ids: list[UUID] = []

    async def start(self) -> None:
        for store in self.stores:
            await store.heartbeat("relay", 10**9, first=True)
        leases = [await store.claim("relay", range(3 * LANES)) for store in self.stores]
        assert leases[0] == leases[1]
        self.lease = leases[0]

    async def stage(self) -> None:
        made = [self._draft() for _ in range(self.rng.randrange(1, 6))]
        plain, numbered = made[::2], made[1::2]
        chosen = [*plain, *(draft._replace(sequence=None) for draft in numbered)]
        drafts = StageRequest(chosen[: len(plain)], chosen[len(plain) :], True)
        claim = self.rng.choice([None, BLOCK])
        async with self.memory.transaction() as tx:
            expected = await tx.stage(drafts, claim)
        with closing(sqlite3.connect(self.sqlite.database.path, isolation_level=None)) as conn:
            conn.execute("BEGIN")
            assert stage(conn, drafts, claim, clock=self.clock) == expected
            conn.execute("COMMIT")
        if claim and self.rng.random() < 0.7:
            await self._settle_claim([p.event_id for p in expected if p.optimistic])

    def _draft(self) -> NewEvent:
        rng = self.rng
        event_id = UUID(int=rng.getrandbits(128), version=4)
        if self.ids and rng.random() < 0.1:
            event_id = rng.choice(self.ids)
        self.ids.append(event_id)
        available = rng.choice([None, None, None, self.clock.now() + timedelta(seconds=rng.randrange(20))])
        key = rng.choice([None, "", "a", "b", "c", "d"])
        aggregate = rng.choice([None, "x", "y"])
        return NewEvent(
            event_id, "t", None, aggregate, '{"n":1}', "{}", rng.choice(["p", "q"]), key, None, rng.choice([1, 5, 9]),
            "1", None, rng.choice([None, 7]), None, None, None, available,
        )  # fmt: skip

    async def _settle_claim(self, ids: list[UUID]) -> None:
        cut = self.rng.randrange(len(ids) + 1)
        answers = []
        for store in self.stores:
            answers.append([named(event) for event in await store.renew_claim(BLOCK, ids)])
            await store.settle_claim(BLOCK, ids[:cut], ids[cut:])
        assert answers[0] == answers[1]

    async def _all(self, store: Any) -> list[OutboxRow]:
        fetched: Fetched = await store.fetch(self.lease, dict.fromkeys(range(3 * LANES), 10_000))
        return fetched.events

    async def fetch_and_settle(self) -> None:
        quotas = {lane: self.rng.randrange(1, 8) for lane in range(3 * LANES)}
        expected, found = [await store.fetch(self.lease, quotas) for store in self.stores]
        assert list(map(named, found.events)) == list(map(named, expected.events))
        assert (found.lanes, found.blocked_lanes) == (expected.lanes, expected.blocked_lanes)
        streams = list(dict.fromkeys(stream_of(event) for event in expected.events))
        blocked = await self.memory.blocked(streams)
        assert await self.sqlite.blocked(streams) == blocked
        # An event that is held by its writer, or skipped, ends its stream for this pass: nothing behind it is written.
        over = {stream_of(event) for event in expected.events if event.readiness == Readiness.OPTIMISTIC}
        outcomes: list[Outcome | None] = []
        for event in expected.events:
            stream = stream_of(event)
            outcome = None if stream in over else PARK if stream in blocked else self._outcome(event)
            if outcome != CONFIRMED:
                blocked.add(stream)
            if isinstance(outcome, DeadLettered) and outcome.policy is OnDeadLetter.SKIP:
                over.add(stream)
            outcomes.append(outcome)
        await self._settle(expected.events, found.events, outcomes, [])

    async def work_due(self) -> None:
        room = self.rng.randrange(1, 9)
        dues = [await store.due(self.lease, 10_000) for store in self.stores]
        assert canonical(dues[0]) == canonical(dues[1])
        assert dues[0].next_seconds == dues[1].next_seconds
        pairs = {due.stream: due for due in dues[1].streams}
        for due in dues[0].streams[:room]:
            await self._work_stream(due, pairs[due.stream])

    async def _work_stream(self, expected: DueStream, found: DueStream) -> None:
        if not expected.events:
            await self._settle([], [], [], [expected.stream])
        elif self.rng.random() < 0.6:
            await self._settle(expected.events, found.events, [CONFIRMED] * len(expected.events), [])
        else:
            await self._settle(expected.events[:1], found.events[:1], [self._outcome(expected.events[0])], [])

    def _outcome(self, event: OutboxRow) -> Outcome:
        if event.readiness == Readiness.EARLY:
            return Defer()
        failure = {"kind": self.rng.choice(["nacked", "unknown"])}
        policy = self.rng.choice([OnDeadLetter.BLOCK, OnDeadLetter.SKIP])
        delay = self.rng.randrange(9)
        bad: list[Outcome] = [
            Retry(delay, failure),
            Defer(delay),
            DeadLettered(DeadLetterReason.POISON_MESSAGE, failure, policy),
        ]
        return self.rng.choice([CONFIRMED, CONFIRMED, *bad])

    async def _settle(
        self,
        expected: list[OutboxRow],
        found: list[OutboxRow],
        outcomes: Sequence[Outcome | None],
        emptied: Sequence[Stream],
    ) -> None:
        applied = []
        for store, events in zip(self.stores, (expected, found), strict=True):
            chosen = [Settlement(e, stream_of(e), o) for e, o in zip(events, outcomes, strict=True) if o is not None]
            applied.append(await store.settle(self.lease, Settlements.of(chosen, emptied)))
        assert applied[0] == applied[1]

    async def run_admin_command(self) -> None:
        verb = self.rng.choice(["replay", "discard", "dead_letter", "none"])
        chosen = self.rng.sample(self.ids, min(len(self.ids), 3))
        if verb == "dead_letter":
            policy = self.rng.choice(list(OnDeadLetter))
            # The memory store lets a skip lift another event's hold; the SQLite store does not. Kept out of the way.
            held = {held.stream for held in await self.memory.admin.blocked_streams(10_000)}
            for event in [e for e in await self._all(self.memory) if stream_of(e) not in held][:1]:
                answers = [
                    await store.admin.dead_letter(event.event_id, "me", {"kind": "x"}, policy) for store in self.stores
                ]
                assert answers[0] == answers[1]
                await self._take_back()
        elif verb != "none":
            assert len({await getattr(store.admin, verb)(chosen, "me") for store in self.stores}) == 1

    async def _take_back(self) -> None:
        leases = [await store.claim("relay", range(3 * LANES)) for store in self.stores]
        assert leases[0] == leases[1]
        self.lease = Lease("relay", {**self.lease.epochs, **leases[0].epochs})

    async def compare(self) -> None:
        expected, found = [await store.admin.counts() for store in self.stores]
        assert {k: v for k, v in found.items() if v} == {k: v for k, v in expected.items() if v}
        lists = [sorted(await store.admin.blocked_streams(10_000)) for store in self.stores]
        assert [h[:2] + h[3:] for h in lists[1]] == [h[:2] + h[3:] for h in lists[0]]
        assert [h.due_at for h in lists[1]] == [h.due_at for h in lists[0]]


def stream_of(event: OutboxRow) -> Stream:
    assert event.topic is not None
    return Stream(event.lane, event.topic, event.key)


def named(event: OutboxRow) -> tuple[Any, ...]:
    """All of an event that both stores must agree on; a marker's id is random, and numbering may leave gaps."""
    marker = event.event_type == "outrider.skipped"
    same = event._replace(position=0, headers=b"", event_id=UUID(int=0) if marker else event.event_id)
    return tuple(same)


def canonical(due: Due) -> list[Any]:
    return sorted((d.stream, str(d.cause), [named(event) for event in d.events]) for d in due.streams)
