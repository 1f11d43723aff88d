"""The rules of receiving: what comes, in which order, how much of it, and from which shards."""

from __future__ import annotations

from outrider.testing.source_contract.bench import SourceBench, by_key, message, numbers, reading


class ReceivingRules:
    """What is published is received."""

    async def test_a_message_is_received_as_it_was_sent(self, bench: SourceBench) -> None:
        [sent] = bench.messages(1)
        await bench.publish([sent])
        async with reading(bench) as reader:
            [found] = await reader.until(1)
        assert (found.topic, found.key, found.body) == (sent.topic, sent.key.encode(), sent.body)
        assert found.headers.items() >= {name: text.encode() for name, text in sent.headers.items()}.items()
        assert found.shard

    async def test_everything_is_received_once_and_in_order_per_key(self, bench: SourceBench) -> None:
        async with reading(bench) as reader:
            await bench.publish(bench.messages(500))
            await reader.until(500)
            await bench.publish(bench.messages(100, start=500))
            await reader.until(600)
            assert await reader.looks() == []
        assert by_key(reader.received) == {b"k%d" % k: list(range(k, 600, 5)) for k in range(5)}

    async def test_an_empty_body_and_a_large_one_arrive(self, bench: SourceBench) -> None:
        topic, large = bench.topics[0], b"x" * 500_000
        await bench.publish([message(1, topic=topic, key="A", body=b""), message(2, topic=topic, key="A", body=large)])
        async with reading(bench) as reader:
            assert [delivery.body for delivery in await reader.until(2)] == [b"", large]

    async def test_several_topics_are_received_by_one_source(self, bench: SourceBench) -> None:
        await bench.publish([*bench.messages(20), *bench.messages(20, topic=1, start=100)])
        async with reading(bench, topics=bench.topics) as reader:
            await reader.until(40)
        for topic, start in zip(bench.topics, (0, 100), strict=True):
            found = numbers(delivery for delivery in reader.received if delivery.topic == topic)
            assert sorted(found) == list(range(start, start + 20))

    async def test_another_topic_is_left_alone(self, bench: SourceBench) -> None:
        await bench.publish([*bench.messages(5, topic=1, start=100), *bench.messages(5)])
        async with reading(bench) as reader:
            await reader.until(5)
            assert await reader.looks() == []
        assert sorted(numbers(reader.received)) == list(range(5))

    async def test_no_more_are_received_than_asked_for(self, bench: SourceBench) -> None:
        await bench.publish(bench.messages(100))
        async with reading(bench) as reader:
            assert await reader.looks(0) == []
            while len(reader.received) < 100:
                assert len(await reader.receive(7)) <= 7
            assert await reader.looks(7) == []
        assert by_key(reader.received) == {b"k%d" % k: list(range(k, 100, 5)) for k in range(5)}

    async def test_a_paused_shard_delivers_nothing_until_it_goes_on(self, bench: SourceBench) -> None:
        await bench.publish(bench.messages(100, keys=20))
        async with reading(bench) as reader:
            await reader.until(100, limit=10)
            paused = frozenset(delivery.shard for delivery in reader.received)
            await bench.publish(bench.messages(100, keys=20, start=100))
            assert await reader.looks(10, paused) == []
            await reader.until(200, limit=10)
            assert await reader.looks() == []
        assert by_key(reader.received) == {b"k%d" % k: list(range(k, 200, 20)) for k in range(20)}

    async def test_a_paused_shard_does_not_stop_the_others(self, bench: SourceBench) -> None:
        """Where both topics are one shard, pausing it stops both, and the test says little."""
        both = [*bench.messages(40, keys=20), *bench.messages(40, keys=20, topic=1)]
        await bench.publish(both)
        async with reading(bench, topics=bench.topics) as reader:
            await reader.until(80)
            paused = frozenset([reader.received[0].shard])
            share = sum(delivery.shard in paused for delivery in reader.received)
            await bench.publish(both)
            await reader.until(160 - share, paused=paused)
            assert paused.isdisjoint(delivery.shard for delivery in reader.received[80:])
            resumed = await reader.until(160)
            assert {delivery.shard for delivery in resumed} == paused
