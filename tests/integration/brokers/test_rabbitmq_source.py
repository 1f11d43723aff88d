"""Consuming from a real RabbitMQ in case of failures: redelivery, rejection, and takeover."""

from __future__ import annotations

import asyncio
import struct
from collections.abc import AsyncIterator, Callable, Iterator
from datetime import UTC, datetime
from decimal import Decimal
from typing import Any
from uuid import uuid4

import aio_pika
import pytest

from outrider.brokers.base import CONFIRMED
from outrider.brokers.rabbitmq import RabbitBroker, RabbitSource
from outrider.errors import Transient, Unreachable, UsageError
from outrider.event import Event
from outrider.inbox.consumer import Consumer
from outrider.inbox.router import Route, Routes
from outrider.inbox.settings import ConsumerSettings
from outrider.stores.memory import MemoryInbox, MemoryStore, MemoryTransaction
from outrider.telemetry.events import ConsumerRecovered, ConsumerUnavailable, Handled, TelemetryEvent
from outrider.testing import RecordingObserver
from outrider.testing.contracts import message
from outrider.testing.contracts.source import numbers
from outrider.testing.servers.rabbitmq import RabbitServer
from outrider.testing.servers.server import free_port
from tests.support.rabbitmq_client import channel_to
from tests.support.rabbitmq_source import (
    PATIENCE_SECONDS,
    QUORUM,
    loss,
    nobody,
    publish,
    publish_raw,
    pull_out,
    reading,
    restart,
    source_of,
    table,
)

pytestmark = pytest.mark.rabbitmq


@pytest.fixture(scope="module")
def server() -> Iterator[RabbitServer]:
    """A private server that tests may break and must repair."""
    with RabbitServer(tls=True) as server:
        yield server


@pytest.fixture
def name() -> str:
    """An exchange and a queue of the test's own."""
    return f"test_{uuid4().hex[:12]}"


@pytest.fixture
async def broker(server: RabbitServer, name: str) -> AsyncIterator[RabbitBroker]:
    """A broker that publishes to the exchange of the test."""
    broker = RabbitBroker(server.url, exchange=name, declare=True)
    yield broker
    await broker.close()


def close_all(server: RabbitServer) -> None:
    """Let the server close every connection."""
    server.ctl("close_all_connections", "for a test")


def ack_within(milliseconds: int, *, checked_every: int) -> str:
    """Say, in the server's language, how long a delivery may stay without an ack."""
    settings = {"consumer_timeout": milliseconds, "channel_tick_interval": checked_every}
    return ", ".join(f"application:set_env(rabbit, {name}, {value})" for name, value in settings.items()) + "."


