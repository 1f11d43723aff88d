"""The check of stored documents against new code: each is opened as its handler, saga or relay would open it.

Documents are read in pages, and nothing is written, so the check can run beside the old code, before a deployment.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import AsyncIterator, Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple
from uuid import UUID

from outrider.errors import InvalidPayload, OutriderError, SchemaUnavailable, SubjectErased
from outrider.event import DeadLetterReason, Event, is_erased
from outrider.payload.model import PayloadFacts, parse_version, reply_facts
from outrider.payload.payloads import Payloads
from outrider.payload.store import PayloadStore, StoredDocument, StoredKind
from outrider.redaction import ErrorText, Redactor
from outrider.saga.definition.saga import SagaRegistry
from outrider.saga.state.codec import decode as decode_state
from outrider.saga.state.encryption import open_state
from outrider.tracebacks import text_of
from outrider.wire import decode

PAGE = 500
"""The documents that are read at a time."""

KNOWN_BAD = (DeadLetterReason.SCHEMA_VALIDATION_FAILED, DeadLetterReason.POISON_MESSAGE)
"""The reasons of dead letters that were invalid before. New code need not make them valid, only readable by type."""


class Unopened(NamedTuple):
    """A stored document that new code would not open, and the reason."""

    kind: StoredKind
    id: str
    name: str
    """The event type, or the type of the saga."""
    problem: str


@dataclass(slots=True)
class StoredCheck:
    """Opens stored documents with new code, and counts them by kind."""

    payloads: Payloads
    sagas: SagaRegistry | None = None
    counts: Counter[StoredKind] = field(default_factory=Counter)
    unchecked_sagas: int = 0
    """Sagas that were not opened, because no definitions were given."""
    erased: int = 0
    """Documents whose subjects were erased, which no code opens again."""

    async def run(self, store: PayloadStore, progress: Callable[[int], None]) -> AsyncIterator[Unopened]:
        """Open every document; yield those that would not open. `progress` is told the number of documents so far."""
        for kind in StoredKind:
            after: tuple[Any, ...] | None = None
            while True:
                page = await store.page(kind, after, PAGE)
                for document in page.documents:
                    self.counts[kind] += 1
                    if (found := await self.problem(document)) is not None:
                        yield found
                progress(self.counts.total())
                if (after := page.after) is None:
                    break

    async def problem(self, document: StoredDocument) -> Unopened | None:
        """Return the reason why a document would not open, None if it would."""
        if document.kind is StoredKind.SAGA_STATE:
            return self._state_problem(document)
        name = str(document.facts.get("event_type", ""))
        try:
            event = self._event_of(document)
            name = event.event_type
            await self._open(document, event)
        except SchemaUnavailable:
            raise
        except SubjectErased:
            self.erased += 1
        except InvalidPayload as error:
            return Unopened(document.kind, document.id, name, str(error))
        return None

    def _event_of(self, document: StoredDocument) -> Event:
        """Return the event in a document. Raises InvalidPayload for a document that cannot be read at all."""
        facts = document.facts
        if "delivery" in facts:
            received = decode(facts["delivery"])
            if received.event is None:
                raise InvalidPayload("message", received.problem, DeadLetterReason.POISON_MESSAGE)
            return received.event
        try:
            body = json.loads(document.body)
        except (ValueError, RecursionError) as error:
            problem = f"it is not JSON ({type(error).__name__})"
            raise InvalidPayload("payload", problem, DeadLetterReason.POISON_MESSAGE) from error
        if is_erased(body):
            raise SubjectErased("payload", "it was erased", DeadLetterReason.ENCRYPTION_FAILED)
        if document.kind is StoredKind.PARTICIPANT_REPLY:
            reply = self._opened_reply(facts, body)["reply"]
            return Event(reply["event_type"], reply["payload"], schema_version=reply["schema_version"])
        event_id: UUID = facts["event_id"]
        return Event(
            facts["event_type"],
            body,
            event_id=event_id,
            topic=facts.get("topic"),
            key=facts.get("key"),
            schema_version=facts["schema_version"],
        )

    def _opened_reply(self, facts: Mapping[str, Any], body: Any) -> Any:
        if self.payloads.encryption is None:
            return body
        about = reply_facts(facts["participant"], facts["key"], facts["phase"], body["reply"])
        return self.payloads.encryption.decrypt(about, body)

    async def _open(self, document: StoredDocument, event: Event) -> None:
        before = event.schema_version
        opened = self.payloads.open(event)
        reason = document.facts.get("reason")
        if reason in KNOWN_BAD or (reason is not None and opened.schema_version == before):
            return
        facts = PayloadFacts(event.event_id, event.event_type, before, event.topic or "", event.key)
        if document.kind is StoredKind.EVENT:
            # A relay publishes the event as it is stored.
            await self._validate(facts, document.body)
        if opened.schema_version != parse_version(before):
            current = facts._replace(schema_version=opened.schema_version)
            await self._validate(current, json.dumps(opened.payload, default=str).encode())

    async def _validate(self, facts: PayloadFacts, body: bytes) -> None:
        await self.payloads.load([(facts.event_type, facts.schema_version)])
        self.payloads.check_payload(facts, body)

    def _state_problem(self, document: StoredDocument) -> Unopened | None:
        saga_type, version = document.facts["saga_type"], document.facts["definition_version"]
        if self.sagas is None:
            self.unchecked_sagas += 1
            return None
        saga = self.sagas.find(saga_type, version)
        if saga is None:
            problem = f"there is no definition of {saga_type} version {version}; keep it until its sagas have ended"
            return Unopened(document.kind, document.id, saga_type, problem)
        try:
            saga_id: UUID = document.facts["saga_id"]
            decode_state(saga.state_type, open_state(self.payloads, saga_id, saga_type, document.body))
        except SubjectErased:
            self.erased += 1
        except InvalidPayload as error:
            # The text of a value that does not open repeats no value, and names its key.
            return Unopened(document.kind, document.id, saga_type, str(error))
        except (OutriderError, ValueError, RecursionError) as error:
            text = text_of(error, Redactor(ErrorText.REDACTED, document.body))
            return Unopened(document.kind, document.id, saga_type, text)
        return None
