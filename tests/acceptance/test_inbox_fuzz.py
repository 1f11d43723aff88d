"""Whatever a broker delivers, a consumer goes on, and every delivery is accounted for; dead letters keep the bytes."""

from __future__ import annotations

import asyncio
import sqlite3
from collections import Counter
from collections.abc import AsyncIterator, Callable, Sequence
from collections.abc import Set as AbstractSet
from contextlib import closing
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from uuid import uuid4

import aio_pika
import pytest
from confluent_kafka import Producer

from outrider import app
from outrider.brokers.base import Revoked, Source
from outrider.event import Delivery
from outrider.inbox.consumer import Consumer
from outrider.inbox.model import InboxCriteria
from outrider.inbox.router import Route, Routes
from outrider.inbox.settings import ConsumerSettings
from outrider.inbox.store import InboxStore
from outrider.stores.postgres import PostgresInbox
from outrider.stores.sqlite import SqliteInbox, SqliteSchema
from outrider.telemetry.events import ConsumerUnavailable, Handled
from outrider.testing import RecordingObserver
from outrider.testing.contracts.source import eventually
from outrider.testing.servers.kafka import create_topic, delete_topics
from outrider.wire import decode
from tests.acceptance.malformed_deliveries import TYPE, deliveries

pytestmark = pytest.mark.timeout(180)

COUNT, COUNT_BY_WIRE = 2000, 400
PATIENCE_SECONDS = 90.0
WAIT_SECONDS = 0.01
GATES: dict[str, dict[str, Any]] = {
    "no ordering, dead letters block": {"ordering": "off", "on_dead_letter": "block"},
    "monotonic, dead letters are skipped": {"ordering": "monotonic", "on_dead_letter": "skip"},
    "strict, dead letters block, batches": {"ordering": "strict", "on_dead_letter": "block", "batch_max": 20},
    "strict, dead letters are skipped, batches": {"ordering": "strict", "on_dead_letter": "skip", "batch_max": 20},
}


@dataclass(slots=True)
class Counting:
    """A source that knows what it has delivered, and when everything was acked."""

    source: Source
    goal: int
    delivered: dict[int, Delivery] = field(default_factory=dict)
    acked: set[int] = field(default_factory=set)
    done: asyncio.Event = field(default_factory=asyncio.Event)

    async def start(self, revoked: Revoked) -> None:
        await self.source.start(revoked)

    async def receive(self, limit: int, paused: AbstractSet[str]) -> Sequence[Delivery]:
        found = await self.source.receive(limit, paused)
        self.delivered |= {id(delivery): delivery for delivery in found}
        return found

    def ack(self, delivery: Delivery) -> None:
        self.source.ack(delivery)
        self.acked.add(id(delivery))
        if len(self.acked) >= self.goal:
            self.done.set()

    async def close(self) -> None:
        await self.source.close()


@dataclass(slots=True)
class FromMemory:
    """A source of what was made beforehand."""

    waiting: list[Delivery]

    async def start(self, revoked: Revoked) -> None:
        """There is nothing to connect to."""

    async def receive(self, limit: int, paused: AbstractSet[str]) -> Sequence[Delivery]:
        found, self.waiting = self.waiting[:limit], self.waiting[limit:]
        if not found:
            await asyncio.sleep(WAIT_SECONDS)
        return found

    def ack(self, delivery: Delivery) -> None:
        """Acks are not recorded."""

    async def close(self) -> None:
        """There is nothing to close."""


@dataclass(frozen=True, slots=True)
class Site:
    """A store, a handler that has an effect in it, and how to count effects."""

    store: InboxStore
    handler: Callable[..., Any]
    effects: Callable[[], Any]


@pytest.fixture
async def postgres_site(postgres_url: str, conn: Any) -> AsyncIterator[Site]:
    await conn.execute("CREATE TABLE effects (key text NOT NULL, type text NOT NULL)")
    store = await PostgresInbox.open(postgres_url)

    async def handler(event: Any, tx: Any) -> None:
        await tx.execute("INSERT INTO effects VALUES ($1, $2)", event.key, event.event_type)

    async def effects() -> Any:
        return await conn.fetchval("SELECT count(*) FROM effects")

    yield Site(store, handler, effects)
    await store.close()


@pytest.fixture
async def sqlite_site(tmp_path: Path) -> AsyncIterator[Site]:
    path = tmp_path / "shop.db"
    await SqliteSchema(path).migrate()
    with closing(sqlite3.connect(path)) as conn:
        conn.execute("CREATE TABLE effects (key TEXT NOT NULL, type TEXT NOT NULL)")
    store = SqliteInbox(path)

    def handler(event: Any, tx: sqlite3.Connection) -> None:
        tx.execute("INSERT INTO effects VALUES (?, ?)", (event.key, event.event_type))

    async def effects() -> Any:
        with closing(sqlite3.connect(path)) as conn:
            return conn.execute("SELECT count(*) FROM effects").fetchone()[0]

    yield Site(store, handler, effects)
    await store.close()


@pytest.fixture(params=[pytest.param("postgres", marks=pytest.mark.postgres), "sqlite"])
def site(request: pytest.FixtureRequest) -> Site:
    """Each store."""
    chosen: Site = request.getfixturevalue(f"{request.param}_site")
    return chosen


