"""Concluding in MongoDB: what is written when the handlers are done. Nearly always the receipts only.

Streams first: whoever else has made the same document has to give way, or we have, before ids are taken. A dead letter
is parked and then buried from there, so that it has a place among those that wait.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any
from uuid import UUID

from pymongo import DeleteMany, ReplaceOne, ReturnDocument, UpdateOne

from outrider.delivery import Arrival, InboxStream
from outrider.inbox_store import Buried, Entry, Standing
from outrider.stores.inbox_rows import Sheet, check_receipts, only_applied
from outrider.stores.mongo.inbox_documents import dead, event_identity, parked, stand, stream_identity
from outrider.stores.mongo.lending import Lent

IDS = {"_id": "waiting"}


async def conclude(
    lent: Lent, consumer: str, entries: Sequence[Entry], standings: Mapping[InboxStream, Standing]
) -> dict[UUID, int]:
    """Write what becomes of arrivals, and where their streams stand; return the ids of dead letters."""
    sheet = Sheet.of(entries)
    if standings:
        changes = [stand(stream_identity(consumer, stream), at, lent.now) for stream, at in sorted(standings.items())]
        await lent.of("inbox_stream").bulk_write(changes, session=lent.session)
    await _write_receipts(lent, consumer, sheet)
    return {} if only_applied(entries) else await _write_events(lent, consumer, sheet)


async def _write_receipts(lent: Lent, consumer: str, sheet: Sheet) -> None:
    """Write how long handlers took; take back the receipts of what was not handled after all."""
    changes: list[Any] = [
        UpdateOne({"_id": event_identity(consumer, event_id)}, {"$set": {"processing_seconds": seconds}})
        for event_id, seconds in sheet.seconds.items()
    ]
    if sheet.withdrawn:
        changes.append(DeleteMany(_any(consumer, sheet.withdrawn)))
    if changes:
        done = await lent.of("consumer_inbox").bulk_write(changes, session=lent.session)
        check_receipts(done.matched_count, len(sheet.seconds))


async def _write_events(lent: Lent, consumer: str, sheet: Sheet) -> dict[UUID, int]:
    if sheet.parked:
        await _park(lent, consumer, sheet.parked)
    dead_letters = await _bury(lent, consumer, sheet.buried) if sheet.buried else {}
    if gone := [*sheet.left, *dead_letters]:
        await lent.of("inbox_waiting").delete_many(_any(consumer, gone), session=lent.session)
    return dead_letters


async def _park(lent: Lent, consumer: str, arrivals: Sequence[Arrival]) -> None:
    """Keep events whole, in their order. One that waits already stays where it is."""
    last, now = await _take_ids(lent, len(arrivals)), await lent.database.time(lent.session)
    rows = [parked(consumer, each, id_, now) for id_, each in enumerate(arrivals, last - len(arrivals) + 1)]
    changes = [UpdateOne({"_id": row.pop("_id")}, {"$setOnInsert": row}, upsert=True) for row in rows]
    await lent.of("inbox_waiting").bulk_write(changes, session=lent.session)


async def _take_ids(lent: Lent, count: int) -> int:
    """Take ids, outside of the transaction: nobody has to wait for them, and those of a rollback are left out."""
    more = {"$inc": {"last": count}}
    after = ReturnDocument.AFTER
    row = await lent.of("inbox_counter").find_one_and_update(IDS, more, upsert=True, return_document=after)
    assert row is not None, "it is made if it is not there"
    last: int = row["last"]
    return last


async def _bury(lent: Lent, consumer: str, burials: Sequence[tuple[Arrival, Buried]]) -> dict[UUID, int]:
    """Copy events from those that wait to the dead letters. A second burial of an event replaces the first."""
    wanted = _any(consumer, [arrival.event_id for arrival, _ in burials])
    rows = await lent.of("inbox_waiting").find(wanted, session=lent.session).to_list()
    why = {arrival.event_id: buried for arrival, buried in burials}
    now = await lent.database.time(lent.session)
    letters = [dead(row, why[row["_id"]["event_id"]], now) for row in rows]
    changes = [ReplaceOne({"_id": letter["_id"]}, letter, upsert=True) for letter in letters]
    await lent.of("inbox_dead_letter").bulk_write(changes, session=lent.session)
    return {letter["_id"]["event_id"]: letter["id"] for letter in letters}


def _any(consumer: str, event_ids: Sequence[UUID]) -> dict[str, Any]:
    return {"_id": {"$in": [event_identity(consumer, event_id) for event_id in event_ids]}}
