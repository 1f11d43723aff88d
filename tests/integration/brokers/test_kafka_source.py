"""Kafka as a source in hard cases: partitions that move, consumers that are full, servers that die."""

from __future__ import annotations

import asyncio
import logging
import random
import time
from collections import Counter, defaultdict
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import asynccontextmanager, suppress
from functools import partial
from importlib import import_module
from typing import Any
from uuid import uuid4

import pytest
from confluent_kafka import Consumer as RawConsumer
from confluent_kafka import Producer as RawProducer

from outrider.brokers.base import CONFIRMED
from outrider.brokers.kafka import KafkaBroker, KafkaSource
from outrider.errors import Transient, Unreachable, UsageError
from outrider.event import Delivery, Event
from outrider.inbox.consumer import Consumer
from outrider.inbox.model import InboxCriteria
from outrider.inbox.router import Route, Routes
from outrider.inbox.settings import ConsumerSettings
from outrider.stores.memory import MemoryInbox, MemoryStore
from outrider.telemetry.events import Handled as Processed
from outrider.telemetry.events import PartitionsRevoked
from outrider.testing import RecordingObserver
from outrider.testing.contracts.source import Reader, by_key, eventually, message, numbers, pumping
from outrider.testing.servers.kafka import KafkaServer, create_topic
from tests.support.kafka_client import make_topic, produce_raw

pytestmark = [pytest.mark.kafka, pytest.mark.chaos]

admin: Any = import_module("confluent_kafka.admin")

# A member hears of a rebalance with its next heartbeat, and there are three of them in a session.
QUICK = {"session.timeout.ms": "1500"}
COUNT = 500


@pytest.fixture(scope="module")
def server() -> Iterator[KafkaServer]:
    with KafkaServer() as server:
        yield server


@pytest.fixture
async def broker(server: KafkaServer) -> AsyncIterator[KafkaBroker]:
    broker = KafkaBroker(server.bootstrap)
    await broker.start()
    yield broker
    await broker.close()


@pytest.fixture
def topic(server: KafkaServer) -> str:
    return make_topic(server.bootstrap, partitions=6)


async def publish(broker: KafkaBroker, topic: str, count: int, *, start: int = 0, keys: int = 40) -> None:
    sent = [message(n, topic=topic, key=f"k{n % keys}") for n in range(start, start + count)]
    assert set(await broker.publish(sent)) == {CONFIRMED}


@asynccontextmanager
async def reading(server: KafkaServer, topic: str, **settings: str) -> AsyncIterator[Reader]:
    """Start a source of the group that is named after the topic."""
    said = {**QUICK, **{name.replace("_", "."): value for name, value in settings.items()}}
    reader = Reader(KafkaSource(server.bootstrap, f"of-{topic}", [topic], said))
    await reader.source.start(reader.on_revoked)
    try:
        yield reader
    finally:
        await reader.source.close()


class Worker:
    """An engine with receipts of its own, so that whatever two of them handle shows."""

    def __init__(
        self, server: KafkaServer, topic: str, handled: Handled, inbox: MemoryInbox | None = None, **settings: Any
    ) -> None:
        self.observer, self.handled = RecordingObserver(), handled
        said = {**QUICK, **settings.pop("kafka", {})}
        routes = Routes("billing", ConsumerSettings(**settings), {(topic, "order.changed"): Route(self.handle)})
        source = KafkaSource(server.bootstrap, f"of-{topic}", [topic], said)
        self.inbox = inbox or MemoryInbox(MemoryStore())
        self.consumer = Consumer(source, self.inbox, routes, observer=self.observer)

    async def handle(self, event: Event, tx: Any) -> None:
        await self.handled.handle(event)


