"""A throw-away Apache Kafka, one broker or several, in KRaft mode.

The programs are the official Kafka artifacts from the Maven repository. Maven fetches them once into a cache shared by
all processes of the user; after the download a start needs only Java.
"""

from __future__ import annotations

import shutil
import time
import uuid
from base64 import urlsafe_b64encode
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from importlib import import_module
from pathlib import Path
from typing import Any, Self

from outrider.testing.servers.server import (
    POLL_SECONDS,
    Server,
    ServerError,
    ServerMissing,
    cached,
    fetch,
    free_port,
    given_or,
    listening,
)

VARIABLE = "OUTRIDER_TEST_KAFKA"
VERSION = "4.1.0"
ARTIFACTS = {"org.apache.kafka:kafka_2.13": VERSION, "org.slf4j:slf4j-simple": "1.7.36"}
ANSWER_SECONDS_MAX = 5.0
LEADER_SECONDS_MAX = 20.0

# Fewer threads and files and shorter timeouts than in production; settings for durability are unchanged.
SETTINGS = {
    "auto.create.topics.enable": "false",
    "broker.heartbeat.interval.ms": "500",
    "broker.session.timeout.ms": "3000",
    "controlled.shutdown.enable": "false",
    "controller.quorum.election.backoff.max.ms": "200",
    "group.initial.rebalance.delay.ms": "0",
    "group.min.session.timeout.ms": "1000",
    "log.cleaner.dedupe.buffer.size": "4194304",
    "log.index.size.max.bytes": "262144",
    "log.segment.bytes": "16777216",
    "num.io.threads": "4",
    "num.network.threads": "2",
    "offsets.topic.num.partitions": "3",
    "transaction.state.log.num.partitions": "3",
}
# Tests start and stop servers all the time: a quick start is worth more than the best machine code.
JAVA_OPTIONS = ("-Xmx512m", "-XX:+UseSerialGC", "-XX:TieredStopAtLevel=1", "-Xshare:auto")
LOG_OPTIONS = ("-Dorg.slf4j.simpleLogger.defaultLogLevel=warn", "-Dorg.slf4j.simpleLogger.showDateTime=true")

Node = tuple[int, int]
"""The two ports of a node: for clients, and for the other controllers."""


class KafkaServer(Server):
    """One Kafka node, both broker and controller. By default the node is a cluster by itself."""

    name = "Kafka"

    def __init__(
        self,
        *,
        settings: Mapping[str, str] | None = None,
        auto_create_topics: bool = False,
        nodes: Sequence[Node] = (),
        number: int = 1,
        cluster_id: str | None = None,
    ) -> None:
        super().__init__()
        self.programs = find_programs()
        self.nodes = nodes or _free_nodes(1)
        self.number = number
        self.cluster_id = cluster_id or _random_id()
        self.port = self.nodes[number - 1][0]
        self.settings = {**SETTINGS, "auto.create.topics.enable": str(auto_create_topics).lower(), **(settings or {})}

    @property
    def bootstrap(self) -> str:
        """The address to which clients connect first."""
        return f"127.0.0.1:{self.port}"

    @property
    def url(self) -> str:
        """The URL of the broker in Outrider's format."""
        return f"kafka://{self.bootstrap}"

    def create_topic(self, name: str, *, partitions: int = 1, config: Mapping[str, str] | None = None) -> None:
        """Create a topic and wait until every partition has a leader."""
        create_topic(self.bootstrap, name, partitions=partitions, config=config)

    def create(self) -> None:
        """Write the settings and format the storage."""
        settings = {**self._identity(), **_replication(len(self.nodes)), **self.settings}
        path = self.home / "server.properties"
        path.write_text("".join(f"{name}={value}\n" for name, value in settings.items()), encoding="utf-8")
        options = ["format", "--cluster-id", self.cluster_id, "--config", str(path)]
        self.run(self._java("kafka.tools.StorageTool", *options), "kafka-storage format")

    def command(self) -> Sequence[str]:
        """Return the command line of the node."""
        return self._java("kafka.Kafka", str(self.home / "server.properties"))

    def ready(self) -> bool:
        """Ask for metadata; the answer must list the node."""
        return listening(self.port) and self.number in _brokers(self.bootstrap)

    def _java(self, program: str, *options: str) -> list[str]:
        return ["java", *JAVA_OPTIONS, *LOG_OPTIONS, "-cp", f"{self.programs}/*", program, *options]

    def _identity(self) -> dict[str, str]:
        client, controller = self.nodes[self.number - 1]
        voters = (f"{number}@127.0.0.1:{ports[1]}" for number, ports in enumerate(self.nodes, start=1))
        return {
            "process.roles": "broker,controller",
            "node.id": str(self.number),
            "controller.quorum.voters": ",".join(voters),
            "controller.listener.names": "CONTROLLER",
            "listeners": f"PLAINTEXT://127.0.0.1:{client},CONTROLLER://127.0.0.1:{controller}",
            "advertised.listeners": f"PLAINTEXT://127.0.0.1:{client}",
            "listener.security.protocol.map": "CONTROLLER:PLAINTEXT,PLAINTEXT:PLAINTEXT",
            "log.dirs": str(self.home / "data"),
        }


