"""The source contract on the embedded broker."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from pathlib import Path

import pytest

from outrider.brokers.base import CONFIRMED
from outrider.brokers.embedded import EmbeddedBroker, EmbeddedSource
from outrider.event import Message
from outrider.testing.contracts import SourceBench, SourceContract
from tests.contract.source.bounded_contract import BoundedContract


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


class TestEmbeddedSource(SourceContract, BoundedContract):
    @pytest.fixture
    async def bench(self, tmp_path: Path) -> AsyncIterator[SourceBench]:
        bench = EmbeddedBench(tmp_path / "log.db")
        yield bench
        await bench.broker.close()
