"""The inbox in a SQLite file: the operations of a consumer."""

from __future__ import annotations

import json
import sqlite3
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager
from datetime import UTC, datetime, timedelta
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple
from uuid import UUID

from outrider.clock import Clock, SystemClock
from outrider.errors import OutriderError
from outrider.event import InboxStream, OnDeadLetter, ReceivedEvent
from outrider.handler_transactions import HandlerTransaction, TransactionSource
from outrider.inbox.model import (
    ClaimedHeld,
    EventOutcome,
    HeldEvent,
    InboxBlockReason,
    InboxCriteria,
    InboxPruned,
    Overdue,
    Receipts,
    StreamState,
)
from outrider.inbox.store import InboxAdmin
from outrider.stores.rows import (
    HeldRow,
    InboxWriteSet,
    can_drain,
    check_receipts,
    delivery_of,
    failure_text,
    headers_of,
    state_of,
    stream_key_of,
)
from outrider.stores.sqlite.handler_transactions import ExclusiveSource, SqliteTransactionSource, run_job
from outrider.stores.sqlite.operation_log import record
from outrider.stores.sqlite.rows import load_inbox, to_moment
from outrider.stores.sqlite.saga import prune_participants

ADOPT_MAX = 100

PRUNE_MAX = 1_000

SQL = load_inbox()

Facts = dict[str, Any]

Work = Callable[..., Awaitable[Any]]
"""Runs work in a separate transaction."""

_READ: dict[str, Callable[[Any], Any]] = {
    "event_id": UUID,
    "headers": headers_of,
    "failure": json.loads,
    "received_at": to_moment,
    "dead_lettered_at": to_moment,
    "since": to_moment,
}


def record_receipts(
    cursor: sqlite3.Cursor, consumer: str, events: Sequence[ReceivedEvent], *, ordered: bool, now: float
) -> Receipts:
    """Insert receipts and read the stream states."""
    fresh = frozenset(a.event_id for a in events if _receive(cursor, consumer, a, now))
    numbered = {received.stream for received in events if ordered and received.sequence is not None}
    states = dict.fromkeys(numbered, StreamState())
    for stream in {received.stream for received in events}:
        if known := _stream_states(cursor, consumer, stream):
            states[stream] = known
    return Receipts(fresh, states)


def change(cursor: sqlite3.Cursor, verb: str, facts: Facts) -> int:
    """Run one statement; return the number of changed rows."""
    return cursor.execute(SQL[verb], facts).rowcount


def record_outcomes(
    cursor: sqlite3.Cursor,
    consumer: str,
    entries: Sequence[EventOutcome],
    states: Mapping[InboxStream, StreamState],
    now: float,
) -> dict[UUID, int]:
    """Write the outcomes of received events and the new stream states. Return the ids of dead letters."""
    writes, dead_letters = InboxWriteSet.of(entries), {}
    for event_id, seconds in writes.seconds.items():
        receipt = {"consumer": consumer, "event_id": str(event_id), "seconds": seconds}
        check_receipts(cursor.execute(SQL["finish_receipts"], receipt).rowcount, 1)
    for event_id in writes.withdrawn:
        cursor.execute(SQL["withdraw_receipts"], {"consumer": consumer, "event_id": str(event_id)})
    for received in writes.parked:
        facts = HeldRow.of(received)._asdict()
        cursor.execute(SQL["hold"], {**facts, "event_id": str(received.event_id), "consumer": consumer, "now": now})
    for received, dead_letter in writes.dead_letter:
        reason = {
            "reason": dead_letter.reason,
            "failure": failure_text(dead_letter.failure),
            "policy": dead_letter.policy,
        }
        event = {"consumer": consumer, "event_id": str(received.event_id), "now": now}
        [[dead_letters[received.event_id]]] = cursor.execute(
            SQL["dead_letter"], {**event, **reason, "attempts": dead_letter.attempts}
        )
    for event_id in [*writes.left, *(received.event_id for received, _ in writes.dead_letter)]:
        cursor.execute(SQL["remove_held"], {"consumer": consumer, "event_id": str(event_id)})
    for stream, at in states.items():
        verb = "forget_stream" if at == StreamState() else "save_streams"
        cursor.execute(SQL[verb], {**_named(consumer, stream), **at._asdict(), "now": now})
    return dead_letters


