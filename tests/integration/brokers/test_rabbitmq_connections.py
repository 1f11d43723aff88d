"""RabbitMQ through several connections: when they are opened, and that none of them is needed."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator
from urllib.parse import quote
from uuid import uuid4

import pytest

from outrider.brokers.base import CONFIRMED, PublishResult, Unknown
from outrider.brokers.rabbitmq import RabbitBroker, connection_pool
from outrider.brokers.rabbitmq.confirm_channel import ConfirmChannel
from outrider.brokers.rabbitmq.connection import AmqpConnection, connect
from outrider.brokers.rabbitmq.settings import RabbitSettings
from outrider.errors import InvalidSetting, Transient
from outrider.testing.contracts.broker import message
from outrider.testing.servers.rabbitmq import RabbitServer
from tests.support.rabbitmq_client import contents

pytestmark = pytest.mark.rabbitmq

WAVE = 400
WAVES_MAX = 200


@pytest.fixture(scope="module")
def server() -> Iterator[RabbitServer]:
    """A private server that tests may break and must repair."""
    with RabbitServer() as server:
        yield server


@pytest.fixture
def vhost(server: RabbitServer) -> str:
    """The URL of a virtual host of the test's own, with one queue that takes everything."""
    return f"{server.vhost(f'test_{uuid4().hex[:12]}')}?declare=all"


@pytest.fixture
async def broker(vhost: str) -> AsyncIterator[RabbitBroker]:
    """A broker that has published nothing yet."""
    broker = RabbitBroker(vhost, connections_max=3)
    await broker.start()
    yield broker
    await broker.close()


class Load:
    """Four publishes at a time, until there is no reason to go on."""

    def __init__(self, broker: RabbitBroker) -> None:
        self.broker = broker
        self.sent: list[str] = []
        self.results: list[PublishResult] = []

    async def run(self, *, links: int, waves_max: int = WAVES_MAX) -> None:
        """Publish until the broker has so many links, or for so many waves."""
        waves = iter(range(waves_max))

        async def run_once() -> None:
            for number in waves:
                if len(self.broker._pool) >= links:
                    return
                wave = [message(number * WAVE + n) for n in range(WAVE)]
                self.sent += [m.message_id for m in wave]
                self.results += await self.broker.publish(wave)
                if opening := self.broker._pool._tasks.get("open"):
                    # More load would not open the connection any sooner.
                    await asyncio.wait([opening])

        await asyncio.gather(*(run_once() for _ in range(4)))


def connections(server: RabbitServer, vhost: str) -> int:
    """Count what the server has, by its own word."""
    name = vhost.partition("?")[0].rpartition("/")[2]
    return server.ctl("list_connections", "--silent", "vhost").split().count(name)


async def test_much_under_way_is_spread_over_as_many_connections_as_allowed(
    server: RabbitServer, broker: RabbitBroker, vhost: str
) -> None:
    load = Load(broker)
    await load.run(links=3)
    assert len(broker._pool) == 3
    await load.run(links=4, waves_max=8)
    assert await asyncio.to_thread(connections, server, vhost) == 3
    assert load.results == [CONFIRMED] * len(load.sent)
    assert sorted(m.message_id for m in await contents(vhost.partition("?")[0], "all")) == sorted(load.sent)


async def test_a_trickle_needs_one_connection(server: RabbitServer, broker: RabbitBroker, vhost: str) -> None:
    for number in range(20):
        waves = [[message(number * 100 + wave * 10 + n) for n in range(10)] for wave in range(9)]
        heard = await asyncio.gather(*(broker.publish(wave) for wave in waves))
        assert heard == [[CONFIRMED] * 10] * 9
    assert await asyncio.to_thread(connections, server, vhost) == 1


