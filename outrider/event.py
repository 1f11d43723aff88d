"""Events: as the caller states them, as a store holds them, as a broker carries them.

The module also defines streams and lanes, because producers, stores and consumers must agree on both.
"""

from __future__ import annotations

import hashlib
import json
import re
import secrets
import time
from collections.abc import Callable, Mapping
from dataclasses import KW_ONLY, dataclass, field
from datetime import datetime
from enum import IntEnum, StrEnum
from typing import Any, Literal, NamedTuple
from uuid import UUID

from outrider.retry import RetryPolicy

BANDS = 3
"""Priority bands, most urgent first: high, normal, low."""

BAND_NAMES = ("high", "normal", "low")
"""The bands as they are named on the wire."""

GAPLESS = {"gapless": "true"}
"""The header of an event that Outrider numbered: a missing number in the stream means a missing event."""

TOPIC = re.compile(r"[A-Za-z0-9._\-]{1,249}")
"""The topic names that every broker accepts, except `.` and `..`."""

EVENT_TYPE_BYTES_MAX = 240

TRACEPARENT = re.compile(r"[0-9a-f]{2}-[0-9a-f]{32}-[0-9a-f]{16}-[0-9a-f]{2}")
"""A W3C traceparent."""

VERSION = re.compile(r"[1-9][0-9]{0,9}|(?:0|[1-9]\d{0,8})(?:\.(?:0|[1-9]\d{0,8})){2}(?:-[0-9A-Za-z.\-]{1,60})?")
"""The version of a payload as text: a whole number, or a semantic version."""

SCHEMA_HEADER = "dataschema"
"""The header with the URI of the schema of a payload; with CloudEvents also the attribute of the name."""

SUBJECT_HEADER = "subject"
"""The header with the subject of an event. The attribute of that name of CloudEvents has a prefix on every wire."""

SUBJECT_BYTES_MAX = 400

ERASED = "$erased"
"""The member of the object that replaces an erased payload, state or message."""

ERASED_TEXT = json.dumps({ERASED: True}, separators=(",", ":"))
"""The JSON text in place of contents that were erased, in the form in which staging would write it."""

ERASED_FAILURE = json.dumps({"error": "erased"})
"""The JSON text in place of the failure of an erased dead letter."""

SKIPPED_TYPE = "outrider.skipped"
"""The type of the marker that is published instead of a skipped event."""

UNREADABLE = "outrider_unreadable"
"""The header that stands for headers which a source cannot read; the value is the reason. It is stored with the rest of
the message, so that the reason is the same when a held message is decoded again.
"""


Identifier = Any
"""An id of the application: text, or a whole number, UUID or ObjectId, which staging writes as text."""

TopicRule = Callable[[str, str | None, str | None], str]
"""A function (event_type, topic, routing_key) -> topic."""


class Priority(IntEnum):
    """Names for the numbers 0 to 9: 7 and up is high, 3 to 6 is normal, 0 to 2 is low."""

    LOW = 1
    NORMAL = 5
    HIGH = 8


@dataclass(frozen=True, slots=True)
class Event:
    """An event, to be staged in the transaction of the business change.

    Staging the same `event_id` twice is a no-op; an event without an id gets a new id. `sequence="auto"` numbers the
    events of a stream without gaps; a number is the aggregate's own version. `payload` is any JSON value, or a pydantic
    model, a dataclass or a msgspec struct. Ids may be text, whole numbers, UUIDs or ObjectIds, and are kept as text.
    `subject` names the person whose data the event carries; it is stored and published as the header `subject`.

    >>> Event("order.placed", {"total": 12}, aggregate_type="order", aggregate_id="A-1").topic is None
    True
    """

    event_type: str
    payload: Any
    _: KW_ONLY
    aggregate_type: str | None = None
    aggregate_id: Identifier = None
    event_id: UUID | None = None
    headers: Mapping[str, str] = field(default_factory=dict)
    topic: str | None = None
    key: Identifier = None
    routing_key: str | None = None
    priority: int = Priority.NORMAL
    schema_version: int | str = 1
    saga_id: Identifier = None
    sequence: int | Literal["auto"] | None = None
    max_attempts: int | None = None
    retry: RetryPolicy | None = None
    created_at: datetime | None = None
    available_at: datetime | None = None
    subject: Identifier = None


