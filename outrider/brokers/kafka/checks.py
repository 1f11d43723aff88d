"""Checks of Kafka: does a confirmed message survive the loss of a broker, and do the topics exist?

Only the list of all topics is requested: a request for a single missing topic could make Kafka create the topic.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib import import_module
from typing import Any

from outrider.brokers.kafka.producer import driver
from outrider.checks import CheckResult, Level, is_loopback, ok, warn
from outrider.errors import Transient, Unreachable

ANSWER_SECONDS_MAX = 10.0

DAY_MS = 86_400_000

CHECKS = {
    "kafka-acks": "every replica in sync has a message before it is confirmed",
    "kafka-encryption": "the connection is encrypted",
    "kafka-auto-create": "a misspelt topic is not made by itself",
    "kafka-topics": "the topics are there",
    "kafka-leaders": "every partition has a leader, and replicas enough in sync",
    "kafka-replication": "a topic has more than one copy",
    "kafka-in-sync": "a confirmed message is on two brokers, and one may be down",
    "kafka-elections": "a replica that lags behind cannot become the leader",
    "kafka-message-size": "a topic takes what we let through",
    "kafka-configs": "the settings of the topics can be seen",
}

RETENTION_SECONDS_MAX = 2.0

CONNECTION = ("bootstrap.", "client.id", "security.", "sasl.", "ssl.", "socket.", "broker.address.", "enable.ssl.")
"""The settings that a client without a producer needs as well."""


@dataclass(frozen=True, slots=True)
class KafkaTopic:
    """A topic as Kafka describes it. No replicas: the topic is missing. `config` is None: access is denied."""

    name: str
    replicas: int = 0
    in_sync: int = 0
    leaderless: int = 0
    config: Mapping[str, str] | None = None


@dataclass(frozen=True, slots=True)
class TopicProblem:
    """A problem of a topic; `remedy` has a placeholder for the topic's name."""

    level: Level
    check: str
    text: str
    remedy: str


def check(settings: Mapping[str, Any], names: Sequence[str]) -> list[CheckResult]:
    """Ask Kafka about the topics and the brokers; return check results. Blocks."""
    admin, client = _admin(settings)
    known = _describe(client)
    configs = _topic_configs(admin, client, known, names)
    # A request about a broker goes to the same broker, so every broker needs a separate call.
    nodes = [admin.ConfigResource(admin.ConfigResource.Type.BROKER, str(number)) for number in known.brokers]
    brokers = [_configs(client, [node]).get(node.name, {}) for node in nodes]
    topics = [_topic(name, known.topics.get(name), configs.get(name)) for name in names]
    bootstrap = settings["bootstrap.servers"]
    return [
        ok("kafka-acks", "all replicas in sync, and the producer is idempotent"),
        check_encryption(bootstrap, settings.get("security.protocol", "plaintext")),
        check_auto_create([config.get("auto.create.topics.enable") for config in brokers]),
        *check_topics(topics, len(known.brokers), bootstrap, int(settings["message.max.bytes"])),
    ]


def retention_days(settings: Mapping[str, Any], names: Sequence[str]) -> dict[str, float]:
    """Ask Kafka for the retention of topics; missing and hidden topics are left out. Blocks."""
    admin, client = _admin(settings)
    return {
        name: retention_days_of(config)
        for name, config in _topic_configs(admin, client, _describe(client), names).items()
    }


def retention_days_of(config: Mapping[str, str]) -> float:
    """Return the retention of a topic with the given settings: unlimited, unless old messages are deleted.

    >>> retention_days_of({"retention.ms": "604800000"}), retention_days_of({"retention.ms": "-1"})
    (7.0, inf)
    >>> retention_days_of({})
    inf
    """
    milliseconds = int(config.get("retention.ms", "-1"))
    if milliseconds < 0 or "delete" not in config.get("cleanup.policy", "delete"):
        return math.inf
    return milliseconds / DAY_MS


def _admin(settings: Mapping[str, Any]) -> tuple[Any, Any]:
    admin = import_module("confluent_kafka.admin")
    wanted = {name: value for name, value in settings.items() if name.startswith(CONNECTION)}
    return admin, admin.AdminClient({**wanted, "log_level": 0, "error_cb": lambda error: None})


def _describe(client: Any) -> Any:
    try:
        return client.list_topics(timeout=ANSWER_SECONDS_MAX)
    except driver().KafkaException as error:
        raise Unreachable(f"Kafka lists no topics ({error.args[0].str()}); check address and rights") from error


def _topic_configs(admin: Any, client: Any, known: Any, names: Sequence[str]) -> dict[str, dict[str, str]]:
    kind = admin.ConfigResource.Type.TOPIC
    return _configs(client, [admin.ConfigResource(kind, name) for name in dict.fromkeys(names) if name in known.topics])


