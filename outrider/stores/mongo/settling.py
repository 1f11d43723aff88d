"""Settling: writing outcomes, in lanes still owned, into documents that are still there.

All of it is one transaction that starts with the fence. Documents move first and streams are blocked or let go after,
so the order of outcomes within a call cannot strand an event. A stream that this very call blocks stays blocked,
whatever else of it was confirmed; and only a person lifts a hold.
"""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime, timedelta
from typing import Any
from uuid import UUID

from pymongo import UpdateMany, UpdateOne

from outrider import lifecycle
from outrider.event import StagedEvent, Stream
from outrider.lifecycle import State
from outrider.outcome import Bury, Confirmed, Defer, Park, Policy, Retry
from outrider.store import Cause, Lease, Settlement
from outrider.stores.mongo import ownership, streams
from outrider.stores.mongo.database import Database, Document, Session, milliseconds
from outrider.stores.mongo.documents import becoming, copied, departed
from outrider.stores.mongo.markers import marker_of
from outrider.stores.mongo.streams import Block

SETTLEABLE = sorted(lifecycle.guard("confirm"))
_LOOKED_AT = dict.fromkeys(("lane", "state", "failure", "priority", "key", "attempts"), 1)


@dataclass(slots=True)
class Sheet:
    """What a call will write: changes of documents, and what becomes of their streams."""

    now: datetime
    changes: list[UpdateOne | UpdateMany] = field(default_factory=list)
    parked: dict[tuple[int, str], list[UUID]] = field(default_factory=lambda: defaultdict(list))
    parked_streams: set[Stream] = field(default_factory=set)
    confirmed: list[Settlement] = field(default_factory=list)
    buried: list[tuple[Settlement, Bury]] = field(default_factory=list)
    blocks: dict[Stream, Block] = field(default_factory=dict)

    def add(self, settlement: Settlement) -> None:
        """Enter one settlement."""
        event, stream, outcome = settlement
        match outcome:
            case Confirmed():
                self.confirmed.append(settlement)
            case Retry(delay_seconds, failure):
                suspect = failure.get("kind") == "unresolved"
                self._change(event, stream, State.FAILED, failure=json.dumps(failure), suspect=suspect, spent=1)
                self.blocks[stream] = Block(Cause.FAILED, event.position, self._after(delay_seconds))
            case Defer(delay_seconds):
                self._change(event, stream, State.DEFERRED)
                due = event.available_at if delay_seconds is None else self._after(delay_seconds)
                self.blocks[stream] = Block(Cause.DEFERRED, event.position, due or self.now)
            case Park():
                self.parked[stream.lane, stream.topic].append(event.event_id)
                self.parked_streams.add(stream)
            case Bury():
                self.buried.append((settlement, outcome))

    def _after(self, delay_seconds: float) -> datetime:
        return self.now + timedelta(milliseconds=milliseconds(delay_seconds))

    def _change(self, event: StagedEvent, stream: Stream, state: State, *, spent: int = 0, **facts: Any) -> None:
        change = becoming(state, stream.lane, topic=stream.topic, **facts)
        self.changes.append(UpdateOne({"_id": event.event_id}, {**change, "$inc": {"attempts": spent}}))

    def updates(self) -> list[UpdateOne | UpdateMany]:
        """Return all changes of documents; events of one lane and topic are parked together."""
        for (lane, topic), event_ids in self.parked.items():
            change = becoming(State.PARKED, lane, topic=topic)
            self.changes.append(UpdateMany({"_id": {"$in": event_ids}}, change))
        return self.changes

    def block_buried(self, stream: Stream, block: Block) -> None:
        """Block a stream for a dead letter: a hold outlasts everything, a skip gives way to another row's delay."""
        if block.cause is Cause.HELD or stream not in self.blocks:
            self.blocks[stream] = block


async def settle(
    session: Session,
    database: Database,
    lease: Lease,
    settlements: Sequence[Settlement],
    emptied: Sequence[Stream],
    *,
    lanes: int,
    archive: bool,
) -> int:
    """Write outcomes; return how many were applied."""
    owned, now = await ownership.fence(session, database, lease.only(_lanes(settlements, emptied)))
    rows = await _rows(session, database, settlements, owned, now)
    live = _live(settlements, rows)
    sheet = Sheet(now)
    for settlement in live:
        sheet.add(settlement)
    await _write(session, database, sheet, rows, lanes=lanes, archive=archive)
    loose = {s.stream for s in sheet.confirmed if s.event.state in lifecycle.WAITING}
    loose |= {stream for stream in emptied if stream.lane in owned}
    await streams.write(session, database, sheet.blocks, loose, now)
    await streams.ensure_blocked(session, database, sheet.parked_streams - sheet.blocks.keys(), now)
    return len(live)


