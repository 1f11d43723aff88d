"""Sagas in a SQLite file: the operations of a worker."""

from __future__ import annotations

import json
import sqlite3
from collections.abc import Awaitable, Callable, Collection, Mapping, Sequence
from contextlib import AbstractAsyncContextManager
from datetime import UTC, datetime
from pathlib import Path
from typing import Any
from uuid import UUID

from outrider.clock import Clock, SystemClock
from outrider.errors import ConcurrencyError
from outrider.handler_transactions import HandlerTransaction, TransactionSource
from outrider.saga.model import (
    Claim,
    Instance,
    JournalEntry,
    NewSaga,
    NewSagaMessage,
    ParticipantEntry,
    Phase,
    SagaChange,
    SagaCriteria,
    SagaMessage,
    SagaPruned,
    SagaRecord,
    Status,
    Undelivered,
)
from outrider.saga.store import SagaAdmin
from outrider.stores.rows import (
    AUDIT_FACTS,
    SagaWriteSet,
    entry_of,
    entry_row,
    in_turn,
    message_of,
)
from outrider.stores.sqlite.audit import SqliteAudit, save_first_line, save_lines, to_instance
from outrider.stores.sqlite.handler_transactions import ExclusiveSource, SqliteTransactionSource, run_job
from outrider.stores.sqlite.rows import load_saga, to_moment, to_seconds
from outrider.stores.sqlite.wakeup import SqliteListener

PRUNE_MAX = 1_000

DAY_SECONDS = 86_400

SQL = load_saga()

Definitions = Collection[tuple[str, int]]

Work = Callable[..., Awaitable[Any]]
"""Runs work in a separate transaction."""


def candidates(
    cursor: sqlite3.Cursor, definitions: Definitions, limit: int, now: float, suspects: int = 1
) -> list[str]:
    """Return claimable sagas: due sagas, suspects and sagas with messages in alternation, so that no kind starves."""
    due = _first(cursor, "claim_due", definitions, limit, now)
    due += _first(cursor, "claim_ahead", definitions, limit, now)
    lost = _first(cursor, "claim_suspects", definitions, suspects, now)
    lost = [*lost, *_first(cursor, "claim_suspects_ahead", definitions, suspects, now)][:suspects]
    mailed = _first(cursor, "claim_messaged", definitions, limit, now)
    return in_turn(due, lost, mailed)[:limit]


def claim(
    cursor: sqlite3.Cursor,
    worker: str,
    definitions: Definitions,
    *,
    limit: int,
    lease_seconds: float,
    suspects: int,
    now: float,
) -> list[SagaRecord]:
    """Claim instances and read them completely."""
    chosen = candidates(cursor, definitions, limit, now, suspects)
    for saga_id in chosen:
        cursor.execute(SQL["claim"], {"worker": worker, **_span(now, lease_seconds), "saga_id": saga_id})
    return [record for saga_id in chosen if (record := load_record(cursor, UUID(saga_id), now))]


def drop_orphans(cursor: sqlite3.Cursor) -> None:
    """Remove unseen messages of ended sagas."""
    cursor.execute(SQL["drop_unread_messages"])


def load_record(cursor: sqlite3.Cursor, saga_id: UUID, now: float) -> SagaRecord | None:
    """Return the complete record of a saga."""
    facts = {"saga_id": str(saga_id)}
    row = cursor.execute(SQL["load"], facts).fetchone()
    if row is None:
        return None
    journal = tuple(_entry(columns) for columns in cursor.execute(SQL["journal"], facts).fetchall())
    messages = tuple(_messages(columns) for columns in cursor.execute(SQL["messages"], facts).fetchall())
    return SagaRecord(to_instance(row), journal, messages, datetime.fromtimestamp(now, UTC))


def deliver(cursor: sqlite3.Cursor, messages: Sequence[NewSagaMessage], now: float) -> int:
    """Insert messages into mailboxes; return the number of new messages."""
    rows = [
        {**message._asdict(), "saga_id": str(message.saga_id), "event_id": str(message.event_id), "now": now}
        | {"body": message.body.decode()}
        for message in sorted(messages, key=lambda message: (message.saga_id, message.event_id))
    ]
    return sum(cursor.execute(SQL["deliver"], row).rowcount for row in rows)


