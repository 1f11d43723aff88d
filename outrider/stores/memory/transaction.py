"""A business transaction on the memory store: staged rows appear at commit, in positions taken when they were staged.

It keeps the rules of a SQL transaction that matter here: stream counters and event ids are locked until the end, a
savepoint can be rolled back, and a transaction that commits late brings positions lower than those already visible.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Hashable
from contextlib import asynccontextmanager
from datetime import datetime, timedelta
from typing import TYPE_CHECKING
from uuid import UUID

from outrider.event import Readiness, StagedEvent, Stream, lane_of
from outrider.lifecycle import State
from outrider.store import Draft, Drafts, Hold, Placed
from outrider.stores.memory.tables import Row

if TYPE_CHECKING:
    from outrider.stores.memory.store import MemoryStore


class MemoryTransaction:
    """An open transaction; get one from `MemoryStore.transaction()`."""

    def __init__(self, store: MemoryStore) -> None:
        self.store = store
        self.open = True
        self.ended = asyncio.Event()
        self._rows: dict[UUID, Row] = {}
        self._counters: dict[Stream, int] = {}
        self.on_commit: list[Callable[[], None]] = []

    def commit(self) -> None:
        """Make everything staged visible, at once."""
        tables = self.store.tables
        for row in self._rows.values():
            tables.put(row)
        tables.counters.update(self._counters)
        for write in self.on_commit:
            write()
        self._end()

    def rollback(self) -> None:
        """Forget everything staged."""
        self._end()

    def _end(self) -> None:
        self.open = False
        self.store.locks = {name: owner for name, owner in self.store.locks.items() if owner is not self}
        self.ended.set()

    @asynccontextmanager
    async def savepoint(self) -> AsyncIterator[None]:
        """Undo what the block staged if it raises."""
        rows, counters, writes = dict(self._rows), dict(self._counters), list(self.on_commit)
        try:
            yield
        except BaseException:
            self._rows, self._counters, self.on_commit = rows, counters, writes
            raise

    async def stage(self, drafts: Drafts, hold: Hold | None) -> list[Placed]:
        """Place drafts: numbered streams are locked first and in order, so that numbers follow commits."""
        streams = {id(draft): self._stream(draft) for draft in (*drafts.plain, *drafts.numbered)}
        for stream in sorted({streams[id(draft)] for draft in drafts.numbered}):
            await self.lock(("stream", stream))
        for draft in sorted((*drafts.plain, *drafts.numbered), key=lambda draft: draft.event_id):
            await self.lock(("event", draft.event_id))
        numbered = {id(draft) for draft in drafts.numbered}
        held = {stream: hold for stream in streams.values() if hold and self._quiet(stream)}
        placed = []
        for draft in (*drafts.plain, *drafts.numbered):
            if draft.event_id in self._rows or self.store.tables.known(draft.event_id):
                continue
            stream = streams[id(draft)]
            sequence = self._next(stream) if id(draft) in numbered else draft.sequence
            placed.append(self._place(draft, stream, sequence, held.get(stream)))
        return placed

    def _stream(self, draft: Draft) -> Stream:
        key = draft.key or draft.aggregate_id or str(draft.event_id)
        return Stream(lane_of(key, draft.priority, self.store.lanes), draft.topic, key)

    def _quiet(self, stream: Stream) -> bool:
        """Tell whether nothing undelivered lies before a new event of the stream."""
        tables = self.store.tables
        mine = any(row.stream.lane == stream.lane for row in self._rows.values())
        return not mine and not tables.fetchable[stream.lane] and stream not in tables.blocked

    def _next(self, stream: Stream) -> int:
        known = self._counters.get(stream, self.store.tables.counters.get(stream, 0))
        self._counters[stream] = known + 1
        return known + 1

    def _place(self, draft: Draft, stream: Stream, sequence: int | None, hold: Hold | None) -> Placed:
        now = self.store.clock.now()
        event = StagedEvent(
            position=self.store.next_position(),
            event_id=draft.event_id,
            event_type=draft.event_type,
            aggregate_type=draft.aggregate_type,
            aggregate_id=draft.aggregate_id,
            payload=draft.payload.encode(),
            headers=draft.headers.encode(),
            topic=draft.topic,
            key=stream.key,
            routing_key=draft.routing_key,
            lane=stream.lane,
            schema_version=draft.schema_version,
            saga_id=draft.saga_id,
            sequence=sequence,
            max_attempts=draft.max_attempts,
            retry=draft.retry.encode() if draft.retry else None,
            attempts=0,
            state=State.OPTIMISTIC if hold else State.PENDING,
            created_at=draft.created_at or now,
            available_at=draft.available_at,
            readiness=Readiness.READY,
            suspect=False,
        )
        row = Row(event, stream, draft.priority)
        if hold:
            row.held_by, row.held_until = hold.owner, _after(now, hold.seconds)
        self._rows[draft.event_id] = row
        return Placed(draft.event_id, hold is not None)

    async def lock(self, name: Hashable) -> None:
        """Wait until no other transaction has the name, and keep it to the end."""
        while (owner := self.store.locks.get(name, self)) is not self:
            await owner.ended.wait()
        self.store.locks[name] = self


def _after(moment: datetime, seconds: float) -> datetime:
    return moment + timedelta(seconds=seconds)
