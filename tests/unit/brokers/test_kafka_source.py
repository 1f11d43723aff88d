"""Kafka as a source, without a server: settings, and what a member keeps."""

from __future__ import annotations

import logging
import sys
from itertools import count
from typing import Any

import confluent_kafka
import pytest

from outrider.brokers.kafka import KafkaSource, settings
from outrider.brokers.kafka.group_member import Assignment, Prefetched
from outrider.brokers.kafka.settings import CONSUMER_ONLY, PRODUCER_ONLY
from outrider.errors import InvalidSetting, Transient, Unreachable, UsageError
from outrider.event import Delivery

VALUES = {
    "acks": "all",
    "request.required.acks": "all",
    "compression.codec": "lz4",
    "compression.level": "1",
    "compression.type": "lz4",
    "delivery.report.only.error": "false",
    "enable.gapless.guarantee": "true",
    "enable.idempotence": "true",
    "partitioner": "murmur2",
    "produce.offset.report": "true",
    "queuing.strategy": "fifo",
    "transactional.id": "a",
    "auto.commit.enable": "false",
    "auto.offset.reset": "earliest",
    "check.crcs": "false",
    "enable.auto.commit": "false",
    "enable.auto.offset.store": "false",
    "enable.partition.eof": "false",
    "group.id": "g",
    "group.instance.id": "i",
    "group.protocol": "classic",
    "group.protocol.type": "consumer",
    "group.remote.assignor": "uniform",
    "isolation.level": "read_committed",
    "offset.store.method": "broker",
    "offset.store.path": ".",
    "partition.assignment.strategy": "range",
}
"""Values that librdkafka takes, where 1000 is none."""
OURS_ALONE = {"message.max.bytes", "topic.metadata.propagation.max.ms"}
"""Settings that librdkafka shares, and we leave to the producer."""


async def ignore(partitions: frozenset[str]) -> None:
    """Nothing is under way."""


def test_one_url_serves_producer_and_consumer() -> None:
    url = "kafka://a:9092?linger.ms=5&session.timeout.ms=6000&sasl.username=me&client.id=shop"
    bootstrap, given = settings.parse(url)
    producer = settings.complete(bootstrap, given)
    consumer = settings.complete_consumer(bootstrap, "billing", given)
    assert (producer["linger.ms"], consumer["session.timeout.ms"]) == ("5", "6000")
    for side in (producer, consumer):
        assert (side["bootstrap.servers"], side["sasl.username"], side["client.id"]) == ("a:9092", "me", "shop")
    assert not producer.keys() & CONSUMER_ONLY
    assert not consumer.keys() & PRODUCER_ONLY
    assert consumer["group.id"] == "billing"
    assert KafkaSource.from_url(url, "billing", ["orders"]).topics == ["orders"]


@pytest.mark.parametrize(
    ("make", "base", "name"),
    [(confluent_kafka.Consumer, {"group.id": "g"}, name) for name in sorted(PRODUCER_ONLY - OURS_ALONE)]
    + [(confluent_kafka.Producer, {}, name) for name in sorted(CONSUMER_ONLY)],
)
def test_what_we_leave_out_librdkafka_would_ignore(
    make: Any, base: dict[str, str], name: str, caplog: pytest.LogCaptureFixture
) -> None:
    log = logging.getLogger("test.librdkafka")
    with caplog.at_level(logging.DEBUG, log.name):
        make({**base, name: VALUES.get(name, "1000")}, logger=log).poll(0)
    said = " ".join(record.getMessage() for record in caplog.records)
    # An alias is reported under the other name.
    assert f"is a {'producer' if base else 'consumer'} property and will be ignored" in said


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("enable.auto.commit", "false"),
        ("enable.auto.offset.store", "true"),
        ("isolation.level", "read_uncommitted"),
        ("partition.assignment.strategy", "range"),
        ("group.protocol", "consumer"),
        ("group.id", "mine"),
        ("group.instance.id", "one"),
        ("bootstrap.servers", "elsewhere:9092"),
        ("session.timeout.ms", "ten"),
    ],
)
def test_settings_that_would_break_a_guarantee_are_rejected(name: str, value: str) -> None:
    with pytest.raises(InvalidSetting, match=name):
        KafkaSource("localhost:9092", "billing", ["orders"], {name: value})