class Handled:
    """The events that any worker has handled, in order. While `gate` is closed, handlers wait."""

    def __init__(self, seconds: float = 0.0) -> None:
        self.numbers: list[int] = []
        self.under_way: Counter[int] = Counter()
        self.overlaps = 0
        self.ordering = asyncio.Event()
        self.ordering.set()
        self._seconds, self._chance = seconds, random.Random(1)

    async def handle(self, event: Event) -> None:
        number = event.payload["n"]
        self.under_way[number] += 1
        self.overlaps += self.under_way[number] > 1
        await self.ordering.wait()
        await asyncio.sleep(self._chance.uniform(0, self._seconds))
        self.under_way[number] -= 1
        self.numbers.append(number)

    def in_order(self, keys: int = 40) -> bool:
        """Tell whether the numbers of each key came in order, when they came first."""
        lines = defaultdict(list)
        for number in dict.fromkeys(self.numbers):
            lines[number % keys].append(number)
        return all(line == sorted(line) for line in lines.values())


@asynccontextmanager
async def running(worker: Worker) -> AsyncIterator[Worker]:
    task = asyncio.create_task(worker.consumer.run())
    try:
        yield worker
    finally:
        worker.handled.ordering.set()
        worker.consumer.stop()
        await task


async def test_partitions_that_move_are_handled_by_one_consumer_at_a_time(
    server: KafkaServer, broker: KafkaBroker, topic: str
) -> None:
    handled = Handled(seconds=0.02)
    await publish(broker, topic, 1000)
    async with running(Worker(server, topic, handled, in_flight_max=50)) as first:
        await eventually(lambda: len(handled.numbers) > 100)
        async with running(Worker(server, topic, handled, in_flight_max=50)) as second:
            await eventually(lambda: first.observer.of(PartitionsRevoked))
            await publish(broker, topic, 1000, start=1000)
            async with running(Worker(server, topic, handled, in_flight_max=50)) as third:
                await eventually(lambda: second.observer.of(PartitionsRevoked) or len(handled.numbers) >= 1900)
            await publish(broker, topic, 200, start=2000)
            await eventually(lambda: len(set(handled.numbers)) == 2200)
    assert handled.overlaps == 0
    assert handled.in_order()
    # Events handled ahead of one that was not begun come again; at most as many as may be in flight.
    moves = sum(len(worker.observer.of(PartitionsRevoked)) for worker in (first, second, third)) + 3
    assert len(handled.numbers) - 2200 <= moves * 50


async def test_moving_pausing_and_small_bites_neither_lose_nor_repeat_nor_reorder(
    server: KafkaServer, broker: KafkaBroker, topic: str
) -> None:
    rng, log = random.Random(7), list[Delivery]()
    writer = asyncio.create_task(_publish_slowly(broker, topic, 6000))
    workers = [asyncio.create_task(_work_at_random(server, topic, rng, log, rounds)) for rounds in (40, 80, 10**6)]
    await writer
    await eventually(lambda: len(set(numbers(log))) == 6000)
    workers[-1].cancel()
    await asyncio.gather(*workers[:-1])
    assert len(log) == 6000
    assert all(line == sorted(line) for line in by_key(log).values())


async def _publish_slowly(broker: KafkaBroker, topic: str, count: int) -> None:
    for start in range(0, count, 100):
        await publish(broker, topic, 100, start=start)
        await asyncio.sleep(0.02)


async def _work_at_random(
    server: KafkaServer, topic: str, rng: random.Random, log: list[Delivery], rounds: int
) -> None:
    """Receive with odd limits and pauses; ack some keys now and then, and all of a revoked partition."""
    held: list[Delivery] = []

    def be_done(done: Sequence[Delivery]) -> None:
        for delivery in done:
            held.remove(delivery)
            log.append(delivery)
            source.ack(delivery)

    async def revoked(partitions: frozenset[str]) -> None:
        be_done([delivery for delivery in held if delivery.partition in partitions])

    source = KafkaSource(server.bootstrap, f"of-{topic}", [topic], QUICK)
    await source.start(revoked)
    for _ in range(rounds):
        paused = frozenset(delivery.partition for delivery in held if rng.random() < 0.1)
        limit = rng.choice([0, 0, 1, 3, 50, 300])
        found = await source.receive(limit, paused)
        assert len(found) <= limit
        assert paused.isdisjoint(delivery.partition for delivery in found)
        held += found
        keys = {delivery.key for delivery in held if rng.random() < 0.2}
        be_done([delivery for delivery in held if delivery.key in keys])
    be_done(list(held))
    await source.close()