class TestLosses:
    async def test_what_is_not_acked_when_the_connection_is_lost_comes_again(
        self, server: RabbitServer, broker: RabbitBroker, name: str
    ) -> None:
        async with reading(source_of(server, name)) as reader:
            await publish(broker, *range(20))
            before = await reader.until(20)
            reader.ack(before[:5])
            await reader.receive(0)
            pull_out(reader)
            assert "pulled out" in await loss(reader)
            await reader.source.start(reader.on_revoked)
            assert numbers(await reader.until(35)) == list(range(5, 20))

    async def test_a_connection_closed_by_the_server_revokes_the_partition_and_nothing_else(
        self, server: RabbitServer, broker: RabbitBroker, name: str
    ) -> None:
        async with reading(source_of(server, name)) as reader:
            await publish(broker, *range(10))
            old = await reader.until(10)
            await asyncio.to_thread(close_all, server)
            assert "for a test" in await loss(reader)
            assert reader.revoked == set()
            await restart(reader)
            assert reader.revoked == {old[0].partition}
            new = await reader.until(20)
            assert numbers(new) == list(range(10))
            assert {delivery.partition for delivery in old}.isdisjoint(delivery.partition for delivery in new)
            reader.ack(old)
            reader.ack(new[:3])
        async with reading(source_of(server, name)) as reader:
            assert numbers(await reader.until(7)) == list(range(3, 10))

    async def test_a_loss_is_waited_for_only_so_long(
        self, server: RabbitServer, broker: RabbitBroker, name: str
    ) -> None:
        async with reading(source_of(server, name, revoke_seconds=0.2)) as reader:
            await publish(broker, 1)
            [old] = await reader.until(1)
            reader.may_release.clear()
            pull_out(reader)
            await loss(reader)
            await reader.source.start(reader.on_revoked)
            assert reader.revoked == {old.partition}
            assert numbers(await reader.until(2)) == [1]

    async def test_a_server_that_stops_and_starts_loses_nothing(
        self, server: RabbitServer, broker: RabbitBroker, name: str
    ) -> None:
        async with reading(source_of(server, name)) as reader:
            await publish(broker, *range(50))
            reader.ack((await reader.until(50))[:20])
            await reader.receive(0)
            await asyncio.to_thread(server.halt)
            await loss(reader)
            with pytest.raises(Unreachable, match="cannot be used"):
                await reader.source.start(reader.on_revoked)
            await asyncio.to_thread(server.start)
            await restart(reader)
            assert numbers(await reader.until(80)) == list(range(20, 50))
            assert len(reader.revoked) == 1

    async def test_a_frozen_server_is_detected_by_its_silence(self, server: RabbitServer, name: str) -> None:
        async with reading(source_of(server, name, heartbeat_seconds=1)) as reader:
            server.pause()
            try:
                assert "silent" in await loss(reader)
            finally:
                server.resume()
            await restart(reader)

    async def test_an_idle_source_stays_connected(self, server: RabbitServer, broker: RabbitBroker, name: str) -> None:
        async with reading(source_of(server, name, heartbeat_seconds=1)) as reader:
            begun = asyncio.get_running_loop().time()
            while asyncio.get_running_loop().time() - begun < 4:
                await reader.receive()
            await publish(broker, 1)
            assert numbers(await reader.until(1)) == [1]
            assert reader.revoked == set()

    async def test_a_memory_alarm_does_not_stop_a_consumer(
        self, server: RabbitServer, broker: RabbitBroker, name: str
    ) -> None:
        async with reading(source_of(server, name, in_flight_max=10)) as reader:
            await publish(broker, *range(30))
            await asyncio.to_thread(server.memory_alarm, True)
            try:
                async with asyncio.timeout(PATIENCE_SECONDS):
                    while len(reader.received) < 30:
                        reader.ack(await reader.receive())
            finally:
                await asyncio.to_thread(server.memory_alarm, False)

    async def test_a_delivery_that_is_not_acked_in_time_comes_again(
        self, server: RabbitServer, broker: RabbitBroker, name: str
    ) -> None:
        await asyncio.to_thread(server.ctl, "eval", ack_within(500, checked_every=200))
        try:
            async with reading(source_of(server, name)) as reader:
                await publish(broker, 1)
                await reader.until(1)
                assert "delivery acknowledgement on channel" in await loss(reader)
                await reader.source.start(reader.on_revoked)
                assert numbers(await reader.until(2)) == [1]
        finally:
            await asyncio.to_thread(server.ctl, "eval", ack_within(1_800_000, checked_every=60_000))


class TestOrder:
    @pytest.mark.parametrize("crash", [False, True])
    async def test_another_process_takes_over_in_order(
        self, server: RabbitServer, broker: RabbitBroker, name: str, crash: bool
    ) -> None:
        """Messages that were handed out and those that were not come in order, though the queue sets no limit."""
        sources = [source_of(server, name, in_flight_max=100) for _ in range(2)]
        async with reading(sources[0]) as first, reading(sources[1]) as second:
            await publish(broker, *range(300))
            first.ack((await first.until(100))[:50])
            await first.until(150)
            assert await second.looks() == []
            if crash:
                pull_out(first)
            await first.source.close()
            assert numbers(await second.until(100)) == list(range(50, 150))
            second.ack(second.received)
            await second.until(200)
            second.ack(second.received)
            await second.until(250)
            assert numbers(second.received) == list(range(50, 300))

    async def test_no_more_is_handed_out_than_may_be_in_flight(
        self, server: RabbitServer, broker: RabbitBroker, name: str
    ) -> None:
        async with reading(source_of(server, name, in_flight_max=10)) as reader:
            await publish(broker, *range(50))
            await reader.until(10)
            assert await reader.looks() == []
            reader.ack([reader.received[7], *reader.received[:3]])
            await reader.until(14)
            assert await reader.looks() == []
            assert numbers(reader.received) == list(range(14))


