"""What became of a message, as values.

A **verdict** is the broker's word about one message. An **outcome** is what the relay writes down for its event; the
store applies it under the fence. An `Unresolved` verdict leads to no outcome: nothing is known, so nothing is written.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import Any


class Reason(StrEnum):
    """Why an event was buried."""

    MAX_RETRIES_EXCEEDED = "max_retries_exceeded"
    POISON_MESSAGE = "poison_message"
    SCHEMA_VALIDATION_FAILED = "schema_validation_failed"
    PROCESSING_TIMEOUT = "processing_timeout"
    PERMANENT_FAILURE = "permanent_failure"
    BY_HAND = "by_hand"


class Policy(StrEnum):
    """What a stream does when one of its events is buried."""

    HOLD = "hold"
    SKIP = "skip"


@dataclass(frozen=True, slots=True)
class Confirmed:
    """The broker has the message. As an outcome: the event is sent."""


@dataclass(frozen=True, slots=True)
class Refused:
    """The broker refused this very message, and may take it later. Costs an attempt."""

    error: str


@dataclass(frozen=True, slots=True)
class Rejected:
    """The broker will never take this message."""

    error: str
    reason: Reason = Reason.PERMANENT_FAILURE


@dataclass(frozen=True, slots=True)
class Unresolved:
    """Something larger broke: a verdict on no message. `destination` names what is down; empty means the connection."""

    error: str
    destination: str = ""


Verdict = Confirmed | Refused | Rejected | Unresolved


@dataclass(frozen=True, slots=True)
class Retry:
    """An attempt was spent; due again after the delay."""

    delay_seconds: float
    failure: dict[str, Any]


@dataclass(frozen=True, slots=True)
class Defer:
    """Not to be published yet; costs nothing. Without a delay the event's own `available_at` decides."""

    delay_seconds: float | None = None


@dataclass(frozen=True, slots=True)
class Park:
    """Waits behind the head of its stream."""


@dataclass(frozen=True, slots=True)
class Bury:
    """To the dead letters, with a reason; the policy decides about the stream."""

    reason: Reason
    failure: dict[str, Any]
    policy: Policy = Policy.HOLD


Outcome = Confirmed | Retry | Defer | Park | Bury

CONFIRMED = Confirmed()
PARK = Park()
