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
from outrider.retry import RetryPolicy


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


@dataclass(frozen=True, slots=True)
class ConsumerSettings:
    """Limits and times of a consumer; the defaults suit most applications.

    `in_flight_max` limits the events that are received and not yet acked. `held_per_stream_max` limits the held events
    of a stream in the database. With `batch_max` above 1, up to `batch_max` messages share a transaction.
    `participant_memory_days` is how long saga participants on this store remember their replies; with None, the saga
    workers decide.

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

    def __post_init__(self) -> None:
        _check_types(self)
        for name, kind in (("ordering", Ordering), ("first_sequence", FirstSequence), ("on_dead_letter", OnDeadLetter)):
            try:
                object.__setattr__(self, name, kind(getattr(self, name)))
            except ValueError:
                valid = ", ".join(kind)
                raise InvalidSetting(f"{name} = {getattr(self, name)!r} is not known (valid: {valid})") from None
        for name in (*_COUNTS, "receipt_days", "participant_memory_days", "maintenance_interval_seconds"):
            value = getattr(self, name)
            if value is not None and value <= 0:
                raise InvalidSetting(f"{name} = {value} cannot work; it must be above 0")
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


_COUNTS = ("held_per_stream_max", "batch_max", "concurrency", "in_flight_max")
_SECONDS = (
    "gap_timeout_seconds",
    "handler_timeout_seconds",
    "shutdown_timeout_seconds",
    "maintenance_interval_seconds",
)
_DAYS = ("receipt_days", "dead_letter_days", "participant_memory_days")
_OPTIONAL = ("handler_timeout_seconds", "participant_memory_days")


def _check_types(settings: ConsumerSettings) -> None:
    """Reject values of a wrong type early, with the name of the setting."""
    if not isinstance(retry := settings.retry, RetryPolicy):
        raise InvalidSetting(f"retry = {retry!r} is no RetryPolicy; write retry=RetryPolicy(max_attempts=5)")
    for name in (*_COUNTS, *_SECONDS, *_DAYS):
        value = getattr(settings, name)
        kinds = (int,) if name in _COUNTS else (int, float)
        none_allowed = name in _OPTIONAL and value is None
        if not none_allowed and (isinstance(value, bool) or not isinstance(value, kinds)):
            wanted = "a whole number" if name in _COUNTS else "a number"
            raise InvalidSetting(f"{name} = {value!r} is not {wanted}, without quotes, such as {name}=10")


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
