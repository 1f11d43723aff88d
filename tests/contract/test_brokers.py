"""The broker contract on every broker of ours."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from outrider.brokers.embedded import EmbeddedBroker
from outrider.event import Message
from outrider.testing import MemoryBroker
from outrider.testing.contracts.broker import BrokerBench, BrokerContract, OrderedBrokerContract


class TestEmbeddedBroker(OrderedBrokerContract):
    @pytest.fixture
    async def bench(self, tmp_path: Path) -> AsyncIterator[BrokerBench]:
        broker, reader = EmbeddedBroker(tmp_path / "log.db"), EmbeddedBroker(tmp_path / "log.db")
        await broker.start()
        await reader.start()

        async def read(topic: str) -> list[Message]:
            return [entry.message for entry in await reader.read("test", [topic], 10_000)]

        yield BrokerBench(broker, read)
        await broker.close()
        await reader.close()


class TestMemoryBroker(BrokerContract):
    @pytest.fixture
    def bench(self) -> BrokerBench:
        return _in_memory(MemoryBroker())


class TestOrderedMemoryBroker(OrderedBrokerContract):
    @pytest.fixture
    def bench(self) -> BrokerBench:
        return _in_memory(MemoryBroker(ordered=True))


def _in_memory(broker: MemoryBroker) -> BrokerBench:
    async def read(topic: str) -> list[Message]:
        return [message for message in broker.log if message.topic == topic]

    return BrokerBench(broker, read)
