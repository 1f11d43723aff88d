"""The broker contract on RabbitMQ. Another client, aio-pika, reads the published messages back."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import cast
from uuid import uuid4

import aio_pika
import pytest
from pamqp import commands, frame, header

from outrider.brokers.rabbitmq import RabbitBroker
from outrider.brokers.rabbitmq.frames import Unsendable, encode
from outrider.event import Message
from outrider.testing.contracts.broker import BrokerBench, BrokerContract, message
from tests.support.rabbitmq_client import read_back

TOPICS = ("orders", "parcels")


@pytest.mark.rabbitmq
class TestRabbitBroker(BrokerContract):
    @pytest.fixture
    async def bench(self, rabbitmq_url: str) -> AsyncIterator[BrokerBench]:
        # An exchange of its own keeps a test apart from the others.
        name = f"test_{uuid4().hex[:12]}"
        queues = {topic: f"{name}.{topic}" for topic in TOPICS}
        bindings = tuple((queue, topic) for topic, queue in queues.items())
        broker = RabbitBroker(rabbitmq_url, exchange=name, declare=True, queues=bindings)
        await broker.start()
        reader = await aio_pika.connect(rabbitmq_url)

        async def read(topic: str) -> list[Message]:
            return await read_back(reader, queues[topic], topic)

        yield BrokerBench(broker, read)
        await broker.close()
        channel = await reader.channel()
        for queue in queues.values():
            await channel.queue_delete(queue)
        await channel.exchange_delete(name)
        await reader.close()


class TestFrames:
    def test_they_are_what_pamqp_reads(self) -> None:
        sent = message(1)
        headers = {**sent.headers, "created_at": "2026-01-02T03:04:05+00:00", "correlation_id": "c"}
        method, content, body = unmarshal(encode(sent._replace(headers=headers), 7, "shop", "orders", 4096))
        assert isinstance(method, commands.Basic.Publish)
        assert (method.exchange, method.routing_key, method.mandatory) == ("shop", "orders", True)
        properties = cast(header.ContentHeader, content).properties
        assert properties.headers == {**headers, "key": "A", "topic": "orders"}
        assert (properties.message_id, properties.correlation_id) == (sent.message_id, "c")
        assert (properties.message_type, properties.content_type) == ("order.changed", "application/json")
        assert properties.delivery_mode == 2
        assert properties.timestamp is not None
        assert properties.timestamp.isoformat() == headers["created_at"]
        assert getattr(body, "value", None) == sent.body

    @pytest.mark.parametrize("name", ["a", "n" * 127, "n" * 128, "naïve"])
    @pytest.mark.parametrize("value", ["", "v" * 127, "v" * 128, "v" * 3000, "☂", "☂" * 127, "\0\n"])
    def test_headers_of_every_length_and_alphabet_are_read_back(self, name: str, value: str) -> None:
        headers = {"key": "A", name: value, "event_type": "order.placed"}
        _, content, _ = unmarshal(encode(message(1)._replace(headers=headers), 1, "", "k", 8192))
        assert cast(header.ContentHeader, content).properties.headers == {**headers, "topic": message(1).topic}

    @pytest.mark.parametrize("fraction", ["", ".000001", ".999999"])
    def test_the_timestamp_is_the_second_in_which_the_event_was_made(self, fraction: str) -> None:
        for second in ("2026-01-02T03:04:05", "2026-01-02T03:04:06", "2099-12-31T23:59:59"):
            headers = {"created_at": f"{second}{fraction}+00:00"}
            _, content, _ = unmarshal(encode(message(1)._replace(headers=headers), 1, "", "k", 4096))
            timestamp = cast(header.ContentHeader, content).properties.timestamp
            assert timestamp is not None
            assert timestamp.isoformat() == f"{second}+00:00"

    def test_a_body_is_split_where_a_frame_is_full(self) -> None:
        body = bytes(range(256)) * 50
        frames = unmarshal(encode(message(1, body=body), 1, "", "orders", 4096))
        pieces = [getattr(piece, "value", b"") for piece in frames[2:]]
        assert [len(piece) for piece in pieces] == [4088, 4088, 4088, 536]
        assert b"".join(pieces) == body

    def test_what_amqp_has_no_room_for_is_said(self) -> None:
        with pytest.raises(Unsendable, match="routing key has 300 bytes"):
            encode(message(1), 1, "", "k" * 300, 4096)
        with pytest.raises(Unsendable, match="headers take"):
            encode(message(1)._replace(headers={"a": "x" * 5000}), 1, "", "k", 4096)
        with pytest.raises(Unsendable, match="Unicode"):
            encode(message(1)._replace(headers={"a": "\ud800"}), 1, "", "k", 4096)

    def test_a_property_that_is_too_long_stays_a_header(self) -> None:
        headers = {"event_type": "t" * 300, "created_at": "yesterday"}
        _, content, _ = unmarshal(encode(message(1)._replace(headers=headers), 1, "", "k", 4096))
        properties = cast(header.ContentHeader, content).properties
        assert (properties.message_type, properties.timestamp) == (None, None)
        assert properties.headers == {**headers, "key": "A", "topic": "orders"}

    def test_the_topic_is_a_header_and_an_event_cannot_say_otherwise(self) -> None:
        sent = message(1, topic="orders")
        headers = {**sent.headers, "topic": "elsewhere", "key": "B"}
        _, content, _ = unmarshal(encode(sent._replace(headers=headers), 1, "shop", "some.key", 4096))
        table = cast(header.ContentHeader, content).properties.headers
        assert table == {**headers, "topic": "orders"}


def unmarshal(data: bytes) -> list[frame.FrameTypes]:
    """Return the frames as pamqp understands them."""
    frames = []
    while data:
        size, _, found = frame.unmarshal(data)
        frames.append(found)
        data = data[size:]
    return frames
