"""The records of a consumer: receipts, stream states, held events and outcomes of events."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime
from enum import StrEnum
from typing import Any, NamedTuple
from uuid import UUID

from outrider.event import DeadLetterReason, Delivery, InboxStream, OnDeadLetter, ReceivedEvent


class InboxBlockReason(StrEnum):
    """The reason for which events of a stream are held at a consumer.

    `early`: a predecessor is missing. `held`: a dead letter waits for an operator. `draining`: the held events may be
    handled, in order.
    """

    EARLY = "early"
    DEAD_LETTER = "dead_letter"
    DRAINING = "draining"


class StreamState(NamedTuple):
    """The state of a stream: the last sequence seen, the reason to hold events, and the number of held events."""

    seen: int | None = None
    cause: InboxBlockReason | None = None
    waiting: int = 0


class Receipts(NamedTuple):
    """The events without a receipt so far, and the states of their streams. A stream without a row is missing."""

    fresh: frozenset[UUID]
    states: Mapping[InboxStream, StreamState]


class HeldEvent(NamedTuple):
    """A held event, with its delivery. `replayed` marks an event that an operator replayed after a skip."""

    waiting_id: int
    event_id: UUID
    delivery: Delivery
    replayed: bool


class ClaimedHeld(NamedTuple):
    """A claimed stream: its state, its first held events in order, and the ids of held events without a receipt."""

    state: StreamState
    waiting: list[HeldEvent]
    fresh: frozenset[UUID]


@dataclass(frozen=True, slots=True)
class Applied:
    """The effects of the handler are in the transaction."""

    seconds: float = 0.0


@dataclass(frozen=True, slots=True)
class Ignored:
    """The event needs no handler: its sequence was seen, the event is a marker, or its type has no handler."""

    reason: str


@dataclass(frozen=True, slots=True)
class Held:
    """The event is held until its predecessors are settled; its receipt is withdrawn."""


@dataclass(frozen=True, slots=True)
class LeftWithBroker:
    """The stream has too many held events: the event stays with the broker, and its receipt is withdrawn."""


@dataclass(frozen=True, slots=True)
class InboxDeadLettered:
    """The event goes to the dead letters of the consumer, with its bytes."""

    reason: DeadLetterReason
    failure: dict[str, Any]
    policy: OnDeadLetter
    attempts: int


InboxOutcome = Applied | Ignored | Held | LeftWithBroker | InboxDeadLettered


class EventOutcome(NamedTuple):
    """A received event with a new receipt, and its outcome."""

    received: ReceivedEvent
    outcome: InboxOutcome


class Overdue(NamedTuple):
    """A stream whose held events have waited too long for a predecessor."""

    stream: InboxStream
    seen: int | None
    waiting: int
    since: datetime


@dataclass(frozen=True, slots=True)
class InboxCriteria:
    """Criteria for dead letters of consumers; all given criteria must match."""

    ids: tuple[int, ...] = ()
    consumer: str | None = None
    topic: str | None = None
    key: str | None = None
    reason: str | None = None
    limit: int = 50


class InboxPruned(NamedTuple):
    """The numbers of rows that maintenance removed."""

    receipts: int
    dead_letters: int