async def test_a_server_that_takes_no_more_connections_is_not_down(
    server: RabbitServer, vhost: str, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO", "outrider.rabbitmq")
    broker = RabbitBroker(vhost)
    await broker.start()
    name = vhost.partition("?")[0].rpartition("/")[2]
    await asyncio.to_thread(server.ctl, "set_vhost_limits", "-p", name, '{"max-connections": 1}')
    load = Load(broker)
    await load.run(links=2, waves_max=20)
    assert load.results == [CONFIRMED] * 20 * WAVE
    assert len(broker._pool) == 1
    assert [record.message for record in caplog.records] == ["another connection could not be opened"]
    await broker.close()


async def test_a_lost_connection_has_unknown_results_and_the_others_go_on(
    broker: RabbitBroker, monkeypatch: pytest.MonkeyPatch
) -> None:
    await Load(broker).run(links=2)
    lost, wave = await broker._pool.least_busy(), [message(n) for n in range(WAVE)]
    # Nothing of the wave is sent, so nothing of it can be confirmed before the connection is gone.
    written = asyncio.Event()
    monkeypatch.setattr(lost.connection, "write", lambda _: written.set())
    publishing = asyncio.create_task(broker.publish(wave))
    async with asyncio.timeout(20):
        await written.wait()
    lost.connection.abort("pulled out")
    assert await publishing == [Unknown("pulled out")] * WAVE
    await broker.probe("")
    assert await broker.publish(wave) == [CONFIRMED] * WAVE
    assert lost not in broker._pool._connections


async def test_any_connection_will_do_if_no_other_can_be_had(
    server: RabbitServer, broker: RabbitBroker, vhost: str
) -> None:
    await Load(broker).run(links=2)
    name = vhost.partition("?")[0].rpartition("/")[2]
    await asyncio.to_thread(server.ctl, "set_vhost_limits", "-p", name, '{"max-connections": 0}')
    broker._pool._connections[0].connection.abort("pulled out")
    await broker.probe("")
    assert await broker.publish([message(1)]) == [CONFIRMED]


async def test_publishes_that_wait_for_a_lost_connection_do_not_bring_it_back(
    server: RabbitServer, vhost: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    broker = RabbitBroker(vhost.partition("?")[0], exchange="topic")
    link = await broker._pool.least_busy()
    arrived: asyncio.Queue[tuple[str, str]] = asyncio.Queue()
    get_publisher = link._publisher

    async def arrive(name: tuple[str, str]) -> ConfirmChannel:
        arrived.put_nowait(name)
        return await get_publisher(name)

    monkeypatch.setattr(link, "_publisher", arrive)
    async with link._opening, asyncio.timeout(20):
        publishing = [asyncio.create_task(broker.publish([message(n)])) for n in range(5)]
        for _ in publishing:
            await arrived.get()
        link.connection.abort("pulled out")
    assert await asyncio.gather(*publishing) == [[Unknown("pulled out")]] * 5
    await broker.close()
    assert len(broker._pool) == 0
    assert await asyncio.to_thread(connections, server, vhost) == 0


async def test_idle_connections_are_given_back_all_but_one(
    server: RabbitServer, broker: RabbitBroker, vhost: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(connection_pool, "IDLE_SECONDS", 0.2)
    await Load(broker).run(links=3)
    async with asyncio.timeout(20):
        await broker._pool._tasks["close idle"]
    assert len(broker._pool) == 1
    assert await broker.publish([message(1)]) == [CONFIRMED]
    assert await asyncio.to_thread(connections, server, vhost) == 1


async def test_a_connection_that_comes_into_use_while_another_is_given_back_is_kept(
    broker: RabbitBroker, monkeypatch: pytest.MonkeyPatch
) -> None:
    await Load(broker).run(links=3)
    [_, second, third] = broker._pool._connections
    second.used_at = third.used_at = 0.0
    giving_back, given_back = second.connection.close, asyncio.Event()

    async def close() -> None:
        third.in_flight += 1
        await giving_back()
        given_back.set()

    monkeypatch.setattr(second.connection, "close", close)
    # A slow load would see its own connections closed, if they were closed so soon from the start.
    monkeypatch.setattr(connection_pool, "IDLE_SECONDS", 0.2)
    broker._pool._tasks.pop("close idle").cancel()
    broker._pool._start("close idle", broker._pool._close_idle)
    async with asyncio.timeout(20):
        await given_back.wait()
        assert third in broker._pool._connections
        assert not third.connection.lost
        third.in_flight -= 1
        await broker._pool._tasks["close idle"]
    assert len(broker._pool) == 1


async def test_closing_while_another_connection_is_opened_leaves_none(
    server: RabbitServer, vhost: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    broker = RabbitBroker(vhost)
    await broker.start()
    connecting = asyncio.Event()

    async def signalling_connect(settings: RabbitSettings) -> AmqpConnection:
        connecting.set()
        return await connect(settings)

    monkeypatch.setattr(connection_pool, "connect", signalling_connect)
    publishing = [asyncio.create_task(broker.publish([message(n) for n in range(WAVE)])) for _ in range(4)]
    async with asyncio.timeout(20):
        await connecting.wait()
    await broker.close()
    await asyncio.gather(*publishing)
    await broker.close()
    assert len(broker._pool) == 0
    assert await asyncio.to_thread(connections, server, vhost) == 0


async def test_an_error_while_another_connection_is_opened_is_logged_once(
    broker: RabbitBroker, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO", "outrider.rabbitmq")

    async def fail(_: RabbitSettings) -> AmqpConnection:
        raise InvalidSetting("the file of certificates is gone")

    monkeypatch.setattr(connection_pool, "connect", fail)
    load = Load(broker)
    await load.run(links=2, waves_max=20)
    assert load.results == [CONFIRMED] * 20 * WAVE
    assert [record.message for record in caplog.records] == ["another connection could not be opened"]


async def test_a_block_of_any_connection_is_an_outage(server: RabbitServer, broker: RabbitBroker) -> None:
    await Load(broker).run(links=2)
    await asyncio.to_thread(server.memory_alarm, True)
    try:
        assert await broker.publish([message(1)]) == [Unknown("blocked: low on memory")]
        with pytest.raises(Transient, match="blocked: low on memory"):
            await broker.probe("")
    finally:
        await asyncio.to_thread(server.memory_alarm, False)
    async with asyncio.timeout(20):
        while True:
            if await broker.publish([message(2)]) == [CONFIRMED]:
                break
            await asyncio.sleep(0.05)


@pytest.mark.parametrize("said", ["0", "-1", "", "abc", "1.5", "1_0", "+3", " 4", "65", "9" * 5_000])
def test_a_number_of_connections_that_cannot_work_is_rejected(said: str) -> None:
    with pytest.raises(InvalidSetting, match="connections_max cannot work; write a whole number from 1 to 64"):
        RabbitBroker(f"amqp://localhost?connections_max={quote(said)}")
    with pytest.raises(InvalidSetting, match="connections_max cannot work"):
        RabbitBroker("amqp://localhost", connections_max=said)
