"""Erasure of subjects in MongoDB.

Headers are JSON text there, so a pattern finds the subject in the text, and the headers are read to be sure.
"""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Mapping, Sequence
from typing import Any, NamedTuple

from bson.binary import Binary
from pymongo import errors

from outrider.audit_chain import digest_of
from outrider.clock import Clock
from outrider.event import ERASED_FAILURE, ERASED_TEXT, SKIPPED_TYPE
from outrider.privacy.erasure_store import (
    Blocker,
    Blocking,
    ErasurePlace,
    ErasureRun,
    Replacement,
    Runs,
    SubjectPage,
    SubjectRow,
    add_counts,
)
from outrider.stores.erasure_rows import by_run, counted, hashes_of, needles, open_counts, to_blocking, to_rows, to_run
from outrider.stores.mongo.database import Document, MongoDatabase, Session, collection
from outrider.stores.mongo.documents import DEAF, to_audit_line
from outrider.stores.mongo.handler_transactions import open_installed
from outrider.stores.mongo.operation_log import record

VERSION = 7

ROWS = 5_000
"""The documents that a query reads."""

REMOVED_MAX = 200
"""The removed sagas of a page."""

SEALED = {"$regexMatch": {"input": "$payload", "regex": '"s-[0-9a-f]{16}"'}}
"""A payload with the id of a subject's key."""


class ErasedCollection(NamedTuple):
    """The collection of a place, its erased fields, and the condition of the documents that are erased in place."""

    name: str
    contents: Document
    only: Document


PLACES: Mapping[ErasurePlace, ErasedCollection] = {
    ErasurePlace.DEAD_LETTER: ErasedCollection(
        "outbox_dead_letter", {"payload": ERASED_TEXT, "failure": ERASED_FAILURE}, {"policy": {"$ne": "block"}}
    ),
    ErasurePlace.CONSUMER_DEAD_LETTER: ErasedCollection(
        "inbox_dead_letter",
        {"body": Binary(ERASED_TEXT.encode()), "failure": ERASED_FAILURE},
        {"policy": {"$ne": "block"}},
    ),
    ErasurePlace.ARCHIVED_EVENT: ErasedCollection("outbox_archive", {"payload": ERASED_TEXT, "failure": None}, {}),
    ErasurePlace.SAGA: ErasedCollection("saga_instance", {}, {"status": {"$in": DEAF}}),
}

BLOCKING: Mapping[Blocker, tuple[str, Document]] = {
    Blocker.EVENT: ("outbox", {}),
    Blocker.DEAD_LETTER: ("outbox_dead_letter", {"policy": "block"}),
    Blocker.HELD_EVENT: ("inbox_held", {}),
    Blocker.CONSUMER_DEAD_LETTER: ("inbox_dead_letter", {"policy": "block"}),
}
"""The collections of events that stand in the way."""


