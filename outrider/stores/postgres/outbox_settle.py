"""Settling of mixed outcomes: one transaction, which starts with a lock on its lanes.

The order matters: rows first, then streams to block, and last streams to release, because only the written rows show
whether a stream still has waiting events.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from datetime import datetime
from operator import attrgetter
from typing import TYPE_CHECKING, Any, NamedTuple
from uuid import UUID

from outrider.brokers.base import Confirmed
from outrider.event import SKIPPED_TYPE, OnDeadLetter, OutboxRow, ResolvedRow, Stream
from outrider.outbox import model
from outrider.outbox.model import BlockReason, DeadLettered, Defer, Lease, Park, Retry, Settlement, Settlements, State
from outrider.stores.postgres.database import fence, touched

if TYPE_CHECKING:
    from outrider.stores.postgres.outbox import PostgresStore

_EVENT_ID = attrgetter("event_id")


class PostgresBlock(NamedTuple):
    """A row for `outbox_blocked`: due after a delay, at a time, or (neither) when an operator acts."""

    stream: Stream
    head: int | None
    cause: BlockReason
    delay_seconds: float | None
    at: datetime | None


class DeadLetterRow(NamedTuple):
    """An event to be moved to the dead letters."""

    event_id: UUID
    position: int
    stream: Stream
    outcome: DeadLettered
    event_type: str
    sequence: int | None

    @classmethod
    def of(cls, settlement: Settlement) -> DeadLetterRow:
        event, stream, outcome = settlement
        assert isinstance(outcome, DeadLettered)
        return cls(event.event_id, event.position, stream, outcome, event.event_type, event.sequence)

    @property
    def leaves_marker(self) -> bool:
        """Whether the event leaves a marker. A skipped event with a sequence number does, so consumers see no gap."""
        numbered = self.sequence is not None and self.event_type != SKIPPED_TYPE
        return numbered and self.outcome.policy is OnDeadLetter.SKIP


async def confirm(store: PostgresStore, conn: Any, lease: Lease, events: Sequence[OutboxRow]) -> int:
    """Archive or delete confirmed events of lanes that the lease still owns; return their number."""
    ids = list(map(_EVENT_ID, events))
    if not store.archive:
        return touched(await conn.execute(store.sql["confirm_delete"], *fence(lease), ids))
    resolved = [(event.event_id, event.topic) for event in events if type(event) is ResolvedRow]
    topics = _columns(resolved) if resolved else ([], [])
    return touched(await conn.execute(store.sql["confirm_archive"], *fence(lease), ids, *topics))


async def settle(store: PostgresStore, lease: Lease, settlements: Settlements) -> int:
    """Write any mixture of outcomes; return the number of applied outcomes."""
    async with store.database.transaction() as conn:
        owned = {row["lane"] for row in await conn.fetch(store.sql["lock_lanes"], *fence(lease))}
        mine = [settlement for settlement in settlements.outcomes() if settlement.stream.lane in owned]
        writing = PostgresSettlement(store, conn)
        applied = await writing.confirm([s for s in mine if isinstance(s.outcome, Confirmed)], lease)
        applied += await writing.retry(mine)
        applied += await writing.wait([s for s in mine if isinstance(s.outcome, Defer | Park)])
        applied += await writing.dead_letter([DeadLetterRow.of(s) for s in mine if isinstance(s.outcome, DeadLettered)])
        writing.maybe_empty += [stream for stream in settlements.emptied if stream.lane in owned]
        await writing.streams()
        if values := settlements.raised_values(owned):
            columns = zip(*((rule, *stream, value) for rule, stream, value in values), strict=True)
            await conn.execute(store.sql["raise_values"], *map(list, columns))
        return applied


class PostgresSettlement:
    """One settling transaction and its streams."""

    def __init__(self, store: PostgresStore, conn: Any) -> None:
        self.store, self.sql, self.conn = store, store.sql, conn
        self.blocks: dict[Stream, PostgresBlock] = {}
        self.maybe_empty: list[Stream] = []
        self.parked: list[Stream] = []

    async def confirm(self, settlements: list[Settlement], lease: Lease) -> int:
        """Remove delivered events from the outbox. A stream with waiting events may be empty after that."""
        if not settlements:
            return 0
        self.maybe_empty += [s.stream for s in settlements if s.event.state in model.WAITING]
        return await confirm(self.store, self.conn, lease, [s.event for s in settlements])

    async def retry(self, settlements: list[Settlement]) -> int:
        """Count an attempt and block the stream until the next attempt."""
        tried = [(event, stream, outcome) for event, stream, outcome in settlements if isinstance(outcome, Retry)]
        rows = [(event.event_id, stream.topic, json.dumps(outcome.failure)) for event, stream, outcome in tried]
        written = await self._write("retry", rows)
        for event, stream, outcome in tried:
            if event.event_id in written:
                self._block(stream, event.position, BlockReason.FAILED, outcome.delay_seconds)
        return len(written)

    async def wait(self, settlements: list[Settlement]) -> int:
        """Block the streams of deferred events, and park other events."""
        rows = [(s.event.event_id, s.stream.topic, _waiting_state(s)) for s in settlements]
        written = await self._write("wait", rows)
        for event, stream, outcome in settlements:
            if event.event_id in written and isinstance(outcome, Park):
                self.parked.append(stream)
            elif event.event_id in written and isinstance(outcome, Defer):
                at = event.available_at if outcome.delay_seconds is None else None
                self._block(stream, event.position, BlockReason.DEFERRED, outcome.delay_seconds or 0.0, at)
        return len(written)

    async def dead_letter(self, dead_letters: list[DeadLetterRow], *, spent: int = 1) -> int:
        """Move events to the dead letters. The stream is blocked, or continues with a marker."""
        rows = [
            (b.event_id, b.stream.topic, b.outcome.reason, json.dumps(b.outcome.failure), b.outcome.policy, spent)
            for b in dead_letters
        ]
        written = await self._write("dead_letter", rows)
        dead_lettered = [dead_letter for dead_letter in dead_letters if dead_letter.event_id in written]
        marked = [dead_letter for dead_letter in dead_lettered if dead_letter.leaves_marker]
        if marked:
            await self.conn.execute(self.sql["mark_skipped"], *_columns((b.event_id, b.stream.topic) for b in marked))
        removed = [dead_letter.event_id for dead_letter in dead_lettered if not dead_letter.leaves_marker]
        if removed:
            await self.conn.execute(self.sql["remove_dead_lettered"], removed)
        for dead_letter in dead_lettered:
            self._after(dead_letter)
        return len(dead_lettered)

    def _after(self, dead_letter: DeadLetterRow) -> None:
        if dead_letter.outcome.policy is OnDeadLetter.BLOCK:
            self._block(dead_letter.stream, dead_letter.position, BlockReason.DEAD_LETTER)
        elif dead_letter.leaves_marker:
            self._block(dead_letter.stream, dead_letter.position, BlockReason.FAILED, 0.0)
        else:
            self._block(dead_letter.stream, None, BlockReason.DRAINING, 0.0)
            self.maybe_empty.append(dead_letter.stream)

    async def streams(self) -> None:
        """Block streams; then release streams without waiting events."""
        if self.blocks:
            blocks = [self.blocks[stream] for stream in sorted(self.blocks)]
            rows = [(*b.stream, b.head, b.cause, b.delay_seconds, b.at) for b in blocks]
            await self.conn.execute(self.sql["block"], *_columns(rows))
        if self.parked:
            await self.conn.execute(self.sql["ensure_blocked"], *_columns(sorted(set(self.parked))))
        blocked_anew = {stream for stream, block in self.blocks.items() if block.cause is not BlockReason.DRAINING}
        maybe_empty = sorted(set(self.maybe_empty) - blocked_anew)
        if maybe_empty:
            await self.conn.execute(self.sql["unblock"], *_columns(maybe_empty))
            await self.conn.execute(self.sql["drain"], *_columns(maybe_empty))

    def _block(
        self,
        stream: Stream,
        head: int | None,
        cause: BlockReason,
        delay: float | None = None,
        at: datetime | None = None,
    ) -> None:
        self.blocks[stream] = PostgresBlock(stream, head, cause, None if at else delay, at)

    async def _write(self, verb: str, rows: list[Any]) -> set[UUID]:
        if not rows:
            return set()
        return {row["event_id"] for row in await self.conn.fetch(self.sql[verb], *_columns(rows))}


def _columns(rows: Iterable[Sequence[Any]]) -> list[list[Any]]:
    return [list(column) for column in zip(*rows, strict=True)]


def _waiting_state(settlement: Settlement) -> State:
    return State.PARKED if isinstance(settlement.outcome, Park) else State.DEFERRED
