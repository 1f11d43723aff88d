"""Settling what did not simply go out: one transaction, which starts by locking its lanes.

The order inside matters: rows first, then the streams that become blocked, and last the streams that may go, because
whether anything waits can only be seen after the rows are written.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from datetime import datetime
from typing import TYPE_CHECKING, Any, NamedTuple
from uuid import UUID

from outrider import lifecycle
from outrider.event import SKIPPED_TYPE, Stream
from outrider.lifecycle import State
from outrider.outcome import Bury, Confirmed, Defer, Park, Policy, Retry
from outrider.store import Cause, Lease, Settlement
from outrider.stores.postgres.database import fence, touched

if TYPE_CHECKING:
    from outrider.stores.postgres.store import PostgresStore

STALL_MS = "5000"
"""How long a settling client may stand still before the server frees the lanes it has locked."""


class Block(NamedTuple):
    """A row for `outbox_blocked`: due after a delay, at a time, or (neither) when a person acts."""

    stream: Stream
    head: int | None
    cause: Cause
    delay_seconds: float | None
    at: datetime | None


class Burial(NamedTuple):
    """An event on its way to the dead letters."""

    event_id: UUID
    position: int
    stream: Stream
    outcome: Bury
    event_type: str
    sequence: int | None

    @classmethod
    def of(cls, settlement: Settlement) -> Burial:
        event, stream, outcome = settlement
        assert isinstance(outcome, Bury)
        return cls(event.event_id, event.position, stream, outcome, event.event_type, event.sequence)

    @property
    def leaves_marker(self) -> bool:
        """A numbered event that is skipped leaves its number behind, so that nobody waits for it."""
        numbered = self.sequence is not None and self.event_type != SKIPPED_TYPE
        return numbered and self.outcome.policy is Policy.SKIP


async def settle(
    store: PostgresStore, lease: Lease, settlements: Sequence[Settlement], emptied: Sequence[Stream]
) -> int:
    """Write any mixture of outcomes; return how many were applied."""
    async with store.database.transaction() as conn:
        owned = {row["lane"] for row in await conn.fetch(store.sql["lock_lanes"], *fence(lease), STALL_MS)}
        mine = [settlement for settlement in settlements if settlement.stream.lane in owned]
        writing = Settling(store, conn)
        applied = await writing.confirm([s for s in mine if isinstance(s.outcome, Confirmed)], lease)
        applied += await writing.retry(mine)
        applied += await writing.wait([s for s in mine if isinstance(s.outcome, Defer | Park)])
        applied += await writing.bury([Burial.of(s) for s in mine if isinstance(s.outcome, Bury)])
        writing.loose += [stream for stream in emptied if stream.lane in owned]
        await writing.streams()
        return applied


class Settling:
    """One settling transaction, and the streams it touches."""

    def __init__(self, store: PostgresStore, conn: Any) -> None:
        self.sql, self.archive, self.conn = store.sql, store.archive, conn
        self.blocks: dict[Stream, Block] = {}
        self.loose: list[Stream] = []
        self.parked: list[Stream] = []

    async def confirm(self, settlements: list[Settlement], lease: Lease) -> int:
        """Delivered: out of the outbox. A stream that had been waiting may be empty now."""
        if not settlements:
            return 0
        self.loose += [s.stream for s in settlements if s.event.state in lifecycle.WAITING]
        verb = "confirm_archive" if self.archive else "confirm_delete"
        ids = [s.event.event_id for s in settlements]
        return touched(await self.conn.execute(self.sql[verb], *fence(lease), ids))

    async def retry(self, settlements: list[Settlement]) -> int:
        """An attempt was spent: the stream waits for the next one."""
        tried = [(event, stream, outcome) for event, stream, outcome in settlements if isinstance(outcome, Retry)]
        rows = [(event.event_id, stream.topic, json.dumps(outcome.failure)) for event, stream, outcome in tried]
        written = await self._write("retry", rows)
        for event, stream, outcome in tried:
            if event.event_id in written:
                self._block(stream, event.position, Cause.FAILED, outcome.delay_seconds)
        return len(written)

    async def wait(self, settlements: list[Settlement]) -> int:
        """Deferred heads block their stream; parked followers only join it."""
        rows = [(s.event.event_id, s.stream.topic, _waiting_state(s)) for s in settlements]
        written = await self._write("wait", rows)
        for event, stream, outcome in settlements:
            if event.event_id in written and isinstance(outcome, Park):
                self.parked.append(stream)
            elif event.event_id in written and isinstance(outcome, Defer):
                at = event.available_at if outcome.delay_seconds is None else None
                self._block(stream, event.position, Cause.DEFERRED, outcome.delay_seconds or 0.0, at)
        return len(written)

    async def bury(self, burials: list[Burial], *, spent: int = 1) -> int:
        """To the dead letters: the stream is held, or goes on past a marker."""
        rows = [
            (b.event_id, b.stream.topic, b.outcome.reason, json.dumps(b.outcome.failure), b.outcome.policy, spent)
            for b in burials
        ]
        written = await self._write("bury", rows)
        buried = [burial for burial in burials if burial.event_id in written]
        marked = [burial for burial in buried if burial.leaves_marker]
        if marked:
            await self.conn.execute(self.sql["mark_skipped"], *_columns((b.event_id, b.stream.topic) for b in marked))
        gone = [burial.event_id for burial in buried if not burial.leaves_marker]
        if gone:
            await self.conn.execute(self.sql["unplace"], gone)
        for burial in buried:
            self._after(burial)
        return len(buried)

    def _after(self, burial: Burial) -> None:
        if burial.outcome.policy is Policy.HOLD:
            self._block(burial.stream, burial.position, Cause.HELD)
        elif burial.leaves_marker:
            self._block(burial.stream, burial.position, Cause.FAILED, 0.0)
        else:
            self._block(burial.stream, None, Cause.DRAINING, 0.0)
            self.loose.append(burial.stream)

    async def streams(self) -> None:
        """Write what is blocked now; then let go what has nothing left waiting."""
        if self.blocks:
            blocks = [self.blocks[stream] for stream in sorted(self.blocks)]
            rows = [(*b.stream, b.head, b.cause, b.delay_seconds, b.at) for b in blocks]
            await self.conn.execute(self.sql["block"], *_columns(rows))
        if self.parked:
            await self.conn.execute(self.sql["ensure_blocked"], *_columns(sorted(set(self.parked))))
        blocked_anew = {stream for stream, block in self.blocks.items() if block.cause is not Cause.DRAINING}
        loose = sorted(set(self.loose) - blocked_anew)
        if loose:
            await self.conn.execute(self.sql["let_go"], *_columns(loose))
            await self.conn.execute(self.sql["keep_draining"], *_columns(loose))

    def _block(
        self, stream: Stream, head: int | None, cause: Cause, delay: float | None = None, at: datetime | None = None
    ) -> None:
        self.blocks[stream] = Block(stream, head, cause, None if at else delay, at)

    async def _write(self, verb: str, rows: list[Any]) -> set[UUID]:
        if not rows:
            return set()
        return {row["event_id"] for row in await self.conn.fetch(self.sql[verb], *_columns(rows))}


def _columns(rows: Iterable[Sequence[Any]]) -> list[list[Any]]:
    return [list(column) for column in zip(*rows, strict=True)]


def _waiting_state(settlement: Settlement) -> State:
    return State.PARKED if isinstance(settlement.outcome, Park) else State.DEFERRED
