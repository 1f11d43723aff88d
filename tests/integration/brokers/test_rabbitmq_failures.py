"""Failures of RabbitMQ under a real relay: messages lost, attempts counted, and streams that wait."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from statistics import median
from time import perf_counter
from typing import Any
from uuid import uuid4

import aio_pika
import pytest

from outrider.brokers.base import CONFIRMED, Unknown
from outrider.brokers.rabbitmq import RabbitBroker
from outrider.errors import Transient
from outrider.event import Event
from outrider.telemetry.events import BreakerOpened, EventDeadLettered, Retried
from outrider.testing.contracts.broker import message
from outrider.testing.servers.rabbitmq import RabbitServer
from tests.support.rabbitmq_client import channel_to, contents
from tests.support.running_relay import RunningRelay

pytestmark = pytest.mark.rabbitmq

SERVER_BYTES_MAX = 2_000_000


@pytest.fixture(scope="module")
def server() -> Iterator[RabbitServer]:
    """A private server that tests may break and must repair."""
    with RabbitServer(settings={"max_message_size": str(SERVER_BYTES_MAX)}) as server:
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


async def take(delivery: aio_pika.abc.AbstractIncomingMessage) -> None:
    """Make room in the queue."""
    await delivery.ack()


def event(number: int, *, key: str | None = None, topic: str = "orders", **fields: Any) -> Event:
    return Event("order.changed", {"n": number}, key=key or f"k{number % 20}", topic=topic, **fields)


async def test_a_server_that_is_away_for_a_while_loses_nothing_and_counts_no_attempt(
    server: RabbitServer, broker: RabbitBroker, name: str
) -> None:
    async with RunningRelay(broker).open() as relay:
        ids = await relay.stage(*(event(n) for n in range(100)))
        await relay.until_sent(100)
        stopping = asyncio.create_task(asyncio.to_thread(server.halt))
        number = 100
        while not stopping.done():
            ids += await relay.stage(*(event(n) for n in range(number, number + 20)))
            number += 20
            await asyncio.wait([stopping], timeout=0.05)
        ids += await relay.stage(*(event(n) for n in range(number, number + 100)))
        await relay.until_emitted(BreakerOpened, 3)
        await asyncio.to_thread(server.start)
        await relay.until_sent(len(ids))
    found = await contents(server.url, name)
    assert {m.message_id for m in found} == set(ids)
    assert relay.failed_attempts == []
    assert relay.down == {""}
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
    [result] = await broker.publish([message(500)])
    assert isinstance(result, Unknown)
    await asyncio.to_thread(server.start)
    assert await broker.publish([message(501)]) == [CONFIRMED]
    await broker.close()
    assert {m.message_id for m in wave} <= {m.message_id for m in await contents(server.url, name)}


async def test_a_memory_alarm_is_an_outage(server: RabbitServer, broker: RabbitBroker, name: str) -> None:
    async with RunningRelay(broker).open() as relay:
        await relay.stage(event(0))
        await relay.until_sent(1)
        await asyncio.to_thread(server.memory_alarm, True)
        try:
            await relay.stage(*(event(n) for n in range(1, 50)))
            await relay.until_emitted(BreakerOpened, 3)
            with pytest.raises(Transient, match="blocked: low on memory"):
                await broker.probe("")
            assert await broker.publish([message(1)]) == [Unknown("blocked: low on memory")]
        finally:
            await asyncio.to_thread(server.memory_alarm, False)
        await relay.until_sent(50)
    assert relay.failed_attempts == []
    assert relay.down == {""}
    assert all("blocked: low on memory" in fact.error for fact in relay.observer.of(BreakerOpened))


async def test_an_unroutable_message_is_dead_lettered_and_other_routing_keys_go_on(
    server: RabbitServer, name: str
) -> None:
    broker = RabbitBroker(server.url, exchange=name, declare=True, queues=((name, "orders"),))
    async with RunningRelay(broker).open() as relay:
        [lost] = await relay.stage(event(0, topic="nowhere", key="A"))
        await relay.stage(*(event(n) for n in range(50)))
        await relay.until_sent(50)
        await relay.until_emitted(EventDeadLettered)
    [dead_lettered] = relay.observer.of(EventDeadLettered)
    assert str(dead_lettered.event_id) == lost
    assert dead_lettered.error.startswith("unroutable: NO_ROUTE")
    assert dead_lettered.error.endswith("bind a queue for it, then: outrider dead-letters replay --topic nowhere")
    assert relay.observer.of(BreakerOpened) == []
    await broker.close()


async def test_a_missing_exchange_is_an_outage_of_that_exchange_only(server: RabbitServer, name: str) -> None:
    async with channel_to(server.url) as channel:
        there = await channel.declare_exchange(name, "topic", durable=True)
        queue = await channel.declare_queue(name, durable=True)
        await queue.bind(there, "#")
        broker = RabbitBroker(server.url, exchange="topic")
        async with RunningRelay(broker).open() as relay:
            await relay.stage(*(event(n, topic=f"{name}.late", key="A") for n in range(3)))
            await relay.stage(*(event(n, topic=name) for n in range(50)))
            await relay.until_sent(50)
            await relay.until_emitted(BreakerOpened, 4)
            with pytest.raises(Transient, match="NOT_FOUND - no exchange"):
                await broker.probe(f"{name}.late/A")
            late = await channel.declare_exchange(f"{name}.late", "topic", durable=True)
            await queue.bind(late, "#")
            await relay.until_sent(53)
        assert relay.failed_attempts == []
        assert relay.down == {f"{name}.late/A"}
    await broker.close()


async def test_what_is_said_of_a_missing_exchange_names_the_remedy(server: RabbitServer, name: str) -> None:
    broker = RabbitBroker(server.url, exchange=name)
    async with RunningRelay(broker).open() as relay:
        await relay.stage(event(0))
        await relay.until_emitted(BreakerOpened, 2)
    assert relay.failed_attempts == []
    for opened in relay.observer.of(BreakerOpened):
        assert f"no exchange '{name}'" in opened.error
        assert "let the relay do so: add ?declare=" in opened.error
    await broker.close()


async def test_a_message_too_large_for_the_server_is_found_and_dead_lettered_alone(
    server: RabbitServer, broker: RabbitBroker, name: str
) -> None:
    huge = Event("order.changed", "x" * (SERVER_BYTES_MAX + 1), key="huge", topic="orders")
    async with RunningRelay(broker).open() as relay:
        good = await relay.stage(*(event(n) for n in range(100)))
        [too_large] = await relay.stage(huge)
        await relay.until_sent(100)
        await relay.until_emitted(EventDeadLettered)
    assert [str(fact.event_id) for fact in relay.observer.of(EventDeadLettered)] == [too_large]
    assert "PRECONDITION_FAILED" in relay.observer.of(EventDeadLettered)[0].error
    assert relay.observer.of(Retried) == []
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
        async with RunningRelay(broker).open() as relay:
            await relay.stage(*(event(n, topic="full", key="A") for n in range(2)))
            await relay.stage(*(event(n) for n in range(50)))
            await relay.until_emitted(BreakerOpened, 9)
            assert relay.down == {f"{name}/full"}
            await full.consume(take)
            await relay.until_sent(52)
        assert relay.failed_attempts == []
    await broker.close()


@asynccontextmanager
async def suspended(server: RabbitServer, queues: list[str]) -> AsyncIterator[None]:
    """Let quorum queues of the default virtual host take messages and confirm none, for the block."""

    async def each(action: str) -> None:
        names = ", ".join(f'"%2F_{queue}"' for queue in queues)
        await asyncio.to_thread(
            server.ctl, "eval", f"[sys:{action}({{list_to_atom(Name), node()}}) || Name <- [{names}]]."
        )

    await each("suspend")
    try:
        yield
    finally:
        await each("resume")


async def test_ten_queues_that_never_confirm_stop_no_other_queue(server: RabbitServer, name: str) -> None:
    mute = [f"{name}.mute-{number}" for number in range(10)]
    queues = tuple((queue, queue) for queue in (name, *mute))
    broker = RabbitBroker(server.url, exchange=name, declare=True, queues=queues)
    async with RunningRelay(broker).open() as relay, channel_to(server.url) as channel:
        healthy = (await relay.stage(event(0, topic=name), *(event(0, topic=queue) for queue in mute)))[:1]
        # The relay has declared the exchange by then.
        await relay.until_sent(11)
        exchange = await channel.get_exchange(name)
        control = await channel.declare_queue(f"{name}.control", durable=True)
        await control.bind(exchange, "control")
        seconds: dict[str, list[float]] = {"before": [], "mute": [], "control": []}

        async def measure(when: str, number: int) -> None:
            confirmed = await relay.sent() + 1
            began = perf_counter()
            healthy.extend(await relay.stage(event(number, topic=name)))
            await relay.store.notify()
            await relay.until_sent(confirmed)
            seconds[when].append(perf_counter() - began)
            began = perf_counter()
            await exchange.publish(aio_pika.Message(b"{}", delivery_mode=2), routing_key="control")
            seconds["control"].append(perf_counter() - began)

        for number in range(1, 16):
            await measure("before", number)
        async with suspended(server, mute):
            for number in range(16, 56):
                if number % 5 == 0:
                    await relay.stage(*(event(number, topic=queue) for queue in mute))
                await measure("mute", number)
            # Every healthy event is confirmed, and no event behind a mute queue is.
            assert await relay.sent() == 11 + 55
            await relay.until_emitted(BreakerOpened)
            assert relay.down <= {f"{name}/{queue}" for queue in mute}
            assert relay.failed_attempts == []
        expected = max(median(seconds["before"]), median(seconds["control"]))
        assert median(seconds["mute"]) < 5 * expected, {when: median(each) for when, each in seconds.items()}
        await relay.until_sent(11 + 55 + 80)
        assert relay.failed_attempts == []
    await broker.close()
    assert {m.message_id for m in await contents(server.url, name)} == set(healthy)


async def test_a_backlog_for_a_queue_that_never_confirms_does_not_count_as_a_lost_connection(
    server: RabbitServer, name: str
) -> None:
    """RabbitMQ stops reading a connection after some hundred messages to such a queue, so it answers nothing there."""
    mute = f"{name}.mute"
    broker = RabbitBroker(server.url, exchange=name, declare=True, queues=((name, name), (mute, mute)))
    async with RunningRelay(broker).open() as relay:
        await relay.stage(event(0, topic=name), event(0, topic=mute))
        await relay.until_sent(2)
        async with suspended(server, [mute]):
            await relay.stage(*(event(n, topic=mute, key=f"k{n}") for n in range(1500)))
            for number in range(1, 21):
                await relay.stage(event(number, topic=name))
                await relay.until_sent(2 + number)
            await relay.until_emitted(BreakerOpened)
            assert f"{name}/{mute}" in relay.down
            assert "" not in relay.down
        await relay.until_sent(22 + 1500)
        assert relay.failed_attempts == []
    await broker.close()


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
        [result] = await broker.publish([message(1)])
        assert result == Unknown("no answer from the server for 0.25 s")
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
            [result] = await broker.publish([message(1)])
    finally:
        server.resume()
    assert isinstance(result, Unknown)
    assert "silent" in result.error
    await broker.close()
