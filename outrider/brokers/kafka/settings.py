"""The producer's settings: librdkafka's own names, with those that the promise rests on fixed."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any
from urllib.parse import parse_qsl, unquote

from outrider.brokers.kafka.names import CONSUMER_ONLY
from outrider.errors import BadSetting, Misuse

MESSAGE_BYTES_MAX = 1_000_000
"""Less than what a Kafka broker takes by default, because it counts its own overhead too."""

FIXED = {
    "acks": ("all", "a confirmed message must be on every replica in sync"),
    "enable.idempotence": ("true", "a retry must neither repeat nor overtake a message"),
    "enable.gapless.guarantee": ("true", "a message must not go out behind one of its stream that failed"),
    "message.timeout.ms": ("0", "only the publish timeout may give a message up, and with it all that follow"),
}
"""What may not be changed, and why."""

ALIASES = {
    "request.required.acks": "acks",
    "delivery.timeout.ms": "message.timeout.ms",
    "metadata.broker.list": "bootstrap.servers",
    "max.in.flight": "max.in.flight.requests.per.connection",
    "queue.buffering.max.ms": "linger.ms",
    "compression.codec": "compression.type",
}
REFUSED = {
    "bootstrap.servers": "the servers are the host part of the URL",
    "delivery.report.only.error": "every message needs its verdict",
    "transactional.id": "the relay does not use Kafka's transactions; consumers recognise a message by its id",
}
DEFAULTS = {
    "client.id": "outrider",
    "compression.type": "lz4",
    # The same key goes to the same partition as from a Java client.
    "partitioner": "murmur2_random",
    # A wave arrives all at once, so there is little to wait for; a batch holds a wave's share of a partition.
    "linger.ms": "2",
    "batch.num.messages": "10000",
    "batch.size": "1000000",
    "message.max.bytes": str(MESSAGE_BYTES_MAX),
    # What is in flight is bounded by the relay's waves in number, and here in memory.
    "queue.buffering.max.messages": "100000",
    "queue.buffering.max.kbytes": "131072",
    # A topic that is not there is told well within the publish timeout.
    "topic.metadata.propagation.max.ms": "1000",
    "reconnect.backoff.ms": "50",
    "reconnect.backoff.max.ms": "1000",
    "retry.backoff.ms": "50",
    "socket.keepalive.enable": "true",
    # What goes wrong is told by verdicts and probes, once; the log would repeat it with every reconnect.
    "log_level": "2",
}
SAME = {"-1": "all", "1": "true", "0": "false"}


def complete(bootstrap: str, given: Mapping[str, str]) -> dict[str, Any]:
    """Return the whole of the settings; refuse those that would weaken the promise. Those of consumers are left out.

    >>> complete("localhost:9092", {"compression.type": "zstd"})["compression.type"]
    'zstd'
    """
    wanted = {ALIASES.get(name, name): str(value) for name, value in given.items() if name not in CONSUMER_ONLY}
    for name, value in wanted.items():
        if name in REFUSED:
            raise BadSetting(f"{name} cannot be set: {REFUSED[name]}")
        if name in FIXED and value.lower() != FIXED[name][0] and SAME.get(value) != FIXED[name][0]:
            needed, why = FIXED[name]
            raise BadSetting(f"{name} = {value} cannot work, {why}; leave it at {needed}")
    fixed = {name: value for name, (value, _) in FIXED.items()}
    return {**DEFAULTS, **wanted, **fixed, "bootstrap.servers": bootstrap}


def parse(url: str) -> tuple[str, dict[str, str]]:
    """Split a URL into the servers and the settings of its query.

    >>> parse("kafka://a:9092,b:9092?linger.ms=5")
    ('a:9092,b:9092', {'linger.ms': '5'})
    """
    _, _, rest = url.partition("://")
    servers, _, query = rest.partition("?")
    bootstrap = unquote(servers.rstrip("/"))
    # A password may be in there, so the text is not repeated.
    if "@" in bootstrap:
        raise Misuse("a kafka:// URL takes no user; write kafka://host:port?sasl.username=...&sasl.password=...")
    if not bootstrap or "/" in bootstrap:
        raise Misuse("the kafka:// URL names no server; write kafka://host:port or kafka://host:port,host:port")
    return bootstrap, dict(parse_qsl(query, keep_blank_values=True))
