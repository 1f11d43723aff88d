"""Retry policies: exponential delays with jitter, up to a cap."""

from __future__ import annotations

import random
from dataclasses import asdict, dataclass
from typing import Any

from outrider.settings_checks import Range, check_ranges

FACTOR_MAX = 100
CAP_SECONDS_MAX = 30 * 86_400
ATTEMPTS_MAX = 32_767

RANGES = {
    "base_seconds": Range(above=0),
    "factor": Range(1, FACTOR_MAX),
    "cap_seconds": Range(above=0, most=CAP_SECONDS_MAX),
    "jitter": Range(0, below=1),
    "max_attempts": Range(1, ATTEMPTS_MAX, whole=True),
}


@dataclass(frozen=True, slots=True)
class RetryPolicy:
    """The times of retries of a failed event, and the number of attempts after which it is dead-lettered.

    >>> RetryPolicy(base_seconds=2, cap_seconds=30).max_attempts
    10
    """

    base_seconds: float = 1.0
    factor: float = 2.0
    cap_seconds: float = 60.0
    jitter: float = 0.25
    max_attempts: int = 10

    def __post_init__(self) -> None:
        check_ranges(self, RANGES, prefix="retry.")
        check_ranges(self, {"cap_seconds": Range(least=self.base_seconds)}, prefix="retry.")

    def delay_seconds(self, attempt: int, rng: random.Random) -> float:
        """Return the wait after the given attempt failed (the first attempt is 1).

        >>> RetryPolicy(jitter=0).delay_seconds(3, random.Random(0))
        4.0
        """
        # The exponent is bounded first: 2.0 ** 2000 overflows long before the cap could apply.
        plain = min(self.cap_seconds, self.base_seconds * self.factor ** min(attempt - 1, 64))
        return plain * rng.uniform(1 - self.jitter, 1 + self.jitter)

    def to_json(self) -> dict[str, Any]:
        """Return the policy as it is stored beside an event."""
        return asdict(self)

    @classmethod
    def from_json(cls, stored: dict[str, Any]) -> RetryPolicy:
        """Read a policy back from its stored form.

        >>> RetryPolicy.from_json({"max_attempts": 3}).max_attempts
        3
        """
        return cls(**stored)
