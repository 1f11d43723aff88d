"""The inbox in PostgreSQL: the operations of a consumer.

Receipts are locked first, then streams, both in sorted order, so that consumers may wait for each other but never
deadlock. A statement that reads a stream state starts after the receipts are written.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from functools import partial
from typing import Any, Self
from uuid import UUID

import asyncpg

from outrider.errors import InvalidHandler, OutriderError
from outrider.event import InboxStream, OnDeadLetter, ReceivedEvent
from outrider.handler_transactions import TRANSACTION_ENDED, HandlerTransaction, TransactionSource
from outrider.inbox.model import (
    Applied,
    ClaimedHeld,
    EventOutcome,
    HeldEvent,
    InboxBlockReason,
    InboxCriteria,
    InboxOutcome,
    InboxPruned,
    Overdue,
    Receipts,
    StreamState,
)
from outrider.inbox.store import InboxAdmin
from outrider.stores.postgres import statements
from outrider.stores.postgres.database import STATEMENT_SECONDS, PostgresDatabase, location, pool_size
from outrider.stores.postgres.handler_transactions import (
    PostgresTransactionSource,
    StatementRunner,
    check_same_database,
    has_committed,
    in_batches,
    open_installed,
)
from outrider.stores.postgres.operation_log import record
from outrider.stores.queries import identifier
from outrider.stores.rows import (
    HeldRow,
    InboxWriteSet,
    can_drain,
    check_receipts,
    delivery_of,
    failure_text,
    headers_of,
    only_applied,
    state_of,
    stream_key_of,
)

ANSWER_SECONDS = 5.0

ADOPT_MAX = 100

Received = tuple[set[UUID], dict[InboxStream, StreamState]]
"""The events without a previous receipt, and the states of the streams locked by the statement."""

Known = tuple[InboxStream, StreamState]
"""A stream with its state."""

Run = Callable[..., Awaitable[list[Any]]]
"""Runs a statement by name, with its parameters, in the handler transaction."""


class PostgresInbox:
    """Receipts in PostgreSQL, beside the data that handlers change.

    Open the inbox with `await PostgresInbox.open(url)`, or use a pool of the application with
    `PostgresInbox.over(pool)`.
    """

    def __init__(self, database: PostgresDatabase, *, schema: str = "outrider") -> None:
        self._database = database
        self.transactions: TransactionSource = PostgresTransactionSource(database)
        # Commands to participants are handled by the inbox, so the inbox also prunes their replies.
        shared = {name: statements.load_saga(schema)[name] for name in ("may_prune_participants", "prune_participants")}
        self._sql = statements.load_inbox(identifier(schema)) | shared
        self._run = StatementRunner(self._sql, database.where, "receipt or stream").run
        self.admin: InboxAdmin = PostgresInboxAdmin(database, schema)

    @classmethod
    async def open(
        cls,
        url: str,
        *,
        schema: str = "outrider",
        connections_max: int | None = None,
        pooled: bool = False,
        concurrency: int | None = None,
    ) -> Self:
        """Connect to an installed inbox. A missing installation and a replica are rejected.

        `connections_max` limits the pool. The default is enough for the `concurrency` of the consumers, up to 32::

        inbox_store = await PostgresInbox.open("postgresql://localhost/shop")
        """
        size = pool_size(connections_max, concurrency, where=location(url))
        installed = {"what": "inbox", "last_step": "inbox_dead_letter_age"}
        database = await open_installed(url, schema, **installed, connections_max=size, pooled=pooled)
        return cls(database, schema=schema)

    @classmethod
    def over(cls, pool: asyncpg.Pool, *, schema: str = "outrider") -> Self:
        """Work through a pool of the application. The application closes the pool::

        inbox_store = PostgresInbox.over(await asyncpg.create_pool("postgresql://localhost/shop"))
        """
        return cls(PostgresDatabase.over(pool), schema=schema)

    async def use_transactions(self, source: TransactionSource) -> None:
        """Use the application's own transactions from now on. Transactions of another database are rejected::

        await inbox_store.use_transactions(transaction_source(session_factory))
        """
        await check_same_database(source, self._database)
        self.transactions = source

    @asynccontextmanager
    async def transaction(self) -> AsyncIterator[HandlerTransaction]:
        tx: HandlerTransaction | None = None
        try:
            async with self.transactions.open() as tx:
                yield tx
        except InvalidHandler:
            raise
        except Exception as error:
            # The query runs after the rollback, so that no consumer needs two connections at the same time.
            if tx is None or not await has_committed(self._database, tx.transaction_id):
                raise
            raise InvalidHandler(TRANSACTION_ENDED) from error

    async def ping(self) -> bool:
        try:
            async with asyncio.timeout(ANSWER_SECONDS):
                await self._database.fetch("SELECT 1")
        except (OutriderError, TimeoutError):
            return False
        return True

    async def record_receipts(
        self, tx: HandlerTransaction, consumer: str, events: Sequence[ReceivedEvent], *, ordered: bool
    ) -> Receipts:
        single = len(events) == 1
        fresh, states = await (self._receive_one if single else self._receive)(tx, consumer, events)
        new_events = [received for received in events if received.event_id in fresh]
        numbered = {received.stream for received in new_events if ordered and received.sequence is not None}
        # With a single event, the stream is already locked if the stream has a row.
        unlocked = numbered - states.keys() if single else {received.stream for received in new_events}
        states |= await self._lock(tx, consumer, unlocked, numbered)
        suspects = [a.event_id for a in new_events if a.stream in states and states[a.stream].waiting]
        return Receipts(frozenset(fresh - await self._waiting_already(tx, consumer, suspects)), states)

    async def record_outcomes(
        self,
        tx: HandlerTransaction,
        consumer: str,
        entries: Sequence[EventOutcome],
        states: Mapping[InboxStream, StreamState],
    ) -> Mapping[UUID, int]:
        return await record_outcomes(partial(self._run, tx), consumer, entries, states)

    async def draining(
        self, consumer: str, limit: int, *, cause: InboxBlockReason = InboxBlockReason.DRAINING
    ) -> list[InboxStream]:
        rows = await self._database.fetch(self._sql["draining"], consumer, cause, limit)
        return [InboxStream(*row) for row in rows]

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
        stream_key = stream_key_of(stream)
        locked = await self._run(tx, "lock_unless_taken", consumer, *stream_key)
        state = state_of(*locked[0][:3]) if locked else StreamState()
        _note_transaction(tx, locked)
        if not can_drain(state.cause, early=early):
            return None
        verb = "claim_by_sequence" if by_sequence or state.cause is InboxBlockReason.EARLY else "claim_in_order"
        rows = await self._run(tx, verb, consumer, *stream_key, limit)
        if not rows:
            await self._run(tx, "forget_stream" if state.seen is None else "repair_stream", consumer, *stream_key)
            state = StreamState(state.seen)
        waiting = [HeldEvent(row["id"], row["event_id"], delivery_of(row[4:]), row["replayed"]) for row in rows]
        return ClaimedHeld(state, waiting, frozenset(row["event_id"] for row in rows if row["fresh"]))

    async def overdue(self, consumer: str, seconds: float, limit: int) -> list[Overdue]:
        rows = await self._database.fetch(self._sql["overdue"], consumer, seconds, limit)
        return [Overdue(InboxStream(*row[:3]), row["seen"], row["waiting"], row["since"]) for row in rows]

    async def prune(self, consumer: str, *, receipt_days: float, dead_letter_days: float) -> InboxPruned:
        """Remove old receipts and dead letters. Also repair streams with lost holds or lost held events."""
        await self._database.execute(self._sql["unblock_without_dead_letter"], consumer)
        await self._database.execute(self._sql["adopt_orphans"], consumer, ADOPT_MAX)
        dead_letters = await in_batches(self._database, self._sql["prune_dead_letters"], consumer, dead_letter_days)
        return InboxPruned(
            await in_batches(self._database, self._sql["prune_receipts"], consumer, receipt_days), dead_letters
        )

    async def prune_participants(self, days: float) -> int:
        [[may]] = await self._database.fetch(self._sql["may_prune_participants"])
        return await in_batches(self._database, self._sql["prune_participants"], days) if may else 0

    async def close(self) -> None:
        await self.transactions.close()
        await self._database.close()

    async def _receive_one(self, tx: HandlerTransaction, consumer: str, events: Sequence[ReceivedEvent]) -> Received:
        [received] = events
        topic, key, band = stream_key_of(received.stream)
        receipt = (received.event_id, received.event_type, topic, key, received.sequence)
        rows = await self._run(tx, "record_receipt", consumer, *receipt, band)
        if not rows:
            return set(), {}
        _note_transaction(tx, rows)
        known = rows[0]["waiting"] is not None
        return {received.event_id}, {received.stream: state_of(*rows[0][:3])} if known else {}

    async def _receive(self, tx: HandlerTransaction, consumer: str, events: Sequence[ReceivedEvent]) -> Received:
        first = {received.event_id: received for received in reversed(events)}
        receipts = [
            (event_id, received.event_type, *stream_key_of(received.stream)[:2], received.sequence)
            for event_id, received in sorted(first.items())
        ]
        columns = [list(column) for column in zip(*receipts, strict=True)]
        rows = await self._run(tx, "record_receipts", consumer, *columns)
        _note_transaction(tx, rows)
        return {row["event_id"] for row in rows}, {}

    async def _lock(
        self, tx: HandlerTransaction, consumer: str, streams: set[InboxStream], numbered: set[InboxStream]
    ) -> dict[InboxStream, StreamState]:
        """Lock stream rows in sorted order and return the stream states.

        Numbered streams without a row get a new row.
        """
        states: dict[InboxStream, StreamState] = {}
        while streams:
            if made := sorted(streams & numbered):
                await self._run(tx, "create_streams", consumer, *_stream_columns(made))
            wanted = sorted(streams)
            for ord_, *state in await self._run(tx, "lock_streams", consumer, *_stream_columns(wanted)):
                states[wanted[ord_ - 1]] = state_of(*state)
            # An operator may have released a stream between the two statements.
            streams = (streams & numbered) - states.keys()
        return states

    async def _waiting_already(self, tx: HandlerTransaction, consumer: str, event_ids: list[UUID]) -> set[UUID]:
        """Delete the receipts of held events. Called only if a stream row reports held events."""
        if not event_ids:
            return set()
        return {row["event_id"] for row in await self._run(tx, "withdraw_held", consumer, event_ids)}


def _note_transaction(tx: HandlerTransaction, rows: Sequence[Any]) -> None:
    for row in rows[:1]:
        tx.transaction_id = row["transaction"]


def _stream_columns(streams: Sequence[InboxStream]) -> list[list[Any]]:
    return [list(column) for column in zip(*map(stream_key_of, streams), strict=True)]


async def record_outcomes(
    run: Run, consumer: str, entries: Sequence[EventOutcome], states: Mapping[InboxStream, StreamState]
) -> dict[UUID, int]:
    """Write the outcomes of received events and the new stream states. Return the ids of dead letters."""
    plain = only_applied(entries)
    known = sorted((stream, at) for stream, at in states.items() if at != StreamState())
    if plain and len(entries) == 1 and len(known) == len(states) <= 1:
        await _finish_one(run, consumer, *entries[0], known)
        return {}
    writes = InboxWriteSet.of(entries)
    dead_letters = {} if plain else await _write_rows(run, consumer, writes)
    await _finish_and_save_streams(run, consumer, writes, known)
    for stream in sorted(stream for stream, at in states.items() if at == StreamState()):
        await run("forget_stream", consumer, *stream_key_of(stream))
    return dead_letters


async def _finish_one(
    run: Run, consumer: str, received: ReceivedEvent, outcome: InboxOutcome, known: Sequence[Known]
) -> None:
    """Write the most common outcome of a single event: applied, and counted if the stream has a sequence check."""
    assert isinstance(outcome, Applied)
    receipt = received.event_id, outcome.seconds
    for stream, at in known:
        found = await run("finish_and_save_stream", consumer, *stream_key_of(stream), at.seen, at.cause, 0, *receipt)
        break
    else:
        found = await run("finish_receipt", consumer, *receipt)
    check_receipts(len(found), 1)


async def _finish_and_save_streams(run: Run, consumer: str, writes: InboxWriteSet, known: Sequence[Known]) -> None:
    seconds = list(writes.seconds), list(writes.seconds.values())
    columns = _columns([(*stream_key_of(stream), at.seen, at.cause, writes.added[stream]) for stream, at in known])
    if known and writes.seconds:
        check_receipts(len(await run("finish_and_save_streams", consumer, *columns, *seconds)), len(writes.seconds))
    elif known:
        await run("save_streams", consumer, *columns)
    elif writes.seconds:
        check_receipts(len(await run("finish_receipts", consumer, *seconds)), len(writes.seconds))


async def _write_rows(run: Run, consumer: str, writes: InboxWriteSet) -> dict[UUID, int]:
    dead_letters: dict[UUID, int] = {}
    if writes.withdrawn:
        await run("withdraw_receipts", consumer, sorted(writes.withdrawn))
    if writes.parked:
        await run("hold", consumer, *_columns([HeldRow.of(received) for received in writes.parked]))
    if writes.dead_letter:
        rows = [
            (received.event_id, outcome.reason, failure_text(outcome.failure), outcome.policy, outcome.attempts)
            for received, outcome in writes.dead_letter
        ]
        dead_letters = {row["event_id"]: row["id"] for row in await run("dead_letter", consumer, *_columns(rows))}
    if writes.left:
        await run("remove_held", consumer, writes.left)
    return dead_letters


def _columns(rows: Sequence[Sequence[Any]]) -> list[list[Any]]:
    return [list(column) for column in zip(*rows, strict=True)]


class PostgresInboxAdmin:
    """The admin of the inbox: lists, replays, discards and releases."""

    def __init__(self, database: PostgresDatabase, schema: str) -> None:
        self._database, self._schema = database, schema
        self._sql = statements.load_inbox(schema)

    async def counts(self, consumer: str | None = None) -> dict[str, int]:
        [row] = await self._database.fetch(self._sql["counts"], consumer)
        return dict(row)

    async def receipts(self, consumer: str, event_ids: Sequence[UUID]) -> list[dict[str, Any]]:
        rows = await self._database.fetch(self._sql["receipts"], consumer, list(event_ids))
        return [dict(row) for row in rows]

    async def dead_letters(self, criteria: InboxCriteria) -> list[dict[str, Any]]:
        wanted = criteria.consumer, criteria.topic, criteria.key, criteria.reason, criteria.limit
        rows = await self._database.fetch(self._sql["dead_letters"], list(criteria.ids), *wanted)
        return [{**row, "headers": headers_of(row["headers"]), "failure": json.loads(row["failure"])} for row in rows]

    async def streams(self, consumer: str | None, limit: int) -> list[dict[str, Any]]:
        return [dict(row) for row in await self._database.fetch(self._sql["blocked_streams"], consumer, limit)]

    async def replay(self, ids: Sequence[int], actor: str) -> int:
        async with self._database.transaction() as conn:
            await self._run(conn, "create_dead_letter_streams", list(ids))
            back = await self._run(conn, "replay", list(ids))
            await self._drain_unblocked(conn, back, added=1)
            await self._record(conn, actor, "inbox_replay", back)
        return len(back)

    async def discard(self, ids: Sequence[int], actor: str) -> int:
        async with self._database.transaction() as conn:
            await self._run(conn, "lock_dead_letter_streams", list(ids))
            removed = await self._run(conn, "discard", list(ids))
            await self._drain_unblocked(conn, [row for row in removed if row["policy"] == OnDeadLetter.BLOCK], added=0)
            await self._record(conn, actor, "inbox_discard", removed)
        return len(removed)

    async def skip_gap(self, consumer: str, stream: InboxStream, actor: str) -> bool:
        stream_key = stream_key_of(stream)
        async with self._database.transaction() as conn:
            locked = await self._run(conn, "lock_stream", consumer, *stream_key)
            if not locked or locked[0]["cause"] != InboxBlockReason.EARLY:
                return False
            first = await self._run(conn, "first_early", consumer, *stream_key, locked[0]["seen"])
            for row in first:
                await self._run(conn, "release", consumer, *stream_key, row["sequence"])
                place = {"topic": stream.topic, "band": stream.band}
                await self._record(conn, actor, "inbox_skip_gap", [{**row, "consumer": consumer}], **place)
        return bool(first)

    async def _drain_unblocked(self, conn: Any, rows: Sequence[Any], *, added: int) -> None:
        """Drain streams without a blocking dead letter; delete the rows of empty streams."""
        touched: dict[tuple[Any, ...], tuple[int | None, int]] = {}
        for row in rows:
            stream = row["consumer"], row["topic"], row["key"], row["band"]
            passed, more = touched.get(stream, (None, 0))
            numbers = [number for number in (passed, row["passed"]) if number is not None]
            touched[stream] = max(numbers, default=None), more + added
        if touched:
            streams = [list(column) for column in zip(*touched, strict=True)]
            changes = [list(column) for column in zip(*touched.values(), strict=True)]
            await self._run(conn, "drain_unblocked", *streams, *changes)
            await self._run(conn, "forget_empty_streams", *streams)

    async def _record(self, conn: Any, actor: str, verb: str, rows: Sequence[Any], **detail: Any) -> None:
        events = [(row["event_id"], row["consumer"]) for row in rows]
        await record(conn, self._schema, actor, verb, events, **detail)

    async def _run(self, conn: Any, verb: str, *args: Any) -> list[Any]:
        rows: list[Any] = await conn.fetch(self._sql[verb], *args, timeout=STATEMENT_SECONDS)
        return rows
