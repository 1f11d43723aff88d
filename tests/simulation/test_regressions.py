"""Failures that the simulation has found, each in its smallest form."""

from __future__ import annotations

import asyncio
import random
from collections import Counter
from collections.abc import Coroutine, Mapping, Sequence
from typing import Any

import pytest

from outrider import Event, Outbox, Priority, Relay, RelaySettings, RetryPolicy, stage
from outrider.brokers.base import CONFIRMED, Nacked, PublishResult, Unknown
from outrider.errors import Unreachable
from outrider.event import DeadLetterReason, Message, OnDeadLetter, Stream
from outrider.outbox.model import (
    PARK,
    BlockReason,
    DeadLettered,
    Fetched,
    Lease,
    OptimisticClaim,
    Retry,
    Settlement,
    Settlements,
)
from outrider.outbox.validation import StagingRules, validate_events
from outrider.stores.memory import MemoryStore
from outrider.testing import ManualClock, MemoryBroker
from tests.simulation.virtual import VirtualClock, VirtualLoop

HELD = DeadLettered(DeadLetterReason.PERMANENT_FAILURE, {}, OnDeadLetter.BLOCK)
SKIPPED = DeadLettered(DeadLetterReason.PERMANENT_FAILURE, {}, OnDeadLetter.SKIP)


def live(loop: VirtualLoop, life: Coroutine[Any, Any, None]) -> None:
    """Run to the end, in virtual time."""
    try:
        loop.run_until_complete(life)
    finally:
        loop.close()


class CountingStore(MemoryStore):
    """Counts fetches, and can lose the answer to a claim."""

    fetches = 0
    lost_claims = 0

    async def fetch(self, lease: Lease, quotas: Mapping[int, int]) -> Fetched:
        self.fetches += 1
        return await super().fetch(lease, quotas)

    async def claim(self, relay: str, lanes: Sequence[int]) -> Lease:
        won = await super().claim(relay, lanes)
        if self.lost_claims:
            self.lost_claims -= 1
            raise Unreachable("no answer to claim")
        return won


def relay_of(loop: VirtualLoop, store: MemoryStore, broker: MemoryBroker, **settings: Any) -> Relay:
    rng = random.Random(0)
    return Relay(store, broker, RelaySettings(**settings), clock=VirtualClock(loop), rng=rng)


async def run_for(relay: Relay, seconds: float) -> None:
    task = asyncio.create_task(relay.run())
    await asyncio.sleep(seconds)
    relay.stop()
    await task


async def put(
    store: MemoryStore, *keys: str, claim: OptimisticClaim | None = None, priority: int = Priority.NORMAL
) -> None:
    async with store.transaction() as tx:
        events = [Event("changed", {}, key=key, topic="orders", priority=priority) for key in keys]
        await Outbox().insert(tx, validate_events(events, StagingRules()), claim)


async def owner_of(store: MemoryStore) -> Lease:
    await store.heartbeat("relay", 1e6, first=True)
    return await store.claim("relay", list(store.tables.lanes))


async def fetched(store: MemoryStore, lease: Lease) -> list[tuple[Any, Stream]]:
    found = await store.fetch(lease, dict.fromkeys(lease.epochs, 100))
    return [(event, event.stream) for event in found.events]


def test_lanes_won_by_a_claim_whose_answer_was_lost_are_worked_on_again() -> None:
    loop = VirtualLoop()
    store, broker = CountingStore(lanes=1, clock=VirtualClock(loop)), MemoryBroker()
    store.lost_claims = 1

    async def life() -> None:
        await store.heartbeat("rival", 3, first=True)
        await MemoryStore.claim(store, "rival", [0, 1, 2])
        await put(store, "A")
        await run_for(relay_of(loop, store, broker), 60)

    live(loop, life())
    assert len(broker.log) == 1


def test_a_lane_that_came_back_meanwhile_is_not_dropped() -> None:
    loop = VirtualLoop()
    store = MemoryStore(lanes=1, clock=VirtualClock(loop))
    relay = relay_of(loop, store, MemoryBroker(), workers=1)

    async def life() -> None:
        await relay.heartbeat()
        before = relay.lease
        store.take_lane(0, None)
        seen = await store.fetch(before, dict.fromkeys(before.epochs, 1))
        again = await store.claim(relay.name, [0])
        relay.ownership.lease = Lease(relay.name, {**before.epochs, **again.epochs})
        relay.ownership.check(before, seen.lanes)

    live(loop, life())
    assert 0 in relay.lease.epochs


def test_an_idle_relay_polls_ever_more_rarely() -> None:
    loop = VirtualLoop()
    store = CountingStore(clock=VirtualClock(loop))
    live(loop, run_for(relay_of(loop, store, MemoryBroker(), workers=1), 600))
    assert store.fetches < 100