class Readiness(StrEnum):
    """The readiness of a fetched event, by database time."""

    READY = "ready"
    EARLY = "early"
    OPTIMISTIC = "optimistic"


class Stream(NamedTuple):
    """Events that stay in order: one key on one topic, in one priority band (the lane determines the band)."""

    lane: int
    topic: str
    key: str


class OutboxRow(NamedTuple):
    """An event as the store holds it.

    The class is a tuple because a relay creates a row per event: 0.2 µs, where a frozen dataclass takes 2.5 µs.
    `payload`, `headers` and `retry` are JSON text as stored, and `schema_version` is the text of a version.
    """

    position: int
    event_id: UUID
    event_type: str
    aggregate_type: str | None
    aggregate_id: str | None
    payload: bytes
    headers: bytes
    topic: str
    key: str
    routing_key: str | None
    lane: int
    schema_version: str
    saga_id: str | None
    sequence: int | None
    max_attempts: int | None
    retry: bytes | None
    attempts: int
    state: str
    created_at: datetime
    available_at: datetime | None
    readiness: str
    suspect: bool

    @property
    def stream(self) -> Stream:
        """Return the stream of the event."""
        return Stream(self.lane, self.topic, self.key)


class ResolvedRow(OutboxRow):
    """A row that is stored without a topic; `topic` is the answer of the store's topic rule."""


class Message(NamedTuple):
    """An event encoded for the wire."""

    message_id: str
    topic: str
    key: str
    routing_key: str | None
    body: bytes
    headers: dict[str, str]


def band_of(priority: int) -> int:
    """Return the band of a priority: 0 is the most urgent.

    >>> [band_of(p) for p in (9, 7, 6, 3, 2, 0)]
    [0, 0, 1, 1, 2, 2]
    """
    return 0 if priority >= 7 else 1 if priority >= 3 else 2


def lane_of(key: str, priority: int, lanes: int) -> int:
    """Return the lane of a key. PostgreSQL computes the same value in a generated column; the two must agree.

    >>> lane_of("A-1", Priority.NORMAL, 32)
    45
    """
    digest = hashlib.md5(key.encode(), usedforsecurity=False).digest()
    return band_of(priority) * lanes + (digest[0] * 256 + digest[1]) % lanes


def subject_of(event: Event) -> str | None:
    """Return the subject of an event as text, None without one. The header counts as well.

    >>> subject_of(Event("order.placed", {}, subject=42)), subject_of(Event("paid", {}, headers={"subject": "ann"}))
    ('42', 'ann')
    """
    if event.subject is not None:
        return str(event.subject)
    headers: Any = event.headers
    # Staging rejects headers of another type later, with a path.
    return headers.get(SUBJECT_HEADER) if isinstance(headers, Mapping) else None


def subject_problem(subject: str) -> str | None:
    """Return the reason why a text cannot be a subject: operators type it, and brokers carry it as a header.

    >>> subject_problem("customer:42"), subject_problem("customer\\n42")
    (None, 'it has a character that cannot be printed')
    """
    if not subject.isprintable():
        return "it has a character that cannot be printed"
    if not 0 < (size := len(subject.encode())) <= SUBJECT_BYTES_MAX:
        return f"it has {size} bytes" if size else "it is empty"
    return None


def subject_hash(subject: str) -> str:
    """Return the text that stands for a subject that was erased.

    >>> subject_hash("customer:42")[:8]
    '67f22bfd'
    """
    return hashlib.sha256(subject.encode()).hexdigest()


def erased_name(subject: str) -> str:
    """Return the text that stands for the subject of a destroyed key.

    >>> erased_name("customer:42")[:14]
    'sha256:67f22bf'
    """
    return f"sha256:{subject_hash(subject)}"


