"""Handlers on MongoDB: what they must be, and whose fault it is when their transaction fails."""

from __future__ import annotations

import asyncio
import functools
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import suppress
from datetime import UTC, datetime
from typing import Any

import pytest
from pymongo import AsyncMongoClient
from pymongo.asynchronous.client_session import AsyncClientSession
from pymongo.errors import BulkWriteError, OperationFailure

import outrider
from outrider.errors import InvalidHandler, Permanent, TransactionLost, UsageError
from outrider.inbox.consumer import Consumer
from outrider.inbox.inbox import Inbox, Result
from outrider.inbox.model import InboxCriteria
from outrider.inbox.router import Route
from outrider.retry import RetryPolicy
from outrider.stores.mongo import MongoInbox
from outrider.telemetry.events import ConsumerUnavailable, HandlerRetried
from outrider.testing import ManualClock
from outrider.testing.contracts import delivery
from tests.support.mongo_benches import SHOP, MongoInboxBench, shop
from tests.support.scripted_source import ScriptedSource, Signal

pytestmark = pytest.mark.mongo

Client = AsyncMongoClient[dict[str, Any]]
ORDER = ("orders", "order.placed")

__all__ = ["shop"]


@pytest.fixture
async def bench(shop: Client, mongo_default: str) -> AsyncIterator[MongoInboxBench]:
    inbox = await MongoInbox.open(mongo_default)
    yield MongoInboxBench(inbox, ManualClock(start=datetime.now(UTC)), shop)
    await inbox.close()


async def _nothing(event: outrider.Event, tx: AsyncClientSession) -> None:
    assert isinstance(event, outrider.Event)


def _wrapping(error: OperationFailure) -> Exception:
    wrapped = RuntimeError("the library's own word for it")
    wrapped.__cause__ = error
    return wrapped


@pytest.mark.parametrize("seen_as", [lambda error: error, _wrapping], ids=["as it is", "wrapped"])
async def test_a_handler_that_meets_a_write_conflict_counts_no_attempt_and_is_applied_once(
    bench: MongoInboxBench, shop: Client, seen_as: Callable[[OperationFailure], Exception]
) -> None:
    stock = shop[SHOP]["effects"]
    await stock.insert_one({"_id": -1, "what": "stock"})

    async def take(event: outrider.Event, tx: AsyncClientSession) -> None:
        await bench.effect(tx, "taken")
        try:
            await tx.client[SHOP]["effects"].update_one({"_id": -1}, {"$inc": {"taken": 1}}, session=tx)
        except OperationFailure as error:
            raise seen_as(error) from error.__cause__

    billing, once = bench.consumer(retry=RetryPolicy(max_attempts=1)), delivery(1)
    billing.routes.handlers[ORDER] = Route(take)
    async with shop.start_session() as other, await other.start_transaction():
        await stock.update_one({"_id": -1}, {"$inc": {"taken": 1}}, session=other)
        assert await billing.deliver(once) == 0
        with pytest.raises(TransactionLost, match="lost under a handler"):
            await Inbox(bench.store).process(once, take, consumer="billing")
    assert bench.observer.of(HandlerRetried) == []
    assert [await billing.deliver(once) for _ in range(2)] == [1, 1]
    assert await bench.effects() == ["stock", "taken"]
    assert (await stock.find_one({"_id": -1}) or {})["taken"] == 2


async def test_handlers_that_write_one_document_do_not_disturb_each_other(bench: MongoInboxBench, shop: Client) -> None:
    stock = shop[SHOP]["effects"]
    await stock.insert_one({"_id": -1, "taken": 0})

    async def take(event: outrider.Event, tx: AsyncClientSession) -> None:
        await tx.client[SHOP]["effects"].update_one({"_id": -1}, {"$inc": {"taken": 1}}, session=tx)

    billing = bench.consumer(retry=RetryPolicy(max_attempts=1))
    billing.routes.handlers[ORDER] = Route(take)
    deliveries = [delivery(1, key=f"A-{number}") for number in range(16)]
    assert await asyncio.gather(*map(billing.deliver, deliveries)) == [1] * 16
    assert (await stock.find_one({"_id": -1}) or {})["taken"] == 16
    assert bench.observer.of(ConsumerUnavailable) == []
    assert bench.observer.of(HandlerRetried) == []


async def test_an_error_of_the_handler_itself_counts_an_attempt(bench: MongoInboxBench) -> None:
    async def twice(event: outrider.Event, tx: AsyncClientSession) -> None:
        for _ in range(2):
            await tx.client[SHOP]["effects"].insert_one({"_id": 7, "what": "twice"}, session=tx)

    dead_letter = await _dead_lettered(bench, twice)
    assert "DuplicateKeyError" in dead_letter["failure"]["error"]
    assert await bench.effects() == []


@pytest.mark.parametrize("then", ["returns", "goes on"])
async def test_a_handler_that_swallows_an_error_which_ended_its_transaction_is_reported_with_the_remedy(
    bench: MongoInboxBench, then: str
) -> None:
    async def swallow(event: outrider.Event, tx: AsyncClientSession) -> None:
        await bench.effect(tx, "never")
        with suppress(BulkWriteError):
            await tx.client[SHOP]["effects"].insert_many([{"_id": 70}, {"_id": 70}], session=tx)
        if then == "goes on":
            await bench.effect(tx, "never")

    dead_letter = await _dead_lettered(bench, swallow)
    assert "look before you write, and let its errors pass" in dead_letter["failure"]["error"]
    assert await bench.effects() == []


