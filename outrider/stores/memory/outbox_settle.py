"""Settling in memory: rows first, then streams to block, and last streams to release.

The order matters: only the written rows show whether a stream still has waiting events.
"""

from __future__ import annotations

from datetime import timedelta
from typing import TYPE_CHECKING

from outrider.brokers.base import Confirmed
from outrider.event import OnDeadLetter, Stream
from outrider.outbox import model
from outrider.outbox.model import BlockReason, DeadLettered, Defer, JournalKind, Park, Retry, Settlement, State
from outrider.retry import ATTEMPTS_MAX
from outrider.stores.memory.journal import add
from outrider.stores.memory.tables import BlockRow, DeadRow, OutboxTableRow, is_claimed, skipped_marker

if TYPE_CHECKING:
    from outrider.stores.memory.outbox import MemoryStore


class MemorySettlement:
    """One settling write and its streams."""

    def __init__(self, store: MemoryStore) -> None:
        self._store, self._tables, self._now = store, store.tables, store.clock.now()
        self._blocks: dict[Stream, BlockRow] = {}
        self._maybe_empty: dict[Stream, None] = {}
        self._parked: dict[Stream, None] = {}

    def apply(self, settlement: Settlement) -> bool:
        """Write one outcome, if the row exists and has no valid optimistic claim."""
        event, stream, outcome = settlement
        row = self._tables.rows.get(event.position)
        if row is None or self._claimed(row):
            return False
        row.stream = stream
        match outcome:
            case Confirmed():
                if row.event.state in model.WAITING:
                    self.loosen(stream)
                self._store.depart(row, self._now)
            case Retry():
                self._retry(row, outcome)
            case Defer():
                self._defer(row, outcome)
            case Park():
                self._tables.transition(event.position, State.PARKED)
                self._parked[stream] = None
            case DeadLettered():
                self.dead_letter(row, outcome, attempts=_attempts(row))
        return True

    def _claimed(self, row: OutboxTableRow) -> bool:
        return is_claimed(row, self._now)

    def _retry(self, row: OutboxTableRow, outcome: Retry) -> None:
        row.failure = outcome.failure
        suspect = outcome.failure.get("kind") == "unknown"
        self._tables.transition(row.event.position, State.FAILED, attempts=_attempts(row), suspect=suspect)
        until = self._now + timedelta(seconds=outcome.delay_seconds)
        self._blocks[row.stream] = BlockRow(BlockReason.FAILED, row.event.position, until)

    def _defer(self, row: OutboxTableRow, outcome: Defer) -> None:
        self._tables.transition(row.event.position, State.DEFERRED)
        own = row.event.available_at or self._now
        until = own if outcome.delay_seconds is None else self._now + timedelta(seconds=outcome.delay_seconds)
        self._blocks[row.stream] = BlockRow(BlockReason.DEFERRED, row.event.position, until)

    def dead_letter(self, row: OutboxTableRow, outcome: DeadLettered, *, attempts: int) -> None:
        """Move a row to the dead letters. Under `skip`, a numbered event leaves a marker in its position."""
        self._tables.take(row.event.position)
        dead = OutboxTableRow(row.event._replace(attempts=attempts), row.stream, row.priority, failure=outcome.failure)
        self._tables.dead[row.event.event_id] = DeadRow(dead, outcome.reason, outcome.policy, self._now)
        add(self._store, JournalKind.DEAD_LETTER, [row.event.event_id])
        if outcome.policy is OnDeadLetter.BLOCK:
            self._blocks[row.stream] = BlockRow(BlockReason.DEAD_LETTER, row.event.position, None)
        elif marker := skipped_marker(row):
            self._store.insert(marker)
            self._blocks[row.stream] = BlockRow(BlockReason.FAILED, row.event.position, self._now)
        else:
            self._blocks[row.stream] = BlockRow(BlockReason.DRAINING, None, self._now)
            self.loosen(row.stream)

    def loosen(self, stream: Stream) -> None:
        """Mark a stream that may have no waiting events any more."""
        self._maybe_empty[stream] = None

    def streams(self) -> None:
        """Block streams; then release streams without waiting events.

        Only an operator releases a block by a dead letter.
        """
        for stream, block in self._blocks.items():
            current = self._tables.blocked.get(stream)
            if (
                current is None
                or current.cause is not BlockReason.DEAD_LETTER
                or block.cause is BlockReason.DEAD_LETTER
            ):
                self._tables.blocked[stream] = block
        for stream in self._parked:
            # A parked event is found through its blocked stream, even if the blocking event is gone.
            self._tables.blocked.setdefault(stream, BlockRow(BlockReason.DRAINING, None, self._now))
        for stream in self._maybe_empty:
            block_anew = self._blocks.get(stream)
            if block_anew is None or block_anew.cause is BlockReason.DRAINING:
                self._store.resolve(stream)


def _attempts(row: OutboxTableRow) -> int:
    return min(row.event.attempts + 1, ATTEMPTS_MAX)
