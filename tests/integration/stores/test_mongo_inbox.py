"""The inbox on MongoDB: rejected databases, repairs and retention by maintenance, and shared servers."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import AsyncIterator
from datetime import UTC, datetime
from typing import Any
from uuid import uuid4

import pytest
from bson.binary import UuidRepresentation
from bson.codec_options import CodecOptions
from pymongo import AsyncMongoClient

from outrider.errors import Permanent, Unreachable, UsageError
from outrider.inbox.model import InboxCriteria
from outrider.stores.mongo import MongoInbox
from outrider.testing import ManualClock, servers
from outrider.testing.contracts import delivery
from tests.support.mongo_benches import MongoInboxBench, shop

pytestmark = pytest.mark.mongo

Client = AsyncMongoClient[dict[str, Any]]
CODEC: CodecOptions[dict[str, Any]] = CodecOptions(uuid_representation=UuidRepresentation.STANDARD)
DAY = 86_400

__all__ = ["shop"]


@pytest.fixture
async def bench(shop: Client, mongo_default: str) -> AsyncIterator[MongoInboxBench]:
    clock = ManualClock(start=datetime.now(UTC))
    inbox = await MongoInbox.open(mongo_default, clock=clock)
    yield MongoInboxBench(inbox, clock, shop)
    await inbox.close()


async def test_a_database_without_an_inbox_is_rejected_with_the_remedy(mongo_url: str) -> None:
    with pytest.raises(
        UsageError, match=r"the inbox is not installed.*database nothing_here; run: outrider db migrate"
    ):
        await MongoInbox.open(mongo_url, schema="nothing_here")


async def test_a_server_without_transactions_is_rejected_with_the_remedy() -> None:
    with servers.MongoServer(standalone=True) as server, pytest.raises(UsageError, match=r"--replSet"):
        await MongoInbox.open(server.url)


async def test_a_server_that_says_nothing_is_unreachable_and_does_not_answer() -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:
        patience = "serverSelectionTimeoutMS=200&connectTimeoutMS=200"
        url = f"mongodb://user:secret@127.0.0.1:{silent.getsockname()[1]}/?{patience}"
        with pytest.raises(Unreachable) as rejected:
            await MongoInbox.open(url)
        assert "secret" not in str(rejected.value)
        async with Client(url) as client:
            assert not await MongoInbox.over(client).ping()


async def test_two_schemas_on_one_server_do_not_know_each_other(
    bench: MongoInboxBench, shop: Client, mongo_schema: str
) -> None:
    once = delivery(1)
    assert await bench.consumer().deliver(once) == 1
    bench.store = MongoInbox.over(shop, schema=mongo_schema)
    assert [await bench.consumer().deliver(once) for _ in range(2)] == [1, 1]
    assert await bench.effects() == ["A-1:1", "A-1:1"]


async def test_the_servers_own_time_is_written_where_no_test_owns_the_clock(shop: Client) -> None:
    bench = MongoInboxBench(MongoInbox.over(shop), ManualClock(), shop)
    bench.fail("A-1:2", Permanent("no"))
    event_id, begun = uuid4(), await _server_time(shop)
    await bench.consumer().deliver_all([delivery(1, event_id=event_id), delivery(2), delivery(3)])
    [receipt] = await bench.store.admin.receipts("billing", [event_id])
    [dead_letter] = await bench.store.admin.dead_letters(InboxCriteria())
    [stream] = await bench.store.admin.streams("billing", 10)
    ended = await _server_time(shop)
    assert begun <= receipt["received_at"] <= dead_letter["dead_lettered_at"] <= ended
    assert begun <= stream["since"] <= ended


async def _server_time(client: Client) -> datetime:
    server_time: datetime = (await client.admin.command("hello"))["localTime"]
    return server_time.replace(tzinfo=UTC)


async def test_a_receipt_stays_as_long_as_its_dead_letter_and_those_behind_it_go(
    bench: MongoInboxBench, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("outrider.stores.mongo.inbox_admin.PRUNE_MAX", 2)
    billing = bench.consumer()
    deliveries = [delivery(1, key=f"k{n}") for n in range(9)]
    for number in (0, 1, 2, 5):
        bench.fail(f"k{number}:1", Permanent("no"))
    await billing.deliver_all(deliveries)
    await bench.advance(seconds=100 * DAY)
    assert await bench.store.prune("billing", receipt_days=1, dead_letter_days=1) == (5, 0)
    assert await bench.store.prune("billing", receipt_days=1, dead_letter_days=1) == (0, 0)
    bench.failing.clear()
    await billing.deliver_all(deliveries)
    assert len(await bench.effects()) == 5 + 5


async def test_a_stream_whose_dead_letter_was_deleted_by_hand_is_unblocked(
    bench: MongoInboxBench, shop: Client
) -> None:
    billing = bench.consumer()
    bench.fail("A-1:1", Permanent("no"))
    await billing.deliver_all([delivery(1), delivery(2)])
    await shop["outrider"]["inbox_dead_letter"].delete_many({})
    await bench.store.prune("billing", receipt_days=1, dead_letter_days=1)
    await billing.drain()
    assert await bench.effects() == ["A-1:2"]


@pytest.mark.parametrize("change", [None, {"$unset": {"cause": 1}}], ids=["no document", "no cause"])
async def test_events_that_wait_though_nothing_says_so_are_found_again(
    bench: MongoInboxBench, shop: Client, change: dict[str, Any] | None
) -> None:
    billing = bench.consumer()
    bench.fail("A-1:1", Permanent("no"))
    await billing.deliver_all([delivery(1), delivery(2), delivery(3)])
    streams = shop["outrider"]["inbox_stream"]
    await (streams.delete_many({}) if change is None else streams.update_many({}, change))
    await bench.store.prune("shipping", receipt_days=1, dead_letter_days=1)
    assert (await bench.store.admin.counts())["blocked_streams"] == 0
    await bench.store.prune("billing", receipt_days=1, dead_letter_days=1)
    assert (await bench.store.admin.counts("billing"))["waiting"] == 2
    await billing.drain()
    assert await bench.effects() == ["A-1:2", "A-1:3"]


async def test_a_stream_that_drains_though_nothing_waits_comes_to_rest(bench: MongoInboxBench, shop: Client) -> None:
    billing = bench.consumer()
    bench.fail("A-1:1", Permanent("no"))
    await billing.deliver_all([delivery(1), delivery(2)])
    [dead_letter] = await bench.store.admin.dead_letters(InboxCriteria())
    await bench.store.admin.discard([dead_letter["id"]], "ann")
    await shop["outrider"]["inbox_held"].delete_many({})
    await billing.drain()
    assert await bench.store.draining("billing", 10) == []
    assert await shop["outrider"]["inbox_stream"].count_documents({}) == 0


async def test_what_a_person_did_is_written_down(bench: MongoInboxBench, shop: Client) -> None:
    billing = bench.consumer(on_dead_letter="skip")
    for number in (1, 2):
        bench.fail(f"A-1:{number}", Permanent("no"))
    await billing.deliver_all([delivery(1), delivery(2)])
    first, second = await bench.store.admin.dead_letters(InboxCriteria())
    assert await bench.store.admin.replay([first["id"], 999], "ann") == 1
    assert await bench.store.admin.discard([second["id"], second["id"]], "bob") == 1
    operations = shop["outrider"].get_collection("outbox_operation", codec_options=CODEC)
    noted = {(row["actor"], row["verb"], row["event_id"], row["consumer"]) async for row in operations.find()}
    assert noted == {
        ("ann", "inbox_replay", first["event_id"], "billing"),
        ("bob", "inbox_discard", second["event_id"], "billing"),
    }


async def test_many_consumers_at_once_apply_each_event_once_and_in_order(bench: MongoInboxBench) -> None:
    """Each delivery comes to four processes at once, as it may while a group is rebalanced."""
    crew = [bench.consumer(ordering="monotonic") for _ in range(4)]
    for number in range(1, 9):
        batch = [delivery(number, key=key) for key in ("A", "B", "C")]
        await asyncio.gather(*(hand.deliver_all([one]) for hand in crew for one in batch))
    effects = await bench.effects()
    for key in "ABC":
        assert [text for text in effects if text.startswith(key)] == [f"{key}:{n}" for n in range(1, 9)]