async def _account(
    site: Site, topic: str, source_of: Callable[[Routes], Source], count: int, **settings: Any
) -> Counter[str]:
    """Consume all of it, and let every delivery be found again: by its effect, by a count, or by its bytes."""
    consumer = f"of-{topic}"
    routes = Routes(consumer, ConsumerSettings(**settings), {(topic, TYPE): Route(site.handler)})
    source, observer = Counting(source_of(routes), count), RecordingObserver()
    engine = Consumer(source, site.store, routes, observer=observer)
    async with asyncio.timeout(PATIENCE_SECONDS), asyncio.TaskGroup() as group:
        group.create_task(engine.run())
        await source.done.wait()
        # Draining events were acked before, and a stop would interrupt them.
        await eventually(lambda: not engine.busy)
        engine.stop()
    assert observer.of(ConsumerUnavailable) == []
    assert len(source.delivered) == count
    kept = await site.store.admin.counts(consumer)
    found = Counter(applied=await site.effects(), waiting=kept["waiting"], dead_letters=kept["dead_letters"])
    for handled in observer.of(Handled):
        found.update(duplicates=handled.duplicates, dropped=handled.dropped, no_handler=handled.no_handler)
    assert found.total() == count, found
    await _dead_letters_keep_the_bytes(site, consumer, source.delivered.values())
    return found


async def _dead_letters_keep_the_bytes(site: Site, consumer: str, delivered: Any) -> None:
    dead_letters = await site.store.admin.dead_letters(InboxCriteria(consumer=consumer, limit=COUNT))
    sent = Counter((one.body, *sorted(one.headers.items())) for one in delivered)
    assert (
        Counter((dead_letter["body"], *sorted(dead_letter["headers"].items())) for dead_letter in dead_letters) <= sent
    )
    named = {event.event_id for event in map(decode, delivered) if event.delivery.position}
    assert not named or {dead_letter["event_id"] for dead_letter in dead_letters} <= named


@pytest.mark.parametrize("settings", GATES.values(), ids=GATES)
async def test_malformed_deliveries_stop_no_consumer_and_are_all_accounted_for(
    site: Site, settings: dict[str, Any]
) -> None:
    sent = list(deliveries("orders", COUNT, seed=11))
    found = await _account(site, "orders", lambda routes: FromMemory(sent), COUNT, **settings)
    # All of it happens often enough to mean something.
    assert found["applied"] > 100
    assert found["dead_letters"] > 300
    assert found["duplicates"] > 20
    assert found["no_handler"] > 0
    assert found["waiting"] > 0 or settings["on_dead_letter"] == "skip"


@pytest.mark.postgres
@pytest.mark.kafka
async def test_malformed_messages_in_kafka_are_all_accounted_for(postgres_site: Site, kafka: str) -> None:
    topic = f"orders-{uuid4().hex[:8]}"
    create_topic(kafka, topic, partitions=3)
    producer: Any = Producer({"bootstrap.servers": kafka})
    for one in deliveries(topic, COUNT_BY_WIRE, seed=12):
        # A null is neither the empty key nor the empty value, and a header may be null as well.
        headers = [(name, value or None) for name, value in one.headers.items()]
        producer.produce(topic, one.body or None, one.key, headers=headers)
    assert producer.flush(PATIENCE_SECONDS) == 0
    found = await _account(
        postgres_site, topic, lambda routes: app.open_source(f"kafka://{kafka}", routes), COUNT_BY_WIRE
    )
    assert min(found["applied"], found["dead_letters"]) > 20
    delete_topics(kafka, topic)


@pytest.mark.postgres
@pytest.mark.rabbitmq
async def test_malformed_messages_in_rabbitmq_are_all_accounted_for(postgres_site: Site, rabbitmq_url: str) -> None:
    topic = f"orders-{uuid4().hex[:8]}"
    url = f"{rabbitmq_url}?exchange={topic}&declare=of-{topic}:{topic}"
    broker = await app.open_broker(url)
    await broker.start()
    await broker.close()
    async with await aio_pika.connect(rabbitmq_url) as connection, await connection.channel() as channel:
        exchange = await channel.get_exchange(topic)
        for one in deliveries(topic, COUNT_BY_WIRE, seed=13):
            await exchange.publish(aio_pika.Message(one.body, headers=_as_fields(one)), topic)
        found = await _account(postgres_site, topic, lambda routes: app.open_source(url, routes), COUNT_BY_WIRE)
        assert min(found["applied"], found["dead_letters"]) > 20
        await channel.queue_delete(f"of-{topic}")
        await channel.exchange_delete(topic)


def _as_fields(one: Delivery) -> Any:
    """Say the same in the types of AMQP: text where it can be, and things that are no text at all."""
    said: dict[str, Any] = {}
    for name, value in one.headers.items():
        said[name[:100]] = value.decode() if value.isascii() else bytearray(value)
    odd: list[Any] = [None, True, 3.5, -7, [1, [None]], {"a": {"b": bytearray(b"\xff")}}, bytearray(b"\x00\xff"), 2**62]
    return said if one.token % 3 else {**said, "odd": odd[one.token % len(odd)]}
