"""What can be set about a relay, with the relations that must hold between settings."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from fnmatch import fnmatchcase

from outrider.backoff import RetryPolicy
from outrider.errors import BadSetting
from outrider.outcome import Policy
from outrider.store import Retention

LEASE_MARGIN = 0.9
"""A relay trusts this much of its lease, counted from sending the renewal, by its own clock."""


WORKERS_MAX = 64


@dataclass(frozen=True, slots=True)
class RelaySettings:
    """Limits and times of a relay; the defaults suit most.

    >>> RelaySettings(lease_seconds=2, publish_timeout_seconds=0.9).policy_of("orders")
    <Policy.HOLD: 'hold'>
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
    upkeep_seconds: float = 60.0
    retry: RetryPolicy = field(default_factory=RetryPolicy)
    dead_letter_policy: Policy = Policy.HOLD
    dead_letter_policies: Mapping[str, Policy] = field(default_factory=dict)
    retention: Retention = field(default_factory=Retention)

    def __post_init__(self) -> None:
        if self.publish_timeout_seconds >= self.lease_seconds / 2:
            raise BadSetting(
                f"publish_timeout_seconds ({self.publish_timeout_seconds}) must be less than half of lease_seconds "
                f"({self.lease_seconds}), or a publish could outlive the lease; lower the one or raise the other"
            )
        if not 0 < self.poll_seconds_min <= self.poll_seconds_max:
            raise BadSetting(
                f"poll_seconds_min ({self.poll_seconds_min}) must be above 0 and at most poll_seconds_max "
                f"({self.poll_seconds_max})"
            )
        if self.workers > WORKERS_MAX:
            raise BadSetting(f"workers = {self.workers} cannot work; use at most {WORKERS_MAX}, 4 suits most")
        for name in ("batch_max", "in_flight_max", "workers", "upkeep_seconds", "breaker_seconds_base"):
            if getattr(self, name) <= 0:
                raise BadSetting(f"{name} = {getattr(self, name)} cannot work; it must be above 0")

    @property
    def beat_seconds(self) -> float:
        """Return how often to renew: thrice per lease, so that two renewals may fail."""
        return self.lease_seconds / 3

    def policy_of(self, topic: str) -> Policy:
        """Return what a topic's streams do about a dead letter: the first pattern that matches decides."""
        for pattern, policy in self.dead_letter_policies.items():
            if fnmatchcase(topic, pattern):
                return policy
        return self.dead_letter_policy
