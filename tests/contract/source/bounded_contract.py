"""The rule of sources that read a log: a source does not run far ahead of its acks."""

from __future__ import annotations

import pytest

from outrider.testing.contracts import SourceBench, reading
from outrider.testing.contracts.source import numbers


class BoundedContract:
    """One more rule of sources that read a log."""

    async def test_a_source_does_not_run_far_ahead_of_its_acks(
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
