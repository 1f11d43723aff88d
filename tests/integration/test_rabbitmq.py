"""RabbitMQ when things go wrong: what is lost, what is charged, and who waits. A real server, and a real relay."""

from __future__ import annotations

import asyncio
import json
import sys
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any
from uuid import uuid4

import aio_pika
import pytest

import outrider
from outrider.app import open_broker
from outrider.brokers.rabbitmq import RabbitBroker
from outrider.brokers.rabbitmq import broker as adapter
from outrider.errors import BadSetting, Misuse, Transient, Unreachable
from outrider.event import Event, Message
from outrider.observer import BreakerOpened, Buried, Fact, Retried
from outrider.outbox.relay import Relay
from outrider.outbox.settings import RelaySettings
from outrider.outbox.stage import StagingRules
from outrider.outcome import CONFIRMED, Rejected, Unresolved
from outrider.stores.memory import MemoryStore
from outrider.testing import Notebook
from outrider.testing.broker_contract import message
from outrider.testing.servers.rabbitmq import RabbitServer
from outrider.testing.servers.server import free_port
from tests.contract.test_rabbitmq import read_back

pytestmark = pytest.mark.rabbitmq

PATIENCE_SECONDS = 40.0
SERVER_BYTES_MAX = 2_000_000
OUTBOX = outrider.Outbox(rules=StagingRules(payload_bytes_max=2 * SERVER_BYTES_MAX))
SETTINGS = RelaySettings(breaker_seconds_base=0.1, breaker_seconds_max=0.5, poll_seconds_max=0.2, workers=2)


@pytest.fixture(scope="module")
def server() -> Iterator[RabbitServer]:
    """A private server that tests may break, if they mend it again."""
    with RabbitServer(tls=True, settings={"max_message_size": str(SERVER_BYTES_MAX)}) as server:
        yield server


@pytest.fixture
def name() -> str:
    """An exchange and a queue of the test's own."""
    return f"test_{uuid4().hex[:12]}"


@pytest.fixture
async def broker(server: RabbitServer, name: str) -> AsyncIterator[RabbitBroker]:
    """A broker whose exchange has one queue, which takes everything."""
    broker = RabbitBroker(server.url, exchange=name, declare=True, queues=((name, "#"),))
    await broker.start()
    yield broker
    await broker.close()


@asynccontextmanager
async def channel_to(url: str) -> AsyncIterator[aio_pika.abc.AbstractChannel]:
    """Another client's channel."""
    async with await aio_pika.connect(url) as connection, await connection.channel() as channel:
        yield channel


async def contents(url: str, queue: str) -> list[Message]:
    """Return what a queue holds."""
    async with await aio_pika.connect(url) as connection:
        return await read_back(connection, queue, "")


async def take(delivery: aio_pika.abc.AbstractIncomingMessage) -> None:
    """Make room in the queue."""
    await delivery.ack()


class Watch(Notebook):
    """A notebook that can be waited for."""

    def __init__(self) -> None:
        super().__init__()
        self._news = asyncio.Event()

    def notice(self, fact: Fact) -> None:
        """Write the fact down, and wake who waits."""
        super().notice(fact)
        self._news.set()

    async def until(self, true: Callable[[], Awaitable[bool]]) -> None:
        """Wait for facts until it is true."""
        async with asyncio.timeout(PATIENCE_SECONDS):
            while True:
                self._news.clear()
                if await true():
                    return
                await self._news.wait()


@dataclass
class Office:
    """A relay at work, and those who stage for it."""

    broker: RabbitBroker
    store: MemoryStore = field(default_factory=MemoryStore)
    watch: Watch = field(default_factory=Watch)

    @asynccontextmanager
    async def open(self) -> AsyncIterator[Office]:
        """Let the relay run for the block."""
        relay = Relay(self.store, self.broker, SETTINGS, observer=self.watch)
        running = asyncio.create_task(relay.run())
        try:
            yield self
        finally:
            relay.stop()
            await running

    async def stage(self, *events: Event) -> list[str]:
        """Stage events; return their ids."""
        async with self.store.transaction() as conn:
            return [str(event_id) for event_id in await OUTBOX.stage(conn, *events)]

    async def until_sent(self, count: int) -> None:
        """Wait until so many have been delivered."""

        async def delivered() -> bool:
            return (await self.store.desk.counts()).get("sent", 0) == count

        await self.watch.until(delivered)

    async def until_noticed(self, kind: type[Fact], count: int = 1) -> None:
        """Wait until so many facts of a kind were noticed."""

        async def noticed() -> bool:
            return len(self.watch.of(kind)) >= count

        await self.watch.until(noticed)

    @property
    def charged(self) -> list[Fact]:
        """What an event was blamed for."""
        return [*self.watch.of(Retried), *self.watch.of(Buried)]

    @property
    def down(self) -> set[str]:
        """The destinations that were found to be down."""
        return {fact.destination for fact in self.watch.of(BreakerOpened)}


