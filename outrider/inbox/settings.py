"""What can be set about a consumer."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from difflib import get_close_matches
from enum import StrEnum
from typing import Any

from outrider.backoff import RetryPolicy
from outrider.errors import BadSetting
from outrider.inbox_store import Cause
from outrider.outcome import Policy


class Gate(StrEnum):
    """What a consumer does about sequence numbers.

    `off`: nothing. `monotonic`: drops what is at or below the last one seen. `strict`: takes the next one only, and
    lets early ones wait for it.
    """

    OFF = "off"
    MONOTONIC = "monotonic"
    STRICT = "strict"


class Start(StrEnum):
    """Where a strict gate begins in a stream that it has not met: with the first event it sees, or with number one."""

    FIRST_SEEN = "first_seen"
    ONE = "one"


@dataclass(frozen=True, slots=True)
class ConsumerSettings:
    """Limits and times of a consumer; the defaults suit most.

    `in_flight_max` bounds what has been received and not yet acked; `waiting_max` the events of one stream that wait in
    the database. `batch_max` above 1 puts that many messages into one transaction. `barrier_days` is how long the
    participants of sagas on this store remember what they have answered; None leaves that to the sagas' own workers.

    >>> ConsumerSettings(gate="strict").gated
    True
    """

    gate: Gate = Gate.OFF
    start: Start = Start.FIRST_SEEN
    gap_timeout_seconds: float = 300.0
    waiting_max: int = 1000
    retry: RetryPolicy = field(default_factory=RetryPolicy)
    dead_letter_policy: Policy = Policy.HOLD
    handler_timeout_seconds: float | None = None
    batch_max: int = 1
    concurrency: int = 8
    in_flight_max: int = 1000
    receipt_days: float = 14.0
    dead_letter_days: float = 30.0
    barrier_days: float | None = 90.0
    stop_seconds: float = 10.0
    tend_seconds: float = 5.0

    def __post_init__(self) -> None:
        _check_types(self)
        for name, kind in (("gate", Gate), ("start", Start), ("dead_letter_policy", Policy)):
            try:
                object.__setattr__(self, name, kind(getattr(self, name)))
            except ValueError:
                valid = ", ".join(kind)
                raise BadSetting(f"{name} = {getattr(self, name)!r} is not known (valid: {valid})") from None
        for name in (*_WHOLE, "receipt_days", "barrier_days", "tend_seconds"):
            value = getattr(self, name)
            if value is not None and value <= 0:
                raise BadSetting(f"{name} = {value} cannot work; it must be above 0")
        if self.batch_max > self.in_flight_max:
            raise BadSetting(
                f"batch_max ({self.batch_max}) is more than in_flight_max ({self.in_flight_max}), so that no batch "
                "would ever be full; lower the one or raise the other"
            )

    @property
    def drains(self) -> tuple[Cause, ...]:
        """Return the causes whose streams may go. Only a strict gate lets early ones wait, also if another one did."""
        return (Cause.DRAINING,) if self.gate is Gate.STRICT else (Cause.DRAINING, Cause.EARLY)

    @property
    def gated(self) -> bool:
        """Tell whether streams are counted."""
        return self.gate is not Gate.OFF


_WHOLE = ("waiting_max", "batch_max", "concurrency", "in_flight_max")
_SECONDS = ("gap_timeout_seconds", "handler_timeout_seconds", "stop_seconds", "tend_seconds")
_DAYS = ("receipt_days", "dead_letter_days", "barrier_days")
_OPTIONAL = ("handler_timeout_seconds", "barrier_days")


def _check_types(settings: ConsumerSettings) -> None:
    """Refuse a value of another kind at once: it would fail somewhere else, or mean something else."""
    if not isinstance(retry := settings.retry, RetryPolicy):
        raise BadSetting(f"retry = {retry!r} is no RetryPolicy; write retry=RetryPolicy(max_attempts=5)")
    for name in (*_WHOLE, *_SECONDS, *_DAYS):
        value = getattr(settings, name)
        kinds = (int,) if name in _WHOLE else (int, float)
        none_allowed = name in _OPTIONAL and value is None
        if not none_allowed and (isinstance(value, bool) or not isinstance(value, kinds)):
            wanted = "a whole number" if name in _WHOLE else "a number"
            raise BadSetting(f"{name} = {value!r} is not {wanted}, without quotes, such as {name}=10")


def changed(settings: ConsumerSettings, options: Mapping[str, Any]) -> ConsumerSettings:
    """Return settings with others in them; a name that is none is told with the nearest.

    >>> changed(ConsumerSettings(), {"gat": "strict"})
    Traceback (most recent call last):
    ...
    outrider.errors.BadSetting: a consumer has no setting 'gat'; did you mean gate?
    """
    known = [each.name for each in fields(ConsumerSettings)]
    for name in options:
        if name not in known:
            near = get_close_matches(name, known, n=1)
            hint = f"did you mean {near[0]}?" if near else f"there are: {', '.join(known)}"
            raise BadSetting(f"a consumer has no setting {name!r}; {hint}")
    return replace(settings, **options)
