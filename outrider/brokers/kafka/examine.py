"""Looking at Kafka: does a confirmed message survive a broken broker, and are the topics there?

Only the list of all topics is asked for: a question about one that is missing could make Kafka create it.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib import import_module
from typing import Any

from outrider.brokers.kafka.probe import CONNECTION
from outrider.brokers.kafka.session import driver
from outrider.errors import Unreachable
from outrider.finding import Finding, Level, ok, warn
from outrider.surroundings import is_loopback

ANSWER_SECONDS_MAX = 10.0
DAY_MS = 86_400_000

CHECKS = {
    "kafka-acks": "every replica in sync has a message before it is confirmed",
    "kafka-encryption": "nobody can listen in",
    "kafka-auto-create": "a misspelt topic is not made by itself",
    "kafka-topics": "the topics are there",
    "kafka-leaders": "every partition has a leader, and replicas enough in sync",
    "kafka-replication": "a topic has more than one copy",
    "kafka-in-sync": "a confirmed message is on two brokers, and one may be down",
    "kafka-elections": "a replica that lags behind cannot become the leader",
    "kafka-message-size": "a topic takes what we let through",
    "kafka-configs": "the settings of the topics can be seen",
}


@dataclass(frozen=True, slots=True)
class Topic:
    """What Kafka says about a topic; without a replica it is not there. `config` is None if it may not be seen."""

    name: str
    replicas: int = 0
    in_sync: int = 0
    leaderless: int = 0
    config: Mapping[str, str] | None = None


@dataclass(frozen=True, slots=True)
class Problem:
    """What is wrong with a topic; `remedy` has a place for its name."""

    level: Level
    check: str
    text: str
    remedy: str


def examine(settings: Mapping[str, Any], names: Sequence[str]) -> list[Finding]:
    """Ask Kafka about the topics and its brokers, and judge. Blocks."""
    admin, client = _admin(settings)
    known = _known(client)
    configs = _topic_configs(admin, client, known, names)
    # A question about a broker goes to that broker, so each is a call of its own.
    nodes = [admin.ConfigResource(admin.ConfigResource.Type.BROKER, str(number)) for number in known.brokers]
    brokers = [_configs(client, [node]).get(node.name, {}) for node in nodes]
    topics = [_topic(name, known.topics.get(name), configs.get(name)) for name in names]
    bootstrap = settings["bootstrap.servers"]
    return [
        ok("kafka-acks", "all replicas in sync, and the producer is idempotent"),
        judge_encryption(bootstrap, settings.get("security.protocol", "plaintext")),
        judge_auto_create([config.get("auto.create.topics.enable") for config in brokers]),
        *judge_topics(topics, len(known.brokers), bootstrap, int(settings["message.max.bytes"])),
    ]


def retention_days(settings: Mapping[str, Any], names: Sequence[str]) -> dict[str, float]:
    """Ask Kafka how long it keeps topics; those that are missing or may not be seen are left out. Blocks."""
    admin, client = _admin(settings)
    return {name: kept_days(config) for name, config in _topic_configs(admin, client, _known(client), names).items()}


def kept_days(config: Mapping[str, str]) -> float:
    """Return how long a topic with these settings is kept: for ever, unless old messages are deleted.

    >>> kept_days({"retention.ms": "604800000"}), kept_days({"retention.ms": "-1"}), kept_days({})
    (7.0, inf, inf)
    """
    milliseconds = int(config.get("retention.ms", "-1"))
    if milliseconds < 0 or "delete" not in config.get("cleanup.policy", "delete"):
        return math.inf
    return milliseconds / DAY_MS


def _admin(settings: Mapping[str, Any]) -> tuple[Any, Any]:
    admin = import_module("confluent_kafka.admin")
    wanted = {name: value for name, value in settings.items() if name.startswith(CONNECTION)}
    return admin, admin.AdminClient({**wanted, "log_level": 0, "error_cb": lambda error: None})


def _known(client: Any) -> Any:
    try:
        return client.list_topics(timeout=ANSWER_SECONDS_MAX)
    except driver().KafkaException as error:
        raise Unreachable(f"Kafka lists no topics ({error.args[0].str()}); check address and rights") from error


def _topic_configs(admin: Any, client: Any, known: Any, names: Sequence[str]) -> dict[str, dict[str, str]]:
    kind = admin.ConfigResource.Type.TOPIC
    return _configs(client, [admin.ConfigResource(kind, name) for name in dict.fromkeys(names) if name in known.topics])


def _configs(client: Any, asked: Sequence[Any]) -> dict[str, dict[str, str]]:
    """Return the settings of topics or of a broker; those that we may not see are left out."""
    found = {}
    for about, answer in client.describe_configs(asked).items() if asked else ():
        try:
            entries = answer.result(ANSWER_SECONDS_MAX)
        except (driver().KafkaException, TimeoutError):
            continue
        found[about.name] = {name: entry.value for name, entry in entries.items()}
    return found


def _topic(name: str, known: Any, config: Mapping[str, str] | None) -> Topic:
    partitions = list(known.partitions.values()) if known is not None else []
    if not partitions:
        return Topic(name)
    return Topic(
        name,
        replicas=min(len(partition.replicas) for partition in partitions),
        in_sync=min(len(partition.isrs) for partition in partitions),
        leaderless=sum(partition.leader < 0 for partition in partitions),
        config=config,
    )


def judge_encryption(bootstrap: str, protocol: str) -> Finding:
    """Judge who can read along.

    >>> judge_encryption("broker.example:9092", "SASL_PLAINTEXT").level
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


