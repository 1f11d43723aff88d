"""Which of Kafka's errors a consumer cannot wait out, and what to do about them."""

from __future__ import annotations

from typing import Any

from outrider.brokers.kafka.session import log
from outrider.brokers.kafka.verdicts import MISSING
from outrider.errors import Misuse, Transient

HOPELESS = {
    "TOPIC_AUTHORIZATION_FAILED": "allow this user to read and describe the topic",
    "GROUP_AUTHORIZATION_FAILED": "allow this user to read the group, which has the consumer's name",
    "CLUSTER_AUTHORIZATION_FAILED": "allow this user to use the cluster",
    "TOPIC_EXCEPTION": "no topic can have this name; correct it",
    "INCONSISTENT_GROUP_PROTOCOL": "another program uses this group, and shares partitions out in another way; give "
    "the consumer a name of its own",
    "INVALID_SESSION_TIMEOUT": "set session.timeout.ms within what the brokers allow (group.min.session.timeout.ms, "
    "group.max.session.timeout.ms)",
    "INVALID_GROUP_ID": "give the consumer another name",
}
"""What must change before it can work."""


def raise_if_hopeless(error: Any) -> None:
    """Raise Misuse for an error that no waiting will cure."""
    if remedy := HOPELESS.get(error.name()):
        raise Misuse(f"Kafka refuses: {error.str()} ({error.name()}); {remedy}")


def check_topic(topic: Any) -> bool:
    """Look at what Kafka says of a topic; tell whether it is there. If not, it may be made later: we wait for it."""
    if topic.error is None:
        return True
    raise_if_hopeless(topic.error)
    if topic.error.name() not in MISSING:
        raise Transient(f"topic {topic.topic}: {topic.error.str()} ({topic.error.name()})")
    log.warning("the topic is not there yet; waiting for it", extra={"topic": topic.topic})
    return False
