"""What people see of the MongoDB store's events, and what they do with them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any
from uuid import UUID

from pymongo.read_concern import ReadConcern

from outrider.errors import NotFound
from outrider.event import default_topic
from outrider.lifecycle import State
from outrider.outcome import Bury, Policy, Reason
from outrider.store import Criteria, Held
from outrider.stores.mongo import operations
from outrider.stores.mongo.database import Database, Document, Documents, Session
from outrider.stores.mongo.documents import to_facts, to_stream
from outrider.stores.mongo.errors import translated
from outrider.stores.mongo.fetching import of_stream
from outrider.stores.mongo.ownership import living_relays

LOOK_MAX = 10_000
"""How many events, and how many blocked streams, are looked at for their topics."""


class MongoDesk:
    """Listing, replaying, burying and discarding."""

    def __init__(self, database: Database, lanes: int) -> None:
        self._database, self._lanes = database, lanes

    async def counts(self, *, sent: bool = True) -> dict[str, int]:
        async with self._database.snapshot() as session:
            states = await self._aggregate("outbox", [{"$group": {"_id": "$state", "n": {"$sum": 1}}}], session)
            counts = {State(row["_id"] or State.PENDING).value: 0 for row in states}
            for row in states:
                counts[row["_id"] or State.PENDING.value] += row["n"]
            if sent:
                counts[State.SENT.value] = await self._count("outbox_archive", session)
            counts[State.DEAD_LETTER.value] = await self._count("outbox_dead_letter", session)
        return counts

    async def events(self, criteria: Criteria) -> list[Document]:
        if criteria.reason is not None:
            return []
        if criteria.state == State.SENT:
            return await self._list(
                self._database["outbox_archive"], _wanted(criteria), ("sent_at", -1), criteria.limit
            )
        wanted = _wanted(criteria)
        if criteria.state is not None:
            # A document from elsewhere has no state before a relay has met it.
            unmet = [None] if criteria.state == State.PENDING else []
            wanted["state"] = {"$in": [criteria.state, *unmet]}
        return await self._list(self._database["outbox"], wanted, ("position", 1), criteria.limit)

    async def event(self, event_id: UUID) -> Document:
        with translated(self._database.where):
            for name, state in _PLACES.items():
                if row := await self._database[name].find_one({"_id": event_id}):
                    return to_facts(row, state)
        raise NotFound(f"no event {event_id} in outbox, archive or dead letters; it may have been pruned or deleted")

    async def dead_letters(self, criteria: Criteria) -> list[Document]:
        if criteria.state not in (None, State.DEAD_LETTER):
            return []
        wanted = _wanted(criteria) | ({} if criteria.reason is None else {"reason": criteria.reason})
        return await self._list(self._database["outbox_dead_letter"], wanted, ("position", 1), criteria.limit)

    async def relays(self) -> int:
        with translated(self._database.where):
            return len(await living_relays(self._database))

    async def topics(self, limit: int) -> list[str]:
        fields = {"event_type": 1, "topic": 1, "routing_key": 1}
        with translated(self._database.where):
            oldest = self._database["outbox"].find({}, fields).sort("position").limit(LOOK_MAX)
            rows = await oldest.to_list()
            blocked = await self._database["outbox_blocked"].find({}, {"_id": 1}).limit(LOOK_MAX).to_list()
        found = {default_topic(row["event_type"], row.get("topic"), row.get("routing_key")) for row in rows}
        return sorted(found | {row["_id"]["topic"] for row in blocked})[:limit]

    async def blocked_streams(self, limit: int) -> list[Held]:
        async with self._database.snapshot() as session:
            rows = await self._aggregate("outbox_blocked", blocked_pipeline(limit), session)
        return [Held(to_stream(row["_id"]), row["cause"], row["until"], row["waiting"]) for row in rows]

    async def replay(self, event_ids: Sequence[UUID], actor: str) -> int:
        return await self._database.transaction(operations.replay, self._database, event_ids, actor, self._lanes)

    async def bury(self, event_id: UUID, actor: str, failure: dict[str, Any], policy: str) -> bool:
        outcome = Bury(Reason.BY_HAND, failure, Policy(policy))
        return await self._database.transaction(
            operations.bury, self._database, event_id, outcome, actor=actor, lanes=self._lanes
        )

    async def discard(self, event_ids: Sequence[UUID], actor: str) -> int:
        return await self._database.transaction(operations.discard, self._database, event_ids, actor)

    async def _list(self, documents: Documents, wanted: Document, order: tuple[str, int], limit: int) -> list[Document]:
        with translated(self._database.where):
            rows = await documents.find(wanted).sort(*order).limit(limit).to_list()
        return [to_facts(row, _PLACES[documents.name]) for row in rows]

    async def _count(self, name: str, session: Session) -> int:
        rows = await self._aggregate(name, [{"$count": "n"}], session)
        return int(rows[0]["n"]) if rows else 0

    async def _aggregate(self, name: str, pipeline: list[dict[str, Any]], session: Session) -> list[Document]:
        plain = self._database[name].with_options(read_concern=ReadConcern())
        return await (await plain.aggregate(pipeline, session=session)).to_list()


_PLACES = {"outbox": None, "outbox_archive": State.SENT.value, "outbox_dead_letter": State.DEAD_LETTER.value}


def _wanted(criteria: Criteria) -> Document:
    given = {"event_type": criteria.event_type, "topic": criteria.topic}
    wanted: Document = {name: value for name, value in given.items() if value is not None}
    if criteria.event_ids:
        wanted["_id"] = {"$in": list(criteria.event_ids)}
    if criteria.key is not None:
        # A document from elsewhere has only what its writer gave it, until a relay has met it.
        unmet = {"lane": None, "$or": [{"key": criteria.key}, {"key": None, "aggregate_id": criteria.key}]}
        wanted["$or"] = [{"stream_key": criteria.key}, unmet]
    return wanted


def blocked_pipeline(limit: int) -> list[dict[str, Any]]:
    """Blocked streams, held ones first, because they wait for a person, with how many events wait; outbox_waiting."""
    return [
        {"$set": {"rank": {"$cond": [{"$eq": ["$cause", "held"]}, 0, 1]}}},
        {"$sort": {"rank": 1, "until": 1, "_id": 1}},
        {"$limit": limit},
        {"$lookup": of_stream([{"$count": "n"}], "waiting")},
        {"$set": {"waiting": {"$ifNull": [{"$first": "$waiting.n"}, 0]}}},
    ]