def judge_auto_create(said: Sequence[str | None]) -> Finding:
    """Judge what becomes of a misspelt topic.

    >>> judge_auto_create(["true"]).level
    <Level.WARN: 'warn'>
    """
    check = "kafka-auto-create"
    if "true" in said:
        text = "a topic that is missing is made when first used, with the defaults of the brokers"
        return warn(check, text, "set auto.create.topics.enable=false on the brokers")
    if None in said or not said:
        text = "whether missing topics are made by themselves cannot be seen"
        return warn(check, text, "let this user describe the configuration of the cluster")
    return ok(check, "off")


def judge_topics(topics: Sequence[Topic], brokers: int, bootstrap: str, bytes_max: int) -> list[Finding]:
    """Judge the topics: one finding for each thing that is wrong, with all topics it is wrong with."""
    if not topics:
        remedy = "name them: --topic, or topics in the file"
        return [warn("kafka-topics", "no topic was looked at: none is named, and none is staged", remedy)]
    found: dict[Problem, list[str]] = {}
    for topic in topics:
        for problem in problems(topic, brokers, bootstrap, bytes_max):
            found.setdefault(problem, []).append(topic.name)
    bad = [
        Finding(
            problem.level,
            problem.check,
            f"{', '.join(names)}: {problem.text}",
            problem.remedy.replace("TOPIC", names[0]) if len(names) == 1 else f"for each TOPIC: {problem.remedy}",
        )
        for problem, names in found.items()
    ]
    fine = set[str].intersection(*(looked_at(topic) for topic in topics)) - {finding.check for finding in bad}
    return bad + [ok(check, CHECKS[check]) for check in CHECKS if check in fine]


def looked_at(topic: Topic) -> set[str]:
    """Return what could be judged about a topic: without its settings little, with one copy not where the others are.

    >>> sorted(looked_at(Topic("orders", replicas=1)))
    ['kafka-configs', 'kafka-leaders', 'kafka-replication', 'kafka-topics']
    """
    if not topic.replicas:
        return {"kafka-topics"}
    found = {"kafka-topics", "kafka-leaders", "kafka-replication", "kafka-configs"}
    if topic.config is not None:
        found |= {"kafka-elections", "kafka-message-size"} | ({"kafka-in-sync"} if topic.replicas > 1 else set())
    return found


def problems(topic: Topic, brokers: int, bootstrap: str, bytes_max: int) -> list[Problem]:
    """List what is wrong with one topic.

    >>> problems(Topic("orders"), 3, "b:9092", 1000)[0].check
    'kafka-topics'
    """
    tool = f"--bootstrap-server {bootstrap}"
    if not topic.replicas:
        copies = min(3, brokers)
        kept = " --config min.insync.replicas=2" if copies == 3 else ""
        make = f"kafka-topics.sh {tool} --create --topic TOPIC --partitions 6 --replication-factor {copies}{kept}"
        return [Problem(Level.REFUSE, "kafka-topics", "not there; its events would be buried", make)]
    found = []
    if topic.leaderless:
        text = f"{topic.leaderless} partitions without a leader"
        found.append(Problem(Level.WARN, "kafka-leaders", text, "check Kafka's brokers"))
    if topic.replicas == 1:
        remedy = "reassign TOPIC to three brokers (kafka-reassign-partitions.sh)" if brokers > 1 else "add brokers"
        text = "one copy only; if its disk is lost, so is what was confirmed"
        found.append(Problem(Level.WARN, "kafka-replication", text, remedy))
    alter = f"kafka-configs.sh {tool} --alter --entity-type topics --entity-name TOPIC --add-config "
    if topic.config is None:
        remedy = "let this user describe the configuration of the topic"
        return [*found, Problem(Level.WARN, "kafka-configs", "its settings may not be seen", remedy)]
    return found + _problems_of_config(topic, topic.config, alter, bytes_max)


def _problems_of_config(topic: Topic, config: Mapping[str, str], alter: str, bytes_max: int) -> list[Problem]:
    found = []
    needed, limit = int(config.get("min.insync.replicas", "1")), int(config.get("max.message.bytes", bytes_max))
    if needed < 2 <= topic.replicas:
        level = Level.REFUSE if topic.replicas >= 3 else Level.WARN
        text = f"min.insync.replicas is {needed}: a message can be confirmed with one copy, and be lost with it"
        found.append(Problem(level, "kafka-in-sync", text, f"{alter}min.insync.replicas=2"))
    elif needed > topic.replicas:
        text = f"min.insync.replicas is {needed}, more than there are copies: older brokers then refuse every publish"
        found.append(Problem(Level.WARN, "kafka-in-sync", text, "raise the replication factor of TOPIC"))
    elif needed == topic.replicas > 1:
        text = f"min.insync.replicas is {needed}, as many as there are copies: one broker down stops every publish"
        found.append(Problem(Level.WARN, "kafka-in-sync", text, "raise the replication factor of TOPIC"))
    if not topic.leaderless and topic.in_sync < min(needed, topic.replicas):
        text = f"{topic.in_sync} replicas in sync, and {needed} are needed"
        found.append(Problem(Level.WARN, "kafka-leaders", text, "check Kafka's brokers"))
    if config.get("unclean.leader.election.enable") == "true":
        text = "unclean.leader.election.enable is true: a replica that lags behind can become the leader, and what it "
        text += "lacks is lost though confirmed"
        found.append(Problem(Level.REFUSE, "kafka-elections", text, f"{alter}unclean.leader.election.enable=false"))
    if limit < bytes_max:
        text = f"max.message.bytes is {limit}, and we let {bytes_max} through; what lies between is buried"
        remedy = f"{alter}max.message.bytes={bytes_max}, or lower message.max.bytes in the broker's URL"
        found.append(Problem(Level.WARN, "kafka-message-size", text, remedy))
    return found
