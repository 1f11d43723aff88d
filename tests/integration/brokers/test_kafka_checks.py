"""The checks of the doctor on Kafka, with good and bad settings."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator, Sequence
from typing import Any
from uuid import uuid4

import pytest
from confluent_kafka import admin

from outrider.brokers.kafka import KafkaBroker
from outrider.brokers.kafka.checks import CHECKS
from outrider.checks import CheckResult, Level
from outrider.errors import Unreachable
from outrider.testing.servers import KafkaCluster, KafkaServer
from outrider.testing.servers.kafka import create_topic

pytestmark = pytest.mark.kafka
OK, WARN, ERROR = Level.OK, Level.WARN, Level.ERROR
SECONDS = 20


@pytest.fixture(scope="module")
def nodes() -> Iterator[KafkaCluster]:
    with KafkaCluster(3) as running:
        yield running


@pytest.fixture
def cluster(nodes: KafkaCluster) -> str:
    return nodes.bootstrap


@pytest.fixture(scope="module")
def lenient() -> Iterator[str]:
    """One broker that makes topics by itself, and applies access rules where there are any."""
    settings = {
        "authorizer.class.name": "org.apache.kafka.metadata.authorizer.StandardAuthorizer",
        "allow.everyone.if.no.acl.found": "true",
    }
    with KafkaServer(auto_create_topics=True, settings=settings) as running:
        yield running.bootstrap


async def found_on(bootstrap: str, *topics: str, **settings: str) -> dict[str, CheckResult]:
    """Return what a broker says, by the name of the check."""
    broker = KafkaBroker(bootstrap, {name.replace("_", "."): value for name, value in settings.items()})
    try:
        found = await broker.check(topics)
    finally:
        await broker.close()
    assert {result.check for result in found} <= CHECKS.keys()
    assert all(bool(result.remedy) == (result.level is not OK) for result in found)
    assert len({result.check for result in found}) == len(found)
    return {result.check: result for result in found}


async def made(bootstrap: str, *, copies: int = 3, on: Sequence[int] = (), **config: str) -> str:
    """Make a topic with so many copies, or on these brokers."""
    name = f"topic-{uuid4().hex[:12]}"
    said = {key.replace("_", "."): value for key, value in config.items()}
    kafka: Any = admin
    client = kafka.AdminClient({"bootstrap.servers": bootstrap, "log_level": 0})
    where = {"replica_assignment": [list(on)]} if on else {"replication_factor": copies}
    client.create_topics([kafka.NewTopic(name, 1, config=said, **where)])[name].result(SECONDS)
    for server in bootstrap.split(","):
        await _until(server, lambda topics: name in topics and topics[name].partitions[0].leader > 0)
    return name


async def test_a_cluster_as_it_should_be_gets_no_complaint(cluster: str) -> None:
    found = await found_on(cluster, await made(cluster))
    assert found.keys() == CHECKS.keys()
    assert {result.level for result in found.values()} == {OK}


@pytest.mark.parametrize(
    ("copies", "config", "check", "expected"),
    [
        (3, {"min_insync_replicas": "1"}, "kafka-in-sync", (ERROR, "confirmed with one copy")),
        (2, {"min_insync_replicas": "1"}, "kafka-in-sync", (WARN, "confirmed with one copy")),
        (3, {"min_insync_replicas": "3"}, "kafka-in-sync", (WARN, "one broker down stops every publish")),
        (1, {"min_insync_replicas": "1"}, "kafka-replication", (WARN, "one copy only")),
        (1, {"min_insync_replicas": "2"}, "kafka-in-sync", (WARN, "more than there are copies")),
        (3, {"unclean_leader_election_enable": "true"}, "kafka-elections", (ERROR, "lags behind")),
        (3, {"max_message_bytes": "5000"}, "kafka-message-size", (WARN, "max.message.bytes is 5000")),
    ],
)
async def test_a_topic_that_may_lose_or_stop_is_reported_with_the_fix(
    cluster: str, copies: int, config: dict[str, Any], check: str, expected: tuple[Level, str]
) -> None:
    level, words = expected
    topic = await made(cluster, copies=copies, **config)
    found = await found_on(cluster, topic)
    assert (found[check].level, words in found[check].text) == (level, True)
    assert topic in found[check].text
    others = {result.level for name, result in found.items() if name not in (check, "kafka-replication")}
    assert others == {OK}


async def test_partitions_that_lack_a_leader_or_replicas_are_reported(nodes: KafkaCluster) -> None:
    single, double = await made(nodes.bootstrap, on=[1]), await made(nodes.bootstrap, on=[1, 2])
    nodes.brokers[0].kill()
    try:
        await _until(nodes.bootstrap, lambda topics: topics[single].partitions[0].leader < 0)
        await _until(nodes.bootstrap, lambda topics: len(topics[double].partitions[0].isrs) == 1)
        first, second = [(await found_on(nodes.bootstrap, topic))["kafka-leaders"] for topic in (single, double)]
    finally:
        nodes.brokers[0].start()
    assert (first.level, "1 partitions without a leader" in first.text) == (WARN, True)
    assert (second.level, "1 replicas in sync, and 2 are needed" in second.text) == (WARN, True)


async def _until(bootstrap: str, seen: Callable[[Any], bool]) -> None:
    kafka: Any = admin
    client = kafka.AdminClient({"bootstrap.servers": bootstrap, "log_level": 0, "error_cb": lambda error: None})
    async with asyncio.timeout(SECONDS):
        while not seen((await asyncio.to_thread(client.list_topics, timeout=SECONDS)).topics):
            pass


async def test_a_limit_of_ours_that_fits_the_topic_is_fine(cluster: str) -> None:
    topic = await made(cluster, max_message_bytes="5000")
    assert (await found_on(cluster, topic, message_max_bytes="4000"))["kafka-message-size"].level is OK


async def test_missing_topics_are_rejected_together_with_the_command_that_makes_them(cluster: str) -> None:
    there = await made(cluster)
    found = (await found_on(cluster, "missing-a", there, "missing-b"))["kafka-topics"]
    assert found.level is ERROR
    assert found.text.startswith("missing-a, missing-b: not there")
    assert "--create --topic TOPIC" in found.remedy
    assert "--replication-factor 3 --config min.insync.replicas=2" in found.remedy
    assert "--create --topic missing-a" in (await found_on(cluster, "missing-a"))["kafka-topics"].remedy


async def test_a_check_creates_no_topic_even_where_topics_are_created_automatically(lenient: str) -> None:
    first, second = [await found_on(lenient, "never-made") for _ in range(2)]
    assert first["kafka-topics"].level is second["kafka-topics"].level is ERROR
    assert first["kafka-auto-create"].level is WARN


async def test_a_single_broker_is_warned_about(lenient: str) -> None:
    create_topic(lenient, "alone")
    found = await found_on(lenient, "alone")
    assert (found["kafka-replication"].level, found["kafka-replication"].remedy) == (WARN, "add brokers")
    # A check without anything to look at has no result.
    assert "kafka-in-sync" not in found


async def test_settings_that_may_not_be_seen_are_said_to_be_unknown(lenient: str) -> None:
    create_topic(lenient, "guarded")
    kafka: Any = admin
    topic_pattern = (kafka.ResourceType.TOPIC, "guarded", kafka.ResourcePatternType.LITERAL)
    rule = ("User:*", "*", kafka.AclOperation.WRITE, kafka.AclPermissionType.ALLOW)
    client = kafka.AdminClient({"bootstrap.servers": lenient, "log_level": 0})
    for done in client.create_acls([kafka.AclBinding(*topic_pattern, *rule)]).values():
        done.result(SECONDS)
    found = await found_on(lenient, "guarded")
    assert found["kafka-configs"].level is WARN
    assert found["kafka-topics"].level is OK
    assert not found.keys() & {"kafka-in-sync", "kafka-elections", "kafka-message-size"}


async def test_without_a_topic_that_is_said(cluster: str) -> None:
    found = (await found_on(cluster))["kafka-topics"]
    assert (found.level, "--topic" in found.remedy) == (WARN, True)


async def test_a_broker_that_does_not_answer_is_unreachable(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("outrider.brokers.kafka.broker.START_SECONDS_MAX", 0.3)
    with pytest.raises(Unreachable, match=r"127\.0\.0\.1:9 does not answer"):
        await found_on("127.0.0.1:9")
