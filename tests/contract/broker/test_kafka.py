"""The broker contract on Kafka, and what Kafka adds to it: its errors as publish results."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import AsyncIterator, Iterator
from typing import Any

import pytest

from outrider.app import open_broker
from outrider.brokers.base import CONFIRMED, Confirmed, Nacked, PublishResult, Rejected, Unknown
from outrider.brokers.kafka import KafkaBroker
from outrider.brokers.kafka.errors import Failure, nack_after_failures, publish_result
from outrider.brokers.kafka.producer import FEW_MESSAGES, POLL_SECONDS, Producer
from outrider.checks import CheckResult
from outrider.errors import InvalidSetting, Transient, Unreachable, UsageError
from outrider.event import Message
from outrider.testing.contracts.broker import BrokerBench, OrderedBrokerContract, message
from outrider.testing.servers.kafka import create_topic, delete_topics
from tests.support.kafka_client import OURS, make_topic, read

pytestmark = pytest.mark.kafka


@pytest.fixture(scope="module")
def bootstrap(kafka: str) -> Iterator[str]:
    """The shared Kafka, which may be somebody's own: our topics do not stay."""
    yield kafka
    delete_topics(kafka, OURS)


@pytest.fixture
async def broker(bootstrap: str) -> AsyncIterator[KafkaBroker]:
    broker = KafkaBroker(bootstrap)
    await broker.start()
    yield broker
    await broker.close()


@pytest.fixture
def topic(bootstrap: str) -> str:
    return make_topic(bootstrap)


class Renamed:
    """A Kafka broker whose topics have names of their own in each test."""

    def __init__(self, broker: KafkaBroker, names: dict[str, str]) -> None:
        self._broker, self._names = broker, names
        self.capabilities = broker.capabilities
        self.start, self.close, self.probe = broker.start, broker.close, broker.probe

    async def publish(self, messages: list[Message]) -> list[PublishResult]:
        renamed = [message._replace(topic=self._names[message.topic]) for message in messages]
        return list(await self._broker.publish(renamed))

    async def check(self, topics: list[str]) -> list[CheckResult]:
        return await self._broker.check([self._names[topic] for topic in topics])

    def destination(self, message: Message) -> str:
        return self._broker.destination(message._replace(topic=self._names[message.topic]))


class TestKafkaBroker(OrderedBrokerContract):
    @pytest.fixture
    def bench(self, bootstrap: str, broker: KafkaBroker) -> BrokerBench:
        names = {name: make_topic(bootstrap) for name in ("orders", "parcels")}

        async def read_back(topic: str) -> list[Message]:
            return read(bootstrap, names[topic])

        return BrokerBench(Renamed(broker, names), read_back)  # type: ignore[arg-type]


async def test_a_url_opens_it_with_settings(bootstrap: str, topic: str) -> None:
    broker = await open_broker(f"kafka://{bootstrap}?compression.type=zstd&message.max.bytes=2000")
    await broker.start()
    assert broker.capabilities.message_bytes_max == 2000
    assert await broker.publish([message(1, topic=topic)]) == [CONFIRMED]
    await broker.close()
    assert len(read(bootstrap, topic)) == 1


@pytest.mark.parametrize(
    "query",
    ["acks=1", "request.required.acks=0", "enable.idempotence=false", "message.timeout.ms=1000", "transactional.id=a"],
)
async def test_settings_that_would_break_a_guarantee_are_rejected(query: str) -> None:
    with pytest.raises(InvalidSetting, match=r"cannot (work|be set)"):
        await open_broker(f"kafka://localhost:9092?{query}")


@pytest.mark.parametrize("url", ["kafka://", "kafka:///orders", "kafka://me:secret@localhost:9092"])
async def test_a_url_that_names_no_server_is_rejected_without_repeating_it(url: str) -> None:
    with pytest.raises(UsageError, match="kafka://host:port") as rejected:
        await open_broker(url)
    assert "secret" not in str(rejected.value)


async def test_a_setting_that_the_driver_does_not_know_is_named() -> None:
    with pytest.raises(InvalidSetting, match=r"no\.such\.thing"):
        await KafkaBroker("localhost:9092", {"no.such.thing": "1"}).start()


async def test_a_server_that_does_not_answer_is_named_at_the_start(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("outrider.brokers.kafka.broker.START_SECONDS_MAX", 0.3)
    broker = KafkaBroker("127.0.0.1:9")
    with pytest.raises(Unreachable, match=r"127\.0\.0\.1:9 does not answer .*refused"):
        await broker.start()
    [result] = await broker.publish([message(1)])
    assert isinstance(result, Unknown)
    assert result.destination == ""
    with pytest.raises(Transient):
        await broker.probe("")
    await broker.close()


async def test_without_the_driver_the_extra_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "confluent_kafka", None)
    with pytest.raises(UsageError, match=r"pip install 'outrider\[kafka\]'"):
        await KafkaBroker("localhost:9092").start()


async def test_a_missing_topic_is_rejected_until_it_is_made(bootstrap: str, broker: KafkaBroker, topic: str) -> None:
    missing = f"{OURS}missing"
    sent = [message(1, topic=missing), message(2, topic=topic), message(3, topic=missing)]
    first, good, second = await broker.publish(sent)
    assert isinstance(first, Rejected)
    assert f"make the topic (outrider doctor --topic {missing} shows how)" in first.error
    assert first.error.endswith(f"then: outrider dead-letters replay --topic {missing}")
    assert good == CONFIRMED
    assert not isinstance(second, Confirmed)
    with pytest.raises(Transient, match=missing):
        await broker.probe(missing)
    create_topic(bootstrap, missing)
    assert await broker.publish(sent) == [CONFIRMED] * 3
    assert [m.headers["n"] for m in read(bootstrap, missing)] == ["1", "3"]