def _configs(client: Any, resources: Sequence[Any]) -> dict[str, dict[str, str]]:
    """Return the settings of topics or of a broker, without those to which access is denied."""
    found = {}
    for resource, answer in client.describe_configs(resources).items() if resources else ():
        try:
            entries = answer.result(ANSWER_SECONDS_MAX)
        except (driver().KafkaException, TimeoutError):
            continue
        found[resource.name] = {name: entry.value for name, entry in entries.items()}
    return found


def _topic(name: str, known: Any, config: Mapping[str, str] | None) -> KafkaTopic:
    partitions = list(known.partitions.values()) if known is not None else []
    if not partitions:
        return KafkaTopic(name)
    return KafkaTopic(
        name,
        replicas=min(len(partition.replicas) for partition in partitions),
        in_sync=min(len(partition.isrs) for partition in partitions),
        leaderless=sum(partition.leader < 0 for partition in partitions),
        config=config,
    )


def check_encryption(bootstrap: str, protocol: str) -> CheckResult:
    """Return whether the connection is encrypted, as a check result.

    >>> check_encryption("broker.example:9092", "SASL_PLAINTEXT").level
    <Level.WARN: 'warn'>
    """
    if "ssl" in protocol.lower().split("_"):
        return ok("kafka-encryption", "TLS")
    if all(is_loopback(server) for server in bootstrap.split(",")):
        return ok("kafka-encryption", "not encrypted, and on this machine only")
    return warn(
        "kafka-encryption",
        f"security.protocol is {protocol}: events, and a password if there is one, cross the network unencrypted",
        "set security.protocol to SSL or SASL_SSL",
    )


def check_auto_create(values: Sequence[str | None]) -> CheckResult:
    """Return whether Kafka would create a misspelt topic, as a check result.

    >>> check_auto_create(["true"]).level
    <Level.WARN: 'warn'>
    """
    check = "kafka-auto-create"
    if "true" in values:
        text = "a topic that is missing is made when first used, with the defaults of the brokers"
        return warn(check, text, "set auto.create.topics.enable=false on the brokers")
    if None in values or not values:
        text = "whether missing topics are made by themselves cannot be seen"
        return warn(check, text, "let this user describe the configuration of the cluster")
    return ok(check, "off")


def check_topics(topics: Sequence[KafkaTopic], brokers: int, bootstrap: str, bytes_max: int) -> list[CheckResult]:
    """Return the check results of the topics: one result per kind of problem, with all affected topics."""
    if not topics:
        remedy = "name them: --topic, or topics in the file"
        return [warn("kafka-topics", "no topic was looked at: none is named, and none is staged", remedy)]
    found: dict[TopicProblem, list[str]] = {}
    for topic in topics:
        for problem in problems(topic, brokers, bootstrap, bytes_max):
            found.setdefault(problem, []).append(topic.name)
    bad = [
        CheckResult(
            problem.level,
            problem.check,
            f"{', '.join(names)}: {problem.text}",
            problem.remedy.replace("TOPIC", names[0]) if len(names) == 1 else f"for each TOPIC: {problem.remedy}",
        )
        for problem, names in found.items()
    ]
    fine = set[str].intersection(*(looked_at(topic) for topic in topics)) - {result.check for result in bad}
    return bad + [ok(check, CHECKS[check]) for check in CHECKS if check in fine]


def looked_at(topic: KafkaTopic) -> set[str]:
    """Return the names of the possible checks: fewer without the settings of the topic or with a single replica.

    >>> sorted(looked_at(KafkaTopic("orders", replicas=1)))
    ['kafka-configs', 'kafka-leaders', 'kafka-replication', 'kafka-topics']
    """
    if not topic.replicas:
        return {"kafka-topics"}
    found = {"kafka-topics", "kafka-leaders", "kafka-replication", "kafka-configs"}
    if topic.config is not None:
        found |= {"kafka-elections", "kafka-message-size"} | ({"kafka-in-sync"} if topic.replicas > 1 else set())
    return found


