"""The queue of a consumer on a real RabbitMQ: declared, accepted as it is, rejected, or warned about."""

from __future__ import annotations

import asyncio
import logging
import struct
from collections.abc import AsyncIterator, Iterator
from uuid import uuid4

import pytest

from outrider.app import open_source
from outrider.brokers.base import CONFIRMED
from outrider.brokers.rabbitmq import RabbitBroker, RabbitSettings, RabbitSource
from outrider.brokers.rabbitmq.connection import connect
from outrider.brokers.rabbitmq.frames import METHOD
from outrider.brokers.rabbitmq.queues import Queue, exists, inspect
from outrider.errors import UsageError
from outrider.event import OnDeadLetter
from outrider.inbox.router import Route, Routes
from outrider.inbox.settings import ConsumerSettings
from outrider.testing.contracts import message
from outrider.testing.contracts.source import numbers
from outrider.testing.servers.rabbitmq import RabbitServer
from tests.support.rabbitmq_client import channel_to
from tests.support.rabbitmq_source import (
    QUORUM,
    SINGLE,
    loss,
    nobody,
    publish,
    pull_out,
    reading,
    source_of,
)

pytestmark = pytest.mark.rabbitmq


@pytest.fixture(scope="module")
def server() -> Iterator[RabbitServer]:
    """A private server that tests may break and must repair."""
    with RabbitServer() as server:
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


