"""The journal of the outbox in MongoDB. The server fills in the log position of an entry: its cluster time.

Each transaction reads the switch in its own snapshot. A transaction that begins before the switch writes no entries,
and lives at most `transactionLifetimeLimitSeconds`: the check expects entries of events that are staged after that
time.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from datetime import datetime, timedelta
from typing import TYPE_CHECKING, Any, NamedTuple
from uuid import UUID

from bson import Timestamp
from pymongo.errors import OperationFailure
from pymongo.read_concern import ReadConcern

from outrider.outbox.model import EventPlace, JournalKind, JournalPage, JournalSwitch
from outrider.stores.journal_rows import FIRST_EVENT, to_histories, whole_events, without_entry
from outrider.stores.mongo.database import Document, MongoDatabase, Session, translated
from outrider.stores.mongo.operations import transaction_name

if TYPE_CHECKING:
    from pymongo.asynchronous.collection import AsyncCollection

SWITCH = "journal"
"""The `_id` of the switch in `outbox_meta`."""

LIFETIME_SECONDS = 60
"""The default of `transactionLifetimeLimitSeconds`, for a user who may not ask."""

BATCH_MAX = 1_000

_TABLES = {
    EventPlace.OUTBOX: "outbox",
    EventPlace.ARCHIVE: "outbox_archive",
    EventPlace.DEAD_LETTERS: "outbox_dead_letter",
}

_BEFORE_ALL = Timestamp(0, 1)


class TimeAndSwitch(NamedTuple):
    """The current time of the database, and whether the journal is on."""

    now: datetime
    journaled: bool


async def read_switch(session: Session, database: MongoDatabase) -> TimeAndSwitch:
    """Read the switch and the time in the snapshot of a transaction."""
    wanted = {"_id": {"$in": ["lanes", SWITCH]}}
    rows = await database["outbox_meta"].find(wanted, {"value": 1, "now": "$$NOW"}, session=session).to_list()
    journaled = any(row["_id"] == SWITCH and row["value"] == 1 for row in rows)
    return TimeAndSwitch(database.present(rows[0]["now"]), journaled)


async def add(
    session: Session, database: MongoDatabase, kind: JournalKind, event_ids: Iterable[Any], now: datetime
) -> None:
    """Journal events in the transaction that writes them. The caller has read that the journal is on."""
    if documents := entries(kind, event_ids, transaction_name(session), now):
        await database["outbox_journal"].insert_many(documents, session=session)


def entries(kind: JournalKind, event_ids: Iterable[Any], transaction_id: str, now: datetime) -> list[Document]:
    """Return entries; the server replaces the empty timestamp by its cluster time.

    >>> entries(JournalKind.STAGED, [], "", datetime(2030, 1, 1))
    []
    """
    facts = {"transaction_id": transaction_id, "log_position": Timestamp(0, 0), "at": now}
    return [{"kind": kind.value, "event_id": event_id, **facts} for event_id in event_ids]


class MongoJournal:
    """The switch and the pages of the journal."""

    def __init__(self, database: MongoDatabase) -> None:
        self._database = database

    async def switch(self) -> JournalSwitch:
        with translated(self._database.where):
            return _to_switch(await self._database["outbox_meta"].find_one({"_id": SWITCH}))

    async def turn(self, *, on: bool) -> bool:
        database = self._database
        if (await self.switch()).is_on == on:
            return False
        with translated(database.where):
            now = await database.time()
            complete = now + timedelta(seconds=await self._lifetime_seconds())
            facts = {"value": int(on), "since": now, "position": int(complete.timestamp() * 1_000_000)}
            change = {"$set": facts, "$currentDate": {"entry": {"$type": "timestamp"}}}
            await database["outbox_meta"].update_one({"_id": SWITCH}, change, upsert=True)
        return True

    async def histories(self, after: UUID | None, limit: int) -> JournalPage:
        async with self._database.snapshot() as session:
            row = await self._meta(session)
            wanted = {"event_id": {"$gt": after or FIRST_EVENT}, "log_position": {"$gt": _start(row)}}
            found = self._plain("outbox_journal").find(wanted, session=session)
            documents = await found.sort([("event_id", 1), ("log_position", 1)]).limit(limit).to_list()
            names = ("event_id", "kind", "transaction_id", "log_position", "at")
            rows = [tuple(document[name] for name in names) for document in documents]
            chosen = whole_events(rows, limit)
            places = await self._places(session, list({entry[0] for entry in chosen}))
        if rows and not chosen:
            return await self.histories(after, 2 * limit)
        texts = [(*entry[:3], f"{entry[3].time}:{entry[3].inc}", entry[4]) for entry in chosen]
        histories = to_histories(texts, places)
        return JournalPage(_to_switch(row), histories, histories[-1].event_id if len(rows) == limit else None)

    async def unjournaled(self, place: EventPlace, after: UUID | None, limit: int) -> JournalPage:
        async with self._database.snapshot() as session:
            row = await self._meta(session)
            switch = _to_switch(row)
            wanted = {"_id": {"$gt": after or FIRST_EVENT}, "position": {"$gt": switch.position}}
            found = self._plain(_TABLES[place]).find(wanted, {"position": 1}, session=session)
            events = await found.sort("_id").limit(limit).to_list()
            mine = {"event_id": {"$in": [event["_id"] for event in events]}, "log_position": {"$gt": _start(row)}}
            entered = await self._plain("outbox_journal").find(mine, {"event_id": 1}, session=session).to_list()
        known = {entry["event_id"] for entry in entered}
        rows = [(event["_id"], event["position"], event["_id"] in known) for event in events]
        return JournalPage(switch, without_entry(rows, place), rows[-1][0] if len(rows) == limit else None)

    async def note_prune(self, days: float) -> None:
        """Note that maintenance is about to remove events of this age from the archive."""
        # Without a journal that is on, workers need no right to write here.
        if not (await self.switch()).is_on:
            return
        before = await self._database.time() - timedelta(days=days)
        change = {"$max": {"archive_pruned": before}}
        await self._database["outbox_meta"].update_one({"_id": SWITCH, "value": 1}, change)

    async def prune(self, days: float) -> int:
        """Remove old entries of events that are in no collection; return their number; outbox_journal_age."""
        before = await self._database.time() - timedelta(days=days)
        total, last = 0, None
        while True:
            rows, gone = await self._aged(before, last)
            if gone:
                done = await self._database["outbox_journal"].delete_many({"_id": {"$in": gone}})
                total += done.deleted_count
            if len(rows) < BATCH_MAX:
                return total
            last = rows[-1]

    async def _aged(self, before: datetime, last: Document | None) -> tuple[list[Document], list[Any]]:
        """Read the next old entries, and the ids of those whose events are in no collection.

        An event that is staged again after this snapshot has new entries, and does not need the old ones.
        """
        old: Document = {"at": {"$lt": before}}
        if last is not None:
            old["$or"] = [{"at": {"$gt": last["at"]}}, {"at": last["at"], "_id": {"$gt": last["_id"]}}]
        async with self._database.snapshot() as session:
            found = self._plain("outbox_journal").find(old, {"event_id": 1, "at": 1}, session=session)
            rows = await found.sort([("at", 1), ("_id", 1)]).limit(BATCH_MAX).to_list()
            places = await self._places(session, list({row["event_id"] for row in rows}))
        held = {event_id for _, event_id, _ in places}
        return rows, [row["_id"] for row in rows if row["event_id"] not in held]

    async def _places(self, session: Session, event_ids: Sequence[UUID]) -> list[tuple[EventPlace, UUID, int]]:
        places = []
        for place, name in _TABLES.items():
            found = self._plain(name).find({"_id": {"$in": event_ids}}, {"position": 1}, session=session)
            # A document that no relay has filled in has no position yet.
            places += [(place, row["_id"], row.get("position") or 0) for row in await found.to_list()]
        return places

    async def _meta(self, session: Session) -> Document | None:
        return await self._plain("outbox_meta").find_one({"_id": SWITCH}, session=session)

    def _plain(self, name: str) -> AsyncCollection[Document]:
        # A snapshot session rejects the read concern of a collection.
        return self._database[name].with_options(read_concern=ReadConcern())

    async def _lifetime_seconds(self) -> float:
        try:
            limit = {"getParameter": 1, "transactionLifetimeLimitSeconds": 1}
            reply = await self._database.client.admin.command(limit)
        except OperationFailure:
            return LIFETIME_SECONDS
        return float(reply["transactionLifetimeLimitSeconds"])


def _to_switch(row: Mapping[str, Any] | None) -> JournalSwitch:
    if row is None:
        return JournalSwitch(is_on=False)
    return JournalSwitch(row["value"] == 1, row["since"], row["position"], row.get("archive_pruned"))


def _start(row: Mapping[str, Any] | None) -> Timestamp:
    return row["entry"] if row else _BEFORE_ALL
