"""The memory store's tables: plain dictionaries, with sorted indexes where the SQL stores have theirs."""

from __future__ import annotations

from bisect import bisect_left, insort
from collections import defaultdict
from dataclasses import dataclass, field
from datetime import datetime
from typing import Any
from uuid import UUID

from outrider import lifecycle
from outrider.event import SKIPPED_TYPE, StagedEvent, Stream, uuid7
from outrider.lifecycle import State
from outrider.store import Cause, Hold


@dataclass(slots=True)
class Row:
    """One undelivered event, and what only the store knows of it."""

    event: StagedEvent
    stream: Stream
    priority: int
    held_by: str | None = None
    held_until: datetime | None = None
    failure: dict[str, Any] | None = None


@dataclass(slots=True)
class DeadRow:
    """One dead letter."""

    row: Row
    reason: str
    policy: str
    buried_at: datetime


@dataclass(slots=True)
class Block:
    """Why a stream waits, behind which event, and until when (None: until a person acts)."""

    cause: Cause
    head: int | None
    until: datetime | None


@dataclass(slots=True)
class LaneRow:
    """Who owns a lane, and how often it has changed hands."""

    owner: str | None = None
    epoch: int = 0


class Shelf:
    """Positions in order: what a partial index is to the SQL stores."""

    def __init__(self) -> None:
        self._positions: list[int] = []

    def add(self, position: int) -> None:
        insort(self._positions, position)

    def remove(self, position: int) -> None:
        at = bisect_left(self._positions, position)
        if at < len(self._positions) and self._positions[at] == position:
            del self._positions[at]

    def first(self, count: int) -> list[int]:
        return self._positions[:count]

    def __len__(self) -> int:
        return len(self._positions)


@dataclass(slots=True)
class Tables:
    """Everything the store holds."""

    rows: dict[int, Row] = field(default_factory=dict)
    ids: dict[UUID, int] = field(default_factory=dict)
    fetchable: dict[int, Shelf] = field(default_factory=lambda: defaultdict(Shelf))
    waiting: dict[Stream, Shelf] = field(default_factory=lambda: defaultdict(Shelf))
    blocked: dict[Stream, Block] = field(default_factory=dict)
    archive: dict[UUID, tuple[Row, datetime]] = field(default_factory=dict)
    dead: dict[UUID, DeadRow] = field(default_factory=dict)
    counters: dict[Stream, int] = field(default_factory=dict)
    lanes: dict[int, LaneRow] = field(default_factory=dict)
    relays: dict[str, datetime] = field(default_factory=dict)
    duties: dict[str, datetime] = field(default_factory=dict)
    operations: list[dict[str, Any]] = field(default_factory=list)

    def known(self, event_id: UUID) -> bool:
        return event_id in self.ids or event_id in self.archive or event_id in self.dead

    def put(self, row: Row) -> None:
        self.rows[row.event.position] = row
        self.ids[row.event.event_id] = row.event.position
        self._shelf(row).add(row.event.position)

    def take(self, position: int) -> Row:
        row = self.rows.pop(position)
        del self.ids[row.event.event_id]
        self._shelf(row).remove(position)
        if row.stream in self.waiting and not self.waiting[row.stream]:
            del self.waiting[row.stream]
        return row

    def move(self, position: int, state: State, **changes: Any) -> None:
        """Change a row's state, which moves it between the indexes."""
        row = self.take(position)
        row.event = row.event._replace(state=state, **changes)
        self.put(row)

    def _shelf(self, row: Row) -> Shelf:
        if row.event.state in lifecycle.FETCHABLE:
            return self.fetchable[row.event.lane]
        return self.waiting[row.stream]


def holds(row: Row, hold: Hold, now: datetime) -> bool:
    """Tell whether the row is still the writer's own."""
    mine = row.event.state == State.OPTIMISTIC and row.held_by == hold.owner
    return mine and row.held_until is not None and row.held_until > now


def skipped_marker(row: Row) -> Row | None:
    """Make what is published in place of a skipped event: same place and number, no content. None if unnumbered."""
    event = row.event
    if event.sequence is None or event.event_type == SKIPPED_TYPE:
        return None
    marker = event._replace(
        event_id=uuid7(),
        event_type=SKIPPED_TYPE,
        payload=b"null",
        headers=b'{"skipped": "%s"}' % str(event.event_id).encode(),
        attempts=0,
        state=State.FAILED,
        available_at=None,
        suspect=False,
    )
    return Row(marker, row.stream, row.priority)