def is_erased(payload: Any) -> bool:
    """Tell whether a payload, a state or a message was erased.

    >>> is_erased({"$erased": True}), is_erased({"$erased": True, "id": 7})
    (True, False)
    """
    return isinstance(payload, dict) and len(payload) == 1 and payload.get(ERASED) is True


def subject_in(headers: bytes) -> str | None:
    """Return the subject in the headers of a stored event, which are JSON text.

    >>> subject_in(b'{"subject": "customer:42"}'), subject_in(b"{}")
    ('customer:42', None)
    """
    if b'"subject"' not in headers:
        return None
    subject = json.loads(headers).get(SUBJECT_HEADER)
    return subject if isinstance(subject, str) else None


def default_topic(event_type: str, topic: str | None, routing_key: str | None) -> str:
    """Return the topic of an event: its topic, else its routing key, else `events.` and its type. Replaceable.

    >>> default_topic("order.placed", None, None)
    'events.order.placed'
    """
    return topic or routing_key or f"events.{event_type}"


def topic_of(rule: TopicRule, event_type: str, topic: str | None, routing_key: str | None) -> str:
    """Return the topic of a stored row: the row's own, or the answer of the rule for a row inserted without a topic."""
    return topic or rule(event_type, None, routing_key)


def resolve_topic(row: OutboxRow, rule: TopicRule) -> OutboxRow:
    """Return the row with a topic; see `topic_of`."""
    if row.topic:
        return row
    return ResolvedRow._make(row)._replace(topic=rule(row.event_type, None, row.routing_key))


def uuid7() -> UUID:
    """Make a UUID that sorts by time, so that its index grows at the end.

    >>> uuid7().version
    7
    """
    milliseconds = time.time_ns() // 1_000_000
    value = (milliseconds & 0xFFFF_FFFF_FFFF) << 80 | secrets.randbits(80)
    value = value & ~(0xF << 76) | 0x7 << 76
    return UUID(int=value & ~(0x3 << 62) | 0x2 << 62)


class Delivery(NamedTuple):
    """A message as received.

    `partition` is the unit that a source assigns and revokes. `position` locates the message in the broker, the same
    with every delivery; empty for a broker without positions. `token` is for the source only.

    >>> Delivery("orders", b"A-1", b"{}").position
    ''
    """

    topic: str
    key: bytes | None
    body: bytes
    headers: Mapping[str, bytes] = {}
    partition: str = ""
    position: str = ""
    token: Any = None


class InboxStream(NamedTuple):
    """The unit of order at a consumer, and of the sequence check: one key on one topic, in one priority band."""

    topic: str
    key: str
    band: int = 1


class ReceivedEvent(NamedTuple):
    """A decoded delivery: either `event` is set, or `problem` has the reason for the failure.

    Without a readable key (`keyed`) the event is alone in its stream. `gapless`: Outrider numbered the stream, so a
    missing number means a missing event. `waiting_id` is the row of an event that was held.
    """

    event_id: UUID
    event: Event | None
    problem: str
    stream: InboxStream
    sequence: int | None
    delivery: Delivery
    keyed: bool = True
    gapless: bool = False
    replayed: bool = False
    skipped: bool = False
    waiting_id: int | None = None

    @property
    def event_type(self) -> str:
        """Return the type of the event, empty if unreadable."""
        return self.event.event_type if self.event else ""


class DeadLetterReason(StrEnum):
    """The reason for which an event was dead-lettered."""

    MAX_RETRIES_EXCEEDED = "max_retries_exceeded"
    POISON_MESSAGE = "poison_message"
    SCHEMA_VALIDATION_FAILED = "schema_validation_failed"
    ENCRYPTION_FAILED = "encryption_failed"
    PROCESSING_TIMEOUT = "processing_timeout"
    PERMANENT_FAILURE = "permanent_failure"
    BY_HAND = "by_hand"


class OnDeadLetter(StrEnum):
    """The policy of a stream after a dead letter: block the stream, or continue without the event."""

    BLOCK = "block"
    SKIP = "skip"
