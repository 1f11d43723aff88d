"""Rows in the hands of a writer that publishes its own events straight after the commit."""

from __future__ import annotations

from collections.abc import Sequence
from uuid import UUID

from outrider.event import Readiness, StagedEvent
from outrider.lifecycle import State
from outrider.store import Hold
from outrider.stores.mongo.database import Database, Document, Session
from outrider.stores.mongo.documents import copied, to_event
from outrider.stores.mongo.settling import depart


async def renew(database: Database, hold: Hold, event_ids: Sequence[UUID]) -> list[StagedEvent]:
    """Lengthen a hold that has not lapsed; return the events that are still the writer's own, in the order given."""
    mine = _mine(database, hold, event_ids)
    # Written first, by majority: what is read after is there to stay.
    await database["outbox"].update_many(mine, [{"$set": {"held_until": database.after(hold.seconds)}}])
    now = await database.time()
    rows = {row["_id"]: row for row in await database["outbox"].find(mine).to_list()}
    kept = [rows[event_id] for event_id in event_ids if event_id in rows]
    return [to_event(row, now)._replace(readiness=Readiness.READY) for row in kept]


async def settle(
    session: Session,
    database: Database,
    hold: Hold,
    confirmed: Sequence[UUID],
    yielded: Sequence[UUID],
    *,
    archive: bool,
) -> None:
    """Write what the writer achieved: once a hold has lapsed, a relay may have the event in flight, so hands off."""
    outbox, now = database["outbox"], await database.time(session)
    rows = await outbox.find(_mine(database, hold, confirmed), session=session).to_list() if confirmed else []
    order = {event_id: place for place, event_id in enumerate(confirmed)}
    gone = [copied(row) for row in sorted(rows, key=lambda row: order[row["_id"]])]
    await depart(session, database, gone, now, archive=archive)
    if yielded:
        change = {"$set": {"state": State.PENDING.value}, "$unset": {"held_by": "", "held_until": ""}}
        await outbox.update_many(_mine(database, hold, yielded), change, session=session)


def _mine(database: Database, hold: Hold, event_ids: Sequence[UUID]) -> Document:
    return {
        "_id": {"$in": list(event_ids)},
        "state": State.OPTIMISTIC.value,
        "held_by": hold.owner,
        "$expr": {"$gt": ["$held_until", database.now]},
    }
