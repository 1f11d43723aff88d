"""The broker contract as a test suite.

Subclass `BrokerContract`, or `OrderedBrokerContract` if the broker itself keeps the order of a stream, and define a
`bench` fixture: a started broker and a function to read messages back.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from uuid import uuid4

from outrider.brokers.base import Broker, Confirmed, Rejected
from outrider.checks import Level
from outrider.event import Message


@dataclass(frozen=True, slots=True)
class BrokerBench:
    """A broker under test.

    `read` returns every message of a topic, oldest first, without using the broker under test.
    """

    broker: Broker
    read: Callable[[str], Awaitable[list[Message]]]


def message(number: int, *, topic: str = "orders", key: str = "A", body: bytes | None = None) -> Message:
    """Make a message with a number in the body."""
    name = str(uuid4())
    headers = {"message_id": name, "event_type": "order.changed", "n": str(number), "odd": "naïve ☂"}
    return Message(name, topic, key, None, body if body is not None else b'{"n":%d}' % number, headers)


class BrokerContract:
    """Rules for every broker."""

    async def test_a_confirmed_message_is_there_as_it_was_sent(self, bench: BrokerBench) -> None:
        sent = message(1)
        assert await bench.broker.publish([sent]) == [Confirmed()]
        [found] = await bench.read("orders")
        assert (found.message_id, found.key, found.body) == (sent.message_id, sent.key, sent.body)
        assert found.headers.items() >= sent.headers.items()

    async def test_there_is_one_publish_result_per_message_in_the_order_given(self, bench: BrokerBench) -> None:
        sent = [message(n, key=f"k{n % 7}") for n in range(500)]
        assert list(await bench.broker.publish(sent)) == [Confirmed()] * 500

    async def test_the_order_of_a_key_is_kept_within_and_between_calls(self, bench: BrokerBench) -> None:
        sent = [message(n, key=f"k{n % 3}") for n in range(300)]
        for start in range(0, 300, 50):
            await bench.broker.publish(sent[start : start + 50])
        found = await bench.read("orders")
        for key in ("k0", "k1", "k2"):
            expected = [m.message_id for m in sent if m.key == key]
            assert [m.message_id for m in found if m.key == key] == expected

    async def test_topics_are_kept_apart(self, bench: BrokerBench) -> None:
        await bench.broker.publish([message(1, topic="orders"), message(2, topic="parcels")])
        assert [m.headers["n"] for m in await bench.read("orders")] == ["1"]
        assert [m.headers["n"] for m in await bench.read("parcels")] == ["2"]

    async def test_nothing_to_publish_is_fine(self, bench: BrokerBench) -> None:
        assert list(await bench.broker.publish([])) == []

    async def test_an_oversize_message_is_rejected_and_good_ones_of_other_keys_are_not(
        self, bench: BrokerBench
    ) -> None:
        huge = message(1, key="A", body=b"x" * (bench.broker.capabilities.message_bytes_max + 1))
        results = await bench.broker.publish([message(0, key="B"), huge, message(2, key="C")])
        assert isinstance(results[1], Rejected)
        assert results[0] == results[2] == Confirmed()
        assert {m.key for m in await bench.read("orders")} == {"B", "C"}

    async def test_a_probe_of_a_broker_that_works_passes(self, bench: BrokerBench) -> None:
        await bench.broker.probe(bench.broker.destination(message(1)))

    async def test_checks_find_the_topic_and_send_nothing(self, bench: BrokerBench) -> None:
        found = await bench.broker.check(["orders"])
        assert Level.ERROR not in {result.level for result in found}
        assert all(result.check and result.text for result in found)
        assert all(bool(result.remedy) == (result.level is not Level.OK) for result in found)
        assert await bench.read("orders") == []
        assert await bench.broker.publish([message(1)]) == [Confirmed()]

    async def test_an_empty_body_and_a_large_one_arrive(self, bench: BrokerBench) -> None:
        large = b"x" * (bench.broker.capabilities.message_bytes_max // 2)
        await bench.broker.publish([message(1, body=b""), message(2, body=large)])
        assert [m.body for m in await bench.read("orders")] == [b"", large]


class OrderedBrokerContract(BrokerContract):
    """Additional rules for a broker whose traits say `ordered`."""

    async def test_nothing_is_confirmed_behind_a_failure_of_the_same_key(self, bench: BrokerBench) -> None:
        assert bench.broker.capabilities.ordered
        huge = message(1, body=b"x" * (bench.broker.capabilities.message_bytes_max + 1))
        results = await bench.broker.publish([message(0), huge, message(2), message(3)])
        assert isinstance(results[0], Confirmed)
        assert not any(isinstance(result, Confirmed) for result in results[1:])
        assert [m.headers["n"] for m in await bench.read("orders")] == ["0"]
