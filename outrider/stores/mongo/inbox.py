"""The inbox in MongoDB: the operations of a consumer."""

from __future__ import annotations

import asyncio
from collections.abc import Collection, Mapping, Sequence
from contextlib import AbstractAsyncContextManager
from typing import Any, Self
from uuid import UUID

from pymongo import AsyncMongoClient, DeleteMany, ReplaceOne, ReturnDocument, UpdateOne

from outrider.clock import Clock
from outrider.errors import OutriderError
from outrider.event import InboxStream, ReceivedEvent
from outrider.inbox.model import (
    ClaimedHeld,
    EventOutcome,
    InboxBlockReason,
    InboxDeadLettered,
    InboxPruned,
    Overdue,
    Receipts,
    StreamState,
)
from outrider.inbox.store import InboxAdmin
from outrider.stores.mongo import inbox_admin, saga_admin
from outrider.stores.mongo.database import Document, MongoDatabase
from outrider.stores.mongo.documents import (
    LOCK,
    dead,
    event_identity,
    parked,
    receipt_facts,
    receive,
    state,
    stream_identity,
    stream_of,
    stream_row,
    waiting_of,
)
from outrider.stores.mongo.handler_transactions import MongoHandlerTransaction, MongoTransactionSource, open_installed
from outrider.stores.mongo.inbox_admin import MongoInboxAdmin, draining_query, overdue_pipeline
from outrider.stores.rows import InboxWriteSet, can_drain, check_receipts, only_applied, stream_key_of

ANSWER_SECONDS = 5.0

IDS = {"_id": "waiting"}


async def record_receipts(
    tx: MongoHandlerTransaction, consumer: str, events: Sequence[ReceivedEvent], *, ordered: bool
) -> Receipts:
    """Write receipts, lock the stream documents and read the stream states."""
    first = {received.event_id: received for received in reversed(events)}
    facts = {id_: receipt_facts(a.event_type, a.stream, a.sequence) for id_, a in sorted(first.items())}
    fresh = await _receive(tx, consumer, facts)
    new_events = [received for received in events if received.event_id in fresh]
    numbered = {received.stream for received in new_events if ordered and received.sequence is not None}
    states = await _lock(tx, consumer, {received.stream for received in new_events}, numbered)
    suspects = [a.event_id for a in new_events if a.stream in states and states[a.stream].waiting]
    return Receipts(frozenset(fresh - await _withdraw_waiting(tx, consumer, suspects)), states)


async def claim_held(
    tx: MongoHandlerTransaction, consumer: str, stream: InboxStream, *, by_sequence: bool, limit: int, early: bool
) -> ClaimedHeld | None:
    """Lock a draining stream and claim its first held events; inbox_held_place or inbox_held_sequence."""
    identity = stream_identity(consumer, stream)
    row = await tx.of("inbox_stream").find_one_and_update({"_id": identity}, LOCK, session=tx.session)
    at = state(row) if row else StreamState()
    if not can_drain(at.cause, early=early):
        return None
    order = ["sequence", "id"] if by_sequence or at.cause is InboxBlockReason.EARLY else ["id"]
    found = tx.of("inbox_held").find({"stream": identity}, session=tx.session)
    rows = await found.sort(order).limit(limit).to_list()
    if not rows:
        # A draining stream without held events. Without this reset the stream would drain for ever.
        at = StreamState(at.seen)
        await tx.of("inbox_stream").bulk_write([stream_row(identity, at, tx.now)], session=tx.session)
    facts = {row["_id"]["event_id"]: receipt_facts(row["event_type"], stream, row["sequence"]) for row in rows}
    fresh = await _receive(tx, consumer, facts)
    return ClaimedHeld(at, [waiting_of(row) for row in rows], frozenset(fresh))


