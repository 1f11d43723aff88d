"""The memory inbox's tables."""

from __future__ import annotations

from dataclasses import dataclass, field
from datetime import datetime
from uuid import UUID

from outrider.delivery import Arrival, InboxStream
from outrider.inbox_store import Buried, Standing


@dataclass(frozen=True, slots=True)
class Receipt:
    """That an event was handled."""

    arrival: Arrival
    received_at: datetime
    seconds: float | None


@dataclass(frozen=True, slots=True)
class StreamRow:
    """Where a stream stands, and since when for this cause."""

    standing: Standing
    since: datetime


@dataclass(frozen=True, slots=True)
class DeadArrival:
    """A dead letter of a consumer."""

    consumer: str
    arrival: Arrival
    conclusion: Buried
    buried_at: datetime


@dataclass(slots=True)
class InboxTables:
    """Everything the memory inbox holds. Waiting events and dead letters share their numbers, to keep their places."""

    receipts: dict[tuple[str, UUID], Receipt] = field(default_factory=dict)
    streams: dict[tuple[str, InboxStream], StreamRow] = field(default_factory=dict)
    waiting: dict[int, tuple[str, Arrival]] = field(default_factory=dict)
    dead: dict[int, DeadArrival] = field(default_factory=dict)
    number: int = 0

    def next_number(self) -> int:
        """Take the next number."""
        self.number += 1
        return self.number

    def of(self, consumer: str) -> list[tuple[InboxStream, StreamRow]]:
        """Return the streams of a consumer."""
        return [(stream, row) for (name, stream), row in self.streams.items() if name == consumer]

    def waiting_of(self, consumer: str, stream: InboxStream, by_sequence: bool) -> list[Arrival]:
        """Return the waiting events of a stream, in their order."""
        found = [
            arrival
            for _, (name, arrival) in sorted(self.waiting.items())
            if name == consumer and arrival.stream == stream
        ]
        return sorted(found, key=lambda arrival: arrival.sequence or 0) if by_sequence else found

    def park(self, consumer: str, arrival: Arrival) -> None:
        """Let an arrival wait, once."""
        known = {(name, waiting.event_id) for name, waiting in self.waiting.values()}
        if arrival.waiting_id is None and (consumer, arrival.event_id) not in known:
            number = self.next_number()
            self.waiting[number] = (consumer, arrival._replace(waiting_id=number))
