"""The broker contract on the memory broker."""

from __future__ import annotations

import pytest

from outrider.event import Message
from outrider.testing import MemoryBroker
from outrider.testing.contracts.broker import BrokerBench, BrokerContract, OrderedBrokerContract


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
