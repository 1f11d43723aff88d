"""The records of payloads: versions, schemas, facts about an event, problems; and the contracts of sources and ciphers.

A version is a whole number, or a semantic version as text. Both are text in a store and on the wire.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from enum import StrEnum
from typing import Any, NamedTuple, Protocol
from uuid import UUID, uuid5

from outrider.errors import UsageError
from outrider.event import SUBJECT_HEADER, VERSION, DeadLetterReason

Version = int | str
"""The version of a schema: a whole number from 1, or a semantic version such as `2.1.0`."""

ENCRYPTED_MARK = "$encrypted"
"""The member that makes an object an encrypted value. The name is reserved in payloads."""

_SEMANTIC = re.compile(r"(\d+)\.(\d+)\.(\d+)(?:-(.+))?")


class OnInvalid(StrEnum):
    """The treatment of an invalid payload.

    `refuse`: staging raises, and a relay dead-letters a row of another program. `dead-letter`: staging accepts the
    event, and a relay dead-letters the row. `warn`: the event is published, and a warning is logged.
    """

    REFUSE = "refuse"
    DEAD_LETTER = "dead-letter"
    WARN = "warn"


class PayloadSchema(NamedTuple):
    """The JSON Schema of one version of an event type. `uri` identifies the schema in CloudEvents, if it has one."""

    event_type: str
    version: Version
    document: Mapping[str, Any] | bool
    uri: str | None = None

    @property
    def name(self) -> str:
        """Return the name for people.

        >>> PayloadSchema("order.placed", 2, True).name
        'order.placed version 2'
        """
        return f"{self.event_type} version {self.version}"


class SchemaSource(Protocol):
    """A place that holds schemas. The methods may block on I/O, so an event loop calls them on a thread."""

    refresh_seconds: float | None
    """The age after which a schema is read again; None if the schemas never change while the process runs."""

    def find(self, event_type: str, version: Version) -> PayloadSchema | None:
        """Return a schema, or None if the source has none. Raises SchemaUnavailable if the source cannot be asked."""
        ...

    def versions(self, event_type: str) -> Sequence[Version]:
        """Return the known versions of a type, empty for an unknown type."""
        ...

    def event_types(self) -> Sequence[str]:
        """Return the event types of the source."""
        ...


class PayloadFacts(NamedTuple):
    """The facts of an event that checks and ciphers use beside the payload."""

    event_id: UUID | None
    event_type: str
    schema_version: Version
    topic: str
    key: str | None
    subject: str | None = None
    """The person whose data the event carries; None without one, or where it is unknown."""


SAGA_STATE, SAGA_JOURNAL, REPLY = "\0saga state ", "\0saga journal ", "\0reply "
"""The beginnings of the names of documents that are no events. No type of an event has a null byte."""

REPLIES = UUID("b0a5a0c2-3b5e-5f0e-8a55-5d7c6f9b1c40")
"""The namespace of the ids of kept replies. The value must never change: encrypted replies are bound to their ids."""


def state_facts(saga_id: UUID, saga_type: str, subject: str | None) -> PayloadFacts:
    """Return the facts of the state of a saga, for a cipher."""
    return PayloadFacts(saga_id, f"{SAGA_STATE}{saga_type}", 1, "", None, subject)


def journal_facts(saga_id: UUID, step: str, phase: str, subject: str | None) -> PayloadFacts:
    """Return the facts of the data of a journal entry, for a cipher."""
    return PayloadFacts(saga_id, f"{SAGA_JOURNAL}{phase} {step}", 1, "", None, subject)


def reply_facts(participant: str, key: str, phase: str, reply: Mapping[str, Any]) -> PayloadFacts:
    """Return the facts of a reply that a participant keeps, given as its stored fields, for a cipher.

    An erased reply has no fields.
    """
    reply_id = uuid5(REPLIES, f"{participant}\n{phase}\n{key}")
    subject = reply.get("subject") or (reply.get("headers") or {}).get(SUBJECT_HEADER)
    return PayloadFacts(reply_id, f"{REPLY}{reply.get('event_type') or ''}", 1, "", None, subject)


class PayloadProblem(NamedTuple):
    """A reason for which a payload is invalid: the path of the field, the problem, and the treatment."""

    path: str
    text: str
    mode: OnInvalid
    reason: DeadLetterReason = DeadLetterReason.SCHEMA_VALIDATION_FAILED

    def __str__(self) -> str:
        return f"{self.path}: {self.text}"


class PayloadCipher(Protocol):
    """Encrypts fields of payloads. Each method gets and returns JSON values, and leaves its argument unchanged.

    An encrypted value is an object with the member `$encrypted`, so a text without that name needs no decryption.
    """

    async def load(self, subjects: Iterable[tuple[str, str]], payloads: Iterable[Any]) -> None:
        """Read the keys of subjects, as (event type, subject), and of payloads, as JSON text or values.

        The event loop does not wait for them later. A failure is raised by the call that needs the key.
        """
        ...

    def encrypt(self, facts: PayloadFacts, payload: Any) -> Any:
        """Return the payload with its sensitive fields encrypted. Raises InvalidEvent if a field cannot be."""
        ...

    def decrypt(self, facts: PayloadFacts, payload: Any) -> Any:
        """Return the payload with its encrypted fields as plain values.

        Raises InvalidPayload if a field cannot be, and its subclasses KeyMissing if the key is not there, and
        SubjectErased if the key was destroyed.
        """
        ...

    def encrypt_whole(self, facts: PayloadFacts, payload: Any) -> Any:
        """Return the payload as one encrypted value, whatever its sensitive fields are."""
        ...

    def is_sensitive(self, event_type: str) -> bool:
        """Return whether a type has sensitive fields."""
        ...

    def plaintext_path(self, facts: PayloadFacts, payload: Any) -> str | None:
        """Return the path of a stored field that must be encrypted and is not; None if there is no such field."""
        ...


def parse_version(text: object) -> Version | None:
    """Return a version in its usual form, or None for anything else.

    >>> parse_version("2"), parse_version("2.1.0"), parse_version("two")
    (2, '2.1.0', None)
    """
    if isinstance(text, bool) or not isinstance(text, int | str):
        return None
    if not VERSION.fullmatch(str(text)):
        return None
    return int(text) if str(text).isdecimal() else str(text)


def required_version(text: object, what: str) -> Version:
    """Return a version in its usual form; anything else is a usage error.

    >>> required_version("1", "order.placed")
    1
    """
    if (version := parse_version(text)) is None:
        raise UsageError(f"{what}: {text!r} is no version; write a whole number from 1, or a text such as 2.1.0")
    return version


def version_order(version: Version) -> tuple[Any, ...]:
    """Return a sort key: whole numbers by value, and semantic versions by their precedence.

    >>> sorted(["10.0.0", "2.1.0", "2.1.0-rc.1"], key=version_order)
    ['2.1.0-rc.1', '2.1.0', '10.0.0']
    """
    found = _SEMANTIC.fullmatch(str(version))
    if found is None:
        return int(version), 0, 0, 1, ()
    major, minor, patch, early = found.groups()
    parts = tuple((0, int(part), "") if part.isdecimal() else (1, 0, part) for part in (early or "").split(".") if part)
    return int(major), int(minor), int(patch), 0 if early else 1, parts


def field_path(path: str, parts: Sequence[str | int]) -> str:
    """Return the path of a field below another path.

    >>> field_path("payload", ["lines", 0, "sku"])
    'payload.lines[0].sku'
    """
    return path + "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in parts)


def field_of(payload: Any, path: str) -> Any:
    """Return the value of a dotted path, or MISSING.

    >>> field_of({"customer": {"id": 7}}, "customer.id"), field_of({}, "customer.id") is MISSING
    (7, True)
    """
    value = payload
    for name in path.split("."):
        if not isinstance(value, Mapping) or name not in value:
            return MISSING
        value = value[name]
    return value


MISSING: Any = object()
"""The value of a field that is not there."""
