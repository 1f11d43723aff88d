"""CloudEvents on real servers: staged, relayed, consumed by another client, and read by the CloudEvents library.

The code that reads is that of the documentation.
"""

from __future__ import annotations

import re
from collections.abc import AsyncIterator, Callable, Iterator
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any
from uuid import uuid4

import aio_pika
import pytest
from cloudevents.core.v1.event import CloudEvent
from confluent_kafka import Consumer, KafkaError, TopicPartition

from outrider.app import open_broker
from outrider.brokers.base import CONFIRMED, Confirmed, PublishResult, Rejected
from outrider.brokers.kafka import KafkaBroker
from outrider.brokers.rabbitmq import RabbitBroker
from outrider.checks import CheckResult
from outrider.event import SKIPPED_TYPE, Event, Message, OnDeadLetter
from outrider.testing.contracts.broker import BrokerBench, BrokerContract, OrderedBrokerContract, message
from outrider.testing.servers.kafka import create_topic, delete_topics
from tests.support.running_relay import SETTINGS, RunningRelay

SOURCE = "/shop/orders"
TOPICS = ("orders", "parcels")
OURS = f"cloudevents-{uuid4().hex[:8]}-"
"""How the names of our topics, exchanges and queues begin."""

Read = Callable[[Any], CloudEvent]


def documented(name: str) -> Read:
    """Return a function of the documentation."""
    page = (Path(__file__).parents[3] / "docs" / "reference" / "cloudevents.md").read_text()
    [code] = re.findall(r"^```python\n(.*?)^```", page, re.MULTILINE | re.DOTALL)
    names: dict[str, Any] = {}
    exec(code, names)
    found: Read = names[name]
    return found


from_kafka, from_rabbitmq = documented("from_kafka"), documented("from_rabbitmq")

TRACEPARENT = "00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01"

PLACED = Event(
    "order.placed",
    {"total": 12, "note": "naïve ☂"},
    aggregate_type="order",
    aggregate_id="A-☂",
    sequence="auto",
    created_at=datetime(2026, 1, 2, 3, 4, 5, 678_000, tzinfo=UTC),
    headers={
        **{"correlation_id": "cart-3", "traceparent": TRACEPARENT},
        **{"ce_id": "mine", "ce-id": "mine", "ce_tenant": "t", "ce-tenant": "t"},
    },
)


def check_placed(event: CloudEvent, event_id: str) -> None:
    """Compare everything the library has read with what was staged."""
    read = dict(event.get_attributes())
    assert read == {
        "specversion": "1.0",
        "id": event_id,
        "source": SOURCE,
        "type": "order.placed",
        "time": PLACED.created_at,
        "subject": "A-☂",
        "datacontenttype": "application/json",
        "partitionkey": "A-☂",
        "sequence": "0000000000000000001",
        "traceparent": TRACEPARENT,
        "correlationid": "cart-3",
        "tenant": "t",
    }
    assert event.get_data() == PLACED.payload


def check_plain(event: CloudEvent, event_id: str) -> None:
    """An event that has nothing but a type and a payload."""
    assert (event.get_id(), event.get_type(), event.get_subject()) == (event_id, "shop.opened", None)
    assert event.get_data() == {}


@pytest.fixture(scope="module")
def bootstrap(kafka: str) -> Iterator[str]:
    yield kafka
    delete_topics(kafka, OURS)


def make_topic(bootstrap: str) -> str:
    name = f"{OURS}{uuid4().hex[:12]}"
    create_topic(bootstrap, name, partitions=1)
    return name


def records(bootstrap: str, topic: str) -> list[Any]:
    """Read a topic of one partition to its end."""
    options = {"bootstrap.servers": bootstrap, "group.id": uuid4().hex, "log_level": 0, "fetch.wait.max.ms": 50}
    consumer: Any = Consumer({**options, "enable.auto.commit": False, "enable.partition.eof": True})
    consumer.assign([TopicPartition(topic, 0, 0)])
    found = []
    while (taken := consumer.consume(1, timeout=20)[0]).error() is None:
        found.append(taken)
    assert taken.error().code() == KafkaError._PARTITION_EOF
    consumer.close()
    return found


