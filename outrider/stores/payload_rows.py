"""Pages of stored documents: their keys, and the conversion of rows, the same in every store."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple
from uuid import UUID

from outrider.event import Delivery
from outrider.operation_log import content_digest
from outrider.payload.model import PayloadSchema, required_version, version_order
from outrider.payload.store import RegisteredSchema, StoredDocument, StoredKind, StoredPage
from outrider.stores.rows import delivery_of

_DELIVERY = ("topic", "raw_key", "body", "headers", "partition", "position")

_IDS = ("event_id", "saga_id")


SCHEMA_VERBS = {"register": "schema_register", "replace_schema": "schema_replace"}
"""The verbs of the operation log, by query."""


class PageShape(NamedTuple):
    """The query of a kind of documents, the columns of its key, the key before the first page, and the shown id."""

    query: str
    key: tuple[str, ...]
    start: tuple[Any, ...]
    shown: tuple[str, ...]


FIRST_ID = UUID(int=0)

SHAPES: Mapping[StoredKind, PageShape] = {
    StoredKind.EVENT: PageShape("event_page", ("event_id",), (FIRST_ID,), ("event_id",)),
    StoredKind.DEAD_LETTER: PageShape("dead_letter_page", ("event_id",), (FIRST_ID,), ("event_id",)),
    StoredKind.HELD_EVENT: PageShape("held_event_page", ("event_id", "consumer"), (FIRST_ID, ""), ("event_id",)),
    StoredKind.CONSUMER_DEAD_LETTER: PageShape(
        "consumer_dead_letter_page", ("event_id", "consumer"), (FIRST_ID, ""), ("event_id",)
    ),
    StoredKind.SAGA_MESSAGE: PageShape(
        "saga_message_page", ("saga_type", "definition_version", "message_id"), ("", -1, -1), ("saga_id", "event_id")
    ),
    StoredKind.PARTICIPANT_REPLY: PageShape(
        "participant_reply_page", ("key", "participant", "phase"), ("", "", ""), ("participant", "key", "phase")
    ),
    StoredKind.SAGA_STATE: PageShape("saga_state_page", ("saga_id",), (FIRST_ID,), ("saga_id",)),
}
"""The pages of the SQL stores by kind."""


def to_page(kind: StoredKind, rows: Sequence[Mapping[str, Any]], limit: int, key: Sequence[str]) -> StoredPage:
    """Return the page of some rows; a page that is not full is the last one."""
    after = tuple(rows[-1][name] for name in key) if len(rows) == limit else None
    return StoredPage([_document(kind, row) for row in rows], after)


def _document(kind: StoredKind, row: Mapping[str, Any]) -> StoredDocument:
    facts = {name: value for name, value in row.items() if name != "body"}
    facts |= {name: value if isinstance(value, UUID) else UUID(value) for name, value in facts.items() if name in _IDS}
    if "raw_key" in row:
        facts = {name: value for name, value in facts.items() if name not in _DELIVERY}
        delivery: Delivery = delivery_of([row[name] for name in _DELIVERY])
        facts["delivery"] = delivery
    body = row["body"] if isinstance(row["body"], bytes) else str(row["body"]).encode()
    shown = " ".join(str(row[name]) for name in SHAPES[kind].shown)
    return StoredDocument(kind, shown, body, facts)


def to_schemas(rows: Sequence[Sequence[Any]]) -> list[RegisteredSchema]:
    """Return registered schemas by type and version, from their columns."""
    found = [
        RegisteredSchema(event_type, required_version(version, event_type), json.loads(document), at, by)
        for event_type, version, document, at, by in rows
    ]
    return sorted(found, key=lambda each: (each.event_type, version_order(each.version)))


def object_of(schema: PayloadSchema) -> dict[str, Any]:
    """Return a schema as the object of a command, for the operation log."""
    digest = content_digest(json.dumps(schema.document, sort_keys=True))
    return {"event_type": schema.event_type, "version": str(schema.version), "document": digest}