async def test_a_consumer_that_is_full_for_long_keeps_its_partitions(
    server: KafkaServer, broker: KafkaBroker, topic: str
) -> None:
    handled = Handled()
    handled.ordering.clear()
    limits: dict[str, Any] = {"kafka": {"max.poll.interval.ms": "2000"}, "in_flight_max": 4}
    async with running(Worker(server, topic, handled, **limits)) as worker:
        await publish(broker, topic, 100)
        await eventually(lambda: len(handled.under_way) == 4)
        full_until = time.monotonic() + 5
        await eventually(lambda: time.monotonic() > full_until)
        handled.ordering.set()
        await eventually(lambda: len(handled.numbers) == 100)
    assert worker.observer.of(PartitionsRevoked) == []
    assert sorted(handled.numbers) == list(range(100))


async def test_a_consumer_that_does_not_poll_for_too_long_loses_its_partitions_and_hears_of_it(
    server: KafkaServer, broker: KafkaBroker, topic: str
) -> None:
    await publish(broker, topic, 60)
    async with reading(server, topic, max_poll_interval_ms="2000") as reader:
        old = await reader.until(60)
        idle_until = time.monotonic() + 4
        await eventually(lambda: time.monotonic() > idle_until)
        await reader.until(120)
        assert reader.revoked >= {delivery.partition for delivery in old}
        assert sorted(numbers(reader.held)) == list(range(60))
        reader.ack(old)
    async with reading(server, topic) as reader:
        assert sorted(numbers(await reader.until(60))) == list(range(60))


async def test_an_engine_that_does_not_let_go_is_not_waited_for_for_ever(
    server: KafkaServer, broker: KafkaBroker, topic: str
) -> None:
    await publish(broker, topic, 60)
    async with reading(server, topic, max_poll_interval_ms="2000") as first:
        await first.until(60)
        first.may_release.clear()
        async with reading(server, topic) as second, pumping(first, second):
            await eventually(lambda: second.received)
        assert not first.may_release.is_set()
        assert first.revoked


async def test_a_cancelled_receive_loses_nothing(server: KafkaServer, broker: KafkaBroker, topic: str) -> None:
    await publish(broker, topic, 200)
    async with reading(server, topic) as reader:
        for seconds in (0.0, 0.01, 0.05, 0.2) * 5:
            try:
                async with asyncio.timeout(seconds):
                    await reader.receive(5)
            except TimeoutError:
                continue
        await reader.until(200)
    assert by_key(reader.received) == {b"k%d" % key: list(range(key, 200, 40)) for key in range(40)}


async def test_an_error_between_two_polls_is_reported_by_the_next_poll(
    server: KafkaServer, broker: KafkaBroker, topic: str
) -> None:
    await publish(broker, topic, 20)

    async def fail(partitions: frozenset[str]) -> None:
        raise RuntimeError("the engine is broken")

    reader = Reader(KafkaSource(server.bootstrap, f"of-{topic}", [topic], QUICK))
    await reader.source.start(fail)
    await reader.until(20)
    async with reading(server, topic) as other, pumping(other):
        with pytest.raises((Transient, RuntimeError), match="the engine is broken"):
            async with asyncio.timeout(30):
                await _look_and_look_away(reader)
    await reader.source.close()