def event(number: int, *, key: str | None = None, topic: str = "orders", **fields: Any) -> Event:
    return Event("order.changed", {"n": number}, key=key or f"k{number % 20}", topic=topic, **fields)


async def test_a_server_that_is_away_for_a_while_loses_nothing_and_charges_nobody(
    server: RabbitServer, broker: RabbitBroker, name: str
) -> None:
    async with Office(broker).open() as office:
        ids = await office.stage(*(event(n) for n in range(100)))
        await office.until_sent(100)
        stopping = asyncio.create_task(asyncio.to_thread(server.halt))
        number = 100
        while not stopping.done():
            ids += await office.stage(*(event(n) for n in range(number, number + 20)))
            number += 20
            await asyncio.wait([stopping], timeout=0.05)
        ids += await office.stage(*(event(n) for n in range(number, number + 100)))
        await office.until_noticed(BreakerOpened, 3)
        await asyncio.to_thread(server.start)
        await office.until_sent(len(ids))
    found = await contents(server.url, name)
    assert {m.message_id for m in found} == set(ids)
    assert office.charged == []
    assert office.down == {""}
    for key in {m.key for m in found}:
        numbers = list(dict.fromkeys(json.loads(m.body)["n"] for m in found if m.key == key))
        assert numbers == sorted(numbers)


async def test_what_was_confirmed_survives_a_crash_of_the_server(server: RabbitServer, name: str) -> None:
    # A classic queue: a quorum queue made just before the crash may come back without a leader.
    async with channel_to(server.url) as channel:
        queue = await channel.declare_queue(name, durable=True)
        await queue.bind(await channel.declare_exchange(name, "topic", durable=True), "#")
    broker = RabbitBroker(server.url, exchange=name)
    wave = [message(n, key=f"k{n}") for n in range(500)]
    assert await broker.publish(wave) == [CONFIRMED] * 500
    await asyncio.to_thread(server.kill)
    [verdict] = await broker.publish([message(500)])
    assert isinstance(verdict, Unresolved)
    await asyncio.to_thread(server.start)
    assert await broker.publish([message(501)]) == [CONFIRMED]
    await broker.close()
    assert {m.message_id for m in wave} <= {m.message_id for m in await contents(server.url, name)}


async def test_a_memory_alarm_is_an_outage(server: RabbitServer, broker: RabbitBroker, name: str) -> None:
    async with Office(broker).open() as office:
        await office.stage(event(0))
        await office.until_sent(1)
        await asyncio.to_thread(server.memory_alarm, True)
        try:
            await office.stage(*(event(n) for n in range(1, 50)))
            await office.until_noticed(BreakerOpened, 3)
            with pytest.raises(Transient, match="blocked: low on memory"):
                await broker.probe("")
            assert await broker.publish([message(1)]) == [Unresolved("blocked: low on memory")]
        finally:
            await asyncio.to_thread(server.memory_alarm, False)
        await office.until_sent(50)
    assert office.charged == []
    assert office.down == {""}
    assert all("blocked: low on memory" in fact.error for fact in office.watch.of(BreakerOpened))


async def test_an_unroutable_message_is_buried_and_other_routing_keys_go_on(server: RabbitServer, name: str) -> None:
    broker = RabbitBroker(server.url, exchange=name, declare=True, queues=((name, "orders"),))
    async with Office(broker).open() as office:
        [lost] = await office.stage(event(0, topic="nowhere", key="A"))
        await office.stage(*(event(n) for n in range(50)))
        await office.until_sent(50)
        await office.until_noticed(Buried)
    [buried] = office.watch.of(Buried)
    assert str(buried.event_id) == lost
    assert buried.error.startswith("unroutable: NO_ROUTE")
    assert office.watch.of(BreakerOpened) == []
    await broker.close()


async def test_every_unroutable_message_of_a_wave_is_told_from_the_others(server: RabbitServer, name: str) -> None:
    broker = RabbitBroker(server.url, exchange=name, declare=True, queues=((name, "orders"),))
    wave = [message(n, key=f"k{n}", topic="orders" if n % 3 else "nowhere") for n in range(300)]
    await broker.start()
    verdicts = await broker.publish(wave)
    assert [isinstance(verdict, Rejected) for verdict in verdicts] == [n % 3 == 0 for n in range(300)]
    assert {m.message_id for m in await contents(server.url, name)} == {
        m.message_id for m in wave if m.topic == "orders"
    }
    await broker.close()