def draining(cursor: sqlite3.Cursor, consumer: str, cause: InboxBlockReason, limit: int) -> list[InboxStream]:
    """List streams that are blocked for a given reason."""
    facts = {"consumer": consumer, "cause": cause, "limit": limit}
    return [InboxStream(*row) for row in cursor.execute(SQL["draining"], facts)]


def installed(cursor: sqlite3.Cursor) -> bool:
    """Return whether the inbox is installed."""
    return bool(cursor.execute(SQL["installed"]).fetchone()[0])


def overdue(cursor: sqlite3.Cursor, consumer: str, before: float, limit: int) -> list[Overdue]:
    """List streams that have waited too long for a missing event."""
    rows = cursor.execute(SQL["overdue"], {"consumer": consumer, "before": before, "limit": limit})
    return [Overdue(InboxStream(*row[:3]), row[3], row[4], datetime.fromtimestamp(row[5], UTC)) for row in rows]


def claim_held(
    cursor: sqlite3.Cursor,
    consumer: str,
    stream: InboxStream,
    *,
    by_sequence: bool,
    limit: int,
    early: bool,
    now: float,
) -> ClaimedHeld | None:
    """Claim the first held events of a draining stream."""
    state = _stream_states(cursor, consumer, stream)
    if state is None or not can_drain(state.cause, early=early):
        return None
    facts = _named(consumer, stream)
    verb = "claim_by_sequence" if by_sequence or state.cause is InboxBlockReason.EARLY else "claim_in_order"
    rows = cursor.execute(SQL[verb], {**facts, "limit": limit}).fetchall()
    if not rows:
        cursor.execute(SQL["forget_stream" if state.seen is None else "repair_stream"], {**facts, "now": now})
        state = StreamState(state.seen)
    waiting, fresh = [], set()
    for number, text, replayed, event_type, sequence, *columns in rows:
        event_id = UUID(text)
        waiting.append(HeldEvent(number, event_id, delivery_of(columns), bool(replayed)))
        receipt = {**facts, "event_id": text, "event_type": event_type, "sequence": sequence, "now": now}
        if cursor.execute(SQL["record_receipts"], {**receipt, "waits": True}).rowcount:
            fresh.add(event_id)
    return ClaimedHeld(state, waiting, frozenset(fresh))