def problems(topic: KafkaTopic, brokers: int, bootstrap: str, bytes_max: int) -> list[TopicProblem]:
    """List the problems of a topic.

    >>> problems(KafkaTopic("orders"), 3, "b:9092", 1000)[0].check
    'kafka-topics'
    """
    tool = f"--bootstrap-server {bootstrap}"
    if not topic.replicas:
        copies = min(3, brokers)
        durability = " --config min.insync.replicas=2" if copies == 3 else ""
        make = f"kafka-topics.sh {tool} --create --topic TOPIC --partitions 6 --replication-factor {copies}{durability}"
        return [TopicProblem(Level.ERROR, "kafka-topics", "not there; its events would be dead-lettered", make)]
    found = []
    if topic.leaderless:
        text = f"{topic.leaderless} partitions without a leader"
        found.append(TopicProblem(Level.WARN, "kafka-leaders", text, "check Kafka's brokers"))
    if topic.replicas == 1:
        remedy = "reassign TOPIC to three brokers (kafka-reassign-partitions.sh)" if brokers > 1 else "add brokers"
        text = "one copy only; if its disk is lost, so is what was confirmed"
        found.append(TopicProblem(Level.WARN, "kafka-replication", text, remedy))
    alter = f"kafka-configs.sh {tool} --alter --entity-type topics --entity-name TOPIC --add-config "
    if topic.config is None:
        remedy = "let this user describe the configuration of the topic"
        return [*found, TopicProblem(Level.WARN, "kafka-configs", "its settings may not be seen", remedy)]
    return found + _problems_of_config(topic, topic.config, alter, bytes_max)


def _problems_of_config(topic: KafkaTopic, config: Mapping[str, str], alter: str, bytes_max: int) -> list[TopicProblem]:
    found = []
    needed, limit = int(config.get("min.insync.replicas", "1")), int(config.get("max.message.bytes", bytes_max))
    if needed < 2 <= topic.replicas:
        level = Level.ERROR if topic.replicas >= 3 else Level.WARN
        text = f"min.insync.replicas is {needed}: a message can be confirmed with one copy, and be lost with it"
        found.append(TopicProblem(level, "kafka-in-sync", text, f"{alter}min.insync.replicas=2"))
    elif needed > topic.replicas:
        text = f"min.insync.replicas is {needed}, more than there are copies: older brokers then refuse every publish"
        found.append(TopicProblem(Level.WARN, "kafka-in-sync", text, "raise the replication factor of TOPIC"))
    elif needed == topic.replicas > 1:
        text = f"min.insync.replicas is {needed}, as many as there are copies: one broker down stops every publish"
        found.append(TopicProblem(Level.WARN, "kafka-in-sync", text, "raise the replication factor of TOPIC"))
    if not topic.leaderless and topic.in_sync < min(needed, topic.replicas):
        text = f"{topic.in_sync} replicas in sync, and {needed} are needed"
        found.append(TopicProblem(Level.WARN, "kafka-leaders", text, "check Kafka's brokers"))
    if config.get("unclean.leader.election.enable") == "true":
        text = "unclean.leader.election.enable is true: a replica that lags behind can become the leader, and what it "
        text += "lacks is lost though confirmed"
        found.append(TopicProblem(Level.ERROR, "kafka-elections", text, f"{alter}unclean.leader.election.enable=false"))
    if limit < bytes_max:
        text = f"max.message.bytes is {limit}, and we let {bytes_max} through; messages in between are dead-lettered"
        remedy = f"{alter}max.message.bytes={bytes_max}, or lower message.max.bytes in the broker's URL"
        found.append(TopicProblem(Level.WARN, "kafka-message-size", text, remedy))
    return found


def check_topic(driver: Any, settings: Mapping[str, Any], topic: Any, only: int | None = None) -> None:
    """Raise Transient unless every partition, or the `only` one, has a leader and enough replicas in sync. Blocks."""
    if topic.error is not None:
        raise Transient(f"topic {topic.topic}: {topic.error.str()} ({topic.error.name()})")
    partitions = [found for number, found in topic.partitions.items() if only is None or number == only]
    for partition in partitions:
        if partition.leader < 0:
            raise Transient(f"topic {topic.topic}: partition {partition.id} has no leader; check Kafka's brokers")
    fewest = min(partitions, key=lambda partition: len(partition.isrs), default=None)
    # With every replica in sync there is no need to ask for the minimum.
    if fewest is None or len(fewest.isrs) == len(fewest.replicas):
        return
    needed = _replicas_needed(driver, settings, topic.topic)
    if len(fewest.isrs) < needed:
        raise Transient(
            f"topic {topic.topic}: partition {fewest.id} has {len(fewest.isrs)} replicas in sync and needs {needed}; "
            "check Kafka's brokers"
        )


def _replicas_needed(driver: Any, settings: Mapping[str, Any], topic: str) -> int:
    """Return `min.insync.replicas`, or 1 if access to the setting is denied."""
    kafka = import_module("confluent_kafka.admin")
    admin = kafka.AdminClient({name: value for name, value in settings.items() if name.startswith(CONNECTION)})
    resources = kafka.ConfigResource(kafka.ConfigResource.Type.TOPIC, topic)
    try:
        found = admin.describe_configs([resources])[resources].result(RETENTION_SECONDS_MAX)
        return int(found["min.insync.replicas"].value)
    except (driver.KafkaException, TimeoutError, KeyError, TypeError):
        return 1
