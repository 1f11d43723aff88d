"""The settings of a saga worker, and the relations between them."""

from __future__ import annotations

from dataclasses import dataclass

from outrider.errors import InvalidSetting
from outrider.redaction import ErrorText
from outrider.settings_checks import Range, check_ranges, check_words

HIGHEST, DAYS_MAX = 1_000_000, 36_500
"""Upper limits far beyond any sensible value, and small enough for all clocks and calendars."""

LEASE_MARGIN = 0.9
"""The share of a lease that a worker trusts, counted from the request by the clock of the worker."""

RENEWALS = 3
"""The number of renewals within a lease, so that one renewal may fail."""


SECONDS, DAYS = Range(above=0, most=HIGHEST), Range(above=0, most=DAYS_MAX)

RANGES = {
    "concurrency": Range(1, HIGHEST, whole=True),
    "lease_seconds": SECONDS,
    "poll_seconds_min": SECONDS,
    "poll_seconds_max": SECONDS,
    "shutdown_timeout_seconds": SECONDS,
    "maintenance_interval_seconds": SECONDS,
    "saga_days": DAYS,
    "audit_days": DAYS,
    "participant_memory_days": DAYS,
    "breaker_failures": Range(1, HIGHEST, whole=True),
    "breaker_seconds_base": SECONDS,
    "breaker_seconds_max": SECONDS,
}


@dataclass(frozen=True, slots=True)
class SagaSettings:
    """Limits and times of a worker. The defaults suit most applications.

    `concurrency` is the number of sagas that a worker runs at a time. Sagas that wait for a reply or a deadline do not
    count. A call may take longer than `lease_seconds`, because claims are renewed. After `breaker_failures` unavailable
    results of a step in a row, one saga at a time probes its service, and the others wait. `error_text` is the part of
    the texts of errors that is logged and stored. With `audit_states` the audit log keeps each state that a turn has
    changed.

    >>> SagaSettings(lease_seconds=6).renew_seconds
    2.0
    """

    concurrency: int = 64
    lease_seconds: float = 15.0
    poll_seconds_min: float = 0.02
    poll_seconds_max: float = 1.0
    shutdown_timeout_seconds: float = 10.0
    maintenance_interval_seconds: float = 600.0
    saga_days: float = 90.0
    audit_days: float = 365.0
    participant_memory_days: float = 90.0
    breaker_failures: int = 5
    breaker_seconds_base: float = 1.0
    breaker_seconds_max: float = 60.0
    error_text: ErrorText = ErrorText.REDACTED
    audit_states: bool = True

    def __post_init__(self) -> None:
        check_ranges(self, RANGES)
        check_words(self, {"error_text": ErrorText})
        self._check_relations()

    def _check_relations(self) -> None:
        if self.poll_seconds_min > self.poll_seconds_max:
            raise InvalidSetting(
                f"poll_seconds_min ({self.poll_seconds_min}) is more than poll_seconds_max ({self.poll_seconds_max}); "
                "lower the one or raise the other"
            )
        if self.poll_seconds_max > self.renew_seconds:
            raise InvalidSetting(
                f"poll_seconds_max ({self.poll_seconds_max}) is more than a third of lease_seconds "
                f"({self.lease_seconds}), so that a saga without an owner would wait longer than its lease; lower the "
                "one or raise the other"
            )
        if self.breaker_seconds_base > self.breaker_seconds_max:
            raise InvalidSetting(
                f"breaker_seconds_base ({self.breaker_seconds_base}) is more than breaker_seconds_max "
                f"({self.breaker_seconds_max}); lower the one or raise the other"
            )
        if self.audit_days < self.saga_days:
            raise InvalidSetting(
                f"audit_days ({self.audit_days}) is less than saga_days ({self.saga_days}), so that a saga would be "
                "there without its audit log; raise audit_days"
            )
        if self.saga_days < self.participant_memory_days:
            raise InvalidSetting(
                f"saga_days ({self.saga_days}) is less than participant_memory_days "
                f"({self.participant_memory_days}), so that a saga could be started again under its old name while "
                "participants still answer its keys from memory, and do nothing; raise saga_days, or lower "
                "participant_memory_days"
            )

    @property
    def renew_seconds(self) -> float:
        """Return the time between two renewals."""
        return self.lease_seconds / RENEWALS
