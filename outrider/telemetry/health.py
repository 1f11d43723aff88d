"""The health of a store, as seen by a process."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass, field

from outrider.redaction import without_values
from outrider.retry import RetryPolicy
from outrider.telemetry.events import Observer, TelemetryEvent


@dataclass(slots=True)
class StoreHealth:
    """Reports the failure and the recovery of a store, once per outage, and returns the wait between attempts.

    >>> from outrider.telemetry.events import Observers, StoreRecovered, StoreUnavailable
    >>> down, up = lambda error: StoreUnavailable("relay-1", error), lambda: StoreRecovered("relay-1")
    >>> health = StoreHealth(Observers(), down, up, RetryPolicy(base_seconds=0.1, jitter=0))
    >>> [health.failed("no answer"), health.failed("no answer")]
    [0.1, 0.2]
    """

    observer: Observer
    down: Callable[[str], TelemetryEvent]
    up: Callable[[], TelemetryEvent]
    backoff: RetryPolicy
    rng: random.Random = field(default_factory=random.Random)
    failures: int = 0

    def failed(self, error: str) -> float:
        """Record a failure; return the seconds to wait before the next attempt."""
        self.failures += 1
        if self.failures == 1:
            self.observer.emit(self.down(without_values(error)))
        return self.backoff.delay_seconds(self.failures, self.rng)

    def recovered(self) -> None:
        """Record a success."""
        if self.failures:
            self.failures = 0
            self.observer.emit(self.up())