class KafkaCluster:
    """Several nodes that a test may kill or pause one by one; a topic has a copy on three nodes."""

    def __init__(self, brokers: int = 3, *, settings: Mapping[str, str] | None = None) -> None:
        nodes, cluster_id = _free_nodes(brokers), _random_id()
        self.brokers = [
            KafkaServer(settings=settings, nodes=nodes, number=number, cluster_id=cluster_id)
            for number in range(1, brokers + 1)
        ]

    def __enter__(self) -> Self:
        return self.start()

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if error is not None:
            for broker in self.brokers:
                broker.keep_log(error)
        self.stop()

    @property
    def bootstrap(self) -> str:
        """The address to which clients connect first: any node."""
        return ",".join(broker.bootstrap for broker in self.brokers)

    def start(self) -> Self:
        """Start all nodes at once: no node is ready before a majority has started."""
        try:
            with ThreadPoolExecutor(len(self.brokers)) as threads:
                list(threads.map(KafkaServer.start, self.brokers))
        except BaseException:
            self.stop()
            raise
        return self

    def stop(self) -> None:
        """Kill all nodes and remove their data. In a clean shutdown the nodes would wait for one another."""
        for broker in self.brokers:
            broker.kill()
            broker.stop()

    def create_topic(self, name: str, *, partitions: int = 1, config: Mapping[str, str] | None = None) -> None:
        """Create a topic and wait until every partition has a leader."""
        create_topic(self.bootstrap, name, partitions=partitions, config=config)

    def leader(self, topic: str, partition: int = 0) -> KafkaServer:
        """Return the node that leads a partition."""
        leaders = _leaders(_admin(self.bootstrap), topic, partition + 1)
        return self.brokers[leaders[partition] - 1]


def create_topic(bootstrap: str, name: str, *, partitions: int = 1, config: Mapping[str, str] | None = None) -> None:
    """Create a topic and wait until every partition has a leader."""
    admin = _admin(bootstrap)
    wanted = import_module("confluent_kafka.admin").NewTopic(
        name, num_partitions=partitions, replication_factor=-1, config=dict(config or {})
    )
    admin.create_topics([wanted])[name].result(ANSWER_SECONDS_MAX * 2)
    _leaders(admin, name, partitions)


def _leaders(admin: Any, topic: str, partitions: int) -> dict[int, int]:
    """Wait until the queried node knows the leaders of the first partitions.

    Nodes learn the leaders at different times.
    """
    deadline = time.monotonic() + LEADER_SECONDS_MAX
    while time.monotonic() < deadline:
        found = admin.list_topics(topic, timeout=ANSWER_SECONDS_MAX).topics[topic].partitions
        leaders = {number: partition.leader for number, partition in found.items() if partition.leader > 0}
        if leaders.keys() >= set(range(partitions)):
            return leaders
        time.sleep(POLL_SECONDS)
    raise ServerError(f"The topic {topic} has no leader yet.")


