"""The memory store and the MongoDB store do the same, step by step, whatever happens to events.

Streams that share a lane may come in another order: positions of different streams do not compare.
"""

from __future__ import annotations

import random
from collections.abc import AsyncIterator
from datetime import timedelta
from typing import Any

import pytest
from pymongo import AsyncMongoClient
from pymongo.asynchronous.client_session import AsyncClientSession

from outrider.brokers.base import CONFIRMED
from outrider.event import OnDeadLetter, OutboxRow, Readiness, Stream
from outrider.outbox.model import (
    PARK,
    DeadLettered,
    OptimisticClaim,
    Outcome,
    Settlement,
    Settlements,
    StagedRow,
    StageRequest,
)
from outrider.stores.mongo import MongoSchema, MongoStore
from outrider.stores.mongo.operations import run_operations_async
from outrider.stores.mongo.staging import stage
from tests.support.outbox_comparison import BLOCK, LANES, Pair, TestClock, named, stream_of

pytestmark = pytest.mark.mongo

ALL = dict.fromkeys(range(3 * LANES), 10_000)


class MongoPair(Pair):
    """A memory store and a MongoDB store that get the same calls."""

    def __init__(self, store: MongoStore, client: AsyncMongoClient[Any], clock: TestClock, rng: random.Random) -> None:
        super().__init__(store, clock, rng)  # type: ignore[arg-type]
        self.mongo, self.client = store, client

    async def stage(self) -> None:
        made = [self._draft()._replace(sequence=None) for _ in range(self.rng.randrange(1, 6))]
        drafts = StageRequest(made[::2], made[1::2], True)
        claim = self.rng.choice([None, BLOCK])
        async with self.memory.transaction() as tx:
            expected = await tx.stage(drafts, claim)
        found = await self._inserted_rows(drafts, claim)
        assert [row.event_id for row in found] == [row.event_id for row in expected]
        held = [row.event_id for row in found if row.optimistic]
        # An event that is alone in its stream is held here even if its lane is not empty; the relay may have it then.
        more = set(held) - {row.event_id for row in expected if row.optimistic}
        await self.mongo.settle_claim(BLOCK, [], list(more))
        if claim and self.rng.random() < 0.7:
            await self._settle_claim([event_id for event_id in held if event_id not in more])

    async def _inserted_rows(self, drafts: StageRequest, claim: OptimisticClaim | None) -> list[StagedRow]:
        async def run_once(session: AsyncClientSession) -> list[StagedRow]:
            return await run_operations_async(stage(drafts, claim, self.clock), session, self.mongo.database.schema)

        async with self.client.start_session() as session:
            return await session.with_transaction(run_once)

    async def fetch_and_settle(self) -> None:
        expected, found = [by_stream(await self._all(store)) for store in self.stores]
        assert {s: list(map(named, e)) for s, e in found.items()} == {
            s: list(map(named, e)) for s, e in expected.items()
        }
        blocked = await self.memory.blocked(list(expected))
        assert await self.mongo.blocked(list(expected)) == blocked
        chosen: list[list[Settlement]] = [[], []]
        for stream in sorted(expected):
            outcomes = self._outcomes(expected[stream], waits=stream in blocked)
            for side, events in enumerate((expected[stream], found[stream])):
                chosen[side] += [Settlement(e, stream, o) for e, o in zip(events, outcomes, strict=False)]
        applied = [
            await store.settle(self.lease, Settlements.of(settled))
            for store, settled in zip(self.stores, chosen, strict=True)
        ]
        assert applied[0] == applied[1]

    def _outcomes(self, events: list[OutboxRow], *, waits: bool) -> list[Outcome]:
        """Decide about the first events of a stream, as a relay would: what comes behind a failure is parked."""
        outcomes: list[Outcome] = []
        for event in events[: self.rng.randrange(1, 8)]:
            if event.readiness == Readiness.OPTIMISTIC:
                break
            outcomes.append(PARK if waits else self._outcome(event))
            waits = waits or outcomes[-1] != CONFIRMED
            if isinstance(outcomes[-1], DeadLettered) and outcomes[-1].policy is OnDeadLetter.SKIP:
                break
        return outcomes


def by_stream(events: list[OutboxRow]) -> dict[Stream, list[OutboxRow]]:
    found: dict[Stream, list[OutboxRow]] = {}
    for event in events:
        found.setdefault(stream_of(event), []).append(event)
    return found


@pytest.fixture
async def client(mongo_url: str) -> AsyncIterator[AsyncMongoClient[Any]]:
    client: AsyncMongoClient[Any] = AsyncMongoClient(mongo_url)
    async with client:
        yield client


@pytest.fixture
async def mongo(mongo_url: str, client: AsyncMongoClient[Any]) -> AsyncIterator[MongoStore]:
    await MongoSchema(mongo_url, schema="agreeing", lanes=LANES).migrate()
    store = await MongoStore.open(mongo_url, schema="agreeing", clock=TestClock())
    yield store
    await store.close()
    await client.drop_database("agreeing")


@pytest.mark.parametrize("seed", range(4))
async def test_both_stores_give_the_same_answers(mongo: MongoStore, client: AsyncMongoClient[Any], seed: int) -> None:
    rng, clock = random.Random(seed), mongo.database.clock
    assert isinstance(clock, TestClock)
    pair = MongoPair(mongo, client, clock, rng)
    await pair.start()
    verbs = [pair.stage, pair.fetch_and_settle, pair.work_due, pair.run_admin_command]
    for _ in range(120):
        await rng.choice(verbs)()
        await pair.compare()
        clock.time += timedelta(seconds=rng.choice([0, 0, 1, 4]))