async def test_a_topic_that_cannot_be_is_rejected(broker: KafkaBroker) -> None:
    [result] = await broker.publish([message(1, topic="not a topic!")])
    assert isinstance(result, Rejected)


async def test_a_message_too_large_for_kafka_is_rejected_only_when_it_was_sent_alone(
    bootstrap: str, broker: KafkaBroker
) -> None:
    small = make_topic(bootstrap, partitions=1, max_message_bytes="2000")
    noise = os.urandom(8000)
    large = message(2, topic=small, body=noise)
    together = await broker.publish([message(1, topic=small), large, message(3, topic=small)])
    assert {type(result) for result in together} <= {Confirmed, Unknown}
    [result] = await broker.publish([large])
    assert isinstance(result, Rejected)
    assert await broker.publish([message(4, topic=small)]) == [CONFIRMED]
    assert "3" not in [m.headers["n"] for m in read(bootstrap, small)]


@pytest.mark.parametrize("count", [FEW_MESSAGES // 2, FEW_MESSAGES * 4], ids=["few", "many"])
async def test_nothing_goes_out_behind_a_message_that_kafka_rejects(bootstrap: str, count: int) -> None:
    """One message per batch, so the later ones are on their way already when Kafka rejects the second."""
    small = make_topic(bootstrap, partitions=1, max_message_bytes="5000")
    broker = KafkaBroker(bootstrap, {"batch.num.messages": "1", "compression.type": "none"})
    await broker.start()
    sent = [message(n, topic=small, body=b"x" * (9000 if n == 2 else 10)) for n in range(1, count)]
    results = await broker.publish(sent)
    assert results[0] == CONFIRMED
    assert not any(isinstance(result, Confirmed) for result in results[1:])
    assert await broker.publish([message(99, topic=small)]) == [CONFIRMED]
    await broker.close()
    assert [m.headers["n"] for m in read(bootstrap, small)] == ["1", "99"]


class HaltingProducer:
    """A producer that is given messages so slowly that its session ends in the middle of a call."""

    def __init__(self, session: Producer, after: int) -> None:
        self._session, self._producer, self._left = session, session._producer, after

    def __getattr__(self, name: str) -> Any:
        return getattr(self._producer, name)

    def produce(self, *args: Any, **options: Any) -> None:
        self._left -= 1
        if self._left == 0:
            self._session._unattended.set()
            while self._session._producer is not None:
                time.sleep(POLL_SECONDS)
        self._producer.produce(*args, **options)


async def test_a_confirmed_message_stays_so_when_the_session_ends_before_all_are_handed_over(bootstrap: str) -> None:
    small = make_topic(bootstrap, partitions=1, max_message_bytes="5000")
    broker = KafkaBroker(bootstrap, {"batch.num.messages": "1", "compression.type": "none"})
    await broker.start()
    session = broker._current()
    session._producer = HaltingProducer(session, FEW_MESSAGES * 2)
    sent = [message(n, topic=small, body=b"x" * (9000 if n == 2 else 10)) for n in range(1, FEW_MESSAGES * 4)]
    results = await broker.publish(sent)
    assert results[0] == CONFIRMED
    assert {result.destination for result in results[1:] if isinstance(result, Unknown)} == {small}
    assert not any(isinstance(result, Confirmed) for result in results[1:])
    await broker.close()
    assert [m.headers["n"] for m in read(bootstrap, small)] == ["1"]


async def test_more_than_the_memory_holds_goes_out_bit_by_bit(bootstrap: str, topic: str) -> None:
    broker = KafkaBroker(bootstrap, {"queue.buffering.max.messages": "50"})
    await broker.start()
    sent = [message(n, topic=topic, key=f"k{n % 5}") for n in range(1000)]
    assert await broker.publish(sent) == [CONFIRMED] * 1000
    await broker.close()
    found = read(bootstrap, topic)
    for key in ("k0", "k4"):
        assert [m.message_id for m in found if m.key == key] == [m.message_id for m in sent if m.key == key]


async def test_a_header_that_cannot_be_encoded_is_rejected(broker: KafkaBroker, topic: str) -> None:
    odd = message(1, topic=topic)._replace(headers={"odd": "\ud800"})
    first, second, other = await broker.publish([odd, message(2, topic=topic), message(3, topic=topic, key="B")])
    assert isinstance(first, Rejected)
    assert isinstance(second, Nacked)
    assert other == CONFIRMED


def test_a_topic_that_worked_before_is_down_rather_than_wrong() -> None:
    gone = Failure("UNKNOWN_TOPIC_OR_PART", "unknown")
    assert publish_result(gone, "orders", isolated=True, proven=True) == Unknown(
        "unknown (UNKNOWN_TOPIC_OR_PART)", "orders"
    )
    assert isinstance(publish_result(gone, "orders", isolated=True, proven=False), Rejected)


def test_an_error_of_the_connection_names_no_topic() -> None:
    lost = Failure("_TRANSPORT", "lost")
    assert publish_result(lost, "orders", isolated=True, proven=True) == Unknown("lost (_TRANSPORT)", "")


def test_a_message_after_a_rejected_one_of_its_stream_is_nacked() -> None:
    results = nack_after_failures([message(1), message(2), message(3, key="B")], [Rejected("no"), CONFIRMED, CONFIRMED])
    assert results == [Rejected("no"), Nacked("an earlier message of its stream failed"), CONFIRMED]
