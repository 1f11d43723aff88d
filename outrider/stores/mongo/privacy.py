"""Keys and stored payloads in MongoDB."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from bson.binary import Binary
from pymongo import UpdateOne
from pymongo.errors import BulkWriteError, DuplicateKeyError

from outrider.clock import Clock
from outrider.event import erased_name
from outrider.privacy.store import (
    CopyKind,
    CopyPage,
    NewSubjectKey,
    Rewrite,
    SubjectKeyCounts,
    WrappedKey,
    WrappedSubjectKey,
)
from outrider.stores.mongo.database import Document, MongoDatabase, Session
from outrider.stores.mongo.handler_transactions import open_installed
from outrider.stores.mongo.operation_log import record
from outrider.stores.privacy_rows import KEY_VERBS, stored_text, to_copies, to_keys, to_subject_keys

VERSION = 6

TAKEN = 11000
"""The code of the server for a document that breaks a unique index."""


class CollectionCopies(NamedTuple):
    """The collection of a kind of copies, its field with the payload, the name of the type, and which ones count."""

    collection: str
    field: str
    event_type: str = "event_type"
    counts: Mapping[str, Any] = {}


COPIES: Mapping[CopyKind, CollectionCopies] = {
    CopyKind.EVENT: CollectionCopies("outbox", "payload"),
    CopyKind.DEAD_LETTER: CollectionCopies("outbox_dead_letter", "payload"),
    CopyKind.HELD_EVENT: CollectionCopies("inbox_held", "body"),
    CopyKind.CONSUMER_DEAD_LETTER: CollectionCopies("inbox_dead_letter", "body"),
    CopyKind.SAGA_MESSAGE: CollectionCopies("saga_mailbox", "body", "name", {"kind": "reply"}),
    CopyKind.SAGA_STATE: CollectionCopies("saga_instance", "state", "saga_type"),
    CopyKind.SAGA_JOURNAL: CollectionCopies("saga_step", "data", counts={"data": {"$type": "string"}}),
    CopyKind.PARTICIPANT_REPLY: CollectionCopies("saga_barrier", "reply", counts={"reply": {"$type": "string"}}),
    CopyKind.ARCHIVED_EVENT: CollectionCopies("outbox_archive", "payload"),
}
"""The collections by kind; pages are in the order of `_id`."""

ALWAYS = ("_id", "saga_id", "step", "phase", "subject", "headers")
"""The fields that are read of every kind, if they are there."""


class MongoPrivacy:
    """The collection of keys in MongoDB, and all payloads. Open it with `await MongoPrivacy.open(url)`."""

    def __init__(self, database: MongoDatabase) -> None:
        self.database = database

    @classmethod
    async def open(cls, url: str, *, schema: str = "outrider", clock: Clock | None = None) -> MongoPrivacy:
        """Connect to an installed store."""
        return cls(await open_installed(url, schema, what="table of keys", version=VERSION, clock=clock))

    async def keys(self) -> list[WrappedKey]:
        rows = await self.database.run(self.database["encryption_key"].find().to_list())
        names = ("_id", "wrapped", "rank", "created_at", "created_by", "activated_at", "activated_by")
        return to_keys([tuple(row.get(name) for name in names) for row in rows])

    async def insert_key(self, key_id: str, wrapped: str, actor: str) -> bool:
        try:
            await self.database.transaction(_insert_key, self.database, key_id, wrapped, actor)
        except Exception as error:
            if isinstance(error.__cause__, DuplicateKeyError):
                return False
            raise
        return True

    async def activate_key(self, key_id: str, actor: str) -> bool:
        return await self.database.transaction(_activate_key, self.database, key_id, actor)

    async def rewrap_key(self, key_id: str, before: str, after: str, actor: str) -> bool:
        return await self.database.transaction(_rewrap_key, self.database, key_id, before, after, actor=actor)

    async def subject_keys(self, subjects: Sequence[str], key_ids: Sequence[str]) -> list[WrappedSubjectKey]:
        # A condition for each partial index.
        named = {"subject": {"$in": list(subjects)}}
        live, destroyed = {**named, "wrapped": {"$type": "string"}}, {**named, "destroyed_at": {"$type": "date"}}
        wanted = {"$or": [live, destroyed, {"_id": {"$in": list(key_ids)}}]}
        rows = await self.database.run(self.database["subject_key"].find(wanted).to_list())
        return to_subject_keys([_subject_key(row) for row in rows])

    async def insert_subject_keys(self, keys: Sequence[NewSubjectKey]) -> None:
        now = await self.database.time()
        made = [
            {"_id": key.id, "subject": key.subject, "wrapped": key.wrapped, "created_at": now, "destroyed_at": None}
            for key in keys
        ]
        try:
            await self.database.run(self.database["subject_key"].insert_many(made, ordered=False))
        except Exception as error:
            cause = error.__cause__
            details = cause.details["writeErrors"] if isinstance(cause, BulkWriteError) and cause.details else []
            if not details or any(each["code"] != TAKEN for each in details):
                raise

    async def destroy_subject_key(self, subject: str) -> list[str]:
        keys, live = self.database["subject_key"], {"subject": subject, "wrapped": {"$type": "string"}}
        now = await self.database.time()
        change = {"$set": {"wrapped": None, "destroyed_at": now, "subject": erased_name(subject)}}
        found = await self.database.run(keys.find_one_and_update(live, change, {"_id": 1}))
        return [found["_id"]] if found else []

    async def subject_key_page(self, after: str, limit: int) -> list[WrappedSubjectKey]:
        wanted = {"_id": {"$gt": after}, "wrapped": {"$type": "string"}}
        found = self.database["subject_key"].find(wanted).sort("_id").limit(limit)
        return to_subject_keys([_subject_key(row) for row in await self.database.run(found.to_list())])

    async def rewrap_subject_keys(self, changes: Sequence[tuple[str, str, str]]) -> int:
        writes = [
            UpdateOne({"_id": key_id, "wrapped": before}, {"$set": {"wrapped": after}})
            for key_id, before, after in changes
        ]
        done = await self.database.run(self.database["subject_key"].bulk_write(writes, ordered=False))
        return int(done.matched_count)

    async def count_subject_keys(self) -> SubjectKeyCounts:
        keys = self.database["subject_key"]
        live = await self.database.run(keys.count_documents({"wrapped": {"$type": "string"}}))
        destroyed = await self.database.run(keys.count_documents({"destroyed_at": {"$type": "date"}}))
        return SubjectKeyCounts(live, destroyed)

    async def copies(self, kind: CopyKind, after: tuple[Any, ...] | None, limit: int) -> CopyPage:
        about = COPIES[kind]
        wanted = {**about.counts, **({} if after is None else {"_id": {"$gt": after[0]}})}
        fields = dict.fromkeys((*ALWAYS, about.field, about.event_type), 1)
        found = self.database[about.collection].find(wanted, fields).sort("_id").limit(limit)
        rows = await self.database.run(found.to_list())
        if kind is CopyKind.SAGA_JOURNAL:
            rows = await self._with_subjects(rows)
        return to_copies(kind, [_columns(row, about) for row in rows], limit, ("_id",))

    async def _with_subjects(self, entries: Sequence[Document]) -> list[Document]:
        """Return entries of journals with the subjects of their sagas."""
        wanted = {"_id": {"$in": list({entry["saga_id"] for entry in entries})}}
        found = self.database["saga_instance"].find(wanted, {"subject": 1})
        subjects = {saga["_id"]: saga.get("subject") for saga in await self.database.run(found.to_list())}
        return [{**entry, "subject": subjects.get(entry["saga_id"])} for entry in entries]

    async def rewrite(self, kind: CopyKind, rewrites: Sequence[Rewrite]) -> int:
        about = COPIES[kind]
        changes = [
            UpdateOne(
                {"_id": each.copy.key[0], about.field: _stored(kind, each.copy.text)},
                {"$set": {about.field: _stored(kind, each.text)}},
            )
            for each in rewrites
        ]
        done = await self.database.run(self.database[about.collection].bulk_write(changes, ordered=False))
        return int(done.matched_count)

    async def close(self) -> None:
        await self.database.close()


async def _insert_key(session: Session, database: MongoDatabase, key_id: str, wrapped: str, actor: str) -> None:
    now, keys = await database.time(session), database["encryption_key"]
    made: Document = {"_id": key_id, "wrapped": wrapped, "created_at": now, "created_by": actor}
    if await keys.find_one({}, {"_id": 1}, session=session) is None:
        made |= {"rank": 1, "activated_at": now, "activated_by": actor}
    await keys.insert_one(made, session=session)
    await record(session, database, actor, KEY_VERBS["insert_key"], key=key_id)


async def _activate_key(session: Session, database: MongoDatabase, key_id: str, actor: str) -> bool:
    rows = await database["encryption_key"].find({}, {"rank": 1}, session=session).to_list()
    ranks = [row["rank"] for row in rows if row.get("rank") is not None]
    facts = {"activated_at": await database.time(session), "activated_by": actor}
    change = {"$set": {"rank": max(ranks, default=0) + 1, **facts}}
    changed = await database["encryption_key"].update_one({"_id": key_id}, change, session=session)
    if changed.matched_count:
        await record(session, database, actor, KEY_VERBS["activate_key"], key=key_id)
    return bool(changed.matched_count)


async def _rewrap_key(
    session: Session, database: MongoDatabase, key_id: str, before: str, after: str, *, actor: str
) -> bool:
    keys, wanted = database["encryption_key"], {"_id": key_id, "wrapped": before}
    changed = await keys.update_one(wanted, {"$set": {"wrapped": after}}, session=session)
    if changed.matched_count:
        await record(session, database, actor, KEY_VERBS["rewrap_key"], key=key_id)
    return bool(changed.matched_count)


def _columns(row: Mapping[str, Any], about: CollectionCopies) -> Document:
    identity, text = row["_id"], row[about.field]
    parts = identity if isinstance(identity, Mapping) else {"event_id": identity}
    event_type = row.get(about.event_type) or ""
    if about.collection == "saga_barrier":
        event_type = json.loads(text).get("reply", {}).get("event_type")
    if about.collection == "saga_instance":
        parts = {"saga_id": identity}
    return {**row, **parts, "_id": identity, "event_type": event_type, "text": text}


def _subject_key(row: Mapping[str, Any]) -> tuple[Any, ...]:
    return tuple(row.get(name) for name in ("_id", "subject", "wrapped", "created_at", "destroyed_at"))


def _stored(kind: CopyKind, text: str | None) -> Any:
    stored = stored_text(kind, text)
    return Binary(stored) if isinstance(stored, bytes) else stored
