"""The source contract on Kafka."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator, Sequence

import pytest

from outrider.brokers.base import CONFIRMED
from outrider.brokers.kafka import KafkaBroker, KafkaSource
from outrider.event import Message
from outrider.testing.contracts import MovingPartitionsContract, SourceBench
from outrider.testing.servers.kafka import kafka_bootstrap
from tests.contract.source.bounded_contract import BoundedContract
from tests.support.kafka_client import make_topic


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
