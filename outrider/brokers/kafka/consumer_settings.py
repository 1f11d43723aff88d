"""The consumer's settings: librdkafka's own names, with those that the promise rests on fixed."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from outrider.brokers.kafka.names import PRODUCER_ONLY
from outrider.errors import BadSetting

FIXED = {
    "enable.auto.commit": ("true", "librdkafka commits what is acked, at moments when the group allows it"),
    "enable.auto.offset.store": ("false", "only what is acked may be committed"),
    "enable.partition.eof": ("false", "the end of a partition is no message"),
    "isolation.level": ("read_committed", "a message that its producer took back must not be handled"),
    "partition.assignment.strategy": (
        "cooperative-sticky",
        "partitions that stay must not be disturbed by one that moves",
    ),
    "group.protocol": ("classic", "partitions are let go of by callbacks"),
}
"""What may not be changed, and why."""

REFUSED = {
    "bootstrap.servers": "the servers are the host part of the URL",
    "metadata.broker.list": "the servers are the host part of the URL",
    "auto.commit.enable": "librdkafka commits what is acked, at moments when the group allows it",
    "group.id": "it is the name of the consumer",
    "group.instance.id": "any process of a consumer may take the place of another",
}
DEFAULTS = {
    "client.id": "outrider",
    "auto.offset.reset": "earliest",
    "auto.commit.interval.ms": "500",
    "session.timeout.ms": "10000",
    "max.poll.interval.ms": "300000",
    # What has been fetched and not been handed over is bounded in memory. When there is enough of it, the next fetch
    # waits: not for long, or the queue would run dry meanwhile.
    "queued.max.messages.kbytes": "16384",
    "queued.min.messages": "10000",
    "fetch.queue.backoff.ms": "20",
    "fetch.error.backoff.ms": "100",
    # A topic that is made later, or gets another partition, is found soon.
    "topic.metadata.refresh.interval.ms": "10000",
    "reconnect.backoff.ms": "50",
    "reconnect.backoff.max.ms": "1000",
    "retry.backoff.ms": "50",
    "socket.keepalive.enable": "true",
    # What goes wrong is told once; the log would repeat it with every reconnect.
    "log_level": "2",
}


def complete(bootstrap: str, consumer: str, given: Mapping[str, str]) -> dict[str, Any]:
    """Return the whole of the settings; refuse those that would weaken the promise. Those of producers are left out.

    >>> complete("localhost:9092", "billing", {"session.timeout.ms": "6000", "linger.ms": "5"})["heartbeat.interval.ms"]
    '2000'
    """
    wanted = {name: str(value) for name, value in given.items() if name not in PRODUCER_ONLY}
    for name, value in wanted.items():
        if name in REFUSED:
            raise BadSetting(f"{name} cannot be set: {REFUSED[name]}")
        if name in FIXED and value.lower() != FIXED[name][0]:
            needed, why = FIXED[name]
            raise BadSetting(f"{name} = {value} cannot work, {why}; leave it at {needed}")
    fixed = {name: value for name, (value, _) in FIXED.items()}
    settings = {**DEFAULTS, **wanted, **fixed, "bootstrap.servers": bootstrap, "group.id": consumer}
    session_ms = milliseconds(settings, "session.timeout.ms")
    return {"heartbeat.interval.ms": str(min(3000, session_ms // 3)), **settings}


def milliseconds(settings: Mapping[str, Any], name: str) -> int:
    """Return a setting that is a time."""
    try:
        return int(settings[name])
    except ValueError:
        raise BadSetting(f"{name} = {settings[name]} is not a number of milliseconds") from None
