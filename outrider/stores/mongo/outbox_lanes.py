"""Lane ownership: heartbeats, claims, and the fence at the start of every settling write.

The fence writes the documents of its lanes, and a claim writes the same documents. If a settle and a takeover happen at
the same moment, the server rejects one transaction, which starts again and sees the result of the other.
"""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Iterable, Sequence
from datetime import datetime
from functools import partial
from typing import NamedTuple

from outrider.errors import Transient
from outrider.outbox.model import HeartbeatResult, Lease
from outrider.stores.mongo.database import Document, MongoDatabase, RetryBudget, Session, transact
from outrider.stores.mongo.handler_transactions import conflict
from outrider.stores.mongo.journal import SWITCH, read_switch

CLAIM_SECONDS = 2.0
"""The time limit of a claim."""

TURN_SECONDS = 0.1
"""The time limit for retries with the same lanes. A competing claim of another relay takes less time."""

PARTS = 8
"""The number of parts into which conflicting lanes are divided. A division costs TURN_SECONDS."""

FREE: Document = {"owner": None}


class MongoFence(NamedTuple):
    """The owned lanes of the lease, the current time of the database, and whether the journal is on."""

    owned: frozenset[int]
    now: datetime
    journaled: bool


async def heartbeat(
    database: MongoDatabase, relay: str, lease_seconds: float, *, first: bool
) -> HeartbeatResult | None:
    """Join, or renew a heartbeat that has not expired.

    A relay whose heartbeat is from before the clock was set back may renew the heartbeat. Until then, others may take
    its lanes, and the fence protects them.
    """
    relays = database["outbox_relay"]
    living = {"_id": relay} if first else {"_id": relay, "$expr": {"$gt": ["$alive_until", database.now]}}
    # One lease before the heartbeat: if the clock was set back by more than that, the relay is dead as well.
    times = {"alive_from": database.after(-lease_seconds), "alive_until": database.after(lease_seconds)}
    done = await relays.update_one(living, [{"$set": times}], upsert=first)
    if not first and not done.matched_count:
        return None
    alive = await living_relays(database)
    lanes = await database["outbox_lane"].find({}, {"owner": 1}).sort("_id").to_list()
    return HeartbeatResult(len(alive), [lane["_id"] for lane in lanes if lane["owner"] not in alive])


async def living_relays(database: MongoDatabase, session: Session | None = None) -> set[str]:
    """Return the relays with a valid heartbeat."""
    found = await database["outbox_relay"].find(living(database), {"_id": 1}, session=session).to_list()
    return {row["_id"] for row in found}


def living(database: MongoDatabase) -> Document:
    """Return the condition for a valid heartbeat."""
    now = database.now
    return {"$expr": {"$and": [{"$lte": ["$alive_from", now]}, {"$gt": ["$alive_until", now]}]}}


async def claim(database: MongoDatabase, relay: str, lanes: Sequence[int]) -> Lease:
    """Claim the lanes without a live owner, provided that the claiming relay is alive.

    An open transaction of a killed relay may lock lanes for a minute. The claim skips locked lanes and takes the rest.
    The claim is short, because the relay must renew its heartbeat.
    """
    taken: dict[int, int] = {}
    waiting, deadline = [list(lanes)], time.monotonic() + CLAIM_SECONDS
    while waiting:
        some = waiting.pop(0)
        try:
            async with database.session() as session:
                work = partial(take, session, database, relay, some)
                taken |= (await transact(session, work, RetryBudget(TURN_SECONDS))).epochs
        except Transient as error:
            # After any other error the result is unknown, and the relay must get the error.
            if not conflict(error.__cause__):
                raise
            if time.monotonic() > deadline:
                break
            if len(some) > 1:
                waiting += [part for start in range(PARTS) if (part := some[start::PARTS])]
    return Lease(relay, taken)


async def take(session: Session, database: MongoDatabase, relay: str, lanes: Sequence[int]) -> Lease:
    """Take all available lanes in one transaction, or none."""
    alive = await living_relays(database, session)
    documents = database["outbox_lane"]
    free = {"_id": {"$in": list(set(lanes))}, "owner": {"$nin": sorted(alive)}}
    found = await documents.find(free, session=session).sort("_id").to_list() if relay in alive else []
    if not found:
        return Lease(relay, {})
    # The snapshot would miss a later heartbeat. Both transactions write the same document, so one of them is retried.
    removed = {"_id": {"$in": list({lane["owner"] for lane in found} - {None})}}
    await database["outbox_relay"].update_many(removed, {"$inc": {"bereft": 1}}, session=session)
    taken = {"_id": {"$in": [lane["_id"] for lane in found]}}
    await documents.update_many(taken, {"$set": {"owner": relay}, "$inc": {"epoch": 1}}, session=session)
    return Lease(relay, {lane["_id"]: lane["epoch"] + 1 for lane in found})


async def fence(session: Session, database: MongoDatabase, lease: Lease) -> MongoFence:
    """Lock the lanes that the lease still owns, at the start of every settling transaction."""
    if not lease.epochs:
        return MongoFence(frozenset(), *await read_switch(session, database))
    mine = {"$or": owned(lease)}
    await database["outbox_lane"].update_many(mine, {"$inc": {"turn": 1}}, session=session)
    found = await (await database["outbox_lane"].aggregate(_lanes_and_switch(mine), session=session)).to_list()
    if not found:
        return MongoFence(frozenset(), *await read_switch(session, database))
    now, journaled = database.present(found[0]["now"]), bool(found[0]["journal"])
    return MongoFence(frozenset(lane["_id"] for lane in found), now, journaled)


def _lanes_and_switch(mine: Document) -> list[Document]:
    """Return the pipeline that reads lanes, the time, and the switch of the journal, in one round trip."""
    switch = [{"$match": {"_id": SWITCH, "value": 1}}, {"$project": {"_id": 1}}]
    return [
        {"$match": mine},
        {"$project": {"now": "$$NOW"}},
        {"$lookup": {"from": "outbox_meta", "pipeline": switch, "as": "journal"}},
    ]


def owned(lease: Lease) -> list[Document]:
    """Return the conditions under which the lease still owns a lane, one condition per epoch.

    >>> owned(Lease("r", {1: 7, 2: 7}))
    [{'_id': {'$in': [1, 2]}, 'owner': 'r', 'epoch': 7}]
    """
    by_epoch: dict[int, list[int]] = defaultdict(list)
    for lane, epoch in lease.epochs.items():
        by_epoch[epoch].append(lane)
    return [{"_id": {"$in": lanes}, "owner": lease.owner, "epoch": epoch} for epoch, lanes in by_epoch.items()]


async def release(database: MongoDatabase, lease: Lease) -> None:
    """Release lanes, except lanes of a new owner. The lanes are independent, so no transaction is needed."""
    if lease.epochs:
        await database["outbox_lane"].update_many({"$or": owned(lease)}, {"$set": FREE})


async def leave(session: Session, database: MongoDatabase, relay: str) -> None:
    """End a heartbeat and release all lanes of the relay."""
    await database["outbox_relay"].delete_one({"_id": relay}, session=session)
    await database["outbox_lane"].update_many({"owner": relay}, {"$set": FREE}, session=session)


async def claim_lanes(session: Session, database: MongoDatabase, lanes: Iterable[int]) -> None:
    """Take lanes from their relays, so that the fence rejects all their pending writes."""
    change = {"$set": FREE, "$inc": {"epoch": 1}}
    await database["outbox_lane"].update_many({"_id": {"$in": list(lanes)}}, change, session=session)
