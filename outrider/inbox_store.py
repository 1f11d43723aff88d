"""The inbox's side of a store: receipts, gates, events that wait, and the dead letters of consumers.

Rules every adapter keeps, and the contract suite checks:

1. A receipt `(consumer, event_id)` is inserted first, and in the handler's own transaction. Two transactions with the
   same one wait for each other: the second sees what became of the first.
2. A stream's row is locked from `admit` or `resume` to the end of the transaction, wherever one exists; with a gate
   one always does.
3. What waits or is buried is kept whole, as bytes, and is bounded, listed and counted.
4. Transactions are of the kind that the handler would use by itself, and rolling one back leaves no trace.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass
from datetime import datetime
from enum import StrEnum
from typing import Any, NamedTuple, Protocol
from uuid import UUID

from outrider.delivery import Arrival, Delivery, InboxStream
from outrider.outcome import Policy, Reason


class Cause(StrEnum):
    """Why events of a stream wait at a consumer.

    `early`: a predecessor is missing. `held`: a dead letter waits for a person. `draining`: they may go, in order.
    """

    EARLY = "early"
    HELD = "held"
    DRAINING = "draining"


class Standing(NamedTuple):
    """Where a stream stands: the last sequence seen, why it waits if it does, and how many events wait."""

    seen: int | None = None
    cause: Cause | None = None
    waiting: int = 0


class Admitted(NamedTuple):
    """Which of the arrivals had no receipt, and where their streams stand. A stream without a row is missing."""

    fresh: frozenset[UUID]
    standings: Mapping[InboxStream, Standing]


class Waiting(NamedTuple):
    """An event that waits, whole as it came. `replayed` says that a person brought it back after it was skipped."""

    waiting_id: int
    event_id: UUID
    delivery: Delivery
    replayed: bool


class Resumed(NamedTuple):
    """A stream that drains: where it stands, its first waiting events in order, and which of them had no receipt."""

    standing: Standing
    waiting: list[Waiting]
    fresh: frozenset[UUID]


@dataclass(frozen=True, slots=True)
class Applied:
    """The handler's effects are in this transaction."""

    seconds: float = 0.0


@dataclass(frozen=True, slots=True)
class Dropped:
    """Nothing to do: at or below the last one seen, a marker, or of a type that has no handler."""

    why: str


@dataclass(frozen=True, slots=True)
class Waits:
    """Kept until its turn comes; its receipt goes."""


@dataclass(frozen=True, slots=True)
class Stalled:
    """Too many wait already: it stays with the broker, and its receipt goes."""


@dataclass(frozen=True, slots=True)
class Buried:
    """To the consumer's dead letters, with its bytes."""

    reason: Reason
    failure: dict[str, Any]
    policy: Policy
    attempts: int


Conclusion = Applied | Dropped | Waits | Stalled | Buried


class Entry(NamedTuple):
    """An arrival with a fresh receipt, and what becomes of it."""

    arrival: Arrival
    conclusion: Conclusion


class Overdue(NamedTuple):
    """A stream whose events have waited too long for a predecessor."""

    stream: InboxStream
    seen: int | None
    waiting: int
    since: datetime


@dataclass(frozen=True, slots=True)
class InboxCriteria:
    """Which dead letters of consumers a person asks for; everything given must match."""

    ids: tuple[int, ...] = ()
    consumer: str | None = None
    topic: str | None = None
    key: str | None = None
    reason: str | None = None
    limit: int = 50


class InboxPruned(NamedTuple):
    """What upkeep removed."""

    receipts: int
    dead_letters: int


class InboxDesk(Protocol):
    """What people do with a consumer's trouble."""

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
        """List streams that wait: consumer, topic, key, band, seen, cause, waiting, since; held ones first."""
        ...

    async def replay(self, ids: Sequence[int], actor: str) -> int:
        """Put dead letters back, each at its own place in its stream, to be handled again; return how many.

        The receipt goes. One that was skipped is marked `replayed`. The stream drains, once no dead letter holds it.
        """
        ...

    async def discard(self, ids: Sequence[int], actor: str) -> int:
        """Give dead letters up for good; a stream that was held goes on behind them. Return how many."""
        ...

    async def release(self, consumer: str, stream: InboxStream, actor: str) -> bool:
        """Stop waiting for missing predecessors: the stream goes on with the first event that waits."""
        ...


class InboxStore(Protocol):
    """What an inbox needs."""

    desk: InboxDesk

    def transaction(self) -> AbstractAsyncContextManager[Any]:
        """Open a transaction; commit when the block ends, roll back when it raises."""
        ...

    def objection(self, handler: Callable[..., Any]) -> str | None:
        """Say why such a handler cannot work with this store, and what to do; None if it can."""
        ...

    async def call(self, handler: Callable[..., Any], argument: Any, tx: Any) -> None:
        """Run a handler with its argument and the transaction, in the way that suits the driver.

        What it raises passes through. Raises UnfitHandler if the transaction has ended, however the handler itself has;
        and TransactionLost if it failed because its connection is gone.
        """
        ...

    async def answers(self) -> bool:
        """Tell whether the store can be reached at this moment."""
        ...

    async def admit(self, tx: Any, consumer: str, arrivals: Sequence[Arrival], *, gated: bool) -> Admitted:
        """Insert receipts, sorted, and lock the rows of streams; with a gate, make those of numbered arrivals.

        Of two arrivals with the same id in one call, the first counts. One that waits already is not fresh.
        """
        ...

    async def conclude(
        self, tx: Any, consumer: str, entries: Sequence[Entry], standings: Mapping[InboxStream, Standing]
    ) -> Mapping[UUID, int]:
        """Write what becomes of fresh arrivals, and where their streams stand now (changed ones only).

        Returns the ids of the dead letters that were made, by event; they are there once the transaction commits.

        An entry that comes from the waiting events leaves them, unless it goes on waiting. `since` starts anew when a
        stream's cause changes. A stream without a gate whose events are all gone has no row any more.
        """
        ...

    async def draining(self, consumer: str, limit: int, *, cause: Cause = Cause.DRAINING) -> list[InboxStream]:
        """List streams whose events wait for this cause, longest first."""
        ...

    async def resume(
        self, tx: Any, consumer: str, stream: InboxStream, *, by_sequence: bool, limit: int, early: bool = False
    ) -> Resumed | None:
        """Lock a stream that drains, and insert receipts for its first waiting events. None if another has it.

        With `early`, one whose events came early drains too, by their numbers: no gate asks for a predecessor any more.
        """
        ...

    async def overdue(self, consumer: str, seconds: float, limit: int) -> list[Overdue]:
        """List streams that have waited longer for a predecessor."""
        ...

    async def prune(self, consumer: str, *, receipt_days: float, dead_letter_days: float) -> InboxPruned:
        """Remove what is older, in small batches. A dead letter that holds its stream stays."""
        ...

    async def prune_barriers(self, days: float) -> int:
        """Remove, in small batches, what participants of sagas answered longer ago; return how many rows."""
        ...

    async def close(self) -> None:
        """Let go of connections and threads."""
        ...


Handler = Callable[[Any, Any], Awaitable[None] | None]
