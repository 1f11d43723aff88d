"""Another client of Kafka, for tests: it makes topics and reads them."""

from __future__ import annotations

from typing import Any
from uuid import uuid4

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
