"""What a consumer handles per second, beside a bare loop that writes the same row and would write it twice.

Deliveries come from memory, so that no broker is measured. Ways take turns, and the median of the rounds counts, so
that all of them see the same machine.
"""

from __future__ import annotations

import asyncio
import json
import statistics
import time
from collections.abc import Awaitable, Callable, Iterator, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, field
from typing import Any, NamedTuple
from uuid import UUID, uuid4

import asyncpg

from bench.load import KEYS
from outrider.brokers.base import Revoked
from outrider.event import Delivery
from outrider.inbox.consumer import Consumer
from outrider.inbox.router import Route, Routes
from outrider.inbox.settings import ConsumerSettings
from outrider.inbox.store import InboxStore
from outrider.stores.postgres import PostgresInbox, PostgresSchema

TOPIC, TYPE = "orders", "order.placed"
BATCH = 100
WORKERS = (1, 8)
PARTITIONS = 4
SETUP = "DROP TABLE IF EXISTS invoices; CREATE TABLE invoices (event_id uuid, key text, body text)"
CLEAR = "TRUNCATE invoices, outrider.consumer_inbox"
BUSINESS = "INSERT INTO invoices (event_id, key, body) VALUES ($1, $2, $3)"
NOTHING_SECONDS = 0.01
WARM = 0.2
"""The share of messages that goes before, so that connections are open and statements prepared."""
IN_BATCHES = 12
"""How many times as many messages are handled in batches, which take less time."""

Row = tuple[UUID, str, str]


class InboxResult(NamedTuple):
    """How fast one way was, and how fast the bare loop that it stands beside."""

    what: str
    workers: int
    messages: int
    messages_per_second: float
    times_bare: float


@dataclass(slots=True)
class Memory:
    """A source that has everything already; it tells when all of it was acked."""

    deliveries: Sequence[Delivery]
    at: int = 0
    acked: int = 0
    done: asyncio.Event = field(default_factory=asyncio.Event)

    async def start(self, revoked: Revoked) -> None:
        """There is nothing to connect to."""

    async def receive(self, limit: int, paused: AbstractSet[str]) -> Sequence[Delivery]:
        """Give the next ones; a source that has nothing waits a moment."""
        found = self.deliveries[self.at : self.at + limit]
        self.at += len(found)
        await asyncio.sleep(0 if found else NOTHING_SECONDS)
        return found

    def ack(self, delivery: Delivery) -> None:
        """Count."""
        self.acked += 1
        if self.acked == len(self.deliveries):
            self.done.set()

    async def close(self) -> None:
        """There is nothing to close."""


def _row(event: Any) -> Row:
    return event.event_id, event.key, event.payload["pad"]


async def _one(event: Any, conn: Any) -> None:
    await conn.execute(BUSINESS, *_row(event))


async def _many(events: Any, conn: Any) -> None:
    await conn.executemany(BUSINESS, [_row(event) for event in events])


Runner = Callable[[str, Sequence[Delivery], int], Awaitable[float]]


def _inbox(route: Route, batch_max: int) -> Runner:
    """A consumer with receipts; return the seconds it took."""

    async def runner(url: str, deliveries: Sequence[Delivery], workers: int) -> float:
        settings = ConsumerSettings(concurrency=workers, batch_max=batch_max, in_flight_max=4 * BATCH * max(WORKERS))
        routes = Routes("bench", settings, {(TOPIC, TYPE): route})
        store = await PostgresInbox.open(url)
        warm, rest = _parts(deliveries)
        await _consume(store, routes, warm)
        seconds = await _consume(store, routes, rest)
        await store.close()
        return seconds

    return runner


async def _consume(store: InboxStore, routes: Routes, deliveries: Sequence[Delivery]) -> float:
    source = Memory(deliveries)
    consumer = Consumer(source, store, routes)
    started = time.perf_counter()
    running = asyncio.create_task(consumer.run())
    await source.done.wait()
    seconds = time.perf_counter() - started
    consumer.stop()
    await running
    return seconds


