"""The contract of the store of payloads: registered schemas, and the stored documents that new code must open."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping, Sequence
from datetime import datetime
from enum import StrEnum
from typing import Any, NamedTuple, Protocol

from outrider.background import shared
from outrider.errors import SchemaUnavailable, Transient
from outrider.payload.model import PayloadSchema, Version, version_order
from outrider.payload.schemas import make_schema

REFRESH_SECONDS = 60.0
"""The age after which a registered schema is read again."""

ANSWER_SECONDS = 10.0
"""The longest wait for the database."""


class RegisteredSchema(NamedTuple):
    """A schema in the store, with the time and the name of its registration."""

    event_type: str
    version: Version
    document: Any
    registered_at: datetime
    registered_by: str


class StoredKind(StrEnum):
    """The kinds of stored documents with a payload or a state."""

    EVENT = "event"
    DEAD_LETTER = "dead letter"
    HELD_EVENT = "held event"
    CONSUMER_DEAD_LETTER = "consumer dead letter"
    SAGA_MESSAGE = "saga message"
    PARTICIPANT_REPLY = "participant reply"
    SAGA_STATE = "saga state"


class StoredDocument(NamedTuple):
    """A stored document: its kind, the id for people, the JSON text, and the facts that opening needs."""

    kind: StoredKind
    id: str
    body: bytes
    facts: Mapping[str, Any]


class StoredPage(NamedTuple):
    """A page of documents in the order of a key, and the key after which the next page begins (None: no more)."""

    documents: Sequence[StoredDocument]
    after: tuple[Any, ...] | None


class PayloadStore(Protocol):
    """The tables of payloads, and a reader of all stored documents."""

    async def register(self, schema: PayloadSchema, actor: str) -> bool:
        """Insert a schema; return False, and change nothing, if the version has one already."""
        ...

    async def replace(self, schema: PayloadSchema, actor: str) -> None:
        """Insert a schema in the place of another one."""
        ...

    async def schemas(self, event_type: str | None = None) -> list[RegisteredSchema]:
        """Return the registered schemas, by type and version."""
        ...

    async def page(self, kind: StoredKind, after: tuple[Any, ...] | None, limit: int) -> StoredPage:
        """Return the next documents of a kind, at most `limit`. Events that are delivered and sagas that have ended
        are no part of it.
        """
        ...

    async def close(self) -> None:
        """Close connections and threads."""
        ...


class StoredSchemas:
    """The schemas of a store as a source, for `Payloads(schemas=...)`. Make one with `outrider.app.stored_schemas`.

    The schemas are read together, and again after a minute. While the database does not answer, the last ones count.
    """

    refresh_seconds: float | None = REFRESH_SECONDS

    def __init__(self, opening: Callable[[], Awaitable[PayloadStore]], where: str) -> None:
        self._opening, self._where = opening, where

    def find(self, event_type: str, version: Version) -> PayloadSchema | None:
        return next((each for each in self._read(event_type) if each.version == version), None)

    def versions(self, event_type: str) -> Sequence[Version]:
        return sorted((each.version for each in self._read(event_type)), key=version_order)

    def event_types(self) -> Sequence[str]:
        return sorted({each.event_type for each in self._read(None)})

    def _read(self, event_type: str | None) -> list[PayloadSchema]:
        """Read on the loop in the background: the caller is a plain function, on any thread."""

        async def read() -> list[RegisteredSchema]:
            store = await self._opening()
            try:
                return await store.schemas(event_type)
            finally:
                await store.close()

        try:
            found = shared().run(read()).result(ANSWER_SECONDS)
        except (Transient, TimeoutError) as error:
            text = f"the schemas in {self._where} cannot be read ({str(error) or 'no answer'}); check the database"
            raise SchemaUnavailable(text) from error
        return [make_schema(each.event_type, each.version, each.document) for each in found]