async def test_a_missing_exchange_is_an_outage_of_that_exchange_only(server: RabbitServer, name: str) -> None:
    async with channel_to(server.url) as channel:
        there = await channel.declare_exchange(name, "topic", durable=True)
        queue = await channel.declare_queue(name, durable=True)
        await queue.bind(there, "#")
        broker = RabbitBroker(server.url, exchange="topic")
        async with Office(broker).open() as office:
            await office.stage(*(event(n, topic=f"{name}.late", key="A") for n in range(3)))
            await office.stage(*(event(n, topic=name) for n in range(50)))
            await office.until_sent(50)
            await office.until_noticed(BreakerOpened, 4)
            with pytest.raises(Transient, match="NOT_FOUND - no exchange"):
                await broker.probe(f"{name}.late/A")
            late = await channel.declare_exchange(f"{name}.late", "topic", durable=True)
            await queue.bind(late, "#")
            await office.until_sent(53)
        assert office.charged == []
        assert office.down == {f"{name}.late/A"}
    await broker.close()


async def test_a_message_too_large_for_the_server_is_found_and_buried_alone(
    server: RabbitServer, broker: RabbitBroker, name: str
) -> None:
    huge = Event("order.changed", "x" * (SERVER_BYTES_MAX + 1), key="huge", topic="orders")
    async with Office(broker).open() as office:
        good = await office.stage(*(event(n) for n in range(100)))
        [guilty] = await office.stage(huge)
        await office.until_sent(100)
        await office.until_noticed(Buried)
    assert [str(fact.event_id) for fact in office.watch.of(Buried)] == [guilty]
    assert "PRECONDITION_FAILED" in office.watch.of(Buried)[0].error
    assert office.watch.of(Retried) == []
    assert {m.message_id for m in await contents(server.url, name)} == set(good)


async def test_a_full_queue_is_an_outage_of_its_routing_key_only(server: RabbitServer, name: str) -> None:
    async with channel_to(server.url) as channel:
        exchange = await channel.declare_exchange(name, "topic", durable=True)
        limits: dict[str, Any] = {"x-max-length": 1, "x-overflow": "reject-publish"}
        full = await channel.declare_queue(f"{name}.full", durable=True, arguments=limits)
        roomy = await channel.declare_queue(name, durable=True)
        await full.bind(exchange, "full")
        await roomy.bind(exchange, "orders")
        broker = RabbitBroker(server.url, exchange=name)
        async with Office(broker).open() as office:
            await office.stage(*(event(n, topic="full", key="A") for n in range(2)))
            await office.stage(*(event(n) for n in range(50)))
            await office.until_noticed(BreakerOpened, 9)
            assert office.down == {f"{name}/full"}
            await full.consume(take)
            await office.until_sent(52)
        assert office.charged == []
    await broker.close()


async def test_a_body_larger_than_a_frame_arrives_as_it_was(
    server: RabbitServer, broker: RabbitBroker, name: str
) -> None:
    bodies = [bytes(n % 251 for n in range(size)) for size in (131_064, 131_065, 1_000_000)]
    assert await broker.publish([message(n, body=body) for n, body in enumerate(bodies)]) == [CONFIRMED] * 3
    assert [m.body for m in await contents(server.url, name)] == bodies


async def test_a_publish_that_was_cancelled_leaves_the_broker_usable(
    server: RabbitServer, broker: RabbitBroker, name: str
) -> None:
    first, second = [message(n, key=f"k{n}") for n in range(50)], [message(n, key=f"k{n}") for n in range(50)]
    server.pause()
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(0.3):
            await broker.publish(first)
    server.resume()
    assert await broker.publish(second) == [CONFIRMED] * 50
    assert {m.message_id for m in second} <= {m.message_id for m in await contents(server.url, name)}


async def test_a_frozen_server_is_an_outage_and_not_a_wait_without_end(server: RabbitServer, name: str) -> None:
    broker = RabbitBroker(server.url, exchange=name, declare=True, queues=((name, "#"),), confirm_seconds=0.5)
    await broker.start()
    assert await broker.publish([message(0)]) == [CONFIRMED]
    server.pause()
    try:
        [verdict] = await broker.publish([message(1)])
        assert verdict == Unresolved("nothing was heard from the server for 0.25 s")
    finally:
        server.resume()
    assert await broker.publish([message(2)]) == [CONFIRMED]
    await broker.close()


async def test_silence_for_two_heartbeats_ends_the_connection(server: RabbitServer, name: str) -> None:
    broker = RabbitBroker(server.url, exchange=name, declare=True, heartbeat_seconds=1, confirm_seconds=30)
    await broker.start()
    server.pause()
    try:
        async with asyncio.timeout(10):
            [verdict] = await broker.publish([message(1)])
    finally:
        server.resume()
    assert isinstance(verdict, Unresolved)
    assert "silent" in verdict.error
    await broker.close()


