"""Two transactions of an inbox at once on MongoDB: which one yields, and what the other one sees."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import pytest
from pymongo import AsyncMongoClient, MongoClient
from pymongo.asynchronous.client_session import AsyncClientSession
from pymongo.monitoring import CommandFailedEvent, CommandListener, CommandStartedEvent, CommandSucceededEvent

from outrider.errors import NotInTransaction, Transient, UsageError
from outrider.inbox.model import Receipts
from outrider.stores.mongo import MongoInbox
from outrider.stores.mongo.handler_transactions import WRITE_CONFLICT, GuestTransaction
from tests.support.inbox_locks import InboxLocks, Meets, dead_letter, dead_letter_ids, received, row

pytestmark = pytest.mark.mongo


class Referee(CommandListener):
    """Notes every write that the server rejects because of an open transaction."""

    def __init__(self) -> None:
        self._refused = asyncio.Event()

    async def rejects(self) -> None:
        """Return once another write has been rejected."""
        self._refused.clear()
        async with asyncio.timeout(20):
            await self._refused.wait()

    def started(self, event: CommandStartedEvent) -> None:
        pass

    def succeeded(self, event: CommandSucceededEvent) -> None:
        pass

    def failed(self, event: CommandFailedEvent) -> None:
        if event.failure.get("code") == WRITE_CONFLICT:
            self._refused.set()


@pytest.fixture
def referee() -> Referee:
    return Referee()


@pytest.fixture
async def client(mongo_url: str, referee: Referee) -> AsyncIterator[AsyncMongoClient[dict[str, Any]]]:
    async with AsyncMongoClient[dict[str, Any]](mongo_url, event_listeners=[referee]) as client:
        yield client


@pytest.fixture
async def inbox(client: AsyncMongoClient[dict[str, Any]], mongo_schema: str) -> MongoInbox:
    return MongoInbox.over(client, schema=mongo_schema)


@pytest.fixture
def meets(referee: Referee) -> Meets:
    return referee.rejects


class TestLocks(InboxLocks):
    pass


async def test_when_two_transactions_block_a_stream_at_once_one_conflicts_and_may_be_retried(
    inbox: MongoInbox,
) -> None:
    """Without ordering a stream has no document to lock, so both insert the first one."""
    async with inbox.transaction() as tx:
        await dead_letter(inbox, tx, received(1), received(2), received(3))
        with pytest.raises(Transient, match="WriteConflict"):
            async with inbox.transaction() as other:
                await dead_letter(inbox, other, received(4), received(5))
    assert await row(inbox) == (None, "dead_letter", 2)
    assert await inbox.admin.replay(await dead_letter_ids(inbox), "ann") == 1
    assert await row(inbox) == (None, "draining", 3)


async def test_a_replay_and_a_discard_of_one_blocked_stream_at_once_unblock_it(inbox: MongoInbox) -> None:
    for number in range(6):
        async with inbox.transaction() as tx:
            await dead_letter(inbox, tx, received(number))
    admin, ids = inbox.admin, await dead_letter_ids(inbox)
    people = [*(admin.replay([id_], "ann") for id_ in ids[:4]), *(admin.discard([id_], "bob") for id_ in ids[4:])]
    assert await asyncio.gather(*people) == [1] * 6
    assert await row(inbox) == (None, "draining", 4)


async def test_in_a_transaction_of_the_applications_own_the_servers_wish_to_repeat_it_is_passed_on(
    inbox: MongoInbox, client: AsyncMongoClient[dict[str, Any]], referee: Referee
) -> None:
    once = received(1)

    async def record_receipts(session: AsyncClientSession) -> Receipts:
        return await inbox.record_receipts(GuestTransaction(session, inbox._database), "billing", [once], ordered=False)

    async with client.start_session() as mine:
        async with inbox.transaction() as tx:
            await inbox.record_receipts(tx, "billing", [once], ordered=False)
            work = asyncio.create_task(mine.with_transaction(record_receipts))
            await referee.rejects()
            assert not work.done()
        assert (await work).fresh == frozenset()


async def test_a_transaction_of_the_applications_own_client_covers_every_outcome_of_an_event(
    inbox: MongoInbox, client: AsyncMongoClient[dict[str, Any]]
) -> None:
    head, follower = received(1), received(2)
    async with client.start_session() as mine, await mine.start_transaction():
        await dead_letter(inbox, GuestTransaction(mine, inbox._database), head, follower)
    assert await inbox.admin.counts("billing") == {"waiting": 1, "blocked_streams": 1, "dead_letters": 1}


async def test_a_session_without_a_transaction_is_rejected_with_the_remedy(
    inbox: MongoInbox, client: AsyncMongoClient[dict[str, Any]]
) -> None:
    async with client.start_session() as session:
        with pytest.raises(NotInTransaction, match=r"await session.start_transaction\(\)"):
            GuestTransaction(session, inbox._database)


async def test_a_synchronous_session_is_rejected_with_the_remedy(inbox: MongoInbox, mongo_url: str) -> None:
    rejected = pytest.raises(UsageError, match="no session of an AsyncMongoClient")
    with MongoClient[dict[str, Any]](mongo_url) as client, client.start_session() as session, rejected:
        GuestTransaction(session, inbox._database)  # type: ignore[arg-type]
