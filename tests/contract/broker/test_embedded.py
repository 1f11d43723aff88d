"""The broker contract on the embedded broker."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from outrider.brokers.embedded import EmbeddedBroker
from outrider.event import Message
from outrider.testing.contracts.broker import BrokerBench, OrderedBrokerContract


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
