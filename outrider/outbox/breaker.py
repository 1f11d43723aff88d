"""Breakers: telling an outage from a poison message. Pure.

One breaker per destination; the empty name is the connection. A fault that hits more than one message is a verdict on
none of them. So after a fault everything unresolved is a suspect: once a probe succeeds, suspects go out one at a time,
with nothing else on its way. A suspect that fails alone is accused. The accusation becomes a strike only when the
destination shows that it works: a neighbour is confirmed, or a probe succeeds while nobody else stands accused. Three
strikes, and the event is charged.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from uuid import UUID

from outrider.event import StagedEvent

STRIKES = 3


@dataclass(slots=True)
class Breaker:
    """The state of one destination. Times are the relay's own clock, in seconds."""

    base_seconds: float = 0.5
    cap_seconds: float = 30.0
    suspects: dict[UUID, StagedEvent] = field(default_factory=dict)
    falls: dict[UUID, int] = field(default_factory=dict)
    strikes: dict[UUID, int] = field(default_factory=dict)
    accused: set[UUID] = field(default_factory=set)
    counted: set[UUID] = field(default_factory=set)
    error: str = ""
    retry_at: float | None = None
    failures: int = 0

    @property
    def open(self) -> bool:
        """Nothing is sent while a retry time is set."""
        return self.retry_at is not None

    def fault(self, unresolved: list[StagedEvent], error: str, now: float, *, alone: bool) -> None:
        """Something larger broke while these were on their way."""
        self.suspects.update((event.event_id, event) for event in unresolved)
        if alone:
            event_ids = {event.event_id for event in unresolved}
            self.accused |= event_ids
            self.counted -= event_ids
            self.falls.update((event_id, self.falls.get(event_id, 0) + 1) for event_id in event_ids)
        self.error = error
        self._open(now)

    def probe_failed(self, error: str, now: float) -> None:
        """It is an outage, so nobody is to blame for it."""
        self._acquit()
        self.error = error
        self._open(now)

    def probe_passed(self) -> None:
        """The destination answers. If one event alone failed, that is a strike; if several did, it proves nothing."""
        self.retry_at = None
        if len(self.accused) == 1:
            self._strike(self.accused)
            self.counted |= self.accused

    def confirmed(self, event_id: UUID) -> None:
        """A message got through: the destination works, and whoever failed meanwhile did so by its own doing."""
        self._strike(self.accused - {event_id})
        self._acquit()
        self.failures = 0
        self.forget(event_id)

    def guilty(self, event_id: UUID) -> bool:
        """Tell whether the event has earned its strikes."""
        return self.strikes.get(event_id, 0) >= STRIKES

    def forget(self, event_id: UUID) -> None:
        """The event is resolved, or no longer ours."""
        self.suspects.pop(event_id, None)
        self.falls.pop(event_id, None)
        self.strikes.pop(event_id, None)
        self.accused.discard(event_id)
        self.counted.discard(event_id)

    def forget_lanes(self, lanes: set[int]) -> None:
        """Lanes were given up or lost; their events are another relay's to judge."""
        for event_id, event in list(self.suspects.items()):
            if event.lane in lanes:
                self.forget(event_id)

    def _acquit(self) -> None:
        self.accused.clear()
        self.counted.clear()

    def _strike(self, event_ids: set[UUID]) -> None:
        """One failure is one strike, even if a probe and then a neighbour both speak against the event."""
        for event_id in event_ids - self.counted:
            self.strikes[event_id] = self.strikes.get(event_id, 0) + 1

    def _open(self, now: float) -> None:
        delay = min(self.cap_seconds, self.base_seconds * 2 ** min(self.failures, 16))
        self.failures += 1
        self.retry_at = now + delay


class Breakers:
    """All destinations of a relay.

    >>> Breakers().open("orders")
    False
    """

    def __init__(self, base_seconds: float = 0.5, cap_seconds: float = 30.0) -> None:
        self._base_seconds, self._cap_seconds = base_seconds, cap_seconds
        self._breakers: dict[str, Breaker] = {}

    def get(self, destination: str) -> Breaker:
        """Return the destination's breaker; a new one is closed."""
        if destination not in self._breakers:
            self._breakers[destination] = Breaker(self._base_seconds, self._cap_seconds)
        return self._breakers[destination]

    def open(self, destination: str) -> bool:
        """Tell whether the destination, or the connection to all of them, is down."""
        return any(breaker.open for breaker in self._of(destination))

    def waiting(self) -> list[tuple[str, Breaker]]:
        """Return the open ones."""
        return [(name, breaker) for name, breaker in self._breakers.items() if breaker.open]

    @property
    def calm(self) -> bool:
        """Tell whether nothing has gone wrong lately; then nobody need ask about single events."""
        return not self._breakers

    def suspected(self, event_id: UUID) -> bool:
        """Tell whether the event must go out alone."""
        return bool(self._breakers) and any(event_id in breaker.suspects for breaker in self._breakers.values())

    def falls(self, event_id: UUID) -> int:
        """Return how often the event failed alone. Those with the fewest falls go first, or one that always fails could
        keep everybody from their turn, and with it the proof that the destination works."""
        return max((breaker.falls.get(event_id, 0) for breaker in self._breakers.values()), default=0)

    def guilty(self, event_id: UUID) -> str | None:
        """Return the error to charge the event with, if it has earned its strikes."""
        return next((breaker.error for breaker in self._breakers.values() if breaker.guilty(event_id)), None)

    def confirmed(self, destination: str, event_id: UUID) -> None:
        """A message got through to a destination, and so through the connection. Breakers that are done are dropped."""
        for breaker in self._of(destination):
            breaker.confirmed(event_id)
        self._breakers = {name: b for name, b in self._breakers.items() if b.open or b.suspects}

    def forget(self, event_id: UUID) -> None:
        """The event is settled."""
        for breaker in self._breakers.values():
            breaker.forget(event_id)

    def forget_lanes(self, lanes: set[int]) -> None:
        """Lanes were given up or lost. Closed breakers without suspects are dropped with them, to stay bounded."""
        for breaker in self._breakers.values():
            breaker.forget_lanes(lanes)
        self._breakers = {n: b for n, b in self._breakers.items() if b.open or b.suspects}

    def _of(self, destination: str) -> list[Breaker]:
        return [self._breakers[name] for name in dict.fromkeys(("", destination)) if name in self._breakers]
