"""Confirming a whole fetch at once: the way nearly every event takes.

The lanes are written, the events deleted, and the documents that were fetched go to the archive as they are. If
anything is not as expected, the transaction is given up, and each event is looked at by `settle`.
"""

from __future__ import annotations

from collections.abc import Sequence

from pymongo.errors import BulkWriteError

from outrider.event import StagedEvent, Stream, default_topic
from outrider.lifecycle import State
from outrider.outcome import CONFIRMED
from outrider.store import Lease, Settlement
from outrider.stores.mongo import ownership
from outrider.stores.mongo.database import Database, Session
from outrider.stores.mongo.documents import RowEvent, departed

DUPLICATE = 11000


class Uneven(Exception):
    """Something is not as it was fetched, so that each event must be looked at."""


def fit(events: Sequence[StagedEvent]) -> bool:
    """Tell whether events may be confirmed without a look: none that a writer might hold, none twice."""
    held = any(event.state == State.OPTIMISTIC for event in events)
    return not held and len({event.event_id for event in events}) == len(events)


async def confirm(
    session: Session, database: Database, lease: Lease, events: Sequence[StagedEvent], *, lanes: int, archive: bool
) -> int:
    """Confirm all of the events, or raise Uneven."""
    mine = lease.only({event.lane for event in events})
    owned, now = await ownership.fence(session, database, mine)
    if not owned >= {event.lane for event in events}:
        raise Uneven
    ids = [event.identity if isinstance(event, RowEvent) else event.event_id for event in events]
    done = await database["outbox"].delete_many({"_id": {"$in": ids}, "lane": {"$in": sorted(owned)}}, session=session)
    if done.deleted_count != len(ids):
        raise Uneven
    if archive:
        gone = [
            {**departed(event, lanes), "_id": event_id, "topic": _topic(event), "sent_at": now}
            for event, event_id in zip(events, ids, strict=True)
        ]
        try:
            await database["outbox_archive"].insert_many(gone, session=session)
        except BulkWriteError as error:
            if not any(trouble["code"] == DUPLICATE for trouble in error.details["writeErrors"]):
                raise
            raise Uneven from error
    return len(ids)


def settlements(events: Sequence[StagedEvent]) -> list[Settlement]:
    """Return the same as `settle` takes it."""
    return [Settlement(event, Stream(event.lane, _topic(event), event.key), CONFIRMED) for event in events]


def _topic(event: StagedEvent) -> str:
    return default_topic(event.event_type, event.topic, event.routing_key)
