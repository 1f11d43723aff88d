"""Upkeep of the MongoDB store: everything old leaves in small steps, so that nobody waits long."""

from __future__ import annotations

from collections import Counter
from datetime import datetime, timedelta

from outrider.store import Pruned, Retention, Swept
from outrider.stores.mongo import mending
from outrider.stores.mongo.database import Database, Document, Session
from outrider.stores.mongo.errors import translated

PRUNE_MAX = 1_000
"""Documents removed in one step."""

COUNTER_DAYS = 2.0
"""How long a stream without numbers must have been idle, by whole days, before its counter is forgotten."""


class MongoUpkeep:
    """Keeps the collections bounded."""

    def __init__(self, database: Database) -> None:
        self._database = database

    async def sweep(self) -> list[Swept]:
        return await self._database.transaction(_sweep, self._database)

    async def take_duty(self, name: str, every_seconds: float) -> bool:
        database = self._database
        # A duty that nobody has taken yet has no time, which is before every time.
        due = {"$lte": ["$due_at", database.now]}
        again = [{"$set": {"due_at": {"$cond": [due, database.after(every_seconds), "$due_at"]}}}]
        done = await database.run(database["outbox_duty"].update_one({"_id": name}, again, upsert=True))
        return done.upserted_id is not None or done.modified_count == 1

    async def prepare(self) -> None:
        """Nothing to make ahead of time: the archive is one collection."""

    async def prune(self, retention: Retention) -> Pruned:
        """Remove what is old; also let streams go on that nothing holds, and find events that nobody would look for."""
        await self._database.transaction(mending.release_holds, self._database)
        await self._database.transaction(mending.adopt_orphans, self._database)
        with translated(self._database.where):
            now = await self._database.time()
            await self._prune("outbox_counter", "used", now, COUNTER_DAYS, {})
            return Pruned(
                await self._prune("outbox_archive", "sent_at", now, retention.archive_days, {}),
                # A held one is what lets its stream go on, so it stays until a person acts.
                await self._prune(
                    "outbox_dead_letter", "buried_at", now, retention.dead_letter_days, {"policy": "skip"}
                ),
                await self._prune("outbox_operation", "at", now, retention.operation_days, {}),
            )

    async def _prune(self, name: str, age: str, now: datetime, days: float, only: Document) -> int:
        """Remove the oldest documents; the index on their age."""
        documents, total = self._database[name], 0
        old = {age: {"$lt": now - timedelta(days=days)}, **only}
        while True:
            found = [row["_id"] for row in await documents.find(old, {"_id": 1}).sort(age).limit(PRUNE_MAX).to_list()]
            if found:
                total += (await documents.delete_many({"_id": {"$in": found}, **old})).deleted_count
            if len(found) < PRUNE_MAX:
                return total


async def _sweep(session: Session, database: Database) -> list[Swept]:
    lapsed = {"$expr": {"$lte": ["$alive_until", database.now]}}
    dead = [row["_id"] for row in await database["outbox_relay"].find(lapsed, session=session).sort("_id").to_list()]
    if not dead:
        return []
    left = await database["outbox_lane"].find({"owner": {"$in": dead}}, session=session).to_list()
    lanes = Counter(lane["owner"] for lane in left)
    await database["outbox_relay"].delete_many({"_id": {"$in": dead}}, session=session)
    return [Swept(relay, lanes[relay]) for relay in dead]
