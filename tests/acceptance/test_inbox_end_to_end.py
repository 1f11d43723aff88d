"""From a staged event to its effect, over a relay, Kafka and consumers: skipped, replayed, joined late, tried again."""

from __future__ import annotations

import asyncio
import random
from collections import defaultdict
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from importlib import import_module
from typing import Any
from uuid import UUID

import pytest
from confluent_kafka import TopicPartition

import outrider
from outrider import Event
from outrider.brokers.kafka import KafkaBroker, KafkaSource
from outrider.event import OnDeadLetter
from outrider.inbox.consumer import Consumer
from outrider.inbox.router import Route, Routes
from outrider.inbox.settings import ConsumerSettings
from outrider.retry import RetryPolicy
from outrider.stores.postgres import PostgresInbox
from outrider.telemetry.events import Handled, HandlerRetried
from outrider.testing import RecordingObserver
from tests.acceptance.end_to_end.post import ANSWER_SECONDS_MAX, PARTITIONS, KafkaPost
from tests.chaos.consumers import EMPTY, relaying
from tests.chaos.relays import until

pytestmark = [pytest.mark.postgres, pytest.mark.kafka, pytest.mark.timeout(180)]

TYPE = "order.placed"
LIMIT_BYTES = 20_000
QUICK = {"session.timeout.ms": "1500"}
RETRY = RetryPolicy(base_seconds=0.05, cap_seconds=0.05, jitter=0, max_attempts=5)
EFFECTS = "CREATE TABLE effects (id bigint GENERATED ALWAYS AS IDENTITY, consumer text, key text, sequence bigint)"
STRICT: dict[str, Any] = {"ordering": "strict", "first_sequence": "one"}

Broken = Callable[[Event], bool]


@dataclass(slots=True)
class Scene:
    """A database, a topic, and consumers that write which event they have handled."""

    conn: Any
    url: str
    post: KafkaPost
    notebooks: dict[str, RecordingObserver] = field(default_factory=lambda: defaultdict(RecordingObserver))

    async def stage(self, *keys: str, payload: Any = None) -> list[UUID]:
        """Stage numbered events."""
        events = [Event(TYPE, payload or {}, topic=self.post.topic, key=key, sequence="auto") for key in keys]
        async with self.conn.transaction():
            return await outrider.stage(self.conn, *events)

    @asynccontextmanager
    async def consuming(
        self, name: str, *, broken: Broken = lambda event: False, **settings: Any
    ) -> AsyncIterator[None]:
        """Run a consumer around the block."""

        async def handler(event: Event, tx: Any) -> None:
            effect = "INSERT INTO effects (consumer, key, sequence) VALUES ($1, $2, $3)"
            await tx.execute(effect, name, event.key, event.sequence)
            if broken(event):
                raise RuntimeError("not today")

        chosen = ConsumerSettings(**{"retry": RETRY, "maintenance_interval_seconds": 0.2, **settings})
        routes = Routes(name, chosen, {(self.post.topic, TYPE): Route(handler)})
        source = KafkaSource(self.post.bootstrap, f"{name}-{self.post.topic}", [self.post.topic], QUICK)
        store = await PostgresInbox.open(self.url)
        consumer = Consumer(source, store, routes, observer=self.notebooks[name])
        running = asyncio.create_task(consumer.run())
        try:
            yield
        finally:
            consumer.stop()
            await running
            await store.close()

    async def until_effects(self, name: str, count: int) -> None:
        """Wait until a consumer has had so many."""
        sql = "SELECT count(*) >= $2 FROM effects WHERE consumer = $1"
        await until(f"{count} effects of {name}", self.conn, sql, name, count)

    async def until_published(self) -> None:
        """Wait until nothing is left in the outbox."""
        await until("an empty outbox", self.conn, EMPTY)

    async def effects(self, name: str) -> dict[str, list[int]]:
        """Return the numbers of each key, in the order of a consumer's effects."""
        sql = "SELECT key, array_agg(sequence ORDER BY id) FROM effects WHERE consumer = $1 GROUP BY key"
        return dict(await self.conn.fetch(sql, name))

    async def nobody_waits(self) -> None:
        """Nothing waits for a predecessor, and nothing is buried."""
        assert await self.conn.fetchval("SELECT count(*) FROM outrider.inbox_held") == 0
        assert await self.conn.fetchval("SELECT count(*) FROM outrider.inbox_dead_letter") == 0

    def forget_topic(self) -> None:
        """Let Kafka remove what is in the topic, as retention does."""
        ends = [TopicPartition(self.post.topic, number, -1) for number in range(PARTITIONS)]
        admin = _admin(self.post)
        for removed in admin.delete_records(ends).values():
            removed.result(ANSWER_SECONDS_MAX)

    def forget_group(self, name: str) -> None:
        """Let Kafka forget how far a consumer has read; everything that is left comes again."""
        admin = _admin(self.post)
        for gone in admin.delete_consumer_groups([f"{name}-{self.post.topic}"]).values():
            gone.result(ANSWER_SECONDS_MAX)


def _admin(post: KafkaPost) -> Any:
    return import_module("confluent_kafka.admin").AdminClient({"bootstrap.servers": post.bootstrap})