class MongoErasure:
    """All documents of subjects in MongoDB. Open it with `await MongoErasure.open(url)`."""

    def __init__(self, database: MongoDatabase) -> None:
        self.database = database

    @classmethod
    async def open(cls, url: str, *, schema: str = "outrider", clock: Clock | None = None) -> MongoErasure:
        """Connect to an installed store."""
        return cls(await open_installed(url, schema, what="log of erasures", version=VERSION, clock=clock))

    async def runs(self, hashes: Collection[str]) -> list[ErasureRun]:
        found = self.database["gdpr_erasure_log"].find({"subject_hash": {"$in": list(hashes)}})
        rows = await self.database.run(found.sort([("started_at", 1), ("_id", 1)]).to_list())
        names = ("_id", "subject_hash", "actor", "started_at", "finished_at", "counts", "receipt")
        return [to_run([row.get(name) for name in names]) for row in rows]

    async def open_run(self, hash: str, actor: str) -> ErasureRun:
        made: Document = {"subject_hash": hash, "actor": actor, "started_at": await self.database.time()}
        try:
            log = self.database["gdpr_erasure_log"]
            await self.database.run(log.insert_one({**made, "counts": "{}", "open": True}))
        except Exception as error:
            if not isinstance(error.__cause__, errors.DuplicateKeyError):
                raise
        runs = await self.runs([hash])
        return runs[-1]

    async def finish_run(self, run_id: Any, receipt: Mapping[str, Any]) -> bool:
        facts = {"finished_at": await self.database.time(), "receipt": json.dumps(receipt)}
        change = {"$set": facts, "$unset": {"open": ""}}
        log = self.database["gdpr_erasure_log"]
        return bool((await self.database.run(log.update_one({"_id": run_id, "open": True}, change))).matched_count)

    async def blocking(self, subjects: Collection[str], limit: int) -> list[Blocking]:
        found = list[Blocking]()
        for kind, (name, only) in BLOCKING.items():
            wanted = {**only, "headers": _pattern(needles(subjects, kind))}
            # Some documents only mention a subject, so the limit is for those that are left.
            query = self.database[name].find(wanted, BLOCKING_FIELDS).sort("_id")
            rows = [_blocking_facts(kind, row) for row in await self.database.run(query.to_list())]
            found += to_blocking(rows, subjects, kind)[:limit]
        return found + await self._unended(subjects, limit)

    async def _unended(self, subjects: Collection[str], limit: int) -> list[Blocking]:
        """Return sagas that have not ended, and ended children whose parent may still compensate them."""
        parent = {"from": "saga_instance", "localField": "parent_id", "foreignField": "_id", "as": "parent"}
        running = {"$elemMatch": {"status": {"$nin": DEAF}}}
        pipeline: list[Document] = [
            {"$match": {"subject": {"$in": list(subjects)}}},
            {"$lookup": parent},
            {"$match": {"$or": [{"status": {"$nin": DEAF}}, {"parent": running}]}},
            {"$sort": {"_id": 1}},
            {"$limit": limit},
        ]
        rows = await (await self.database.run(self.database["saga_instance"].aggregate(pipeline))).to_list()
        return [Blocking(Blocker.SAGA, row["_id"], row["saga_type"], row["status"]) for row in rows]

    async def skip_held(self, row: Blocking, headers: str, actor: str) -> bool:
        return await self.database.transaction(self._skip_held, row, headers, actor)

    async def _skip_held(self, session: Session, row: Blocking, headers: str, actor: str) -> bool:
        identity = {"consumer": row.consumer, "event_id": row.id}
        marker = {"event_type": SKIPPED_TYPE, "headers": headers, "body": Binary(b"null")}
        wanted = {"_id": identity, "headers": row.headers}
        changed = await self._of(session, "inbox_held").update_one(wanted, {"$set": marker}, session=session)
        if changed.matched_count:
            await record(session, self.database, actor, "inbox_skip", [(row.id, row.consumer)])
        return bool(changed.matched_count)

    async def count(self, run_id: Any, place: str, count: int) -> None:
        async def work(session: Session) -> None:
            await self._save(session, run_id, add_counts(await self._counts(session, run_id), {place: count}))

        await self.database.transaction(work)

    async def page(self, place: ErasurePlace, subjects: Collection[str], after: Any) -> SubjectPage:
        if place is ErasurePlace.REMOVED_SAGA:
            return await self._removed(subjects, after)
        about = PLACES[place]
        last, examined = after or (None, 0)
        place_of = {} if last is None else {"_id": {"$gt": last}}
        ids = self.database[about.name].find(place_of, {"_id": 1}).sort("_id").skip(ROWS - 1).limit(1)
        ends = await self.database.run(ids.to_list())
        bounds = {**({} if last is None else {"$gt": last}), **({"$lte": ends[0]["_id"]} if ends else {})}
        wanted: Document = {**about.only, **({"_id": bounds} if bounds else {})}
        if place is ErasurePlace.SAGA:
            wanted["subject"] = {"$in": list(subjects)}
            rows = await self._find(about.name, wanted, {"saga_type": 1, "subject": 1})
            found = [SubjectRow((row["_id"],), row["subject"], row["saga_type"]) for row in rows]
        else:
            wanted["headers"] = _pattern(needles(subjects, place))
            sealed = {"sealed": SEALED} if place is ErasurePlace.ARCHIVED_EVENT else {}
            rows = await self._find(about.name, wanted, {"event_type": 1, "headers": 1, **sealed})
            found = to_rows([{"sealed": False, **row} for row in rows], ("_id",), subjects, place)
        if not ends:
            return SubjectPage(found, None, 1.0)
        total = await self.database.run(self.database[about.name].estimated_document_count())
        return SubjectPage(found, (ends[0]["_id"], examined + ROWS), min((examined + ROWS) / max(total, 1), 1.0))

    async def _find(self, name: str, wanted: Document, fields: Document) -> list[Document]:
        return await self.database.run(self.database[name].find(wanted, fields).to_list())

    async def _removed(self, subjects: Collection[str], after: Any) -> SubjectPage:
        """Return removed sagas of which some line has details; saga_audit_head_subject, saga_audit_saga."""
        names = hashes_of(subjects)
        wanted: Document = {"subject_hash": {"$in": list(names)}, **({"saga_id": {"$gt": after}} if after else {})}
        detailed = {"$match": {"digest": None, "salt": {"$ne": None}}}
        lines = {"from": "saga_audit_log", "localField": "saga_id", "foreignField": "saga_id", "as": "lines"}
        pipeline: list[Document] = [
            {"$match": wanted},
            {"$lookup": {**lines, "pipeline": [detailed, {"$limit": 1}, {"$project": {"_id": 1}}]}},
            {"$match": {"lines": {"$ne": []}}},
            {"$group": {"_id": "$saga_id", "hash": {"$first": "$subject_hash"}}},
            {"$sort": {"_id": 1}},
            {"$limit": REMOVED_MAX},
        ]
        rows = await (await self.database.run(self.database["saga_audit_head"].aggregate(pipeline))).to_list()
        found = [SubjectRow((row["_id"],), names[row["hash"]], "removed saga") for row in rows]
        return SubjectPage(found, found[-1].key[0] if len(found) == REMOVED_MAX else None, 1.0)

    async def erase_events(self, place: ErasurePlace, rows: Sequence[Replacement], runs: Runs) -> int:
        groups = by_run(rows, runs).items()
        return sum(
            [await self.database.transaction(self._erase_events, place, group, run_id) for run_id, group in groups]
        )

    async def _erase_events(
        self, session: Session, place: ErasurePlace, rows: Sequence[Replacement], run_id: Any
    ) -> int:
        about, erased, counts = PLACES[place], list[Replacement](), await self._counts(session, run_id)
        for each in rows:
            wanted = {"_id": each.row.key[0], "headers": each.row.headers}
            change = {"$set": {**about.contents, "headers": each.headers}}
            done = await self._of(session, about.name).update_one(wanted, change, session=session)
            if done.matched_count:
                erased.append(each)
        await self._erase_replies(session, [each.saga_key for each in erased if each.saga_key])
        await self._save(session, run_id, counted(counts, place, erased))
        return len(erased)

    async def erase_saga(self, place: ErasurePlace, row: SubjectRow, run_id: Any) -> bool:
        return await self.database.transaction(self._erase_saga, place, row, run_id)

    async def _erase_saga(self, session: Session, place: ErasurePlace, row: SubjectRow, run_id: Any) -> bool:
        [saga_id], counts = row.key, await self._counts(session, run_id)
        if place is ErasurePlace.SAGA:
            wanted = {"_id": saga_id, "subject": row.subject, "status": {"$in": DEAF}}
            change = {"$set": {"state": ERASED_TEXT, "last_error": None, "subject": None}}
            sagas = self._of(session, "saga_instance")
            if not (await sagas.update_one(wanted, change, session=session)).matched_count:
                return False
            mine = {"saga_id": saga_id}
            steps = await self._of(session, "saga_step").distinct("step", mine, session=session)
            await self._erase_replies(session, [f"{saga_id}:{step}" for step in steps])
            gone = {"$set": {"error": None, "data": None}}
            await self._of(session, "saga_step").update_many(mine, gone, session=session)
            body = {"$set": {"body": ERASED_TEXT}}
            await self._of(session, "saga_mailbox").update_many(mine, body, session=session)
        await self._erase_details(session, saga_id)
        await self._save(session, run_id, add_counts(counts, {place: 1}))
        return True

    async def _erase_details(self, session: Session, saga_id: Any) -> None:
        """Replace the details of the lines of a saga by their digests; saga_audit_saga."""
        log = self._of(session, "saga_audit_log")
        detailed = {"saga_id": saga_id, "digest": None, "salt": {"$ne": None}}
        for row in await log.find(detailed, session=session).to_list():
            removed: Document = {"detail": "", "state": None, "state_hash": None, "salt": None}
            gone = {**removed, "digest": digest_of(to_audit_line(row))}
            await log.update_one({"_id": row["_id"], "digest": None}, {"$set": gone}, session=session)

    async def _erase_replies(self, session: Session, keys: Sequence[str]) -> None:
        """Erase the replies of participants to commands. Reads the collection, which has no index by key."""
        if not keys:
            return
        replies, wanted = self._of(session, "saga_barrier"), {"_id.key": {"$in": list(keys)}, "reply": {"$ne": None}}
        for row in await replies.find(wanted, session=session).to_list():
            known = json.loads(row["reply"])
            text = json.dumps({"rejection": known.get("rejection", False), **json.loads(ERASED_TEXT)})
            await replies.update_one({"_id": row["_id"]}, {"$set": {"reply": text}}, session=session)

    async def close(self) -> None:
        await self.database.close()

    def _of(self, session: Session, name: str) -> Any:
        return collection(session.client, self.database.schema, name)

    async def _counts(self, session: Session, run_id: Any) -> str:
        row = await self._of(session, "gdpr_erasure_log").find_one({"_id": run_id, "open": True}, session=session)
        return open_counts(row["counts"] if row else None)

    async def _save(self, session: Session, run_id: Any, counts: str) -> None:
        log = self._of(session, "gdpr_erasure_log")
        await log.update_one({"_id": run_id, "open": True}, {"$set": {"counts": counts}}, session=session)


def _pattern(texts: Sequence[str]) -> Document:
    return {"$regex": "|".join(re.escape(text) for text in texts)}


BLOCKING_FIELDS = dict.fromkeys(("id", "event_type", "headers", "topic", "stream_key", "stream"), 1)
"""What is read of a document that stands in the way; the payload is not."""


def _blocking_facts(kind: Blocker, row: Document) -> Document:
    """Return a document as the columns of a row that stands in the way."""
    if kind in (Blocker.HELD_EVENT, Blocker.CONSUMER_DEAD_LETTER):
        consumer = row["_id"]["consumer"]
        identity = row["_id"]["event_id"] if kind is Blocker.HELD_EVENT else row["id"]
        place = {"place": f"{consumer} {row['stream']['topic']}", "consumer": consumer}
    else:
        identity, place = row["_id"], {"place": f"{row.get('topic') or '-'} {row.get('stream_key') or '-'}"}
    return {"id": identity, "name": row["event_type"], "headers": row.get("headers") or "{}", **place}