class SqliteInbox:
    """Receipts in a SQLite file prepared by `outrider db migrate`, beside the data that handlers change.

    Handlers get a `sqlite3.Connection` in an open transaction. The clock gives the time of the host::

        inbox_store = SqliteInbox("shop.db")
    """

    def __init__(self, path: str | Path, *, clock: Clock | None = None) -> None:
        self.clock = clock or SystemClock()
        self._own = SqliteTransactionSource(path, what="inbox", installed=SQL["installed"])
        self.transactions: TransactionSource = self._own
        self.admin: InboxAdmin = SqliteInboxAdmin(self._own.read, self._own.write, self.clock)

    async def use_transactions(self, source: TransactionSource) -> None:
        """Use the application's own transactions from now on. Transactions of another database are rejected::

        await inbox_store.use_transactions(transaction_source(session_factory))
        """
        self.transactions = await ExclusiveSource.of(source, self._own)

    def transaction(self) -> AbstractAsyncContextManager[HandlerTransaction]:
        return self.transactions.open()

    async def ping(self) -> bool:
        try:
            await self._own.read(installed)
        except OutriderError:
            return False
        return True

    async def record_receipts(
        self, tx: HandlerTransaction, consumer: str, events: Sequence[ReceivedEvent], *, ordered: bool
    ) -> Receipts:
        return await run_job(tx, record_receipts, consumer, events, ordered=ordered, now=self._now())

    async def record_outcomes(
        self,
        tx: HandlerTransaction,
        consumer: str,
        entries: Sequence[EventOutcome],
        states: Mapping[InboxStream, StreamState],
    ) -> Mapping[UUID, int]:
        return await run_job(tx, record_outcomes, consumer, entries, states, self._now())

    async def draining(
        self, consumer: str, limit: int, *, cause: InboxBlockReason = InboxBlockReason.DRAINING
    ) -> list[InboxStream]:
        return await self._own.read(draining, consumer, cause, limit)

    async def claim_held(
        self,
        tx: HandlerTransaction,
        consumer: str,
        stream: InboxStream,
        *,
        by_sequence: bool,
        limit: int,
        early: bool = False,
    ) -> ClaimedHeld | None:
        resuming = partial(claim_held, by_sequence=by_sequence, limit=limit, early=early, now=self._now())
        return await run_job(tx, resuming, consumer, stream)

    async def overdue(self, consumer: str, seconds: float, limit: int) -> list[Overdue]:
        return await self._own.read(overdue, consumer, self._now() - seconds, limit)

    async def prune(self, consumer: str, *, receipt_days: float, dead_letter_days: float) -> InboxPruned:
        """Remove old receipts and dead letters. Also repair streams with lost holds or lost held events."""
        facts = {"consumer": consumer, "now": self._now(), "limit": ADOPT_MAX}
        await self._own.write(change, "unblock_without_dead_letter", facts)
        await self._own.write(change, "adopt_orphans", facts)
        dead_letters = await self._in_batches("prune_dead_letters", consumer, dead_letter_days)
        return InboxPruned(await self._in_batches("prune_receipts", consumer, receipt_days), dead_letters)

    async def prune_participants(self, days: float) -> int:
        return await self._until_none_is_left(prune_participants, self._older(days))

    async def close(self) -> None:
        """Close the connection and end the thread. A second call does nothing."""
        if self.transactions is not self._own:
            await self.transactions.close()
        await self._own.close()

    def _now(self) -> float:
        return self.clock.now().timestamp()

    async def _in_batches(self, verb: str, consumer: str, days: float) -> int:
        return await self._until_none_is_left(change, verb, {"consumer": consumer, **self._older(days)})

    def _older(self, days: float) -> dict[str, float]:
        return {"before": (self.clock.now() - timedelta(days=days)).timestamp(), "limit": PRUNE_MAX}

    async def _until_none_is_left(self, job: Callable[..., int], *args: Any) -> int:
        total, removed = 0, PRUNE_MAX
        while removed == PRUNE_MAX:
            removed = await self._own.write(job, *args)
            total += removed
        return total


def _receive(cursor: sqlite3.Cursor, consumer: str, received: ReceivedEvent, now: float) -> bool:
    event = {"event_id": str(received.event_id), "event_type": received.event_type, "sequence": received.sequence}
    receipt = {**_named(consumer, received.stream), **event, "now": now, "waits": False}
    return cursor.execute(SQL["record_receipts"], receipt).rowcount == 1


def _stream_states(cursor: sqlite3.Cursor, consumer: str, stream: InboxStream) -> StreamState | None:
    row = cursor.execute(SQL["lock_stream"], _named(consumer, stream)).fetchone()
    return state_of(*row) if row else None


def _named(consumer: str, stream: InboxStream) -> Facts:
    topic, key, band = stream_key_of(stream)
    return {"consumer": consumer, "topic": topic, "key": key, "band": band}


class ChosenDeadLetters(NamedTuple):
    """A dead letter that an operator selected."""

    id: int
    event_id: str
    policy: str
    sequence: int | None
    consumer: str
    topic: str
    key: str
    band: int


