"""From commit to confirm at a steady rate, by every way that an event can find its broker.

Writer and relay share a process, and so a clock: it starts when the writer's commit returns and stops when the broker's
confirm is known. Writers do not wait for relays: each transaction begins at its own time.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from statistics import quantiles
from typing import Any, NamedTuple
from uuid import UUID

import asyncpg

from bench import backlog
from outrider import Event, Outbox, Relay, RelaySettings
from outrider.brokers.base import CONFIRMED, Broker, PublishResult
from outrider.event import Message
from outrider.outbox.optimistic import OptimisticWriter
from outrider.stores.postgres import PostgresSchema, PostgresStore

CONNECTIONS = 4
KEYS = 5_000
WARM_SECONDS = 0.5
"""Time to connect and to listen, and the events of as much time again do not count."""
LAST_SECONDS_MAX = 30.0
PAUSE = "SELECT pg_sleep(0.05)"
BODY = {"order": 1, "pad": "x" * 480}

NOTIFY, SEND = "hint after the commit", "optimistic send"
RARELY = RelaySettings(poll_seconds_min=10.0, poll_seconds_max=10.0)
"""So rarely that polling takes no part in what is measured."""
RUNNERS = {
    "default": RelaySettings(),
    NOTIFY: RARELY,
    SEND: RARELY,
}

Commit = Callable[[Any, Event], Awaitable[UUID]]


class Latency(NamedTuple):
    """How long an event took: the middle one, and the slowest but one in a hundred."""

    broker: str
    runner: str
    events: int
    p50_milliseconds: float
    p99_milliseconds: float


class Timed:
    """A broker that notes when each message was confirmed."""

    def __init__(self, broker: Broker, confirmed_at: dict[str, float]) -> None:
        self._broker, self._confirmed_at = broker, confirmed_at
        self.capabilities, self.start, self.probe = broker.capabilities, broker.start, broker.probe
        self.destination, self.check, self.close = broker.destination, broker.check, broker.close

    async def publish(self, messages: Sequence[Message]) -> Sequence[PublishResult]:
        """Publish, and look at the clock."""
        results = await self._broker.publish(messages)
        now = time.monotonic()
        for message, result in zip(messages, results, strict=True):
            if result == CONFIRMED:
                self._confirmed_at.setdefault(message.message_id, now)
        return results


@dataclass(slots=True)
class Scene:
    """Writers, and a relay beside them."""

    pool: asyncpg.Pool
    commit: Commit
    after_commit: Callable[[], Awaitable[None]] | None
    confirmed_at: dict[str, float]
    committed_at: dict[str, float] = field(default_factory=dict)

    async def measure(self, per_second: float, seconds: float) -> list[float]:
        """Return the milliseconds that each event took, without the first of them."""
        await self.pool.execute("SELECT pg_sleep($1)", WARM_SECONDS)
        ignored = int(WARM_SECONDS * per_second)
        await self._write(ignored + int(seconds * per_second), per_second)
        waits = [self.confirmed_at[event_id] - at for event_id, at in self.committed_at.items()]
        return [wait * 1e3 for wait in waits[ignored:]]

    async def _write(self, events: int, per_second: float) -> None:
        """Begin a transaction at each tick, whatever has become of those before it; then wait for the last confirm."""
        started = time.monotonic()
        await asyncio.gather(*(self._write_one(number, started + number / per_second) for number in range(events)))
        async with asyncio.timeout(LAST_SECONDS_MAX):
            while self.committed_at.keys() - self.confirmed_at.keys():
                await self.pool.execute(PAUSE)

    async def _write_one(self, number: int, at: float) -> None:
        await asyncio.sleep(at - time.monotonic())
        event = Event("order.placed", BODY, aggregate_id=f"k{number % KEYS}", topic=backlog.TOPIC)
        async with self.pool.acquire() as conn:
            event_id = await self.commit(conn, event)
            self.committed_at[str(event_id)] = time.monotonic()
            if self.after_commit is not None:
                await self.after_commit()


async def run(
    url: str, brokers: Mapping[str, Callable[[], Broker]], *, per_second: float, seconds: float
) -> list[Latency]:
    """Measure every way to every broker."""
    await PostgresSchema(url).migrate()
    conn = await asyncpg.connect(url)
    await conn.execute(backlog.EMPTY)
    await conn.close()
    results = []
    for name, open_broker in brokers.items():
        for runner in RUNNERS:
            async with _playing(url, open_broker, runner) as scene:
                waits = await scene.measure(per_second, seconds)
            cuts = quantiles(waits, n=100)
            results.append(Latency(name, runner, len(waits), cuts[49], cuts[98]))
    return results


@asynccontextmanager
async def _playing(url: str, open_broker: Callable[[], Broker], runner: str) -> AsyncIterator[Scene]:
    """Run a relay around the block, with writers who have connections, a store and a broker of their own."""
    confirmed_at: dict[str, float] = {}
    ours, theirs = Timed(open_broker(), confirmed_at), Timed(open_broker(), confirmed_at)
    await theirs.start()
    store, writers = await PostgresStore.open(url), await PostgresStore.open(url)
    pool = await asyncpg.create_pool(url, min_size=CONNECTIONS, max_size=CONNECTIONS)
    sender = OptimisticWriter(writers, theirs, Outbox().insert)
    relay = Relay(store, ours, RUNNERS[runner])
    running = asyncio.create_task(relay.run())
    try:
        commit = _sending(sender) if runner == SEND else _stage
        yield Scene(pool, commit, writers.notify if runner == NOTIFY else None, confirmed_at)
    finally:
        await sender.close()
        relay.stop()
        await running
        for closing in (pool, writers, store, theirs, ours):
            await closing.close()


async def _stage(conn: Any, event: Event) -> UUID:
    async with conn.transaction():
        [event_id] = await Outbox().stage(conn, event)
    return event_id


def _sending(sender: OptimisticWriter) -> Commit:
    async def commit(conn: Any, event: Event) -> UUID:
        async with sender.transaction(conn.transaction()) as outbox:
            [event_id] = await outbox.stage(conn, event)
        return event_id

    return commit