class TestMessages:
    async def test_large_bodies_arrive_whole(self, server: RabbitServer, broker: RabbitBroker, name: str) -> None:
        bodies = [bytes([n]) * size for n, size in enumerate((0, 1, 131_064, 131_065, 8_000_000))]
        async with reading(source_of(server, name)) as reader:
            sent = [message(n, topic="orders", key="A", body=body) for n, body in enumerate(bodies)]
            assert list(await broker.publish(sent)) == [CONFIRMED] * len(bodies)
            assert [delivery.body for delivery in await reader.until(len(bodies))] == bodies

    async def test_the_message_of_another_producer_is_read_as_far_as_it_goes(
        self, server: RabbitServer, name: str
    ) -> None:
        moment = datetime(2026, 1, 2, tzinfo=UTC)
        headers: dict[str, Any] = {
            "text": "naïve ☂",
            "number": -7,
            "truth": True,
            "nothing": None,
            "moment": moment,
            "amount": Decimal("12.50"),
            "nested": {"list": [1, {"a": "b"}]},
        }
        async with reading(source_of(server, name)) as reader, channel_to(server.url) as channel:
            exchange = await channel.get_exchange(name)
            foreign = aio_pika.Message(
                b"{}", headers=headers, message_id="m-1", type="order.paid", correlation_id="c-1", timestamp=moment
            )
            await exchange.publish(foreign, routing_key="orders")
            [found] = await reader.until(1)
        assert (found.topic, found.key, found.position, found.body) == ("orders", None, "", b"{}")
        assert found.headers == {
            "text": "naïve ☂".encode(),
            "number": b"-7",
            "truth": b"true",
            "nothing": b"null",
            "moment": b"2026-01-02T00:00:00+00:00",
            "amount": b"12.50",
            "nested": b'{"list": [1, {"a": "b"}]}',
            "message_id": b"m-1",
            "event_type": b"order.paid",
            "correlation_id": b"c-1",
        }

    async def test_a_message_that_a_codec_gives_up_on_does_not_stop_the_others(
        self, server: RabbitServer, broker: RabbitBroker, name: str
    ) -> None:
        late = struct.pack(">Q", 1_700_000_000_000_000)
        async with reading(source_of(server, name)) as reader:
            await publish_raw(server, name, 1 << 6, late)
            await publish_raw(server, name, 1 << 13, table(b"\x01t" + b"T" + late))
            await publish_raw(server, name, 1 << 13, table(b"\x02\xff\xfe" + b"S" + table(b"a")))
            await publish_raw(server, name, 1 << 7, b"\x02\xff\xfe")
            await publish(broker, 5)
            found = await reader.until(5)
            assert [dict(delivery.headers) for delivery in found[:4]] == [
                {},
                {"t": b"1700000000000000"},
                {"\\xff\\xfe": b"a"},
                {"message_id": b"\xff\xfe"},
            ]
            reader.ack(found)
        async with reading(source_of(server, name)) as reader:
            assert await reader.looks() == []

    async def test_where_every_topic_has_an_exchange_it_names_the_topic(self, server: RabbitServer, name: str) -> None:
        async with channel_to(server.url) as channel:
            exchange = await channel.declare_exchange(name, "topic", durable=True)
            queue = await channel.declare_queue(name, durable=True, arguments=QUORUM)
            await queue.bind(exchange, "#")
            async with reading(RabbitSource(f"{server.url}?exchange=topic", name, [name])) as reader:
                await exchange.publish(aio_pika.Message(b"{}"), routing_key="A-1")
                [foreign] = await reader.until(1)
                broker = RabbitBroker(f"{server.url}?exchange=topic")
                await broker.publish([message(1, topic=name, key="A-2")])
                [ours] = await reader.until(2)
                await broker.close()
        assert [(found.topic, found.key) for found in (foreign, ours)] == [(name, b"A-1"), (name, b"A-2")]