async def test_an_error_during_a_cancelled_poll_is_reported_by_the_next_poll(
    server: KafkaServer, broker: KafkaBroker, topic: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    closing = asyncio.Event()
    async with reading(server, topic) as reader:
        close = reader.source.close

        async def close_slowly() -> None:
            await close()
            closing.set()
            await asyncio.Event().wait()

        def broken(*_: object) -> None:
            raise Transient("the group is broken")

        assert isinstance(reader.source, KafkaSource)
        monkeypatch.setattr(reader.source._member, "fill", broken)
        monkeypatch.setattr(reader.source, "close", close_slowly)
        look = asyncio.create_task(reader.receive())
        await closing.wait()
        look.cancel()
        await asyncio.wait([look])
        monkeypatch.undo()
        with pytest.raises(Transient, match="the group is broken"):
            await reader.receive()


async def _look_and_look_away(reader: Reader) -> None:
    """Look again and again, and never wait for what comes of it."""
    while True:
        with suppress(TimeoutError):
            async with asyncio.timeout(0.01):
                await reader.receive(5)


async def test_a_server_killed_and_restarted_loses_nothing(
    server: KafkaServer, broker: KafkaBroker, topic: str
) -> None:
    handled = Handled(seconds=0.005)
    await publish(broker, topic, 2000)
    async with running(Worker(server, topic, handled)):
        await eventually(lambda: len(handled.numbers) > 300)
        await asyncio.to_thread(server.kill)
        await asyncio.to_thread(server.start)
        await publish(broker, topic, 500, start=2000)
        await eventually(lambda: len(handled.numbers) >= 2500)
    assert sorted(handled.numbers) == list(range(2500))
    assert handled.in_order()


async def test_closing_while_the_server_is_away_takes_a_bounded_time(
    server: KafkaServer, broker: KafkaBroker, topic: str
) -> None:
    await publish(broker, topic, 60)
    async with reading(server, topic) as reader:
        reader.ack(await reader.until(60))
        await asyncio.to_thread(server.kill)
        await reader.receive()
        began = time.monotonic()
        await reader.source.close()
        seconds = time.monotonic() - began
        with pytest.raises(Unreachable, match=r"does not answer .*refused"):
            await reader.source.start(reader.on_revoked)
    await asyncio.to_thread(server.start)
    assert seconds < 10


async def test_a_topic_that_is_made_later_is_waited_for(
    server: KafkaServer, broker: KafkaBroker, caplog: pytest.LogCaptureFixture
) -> None:
    topic = f"later-{uuid4().hex[:8]}"
    with caplog.at_level(logging.WARNING, "outrider.kafka"):
        async with reading(server, topic, topic_metadata_refresh_interval_ms="500") as reader:
            assert await reader.looks() == []
            create_topic(server.bootstrap, topic)
            await publish(broker, topic, 10)
            assert numbers(await reader.until(10)) == list(range(10))
    messages = [record.message for record in caplog.records]
    assert messages.count("the topic is not there yet; waiting for it") == 1
    assert "Kafka reports an error" not in messages


async def test_what_others_write_arrives_as_bytes(server: KafkaServer, topic: str) -> None:
    """No key, no body, a header twice, and a header without a value."""
    raw = RawProducer({"bootstrap.servers": server.bootstrap})
    raw.produce(topic, None, None, headers=[("a", b"1"), ("none", None), ("a", b"\xff")])
    raw.produce(topic, b"plain", b"\x00\xff")
    raw.flush(10)
    async with reading(server, topic) as reader:
        found = {delivery.key: delivery for delivery in await reader.until(2)}
    assert (found[None].body, found[None].headers) == (b"", {"a": b"\xff", "none": b""})
    assert (found[b"\x00\xff"].body, found[b"\x00\xff"].headers) == (b"plain", {})


async def test_what_its_producer_took_back_is_not_received_and_leaves_no_gap(server: KafkaServer) -> None:
    topic = make_topic(server.bootstrap, partitions=1)
    raw = RawProducer({"bootstrap.servers": server.bootstrap, "transactional.id": uuid4().hex})
    raw.init_transactions(30)
    for number, finish in enumerate([raw.commit_transaction, raw.abort_transaction, raw.commit_transaction]):
        raw.begin_transaction()
        raw.produce(topic, b"{}", b"A", headers=[("n", str(number).encode())])
        finish(30)
    async with reading(server, topic) as reader:
        reader.ack(await reader.until(2))
        assert numbers(reader.received) == [0, 2]
    async with reading(server, topic) as reader:
        assert await reader.looks() == []


async def test_a_header_name_that_is_not_utf8_makes_a_dead_letter_with_key_and_body_and_the_rest_goes_on(
    server: KafkaServer, broker: KafkaBroker
) -> None:
    topic = make_topic(server.bootstrap, partitions=1)
    # Many, because CPython optimises a call that runs often, and the driver's broken list then comes without an error.
    await publish(broker, topic, COUNT, keys=1)
    names = [(b"ok", b"1"), (b"\xff\xfe", b"2"), (b"message_id", b"3")]
    produce_raw(server.bootstrap, topic, b"k0", [b'{"n": -1}', b'{"n": -2}'], names)
    produce_raw(server.bootstrap, topic, b"k0", [b'{"n": -3}'], [(b"\xff", b"")])
    await publish(broker, topic, 2, start=COUNT, keys=1)
    handled = Handled()
    async with running(Worker(server, topic, handled, on_dead_letter="skip")) as worker:
        await eventually(lambda: len(handled.numbers) == COUNT + 2)
    assert handled.numbers == list(range(COUNT + 2))
    letters = await worker.inbox.admin.dead_letters(InboxCriteria(consumer="billing"))
    assert [(each["key"], each["body"]) for each in letters] == [("k0", b'{"n": %d}' % n) for n in (-1, -2, -3)]
    assert {each["failure"]["error"] for each in letters} == {"headers: a name is not UTF-8"}
    assert len({each["event_id"] for each in letters}) == 3


async def test_a_message_without_an_id_in_a_topic_made_anew_is_no_duplicate_of_the_one_that_had_its_offset(
    server: KafkaServer, topic: str
) -> None:
    foreign: Any = RawProducer({"bootstrap.servers": server.bootstrap})
    client: Any = admin.AdminClient({"bootstrap.servers": server.bootstrap})
    inbox, handled = MemoryInbox(MemoryStore()), Handled()
    for body in (b"first", b"second"):
        foreign.produce(topic, body, b"k", partition=0)
        assert foreign.flush(20) == 0
        async with running(Worker(server, topic, handled, inbox, on_dead_letter="skip")) as worker:
            await eventually(partial(worker.observer.of, Processed))
        client.delete_topics([topic])[topic].result(20)
        await eventually(lambda: topic not in client.list_topics(timeout=10).topics)
        create_topic(server.bootstrap, topic, partitions=6)
    letters = await inbox.admin.dead_letters(InboxCriteria(consumer="billing"))
    assert [each["body"] for each in letters] == [b"first", b"second"]


async def test_a_group_that_another_program_uses_in_another_way_is_rejected(server: KafkaServer, topic: str) -> None:
    other = RawConsumer({"bootstrap.servers": server.bootstrap, "group.id": f"of-{topic}"})
    other.subscribe([topic])
    await eventually(lambda: other.poll(0.05) or other.assignment())
    async with reading(server, topic) as reader:
        with pytest.raises(UsageError, match="give the consumer a name of its own"):
            await reader.until(1)
    other.close()


async def test_an_operation_that_kafka_does_not_allow_is_a_usage_error() -> None:
    settings = {
        "authorizer.class.name": "org.apache.kafka.metadata.authorizer.StandardAuthorizer",
        "allow.everyone.if.no.acl.found": "true",
    }
    with KafkaServer(settings=settings) as guarded:
        for name in ("orders", "secret"):
            guarded.create_topic(name)
        _deny(guarded, admin.ResourceType.TOPIC, "secret", admin.AclOperation.DESCRIBE)
        _deny(guarded, admin.ResourceType.GROUP, "stranger", admin.AclOperation.READ)
        reader = Reader(KafkaSource(guarded.bootstrap, "billing", ["secret"]))
        with pytest.raises(UsageError, match="allow this user to read and describe the topic"):
            await reader.source.start(reader.on_revoked)
        reader = Reader(KafkaSource(guarded.bootstrap, "stranger", ["orders"]))
        await reader.source.start(reader.on_revoked)
        with pytest.raises(UsageError, match="allow this user to read the group"):
            await reader.until(1)
        await reader.source.close()


def _deny(server: KafkaServer, kind: Any, name: str, operation: Any) -> None:
    client: Any = admin.AdminClient({"bootstrap.servers": server.bootstrap})
    pattern, denied = admin.ResourcePatternType.LITERAL, admin.AclPermissionType.DENY
    rule = admin.AclBinding(kind, name, pattern, "User:ANONYMOUS", "*", operation, denied)
    for future in client.create_acls([rule]).values():
        future.result(10)