def prune_participants(cursor: sqlite3.Cursor, facts: dict[str, Any]) -> int:
    """Remove old replies of participants."""
    return cursor.execute(SQL["prune_participants"], facts).rowcount


def renew(cursor: sqlite3.Cursor, claims: Sequence[Claim], now: float, lease_seconds: float) -> frozenset[UUID]:
    """Extend claims; return the claims that are still valid."""
    span = _span(now, lease_seconds)
    return frozenset(
        claim.saga_id for claim in claims if cursor.execute(SQL["renew"], {**_fence(claim), **span}).rowcount
    )


def _span(now: float, lease_seconds: float) -> dict[str, float]:
    return {"from": now - lease_seconds, "until": now + lease_seconds}


def save(cursor: sqlite3.Cursor, claim: Claim, turn: SagaChange, lease_seconds: float, now: float) -> None:
    """Write a turn completely, or raise an error and write nothing."""
    writes = SagaWriteSet.of(turn, lease_seconds)
    to = writes.instance
    facts = {name: getattr(to, name) for name in ("version", "status", "current_step", "retry_count", "losses")}
    facts |= {"audit_lines": to.audit_lines, "audit_hash": to.audit_hash}
    facts |= {"state": to.state.decode(), "last_error": writes.last_error, "needs_attention": to.needs_attention}
    facts |= {"release": turn.release, "due_seconds": writes.due_seconds, "now": now, **_fence(claim)}
    if not cursor.execute(SQL["save"], facts).rowcount:
        raise ConcurrencyError(
            f"saga {claim.saga_id} has another owner or version by now; nothing was written: claim it again"
        )
    saga_id = str(claim.saga_id)
    cursor.executemany(SQL["save_journal"], [(saga_id, *_plain(entry_row(entry))) for entry in writes.entries])
    cursor.executemany(SQL["save_taken"], [(message_id, saga_id) for message_id in writes.taken])
    cursor.executemany(SQL["save_seen"], [(message_id, saga_id) for message_id in writes.seen])
    save_lines(cursor, writes.lines)


def start(cursor: sqlite3.Cursor, saga: NewSaga, now: float) -> bool:
    """Insert an instance that is due at once, with the first entry of its audit log."""
    facts = {**saga._asdict(), "saga_id": str(saga.saga_id), "state": saga.state.decode(), "now": now}
    facts["parent_id"] = str(saga.parent_id) if saga.parent_id else None
    if not cursor.execute(SQL["start"], facts).rowcount:
        return False
    save_first_line(cursor, saga.saga_id, now, saga.traceparent)
    return True


def undelivered(cursor: sqlite3.Cursor, event_ids: Sequence[UUID]) -> dict[UUID, Undelivered]:
    """Return the events that are still undelivered."""
    rows = [
        (UUID(event_id), cursor.execute(SQL["undelivered"], {"event_id": event_id}).fetchone())
        for event_id in map(str, event_ids)
    ]
    return {event_id: Undelivered(row[0]) for event_id, row in rows if row}


