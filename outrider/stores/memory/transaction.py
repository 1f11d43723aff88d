"""A business transaction on the memory store: staged rows appear at commit, in positions taken at staging.

The transaction keeps the relevant rules of a SQL transaction: stream counters and event ids are locked until the end, a
savepoint can be rolled back, and a late commit adds positions below positions that are already visible.
"""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import AsyncIterator, Callable, Hashable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from datetime import datetime, timedelta
from typing import TYPE_CHECKING, Any
from uuid import UUID

from outrider.errors import InvalidHandler
from outrider.event import OutboxRow, Readiness, Stream, lane_of
from outrider.handler_transactions import GENERATOR, TRANSACTION_ENDED, HandlerTransaction, check_handler, lazy
from outrider.outbox.model import JournalKind, NewEvent, OptimisticClaim, StagedRow, StageRequest, State
from outrider.stores.memory.journal import add
from outrider.stores.memory.tables import OutboxTableRow

if TYPE_CHECKING:
    from outrider.stores.memory.outbox import MemoryStore


class MemoryTransaction(HandlerTransaction):
    """An open transaction, from `MemoryStore.transaction()`. A handler gets the transaction itself."""

    def __init__(self, store: MemoryStore) -> None:
        self.store, self.connection = store, self
        self.open = True
        self.ended = asyncio.Event()
        self._rows: dict[UUID, OutboxTableRow] = {}
        self._counters: dict[Stream, int] = {}
        self.on_commit: list[Callable[[], None]] = []

    def commit(self) -> None:
        """Make all staged events visible at once."""
        tables = self.store.tables
        for row in self._rows.values():
            tables.put(row)
        add(self.store, JournalKind.STAGED, self._rows)
        tables.counters.update(self._counters)
        for write in self.on_commit:
            write()
        self._end()

    def rollback(self) -> None:
        """Drop all staged events."""
        self._end()

    def _end(self) -> None:
        self.open = False
        self.store.locks = {name: owner for name, owner in self.store.locks.items() if owner is not self}
        self.ended.set()

    async def execute(self, *statement: Any) -> Any:
        """Call a function with the transaction."""
        function, *args = statement
        return function(self, *args)

    async def call(self, function: Callable[..., Any], argument: Any) -> Any:
        try:
            result = function(argument, self)
            if lazy(result):
                raise InvalidHandler(GENERATOR)
            return await result if inspect.isawaitable(result) else result
        finally:
            if not self.open:
                raise InvalidHandler(TRANSACTION_ENDED)

    async def through(self, function: Callable[..., Any], *args: Any) -> Any:
        return await function(self, *args)

    def abort(self) -> None:
        self.rollback()

    @asynccontextmanager
    async def savepoint(self) -> AsyncIterator[None]:
        """Roll back the staged events of the block after an exception."""
        rows, counters, writes = dict(self._rows), dict(self._counters), list(self.on_commit)
        try:
            yield
        except BaseException:
            self._rows, self._counters, self.on_commit = rows, counters, writes
            raise

    async def stage(self, request: StageRequest, claim: OptimisticClaim | None) -> list[StagedRow]:
        """Stage events. Numbered streams are locked first, in order, so that sequence numbers follow commits."""
        streams = {id(new): self._stream(new) for new in (*request.plain, *request.numbered)}
        for stream in sorted({streams[id(new)] for new in request.numbered}):
            await self.lock(("stream", stream))
        for new in sorted((*request.plain, *request.numbered), key=lambda new: new.event_id):
            await self.lock(("event", new.event_id))
        numbered = {id(new) for new in request.numbered}
        claims = {stream: claim for stream in streams.values() if claim and self._quiet(stream)}
        inserted = []
        for new in (*request.plain, *request.numbered):
            if new.event_id in self._rows or self.store.tables.known(new.event_id):
                continue
            stream = streams[id(new)]
            sequence = self._next(stream) if id(new) in numbered else new.sequence
            inserted.append(self._insert(new, stream, sequence, claims.get(stream)))
        return inserted

    def _stream(self, new: NewEvent) -> Stream:
        key = new.key or new.aggregate_id or str(new.event_id)
        return Stream(lane_of(key, new.priority, self.store.lanes), new.topic, key)

    def _quiet(self, stream: Stream) -> bool:
        """Return whether no undelivered event lies before a new event of the stream."""
        tables = self.store.tables
        mine = any(row.stream.lane == stream.lane for row in self._rows.values())
        return not mine and not tables.fetchable[stream.lane] and stream not in tables.blocked

    def _next(self, stream: Stream) -> int:
        known = self._counters.get(stream, self.store.tables.counters.get(stream, 0))
        self._counters[stream] = known + 1
        return known + 1

    def _insert(self, new: NewEvent, stream: Stream, sequence: int | None, claim: OptimisticClaim | None) -> StagedRow:
        now = self.store.clock.now()
        event = OutboxRow(
            position=self.store.next_position(),
            event_id=new.event_id,
            event_type=new.event_type,
            aggregate_type=new.aggregate_type,
            aggregate_id=new.aggregate_id,
            payload=new.payload.encode(),
            headers=new.headers.encode(),
            topic=new.topic,
            key=stream.key,
            routing_key=new.routing_key,
            lane=stream.lane,
            schema_version=new.schema_version,
            saga_id=new.saga_id,
            sequence=sequence,
            max_attempts=new.max_attempts,
            retry=new.retry.encode() if new.retry else None,
            attempts=0,
            state=State.OPTIMISTIC if claim else State.PENDING,
            created_at=new.created_at or now,
            available_at=new.available_at,
            readiness=Readiness.READY,
            suspect=False,
        )
        row = OutboxTableRow(event, stream, new.priority)
        if claim:
            row.claimed_by, row.claimed_until = claim.owner, _after(now, claim.seconds)
        self._rows[new.event_id] = row
        return StagedRow(new.event_id, claim is not None)

    async def lock(self, name: Hashable) -> None:
        """Wait until no other transaction has locked the name, and lock it until the end of the transaction."""
        while (owner := self.store.locks.get(name, self)) is not self:
            await owner.ended.wait()
        self.store.locks[name] = self


class MemoryTransactionSource:
    """A source of transactions on a memory store."""

    vendor = "memory"

    def __init__(self, open_transaction: Callable[[], AbstractAsyncContextManager[MemoryTransaction]]) -> None:
        self._open = open_transaction

    def open(self) -> AbstractAsyncContextManager[MemoryTransaction]:
        return self._open()

    def check_handler(self, function: Callable[..., Any]) -> str | None:
        return check_handler(function)

    async def close(self) -> None:
        """Do nothing: there are no connections."""


def _after(moment: datetime, seconds: float) -> datetime:
    return moment + timedelta(seconds=seconds)
