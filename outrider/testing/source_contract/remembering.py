"""The rules of remembering: what is acked is done, everything else comes again."""

from __future__ import annotations

import asyncio

from outrider.testing.source_contract.bench import (
    PATIENCE_SECONDS,
    Reader,
    SourceBench,
    by_key,
    eventually,
    left,
    numbers,
    pumping,
    reading,
)


class RememberingRules:
    """Acks are told to the broker, and nothing else is."""

    async def test_nothing_is_acked_before_the_engine_says_so(self, bench: SourceBench) -> None:
        await bench.publish(bench.messages(50))
        for _ in range(3):
            async with reading(bench) as reader:
                await reader.until(50)
            assert by_key(reader.received) == {b"k%d" % k: list(range(k, 50, 5)) for k in range(5)}

    async def test_what_is_acked_does_not_come_again(self, bench: SourceBench) -> None:
        await bench.publish(bench.messages(50))
        async with reading(bench) as reader:
            reader.ack(await reader.until(50))
        assert await left(bench) == []

    async def test_a_closed_source_may_be_started_again_and_goes_on(self, bench: SourceBench) -> None:
        await bench.publish(bench.messages(30))
        async with reading(bench) as reader:
            await reader.until(30)
            await reader.source.close()
            await reader.source.close()
            await reader.source.start(reader.on_revoked)
            reader.ack(await reader.until(60))
        assert sorted(numbers(reader.received[30:])) == list(range(30))
        # What comes back is another shard: the engine may still have something of the old one under way.
        before, after = ({delivery.shard for delivery in half} for half in (reader.received[:30], reader.received[30:]))
        assert before.isdisjoint(after)
        assert await left(bench) == []

    async def test_acks_in_any_order_are_remembered_up_to_the_first_gap(self, bench: SourceBench) -> None:
        await bench.publish(bench.messages(40, keys=1))
        async with reading(bench) as reader:
            found = await reader.until(40)
            reader.ack([*reversed(found[:10]), *found[12:30], found[11]])
            await reader.looks(0)
        kept = [10, *range(30, 40)] if bench.single_acks else list(range(10, 40))
        async with reading(bench) as reader:
            await reader.until(len(kept))
            assert await reader.looks() == []
        assert numbers(reader.received) == kept

    async def test_an_ack_of_a_shard_that_is_gone_is_ignored(self, bench: SourceBench) -> None:
        await bench.publish(bench.messages(10, keys=1))
        async with reading(bench) as reader:
            old = await reader.until(10)
            await reader.source.close()
            await reader.source.start(reader.on_revoked)
            new = await reader.until(20)
            reader.ack(old)
            reader.ack(new[:4])
        reader.ack(new)
        assert await left(bench) == list(range(4, 10))

    async def test_another_consumer_receives_everything_too(self, bench: SourceBench) -> None:
        async with reading(bench, "billing") as billing, reading(bench, "stock") as stock:
            await bench.publish(bench.messages(30))
            billing.ack(await billing.until(30))
            assert sorted(numbers(await stock.until(30))) == list(range(30))

    async def test_a_place_is_the_same_each_time_and_no_other_message_has_it(self, bench: SourceBench) -> None:
        await bench.publish([*bench.messages(20), *bench.messages(20, topic=1, start=20)])
        places = []
        for _ in range(2):
            async with reading(bench, topics=bench.topics) as reader:
                await reader.until(40)
            places.append({delivery.headers["n"]: delivery.place for delivery in reader.received})
        if bench.places:
            assert places[0] == places[1]
            assert len(set(places[0].values())) == 40
        else:
            assert set(places[0].values()) == {""}

    async def test_what_one_source_leaves_behind_another_gets(self, bench: SourceBench) -> None:
        async with reading(bench) as first, reading(bench) as second:
            async with pumping(first, second):
                await bench.publish(bench.messages(60, keys=30))
                await eventually(lambda: len(_seen(first) | _seen(second)) == 60)
            assert not bench.shares or not _seen(first) & _seen(second)
            second.ack(second.held)
            await first.source.close()
            async with asyncio.timeout(PATIENCE_SECONDS):
                while len(_seen(second)) < 60:
                    await second.receive()
            assert await second.looks() == []
            assert len(second.held) == 60
            second.ack(second.held)
        assert await left(bench) == []


def _seen(reader: Reader) -> set[int]:
    """Return the numbers that a reader has received and that were not taken away from it."""
    return set(numbers(reader.held))
