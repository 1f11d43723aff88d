"""Settings of a consumer."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from difflib import get_close_matches
from enum import StrEnum
from typing import Any

from outrider.errors import InvalidSetting
from outrider.event import OnDeadLetter
from outrider.inbox.model import InboxBlockReason
from outrider.redaction import ErrorText
from outrider.retry import RetryPolicy
from outrider.settings_checks import Range, check_ranges, check_words


class Ordering(StrEnum):
    """The use of sequence numbers by a consumer.

    `off`: none. `monotonic`: drops events at or below the last sequence seen. `strict`: accepts only the next sequence,
    and holds events that come early.
    """

    OFF = "off"
    MONOTONIC = "monotonic"
    STRICT = "strict"


class FirstSequence(StrEnum):
    """The first sequence of a stream that is new to a strict consumer: the first sequence seen, or 1."""

    FIRST_SEEN = "first_seen"
    ONE = "one"


COUNT, SECONDS = Range(1, whole=True), Range(0)

RANGES = {
    "held_per_stream_max": COUNT,
    "batch_max": COUNT,
    "concurrency": COUNT,
    "in_flight_max": COUNT,
    "gap_timeout_seconds": SECONDS,
    "handler_timeout_seconds": Range(above=0, optional=True),
    "shutdown_timeout_seconds": SECONDS,
    "maintenance_interval_seconds": Range(above=0),
    "receipt_days": Range(above=0),
    "dead_letter_days": Range(0),
    "participant_memory_days": Range(above=0, optional=True),
}

WORDS = {
    "ordering": Ordering,
    "first_sequence": FirstSequence,
    "on_dead_letter": OnDeadLetter,
    "error_text": ErrorText,
}


@dataclass(frozen=True, slots=True)
class ConsumerSettings:
    """Limits and times of a consumer; the defaults suit most applications.

    `in_flight_max` limits the events that are received and not yet acked. `held_per_stream_max` limits the held events
    of a stream in the database. With `batch_max` above 1, up to `batch_max` messages share a transaction.
    `participant_memory_days` is how long saga participants on this store remember their replies; with None, the saga
    workers decide. `error_text` is the part of the texts of errors that is logged and stored.

    >>> ConsumerSettings(ordering="strict").ordered
    True
    """

    ordering: Ordering = Ordering.OFF
    first_sequence: FirstSequence = FirstSequence.FIRST_SEEN
    gap_timeout_seconds: float = 300.0
    held_per_stream_max: int = 1000
    retry: RetryPolicy = field(default_factory=RetryPolicy)
    on_dead_letter: OnDeadLetter = OnDeadLetter.BLOCK
    handler_timeout_seconds: float | None = None
    batch_max: int = 1
    concurrency: int = 8
    in_flight_max: int = 1000
    receipt_days: float = 14.0
    dead_letter_days: float = 30.0
    participant_memory_days: float | None = 90.0
    shutdown_timeout_seconds: float = 10.0
    maintenance_interval_seconds: float = 5.0
    error_text: ErrorText = ErrorText.REDACTED

    def __post_init__(self) -> None:
        if not isinstance(retry := self.retry, RetryPolicy):
            raise InvalidSetting(f"retry = {retry!r} is no RetryPolicy; write retry=RetryPolicy(max_attempts=5)")
        check_ranges(self, RANGES)
        check_words(self, WORDS)
        if self.batch_max > self.in_flight_max:
            raise InvalidSetting(
                f"batch_max ({self.batch_max}) is more than in_flight_max ({self.in_flight_max}), so that no batch "
                "would ever be full; lower the one or raise the other"
            )

    @property
    def drains(self) -> tuple[InboxBlockReason, ...]:
        """Return the block reasons whose streams may drain. Without strict ordering, early events drain as well."""
        return (
            (InboxBlockReason.DRAINING,)
            if self.ordering is Ordering.STRICT
            else (InboxBlockReason.DRAINING, InboxBlockReason.EARLY)
        )

    @property
    def ordered(self) -> bool:
        """Return whether sequences of streams are tracked."""
        return self.ordering is not Ordering.OFF

    @property
    def keeps_order(self) -> bool:
        """Return whether the order of a key matters: sequences are tracked, or a dead letter blocks its stream."""
        return self.ordered or self.on_dead_letter is OnDeadLetter.BLOCK


def changed(settings: ConsumerSettings, options: Mapping[str, Any]) -> ConsumerSettings:
    """Return settings with some values replaced. An unknown name is rejected with a hint to the nearest known name.

    >>> changed(ConsumerSettings(), {"orderin": "strict"})
    Traceback (most recent call last):
    ...
    outrider.errors.InvalidSetting: a consumer has no setting 'orderin'; did you mean ordering?
    """
    known = [each.name for each in fields(ConsumerSettings)]
    for name in options:
        if name not in known:
            near = get_close_matches(name, known, n=1)
            hint = f"did you mean {near[0]}?" if near else f"there are: {', '.join(known)}"
            raise InvalidSetting(f"a consumer has no setting {name!r}; {hint}")
    return replace(settings, **options)