class MongoInbox:
    """Receipts in MongoDB, beside the data that handlers change.

    Handlers get an `AsyncClientSession` in an open transaction and pass the session on as `session=`. Open the inbox
    with `await MongoInbox.open(url)`, or use a client of the application with `MongoInbox.over(client)`.
    """

    def __init__(self, database: MongoDatabase) -> None:
        self._database = database
        self.transactions = MongoTransactionSource(database)
        self.admin: InboxAdmin = MongoInboxAdmin(database, self.transactions.write)

    @classmethod
    async def open(cls, url: str, *, schema: str = "outrider", clock: Clock | None = None) -> Self:
        """Connect to an installed inbox. A missing installation and a server without transactions are rejected::

        inbox_store = await MongoInbox.open("mongodb://localhost/?replicaSet=rs0")
        """
        return cls(await open_installed(url, schema, what="inbox", version=2, clock=clock))

    @classmethod
    def over(cls, client: AsyncMongoClient[Document], *, schema: str = "outrider", clock: Clock | None = None) -> Self:
        """Work through a client of the application. The application closes the client::

        inbox_store = MongoInbox.over(AsyncMongoClient("mongodb://localhost/?replicaSet=rs0"))
        """
        return cls(MongoDatabase.over(client, schema, clock=clock))

    def transaction(self) -> AbstractAsyncContextManager[MongoHandlerTransaction]:
        return self.transactions.open()

    async def ping(self) -> bool:
        try:
            async with asyncio.timeout(ANSWER_SECONDS):
                await self._database.run(self._database.time())
        except (OutriderError, TimeoutError):
            return False
        return True

    async def record_receipts(
        self, tx: MongoHandlerTransaction, consumer: str, events: Sequence[ReceivedEvent], *, ordered: bool
    ) -> Receipts:
        return await tx.run(record_receipts, consumer, events, ordered=ordered)

    async def record_outcomes(
        self,
        tx: MongoHandlerTransaction,
        consumer: str,
        entries: Sequence[EventOutcome],
        states: Mapping[InboxStream, StreamState],
    ) -> Mapping[UUID, int]:
        return await tx.run(record_outcomes, consumer, entries, states)

    async def draining(
        self, consumer: str, limit: int, *, cause: InboxBlockReason = InboxBlockReason.DRAINING
    ) -> list[InboxStream]:
        found = self._database["inbox_stream"].find(draining_query(consumer, cause), {"_id": 1})
        rows = await self._database.run(found.sort("since").limit(limit).to_list())
        return [stream_of(row["_id"]) for row in rows]

    async def claim_held(
        self,
        tx: MongoHandlerTransaction,
        consumer: str,
        stream: InboxStream,
        *,
        by_sequence: bool,
        limit: int,
        early: bool = False,
    ) -> ClaimedHeld | None:
        return await tx.run_unless_taken(
            claim_held, consumer, stream, by_sequence=by_sequence, limit=limit, early=early
        )

    async def overdue(self, consumer: str, seconds: float, limit: int) -> list[Overdue]:
        pipeline = overdue_pipeline(consumer, seconds, limit, self._database.now)
        rows = await self._database.run(inbox_admin.aggregate(self._database["inbox_stream"], pipeline))
        return [Overdue(stream_of(row["_id"]), row.get("seen"), row["waiting"], row["since"]) for row in rows]

    async def prune(self, consumer: str, *, receipt_days: float, dead_letter_days: float) -> InboxPruned:
        """Remove old receipts and dead letters. Also repair streams with lost holds or lost held events."""
        await self.transactions.write(inbox_admin.unblock_without_dead_letter, consumer)
        await self.transactions.write(inbox_admin.adopt_orphans, consumer)
        prune = inbox_admin.prune_dead_letters(self._database, consumer, dead_letter_days)
        dead_letters = await self._database.run(prune)
        receipts = await self._database.run(inbox_admin.prune_receipts(self._database, consumer, receipt_days))
        return InboxPruned(receipts, dead_letters)

    async def prune_participants(self, days: float) -> int:
        """Remove old replies of saga participants. Without an installation of sagas there are none."""
        return await self._database.run(saga_admin.prune_participants(self._database, days))

    async def close(self) -> None:
        await self._database.close()


async def _receive(tx: MongoHandlerTransaction, consumer: str, facts: dict[UUID, Document]) -> set[UUID]:
    """Write receipts; return the events that had none before."""
    if not facts:
        return set()
    ids = list(facts)
    changes = [receive(event_identity(consumer, event_id), facts[event_id], tx.now) for event_id in ids]
    done = await tx.of("consumer_inbox").bulk_write(changes, session=tx.session)
    return {ids[index] for index in done.upserted_ids or ()}


async def _lock(
    tx: MongoHandlerTransaction, consumer: str, streams: Collection[InboxStream], numbered: Collection[InboxStream]
) -> dict[InboxStream, StreamState]:
    """Lock stream documents and return the stream states. Numbered streams without a document get a new document."""
    counted = {stream_key_of(stream) for stream in numbered}
    keys = sorted({stream_key_of(stream) for stream in streams})
    wanted = {key: stream_identity(consumer, key) for key in keys}
    rows = await _locked(tx, wanted, counted) if wanted else []
    known = {stream_of(row["_id"]): state(row) for row in rows}
    return {stream: known[stream_key_of(stream)] for stream in streams if stream_key_of(stream) in known}


async def _locked(
    tx: MongoHandlerTransaction, wanted: dict[InboxStream, Document], counted: Collection[InboxStream]
) -> list[Document]:
    documents, session = tx.of("inbox_stream"), tx.session
    if len(wanted) == 1:
        [(key, identity)] = wanted.items()
        after, upsert = ReturnDocument.AFTER, key in counted
        row = await documents.find_one_and_update(
            {"_id": identity}, LOCK, upsert=upsert, return_document=after, session=session
        )
        return [row] if row else []
    changes = [UpdateOne({"_id": identity}, LOCK, upsert=key in counted) for key, identity in wanted.items()]
    done = await documents.bulk_write(changes, session=session)
    if not done.matched_count and not done.upserted_count:
        return []
    return await documents.find({"_id": {"$in": list(wanted.values())}}, session=session).to_list()


