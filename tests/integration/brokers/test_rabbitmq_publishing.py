"""Publishing to RabbitMQ: frames, channels, heartbeats, TLS, and settings that are rejected at the start."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import AsyncIterator, Iterator
from uuid import uuid4

import pytest

from outrider.app import open_broker
from outrider.brokers.base import CONFIRMED, Rejected, Unknown
from outrider.brokers.rabbitmq import RabbitBroker, connection_pool
from outrider.errors import InvalidSetting, Unreachable, UsageError
from outrider.testing.contracts.broker import message
from outrider.testing.servers.rabbitmq import RabbitServer
from outrider.testing.servers.server import free_port
from tests.support.rabbitmq_client import channel_to, contents

pytestmark = pytest.mark.rabbitmq


@pytest.fixture(scope="module")
def server() -> Iterator[RabbitServer]:
    """A private server with TLS."""
    with RabbitServer(tls=True) as server:
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


async def test_every_unroutable_message_of_a_wave_is_distinguished_from_the_others(
    server: RabbitServer, name: str
) -> None:
    broker = RabbitBroker(server.url, exchange=name, declare=True, queues=((name, "orders"),))
    wave = [message(n, key=f"k{n}", topic="orders" if n % 3 else "nowhere") for n in range(300)]
    await broker.start()
    results = await broker.publish(wave)
    assert [isinstance(result, Rejected) for result in results] == [n % 3 == 0 for n in range(300)]
    assert {m.message_id for m in await contents(server.url, name)} == {
        m.message_id for m in wave if m.topic == "orders"
    }
    await broker.close()


async def test_a_body_larger_than_a_frame_arrives_as_it_was(
    server: RabbitServer, broker: RabbitBroker, name: str
) -> None:
    bodies = [bytes(n % 251 for n in range(size)) for size in (131_064, 131_065, 1_000_000)]
    assert await broker.publish([message(n, body=body) for n, body in enumerate(bodies)]) == [CONFIRMED] * 3
    assert [m.body for m in await contents(server.url, name)] == bodies


async def test_our_heartbeats_keep_an_idle_connection(
    server: RabbitServer, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    broker = RabbitBroker(server.url, exchange=name, declare=True, queues=((name, "#"),), heartbeat_seconds=1)
    await broker.start()
    wire = await broker._pool.connection()
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
    assert await broker._pool.connection() is wire
    await broker.close()


async def test_more_exchanges_than_channels_take_turns(
    server: RabbitServer, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(connection_pool, "PUBLISHERS_MAX", 2)
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
    [result] = await broker.publish([message(1)])
    assert isinstance(result, Unknown)
    assert result.destination == ""


async def test_a_topology_that_contradicts_the_existing_one_is_a_usage_error(server: RabbitServer, name: str) -> None:
    async with channel_to(server.url) as channel:
        await channel.declare_queue(name, durable=True)
        broker = RabbitBroker(server.url, exchange=name, declare=True, queues=((name, "#"),))
        with pytest.raises(UsageError, match="PRECONDITION_FAILED - inequivalent arg 'x-queue-type'"):
            await broker.start()
        await broker.close()


@pytest.mark.parametrize(
    ("url", "problem"),
    [
        ("amqp://h/?exchnage=x", "unknown option 'exchnage'"),
        ("amqp://u:pw@h:port/", "port"),
        ("amqp://h/?exchange=topic&declare=q", "no fixed exchange"),
        ("http://h/", "not RabbitMQ"),
        *((f"amqp://h/?declare={answer}", "list queues, such as") for answer in ("true", "No", "1", "audit,yes")),
    ],
)
def test_a_url_that_cannot_work_is_rejected(url: str, problem: str) -> None:
    with pytest.raises(InvalidSetting, match=problem):
        RabbitBroker(url)


async def test_without_the_driver_the_extra_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in [found for found in sys.modules if found.startswith("outrider.brokers.rabbitmq")]:
        monkeypatch.delitem(sys.modules, module)
    monkeypatch.setitem(sys.modules, "pamqp", None)
    with pytest.raises(UsageError, match=r"pip install 'outrider\[rabbitmq\]'"):
        await open_broker("amqp://localhost")
