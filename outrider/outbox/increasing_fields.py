"""Fields that must increase in each stream: a relay compares every value with the last one that was published.

A stream has one relay at a time, and its events are published in order, so the relay is the place where "the value
before" is known. The last value is written in the transaction that settles its event, under the same fence: after a
crash an event is either settled and counted, or neither, and is judged again against the same value.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, field
from uuid import UUID

from outrider.brokers.base import Confirmed
from outrider.errors import InvalidPayload
from outrider.event import DeadLetterReason, OutboxRow, Stream
from outrider.outbox.model import LastValue, Lease, Settlements
from outrider.outbox.store import OutboxStore
from outrider.payload.model import OnInvalid
from outrider.payload.payloads import Payloads


@dataclass(slots=True)
class IncreasingFields:
    """The values of the passes in progress, beside those in the store. The workers of a relay share it.

    A worker has lanes of its own, so no two of them see the same stream.
    """

    payloads: Payloads
    store: OutboxStore
    _last: dict[tuple[str, Stream], int | None] = field(default_factory=dict)
    _accepted: dict[UUID, int] = field(default_factory=dict)
    """The lane of each event that this pass has accepted; an event may be encoded twice."""
    _values: dict[UUID, Sequence[LastValue]] = field(default_factory=dict)
    """The values of accepted events until they are settled: a broker may answer after the pass."""

    def begin(self, lease: Lease) -> None:
        """Begin a pass: forget the values of its lanes, which may be of events that were not published."""
        self._forget(lease.epochs.keys())

    def drop(self, lanes: Collection[int]) -> None:
        """Forget the events of lanes that the relay has lost or released: the next owner judges them."""
        self._forget(lanes)
        self._values = {
            event_id: values for event_id, values in self._values.items() if values[0].stream.lane not in lanes
        }

    def _forget(self, lanes: Collection[int]) -> None:
        self._last = {key: value for key, value in self._last.items() if key[1].lane not in lanes}
        self._accepted = {event_id: lane for event_id, lane in self._accepted.items() if lane not in lanes}

    async def load(self, events: Iterable[OutboxRow]) -> None:
        """Read the last values of the streams of events, unless this pass has read them."""
        wanted: dict[tuple[str, Stream], int | None] = {
            (rule.name, event.stream): None
            for event in events
            for rule in self.payloads.increasing_of(event.event_type)
            if (rule.name, event.stream) not in self._last
        }
        if wanted:
            self._last |= wanted
            self._last |= await self.store.last_values(list(wanted))

    def check(self, event: OutboxRow) -> None:
        """Compare the fields of an event with the values before. Raises InvalidPayload unless the rule only warns."""
        if event.event_id in self._accepted:
            return
        stream = event.stream
        values = self.payloads.increasing_values(event)
        for rule, value in values:
            last = self._last.get((rule.name, stream))
            if last is not None and value <= last:
                problem = f"it is not above the value before, by the rule {rule.name!r}"
                if self.payloads.mode_of(rule) is not OnInvalid.WARN:
                    raise InvalidPayload(rule.path, problem, DeadLetterReason.SCHEMA_VALIDATION_FAILED)
                self.payloads.warn_of(event, f"{rule.path}: {problem}")
        for rule, value in values:
            last = self._last.get((rule.name, stream))
            self._last[rule.name, stream] = value if last is None else max(value, last)
        if values:
            self._accepted[event.event_id] = stream.lane
            self._values[event.event_id] = [LastValue(rule.name, stream, value) for rule, value in values]

    def values_of(self, settlements: Settlements) -> dict[UUID, Sequence[LastValue]]:
        """Return the values of the confirmed events, which the store writes with their outcomes; forget them here."""
        found: dict[UUID, Sequence[LastValue]] = {}
        for event, _, outcome in settlements.outcomes():
            values = self._values.pop(event.event_id, None)
            if values is not None and isinstance(outcome, Confirmed):
                found[event.event_id] = values
        return found