class TestConnecting:
    async def test_tls_checks_the_certificate(self, server: RabbitServer, name: str) -> None:
        url = f"{server.tls_url}?declare=&exchange={name}"
        async with reading(RabbitSource(f"{url}&cafile={server.certificate}", name, ["orders"])) as reader:
            assert await reader.receive() == []
        with pytest.raises(Unreachable, match="certificate verify failed"):
            await RabbitSource(url, name, ["orders"]).start(nobody)

    async def test_a_virtual_host_is_its_own_world(self, server: RabbitServer, name: str) -> None:
        url = await asyncio.to_thread(server.vhost, f"shop/{name}")
        async with reading(RabbitSource(f"{url}?declare=", name, ["orders"])) as reader:
            assert await reader.receive() == []
        with pytest.raises(UsageError, match="has no queue"):
            await source_of(server, name, declare=False).start(nobody)

    async def test_a_server_that_is_not_there_is_named(self, name: str) -> None:
        port = free_port()
        source = RabbitSource(f"amqp://guest:guest@127.0.0.1:{port}/", name, ["orders"])
        with pytest.raises(Unreachable, match=f"RabbitMQ at 127.0.0.1:{port} cannot be used"):
            await source.start(nobody)
        with pytest.raises(Transient, match="start it"):
            await source.receive(1, frozenset())
        await source.close()

    async def test_a_start_that_is_given_up_leaves_no_connection(self, server: RabbitServer, name: str) -> None:
        source = source_of(server, name)
        server.pause()
        try:
            with pytest.raises(TimeoutError):
                async with asyncio.timeout(0.3):
                    await source.start(nobody)
        finally:
            server.resume()
        async with reading(source) as reader:
            assert await reader.receive() == []


class Watch(RecordingObserver):
    """A recording observer that a test can wait for."""

    def __init__(self) -> None:
        super().__init__()
        self._news = asyncio.Event()

    def emit(self, fact: TelemetryEvent) -> None:
        """Record the telemetry event, and wake waiting tests."""
        super().emit(fact)
        self._news.set()

    async def until(self, true: Callable[[], bool]) -> None:
        """Wait for telemetry events until the condition is true."""
        async with asyncio.timeout(PATIENCE_SECONDS):
            while not true():
                self._news.clear()
                await self._news.wait()


class TestConsumer:
    """The whole engine on the real server."""

    async def test_every_effect_happens_once_and_in_order_whatever_happens_to_the_connection(
        self, server: RabbitServer, broker: RabbitBroker, name: str
    ) -> None:
        effects: list[tuple[str, int]] = []
        watch, keys, count = Watch(), 20, 600

        async def handle(event: Event, tx: MemoryTransaction) -> None:
            tx.on_commit.append(lambda: effects.append((event.key or "", event.payload["n"])))

        routes = Routes(name, ConsumerSettings(in_flight_max=100), {("orders", "order.changed"): Route(handle)})
        consumer = Consumer(
            source_of(server, name, in_flight_max=100), MemoryInbox(MemoryStore()), routes, observer=watch
        )
        await source_once(server, name)
        running = asyncio.create_task(consumer.run())
        for start in range(0, count, 200):
            for number in range(start, start + 200):
                await publish(broker, number, key=f"k{number % keys}")
            await watch.until(lambda at=start: len(effects) > at + 50)  # type: ignore[misc]
            if start == 0:
                await asyncio.to_thread(close_all, server)
            elif start == 200:
                await asyncio.to_thread(server.halt)
                await watch.until(lambda: len(watch.of(ConsumerUnavailable)) >= 2)
                await asyncio.to_thread(server.start)
        await watch.until(lambda: len(effects) >= count)
        consumer.stop()
        await running
        assert sorted(number for _, number in effects) == list(range(count))
        for key in range(keys):
            assert [n for name, n in effects if name == f"k{key}"] == list(range(key, count, keys))
        assert len(watch.of(ConsumerUnavailable)) == len(watch.of(ConsumerRecovered)) == 2
        assert sum(fact.applied for fact in watch.of(Handled)) == count
        async with reading(source_of(server, name)) as reader:
            assert await reader.looks() == []


async def source_once(server: RabbitServer, name: str) -> None:
    """Make exchange and queue, so that publishing may begin."""
    source = source_of(server, name)
    await source.start(nobody)
    await source.close()
