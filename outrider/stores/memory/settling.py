"""Settling in memory: rows first, then the streams that become blocked, and last the streams that may go.

The order matters: whether anything of a stream waits can only be seen after its rows are written.
"""

from __future__ import annotations

from datetime import timedelta
from typing import TYPE_CHECKING

from outrider import lifecycle
from outrider.event import Stream
from outrider.lifecycle import State
from outrider.outcome import Bury, Confirmed, Defer, Park, Policy, Retry
from outrider.store import Cause, Settlement
from outrider.stores.memory.tables import Block, DeadRow, Row, skipped_marker

if TYPE_CHECKING:
    from outrider.stores.memory.store import MemoryStore


class Settling:
    """One settling write, and the streams it touches."""

    def __init__(self, store: MemoryStore) -> None:
        self._store, self._tables, self._now = store, store.tables, store.clock.now()
        self._blocks: dict[Stream, Block] = {}
        self._loose: dict[Stream, None] = {}
        self._parked: dict[Stream, None] = {}

    def apply(self, settlement: Settlement) -> bool:
        """Write one outcome, if the row is there and not held by its writer."""
        event, stream, outcome = settlement
        row = self._tables.rows.get(event.position)
        if row is None or self._held(row):
            return False
        row.stream = stream
        match outcome:
            case Confirmed():
                if row.event.state in lifecycle.WAITING:
                    self.loosen(stream)
                self._store.depart(row, self._now)
            case Retry():
                self._retry(row, outcome)
            case Defer():
                self._defer(row, outcome)
            case Park():
                self._tables.move(event.position, State.PARKED)
                self._parked[stream] = None
            case Bury():
                self.bury(row, outcome, attempts=row.event.attempts + 1)
        return True

    def _held(self, row: Row) -> bool:
        optimistic = row.event.state == State.OPTIMISTIC
        return optimistic and row.held_until is not None and row.held_until > self._now

    def _retry(self, row: Row, outcome: Retry) -> None:
        row.failure = outcome.failure
        suspect = outcome.failure.get("kind") == "unresolved"
        self._tables.move(row.event.position, State.FAILED, attempts=row.event.attempts + 1, suspect=suspect)
        until = self._now + timedelta(seconds=outcome.delay_seconds)
        self._blocks[row.stream] = Block(Cause.FAILED, row.event.position, until)

    def _defer(self, row: Row, outcome: Defer) -> None:
        self._tables.move(row.event.position, State.DEFERRED)
        own = row.event.available_at or self._now
        until = own if outcome.delay_seconds is None else self._now + timedelta(seconds=outcome.delay_seconds)
        self._blocks[row.stream] = Block(Cause.DEFERRED, row.event.position, until)

    def bury(self, row: Row, outcome: Bury, *, attempts: int) -> None:
        """Move a row to the dead letters; under `skip` a numbered event leaves a marker in its place."""
        self._tables.take(row.event.position)
        dead = Row(row.event._replace(attempts=attempts), row.stream, row.priority, failure=outcome.failure)
        self._tables.dead[row.event.event_id] = DeadRow(dead, outcome.reason, outcome.policy, self._now)
        if outcome.policy is Policy.HOLD:
            self._blocks[row.stream] = Block(Cause.HELD, row.event.position, None)
        elif marker := skipped_marker(row):
            self._tables.put(marker)
            self._blocks[row.stream] = Block(Cause.FAILED, row.event.position, self._now)
        else:
            self._blocks[row.stream] = Block(Cause.DRAINING, None, self._now)
            self.loosen(row.stream)

    def loosen(self, stream: Stream) -> None:
        """The stream may have nothing left to wait for."""
        self._loose[stream] = None

    def streams(self) -> None:
        """Write what is blocked now; then let go what has nothing left waiting. Only a person lifts a hold."""
        for stream, block in self._blocks.items():
            current = self._tables.blocked.get(stream)
            if current is None or current.cause is not Cause.HELD or block.cause is Cause.HELD:
                self._tables.blocked[stream] = block
        for stream in self._parked:
            # A parked event is found through its blocked stream, even if the head it was parked behind has vanished.
            self._tables.blocked.setdefault(stream, Block(Cause.DRAINING, None, self._now))
        for stream in self._loose:
            block_anew = self._blocks.get(stream)
            if block_anew is None or block_anew.cause is Cause.DRAINING:
                self._store.resolve(stream)