def _bare(per_transaction: int, *, together: bool = False) -> Runner:
    """The loop that people write first; return the seconds it took."""

    async def runner(url: str, deliveries: Sequence[Delivery], workers: int) -> float:
        async def run_once(pool: Any, lots: Iterator[Sequence[Delivery]]) -> None:
            for lot in lots:
                rows = [_read(delivery) for delivery in lot]
                async with pool.acquire() as conn, conn.transaction():
                    if together:
                        await conn.executemany(BUSINESS, rows)
                        continue
                    for row in rows:
                        await conn.execute(BUSINESS, *row)

        async def loop(pool: Any, part: Sequence[Delivery]) -> float:
            lots = iter([part[at : at + per_transaction] for at in range(0, len(part), per_transaction)])
            started = time.perf_counter()
            await asyncio.gather(*(run_once(pool, lots) for _ in range(workers)))
            return time.perf_counter() - started

        warm, rest = _parts(deliveries)
        async with asyncpg.create_pool(url, min_size=workers, max_size=workers) as pool:
            await loop(pool, warm)
            return await loop(pool, rest)

    return runner


def _parts(deliveries: Sequence[Delivery]) -> tuple[Sequence[Delivery], Sequence[Delivery]]:
    """Divide into what warms connections up, and what is measured."""
    cut = int(len(deliveries) * WARM)
    return deliveries[:cut], deliveries[cut:]


def _read(delivery: Delivery) -> Row:
    headers = delivery.headers
    return UUID(headers["message_id"].decode()), headers["key"].decode(), json.loads(delivery.body)["pad"]


PAIRS: tuple[tuple[int, tuple[str, Runner], tuple[str, Runner]], ...] = (
    (1, ("bare, a transaction each", _bare(1)), ("inbox, one by one", _inbox(Route(_one), 1))),
    (
        BATCH,
        (f"bare, {BATCH} per transaction", _bare(BATCH)),
        (f"inbox, batches of {BATCH}", _inbox(Route(_one), BATCH)),
    ),
    (
        BATCH,
        (f"bare, {BATCH} rows at once", _bare(BATCH, together=True)),
        (f"inbox, batches of {BATCH} to a batch handler", _inbox(Route(_many, batch=True), BATCH)),
    ),
)


async def run(url: str, messages: int, rounds: int) -> list[InboxResult]:
    """Measure every pair: one by one with so many messages, in batches with many times as many."""
    await PostgresSchema(url).migrate()
    conn = await asyncpg.connect(url)
    await conn.execute(SETUP)
    found: list[InboxResult] = []
    for workers in WORKERS:
        for size, bare, ours in PAIRS:
            count = messages if size == 1 else IN_BATCHES * messages
            found += await _compare(conn, url, [bare, ours], count=count, workers=workers, rounds=rounds)
    await conn.close()
    return found


async def _compare(
    conn: Any, url: str, runners: Sequence[tuple[str, Runner]], *, count: int, workers: int, rounds: int
) -> list[InboxResult]:
    rates: dict[str, list[float]] = {name: [] for name, _ in runners}
    for _ in range(rounds):
        for name, runner in runners:
            await conn.execute(CLEAR)
            seconds = await runner(url, [_delivery(number) for number in range(count)], workers)
            assert await conn.fetchval("SELECT count(*) FROM invoices") == count, f"{name} did not write every row"
            rates[name].append((count - int(count * WARM)) / seconds)
    medians = {name: statistics.median(each) for name, each in rates.items()}
    bare = medians[runners[0][0]]
    return [InboxResult(name, workers, count, rate, rate / bare) for name, rate in medians.items()]


def _delivery(number: int) -> Delivery:
    key = f"k{number % KEYS}"
    fields = {"message_id": str(uuid4()), "event_type": TYPE, "key": key}
    headers = {name: text.encode() for name, text in fields.items()}
    body = json.dumps({"order": number, "pad": "x" * 480}).encode()
    return Delivery(TOPIC, key.encode(), body, headers, f"s{number % PARTITIONS}", f"{TOPIC}/{number}")