@pytest.mark.kafka
class TestKafka:
    async def test_what_is_staged_is_what_the_library_reads(self, bootstrap: str) -> None:
        topic = make_topic(bootstrap)
        broker = await open_broker(f"kafka://{bootstrap}?cloudevents={SOURCE}")
        async with RunningRelay(broker).open() as relay:
            ids = await relay.stage(replace(PLACED, topic=topic), Event("shop.opened", {}, topic=topic))
            await relay.until_sent(2)
        await broker.close()
        found = {from_kafka(record).get_id(): record for record in records(bootstrap, topic)}
        check_placed(from_kafka(found[ids[0]]), ids[0])
        check_plain(from_kafka(found[ids[1]]), ids[1])
        headers = dict(found[ids[0]].headers())
        assert headers["message_id"] == ids[0].encode()
        assert (headers["sequence"], headers["own_ce_id"], headers["ce-id"]) == (b"1", b"mine", b"mine")

    async def test_the_marker_of_a_skipped_event_is_an_event(self, bootstrap: str) -> None:
        topic = make_topic(bootstrap)
        broker = KafkaBroker(bootstrap, {"message.max.bytes": "5000"}, cloudevents=SOURCE)
        huge = replace(PLACED, topic=topic, payload="x" * 6000)
        async with RunningRelay(broker, replace(SETTINGS, on_dead_letter=OnDeadLetter.SKIP)).open() as relay:
            ids = await relay.stage(huge, replace(PLACED, topic=topic))
            await relay.until_sent(2, dead_letter=1)
        await broker.close()
        marker, follower = records(bootstrap, topic)
        assert dict(marker.headers())["skipped"] == ids[0].encode()
        event = from_kafka(marker)
        assert (event.get_type(), event.get_data()) == (SKIPPED_TYPE, None)
        assert event.get_extension("sequence") == "0000000000000000001"
        assert from_kafka(follower).get_extension("sequence") == "0000000000000000002"

    async def test_attributes_count_towards_the_size_of_a_message(self, bootstrap: str) -> None:
        topic = make_topic(bootstrap)
        long = "/" + "x" * 2000
        for source, result in ((None, Confirmed), (long, Rejected)):
            broker = KafkaBroker(bootstrap, {"message.max.bytes": "3000"}, cloudevents=source)
            [found] = await broker.publish([message(1, topic=topic, body=b"x" * 1500)])
            assert isinstance(found, result)
            await broker.close()
        [record] = records(bootstrap, topic)
        assert not [name for name, _ in record.headers() if name.startswith("ce_") or name == "content-type"]


class Renamed:
    """A Kafka broker whose topics have names of their own in each test."""

    def __init__(self, broker: KafkaBroker, names: dict[str, str]) -> None:
        self._broker, self._names = broker, names
        self.capabilities, self.start, self.close, self.probe = (
            broker.capabilities,
            broker.start,
            broker.close,
            broker.probe,
        )

    async def publish(self, messages: list[Message]) -> list[PublishResult]:
        return list(await self._broker.publish([self._renamed(message) for message in messages]))

    async def check(self, topics: list[str]) -> list[CheckResult]:
        return await self._broker.check([self._names[topic] for topic in topics])

    def destination(self, message: Message) -> str:
        return self._broker.destination(self._renamed(message))

    def _renamed(self, message: Message) -> Message:
        return message._replace(topic=self._names[message.topic])


@pytest.mark.kafka
class TestKafkaContract(OrderedBrokerContract):
    """The whole contract, and every message that is read back is an event."""

    @pytest.fixture
    async def bench(self, bootstrap: str) -> AsyncIterator[BrokerBench]:
        broker = KafkaBroker(bootstrap, cloudevents=SOURCE)
        await broker.start()
        names = {topic: make_topic(bootstrap) for topic in TOPICS}

        async def read(topic: str) -> list[Message]:
            return [_message(record) for record in records(bootstrap, names[topic])]

        def _message(record: Any) -> Message:
            event, headers = from_kafka(record), {name: value.decode() for name, value in record.headers()}
            assert (event.get_source(), event.get_type()) == (SOURCE, "order.changed")
            return Message(event.get_id(), record.topic(), record.key().decode(), None, record.value(), headers)

        yield BrokerBench(Renamed(broker, names), read)  # type: ignore[arg-type]
        await broker.close()


