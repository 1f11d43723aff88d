"""A consumer's verbs on MongoDB, inside a transaction that is its own or was lent.

Whoever decides about a stream writes its document first. Of two who do, one is refused by the server and begins anew;
so between `admit` or `resume` and the commit nobody else decides about it.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from uuid import UUID

from pymongo import ReturnDocument, UpdateOne

from outrider.delivery import Arrival, InboxStream
from outrider.inbox_store import Admitted, Cause, Resumed, Standing
from outrider.stores.inbox_rows import may_go, place_of
from outrider.stores.mongo.database import Document
from outrider.stores.mongo.inbox_documents import (
    LOCK,
    event_identity,
    receipt_facts,
    receive,
    stand,
    standing,
    stream_identity,
    stream_of,
    waiting_of,
)
from outrider.stores.mongo.lending import Lent


async def admit(lent: Lent, consumer: str, arrivals: Sequence[Arrival], *, gated: bool) -> Admitted:
    """Write receipts, lock the documents of streams, and read where they stand."""
    first = {arrival.event_id: arrival for arrival in reversed(arrivals)}
    facts = {id_: receipt_facts(a.event_type, a.stream, a.sequence) for id_, a in sorted(first.items())}
    fresh = await _receive(lent, consumer, facts)
    news = [arrival for arrival in arrivals if arrival.event_id in fresh]
    numbered = {arrival.stream for arrival in news if gated and arrival.sequence is not None}
    standings = await _lock(lent, consumer, {arrival.stream for arrival in news}, numbered)
    suspects = [a.event_id for a in news if a.stream in standings and standings[a.stream].waiting]
    return Admitted(frozenset(fresh - await _withdraw_waiting(lent, consumer, suspects)), standings)


async def resume(
    lent: Lent, consumer: str, stream: InboxStream, *, by_sequence: bool, limit: int, early: bool
) -> Resumed | None:
    """Lock a stream that drains, and take its first waiting events; inbox_waiting_place or inbox_waiting_sequence."""
    identity = stream_identity(consumer, stream)
    row = await lent.of("inbox_stream").find_one_and_update({"_id": identity}, LOCK, session=lent.session)
    at = standing(row) if row else Standing()
    if not may_go(at.cause, early=early):
        return None
    order = ["sequence", "id"] if by_sequence or at.cause is Cause.EARLY else ["id"]
    found = lent.of("inbox_waiting").find({"stream": identity}, session=lent.session)
    rows = await found.sort(order).limit(limit).to_list()
    if not rows:
        # A stream that drains though nothing of it waits; without this it would drain for ever.
        at = Standing(at.seen)
        await lent.of("inbox_stream").bulk_write([stand(identity, at, lent.now)], session=lent.session)
    facts = {row["_id"]["event_id"]: receipt_facts(row["event_type"], stream, row["sequence"]) for row in rows}
    fresh = await _receive(lent, consumer, facts)
    return Resumed(at, [waiting_of(row) for row in rows], frozenset(fresh))


async def _receive(lent: Lent, consumer: str, facts: dict[UUID, Document]) -> set[UUID]:
    """Write receipts; return the events that had none."""
    if not facts:
        return set()
    ids = list(facts)
    changes = [receive(event_identity(consumer, event_id), facts[event_id], lent.now) for event_id in ids]
    done = await lent.of("consumer_inbox").bulk_write(changes, session=lent.session)
    return {ids[place] for place in done.upserted_ids or ()}


async def _lock(
    lent: Lent, consumer: str, streams: Collection[InboxStream], numbered: Collection[InboxStream]
) -> dict[InboxStream, Standing]:
    """Lock the documents of streams; those that are numbered get one. Return where they stand."""
    counted = {place_of(stream) for stream in numbered}
    places = sorted({place_of(stream) for stream in streams})
    wanted = {place: stream_identity(consumer, place) for place in places}
    rows = await _locked(lent, wanted, counted) if wanted else []
    known = {stream_of(row["_id"]): standing(row) for row in rows}
    return {stream: known[place_of(stream)] for stream in streams if place_of(stream) in known}


async def _locked(lent: Lent, wanted: dict[InboxStream, Document], counted: Collection[InboxStream]) -> list[Document]:
    documents, session = lent.of("inbox_stream"), lent.session
    if len(wanted) == 1:
        [(place, identity)] = wanted.items()
        after, upsert = ReturnDocument.AFTER, place in counted
        row = await documents.find_one_and_update(
            {"_id": identity}, LOCK, upsert=upsert, return_document=after, session=session
        )
        return [row] if row else []
    changes = [UpdateOne({"_id": identity}, LOCK, upsert=place in counted) for place, identity in wanted.items()]
    done = await documents.bulk_write(changes, session=session)
    if not done.matched_count and not done.upserted_count:
        return []
    return await documents.find({"_id": {"$in": list(wanted.values())}}, session=session).to_list()


async def _withdraw_waiting(lent: Lent, consumer: str, event_ids: Sequence[UUID]) -> set[UUID]:
    """Take back the receipts of events that wait; asked only where the document of a stream says that some do."""
    if not event_ids:
        return set()
    ids = [event_identity(consumer, event_id) for event_id in event_ids]
    found = await lent.of("inbox_waiting").find({"_id": {"$in": ids}}, {"_id": 1}, session=lent.session).to_list()
    if found:
        known = {"_id": {"$in": [row["_id"] for row in found]}}
        await lent.of("consumer_inbox").delete_many(known, session=lent.session)
    return {row["_id"]["event_id"] for row in found}