class SqliteInboxAdmin:
    """The admin of the inbox: lists, replays, discards and releases."""

    def __init__(self, read: Work, write: Work, clock: Clock) -> None:
        self._read, self._write, self._clock = read, write, clock

    async def counts(self, consumer: str | None = None) -> dict[str, int]:
        [row] = await self._read(_rows, "counts", {"consumer": consumer})
        return dict(zip(("waiting", "blocked_streams", "dead_letters"), row, strict=True))

    async def receipts(self, consumer: str, event_ids: Sequence[UUID]) -> list[dict[str, Any]]:
        ids = json.dumps([str(event_id) for event_id in event_ids])
        return await self._facts("receipts", {"consumer": consumer, "ids": ids})

    async def dead_letters(self, criteria: InboxCriteria) -> list[dict[str, Any]]:
        wanted = {name: getattr(criteria, name) for name in ("consumer", "topic", "key", "reason", "limit")}
        ids = json.dumps(list(criteria.ids)) if criteria.ids else None
        return await self._facts("dead_letters", {**wanted, "ids": ids})

    async def streams(self, consumer: str | None, limit: int) -> list[dict[str, Any]]:
        return await self._facts("blocked_streams", {"consumer": consumer, "limit": limit})

    async def replay(self, ids: Sequence[int], actor: str) -> int:
        count: int = await self._write(_replay, ids, actor, self._now())
        return count

    async def discard(self, ids: Sequence[int], actor: str) -> int:
        count: int = await self._write(_discard, ids, actor, self._now())
        return count

    async def skip_gap(self, consumer: str, stream: InboxStream, actor: str) -> bool:
        skipped: bool = await self._write(_skip_gap, consumer, stream, actor, self._now())
        return skipped

    def _now(self) -> float:
        return self._clock.now().timestamp()

    async def _facts(self, query: str, values: dict[str, Any]) -> list[dict[str, Any]]:
        facts: list[dict[str, Any]] = await self._read(_facts, query, values)
        return facts


def _rows(cursor: sqlite3.Cursor, query: str, values: dict[str, Any]) -> list[Any]:
    return cursor.execute(SQL[query], values).fetchall()


def _facts(cursor: sqlite3.Cursor, query: str, values: dict[str, Any]) -> list[dict[str, Any]]:
    rows = cursor.execute(SQL[query], values).fetchall()
    names = [column[0] for column in cursor.description]
    return [
        {name: _READ[name](value) if name in _READ else value for name, value in zip(names, row, strict=True)}
        for row in rows
    ]


def _replay(cursor: sqlite3.Cursor, ids: Sequence[int], actor: str, now: float) -> int:
    chosen = _chosen(cursor, ids)
    for dead in chosen:
        cursor.execute(SQL["replay"], dead._asdict())
        cursor.execute(SQL["withdraw_receipts"], dead._asdict())
        _settle(cursor, dead, now, added=1)
    _record(cursor, "inbox_replay", actor, now, chosen)
    return len(chosen)


def _discard(cursor: sqlite3.Cursor, ids: Sequence[int], actor: str, now: float) -> int:
    chosen = _chosen(cursor, ids)
    for dead in chosen:
        _settle(cursor, dead, now, added=0)
    _record(cursor, "inbox_discard", actor, now, chosen)
    return len(chosen)


def _settle(cursor: sqlite3.Cursor, dead: ChosenDeadLetters, now: float, *, added: int) -> None:
    """Remove a dead letter. Its stream drains if the dead letter blocked it or returns to it."""
    facts = dead._asdict()
    cursor.execute(SQL["discard"], facts)
    if added or dead.policy == OnDeadLetter.BLOCK:
        passed = None if added else dead.sequence
        cursor.execute(SQL["drain_unblocked"], {**facts, "passed": passed, "added": added, "now": now})
        cursor.execute(SQL["forget_empty_streams"], facts)


def _skip_gap(cursor: sqlite3.Cursor, consumer: str, stream: InboxStream, actor: str, now: float) -> bool:
    facts = {"consumer": consumer, **stream_key_of(stream)._asdict()}
    row = cursor.execute(SQL["first_early"], facts).fetchone()
    if row is None:
        return False
    event_id, sequence = row
    cursor.execute(SQL["release"], {**facts, "sequence": sequence, "now": now})
    at, place = datetime.fromtimestamp(now, UTC), {"topic": stream.topic, "band": stream.band}
    record(cursor, at, actor, "inbox_skip_gap", [(UUID(event_id), consumer)], **place)
    return True


def _chosen(cursor: sqlite3.Cursor, ids: Sequence[int]) -> list[ChosenDeadLetters]:
    return [
        ChosenDeadLetters(*row) for row in cursor.execute(SQL["chosen_dead_letters"], {"ids": json.dumps(list(ids))})
    ]


def _record(cursor: sqlite3.Cursor, verb: str, actor: str, now: float, chosen: Sequence[ChosenDeadLetters]) -> None:
    events = [(UUID(dead.event_id), dead.consumer) for dead in chosen]
    record(cursor, datetime.fromtimestamp(now, UTC), actor, verb, events)