@pytest.mark.parametrize("size", [1, 2])
async def test_a_handler_that_begins_another_transaction_is_reported_and_leaves_no_effect(
    bench: MongoInboxBench, size: int
) -> None:
    async def again(event: outrider.Event, tx: AsyncClientSession) -> None:
        await tx.abort_transaction()
        await tx.start_transaction()
        await bench.effect(tx, "twice")

    billing = bench.consumer(batch_max=size)
    billing.routes.handlers[ORDER] = Route(again)
    with pytest.raises(InvalidHandler, match=r"again ended the transaction.*leave commit and rollback"):
        await billing.deliver(*[delivery(1, key=f"k{number}") for number in range(size)])
    assert await bench.effects() == []


async def test_a_handler_that_ends_the_session_is_reported(bench: MongoInboxBench) -> None:
    async def leave(event: outrider.Event, tx: AsyncClientSession) -> None:
        await tx.end_session()

    with pytest.raises(InvalidHandler, match="leave commit and rollback to outrider"):
        await Inbox(bench.store).process(delivery(1), leave, consumer="billing")


@pytest.mark.parametrize("commit", [True, False], ids=["commit", "rollback"])
async def test_a_block_that_ends_the_transaction_by_itself_is_reported(bench: MongoInboxBench, commit: bool) -> None:
    async def block() -> None:
        async with bench.store.transaction() as tx:
            await bench.effect(tx.session, "alone")
            await bench.end(tx.session, commit=commit)

    with pytest.raises(InvalidHandler, match="leave commit and rollback to outrider"):
        await block()


class Asynchronous:
    """A handler that is an object."""

    async def __call__(self, event: outrider.Event, tx: AsyncClientSession) -> None:
        await _nothing(event, tx)


@functools.wraps(_nothing)
def _wrapped(event: outrider.Event, tx: AsyncClientSession) -> Any:
    return _nothing(event, tx)


def _promising(event: outrider.Event, tx: AsyncClientSession) -> Awaitable[None]:
    return _nothing(event, tx)


def _plain(event: outrider.Event, tx: AsyncClientSession) -> None:
    tx.client[SHOP]["effects"].insert_one({"what": "lost"}, session=tx).close()


def _lying(event: outrider.Event, tx: AsyncClientSession) -> Awaitable[None] | None:
    return None


@pytest.mark.parametrize(
    "handler",
    [
        _nothing,
        Asynchronous(),
        functools.partial(_nothing),
        _wrapped,
        _promising,
        lambda event, tx: tx.client[SHOP]["effects"].find_one({}, session=tx),
    ],
)
async def test_whatever_returns_something_to_wait_for_is_a_handler(bench: MongoInboxBench, handler: Any) -> None:
    assert await Inbox(bench.store).process(delivery(1), handler, consumer="billing") is Result.APPLIED


async def test_a_plain_function_is_rejected_before_anything_is_received(bench: MongoInboxBench, shop: Client) -> None:
    remedy = r"_plain is a plain function.*would not be awaited.*write it as `async def`"
    with pytest.raises(UsageError, match=remedy):
        await Inbox(bench.store).process(delivery(1), _plain, consumer="billing")
    billing = bench.routes()
    billing.handlers[ORDER] = Route(_plain)
    with pytest.raises(UsageError, match=remedy):
        Consumer(ScriptedSource(Signal()), bench.store, billing)
    assert await shop["outrider"]["consumer_inbox"].count_documents({}) == 0


@pytest.mark.parametrize("handler", [_lying, lambda event, tx: None])
async def test_a_handler_that_returns_nothing_to_wait_for_leaves_no_receipt(
    bench: MongoInboxBench, handler: Any
) -> None:
    once = delivery(1)
    with pytest.raises(InvalidHandler, match=r"(_lying|<lambda>) is a plain function"):
        await Inbox(bench.store).process(once, handler, consumer="billing")
    assert await Inbox(bench.store).process(once, bench.handler, consumer="billing") is Result.APPLIED


async def test_a_transaction_that_lasts_longer_than_the_server_allows_counts_an_attempt(
    bench: MongoInboxBench, shop: Client
) -> None:
    async def expire(event: outrider.Event, tx: AsyncClientSession) -> None:
        await bench.effect(tx, "never")
        # The server does this to a transaction that has lasted too long.
        await shop.admin.command("killSessions", [tx.session_id])
        await bench.effect(tx, "never")

    dead_letter = await _dead_lettered(bench, expire)
    assert "transactionLifetimeLimitSeconds" in dead_letter["failure"]["error"]
    assert await bench.effects() == []


async def test_a_message_that_no_document_can_hold_is_named(bench: MongoInboxBench) -> None:
    large = delivery(1)._replace(body=b"{" + b" " * 17_000_000)
    with pytest.raises(Permanent, match="16 MB"):
        await Inbox(bench.store).process(large, bench.handler, consumer="billing")


async def _dead_lettered(bench: MongoInboxBench, handler: Any) -> dict[str, Any]:
    """Let a handler fail until its event is dead-lettered after its last attempt; return the dead letter."""
    billing = bench.consumer()
    billing.routes.handlers[ORDER] = Route(handler)
    await billing.deliver_all([delivery(1)], times=4)
    assert bench.observer.of(ConsumerUnavailable) == []
    [dead_letter] = await bench.store.admin.dead_letters(InboxCriteria())
    assert dead_letter["attempts"] == 3
    return dead_letter