def delete_topics(bootstrap: str, prefix: str) -> None:
    """Delete the topics whose names start with a prefix."""
    admin = _admin(bootstrap)
    found = [name for name in admin.list_topics(timeout=ANSWER_SECONDS_MAX).topics if name.startswith(prefix)]
    for deleted in admin.delete_topics(found).values() if found else ():
        deleted.result(ANSWER_SECONDS_MAX * 2)


@contextmanager
def kafka_bootstrap() -> Iterator[str]:
    """Return the servers in OUTRIDER_TEST_KAFKA, or start a private server for the duration of the block.

    ```python
    with kafka_bootstrap() as servers:
        broker = KafkaBroker(servers)
    ```
    """
    with given_or(VARIABLE, KafkaServer) as url:
        yield url.removeprefix("kafka://").rstrip("/")


def find_programs() -> Path:
    """Return the folder of Kafka's programs, which Maven fetches once."""
    if shutil.which("java") is None:
        raise ServerMissing(
            "Kafka", "Java is not installed; it needs a Java 17 runtime (Debian: openjdk-17-jre-headless)."
        )
    return cached("Kafka", f"kafka-{VERSION}", _fetch)


def _fetch(scratch: Path) -> Path:
    if shutil.which("mvn") is None:
        raise ServerMissing("Kafka", "Maven is not installed; it fetches Kafka once (Debian: maven).")
    (scratch / "pom.xml").write_text(_project(), encoding="utf-8")
    goal = ["dependency:copy-dependencies", "-DincludeScope=runtime", "-DoutputDirectory=programs"]
    fetch("Kafka", ["mvn", "--batch-mode", "--quiet", *goal], scratch)
    return scratch / "programs"


def _project() -> str:
    wanted = (
        f"<dependency><groupId>{name.partition(':')[0]}</groupId><artifactId>{name.partition(':')[2]}</artifactId>"
        f"<version>{version}</version></dependency>"
        for name, version in ARTIFACTS.items()
    )
    return (
        "<project><modelVersion>4.0.0</modelVersion><groupId>outrider</groupId><artifactId>kafka</artifactId>"
        f"<version>1</version><packaging>pom</packaging><dependencies>{''.join(wanted)}</dependencies></project>"
    )


def _replication(nodes: int) -> dict[str, str]:
    copies = str(min(nodes, 3))
    return {
        "default.replication.factor": copies,
        "min.insync.replicas": "2" if nodes >= 3 else "1",
        "offsets.topic.replication.factor": copies,
        "transaction.state.log.replication.factor": copies,
        "transaction.state.log.min.isr": "1",
    }


def _free_nodes(count: int) -> list[Node]:
    ports: set[int] = set()
    while len(ports) < 2 * count:
        ports.add(free_port())
    ordered = sorted(ports)
    return list(zip(ordered[::2], ordered[1::2], strict=True))


def _random_id() -> str:
    """Make a cluster id: 16 bytes in base64. The first bits are zero, because an id must not start with a dash."""
    return urlsafe_b64encode(b"\0" + uuid.uuid4().bytes[1:]).decode().rstrip("=")


def _admin(bootstrap: str) -> Any:
    # Connection errors of a node that is still starting are expected, and are not logged.
    settings = {"bootstrap.servers": bootstrap, "log_level": 0, "error_cb": lambda error: None}
    return import_module("confluent_kafka.admin").AdminClient(settings)


def _brokers(bootstrap: str) -> set[int]:
    kafka = import_module("confluent_kafka")
    try:
        return set(_admin(bootstrap).list_topics(timeout=1).brokers)
    except kafka.KafkaException:
        return set()
