"""Another client of Kafka, for tests: it makes topics and reads them."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from importlib import import_module
from pathlib import Path
from typing import Any
from uuid import uuid4

import confluent_kafka
from confluent_kafka import Consumer, KafkaError, TopicPartition

from outrider.event import Message
from outrider.testing.servers.kafka import create_topic

OURS = f"test-{uuid4().hex[:8]}-"
"""How the names of our topics begin."""


def make_topic(bootstrap: str, *, partitions: int = 3, **config: str) -> str:
    """Make a topic that no other test knows."""
    name = f"{OURS}{uuid4().hex[:12]}"
    create_topic(bootstrap, name, partitions=partitions, config={k.replace("_", "."): v for k, v in config.items()})
    return name


def make_topic_on_each(bootstrap: str, name: str, *, brokers: int) -> None:
    """Make a topic with one partition on each broker, without a copy."""
    kafka: Any = import_module("confluent_kafka.admin")
    admin = kafka.AdminClient({"bootstrap.servers": bootstrap})
    wanted = kafka.NewTopic(name, brokers, replica_assignment=[[number] for number in range(1, brokers + 1)])
    admin.create_topics([wanted])[name].result(30)


def produce_raw(
    bootstrap: str, topic: str, key: bytes, bodies: Sequence[bytes], headers: Sequence[tuple[bytes, bytes]]
) -> None:
    """Send messages to partition 0 as a C program can: confluent-kafka sends no header name that is not UTF-8."""
    [path] = Path(confluent_kafka.__file__).parent.with_name("confluent_kafka.libs").glob("librdkafka*")
    library = ctypes.CDLL(str(path))
    library.rd_kafka_conf_new.restype = library.rd_kafka_new.restype = ctypes.c_void_p
    conf, error = ctypes.c_void_p(library.rd_kafka_conf_new()), ctypes.create_string_buffer(500)
    assert library.rd_kafka_conf_set(conf, b"bootstrap.servers", bootstrap.encode(), error, 500) == 0, error.value
    producer = ctypes.c_void_p(library.rd_kafka_new(0, conf, error, 500))
    assert producer.value, error.value
    # The tags are those of rd_kafka_vtype_t: a header, the topic, the partition, the value, the key, a copy, the end.
    named = [part for name, value in headers for part in (9, name, value, ctypes.c_ssize_t(len(value)))]
    for body in bodies:
        sized = [4, body, ctypes.c_size_t(len(body)), 5, key, ctypes.c_size_t(len(key))]
        assert library.rd_kafka_producev(producer, 1, topic.encode(), 3, 0, *sized, *named, 7, 2, 0) == 0
    assert library.rd_kafka_flush(producer, 20_000) == 0
    library.rd_kafka_destroy(producer)


def read(bootstrap: str, topic: str) -> list[Message]:
    """Read a topic to its end with a client of its own; the order is that of each partition."""
    options = {"bootstrap.servers": bootstrap, "group.id": uuid4().hex, "log_level": 0, "fetch.wait.max.ms": 50}
    consumer: Any = Consumer({**options, "enable.auto.commit": False, "enable.partition.eof": True})
    partitions = set(consumer.list_topics(topic, timeout=5).topics[topic].partitions)
    consumer.assign([TopicPartition(topic, number, 0) for number in partitions])
    found: list[Message] = []
    while partitions:
        [taken] = consumer.consume(1, timeout=20)
        if taken.error() is None:
            found.append(_message(taken))
        else:
            assert taken.error().code() == KafkaError._PARTITION_EOF
            partitions.discard(taken.partition())
    consumer.close()
    return found


def _message(taken: Any) -> Message:
    headers = {name: value.decode() for name, value in taken.headers() or []}
    return Message(headers["message_id"], taken.topic(), taken.key().decode(), None, taken.value(), headers)