class SqliteSagas:
    """Sagas in a SQLite file prepared by `outrider db migrate`, beside the data that their steps change.

    Steps get a `sqlite3.Connection` in an open transaction. The clock gives the time of the host::

        saga_store = SqliteSagas("shop.db")
    """

    one_at_a_time = True

    def __init__(self, path: str | Path, *, clock: Clock | None = None) -> None:
        self.clock = clock or SystemClock()
        self._own = SqliteTransactionSource(path, what="saga store", installed=SQL["installed"])
        self.transactions: TransactionSource = self._own
        self.admin: SagaAdmin = SqliteSagaAdmin(self._own.read, self.clock)
        self.audit = SqliteAudit(self._own.read, self._own.write, self.clock)
        self._listeners: list[Callable[[], None]] = []

    async def use_transactions(self, source: TransactionSource) -> None:
        """Use the application's own transactions for steps from now on. Transactions of another database are rejected::

        await saga_store.use_transactions(transaction_source(session_factory))
        """
        self.transactions = await ExclusiveSource.of(source, self._own)

    def transaction(self) -> AbstractAsyncContextManager[HandlerTransaction]:
        # Turns always use the connection of the store; only the functions of steps use connections of the application.
        return self._own.open()

    async def start(self, tx: HandlerTransaction, saga: NewSaga) -> bool:
        return await run_job(tx, start, saga, self._now())

    async def deliver(self, tx: HandlerTransaction, messages: Sequence[NewSagaMessage]) -> int:
        return await run_job(tx, deliver, messages, self._now())

    async def claim(
        self,
        worker: str,
        definitions: Collection[tuple[str, int]],
        *,
        limit: int,
        lease_seconds: float,
        suspects: int = 1,
    ) -> list[SagaRecord]:
        # A read blocks no writer, and nearly always there are no sagas to claim.
        if not await self._own.read(candidates, definitions, limit, self._now(), suspects):
            return []
        return await self._own.write(
            claim,
            worker,
            definitions,
            limit=limit,
            lease_seconds=lease_seconds,
            suspects=suspects,
            now=self._now(),
        )

    async def renew(self, claims: Sequence[Claim], lease_seconds: float) -> frozenset[UUID]:
        if not claims:
            return frozenset()
        return await self._own.write(renew, claims, self._now(), lease_seconds)

    async def load(self, tx: HandlerTransaction, saga_id: UUID, *, for_update: bool = False) -> SagaRecord | None:
        """Return a saga. The transaction always locks the whole file, whatever `for_update` says."""
        return await run_job(tx, load_record, saga_id, self._now())

    async def save(self, tx: HandlerTransaction, claim: Claim, turn: SagaChange, lease_seconds: float) -> datetime:
        now = self.clock.now()
        await run_job(tx, save, claim, turn, lease_seconds, now.timestamp())
        return now

    async def undelivered(self, tx: HandlerTransaction, event_ids: Sequence[UUID]) -> Mapping[UUID, Undelivered]:
        return await run_job(tx, undelivered, event_ids)

    async def prune(self, *, saga_days: float, audit_days: float, participant_memory_days: float) -> SagaPruned:
        """Remove old rows. Also remove messages that came just after the end of their saga."""
        await self._own.write(drop_orphans)
        return SagaPruned(
            await self.audit.remove_sagas(saga_days),
            await self.audit.remove_lines(audit_days),
            await self._in_batches(prune_participants, participant_memory_days),
        )

    async def notify(self) -> None:
        """Wake workers of the same process now. Workers notice every commit by themselves a moment later."""
        for wake in self._listeners:
            wake()

    def listen(self, wake: Callable[[], None]) -> AbstractAsyncContextManager[None]:
        return SqliteListener(self._listeners, wake, self._own.path)

    async def close(self) -> None:
        """Close the connection and end the thread. A second call does nothing."""
        if self.transactions is not self._own:
            await self.transactions.close()
        await self._own.close()

    def _now(self) -> float:
        return self.clock.now().timestamp()

    async def _in_batches(self, job: Callable[[sqlite3.Cursor, dict[str, Any]], int], days: float) -> int:
        facts = {"before": self._now() - days * DAY_SECONDS, "limit": PRUNE_MAX}
        total, removed = 0, PRUNE_MAX
        while removed == PRUNE_MAX:
            removed = await self._own.write(job, facts)
            total += removed
        return total


def enter(cursor: sqlite3.Cursor, participant: str, key: str, phase: Phase, now: float) -> ParticipantEntry:
    """Register a command at a participant. A compensation first bars its action, unless the action has come."""
    facts = {"participant": participant, "key": key, "phase": phase, "now": now, "barred": False}
    if phase is Phase.COMPENSATION:
        barring = {**facts, "phase": Phase.ACTION, "barred": True}
        facts["barred"] = bool(cursor.execute(SQL["enter_participant"], barring).rowcount)
    if cursor.execute(SQL["enter_participant"], facts).rowcount:
        return ParticipantEntry(True, bool(facts["barred"]))
    barred, reply = cursor.execute(SQL["participant_reply"], facts).fetchone()
    return ParticipantEntry(False, bool(barred), reply)


