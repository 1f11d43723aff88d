"""What can be set about a saga worker, with the relations that must hold between settings."""

from __future__ import annotations

from dataclasses import dataclass, fields

from outrider.errors import BadSetting

LEASE_MARGIN = 0.9
"""A worker trusts this much of a claim, counted from asking for it, by its own clock."""

RENEWALS = 3
"""How often a claim is renewed within a lease, so that one renewal may fail."""


@dataclass(frozen=True, slots=True)
class SagaSettings:
    """Limits and times of a worker; the defaults suit most.

    `concurrency` is how many sagas it has at a time. Those that wait for an answer or for time to pass do not count.
    The time of a call may exceed `lease_seconds`, because claims are renewed.

    >>> SagaSettings(lease_seconds=6).renew_seconds
    2.0
    """

    concurrency: int = 64
    lease_seconds: float = 15.0
    poll_seconds_min: float = 0.02
    poll_seconds_max: float = 1.0
    stop_seconds: float = 10.0
    upkeep_seconds: float = 600.0
    saga_days: float = 30.0
    audit_days: float = 365.0
    barrier_days: float = 90.0

    def __post_init__(self) -> None:
        for field in fields(self):
            if getattr(self, field.name) <= 0:
                raise BadSetting(f"{field.name} = {getattr(self, field.name)} cannot work; it must be above 0")
        if self.poll_seconds_min > self.poll_seconds_max:
            raise BadSetting(
                f"poll_seconds_min ({self.poll_seconds_min}) is more than poll_seconds_max ({self.poll_seconds_max}); "
                "lower the one or raise the other"
            )
        if self.poll_seconds_max > self.renew_seconds:
            raise BadSetting(
                f"poll_seconds_max ({self.poll_seconds_max}) is more than a third of lease_seconds "
                f"({self.lease_seconds}), so that a saga without an owner would wait longer than its lease; lower the "
                "one or raise the other"
            )
        if self.audit_days < self.saga_days:
            raise BadSetting(
                f"audit_days ({self.audit_days}) is less than saga_days ({self.saga_days}), so that a saga would be "
                "there without its trail; raise audit_days"
            )

    @property
    def renew_seconds(self) -> float:
        """Return how long to wait between two renewals."""
        return self.lease_seconds / RENEWALS
