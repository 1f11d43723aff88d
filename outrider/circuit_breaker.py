"""The circuit breaker: stops the use of a service that is down, and lets a probe through at growing intervals. Pure.

The relay has a breaker for each destination of the broker, and a saga worker has one for each step of its sagas.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(slots=True)
class CircuitBreaker:
    """Stops the use of a service after a failure. Times are seconds of the caller's own clock.

    >>> breaker = CircuitBreaker(base_seconds=1)
    >>> breaker.open("connection refused", now=10)
    >>> breaker.is_open, breaker.retry_at
    (True, 11)
    """

    base_seconds: float = 0.5
    cap_seconds: float = 30.0
    error: str = ""
    retry_at: float | None = None
    failures: int = 0
    closed_at: float = float("-inf")

    @property
    def is_open(self) -> bool:
        """Return whether the use is stopped until the next probe."""
        return self.retry_at is not None

    def open(self, error: str, now: float, *, grows: bool = True) -> None:
        """Stop the use until a probe; every failure in a row doubles the wait, up to the cap.

        With `grows=False` the failure was expected: the wait stays short.
        """
        self.error = error
        if not grows:
            self.retry_at = now + self.base_seconds
            return
        # The exponent is bounded first: a float would overflow after a very long outage.
        self.retry_at = now + min(self.cap_seconds, self.base_seconds * 2 ** min(self.failures, 16))
        self.failures += 1

    def close(self, now: float = float("-inf")) -> None:
        """Allow the use again, after a successful probe."""
        self.retry_at, self.closed_at = None, now

    def reset(self) -> None:
        """Forget failures in a row, after a success."""
        self.failures = 0
