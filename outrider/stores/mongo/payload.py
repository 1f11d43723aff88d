"""Registered schemas and stored documents in MongoDB."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from pymongo.errors import DuplicateKeyError

from outrider.clock import Clock
from outrider.payload.model import PayloadSchema
from outrider.payload.store import RegisteredSchema, StoredKind, StoredPage
from outrider.stores.mongo.database import Document, MongoDatabase, Session
from outrider.stores.mongo.handler_transactions import open_installed
from outrider.stores.mongo.operation_log import record
from outrider.stores.payload_rows import SCHEMA_VERBS, object_of, to_page, to_schemas

VERSION = 4


class CollectionPages(NamedTuple):
    """The collection of a kind of documents, which of them count, and the columns of one."""

    collection: str
    counts: Document
    columns: Callable[[Mapping[str, Any]], Document]


def _staged(row: Mapping[str, Any]) -> Document:
    key = row.get("stream_key") or row.get("key") or row.get("aggregate_id")
    facts = {"event_id": row["_id"], "body": row["payload"], "event_type": row["event_type"], "topic": row.get("topic")}
    version = str(row.get("schema_version") or 1)
    return {**facts, "schema_version": version, "key": key, "state": row.get("state"), "reason": row.get("reason")}


def _received(row: Mapping[str, Any]) -> Document:
    names = ("raw_key", "body", "headers", "partition", "position")
    return {**row["_id"], "topic": row["stream"]["topic"], **{n: row[n] for n in names}, "reason": row.get("reason")}


def _message(row: Mapping[str, Any]) -> Document:
    names = ("saga_type", "definition_version", "message_id", "body")
    facts = {"event_type": row["name"], "schema_version": row.get("schema_version", "1")}
    return {**row["_id"], **facts, **{name: row[name] for name in names}}


def _reply(row: Mapping[str, Any]) -> Document:
    return {**row["_id"], "body": row["reply"]}


def _state(row: Mapping[str, Any]) -> Document:
    names = ("saga_type", "definition_version", "correlation_id", "status")
    return {"saga_id": row["_id"], "body": row["state"], **{name: row[name] for name in names}}


PAGES: Mapping[StoredKind, CollectionPages] = {
    StoredKind.EVENT: CollectionPages("outbox", {}, _staged),
    StoredKind.DEAD_LETTER: CollectionPages("outbox_dead_letter", {}, _staged),
    StoredKind.HELD_EVENT: CollectionPages("inbox_held", {}, _received),
    StoredKind.CONSUMER_DEAD_LETTER: CollectionPages("inbox_dead_letter", {}, _received),
    StoredKind.SAGA_MESSAGE: CollectionPages("saga_mailbox", {"unseen": True, "kind": "reply"}, _message),
    StoredKind.PARTICIPANT_REPLY: CollectionPages("saga_barrier", {"reply": {"$type": "string"}}, _reply),
    StoredKind.SAGA_STATE: CollectionPages(
        "saga_instance", {"$or": [{"ended_at": None}, {"needs_attention": True}]}, _state
    ),
}
"""The pages by kind; all are in the order of `_id`."""


class MongoPayloads:
    """The collections of payloads in MongoDB. Open them with `await MongoPayloads.open(url)`."""

    def __init__(self, database: MongoDatabase) -> None:
        self.database = database

    @classmethod
    async def open(cls, url: str, *, schema: str = "outrider", clock: Clock | None = None) -> MongoPayloads:
        """Connect to an installed store."""
        return cls(await open_installed(url, schema, what="table of schemas", version=VERSION, clock=clock))

    async def register(self, schema: PayloadSchema, actor: str) -> bool:
        try:
            await self.database.transaction(_write, self.database, "register", schema, actor)
        except Exception as error:
            if isinstance(error.__cause__, DuplicateKeyError):
                return False
            raise
        return True

    async def replace(self, schema: PayloadSchema, actor: str) -> None:
        await self.database.transaction(_write, self.database, "replace_schema", schema, actor)

    async def schemas(self, event_type: str | None = None) -> list[RegisteredSchema]:
        wanted = {} if event_type is None else {"_id.event_type": event_type}
        rows = await self.database.run(self.database["payload_schema"].find(wanted).to_list())
        names = ("document", "registered_at", "registered_by")
        return to_schemas([(*row["_id"].values(), *(row[name] for name in names)) for row in rows])

    async def page(self, kind: StoredKind, after: tuple[Any, ...] | None, limit: int) -> StoredPage:
        pages = PAGES[kind]
        wanted = {**pages.counts, **({} if after is None else {"_id": {"$gt": after[0]}})}
        found = self.database[pages.collection].find(wanted).sort("_id").limit(limit)
        rows = await self.database.run(found.to_list())
        return to_page(kind, [{**pages.columns(row), "_id": row["_id"]} for row in rows], limit, ("_id",))

    async def close(self) -> None:
        await self.database.close()


async def _write(session: Session, database: MongoDatabase, name: str, schema: PayloadSchema, actor: str) -> None:
    now = await database.time(session)
    made = {"document": json.dumps(schema.document), "registered_at": now, "registered_by": actor}
    if name == "register":
        await database["payload_schema"].insert_one({"_id": _identity(schema), **made}, session=session)
    else:
        mine = {"_id": _identity(schema)}
        await database["payload_schema"].update_one(mine, {"$set": made}, upsert=True, session=session)
    await record(session, database, actor, SCHEMA_VERBS[name], **object_of(schema))


def _identity(schema: PayloadSchema) -> Document:
    return {"event_type": schema.event_type, "version": str(schema.version)}