def test_a_setting_that_says_what_is_fixed_anyway_is_fine() -> None:
    assert settings.complete_consumer("a:1", "billing", {"enable.auto.commit": "True"})["enable.auto.commit"] == "true"


def test_heartbeats_fit_into_the_session() -> None:
    complete = settings.complete_consumer
    assert complete("a:1", "c", {})["heartbeat.interval.ms"] == "3000"
    assert complete("a:1", "c", {"session.timeout.ms": "1500"})["heartbeat.interval.ms"] == "500"
    assert complete("a:1", "c", {"heartbeat.interval.ms": "700"})["heartbeat.interval.ms"] == "700"


async def test_a_setting_that_the_driver_does_not_know_is_named() -> None:
    source = KafkaSource("localhost:9092", "billing", ["orders"], {"no.such.thing": "1"})
    with pytest.raises(InvalidSetting, match=r"no\.such\.thing"):
        await source.start(ignore)
    await source.close()


async def test_without_the_driver_the_extra_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "confluent_kafka", None)
    with pytest.raises(UsageError, match=r"pip install 'outrider\[kafka\]'"):
        await KafkaSource("localhost:9092", "billing", ["orders"]).start(ignore)


async def test_a_server_that_does_not_answer_is_named_at_the_start(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("outrider.brokers.kafka.consumer.START_SECONDS_MAX", 0.3)
    source = KafkaSource("127.0.0.1:9", "billing", ["orders"])
    with pytest.raises(Unreachable, match=r"127\.0\.0\.1:9 does not answer .*refused"):
        await source.start(ignore)
    await source.close()


async def test_a_source_that_was_not_started_says_so() -> None:
    source = KafkaSource("127.0.0.1:9", "billing", ["orders"])
    with pytest.raises(Transient, match="start it"):
        await source.receive(1, frozenset())
    source.ack(delivery("A", "s1"))
    await source.close()


def delivery(name: str, partition: str) -> Delivery:
    return Delivery("orders", name.encode(), b"", {}, partition, token=name)


def kept(*deliveries: tuple[str, str]) -> Prefetched:
    kept = Prefetched()
    for name, partition in deliveries:
        kept.add(delivery(name, partition))
    return kept


def taken(deliveries: list[Delivery]) -> str:
    return "".join(str(delivery.token) for delivery in deliveries)


def test_kept_deliveries_are_handed_over_in_order_up_to_the_limit() -> None:
    some = kept(("a", "s1"), ("b", "s2"), ("c", "s1"))
    assert [taken(some.take(limit, frozenset())) for limit in (0, 2, 2, 2)] == ["", "ab", "c", ""]


def test_deliveries_of_paused_partitions_stay_and_keep_their_order() -> None:
    some = kept(("a", "s1"), ("b", "s2"), ("c", "s1"), ("d", "s2"))
    assert taken(some.take(9, {"s1"})) == "bd"
    some.add(delivery("e", "s1"))
    assert some.counts() == {"s1": 3}
    assert taken(some.take(9, frozenset())) == "ace"


def test_deliveries_of_revoked_partitions_are_forgotten() -> None:
    some = kept(("a", "s1"), ("b", "s2"))
    some.drop({"s1"})
    assert taken(some.take(9, frozenset())) == "b"


def test_a_partition_that_comes_back_is_another_assignment_and_begins_anew() -> None:
    assignment = Assignment(count(1))
    first = assignment.add("orders", 0)
    first.progress.done(first.progress.received(5))
    assignment.remove([first])
    assert assignment.find("orders", 0) is None
    second = assignment.add("orders", 0)
    assert first.name != second.name
    assert second.progress.position is None
    assert assignment.names == {second.name}