async def _withdraw_waiting(tx: MongoHandlerTransaction, consumer: str, event_ids: Sequence[UUID]) -> set[UUID]:
    """Delete the receipts of held events. Called only if a stream document reports held events."""
    if not event_ids:
        return set()
    ids = [event_identity(consumer, event_id) for event_id in event_ids]
    found = await tx.of("inbox_held").find({"_id": {"$in": ids}}, {"_id": 1}, session=tx.session).to_list()
    if found:
        known = {"_id": {"$in": [row["_id"] for row in found]}}
        await tx.of("consumer_inbox").delete_many(known, session=tx.session)
    return {row["_id"]["event_id"] for row in found}


async def record_outcomes(
    tx: MongoHandlerTransaction,
    consumer: str,
    entries: Sequence[EventOutcome],
    states: Mapping[InboxStream, StreamState],
) -> dict[UUID, int]:
    """Write the outcomes of received events and the new stream states. Return the ids of dead letters."""
    writes = InboxWriteSet.of(entries)
    if states:
        changes = [stream_row(stream_identity(consumer, stream), at, tx.now) for stream, at in sorted(states.items())]
        await tx.of("inbox_stream").bulk_write(changes, session=tx.session)
    await _write_receipts(tx, consumer, writes)
    return {} if only_applied(entries) else await _write_events(tx, consumer, writes)


async def _write_receipts(tx: MongoHandlerTransaction, consumer: str, writes: InboxWriteSet) -> None:
    """Write the durations of handlers. Delete the receipts of unhandled events."""
    changes: list[Any] = [
        UpdateOne({"_id": event_identity(consumer, event_id)}, {"$set": {"processing_seconds": seconds}})
        for event_id, seconds in writes.seconds.items()
    ]
    if writes.withdrawn:
        changes.append(DeleteMany(_any(consumer, writes.withdrawn)))
    if changes:
        done = await tx.of("consumer_inbox").bulk_write(changes, session=tx.session)
        check_receipts(done.matched_count, len(writes.seconds))


async def _write_events(tx: MongoHandlerTransaction, consumer: str, writes: InboxWriteSet) -> dict[UUID, int]:
    if writes.parked:
        await _park(tx, consumer, writes.parked)
    dead_letters = await _dead_letter(tx, consumer, writes.dead_letter) if writes.dead_letter else {}
    if removed := [*writes.left, *dead_letters]:
        await tx.of("inbox_held").delete_many(_any(consumer, removed), session=tx.session)
    return dead_letters


async def _park(tx: MongoHandlerTransaction, consumer: str, events: Sequence[ReceivedEvent]) -> None:
    """Store events as held events, in order. An event that is already held keeps its position."""
    last, now = await _take_ids(tx, len(events)), await tx.database.time(tx.session)
    rows = [parked(consumer, each, id_, now) for id_, each in enumerate(events, last - len(events) + 1)]
    changes = [UpdateOne({"_id": row.pop("_id")}, {"$setOnInsert": row}, upsert=True) for row in rows]
    await tx.of("inbox_held").bulk_write(changes, session=tx.session)


async def _take_ids(tx: MongoHandlerTransaction, count: int) -> int:
    """Take ids outside of the transaction, so that no consumer waits for them. Ids of a rollback stay unused."""
    more = {"$inc": {"last": count}}
    after = ReturnDocument.AFTER
    row = await tx.of("inbox_counter").find_one_and_update(IDS, more, upsert=True, return_document=after)
    assert row is not None, "it is made if it is not there"
    last: int = row["last"]
    return last


async def _dead_letter(
    tx: MongoHandlerTransaction, consumer: str, dead_letters: Sequence[tuple[ReceivedEvent, InboxDeadLettered]]
) -> dict[UUID, int]:
    """Copy held events to the dead letters. A second dead letter of an event replaces the first."""
    wanted = _any(consumer, [received.event_id for received, _ in dead_letters])
    rows = await tx.of("inbox_held").find(wanted, session=tx.session).to_list()
    outcomes = {received.event_id: outcome for received, outcome in dead_letters}
    now = await tx.database.time(tx.session)
    documents = [dead(row, outcomes[row["_id"]["event_id"]], now) for row in rows]
    changes = [ReplaceOne({"_id": document["_id"]}, document, upsert=True) for document in documents]
    await tx.of("inbox_dead_letter").bulk_write(changes, session=tx.session)
    return {document["_id"]["event_id"]: document["id"] for document in documents}


def _any(consumer: str, event_ids: Sequence[UUID]) -> dict[str, Any]:
    return {"_id": {"$in": [event_identity(consumer, event_id) for event_id in event_ids]}}