def save_reply(cursor: sqlite3.Cursor, participant: str, key: str, phase: Phase, reply: bytes) -> None:
    """Store the reply to a command."""
    facts = {"participant": participant, "key": key, "phase": phase, "reply": reply.decode()}
    cursor.execute(SQL["save_reply"], facts)


def _entry(row: Sequence[Any]) -> JournalEntry:
    *known, due_at, error, started_at, ended_at, uncertainty, undelivered, command_id, reply_id, since, data = row
    times = to_moment(started_at), to_moment(ended_at)
    ids = [UUID(found) if found else None for found in (command_id, reply_id)]
    return entry_of([*known, to_moment(due_at), error, *times, uncertainty, undelivered, *ids, to_moment(since), data])


def _messages(row: Sequence[Any]) -> SagaMessage:
    *known, event_id, delivered_at, schema_version = row
    return message_of([*known, UUID(event_id), to_moment(delivered_at), schema_version])


def _plain(row: Sequence[Any]) -> list[Any]:
    texts = [str(cell) if isinstance(cell, UUID) else cell for cell in row]
    return [to_seconds(cell) if isinstance(cell, datetime) else cell for cell in texts]


def _fence(claim: Claim) -> dict[str, Any]:
    return {"worker": claim.worker, "saga_id": str(claim.saga_id), "epoch": claim.epoch}


def _first(cursor: sqlite3.Cursor, verb: str, definitions: Definitions, limit: int, now: float) -> list[str]:
    """Return the first sagas of all definitions, without duplicates."""
    found: list[tuple[float, str]] = []
    for saga_type, version in set(definitions):
        facts = {"saga_type": saga_type, "definition_version": version, "limit": limit, "now": now}
        found += cursor.execute(SQL[verb], facts).fetchall()
    return list(dict.fromkeys(saga_id for _, saga_id in sorted(found)))


class SqliteSagaAdmin:
    """The admin of sagas: lists, counts and shows."""

    def __init__(self, read: Work, clock: Clock) -> None:
        self._read, self._clock = read, clock

    async def find(self, criteria: SagaCriteria) -> list[Instance]:
        names = ("saga_type", "correlation_id", "status", "needs_attention", "limit")
        wanted = {name: getattr(criteria, name) for name in names}
        ids = json.dumps([str(saga_id) for saga_id in criteria.ids]) if criteria.ids else None
        stuck = criteria.stuck_seconds
        before = None if stuck is None else self._clock.now().timestamp() - stuck
        parent_id = str(criteria.parent_id) if criteria.parent_id else None
        rows = await self._read(_rows, "find", {**wanted, "ids": ids, "before": before, "parent_id": parent_id})
        return [to_instance(row) for row in rows]

    async def counts(self) -> dict[str, int]:
        rows = await self._read(_rows, "counts", {})
        counts = {status.value: 0 for status in Status} | {status: count for status, count, _ in rows}
        return {**counts, "needs_attention": sum(needing for *_, needing in rows)}

    async def show(self, saga_id: UUID) -> SagaRecord | None:
        record: SagaRecord | None = await self._read(load_record, saga_id, self._clock.now().timestamp())
        return record

    async def audit(self, saga_id: UUID, limit: int = 1000) -> list[dict[str, Any]]:
        rows = await self._read(_rows, "audit", {"saga_id": str(saga_id), "limit": limit})
        return [dict(zip(AUDIT_FACTS, (to_moment(at), *rest), strict=True)) for at, *rest in rows]


def _rows(cursor: sqlite3.Cursor, query: str, values: dict[str, Any]) -> list[Any]:
    return cursor.execute(SQL[query], values).fetchall()
