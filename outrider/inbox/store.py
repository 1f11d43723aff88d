"""The store contract of the inbox: receipts, stream states, held events, and the dead letters of consumers.

Rules that every adapter keeps, and the contract suite checks:

1. A receipt `(consumer, event_id)` is inserted first, in the handler's own transaction. Two transactions with the same
   receipt wait for each other: the second one sees the result of the first.
2. The row of a stream is locked from `record_receipts` or `claim_held` to the end of the transaction, if there is a
   row; an ordered consumer has a row for every numbered stream.
3. Held and dead-lettered events are kept with all their bytes, and are bounded, listed and counted.
4. Transactions are of the kind that the handler would use by itself. A rollback leaves no trace.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager
from typing import Any, Protocol
from uuid import UUID

from outrider.event import InboxStream, ReceivedEvent
from outrider.handler_transactions import TransactionSource
from outrider.inbox.model import (
    ClaimedHeld,
    EventOutcome,
    InboxBlockReason,
    InboxCriteria,
    InboxPruned,
    Overdue,
    Receipts,
    StreamState,
)

Handler = Callable[[Any, Any], Awaitable[None] | None]


class InboxAdmin(Protocol):
    """Operator queries and commands for the held events and dead letters of consumers."""

    async def counts(self, consumer: str | None = None) -> dict[str, int]:
        """Count `waiting`, `blocked_streams` and `dead_letters`."""
        ...

    async def receipts(self, consumer: str, event_ids: Sequence[UUID]) -> list[dict[str, Any]]:
        """Return receipts: event_id, event_type, topic, key, sequence, received_at, processing_seconds."""
        ...

    async def dead_letters(self, criteria: InboxCriteria) -> list[dict[str, Any]]:
        """List dead letters, oldest first, with headers and body as bytes."""
        ...

    async def streams(self, consumer: str | None, limit: int) -> list[dict[str, Any]]:
        """List blocked streams: consumer, topic, key, band, seen, cause, waiting, since; dead letters first."""
        ...

    async def replay(self, ids: Sequence[int], actor: str) -> int:
        """Move dead letters back among the held events, in their old positions; return their number.

        The receipt is removed. A skipped event is marked `replayed`. The stream drains once no dead letter blocks it.
        """
        ...

    async def discard(self, ids: Sequence[int], actor: str) -> int:
        """Remove dead letters for good; a stream that one of them blocked goes on. Return their number."""
        ...

    async def skip_gap(self, consumer: str, stream: InboxStream, actor: str) -> bool:
        """Stop waiting for missing predecessors: the stream goes on with its first held event."""
        ...


class InboxStore(Protocol):
    """The store of an inbox."""

    admin: InboxAdmin

    @property
    def transactions(self) -> TransactionSource:
        """The source of the transactions that handlers work in; it also says which handlers can."""
        ...

    def transaction(self) -> AbstractAsyncContextManager[Any]:
        """Open a transaction; commit when the block ends, roll back when it raises."""
        ...

    async def ping(self) -> bool:
        """Tell whether the store can be reached now."""
        ...

    async def record_receipts(
        self, tx: Any, consumer: str, events: Sequence[ReceivedEvent], *, ordered: bool
    ) -> Receipts:
        """Insert receipts in sorted order and lock the rows of streams; `ordered` creates rows for numbered events.

        The first of two events with the same id counts. A held event is not fresh.
        """
        ...

    async def record_outcomes(
        self, tx: Any, consumer: str, entries: Sequence[EventOutcome], states: Mapping[InboxStream, StreamState]
    ) -> Mapping[UUID, int]:
        """Write the outcomes of fresh events, and the changed states of their streams.

        Returns the ids of new dead letters by event; the dead letters exist once the transaction commits.

        A held event leaves the held events, unless its outcome is `Held`. `since` starts anew when the cause of a
        stream changes. Without `ordering`, a stream loses its row with its last held event.
        """
        ...

    async def draining(
        self, consumer: str, limit: int, *, cause: InboxBlockReason = InboxBlockReason.DRAINING
    ) -> list[InboxStream]:
        """List streams that are blocked for this cause, longest first."""
        ...

    async def claim_held(
        self, tx: Any, consumer: str, stream: InboxStream, *, by_sequence: bool, limit: int, early: bool = False
    ) -> ClaimedHeld | None:
        """Lock a draining stream and insert receipts for its first held events. None if another process has the stream.

        With `early`, a stream whose events came early drains too, by sequence: no predecessor is awaited any more.
        """
        ...

    async def overdue(self, consumer: str, seconds: float, limit: int) -> list[Overdue]:
        """List streams that have waited longer for a predecessor."""
        ...

    async def prune(self, consumer: str, *, receipt_days: float, dead_letter_days: float) -> InboxPruned:
        """Remove older rows in small batches. A dead letter that blocks its stream stays."""
        ...

    async def prune_participants(self, days: float) -> int:
        """Remove older replies of saga participants in small batches; return the number of rows."""
        ...

    async def close(self) -> None:
        """Close connections and threads."""
        ...