def _lanes(settlements: Sequence[Settlement], emptied: Sequence[Stream]) -> set[int]:
    return {settlement.stream.lane for settlement in settlements} | {stream.lane for stream in emptied}


async def _rows(
    session: Session, database: Database, settlements: Sequence[Settlement], owned: frozenset[int], now: datetime
) -> dict[UUID, Document]:
    """Read what may be settled: documents that are there, in owned lanes, and not in the hands of a writer."""
    if not settlements or not owned:
        return {}
    wanted = {
        "_id": {"$in": [settlement.event.event_id for settlement in settlements]},
        "lane": {"$in": sorted(owned)},
        "state": {"$in": SETTLEABLE},
        "$or": [{"state": {"$ne": State.OPTIMISTIC.value}}, {"held_until": {"$lte": now}}],
    }
    return {row["_id"]: row for row in await database["outbox"].find(wanted, _LOOKED_AT, session=session).to_list()}


def _live(settlements: Sequence[Settlement], rows: Mapping[UUID, Document]) -> list[Settlement]:
    """Return the settlements that may be written; the first of two for the same event wins."""
    first: dict[UUID, Settlement] = {}
    for settlement in settlements:
        first.setdefault(settlement.event.event_id, settlement)
    return [s for event_id, s in first.items() if event_id in rows and rows[event_id]["lane"] == s.stream.lane]


async def _write(
    session: Session, database: Database, sheet: Sheet, rows: Mapping[UUID, Document], *, lanes: int, archive: bool
) -> None:
    if changes := sheet.updates():
        await database["outbox"].bulk_write(changes, session=session)
    gone = [_leaving(settlement, rows, lanes) for settlement in sheet.confirmed]
    await depart(session, database, gone, sheet.now, archive=archive)
    for settlement, outcome in sheet.buried:
        document = _leaving(settlement, rows, lanes)
        document["attempts"] += 1
        stream = settlement.stream
        sheet.block_buried(stream, await bury(session, database, document, stream, outcome, sheet.now))


def _leaving(settlement: Settlement, rows: Mapping[UUID, Document], lanes: int) -> Document:
    """Return the document of an event that leaves: as it is in hand, with the topic that the relay resolved."""
    document = departed(settlement.event, lanes)
    row = rows[settlement.event.event_id]
    return {**document, **copied(row, but=("_id",)), "topic": settlement.stream.topic}


async def depart(
    session: Session, database: Database, gone: Sequence[Document], now: datetime, *, archive: bool
) -> None:
    """Take delivered events out of the outbox. One that was archived before under the same id is written over."""
    if not gone:
        return
    mine = {"_id": {"$in": [row["_id"] for row in gone]}}
    if archive:
        await database["outbox_archive"].delete_many(mine, session=session)
        await database["outbox_archive"].insert_many([{**row, "sent_at": now} for row in gone], session=session)
    await database["outbox"].delete_many(mine, session=session)


async def bury(  # noqa: PLR0917 - a move is told by all of these
    session: Session, database: Database, row: Document, stream: Stream, outcome: Bury, now: datetime
) -> Block:
    """Move an event to the dead letters; return what becomes of its stream.

    Under `skip` a marker stays in its place if the event was numbered.
    """
    verdict = {"reason": outcome.reason.value, "policy": outcome.policy.value, "failure": json.dumps(outcome.failure)}
    dead = {**row, "topic": stream.topic, **verdict, "buried_at": now}
    await database["outbox_dead_letter"].replace_one({"_id": row["_id"]}, dead, upsert=True, session=session)
    await database["outbox"].delete_one({"_id": row["_id"]}, session=session)
    if outcome.policy is Policy.HOLD:
        return Block(Cause.HELD, row["position"], None)
    if marker := marker_of(dead, State.FAILED):
        await database["outbox"].insert_one(marker, session=session)
        return Block(Cause.FAILED, row["position"], now)
    return Block(Cause.DRAINING, None, now)
