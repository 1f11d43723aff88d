"""The embedded broker: a log that keeps what it confirms, in order, for any number of processes."""

from __future__ import annotations

import asyncio
import multiprocessing
import sqlite3
from collections.abc import AsyncIterator
from contextlib import closing
from pathlib import Path

import pytest

from outrider.brokers.base import CONFIRMED, Nacked, Rejected, Unknown
from outrider.brokers.embedded import EmbeddedBroker
from outrider.brokers.embedded import log as log_module
from outrider.errors import Transient, Unreachable
from outrider.event import Message


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "log.db"


@pytest.fixture
async def broker(path: Path) -> AsyncIterator[EmbeddedBroker]:
    broker = EmbeddedBroker(path)
    await broker.start()
    yield broker
    await broker.close()


def message(number: int, topic: str = "orders", key: str = "A", body: bytes = b"{}") -> Message:
    return Message(str(number), topic, key, "route", body, {"number": str(number)})


def publish_many(path: Path, start: int, count: int) -> None:
    """Run in a process of its own."""

    async def publish() -> None:
        broker = EmbeddedBroker(path)
        for number in range(start, start + count, 5):
            results = await broker.publish([message(n, key=str(start)) for n in range(number, number + 5)])
            assert list(results) == [CONFIRMED] * 5
        await broker.close()

    asyncio.run(publish())


async def test_a_confirmed_message_survives_the_broker(broker: EmbeddedBroker, path: Path) -> None:
    sent = [message(1), message(2, body=b"\x00\xff")]
    assert list(await broker.publish(sent)) == [CONFIRMED, CONFIRMED]
    await broker.close()
    other = EmbeddedBroker(path)
    assert [entry.message for entry in await other.read("c", None, 10)] == sent
    await other.close()


async def test_processes_that_publish_at_once_lose_nothing_and_keep_order(path: Path) -> None:
    context = multiprocessing.get_context("spawn")
    workers = [context.Process(target=publish_many, args=(path, start, 200)) for start in (0, 1000)]
    for worker in workers:
        worker.start()
    for worker in workers:
        await asyncio.to_thread(worker.join)
    assert [worker.exitcode for worker in workers] == [0, 0]
    broker = EmbeddedBroker(path)
    found = [int(entry.message.message_id) for entry in await broker.read("c", None, 1000)]
    assert [n for n in found if n < 1000] == list(range(200))
    assert [n for n in found if n >= 1000] == list(range(1000, 1200))
    await broker.close()


async def test_nothing_follows_a_rejected_message_of_its_stream(broker: EmbeddedBroker) -> None:
    large = b"x" * (broker.capabilities.message_bytes_max + 1)
    batch = [message(1), message(2, body=large), message(3), message(4, key="B"), message(5, topic="other")]
    kinds = [type(result) for result in await broker.publish(batch)]
    assert kinds == [type(CONFIRMED), Rejected, Nacked, type(CONFIRMED), type(CONFIRMED)]
    assert [entry.message.message_id for entry in await broker.read("c", None, 10)] == ["1", "4", "5"]


async def test_a_log_that_cannot_be_written_rejects_no_message(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(log_module, "BUSY_SECONDS", 0.01)
    broker = EmbeddedBroker(path)
    await broker.start()
    with closing(sqlite3.connect(path, isolation_level=None)) as other:
        other.execute("BEGIN IMMEDIATE")
        assert [type(result) for result in await broker.publish([message(1), message(2)])] == [Unknown] * 2
        with pytest.raises(Transient):
            await broker.probe("")
        other.execute("ROLLBACK")
    await broker.probe("")
    assert list(await broker.publish([message(1)])) == [CONFIRMED]
    await broker.close()


async def test_a_path_that_cannot_be_opened_is_unreachable(tmp_path: Path) -> None:
    broker = EmbeddedBroker(tmp_path / "absent" / "log.db")
    with pytest.raises(Unreachable):
        await broker.start()
    assert [type(result) for result in await broker.publish([message(1)])] == [Unknown]
    await broker.close()


async def test_a_consumer_goes_on_from_what_it_committed(broker: EmbeddedBroker) -> None:
    await broker.publish([message(n) for n in range(5)])
    first = await broker.read("c", None, 2)
    assert await broker.read("c", None, 2) == first
    await broker.commit("c", first[-1].offset)
    assert [entry.message.message_id for entry in await broker.read("c", None, 9)] == ["2", "3", "4"]
    await broker.commit("c", first[0].offset)
    assert len(await broker.read("c", None, 9)) == 3
    assert len(await broker.read("other", None, 9)) == 5


async def test_topics_are_merged_in_the_order_of_the_log(broker: EmbeddedBroker) -> None:
    await broker.publish([message(n, topic="abc"[n % 3]) for n in range(9)])
    found = await broker.read("c", ["a", "c"], 4)
    assert [entry.message.message_id for entry in found] == ["0", "2", "3", "5"]
    await broker.commit("c", found[-1].offset)
    assert [entry.message.message_id for entry in await broker.read("c", ["a", "c"], 9)] == ["6", "8"]
    assert [entry.message.message_id for entry in await broker.read("c", ["b"], 9)] == ["1", "4", "7"]
    assert await broker.topics() == ["a", "b", "c"]


async def test_a_tail_yields_what_is_there_and_what_comes(broker: EmbeddedBroker) -> None:
    await broker.publish([message(1), message(2)])
    tail = broker.tail(2)
    assert (await anext(tail)).message.message_id == "2"
    coming = asyncio.ensure_future(anext(tail))
    await broker.publish([message(3)])
    assert (await asyncio.wait_for(coming, 10)).message.message_id == "3"
    await tail.aclose()


async def test_old_entries_leave_a_bounded_number_at_a_time(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(log_module, "PRUNE_MAX", 3)
    broker = EmbeddedBroker(path, retention_days=1)
    await broker.publish([message(n) for n in range(5)])
    with closing(sqlite3.connect(path)) as conn, conn:
        conn.execute("UPDATE log SET published_at = published_at - 90000")
    await broker.close()
    broker = EmbeddedBroker(path, retention_days=1)
    await broker.publish([message(5)])
    assert [entry.message.message_id for entry in await broker.read("c", None, 9)] == ["3", "4", "5"]
    await broker.publish([message(6)])
    assert [entry.message.message_id for entry in await broker.read("c", None, 9)] == ["5", "6"]
    await broker.close()