async def test_our_heartbeats_keep_an_idle_connection(
    server: RabbitServer, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    broker = RabbitBroker(server.url, exchange=name, declare=True, queues=((name, "#"),), heartbeat_seconds=1)
    await broker.start()
    wire = broker._wire
    assert wire is not None
    kept = asyncio.Event()
    begun, written = asyncio.get_running_loop().time(), wire.write

    def watch(data: bytes) -> None:
        # The server gives up on a client that is silent for two intervals; a beat well after that proves the point.
        written(data)
        if asyncio.get_running_loop().time() - begun > 3:
            kept.set()

    monkeypatch.setattr(wire, "write", watch)
    async with asyncio.timeout(20):
        await kept.wait()
    assert await broker.publish([message(1)]) == [CONFIRMED]
    assert broker._wire is wire
    await broker.close()


async def test_more_exchanges_than_channels_take_turns(
    server: RabbitServer, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(adapter, "PUBLISHERS_MAX", 2)
    topics = [f"{name}.{n}" for n in range(6)]
    async with channel_to(server.url) as channel:
        queue = await channel.declare_queue(name, durable=True)
        for topic in topics:
            await queue.bind(await channel.declare_exchange(topic, "topic"), "#")
        broker = RabbitBroker(server.url, exchange="topic")
        for _ in range(2):
            wave = [message(n, topic=topic) for n, topic in enumerate(topics)]
            assert await broker.publish(wave) == [CONFIRMED] * 6
            for single in wave:
                assert await broker.publish([single]) == [CONFIRMED]
        await broker.close()


async def test_tls_checks_the_certificate(server: RabbitServer, name: str) -> None:
    trusting = await open_broker(f"{server.tls_url}?exchange={name}&declare={name}&cafile={server.certificate}")
    await trusting.start()
    assert await trusting.publish([message(1)]) == [CONFIRMED]
    await trusting.close()
    with pytest.raises(Unreachable, match="certificate verify failed"):
        await RabbitBroker(server.tls_url).start()


async def test_a_virtual_host_is_its_own_world(server: RabbitServer, name: str) -> None:
    url = await asyncio.to_thread(server.vhost, f"shop/{name}")
    broker = await open_broker(f"{url}?exchange={name}&declare={name}")
    await broker.start()
    assert await broker.publish([message(1)]) == [CONFIRMED]
    await broker.close()
    assert len(await contents(url, name)) == 1
    with pytest.raises(Unreachable, match="NOT_ALLOWED - vhost nowhere not found"):
        await RabbitBroker(server.url + "nowhere").start()


async def test_a_wrong_password_is_said_without_it(server: RabbitServer) -> None:
    with pytest.raises(Unreachable, match=f"127.0.0.1:{server.port}.*ACCESS_REFUSED") as caught:
        await RabbitBroker(f"amqp://guest:s3cret@127.0.0.1:{server.port}/").start()
    assert "s3cret" not in f"{caught.value} {caught.value.__cause__} {RabbitBroker('amqp://u:s3cret@h').settings}"


async def test_a_server_that_is_not_there_is_named(name: str) -> None:
    port = free_port()
    broker = RabbitBroker(f"amqp://guest:guest@127.0.0.1:{port}/")
    with pytest.raises(Unreachable, match=f"RabbitMQ at 127.0.0.1:{port} cannot be used"):
        await broker.start()
    with pytest.raises(Unreachable):
        await broker.probe("")
    [verdict] = await broker.publish([message(1)])
    assert isinstance(verdict, Unresolved)
    assert verdict.destination == ""


async def test_a_topology_that_contradicts_what_is_there_is_a_misuse(server: RabbitServer, name: str) -> None:
    async with channel_to(server.url) as channel:
        await channel.declare_queue(name, durable=True)
        broker = RabbitBroker(server.url, exchange=name, declare=True, queues=((name, "#"),))
        with pytest.raises(Misuse, match="PRECONDITION_FAILED - inequivalent arg 'x-queue-type'"):
            await broker.start()
        await broker.close()


@pytest.mark.parametrize(
    ("url", "problem"),
    [
        ("amqp://h/?exchnage=x", "unknown option 'exchnage'"),
        ("amqp://u:pw@h:port/", "port"),
        ("amqp://h/?exchange=topic&declare=q", "no fixed exchange"),
        ("http://h/", "not RabbitMQ"),
    ],
)
def test_a_url_that_cannot_work_is_refused(url: str, problem: str) -> None:
    with pytest.raises(BadSetting, match=problem):
        RabbitBroker(url)


async def test_without_the_driver_the_extra_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in [found for found in sys.modules if found.startswith("outrider.brokers.rabbitmq")]:
        monkeypatch.delitem(sys.modules, module)
    monkeypatch.setitem(sys.modules, "pamqp", None)
    with pytest.raises(Misuse, match=r"pip install 'outrider\[rabbitmq\]'"):
        await open_broker("amqp://localhost")
