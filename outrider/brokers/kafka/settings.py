"""The settings of producer and consumer: librdkafka's names, with fixed values where a promise depends on them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any
from urllib.parse import parse_qsl, unquote

from outrider.errors import InvalidSetting, UsageError

MESSAGE_BYTES_MAX = 1_000_000
"""Below the default limit of a Kafka broker, because the broker counts its own overhead too."""

FIXED = {
    "acks": ("all", "a confirmed message must be on every replica in sync"),
    "enable.idempotence": ("true", "a retry must neither repeat nor overtake a message"),
    "enable.gapless.guarantee": ("true", "a message must not go out behind one of its stream that failed"),
    "message.timeout.ms": ("0", "only the publish timeout may give a message up, and with it all that follow"),
}
"""Settings that may not be changed, and the reason."""

ALIASES = {
    "request.required.acks": "acks",
    "delivery.timeout.ms": "message.timeout.ms",
    "metadata.broker.list": "bootstrap.servers",
    "max.in.flight": "max.in.flight.requests.per.connection",
    "queue.buffering.max.ms": "linger.ms",
    "compression.codec": "compression.type",
}

FORBIDDEN = {
    "bootstrap.servers": "the servers are the host part of the URL",
    "delivery.report.only.error": "every message needs its result",
    "transactional.id": "the relay does not use Kafka's transactions; consumers recognise a message by its id",
}

DEFAULTS = {
    "client.id": "outrider",
    "compression.type": "lz4",
    # The same key goes to the same partition as from a Java client.
    "partitioner": "murmur2_random",
    # A wave is produced all at once, so lingering gains little; a batch holds a wave's share of a partition.
    "linger.ms": "2",
    "batch.num.messages": "10000",
    "batch.size": "1000000",
    "message.max.bytes": str(MESSAGE_BYTES_MAX),
    # In-flight messages are bounded in number by the relay's waves, and in memory by this setting.
    "queue.buffering.max.messages": "100000",
    "queue.buffering.max.kbytes": "131072",
    # A missing topic is reported well within the publish timeout.
    "topic.metadata.propagation.max.ms": "1000",
    "reconnect.backoff.ms": "50",
    "reconnect.backoff.max.ms": "1000",
    "retry.backoff.ms": "50",
    "socket.keepalive.enable": "true",
    # Publish results and probes report errors once; the log would repeat errors with every reconnect.
    "log_level": "2",
}

MURMUR2 = {"murmur2", "murmur2_random"}
"""The partitioners of a Java client."""

SAME = {"-1": "all", "1": "true", "0": "false"}

CONSUMER_FIXED = {
    "enable.auto.commit": ("true", "librdkafka commits what is acked, at moments when the group allows it"),
    "enable.auto.offset.store": ("false", "only what is acked may be committed"),
    "enable.partition.eof": ("false", "the end of a partition is no message"),
    "isolation.level": ("read_committed", "a message that its producer took back must not be handled"),
    "partition.assignment.strategy": (
        "cooperative-sticky",
        "partitions that stay must not be disturbed by one that moves",
    ),
    "group.protocol": ("classic", "partitions are released by callbacks"),
}
"""Settings that may not be changed, and the reason."""

CONSUMER_FORBIDDEN = {
    "bootstrap.servers": "the servers are the host part of the URL",
    "metadata.broker.list": "the servers are the host part of the URL",
    "auto.commit.enable": "librdkafka commits what is acked, at moments when the group allows it",
    "group.id": "it is the name of the consumer",
    "group.instance.id": "any process of a consumer may replace another",
}

CONSUMER_DEFAULTS = {
    "client.id": "outrider",
    "auto.offset.reset": "earliest",
    "auto.commit.interval.ms": "500",
    "session.timeout.ms": "10000",
    "max.poll.interval.ms": "300000",
    # Bounds the memory of messages that are fetched but not handed over. When the queue is full, the next fetch
    # waits, but only briefly: otherwise the queue would run empty.
    "queued.max.messages.kbytes": "16384",
    "queued.min.messages": "10000",
    "fetch.queue.backoff.ms": "20",
    "fetch.error.backoff.ms": "100",
    # A new topic or partition is found soon.
    "topic.metadata.refresh.interval.ms": "10000",
    "reconnect.backoff.ms": "50",
    "reconnect.backoff.max.ms": "1000",
    "retry.backoff.ms": "50",
    "socket.keepalive.enable": "true",
    # Errors are logged once; the log of librdkafka would repeat errors with every reconnect.
    "log_level": "2",
}

_PRODUCER = """
acks batch.num.messages batch.size compression.codec compression.level compression.type delivery.report.only.error
delivery.timeout.ms enable.gapless.guarantee enable.idempotence linger.ms message.max.bytes
message.send.max.retries message.timeout.ms partitioner produce.offset.report
queue.buffering.backpressure.threshold queue.buffering.max.kbytes queue.buffering.max.messages
queue.buffering.max.ms queuing.strategy request.required.acks request.timeout.ms retries
sticky.partitioning.linger.ms topic.metadata.propagation.max.ms transaction.timeout.ms transactional.id
"""

PRODUCER_ONLY = frozenset(_PRODUCER.split())
"""Includes `message.max.bytes`, which librdkafka shares: the size limit of a producer does not concern a consumer."""

_CONSUMER = """
auto.commit.enable auto.commit.interval.ms auto.offset.reset check.crcs consume.callback.max.messages
coordinator.query.interval.ms enable.auto.commit enable.auto.offset.store enable.partition.eof
fetch.error.backoff.ms fetch.max.bytes fetch.message.max.bytes fetch.min.bytes fetch.queue.backoff.ms
fetch.wait.max.ms group.id group.instance.id group.protocol group.protocol.type group.remote.assignor
heartbeat.interval.ms isolation.level max.partition.fetch.bytes max.poll.interval.ms offset.store.method
offset.store.path offset.store.sync.interval.ms partition.assignment.strategy queued.max.messages.kbytes
queued.min.messages session.timeout.ms
"""

CONSUMER_ONLY = frozenset(_CONSUMER.split())


def complete(bootstrap: str, options: Mapping[str, str]) -> dict[str, Any]:
    """Return the complete producer settings, without consumer settings; reject settings that weaken a promise.

    >>> complete("localhost:9092", {"compression.type": "zstd"})["compression.type"]
    'zstd'
    """
    wanted = {ALIASES.get(name, name): str(value) for name, value in options.items() if name not in CONSUMER_ONLY}
    for name, value in wanted.items():
        if name in FORBIDDEN:
            raise InvalidSetting(f"{name} cannot be set: {FORBIDDEN[name]}")
        if name in FIXED and value.lower() != FIXED[name][0] and SAME.get(value) != FIXED[name][0]:
            needed, reason = FIXED[name]
            raise InvalidSetting(f"{name} = {value} cannot work, {reason}; leave it at {needed}")
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
    # The text may contain a password, so the error does not repeat the text.
    if "@" in bootstrap:
        raise UsageError("a kafka:// URL takes no user; write kafka://host:port?sasl.username=...&sasl.password=...")
    if not bootstrap or "/" in bootstrap:
        raise UsageError("the kafka:// URL names no server; write kafka://host:port or kafka://host:port,host:port")
    return bootstrap, dict(parse_qsl(query, keep_blank_values=True))


def complete_consumer(bootstrap: str, consumer: str, options: Mapping[str, str]) -> dict[str, Any]:
    """Return the complete consumer settings, without producer settings; reject settings that weaken a promise.

    >>> complete_consumer("localhost:9092", "billing", {"session.timeout.ms": "6000"})["heartbeat.interval.ms"]
    '2000'
    """
    wanted = {name: str(value) for name, value in options.items() if name not in PRODUCER_ONLY}
    for name, value in wanted.items():
        if name in CONSUMER_FORBIDDEN:
            raise InvalidSetting(f"{name} cannot be set: {CONSUMER_FORBIDDEN[name]}")
        if name in CONSUMER_FIXED and value.lower() != CONSUMER_FIXED[name][0]:
            needed, reason = CONSUMER_FIXED[name]
            raise InvalidSetting(f"{name} = {value} cannot work, {reason}; leave it at {needed}")
    fixed = {name: value for name, (value, _) in CONSUMER_FIXED.items()}
    settings = {**CONSUMER_DEFAULTS, **wanted, **fixed, "bootstrap.servers": bootstrap, "group.id": consumer}
    session_ms = milliseconds(settings, "session.timeout.ms")
    return {"heartbeat.interval.ms": str(min(3000, session_ms // 3)), **settings}


def milliseconds(settings: Mapping[str, Any], name: str) -> int:
    """Return the value of a duration setting in milliseconds."""
    try:
        return int(settings[name])
    except ValueError:
        raise InvalidSetting(f"{name} = {settings[name]} is not a number of milliseconds") from None


def partition_of(key: bytes, partitions: int) -> int:
    """Return the partition of a key, as the default partitioner of librdkafka and of a Java client does.

    >>> [partition_of(key, 100) for key in (b"21", b"foobar", b"a-little-bit-long-string")]
    [40, 66, 12]
    """
    multiplier, mask = 0x5BD1E995, 0xFFFFFFFF
    found = (0x9747B28C ^ len(key)) & mask
    whole = len(key) & ~3
    for start in range(0, whole, 4):
        word = int.from_bytes(key[start : start + 4], "little") * multiplier & mask
        word = (word ^ word >> 24) * multiplier & mask
        found = (found * multiplier & mask) ^ word
    if rest := key[whole:]:
        found = (found ^ int.from_bytes(rest, "little")) * multiplier & mask
    found = (found ^ found >> 13) * multiplier & mask
    return ((found ^ found >> 15) & 0x7FFFFFFF) % partitions
