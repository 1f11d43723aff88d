"""The source contract on the embedded broker and on Kafka."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator, Sequence
from pathlib import Path

import pytest

from outrider.brokers.base import CONFIRMED
from outrider.brokers.embedded import EmbeddedBroker, EmbeddedSource
from outrider.brokers.kafka import KafkaBroker, KafkaSource
from outrider.event import Message
from outrider.testing.contracts import MovingPartitionsContract, SourceBench, SourceContract, reading
from outrider.testing.contracts.source import numbers
from outrider.testing.servers.kafka import kafka_bootstrap
from tests.contract.test_kafka import make_topic


class EmbeddedBench(SourceBench):
    """A log in a file."""

    shares = False

    def __init__(self, path: Path) -> None:
        super().__init__(("orders", "parcels"))
        self._path, self.broker = path, EmbeddedBroker(path)

    async def publish(self, messages: Sequence[Message]) -> None:
        assert set(await self.broker.publish(messages)) == {CONFIRMED}

    def source(self, consumer: str, topics: Sequence[str]) -> EmbeddedSource:
        return EmbeddedSource(self._path, consumer, topics)


class BoundedContract:
    """What sources that read a log do as well."""

    async def test_a_source_does_not_run_far_ahead_of_what_is_undone(
        self, bench: SourceBench, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """One key that fails for long must not make everything behind it come again, nor fill the memory."""
        for module in ("embedded.consumer", "kafka.group_member"):
            monkeypatch.setattr(f"outrider.brokers.{module}.AHEAD_MAX", 10)
        await bench.publish(bench.messages(40, keys=1))
        async with reading(bench) as reader:
            found = await reader.until(10, limit=1)
            reader.ack(found[1:])
            assert await reader.looks() == []
            reader.ack(found[:1])
            await reader.until(20, limit=1)
            assert await reader.looks() == []
            reader.ack(reader.received)
            await reader.until(30, limit=1)
        assert numbers(reader.received) == list(range(30))


class TestEmbeddedSource(SourceContract, BoundedContract):
    @pytest.fixture
    async def bench(self, tmp_path: Path) -> AsyncIterator[SourceBench]:
        bench = EmbeddedBench(tmp_path / "log.db")
        yield bench
        await bench.broker.close()


@pytest.fixture(scope="module")
def bootstrap() -> Iterator[str]:
    with kafka_bootstrap() as servers:
        yield servers


class KafkaBench(SourceBench):
    """Two topics of a server; groups are named after them, so that each test has its own.

    With a short session a member hears of a rebalance sooner.
    """

    def __init__(self, bootstrap: str, broker: KafkaBroker) -> None:
        super().__init__((make_topic(bootstrap), make_topic(bootstrap)))
        self._bootstrap, self._broker = bootstrap, broker

    async def publish(self, messages: Sequence[Message]) -> None:
        assert set(await self._broker.publish(messages)) == {CONFIRMED}

    def source(self, consumer: str, topics: Sequence[str]) -> KafkaSource:
        return KafkaSource(self._bootstrap, f"{consumer}-{self.topics[0]}", topics, {"session.timeout.ms": "1500"})


@pytest.mark.kafka
class TestKafkaSource(MovingPartitionsContract, BoundedContract):
    @pytest.fixture
    async def bench(self, bootstrap: str) -> AsyncIterator[SourceBench]:
        broker = KafkaBroker(bootstrap)
        await broker.start()
        yield KafkaBench(bootstrap, broker)
        await broker.close()