class TestQueues:
    async def test_a_deleted_queue_is_declared_again_if_configured(
        self, server: RabbitServer, broker: RabbitBroker, name: str
    ) -> None:
        async with reading(source_of(server, name)) as reader, channel_to(server.url) as channel:
            await channel.queue_delete(name)
            assert "the queue was deleted" in await loss(reader)
            await reader.source.start(reader.on_revoked)
            await publish(broker, 1)
            assert numbers(await reader.until(1)) == [1]

    async def test_a_deleted_queue_is_a_usage_error_otherwise(self, server: RabbitServer, name: str) -> None:
        async with channel_to(server.url) as channel:
            await channel.declare_queue(name, durable=True, arguments=QUORUM)
            async with reading(source_of(server, name, declare=False)) as reader:
                await channel.queue_delete(name)
                assert "the queue was deleted" in await loss(reader)
                with pytest.raises(UsageError, match=rf"has no queue '{name}'.*declare"):
                    await reader.source.start(reader.on_revoked)

    async def test_acks_still_count_when_only_the_consumer_was_cancelled(
        self, server: RabbitServer, broker: RabbitBroker, name: str
    ) -> None:
        """The server cancels a consumer whose queue moves; the channel stays open for acks."""
        async with reading(source_of(server, name)) as reader:
            await publish(broker, *range(10))
            await reader.until(10)
            assert isinstance(reader.source, RabbitSource)
            assert reader.source._subscription is not None
            reader.source._subscription.take(METHOD, b"\0" * 7 + struct.pack(">HH", 60, 30))
            assert "cancelled" in await loss(reader)
            reader.ack(reader.received[:6])
            await reader.source.start(reader.on_revoked)
            assert numbers(await reader.until(14)) == list(range(6, 10))

    async def test_a_queue_of_ours_has_one_active_consumer_and_is_replicated(
        self, server: RabbitServer, name: str
    ) -> None:
        async with reading(source_of(server, name, exclusive=True)):
            wire = await connect(RabbitSettings.from_url(server.url))
            queue = await inspect(wire, name)
            await wire.close()
        assert queue.arguments == {**QUORUM, **SINGLE}
        assert (queue.mismatch, queue.unknown, queue.drops) == ("", "", False)

    async def test_with_ordering_a_queue_without_a_single_active_consumer_is_rejected(
        self, server: RabbitServer, name: str
    ) -> None:
        async with channel_to(server.url) as channel:
            await channel.declare_queue(name, durable=True, arguments={**QUORUM, "x-max-length": 9})
            with pytest.raises(
                UsageError, match=r"inequivalent arg 'x-single-active.*empty it first.*declare it again"
            ):
                await source_of(server, name, exclusive=True).start(nobody)
            async with reading(source_of(server, name)):
                pass

    @pytest.mark.parametrize(("on_dead_letter", "level"), [("block", "WARNING"), ("skip", "INFO")])
    async def test_a_consumer_that_keeps_the_order_of_a_key_warns_at_the_start_about_a_queue_that_may_lose_it(
        self, server: RabbitServer, name: str, on_dead_letter: str, level: str, caplog: pytest.LogCaptureFixture
    ) -> None:
        async with channel_to(server.url) as channel:
            await channel.declare_queue(name, durable=True, arguments=QUORUM)
            await channel.declare_queue(f"{name}.single", durable=True, arguments={**QUORUM, **SINGLE})
        for queue in (name, f"{name}.single"):
            settings = ConsumerSettings(on_dead_letter=OnDeadLetter(on_dead_letter))
            source = open_source(server.url, Routes(queue, settings, {("orders", "order.placed"): Route(print)}))
            assert isinstance(source, RabbitSource)
            with caplog.at_level(logging.INFO, "outrider.rabbitmq"):
                async with reading(source) as reader:
                    pull_out(reader)
                    await source.start(reader.on_revoked)
        [record] = [found for found in caplog.records if found.getMessage().endswith("at once, out of order")]
        assert (record.levelname, vars(record)["queue"]) == (level, name)
        assert "x-single-active-consumer=true" in vars(record)["remedy"]

    async def test_with_ordering_a_queue_may_have_any_other_arguments(self, server: RabbitServer, name: str) -> None:
        arguments = {**QUORUM, **SINGLE, "x-dead-letter-exchange": "it's", "x-delivery-limit": 3, "x-max-length": 999}
        async with channel_to(server.url) as channel:
            await channel.declare_queue(name, durable=True, arguments=arguments)
            await channel.declare_queue(f"{name}.classic", durable=True, arguments=SINGLE)
        for queue in (name, f"{name}.classic"):
            for declare in (True, False):
                async with reading(source_of(server, name, queue=queue, exclusive=True, declare=declare)):
                    pass

    async def test_with_ordering_a_server_that_hides_the_queues_arguments_is_rejected(
        self, server: RabbitServer, name: str
    ) -> None:
        async with channel_to(server.url) as channel:
            await channel.declare_queue(name, durable=True, arguments={**QUORUM, **SINGLE})
        await asyncio.to_thread(server.ctl, "add_user", name, "secret")
        await asyncio.to_thread(server.ctl, "set_permissions", name, "^$", "^$", ".*")
        url = f"amqp://{name}:secret@127.0.0.1:{server.port}/"
        with pytest.raises(UsageError, match=r"does not report it \(ACCESS_REFUSED.*grant the right to configure"):
            await RabbitSource(url, name, ["orders"], exclusive=True).start(nobody)
        async with reading(RabbitSource(url, name, ["orders"])):
            pass
        await asyncio.to_thread(server.ctl, "set_permissions", name, ".*", ".*", "^$")
        with pytest.raises(
            UsageError, match=r"does not let the queue .* be consumed \(ACCESS_REFUSED.*grant the rights"
        ):
            await RabbitSource(url, name, ["orders"]).start(nobody)

    async def test_a_stream_is_rejected(self, server: RabbitServer, name: str) -> None:
        async with channel_to(server.url) as channel:
            await channel.declare_queue(name, durable=True, arguments={"x-queue-type": "stream"})
        with pytest.raises(UsageError, match="is a stream"):
            await source_of(server, name).start(nobody)

    async def test_an_exclusive_queue_of_another_connection_is_rejected(self, server: RabbitServer, name: str) -> None:
        async with channel_to(server.url) as channel:
            await channel.declare_queue(name, exclusive=True)
            with pytest.raises(UsageError, match="RESOURCE_LOCKED"):
                await source_of(server, name, declare=False).start(nobody)

    async def test_looking_at_a_queue_never_makes_one(self, server: RabbitServer, name: str) -> None:
        wire = await connect(RabbitSettings.from_url(server.url))
        for guess in (None, Queue(name), Queue(name, arguments=QUORUM)):
            queue = await inspect(wire, name, guess)
            assert "invalid arg 'x-max-age'" in queue.unknown
        assert not await exists(wire, name)
        await wire.close()

    async def test_a_known_queue_is_inspected_without_a_rejection(self, server: RabbitServer, name: str) -> None:
        """The server logs every rejection as an error."""

        def rejections() -> int:
            return (server.home / "log").read_text(encoding="utf-8", errors="replace").count("inequivalent arg")

        async with channel_to(server.url) as channel:
            await channel.declare_queue(f"{name}.foreign", durable=True, arguments={"x-max-length": 9})
        for queue, first in ((name, 0), (f"{name}.foreign", 3)):
            before = rejections()
            async with reading(source_of(server, name, queue=queue)) as reader:
                assert rejections() == before + first
                pull_out(reader)
                await reader.source.start(reader.on_revoked)
                assert rejections() == before + first

    async def test_a_relay_may_name_a_queue_that_its_consumer_has_made(self, server: RabbitServer, name: str) -> None:
        async with reading(source_of(server, name, exclusive=True)) as reader:
            broker = RabbitBroker(server.url, exchange=name, declare=True, queues=((name, "more.*"),))
            await broker.start()
            [sent] = [message(1, topic="more.orders", key="A")]
            assert await broker.publish([sent]) == [CONFIRMED]
            assert [delivery.topic for delivery in await reader.until(1)] == ["more.orders"]
            await broker.close()

    async def test_a_queue_that_loses_messages_by_counting_is_warned_about(
        self, server: RabbitServer, name: str, caplog: pytest.LogCaptureFixture
    ) -> None:
        async with channel_to(server.url) as channel:
            await channel.declare_queue(name, durable=True, arguments={**QUORUM, "x-delivery-limit": 3})
            kept = {**QUORUM, "x-delivery-limit": 3, "x-dead-letter-exchange": "dlx"}
            await channel.declare_queue(f"{name}.kept", durable=True, arguments=kept)
        for queue in (name, f"{name}.kept"):
            async with reading(source_of(server, name, queue=queue)):
                pass
        [record] = [
            found
            for found in caplog.records
            if found.getMessage() == "a queue drops messages that are delivered too often"
        ]
        assert (vars(record)["queue"], vars(record)["delivery_limit"]) == (name, 3)

    async def test_a_message_that_keeps_coming_is_warned_about_once_per_connection(
        self, server: RabbitServer, broker: RabbitBroker, name: str, caplog: pytest.LogCaptureFixture
    ) -> None:
        async with reading(source_of(server, name)) as reader:
            sent = await publish(broker, 1, 2)
            for times in range(1, 7):
                await reader.until(2 * times)
                await reader.source.close()
                assert len(caplog.records) == (times > 5)
                await reader.source.start(reader.on_revoked)
        [record] = caplog.records
        assert record.getMessage() == "a message is delivered again and again"
        assert (vars(record)["message_id"], vars(record)["deliveries"]) == (sent[0].message_id, 5)
