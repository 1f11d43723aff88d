"""Who owns which lanes: heartbeats, claims, and the fence that every settling write passes first.

The fence writes the documents of its lanes. A claim writes them too, so of a settle and a takeover at the same moment
one is refused by the server and starts anew, and then sees what the other has done.
"""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Iterable, Sequence
from datetime import datetime
from functools import partial
from typing import NamedTuple

from outrider.errors import Transient
from outrider.store import Lease, Pulse
from outrider.stores.mongo.database import Database, Document, Patience, Session, transact
from outrider.stores.mongo.transaction import conflict

CLAIM_SECONDS = 2.0
"""How long a claim may go on looking for lanes that are to be had."""

TURN_SECONDS = 0.1
"""How long it tries again with the same lanes: another relay that claims is done by then."""

PARTS = 8
"""Into how many parts lanes that were in conflict are divided: each step towards the guilty ones costs a turn."""

FREE: Document = {"owner": None}


class Fence(NamedTuple):
    """The lanes that are still the lease's own, and what time it is by the database."""

    owned: frozenset[int]
    now: datetime


async def beat(database: Database, relay: str, lease_seconds: float, *, joining: bool) -> Pulse | None:
    """Join, or renew a heartbeat that has not lapsed."""
    relays = database["outbox_relay"]
    living = {"_id": relay} if joining else {"_id": relay, "$expr": {"$gt": ["$alive_until", database.now]}}
    until = [{"$set": {"alive_until": database.after(lease_seconds)}}]
    done = await relays.update_one(living, until, upsert=joining)
    if not joining and not done.matched_count:
        return None
    alive = await living_relays(database)
    lanes = await database["outbox_lane"].find({}, {"owner": 1}).sort("_id").to_list()
    return Pulse(len(alive), [lane["_id"] for lane in lanes if lane["owner"] not in alive])


async def living_relays(database: Database, session: Session | None = None) -> set[str]:
    """Return the relays whose heartbeat lies ahead."""
    ahead = {"$expr": {"$gt": ["$alive_until", database.now]}}
    return {row["_id"] for row in await database["outbox_relay"].find(ahead, {"_id": 1}, session=session).to_list()}


async def claim(database: Database, relay: str, lanes: Sequence[int]) -> Lease:
    """Take those of the lanes that nobody alive owns, if the relay itself is alive.

    What a killed relay had open may be in the way for a minute. Its lanes are left for later, the others are not; and
    all of it is short, because whoever claims has a heartbeat to renew.
    """
    taken: dict[int, int] = {}
    waiting, give_up = [list(lanes)], time.monotonic() + CLAIM_SECONDS
    while waiting:
        some = waiting.pop(0)
        try:
            async with database.session() as session:
                work = partial(take, session, database, relay, some)
                taken |= (await transact(session, work, Patience(TURN_SECONDS))).epochs
        except Transient as error:
            # Of anything else nobody knows whether it has happened, and the relay must hear of that.
            if not conflict(error.__cause__):
                raise
            if time.monotonic() > give_up:
                break
            if len(some) > 1:
                waiting += [part for start in range(PARTS) if (part := some[start::PARTS])]
    return Lease(relay, taken)


async def take(session: Session, database: Database, relay: str, lanes: Sequence[int]) -> Lease:
    """Take all of the lanes that are to be had, or none."""
    alive = await living_relays(database, session)
    documents = database["outbox_lane"]
    free = {"_id": {"$in": list(set(lanes))}, "owner": {"$nin": sorted(alive)}}
    found = await documents.find(free, session=session).sort("_id").to_list() if relay in alive else []
    if not found:
        return Lease(relay, {})
    # A heartbeat that came after our snapshot would be overlooked. Both write the same document, so one gives way.
    gone = {"_id": {"$in": list({lane["owner"] for lane in found} - {None})}}
    await database["outbox_relay"].update_many(gone, {"$inc": {"bereft": 1}}, session=session)
    taken = {"_id": {"$in": [lane["_id"] for lane in found]}}
    await documents.update_many(taken, {"$set": {"owner": relay}, "$inc": {"epoch": 1}}, session=session)
    return Lease(relay, {lane["_id"]: lane["epoch"] + 1 for lane in found})


async def fence(session: Session, database: Database, lease: Lease) -> Fence:
    """Lock the lanes that are still the lease's own. First in every settling transaction."""
    if not lease.epochs:
        return Fence(frozenset(), await database.time(session))
    mine = {"$or": owned(lease)}
    await database["outbox_lane"].update_many(mine, {"$inc": {"turn": 1}}, session=session)
    found = await database["outbox_lane"].find(mine, {"now": "$$NOW"}, session=session).to_list()
    now = database.present(found[0]["now"]) if found else await database.time(session)
    return Fence(frozenset(lane["_id"] for lane in found), now)


def owned(lease: Lease) -> list[Document]:
    """Return the conditions under which a lane is still the lease's own, one for each epoch.

    >>> owned(Lease("r", {1: 7, 2: 7}))
    [{'_id': {'$in': [1, 2]}, 'owner': 'r', 'epoch': 7}]
    """
    by_epoch: dict[int, list[int]] = defaultdict(list)
    for lane, epoch in lease.epochs.items():
        by_epoch[epoch].append(lane)
    return [{"_id": {"$in": lanes}, "owner": lease.owner, "epoch": epoch} for epoch, lanes in by_epoch.items()]


async def release(database: Database, lease: Lease) -> None:
    """Give lanes back, unless they were taken over. One document at a time is enough: each stands for itself."""
    if lease.epochs:
        await database["outbox_lane"].update_many({"$or": owned(lease)}, {"$set": FREE})


async def leave(session: Session, database: Database, relay: str) -> None:
    """End a heartbeat; whatever the relay still owned is free."""
    await database["outbox_relay"].delete_one({"_id": relay}, session=session)
    await database["outbox_lane"].update_many({"owner": relay}, {"$set": FREE}, session=session)


async def take_lanes(session: Session, database: Database, lanes: Iterable[int]) -> None:
    """Take lanes from their relays, so that nothing decided before can be written after."""
    change = {"$set": FREE, "$inc": {"epoch": 1}}
    await database["outbox_lane"].update_many({"_id": {"$in": list(lanes)}}, change, session=session)
