"""Circuit breakers and poison detection: an outage counts no attempt, and a poison message is found. Pure.

Every destination has a `CircuitBreaker` and a `PoisonDetector`; the empty name is the connection to the broker. A
failure that hits several messages at once proves nothing about a single message. All messages with an unknown result
become suspects. After a successful probe the relay publishes suspects in isolated groups: first one event, twice as
many after each success, half as many after each failure. An isolated failure of a single event becomes a strike only
when the destination is known to work: another message is confirmed, or a probe succeeds while there is a single such
failure. After three strikes the event counts as poison.

A destination is stopped from the first message without an answer on, before the breaker opens. After a successful probe
the destination is half-open until no suspect is left: its events go out in isolated groups, one group at a time.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from uuid import UUID

from outrider.circuit_breaker import CircuitBreaker
from outrider.event import OutboxRow

STRIKES = 3

GROUP_MAX = 4096

CONNECTION_SECONDS_MAX = 4.0
"""The longest pause between probes of the connection. Such a probe is cheap, and it sends no message."""


@dataclass(slots=True)
class PoisonDetector:
    """Finds the events that break a destination, by publishing suspects in isolation."""

    suspects: dict[UUID, OutboxRow] = field(default_factory=dict)
    isolated_failures: dict[UUID, int] = field(default_factory=dict)
    strikes: dict[UUID, int] = field(default_factory=dict)
    group_max: int = 1
    _unproven: set[UUID] = field(default_factory=set)
    _is_numbered: set[UUID] = field(default_factory=set)

    def failed(self, events: Iterable[OutboxRow], *, isolated: bool) -> None:
        """Suspect the events that were in flight when the destination failed."""
        found = {event.event_id: event for event in events}
        self.suspects.update(found)
        if isolated:
            self._unproven |= found.keys()
            self._is_numbered -= found.keys()
            self.isolated_failures.update((known, self.isolated_failures.get(known, 0) + 1) for known in found)

    def group_size(self, event_id: UUID) -> int:
        """Return how many suspects may be published together with a suspect; one that failed alone stays alone."""
        return 1 if event_id in self.isolated_failures else self.group_max

    def grow(self) -> None:
        """Double the group, after all events of a group are confirmed."""
        self.group_max = min(self.group_max * 2, GROUP_MAX)

    def shrink(self) -> None:
        """Halve the group, after a failure."""
        self.group_max = max(self.group_max // 2, 1)

    def outage(self) -> None:
        """Drop unproven failures: after a failed probe the destination is known to be down for every message."""
        self._unproven.clear()
        self._is_numbered.clear()

    def probe_passed(self) -> None:
        """Count a strike if exactly one event failed in isolation; several failures prove nothing."""
        if len(self._unproven) == 1:
            self._strike(self._unproven)
            self._is_numbered |= self._unproven

    def confirmed(self, event_id: UUID) -> None:
        """Count strikes for all other isolated failures: the confirmed message shows a working destination."""
        self._strike(self._unproven - {event_id})
        self.outage()
        self.clear(event_id)

    def is_poison(self, event_id: UUID) -> bool:
        """Return whether the event has reached the number of strikes."""
        return self.strikes.get(event_id, 0) >= STRIKES

    def clear(self, event_id: UUID) -> None:
        """Forget an event that is settled, or owned by another relay now."""
        self.suspects.pop(event_id, None)
        self.isolated_failures.pop(event_id, None)
        self.strikes.pop(event_id, None)
        self._unproven.discard(event_id)
        self._is_numbered.discard(event_id)

    def clear_lanes(self, lanes: set[int]) -> None:
        """Forget the events of lanes that the relay has lost or released."""
        for event_id in [event_id for event_id, event in self.suspects.items() if event.lane in lanes]:
            self.clear(event_id)

    def _strike(self, event_ids: set[UUID]) -> None:
        # A failure is a single strike, even if a probe and then a confirmed message both prove it.
        for event_id in event_ids - self._is_numbered:
            self.strikes[event_id] = self.strikes.get(event_id, 0) + 1


@dataclass(slots=True)
class Destination:
    """The breaker and the suspects of a destination, and the number of its messages without an answer."""

    breaker: CircuitBreaker
    detector: PoisonDetector = field(default_factory=PoisonDetector)
    unanswered: int = 0
    unanswered_since: float = 0.0


class CircuitBreakers:
    """The destinations of a relay that have failed lately.

    >>> CircuitBreakers().is_open("orders")
    False
    """

    def __init__(self, base_seconds: float = 0.5, cap_seconds: float = 30.0) -> None:
        self._base_seconds, self._cap_seconds = base_seconds, cap_seconds
        self._destinations: dict[str, Destination] = {}

    @property
    def is_healthy(self) -> bool:
        """Return whether no destination has failed lately; then events need no inspection."""
        return not self._destinations

    def get(self, name: str) -> Destination:
        """Return a destination; a new destination has a closed breaker and no suspects."""
        if name not in self._destinations:
            cap = self._cap_seconds if name else min(self._cap_seconds, CONNECTION_SECONDS_MAX)
            self._destinations[name] = Destination(CircuitBreaker(self._base_seconds, cap))
        return self._destinations[name]

    def is_open(self, name: str) -> bool:
        """Return whether the destination, or the connection to all destinations, is down."""
        return any(destination.breaker.is_open for destination in self._with_connection(name))

    def is_stopped(self, name: str) -> bool:
        """Return whether no message may go to the destination: it is down, or has not answered yet."""
        found = self._destinations.get(name)
        return self.is_open(name) or (found is not None and found.unanswered > 0)

    def is_half_open(self, name: str) -> bool:
        """Return whether the destination, which is not the connection, has failed and is not known to work yet."""
        return bool(name) and name in self._destinations

    @property
    def unanswered_destinations(self) -> int:
        """Return the number of destinations with messages without an answer."""
        return sum(found.unanswered > 0 for found in self._destinations.values())

    def wait_seconds(self, name: str, now: float) -> float:
        """Return the seconds to wait before the next look at a stopped destination.

        Without an answer the wait grows with the time that has passed: few writes for a long silence, and a short delay
        after a short silence.
        """
        found = self.get(name)
        if found.breaker.retry_at is not None:
            return max(self._base_seconds, found.breaker.retry_at - now)
        return max(self._base_seconds, now - found.unanswered_since) if found.unanswered else self._base_seconds

    def unanswered(self, name: str, count: int, now: float) -> None:
        """Stop a destination that has not answered these messages yet."""
        found = self.get(name)
        if not found.unanswered:
            found.unanswered_since = now
        found.unanswered += count

    def answered(self, name: str, count: int) -> None:
        """Record answers, of any kind, to messages that were without an answer."""
        if (found := self._destinations.get(name)) is not None:
            found.unanswered = max(0, found.unanswered - count)

    def open_breakers(self) -> list[tuple[str, CircuitBreaker]]:
        """Return the destinations that wait for a probe."""
        return [(name, found.breaker) for name, found in self._destinations.items() if found.breaker.is_open]

    def fail(
        self,
        name: str,
        events: Iterable[OutboxRow],
        error: str,
        now: float,
        *,
        isolated: bool,
        began: float | None = None,
    ) -> float:
        """Open the breaker of a destination that failed with events in flight; return the seconds to wait.

        `isolated` means that a single event was in flight. Workers report an outage one after the other: only the first
        report counts as a failure, and none does if the publish `began` before the breaker closed.
        """
        destination = self.get(name)
        destination.detector.failed(events, isolated=isolated)
        is_old = began is not None and began < destination.breaker.closed_at
        if not destination.breaker.is_open and not is_old:
            # While the relay searches for a poison message among suspects, a failure is expected.
            destination.breaker.open(error, now, grows=destination.detector.group_max <= 1)
            destination.detector.shrink()
        return max(0.0, (destination.breaker.retry_at or now) - now)

    def probe_failed(self, name: str, error: str, now: float) -> float:
        """Keep a breaker open; return the seconds until the next probe."""
        destination = self.get(name)
        destination.detector.outage()
        destination.breaker.open(error, now)
        return (destination.breaker.retry_at or now) - now

    def probe_passed(self, name: str, now: float = float("-inf")) -> None:
        """Close the breaker of a destination that answers."""
        destination = self.get(name)
        destination.breaker.close(now)
        destination.detector.probe_passed()

    def confirmed(self, name: str, event_id: UUID) -> None:
        """Record a confirmed message: destination and connection work."""
        for destination in self._with_connection(name):
            destination.detector.confirmed(event_id)
            destination.breaker.reset()
        self._drop_healthy()

    def is_suspect(self, event_id: UUID) -> bool:
        """Return whether the event must be published in isolation."""
        return any(event_id in found.detector.suspects for found in self._destinations.values())

    def is_suspect_of(self, name: str, event_id: UUID) -> bool:
        """Return whether the event may have broken the destination."""
        return name in self._destinations and event_id in self._destinations[name].detector.suspects

    def group_size(self, event_id: UUID) -> int:
        """Return how many suspects may be published together with a suspect."""
        detectors = (found.detector for found in self._destinations.values() if event_id in found.detector.suspects)
        return min((detector.group_size(event_id) for detector in detectors), default=1)

    def half_open_group_size(self, name: str, event_id: UUID) -> int:
        """Return how many events may be published together with an event to a half-open destination."""
        found = self._destinations.get(name)
        return GROUP_MAX if found is None else found.detector.group_size(event_id)

    def grow(self, names: Iterable[str]) -> None:
        """Double the groups of destinations, after all events of a group are confirmed."""
        for name in {"", *names} & self._destinations.keys():
            self._destinations[name].detector.grow()

    def grow_from(self, name: str, size: int) -> None:
        """Double the groups of a destination, if a group of the present size is confirmed."""
        found = self._destinations.get(name)
        if found is not None and found.detector.group_max == size:
            found.detector.grow()

    def isolated_failures(self, event_id: UUID) -> int:
        """Return the number of isolated failures of the event.

        Events with the fewest failures go first: an event that always fails could otherwise prevent the success of
        another event, which would prove that the destination works.
        """
        found = (found.detector.isolated_failures.get(event_id, 0) for found in self._destinations.values())
        return max(found, default=0)

    def poison_error(self, event_id: UUID) -> str | None:
        """Return the error to record for an event that counts as poison."""
        destinations = self._destinations.values()
        return next((found.breaker.error for found in destinations if found.detector.is_poison(event_id)), None)

    def clear(self, event_id: UUID) -> None:
        """Forget a settled event."""
        for destination in self._destinations.values():
            destination.detector.clear(event_id)

    def clear_lanes(self, lanes: set[int]) -> None:
        """Forget the events of lost or released lanes. Healthy destinations are dropped, so that memory is bounded."""
        for destination in self._destinations.values():
            destination.detector.clear_lanes(lanes)
        self._drop_healthy()

    def _with_connection(self, name: str) -> list[Destination]:
        return [self._destinations[known] for known in dict.fromkeys(("", name)) if known in self._destinations]

    def _drop_healthy(self) -> None:
        known = self._destinations.items()
        self._destinations = {
            name: each for name, each in known if each.breaker.is_open or each.detector.suspects or each.unanswered
        }
