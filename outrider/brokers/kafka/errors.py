"""Translates Kafka's errors to publish results. No I/O.

Kafka rejects whole batches of records. An error that another message of the batch may have caused therefore becomes
`Unknown`, and the relay sends the messages again one by one. Only a message that was sent alone is `Rejected`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from outrider.brokers.base import Confirmed, Nacked, PublishResult, Rejected, Unknown
from outrider.event import Message

MISSING = {"UNKNOWN_TOPIC_OR_PART", "_UNKNOWN_TOPIC", "_UNKNOWN_PARTITION", "UNKNOWN_TOPIC_ID"}
"""The topic does not exist."""
BARRED = {"TOPIC_EXCEPTION", "TOPIC_AUTHORIZATION_FAILED", "CLUSTER_AUTHORIZATION_FAILED"}
"""The topic name is invalid, or access is denied."""
BATCH = {"MSG_SIZE_TOO_LARGE", "INVALID_MSG_SIZE", "INVALID_MSG", "INVALID_RECORD", "INVALID_TIMESTAMP"}
BATCH |= {"RECORD_LIST_TOO_LARGE", "POLICY_VIOLATION", "_BAD_MSG", "_INVALID_ARG"}
"""A record of a batch is invalid."""
TOPIC = {"LEADER_NOT_AVAILABLE", "NOT_LEADER_FOR_PARTITION", "NOT_ENOUGH_REPLICAS", "KAFKA_STORAGE_ERROR"}
TOPIC |= {"NOT_ENOUGH_REPLICAS_AFTER_APPEND", "REPLICA_NOT_AVAILABLE", "UNSUPPORTED_FOR_MESSAGE_FORMAT"}
TOPIC |= {
    "_NOT_SENT",
    "FENCED_LEADER_EPOCH",
    "UNKNOWN_LEADER_EPOCH",
    "UNKNOWN_PRODUCER_ID",
    "OUT_OF_ORDER_SEQUENCE_NUMBER",
}
"""A topic, or one of its partitions, does not work at the moment."""
PURGED = {"_PURGE_QUEUE", "_PURGE_INFLIGHT", "_FATAL"}
"""The session ended before an answer arrived."""
GAP = "_GAPLESS_GUARANTEE"
"""A session ended because Kafka rejected a message."""


class Failure(NamedTuple):
    """An error of Kafka: name and text. `local`: the producer did not accept the message."""

    name: str
    text: str
    local: bool = False


def publish_result(failure: Failure, topic: str, *, isolated: bool, proven: bool) -> PublishResult:
    """Translate an error to a publish result.

    A topic is `proven` after its first confirmed message: a proven topic that is missing or forbidden now counts as
    down.

    >>> publish_result(Failure("MSG_SIZE_TOO_LARGE", "too large"), "orders", isolated=False, proven=True)
    Unknown(error='too large (MSG_SIZE_TOO_LARGE)', destination='orders')
    """
    error = f"{failure.text} ({failure.name})"
    if failure.name in MISSING | BARRED:
        remedy = f"; {make_topic(topic)}" if failure.name in MISSING else ""
        return Unknown(error, topic) if proven else Rejected(f"topic {topic}: {error}{remedy}")
    if failure.name in BATCH:
        return Rejected(error) if isolated or failure.local else Unknown(error, topic)
    return Unknown(error, topic if failure.name in TOPIC else "")


def make_topic(topic: str) -> str:
    """Return the remedy for a missing topic, for the operator.

    >>> make_topic("orders")
    'make the topic (outrider doctor --topic orders shows how), then: outrider dead-letters replay --topic orders'
    """
    replay = f"outrider dead-letters replay --topic {topic}"
    return f"make the topic (outrider doctor --topic {topic} shows how), then: {replay}"


def nack_after_failures(messages: Sequence[Message], results: list[PublishResult]) -> list[PublishResult]:
    """Keep the order of streams: after an unconfirmed message, no later message of its stream counts as confirmed.

    The relay sends the later messages again; duplicates are harmless.

    >>> message = Message("1", "orders", "A", None, b"", {})
    >>> nack_after_failures([message, message], [Unknown("lost"), Confirmed()])
    [Unknown(error='lost', destination=''), Unknown(error='lost', destination='')]
    """
    first: dict[tuple[str, str], PublishResult] = {}
    ordered: list[PublishResult] = []
    for message, result in zip(messages, results, strict=True):
        stream = (message.topic, message.key)
        if isinstance(result, Confirmed) and stream in first:
            ordered.append(result_after(first[stream]))
            continue
        if not isinstance(result, Confirmed):
            first.setdefault(stream, result)
        ordered.append(result)
    return ordered


def result_after(head: PublishResult) -> PublishResult:
    """Return the result of a message after a failed message of the same stream."""
    return head if isinstance(head, Unknown) else Nacked("an earlier message of its stream failed")
