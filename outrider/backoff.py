"""How long to wait before the next attempt: exponential, jittered, capped."""

from __future__ import annotations

import math
import random
from dataclasses import asdict, dataclass
from typing import Any

from outrider.errors import BadSetting

FACTOR_MAX = 100
CAP_SECONDS_MAX = 30 * 86_400
ATTEMPTS_MAX = 32_767


@dataclass(frozen=True, slots=True)
class RetryPolicy:
    """When a failed event is tried again, and when it is buried.

    >>> RetryPolicy(base_seconds=2, cap_seconds=30).max_attempts
    10
    """

    base_seconds: float = 1.0
    factor: float = 2.0
    cap_seconds: float = 60.0
    jitter: float = 0.25
    max_attempts: int = 10

    def __post_init__(self) -> None:
        for name in self.__slots__:
            _check_number(name, getattr(self, name))
        checks = {
            "base_seconds": self.base_seconds > 0,
            "factor": 1 <= self.factor <= FACTOR_MAX,
            "cap_seconds": self.base_seconds <= self.cap_seconds <= CAP_SECONDS_MAX,
            "jitter": 0 <= self.jitter < 1,
            "max_attempts": 1 <= self.max_attempts <= ATTEMPTS_MAX,
        }
        for name, fine in checks.items():
            if not fine:
                raise BadSetting(
                    f"retry.{name} = {getattr(self, name)!r} cannot work; use base_seconds > 0, factor from 1 to "
                    f"{FACTOR_MAX}, cap_seconds from base_seconds to {CAP_SECONDS_MAX}, jitter from 0 to below 1, and "
                    f"max_attempts from 1 to {ATTEMPTS_MAX}"
                )

    def delay_seconds(self, attempt: int, chance: random.Random) -> float:
        """Return the wait after the given attempt failed (the first attempt is 1).

        >>> RetryPolicy(jitter=0).delay_seconds(3, random.Random(0))
        4.0
        """
        # The exponent is bounded first: 2.0 ** 2000 overflows long before the cap could apply.
        plain = min(self.cap_seconds, self.base_seconds * self.factor ** min(attempt - 1, 64))
        return plain * chance.uniform(1 - self.jitter, 1 + self.jitter)

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


def _check_number(name: str, value: Any) -> None:
    whole = name == "max_attempts"
    number = isinstance(value, int if whole else int | float) and not isinstance(value, bool)
    if not number or not math.isfinite(value):
        raise BadSetting(f"retry.{name} = {value!r} cannot work; use {'a whole number' if whole else 'a number'}")
