"""What a consumer knows of events whose handlers failed: how often, and whether it is time to bury them.

Kept in memory only: a failed handler leaves no trace, and after a crash the attempts are counted anew.
"""

from __future__ import annotations

import random
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any
from uuid import UUID

from outrider.delivery import Arrival
from outrider.inbox.calling import HandlerFailed
from outrider.inbox.router import Routes
from outrider.inbox_store import Buried
from outrider.observer import HandlerRetried, Observer
from outrider.outcome import Reason
from outrider.where import where

ERROR_CHARACTERS_MAX = 1000


@dataclass(slots=True)
class Failing:
    """An event that has failed so far."""

    attempts: int = 0
    bury: Buried | None = None


@dataclass(slots=True)
class Failures:
    """The failing events of one consumer; there are never more of them than events in flight."""

    routes: Routes
    observer: Observer
    chance: random.Random
    failing: dict[UUID, Failing] = field(default_factory=dict)

    def charge(self, failed: HandlerFailed) -> float:
        """Charge an attempt; return in how many seconds the event is due again. At the last one it is to be buried."""
        arrival, retry = failed.arrival, self.routes.settings.retry
        known = self.failing.setdefault(arrival.event_id, Failing())
        known.attempts += 1
        if failed.hopeless or known.attempts >= retry.max_attempts:
            reason = Reason.PERMANENT_FAILURE if failed.hopeless else failed.reason
            policy = self.routes.settings.dead_letter_policy
            known.bury = Buried(reason, _failure(failed), policy, known.attempts)
            return 0.0
        delay = retry.delay_seconds(known.attempts, self.chance)
        self.observer.notice(
            HandlerRetried(
                consumer=self.routes.consumer,
                event_id=arrival.event_id,
                topic=arrival.delivery.topic,
                event_type=arrival.event_type,
                attempt=known.attempts,
                delay_seconds=round(delay, 3),
                error=_short(str(failed)),
            )
        )
        return delay

    @property
    def to_bury(self) -> dict[UUID, Buried]:
        """Return the events whose attempts are spent."""
        return {event_id: known.bury for event_id, known in self.failing.items() if known.bury}

    def forget(self, arrivals: Iterable[Arrival]) -> None:
        """Forget events that are done with."""
        if self.failing:
            for arrival in arrivals:
                self.failing.pop(arrival.event_id, None)


def _failure(failed: HandlerFailed) -> dict[str, Any]:
    return {"error": _short(str(failed)), "kind": type(failed.error).__qualname__, "where": where(failed.error)}


def _short(text: str) -> str:
    # A NUL or a lone surrogate in an error would be refused by the database, and the event could not be buried.
    clean = text.replace("\0", "\\0").encode(errors="replace").decode()
    return clean[:ERROR_CHARACTERS_MAX]