@pytest.fixture
async def scene(conn: Any, postgres_url: str, kafka: str) -> AsyncIterator[Scene]:
    await conn.execute(EFFECTS)
    post = KafkaPost(kafka, max_message_bytes=str(LIMIT_BYTES))
    yield Scene(conn, postgres_url, post)
    await post.remove()


async def test_a_skipped_event_its_replay_and_a_late_consumer_pass_a_strict_gate(scene: Scene) -> None:
    # Kafka applies its limit to batches too, so those must stay below it.
    broker = KafkaBroker(scene.post.bootstrap, {"batch.size": str(LIMIT_BYTES // 2)})
    async with (
        relaying(scene.url, broker, on_dead_letter=OnDeadLetter.SKIP) as outbox,
        scene.consuming("early", **STRICT),
    ):
        await scene.stage("A", "B")
        [large] = await scene.stage("A", payload={"noise": random.Random(7).randbytes(LIMIT_BYTES).hex()})
        await scene.stage("A", "B", "A", "B")
        await scene.until_effects("early", 6)
        assert await scene.effects("early") == {"A": [1, 3, 4], "B": [1, 2, 3]}

        async with scene.consuming("whole", **STRICT):
            await scene.until_effects("whole", 6)
        await asyncio.to_thread(scene.forget_topic)
        await asyncio.to_thread(scene.post.configure, "max.message.bytes", "1000000")
        assert await outbox.admin.replay([large], "a person") == 1
        await scene.until_effects("early", 7)
        await scene.stage("A", "B", "A")
        await scene.until_effects("early", 10)
        async with scene.consuming("whole", **STRICT), scene.consuming("late", ordering="strict"):
            await scene.until_effects("whole", 10)
            await scene.until_effects("late", 4)
    for name in ("early", "whole"):
        assert await scene.effects(name) == {"A": [1, 3, 4, 2, 5, 6], "B": [1, 2, 3, 4]}
    # It has never seen the numbers before, and begins with the first that it meets.
    assert await scene.effects("late") == {"A": [2, 5, 6], "B": [4]}
    await scene.nobody_waits()


@pytest.mark.parametrize("ordering", ["off", "strict"])
async def test_what_comes_again_has_no_effect_again(scene: Scene, ordering: str) -> None:
    keys = [f"k{number % 20}" for number in range(200)]
    async with relaying(scene.url, KafkaBroker(scene.post.bootstrap)):
        for start in range(0, len(keys), 20):
            await scene.stage(*keys[start : start + 20])
        await scene.until_published()
    async with scene.consuming("billing", ordering=ordering):
        await scene.until_effects("billing", len(keys))
    await asyncio.to_thread(scene.forget_group, "billing")
    observer = scene.notebooks["billing"] = _Expecting(duplicates=len(keys))
    async with scene.consuming("billing", ordering=ordering):
        async with asyncio.timeout(ANSWER_SECONDS_MAX):
            await observer.reached.wait()
    assert await scene.effects("billing") == {f"k{number}": list(range(1, 11)) for number in range(20)}
    await scene.nobody_waits()


async def test_two_consumers_of_a_topic_both_see_every_event(scene: Scene) -> None:
    keys = [f"k{number % 20}" for number in range(200)]
    async with (
        relaying(scene.url, KafkaBroker(scene.post.bootstrap)),
        scene.consuming("billing", **STRICT),
        scene.consuming("shipping", batch_max=10),
    ):
        for start in range(0, len(keys), 20):
            await scene.stage(*keys[start : start + 20])
        for name in ("billing", "shipping"):
            await scene.until_effects(name, len(keys))
    for name in ("billing", "shipping"):
        assert await scene.effects(name) == {f"k{number}": list(range(1, 11)) for number in range(20)}
    await scene.nobody_waits()


@pytest.mark.parametrize("batch_max", [1, 10])
async def test_a_handler_that_fails_twice_and_then_passes_leaves_one_effect(scene: Scene, batch_max: int) -> None:
    failures = iter([True, True])

    def broken(event: Event) -> bool:
        return (event.key, event.sequence) == ("A", 2) and next(failures, False)

    async with relaying(scene.url, KafkaBroker(scene.post.bootstrap)):
        await scene.stage("A", "B", "A", "B", "A", "B")
        await scene.until_published()
    async with scene.consuming("billing", broken=broken, batch_max=batch_max):
        await scene.until_effects("billing", 6)
    assert await scene.effects("billing") == {"A": [1, 2, 3], "B": [1, 2, 3]}
    retries = [retried.attempt for retried in scene.notebooks["billing"].of(HandlerRetried)]
    # A batch that fails is tried again one by one, and only what fails alone is charged for it.
    assert retries == ([1, 2] if batch_max == 1 else [1])
    assert await scene.conn.fetchval("SELECT count(*) FROM outrider.consumer_inbox WHERE consumer = 'billing'") == 6
    await scene.nobody_waits()


class _Expecting(RecordingObserver):
    """Tells when so many duplicates were met."""

    def __init__(self, duplicates: int) -> None:
        super().__init__()
        self._left = duplicates
        self.reached = asyncio.Event()

    def emit(self, fact: Any) -> None:
        super().emit(fact)
        if isinstance(fact, Handled):
            self._left -= fact.duplicates
            if self._left <= 0:
                self.reached.set()
