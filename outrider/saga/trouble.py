"""Trouble that a worker has: a store that does not answer, and sagas whose turns cannot be taken.

The first is told once, until it answers again, and left alone for a while between two tries.
"""

from __future__ import annotations

import random
from dataclasses import dataclass, field
from uuid import UUID

from outrider.backoff import RetryPolicy
from outrider.observer import Observer, SagaWorkerRecovered, SagaWorkerTroubled

PAUSES = RetryPolicy(base_seconds=0.1, cap_seconds=2)

SPOILT_MAX = 3
"""How often a turn of a saga may fail, with what is not known to pass, before the saga is stopped as failed."""


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


@dataclass(slots=True)
class Spoilt:
    """Sagas whose last turns failed with what is not known to pass, and how often."""

    errors: dict[UUID, list[str]] = field(default_factory=dict)

    def met(self, saga_id: UUID, error: str) -> None:
        """Note that a turn has failed."""
        self.errors[saga_id] = [*self.errors.get(saga_id, []), error][-SPOILT_MAX:]

    def over(self, saga_id: UUID) -> None:
        """Note that the turns of a saga can be taken."""
        self.errors.pop(saga_id, None)

    def verdict(self, saga_id: UUID) -> str | None:
        """Say why a saga is to be stopped; None if it is to be tried once more.

        >>> Spoilt().verdict(UUID(int=7)) is None
        True
        """
        errors = self.errors.get(saga_id, [])
        if len(errors) < SPOILT_MAX:
            return None
        return f"its turn has failed {len(errors)} times in a row, the last time so: {errors[-1]}"
