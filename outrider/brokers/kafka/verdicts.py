"""From Kafka's errors to verdicts. Pure.

Kafka rejects whole batches of records. An error that may be another message's doing is therefore a verdict on none of
them: it becomes `Unresolved`, and the relay sends them again one by one. Only a message that went alone is `Rejected`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from outrider.event import Message
from outrider.outcome import Confirmed, Refused, Rejected, Unresolved, Verdict

MISSING = {"UNKNOWN_TOPIC_OR_PART", "_UNKNOWN_TOPIC", "_UNKNOWN_PARTITION", "UNKNOWN_TOPIC_ID"}
"""The topic is not there."""
BARRED = {"TOPIC_EXCEPTION", "TOPIC_AUTHORIZATION_FAILED", "CLUSTER_AUTHORIZATION_FAILED"}
"""The topic cannot be, or is not for us."""
BATCH = {"MSG_SIZE_TOO_LARGE", "INVALID_MSG_SIZE", "INVALID_MSG", "INVALID_RECORD", "INVALID_TIMESTAMP"}
BATCH |= {"RECORD_LIST_TOO_LARGE", "POLICY_VIOLATION", "_BAD_MSG", "_INVALID_ARG"}
"""Something in a batch of records is wrong."""
TOPIC = {"LEADER_NOT_AVAILABLE", "NOT_LEADER_FOR_PARTITION", "NOT_ENOUGH_REPLICAS", "KAFKA_STORAGE_ERROR"}
TOPIC |= {"NOT_ENOUGH_REPLICAS_AFTER_APPEND", "REPLICA_NOT_AVAILABLE", "UNSUPPORTED_FOR_MESSAGE_FORMAT"}
TOPIC |= {
    "_NOT_SENT",
    "FENCED_LEADER_EPOCH",
    "UNKNOWN_LEADER_EPOCH",
    "UNKNOWN_PRODUCER_ID",
    "OUT_OF_ORDER_SEQUENCE_NUMBER",
}
"""A topic, or one of its partitions, does not work now."""
PURGED = {"_PURGE_QUEUE", "_PURGE_INFLIGHT", "_FATAL"}
"""The session ended before there was an answer."""
GAP = "_GAPLESS_GUARANTEE"
"""A session ended because Kafka rejected a message."""


class Failure(NamedTuple):
    """Kafka's word: the error's name and its text. `local`: the producer did not even take this very message."""

    name: str
    text: str
    local: bool = False


def judge(failure: Failure, topic: str, *, alone: bool, proven: bool) -> Verdict:
    """Turn an error into a verdict.

    A topic is `proven` once it has taken a message of ours: if it is gone or barred now, it is down rather than wrong.

    >>> judge(Failure("MSG_SIZE_TOO_LARGE", "too large"), "orders", alone=False, proven=True)
    Unresolved(error='too large (MSG_SIZE_TOO_LARGE)', destination='orders')
    """
    error = f"{failure.text} ({failure.name})"
    if failure.name in MISSING | BARRED:
        remedy = f"; {make_topic(topic)}" if failure.name in MISSING else ""
        return Unresolved(error, topic) if proven else Rejected(f"topic {topic}: {error}{remedy}")
    if failure.name in BATCH:
        return Rejected(error) if alone or failure.local else Unresolved(error, topic)
    return Unresolved(error, topic if failure.name in TOPIC else "")


def make_topic(topic: str) -> str:
    """Return what a person does about a topic that is not there.

    >>> make_topic("orders")
    'make the topic (outrider doctor --topic orders tells how), then: outrider dead replay --topic orders'
    """
    return f"make the topic (outrider doctor --topic {topic} tells how), then: outrider dead replay --topic {topic}"


def in_order(messages: Sequence[Message], verdicts: list[Verdict]) -> list[Verdict]:
    """Keep the promise of order: behind a message that is not confirmed, none of its stream is. Duplicates do no harm.

    >>> message = Message("1", "orders", "A", None, b"", {})
    >>> in_order([message, message], [Unresolved("lost"), Confirmed()])
    [Unresolved(error='lost', destination=''), Unresolved(error='lost', destination='')]
    """
    first: dict[tuple[str, str], Verdict] = {}
    kept: list[Verdict] = []
    for message, verdict in zip(messages, verdicts, strict=True):
        stream = (message.topic, message.key)
        if isinstance(verdict, Confirmed) and stream in first:
            kept.append(behind(first[stream]))
            continue
        if not isinstance(verdict, Confirmed):
            first.setdefault(stream, verdict)
        kept.append(verdict)
    return kept


def behind(head: Verdict) -> Verdict:
    """Return the verdict on a message whose stream has failed before it."""
    return head if isinstance(head, Unresolved) else Refused("an earlier message of its stream failed")
