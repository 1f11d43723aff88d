"""A store that does not answer: told once, until it answers again, and left alone for a while between two tries."""

from __future__ import annotations

import random
from dataclasses import dataclass

from outrider.backoff import RetryPolicy
from outrider.observer import Observer, SagaWorkerRecovered, SagaWorkerTroubled

PAUSES = RetryPolicy(base_seconds=0.1, cap_seconds=2)


@dataclass(slots=True)
class Trouble:
    """What a worker knows of its store's health."""

    worker: str
    observer: Observer
    chance: random.Random
    times: int = 0

    def met(self, error: str) -> float:
        """Note that the store does not answer; return how long to leave it alone."""
        self.times += 1
        if self.times == 1:
            self.observer.notice(SagaWorkerTroubled(self.worker, error))
        return PAUSES.delay_seconds(self.times, self.chance)

    def over(self) -> None:
        """Note that it answers."""
        if self.times:
            self.times = 0
            self.observer.notice(SagaWorkerRecovered(self.worker))
