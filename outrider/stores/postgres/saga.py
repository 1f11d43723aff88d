"""Sagas in PostgreSQL: the operations of a worker.

A claim is one statement that skips locked rows. Later statements read the claimed sagas and therefore see all writes of
the last owner. A turn is also one statement, fenced by claim and version.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import fields
from datetime import UTC, datetime
from typing import Any, Self
from uuid import UUID

import asyncpg

from outrider.errors import ConcurrencyError, InvalidHandler
from outrider.handler_transactions import TRANSACTION_ENDED, HandlerTransaction, TransactionSource
from outrider.saga.model import (
    Claim,
    Instance,
    JournalEntry,
    NewSaga,
    NewSagaMessage,
    SagaChange,
    SagaCriteria,
    SagaMessage,
    SagaPruned,
    SagaRecord,
    Status,
    Undelivered,
)
from outrider.saga.store import SagaAdmin
from outrider.stores.postgres import statements
from outrider.stores.postgres.audit import PostgresAudit
from outrider.stores.postgres.database import RESERVED, STATEMENT_SECONDS, PostgresDatabase, location, pool_size
from outrider.stores.postgres.handler_transactions import (
    CommitCheckingSource,
    PostgresHandlerTransaction,
    PostgresTransactionSource,
    StatementRunner,
    check_same_database,
    in_batches,
    open_installed,
    open_transaction,
)
from outrider.stores.postgres.statements import message_parameters, save_parameters, start_parameters
from outrider.stores.postgres.wakeup import NotificationListener
from outrider.stores.queries import identifier
from outrider.stores.rows import entry_of, instance_of, message_of


def _utc(text: str) -> datetime:
    return datetime.fromisoformat(text).astimezone(UTC)


ENTRY_COLUMNS = tuple(field.name for field in fields(JournalEntry))

FROM_JSON: Mapping[str, Callable[[str], Any]] = {
    **dict.fromkeys(("due_at", "started_at", "ended_at", "unavailable_since", "delivered_at"), _utc),
    **dict.fromkeys(("command_event_id", "reply_event_id", "event_id"), UUID),
}
"""The columns whose values are text in JSON."""


class PostgresSagas:
    """Sagas in PostgreSQL, beside the data that their steps change.

    Open the store with `await PostgresSagas.open(url)`, or use a pool of the application with
    `PostgresSagas.over(pool)`.
    """

    one_at_a_time = False

    def __init__(self, database: PostgresDatabase, *, schema: str = "outrider") -> None:
        self._database = database
        own = PostgresTransactionSource(database, reserved=RESERVED)
        self.transactions: TransactionSource = CommitCheckingSource(own, database)
        self._sql = statements.load_saga(identifier(schema))
        self._run = StatementRunner(self._sql, database.where, "saga, messages or participant").run
        self.admin: SagaAdmin = PostgresSagaAdmin(database, schema)
        self.audit = PostgresAudit(database, schema)
        self._notify_channel = NotificationListener(database, f"{schema[:50]}_saga")

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
        """Connect to an installed saga store. A missing installation and a replica are rejected.

        `connections_max` limits the pool; two connections are never given to local steps. The default is enough for
        the `concurrency` of the worker, up to 32::

        saga_store = await PostgresSagas.open("postgresql://localhost/shop")
        """
        size = pool_size(connections_max, concurrency, where=location(url))
        installed = {"what": "saga store", "last_step": "saga_audit_head_subject"}
        database = await open_installed(url, schema, **installed, connections_max=size, pooled=pooled)
        return cls(database, schema=schema)

    @classmethod
    def over(cls, pool: asyncpg.Pool, *, schema: str = "outrider") -> Self:
        """Work through a pool of the application. The application closes the pool::

        saga_store = PostgresSagas.over(await asyncpg.create_pool("postgresql://localhost/shop"))
        """
        return cls(PostgresDatabase.over(pool), schema=schema)

    async def use_transactions(self, source: TransactionSource) -> None:
        """Use the application's own transactions for steps from now on.

        Transactions of another database are rejected.
        """
        await check_same_database(source, self._database)
        self.transactions = CommitCheckingSource(source, self._database)

    def transaction(self) -> AbstractAsyncContextManager[HandlerTransaction]:
        # Turns use connections of the store, so that they never wait for a connection of a step.
        return open_transaction(self._database)

    async def start(self, tx: HandlerTransaction, saga: NewSaga) -> bool:
        return bool(await self._run(tx, "start", *start_parameters(saga)))

    async def deliver(self, tx: HandlerTransaction, messages: Sequence[NewSagaMessage]) -> int:
        return len(await self._run(tx, "deliver", *message_parameters(messages))) if messages else 0

    async def claim(
        self,
        worker: str,
        definitions: Collection[tuple[str, int]],
        *,
        limit: int,
        lease_seconds: float,
        suspects: int = 1,
    ) -> list[SagaRecord]:
        wanted = [list(column) for column in zip(*sorted(set(definitions)), strict=True)]
        if not wanted:
            return []
        async with self._database.statement() as conn:
            tx = PostgresHandlerTransaction(conn, self._database.where)
            rows = await self._run(tx, "claim", worker, *wanted, limit, lease_seconds, suspects)
            return [record_of(row) for row in rows]

    async def renew(self, claims: Sequence[Claim], lease_seconds: float) -> frozenset[UUID]:
        if not claims:
            return frozenset()
        columns = [c.saga_id for c in claims], [c.worker for c in claims], [c.epoch for c in claims]
        rows = await self._database.fetch(self._sql["renew"], *columns, lease_seconds)
        return frozenset(row["saga_id"] for row in rows)

    async def load(self, tx: HandlerTransaction, saga_id: UUID, *, for_update: bool = False) -> SagaRecord | None:
        rows = await self._run(tx, "load_for_update" if for_update else "load", saga_id)
        if not rows:
            return None
        *columns, tx_id = rows[0] if for_update else (*rows[0], None)
        if for_update:
            tx.transaction_id = tx_id
        return record_of(columns)

    async def save(self, tx: HandlerTransaction, claim: Claim, turn: SagaChange, lease_seconds: float) -> datetime:
        rows = await self._run(tx, "save", *save_parameters(claim, turn, lease_seconds))
        if not rows:
            raise ConcurrencyError(
                f"saga {claim.saga_id} has another owner or version by now; nothing was written: claim it again"
            )
        if tx.transaction_id not in (None, rows[0]["transaction"]):
            raise InvalidHandler(TRANSACTION_ENDED)
        now: datetime = rows[0]["now"]
        return now

    async def undelivered(self, tx: HandlerTransaction, event_ids: Sequence[UUID]) -> Mapping[UUID, Undelivered]:
        rows = await self._run(tx, "undelivered", list(event_ids))
        return {event_id: Undelivered(state) for event_id, state in rows}

    async def prune(self, *, saga_days: float, audit_days: float, participant_memory_days: float) -> SagaPruned:
        """Remove old rows. Also remove messages that came just after the end of their saga."""
        await self._database.execute(self._sql["drop_unread_messages"])
        return SagaPruned(
            await self.audit.remove_sagas(saga_days),
            await self.audit.remove_lines(audit_days),
            await in_batches(self._database, self._sql["prune_participants"], participant_memory_days),
        )

    async def notify(self) -> None:
        """Notify workers, after a commit, of a new message or a new saga."""
        await self._notify_channel.send()

    def listen(self, wake: Callable[[], None]) -> AbstractAsyncContextManager[None]:
        return self._notify_channel.listening(wake)

    async def close(self) -> None:
        await self._notify_channel.close()
        await self.transactions.close()
        await self._database.close()


class PostgresSagaAdmin:
    """The admin of sagas: lists, counts and shows."""

    def __init__(self, database: PostgresDatabase, schema: str) -> None:
        self._database = database
        self._sql = statements.load_saga(schema)

    async def find(self, criteria: SagaCriteria) -> list[Instance]:
        action = criteria.saga_type, criteria.correlation_id, criteria.status, criteria.needs_attention
        wanted = list(criteria.ids), *action, criteria.stuck_seconds, criteria.limit, criteria.parent_id
        return [instance_of(row) for row in await self._database.fetch(self._sql["find"], *wanted)]

    async def counts(self) -> dict[str, int]:
        rows = await self._database.fetch(self._sql["counts"])
        counts = {status.value: 0 for status in Status} | {row["status"]: row["sagas"] for row in rows}
        return {**counts, "needs_attention": sum(row["needing"] for row in rows)}

    async def show(self, saga_id: UUID) -> SagaRecord | None:
        # All reads use one snapshot, without locks.
        async with (
            self._database.connection() as conn,
            conn.transaction(isolation="repeatable_read", readonly=True),
        ):
            rows = await conn.fetch(self._sql["load"], saga_id, timeout=STATEMENT_SECONDS)
        return record_of(rows[0]) if rows else None

    async def audit(self, saga_id: UUID, limit: int = 1000) -> list[dict[str, Any]]:
        return [dict(row) for row in await self._database.fetch(self._sql["audit"], saga_id, limit)]


def record_of(row: Sequence[Any]) -> SagaRecord:
    """Return a record from the columns of the instance, the journal and the messages as JSON, and the time."""
    *columns, journal, messages, now = row
    return SagaRecord(
        instance_of(columns),
        tuple(entry_of(_columns(ENTRY_COLUMNS, row)) for row in json.loads(journal or "[]")),
        tuple(message_of(_columns(SagaMessage._fields, row)) for row in json.loads(messages or "[]")),
        now,
    )


def _columns(names: Sequence[str], row: Mapping[str, Any]) -> list[Any]:
    """Return the columns of a row of JSON, in order."""
    return [FROM_JSON[name](row[name]) if name in FROM_JSON and row[name] is not None else row[name] for name in names]
