"""The settings of a relay, and the relations between the settings."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from fnmatch import fnmatchcase

from outrider.errors import InvalidSetting
from outrider.event import OnDeadLetter
from outrider.outbox.model import Retention
from outrider.redaction import ErrorText
from outrider.retry import RetryPolicy
from outrider.settings_checks import Range, check_ranges, check_words

LEASE_MARGIN = 0.9
"""The safe part of a lease, by the relay's own clock, from the sending of the renewal on."""


WORKERS_MAX = 64

RANGES = {
    "batch_max": Range(above=0),
    "in_flight_max": Range(above=0),
    "workers": Range(1, WORKERS_MAX, whole=True),
    "poll_seconds_min": Range(above=0),
    "breaker_seconds_base": Range(above=0),
    "maintenance_interval_seconds": Range(above=0),
}


@dataclass(frozen=True, slots=True)
class RelaySettings:
    """Limits and times of a relay; the defaults suit most.

    `error_text` is the part of the broker's error texts that is logged and stored.

    >>> RelaySettings(lease_seconds=2, publish_timeout_seconds=0.9).policy_of("orders")
    <OnDeadLetter.BLOCK: 'block'>
    """

    lease_seconds: float = 15.0
    publish_timeout_seconds: float = 5.0
    batch_max: int = 4000
    in_flight_max: int = 4000
    workers: int = 4
    poll_seconds_min: float = 0.02
    poll_seconds_max: float = 10.0
    breaker_seconds_base: float = 0.5
    breaker_seconds_max: float = 30.0
    maintenance_interval_seconds: float = 60.0
    retry: RetryPolicy = field(default_factory=RetryPolicy)
    on_dead_letter: OnDeadLetter = OnDeadLetter.BLOCK
    dead_letter_policies: Mapping[str, OnDeadLetter] = field(default_factory=dict)
    retention: Retention = field(default_factory=Retention)
    error_text: ErrorText = ErrorText.REDACTED

    def __post_init__(self) -> None:
        check_ranges(self, RANGES)
        check_words(self, {"error_text": ErrorText})
        if self.publish_timeout_seconds >= self.lease_seconds / 2:
            raise InvalidSetting(
                f"publish_timeout_seconds ({self.publish_timeout_seconds}) must be less than half of lease_seconds "
                f"({self.lease_seconds}), or a publish could outlive the lease; lower the one or raise the other"
            )
        if self.poll_seconds_min > self.poll_seconds_max:
            raise InvalidSetting(
                f"poll_seconds_min ({self.poll_seconds_min}) must be at most poll_seconds_max ({self.poll_seconds_max})"
            )

    @property
    def heartbeat_seconds(self) -> float:
        """Return the heartbeat interval: three heartbeats per lease, of which two may fail."""
        return self.lease_seconds / 3

    def policy_of(self, topic: str) -> OnDeadLetter:
        """Return the dead-letter policy of a topic's streams: the first matching pattern decides."""
        for pattern, policy in self.dead_letter_policies.items():
            if fnmatchcase(topic, pattern):
                return policy
        return self.on_dead_letter
