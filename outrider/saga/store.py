"""The saga store: instances, journal, mailbox and audit log.

All adapters keep these rules, and the contract suite checks the rules:

1. Only the holder of the claim writes an instance: `save` is fenced by worker and epoch and guarded by version.
2. A turn is written in one transaction, in which its events are also staged.
3. All other processes send messages. A message is kept until a turn takes the message. A second delivery of an event
   has no effect.
4. A claim is a time: `wake_at` is the time at which the instance is next due. A claim moves `wake_at` one lease ahead,
   so the instance of a dead worker becomes due again by itself. A claim further ahead than its lease is from before the
   clock was set back, and counts as ended.
5. The audit log is append only: a line leaves only after an anchor that says so, in the same transaction.
6. A claim that takes an instance from a lost worker counts a loss, and limits the number of suspects.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import AbstractAsyncContextManager
from datetime import datetime
from typing import Any, Protocol
from uuid import UUID

from outrider.audit_chain import AuditAnchor, AuditHead, AuditLine
from outrider.handler_transactions import TransactionSource
from outrider.saga.model import (
    AuditCriteria,
    Claim,
    Instance,
    NewSaga,
    NewSagaMessage,
    SagaChange,
    SagaCriteria,
    SagaPruned,
    SagaRecord,
    Undelivered,
)


class SagaAdmin(Protocol):
    """Queries of operators."""

    async def find(self, criteria: SagaCriteria) -> list[Instance]:
        """List sagas: sagas that need attention first, then by latest change."""
        ...

    async def counts(self) -> dict[str, int]:
        """Count sagas by status, and `needs_attention`."""
        ...

    async def show(self, saga_id: UUID) -> SagaRecord | None:
        """Return the record of a saga, including messages that were already seen."""
        ...

    async def audit(self, saga_id: UUID, limit: int = 1000) -> list[dict[str, Any]]:
        """Return the audit log of a saga, oldest first.

        The columns are at, old_status, new_status, step, what, actor, detail, traceparent.
        """
        ...


class SagaAudit(Protocol):
    """The audit log of all sagas, for a list and for the verification of its chains."""

    async def find(self, criteria: AuditCriteria) -> list[AuditLine]:
        """List lines, the latest first."""
        ...

    async def lines(self, after: tuple[UUID, int], limit: int) -> list[AuditLine]:
        """Return a page of all lines, ordered by saga and place, after a saga and place."""
        ...

    async def heads(self, saga_ids: Collection[UUID]) -> list[AuditHead]:
        """Return the heads of the chains of some sagas, ordered by saga; those of removed sagas first, by anchor."""
        ...

    async def chain(self, saga_id: UUID) -> tuple[list[AuditHead], list[AuditLine]]:
        """Return the heads and all lines of one saga, as of one moment."""
        ...

    async def missing(self, limit: int) -> list[UUID]:
        """Return sagas, there or removed, without any line."""
        ...

    async def anchors(self, after: int, limit: int) -> list[AuditAnchor]:
        """Return a page of the anchors, in order, after a number."""
        ...

    async def anchor_heads(self, number: int) -> list[AuditHead] | None:
        """Return the heads that an anchor covers; None once another anchor says that their lines were removed."""
        ...

    async def remove_lines(self, days: float) -> int:
        """Remove the lines of sagas that were removed together, once all are old; return the number of lines."""
        ...


class SagaStore(Protocol):
    """The store interface of a saga worker."""

    admin: SagaAdmin
    one_at_a_time: bool
    """Whether a handler transaction blocks all other store access, including renewals."""

    @property
    def audit(self) -> SagaAudit:
        """The audit log of all sagas."""
        ...

    @property
    def transactions(self) -> TransactionSource:
        """The source of transactions for step functions.

        Claims, renewals and turns never wait for a handler transaction.
        """
        ...

    def transaction(self) -> AbstractAsyncContextManager[Any]:
        """Open a transaction of the store; commit at the end of the block, roll back on an exception."""
        ...

    async def start(self, tx: Any, saga: NewSaga) -> bool:
        """Insert an instance that is due immediately; False if the instance exists."""
        ...

    async def deliver(self, tx: Any, messages: Sequence[NewSagaMessage]) -> int:
        """Deliver messages to sagas that are active or have failed, and return the number of new messages.

        A message for a different saga type is dropped.
        """
        ...

    async def claim(
        self,
        worker: str,
        definitions: Collection[tuple[str, int]],
        *,
        limit: int,
        lease_seconds: float,
        suspects: int = 1,
    ) -> list[SagaRecord]:
        """Claim instances of the given definitions and versions that are due, or have unseen messages and no owner.

        An instance that still has an owner was lost with its worker: the claim counts a loss. After a release, the
        count starts again. At most `suspects` of the claimed instances become suspects, or are suspects already.
        """
        ...

    async def renew(self, claims: Sequence[Claim], lease_seconds: float) -> frozenset[UUID]:
        """Extend claims; return the ids of the claims that are still valid."""
        ...

    async def load(self, tx: Any, saga_id: UUID, *, for_update: bool = False) -> SagaRecord | None:
        """Return a saga with journal and messages; `for_update` locks the row until the transaction ends."""
        ...

    async def save(self, tx: Any, claim: Claim, turn: SagaChange, lease_seconds: float) -> datetime:
        """Write a change and return the database time. Raises ConcurrencyError, and has then written nothing.

        `turn.instance.version` is the expected version; the save increments the stored version.
        """
        ...

    async def undelivered(self, tx: Any, event_ids: Sequence[UUID]) -> Mapping[UUID, Undelivered]:
        """Return the events that are still in the outbox or among the dead letters. All other events have left."""
        ...

    async def prune(self, *, saga_days: float, audit_days: float, participant_memory_days: float) -> SagaPruned:
        """Remove ended sagas and old entries, in small batches. A saga that needs attention is kept.

        The audit lines of sagas that were removed together are removed together, once all are old.

        A child is kept until its parent is completed, compensated or removed. A parent is kept until its children are
        removed, so that a new saga of its name starts children of its own.
        """
        ...

    async def notify(self) -> None:
        """Notify workers, after a commit, of a new saga or message."""
        ...

    def listen(self, wake: Callable[[], None]) -> AbstractAsyncContextManager[None]:
        """Call `wake` when a saga or message may have arrived, if the store supports notifications.

        Workers also poll.
        """
        ...

    async def close(self) -> None:
        """Close connections and threads."""
        ...
