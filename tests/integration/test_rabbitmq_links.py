"""RabbitMQ through several connections: when they are opened, and that nobody depends on them."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator
from uuid import uuid4

import pytest

from outrider.brokers.rabbitmq import RabbitBroker
from outrider.errors import Transient
from outrider.outcome import CONFIRMED, Unresolved, Verdict
from outrider.testing.broker_contract import message
from outrider.testing.servers.rabbitmq import RabbitServer
from tests.integration.rabbitmq import contents

pytestmark = pytest.mark.rabbitmq

WAVE = 400
WAVES_MAX = 200


@pytest.fixture(scope="module")
def server() -> Iterator[RabbitServer]:
    """A private server that tests may break, if they mend it again."""
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
        self.verdicts: list[Verdict] = []

    async def run(self, *, links: int, waves_max: int = WAVES_MAX) -> None:
        """Publish until the broker has so many links, or for so many waves."""
        waves = iter(range(waves_max))

        async def work() -> None:
            for number in waves:
                if self.links >= links:
                    return
                wave = [message(number * WAVE + n) for n in range(WAVE)]
                self.sent += [m.message_id for m in wave]
                self.verdicts += await self.broker.publish(wave)

        await asyncio.gather(*(work() for _ in range(4)))

    @property
    def links(self) -> int:
        return 1 + len(self.broker._links._others)


def connections(server: RabbitServer, vhost: str) -> int:
    """Count what the server has, by its own word."""
    name = vhost.partition("?")[0].rpartition("/")[2]
    return server.ctl("list_connections", "--silent", "vhost").split().count(name)


async def test_much_under_way_is_spread_over_as_many_connections_as_allowed(
    server: RabbitServer, broker: RabbitBroker, vhost: str
) -> None:
    load = Load(broker)
    await load.run(links=3)
    assert load.links == 3
    await load.run(links=4, waves_max=20)
    assert await asyncio.to_thread(connections, server, vhost) == 3
    assert load.verdicts == [CONFIRMED] * len(load.sent)
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
    assert load.verdicts == [CONFIRMED] * 20 * WAVE
    assert load.links == 1
    assert [record.message for record in caplog.records] == ["no further connection could be had"]
    await broker.close()


async def test_a_further_connection_that_is_lost_is_in_doubt_and_not_missed(
    broker: RabbitBroker, monkeypatch: pytest.MonkeyPatch
) -> None:
    load = Load(broker)
    await load.run(links=2)
    [other, *_] = broker._links._others
    wire, written = await other.wire(), asyncio.Event()
    # Nothing of the wave is sent, so nothing of it can be confirmed before the connection is gone.
    monkeypatch.setattr(wire, "write", lambda _: written.set())
    # The first has more to do, so the next goes through the other.
    broker._links.first.under_way += 10 * WAVE
    publishing = asyncio.create_task(broker.publish([message(n) for n in range(WAVE)]))
    async with asyncio.timeout(20):
        await written.wait()
    wire.abort("pulled out")
    broker._links.first.under_way -= 10 * WAVE
    assert await publishing == [Unresolved("pulled out")] * WAVE
    await broker.probe("")
    assert await broker.publish([message(n) for n in range(WAVE)]) == [CONFIRMED] * WAVE
    assert other not in broker._links._others


async def test_a_block_of_any_connection_is_an_outage(server: RabbitServer, broker: RabbitBroker) -> None:
    load = Load(broker)
    await load.run(links=2)
    await asyncio.to_thread(server.memory_alarm, True)
    try:
        broker._links.first.under_way += 10 * WAVE
        assert await broker.publish([message(1)]) == [Unresolved("blocked: low on memory")]
        with pytest.raises(Transient, match="blocked: low on memory"):
            await broker.probe("")
    finally:
        await asyncio.to_thread(server.memory_alarm, False)
    broker._links.first.under_way -= 10 * WAVE
    async with asyncio.timeout(20):
        while True:
            if await broker.publish([message(2)]) == [CONFIRMED]:
                break
            await asyncio.sleep(0.05)
    await broker.probe("")
