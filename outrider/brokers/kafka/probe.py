"""Whether a topic would take a message, from what Kafka says about it. Nothing is written."""

from __future__ import annotations

from collections.abc import Mapping
from importlib import import_module
from typing import Any

from outrider.errors import Transient

ANSWER_SECONDS_MAX = 2.0
CONNECTION = ("bootstrap.", "client.id", "security.", "sasl.", "ssl.", "socket.", "broker.address.", "enable.ssl.")
"""The settings that a client which does not produce needs as well."""


def check_topic(driver: Any, settings: Mapping[str, Any], topic: Any) -> None:
    """Raise Transient unless every partition has a leader and enough replicas in sync. Blocks."""
    if topic.error is not None:
        raise Transient(f"topic {topic.topic}: {topic.error.str()} ({topic.error.name()})")
    for partition in topic.partitions.values():
        if partition.leader < 0:
            raise Transient(f"topic {topic.topic}: partition {partition.id} has no leader; check Kafka's brokers")
    fewest = min(topic.partitions.values(), key=lambda partition: len(partition.isrs), default=None)
    # With every replica in sync there is nothing to ask for.
    if fewest is None or len(fewest.isrs) == len(fewest.replicas):
        return
    needed = _replicas_needed(driver, settings, topic.topic)
    if len(fewest.isrs) < needed:
        raise Transient(
            f"topic {topic.topic}: partition {fewest.id} has {len(fewest.isrs)} replicas in sync and needs {needed}; "
            "check Kafka's brokers"
        )


def _replicas_needed(driver: Any, settings: Mapping[str, Any], topic: str) -> int:
    """Return `min.insync.replicas`; one, if Kafka does not let us see it."""
    kafka = import_module("confluent_kafka.admin")
    admin = kafka.AdminClient({name: value for name, value in settings.items() if name.startswith(CONNECTION)})
    asked = kafka.ConfigResource(kafka.ConfigResource.Type.TOPIC, topic)
    try:
        found = admin.describe_configs([asked])[asked].result(ANSWER_SECONDS_MAX)
        return int(found["min.insync.replicas"].value)
    except (driver.KafkaException, TimeoutError, KeyError, TypeError):
        return 1