async def deliveries(url: str, queue: str) -> list[aio_pika.abc.AbstractIncomingMessage]:
    """Take what is in a queue now; it is put back when the connection closes."""
    found = []
    async with await aio_pika.connect(url) as connection, await connection.channel() as channel:
        source = await channel.get_queue(queue, ensure=False)
        while (taken := await source.get(fail=False)) is not None:
            found.append(taken)
    return found


@pytest.fixture
async def exchange(rabbitmq_url: str) -> AsyncIterator[str]:
    """The name of an exchange, with a queue for each topic; removed in the end, with what is in them."""
    name = f"{OURS}{uuid4().hex[:12]}"
    yield name
    async with await aio_pika.connect(rabbitmq_url) as connection, await connection.channel() as channel:
        for topic in TOPICS:
            await channel.queue_delete(f"{name}.{topic}")
        await channel.exchange_delete(name)


def with_queues(url: str, exchange: str) -> str:
    queues = ",".join(f"{exchange}.{topic}:{topic}" for topic in TOPICS)
    return f"{url}?exchange={exchange}&declare={queues}"


@pytest.mark.rabbitmq
class TestRabbitmq:
    async def test_what_is_staged_is_what_the_library_reads(self, rabbitmq_url: str, exchange: str) -> None:
        broker = await open_broker(f"{with_queues(rabbitmq_url, exchange)}&cloudevents={SOURCE}")
        await broker.start()
        async with RunningRelay(broker).open() as relay:
            ids = await relay.stage(replace(PLACED, topic="orders"), Event("shop.opened", {}, topic="orders"))
            await relay.until_sent(2)
        await broker.close()
        taken = await deliveries(rabbitmq_url, f"{exchange}.orders")
        found = {from_rabbitmq(delivery).get_id(): delivery for delivery in taken}
        check_placed(from_rabbitmq(found[ids[0]]), ids[0])
        check_plain(from_rabbitmq(found[ids[1]]), ids[1])
        headers = found[ids[0]].headers
        assert (headers["message_id"], headers["sequence"]) == (ids[0], "1")
        assert (headers["own_ce-id"], headers["ce_id"]) == ("mine", "mine")

    async def test_without_the_option_nothing_is_added(self, rabbitmq_url: str, exchange: str) -> None:
        broker = RabbitBroker(with_queues(rabbitmq_url, exchange))
        await broker.start()
        assert await broker.publish([sent := message(1)]) == [CONFIRMED]
        await broker.close()
        [delivery] = await deliveries(rabbitmq_url, f"{exchange}.orders")
        # The queue counts deliveries in a header of its own.
        assert delivery.headers.keys() - {"x-delivery-count"} == {*sent.headers, "key", "topic"}


@pytest.mark.rabbitmq
class TestRabbitmqContract(BrokerContract):
    """The whole contract, and every message that is read back is an event."""

    @pytest.fixture
    async def bench(self, rabbitmq_url: str, exchange: str) -> AsyncIterator[BrokerBench]:
        broker = RabbitBroker(with_queues(rabbitmq_url, exchange), cloudevents=SOURCE)
        await broker.start()

        async def read(topic: str) -> list[Message]:
            return [_message(taken, topic) for taken in await deliveries(rabbitmq_url, f"{exchange}.{topic}")]

        def _message(taken: aio_pika.abc.AbstractIncomingMessage, topic: str) -> Message:
            event, headers = from_rabbitmq(taken), {name: str(value) for name, value in taken.headers.items()}
            assert (event.get_source(), event.get_type()) == (SOURCE, "order.changed")
            return Message(event.get_id(), topic, headers["key"], None, taken.body, headers)

        yield BrokerBench(broker, read)
        await broker.close()
