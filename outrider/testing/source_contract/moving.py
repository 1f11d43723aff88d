"""The rules of shards that move from one process of a consumer to another."""

from __future__ import annotations

import asyncio
from collections.abc import Set as AbstractSet

from outrider.testing.source_contract.bench import (
    PATIENCE_SECONDS,
    Reader,
    SourceBench,
    eventually,
    numbers,
    pumping,
    reading,
)


class MovingRules:
    """A shard is let go of before it is taken."""

    async def test_a_shard_moves_only_when_revoked_has_returned(self, bench: SourceBench) -> None:
        await bench.publish(bench.messages(60, keys=30))
        async with reading(bench) as first:
            await first.until(60)
            first.may_go.clear()
            async with reading(bench) as second, pumping(first, second):
                await eventually(lambda: first.revoked)
                moved = [delivery for delivery in first.received if delivery.shard in first.revoked]
                assert 0 < len(moved) < 60
                assert second.received == []
                first.may_go.set()
                await eventually(lambda: len(second.received) >= len(moved))
                assert sorted(numbers(second.received)) == sorted(numbers(moved))
                assert sorted(numbers([*first.held, *second.held])) == list(range(60))

    async def test_acks_given_while_a_shard_is_revoked_still_count(self, bench: SourceBench) -> None:
        await bench.publish(bench.messages(60, keys=30))
        async with reading(bench) as first:
            await first.until(60)
            first.may_go.clear()
            async with reading(bench) as second, pumping(first, second):
                await eventually(lambda: first.revoked)
                first.ack(first.received)
                first.may_go.set()
                await bench.publish(bench.messages(60, keys=30, start=60))
                await eventually(lambda: len(first.received) + len(second.received) >= 120)
                assert sorted(numbers([*first.received, *second.received])) == list(range(120))
                assert numbers(second.received)

    async def test_an_ack_that_comes_after_a_shard_has_moved_is_ignored(self, bench: SourceBench) -> None:
        await bench.publish(bench.messages(60, keys=30))
        async with reading(bench) as first:
            await first.until(60)
            async with reading(bench) as second:
                async with pumping(first, second):
                    await eventually(lambda: 0 < _count(first, first.revoked) <= len(second.received))
                moved = numbers(second.received)
                first.ack(first.received)
                await first.source.close()
            async with reading(bench) as third:
                await third.until(len(moved))
                assert await third.looks() == []
        assert sorted(numbers(third.received)) == sorted(moved)

    async def test_a_shard_that_was_paused_when_it_went_is_not_when_it_comes_back(self, bench: SourceBench) -> None:
        await bench.publish(bench.messages(2000, keys=30))
        async with reading(bench) as first:
            await first.until(1)
            for _ in range(2):
                paused = {delivery.shard for delivery in first.held}
                await first.looks(0)
                await first.looks(5, paused)
            async with reading(bench) as second:
                # While it is paused the first one only serves the move.
                while not second.received:
                    await first.receive(0)
                    await second.receive()
            async with asyncio.timeout(PATIENCE_SECONDS):
                while set(numbers(first.held)) != set(range(2000)):
                    await first.receive()


def _count(reader: Reader, shards: AbstractSet[str]) -> int:
    return sum(delivery.shard in shards for delivery in reader.received)