def test_a_worker_does_not_spin_while_the_broker_is_down() -> None:
    """Two streams are due and a pass has room for one, so the next is due at once; but the connection breaks."""
    loop = VirtualLoop()
    store, broker = MemoryStore(lanes=1, clock=VirtualClock(loop)), MemoryBroker()
    relay = relay_of(loop, store, broker, workers=1, batch_max=1, retry=RetryPolicy(jitter=0))
    passes: Counter[str] = Counter()
    work = relay.run_once

    def nack_once(message: Message) -> PublishResult:
        passes[message.key] += 1
        if passes["A"] and passes["B"]:
            loop.call_soon(broker.down.add, "")
        return Nacked("busy")

    async def counted(worker: int = 0) -> int:
        passes["all"] += 1
        return await work(worker)

    async def life() -> None:
        await put(store, "A", "B")
        await run_for(relay, 120)

    broker.script, relay.run_once = nack_once, counted  # type: ignore[method-assign]
    live(loop, life())
    assert passes["all"] < 200


def test_a_suspect_that_always_fails_does_not_keep_the_others_from_their_turn() -> None:
    """One event failed alone by bad luck, an urgent one always fails. Only the first one's next turn can tell."""
    loop = VirtualLoop()
    store = MemoryStore(lanes=1, clock=VirtualClock(loop))
    bad_luck = iter((True, True))

    class Breaking(MemoryBroker):
        async def publish(self, messages: Sequence[Message]) -> Sequence[PublishResult]:
            keys = [message.key for message in messages]
            if "poison" in keys or ("unlucky" in keys and next(bad_luck, False)):
                return [Unknown("the connection was closed")] * len(messages)
            return await super().publish(messages)

    broker = Breaking()

    async def life() -> None:
        await put(store, "unlucky")
        loop.call_later(1.2, asyncio.ensure_future, put(store, "poison", priority=Priority.HIGH))
        await run_for(relay_of(loop, store, broker, workers=1, in_flight_max=1), 900)

    live(loop, life())
    assert [message.key for message in broker.log] == ["unlucky"]


async def test_a_confirmation_does_not_unblock_the_event_after_it() -> None:
    store = MemoryStore(lanes=1)
    lease = await owner_of(store)
    await put(store, "A", "A", "A")
    first, second, third = await fetched(store, lease)
    await store.settle(
        lease, Settlements.of([Settlement(*first, Retry(0, {})), *(Settlement(*e, PARK) for e in (second, third))])
    )
    [due] = (await store.due(lease, 10)).streams
    await store.settle(lease, Settlements.of([Settlement(due.events[0], due.stream, CONFIRMED)]))
    [due] = (await store.due(lease, 10)).streams
    confirmed, held = due.events
    await store.settle(
        lease, Settlements.of([Settlement(confirmed, due.stream, CONFIRMED), Settlement(held, due.stream, HELD)])
    )
    [blocked] = await store.admin.blocked_streams(10)
    assert blocked.cause is BlockReason.DEAD_LETTER


async def test_what_follows_a_skipped_event_in_the_same_write_is_not_stranded() -> None:
    store = MemoryStore(lanes=1)
    lease = await owner_of(store)
    await put(store, "A", "A")
    skipped, follower = await fetched(store, lease)
    await store.settle(lease, Settlements.of([Settlement(*skipped, SKIPPED), Settlement(*follower, PARK)]))
    [due] = (await store.due(lease, 10)).streams
    assert [event.event_id for event in due.events] == [follower[0].event_id]


def test_a_writer_that_confirms_after_its_claim_has_expired_strands_no_event() -> None:
    """The relay has the event in flight by then; without it, what it parks behind it would have no head."""
    loop = VirtualLoop()
    store, claim = MemoryStore(lanes=1, clock=VirtualClock(loop)), OptimisticClaim("writer", 2)

    async def life() -> None:
        lease = await owner_of(store)
        await put(store, "A", claim=claim)
        await put(store, "A")
        await asyncio.sleep(3)
        head, follower = await fetched(store, lease)
        await store.settle_claim(claim, [head[0].event_id], [])
        await store.settle(lease, Settlements.of([Settlement(*head, Retry(1, {})), Settlement(*follower, PARK)]))

    live(loop, life())
    assert list(store.tables.waiting) == list(store.tables.blocked)


@pytest.mark.parametrize("policy", OnDeadLetter)
async def test_an_event_dead_lettered_by_hand_does_not_get_ahead_of_those_before_it(policy: OnDeadLetter) -> None:
    """Neither does its marker, nor the event itself when it is replayed at once."""
    store, broker, clock = MemoryStore(lanes=1), MemoryBroker(), ManualClock()
    store.clock = clock
    async with store.transaction() as tx:
        ids = await stage(tx, *(Event("changed", {}, key="A", sequence="auto") for _ in range(3)))
    await store.admin.dead_letter(ids[1], "me", {}, policy)
    if policy is OnDeadLetter.BLOCK:
        await store.admin.replay([ids[1]], "me")
    relay = Relay(store, broker, RelaySettings(workers=1), clock=clock)
    await relay.heartbeat()
    while await relay.run_once():
        pass
    assert [message.headers["sequence"] for message in broker.log] == ["1", "2", "3"]


async def test_a_rolled_back_savepoint_gives_its_numbers_back() -> None:
    store = MemoryStore(lanes=1)
    lease = await owner_of(store)
    async with store.transaction() as tx:
        try:
            async with tx.savepoint():
                await stage(tx, Event("changed", {}, key="A", sequence="auto"))
                raise LookupError
        except LookupError:
            await stage(tx, Event("changed", {}, key="A", sequence="auto"))
    assert [event.sequence for event, _ in await fetched(store, lease)] == [1]
