"""The store contract: where undelivered events live, who owns their lanes, and how outcomes are written.

Rules every adapter keeps, and the contract suite checks:

1. Time is the database's. A relay is alive while its heartbeat lies ahead; lanes of a dead relay are free.
2. Every `fetch`, `due` and `settle` first locks its lanes by owner and epoch, and touches rows of those lanes only.
   A relay that lost a lane changes nothing in it, even if its statement was already waiting when the lane was taken.
3. `fetch` reads each lane from its start, so an event that commits late is found like any other.
4. A stream with a failed, held or deferred head is blocked. Its events are waiting; they leave in order, by position.
   The blocked row goes only in the fenced write that finds none of them left.
5. What leaves the outbox goes to the archive (or is deleted, if told so) or to the dead letters, in the same write.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass, field
from datetime import datetime
from enum import StrEnum
from typing import Any, NamedTuple, Protocol
from uuid import UUID

from outrider.event import StagedEvent, Stream
from outrider.finding import Finding
from outrider.outcome import Outcome


class Draft(NamedTuple):
    """A validated event, ready to be inserted; the column order of every staging statement."""

    event_id: UUID
    event_type: str
    aggregate_type: str | None
    aggregate_id: str | None
    payload: str
    headers: str
    topic: str
    key: str | None
    routing_key: str | None
    priority: int
    schema_version: int
    saga_id: str | None
    sequence: int | None
    max_attempts: int | None
    retry: str | None
    created_at: datetime | None
    available_at: datetime | None


class Drafts(NamedTuple):
    """What one call stages.

    `numbered` are to be counted by stream; `supplied` says that the caller chose ids, so known ones must be looked up.
    `ids` has one id per event given, in order.
    """

    plain: list[Draft]
    numbered: list[Draft]
    supplied: bool
    ids: tuple[UUID, ...] = ()


class Placed(NamedTuple):
    """A row that staging really inserted: known ids are missing."""

    event_id: UUID
    optimistic: bool


@dataclass(frozen=True, slots=True)
class Hold:
    """A writer's wish to publish straight after commit; rows are its own until the seconds have passed."""

    owner: str
    seconds: float


@dataclass(frozen=True, slots=True)
class Lease:
    """The proof that a relay owns lanes: who, and at which epoch of each lane."""

    owner: str
    epochs: Mapping[int, int] = field(default_factory=dict)

    def only(self, lanes: Iterable[int]) -> Lease:
        """Return the lease over just these lanes."""
        return Lease(self.owner, {lane: self.epochs[lane] for lane in lanes if lane in self.epochs})

    def without(self, lanes: Iterable[int]) -> Lease:
        """Return the lease with these lanes given up."""
        gone = set(lanes)
        return Lease(self.owner, {lane: epoch for lane, epoch in self.epochs.items() if lane not in gone})


class Pulse(NamedTuple):
    """What a heartbeat learns: how many relays are alive, and which lanes nobody owns."""

    relays: int
    free_lanes: list[int]


class Cause(StrEnum):
    """Why a stream is blocked. `draining`: its head is settled, and the waiting events go out."""

    FAILED = "failed"
    HELD = "held"
    DEFERRED = "deferred"
    DRAINING = "draining"


class Fetched(NamedTuple):
    """What a fetch found: events in lane order, the lanes still owned, and those with blocked streams."""

    events: list[StagedEvent]
    lanes: frozenset[int]
    blocked_lanes: frozenset[int]


class DueStream(NamedTuple):
    """A blocked stream whose time has come, with its first waiting events in order."""

    stream: Stream
    cause: Cause
    events: list[StagedEvent]


class Due(NamedTuple):
    """Blocked streams to work on now, and in how many seconds the next one is due (None: no other)."""

    streams: list[DueStream]
    next_seconds: float | None


class Settlement(NamedTuple):
    """One event and what became of it. The stream carries the topic the relay resolved."""

    event: StagedEvent
    stream: Stream
    outcome: Outcome


class Swept(NamedTuple):
    """A relay found dead, and how many lanes it left behind."""

    relay: str
    lanes: int


class Pruned(NamedTuple):
    """What upkeep removed."""

    archived: int
    dead_letters: int
    operations: int


@dataclass(frozen=True, slots=True)
class Retention:
    """How long settled things are kept."""

    archive_days: float = 7
    dead_letter_days: float = 30
    operation_days: float = 90


@dataclass(frozen=True, slots=True)
class Criteria:
    """Which events or dead letters a person asks for; everything given must match."""

    event_ids: tuple[UUID, ...] = ()
    state: str | None = None
    event_type: str | None = None
    topic: str | None = None
    key: str | None = None
    reason: str | None = None
    limit: int = 50


class Held(NamedTuple):
    """A blocked stream as a person sees it."""

    stream: Stream
    cause: str
    due_at: datetime | None
    waiting: int


class Desk(Protocol):
    """What people do through the command line and the console."""

    async def counts(self, *, sent: bool = True) -> dict[str, int]:
        """Count rows by state, dead letters included. The archive (`sent`) may be large; leave it out if not needed."""
        ...

    async def events(self, criteria: Criteria) -> list[dict[str, Any]]:
        """List undelivered events, oldest first; with state `sent`, archived ones, newest first."""
        ...

    async def event(self, event_id: UUID) -> dict[str, Any]:
        """Return all that is known of one event wherever it is, or raise NotFound."""
        ...

    async def dead_letters(self, criteria: Criteria) -> list[dict[str, Any]]:
        """List dead letters in the order they would be replayed."""
        ...

    async def topics(self, limit: int) -> list[str]:
        """Name topics of undelivered events, sorted. Of a large backlog only the oldest events are looked at."""
        ...

    async def relays(self) -> int:
        """Count the relays that are alive."""
        ...

    async def blocked_streams(self, limit: int) -> list[Held]:
        """List blocked streams, held ones first."""
        ...

    async def replay(self, event_ids: Sequence[UUID], actor: str) -> int:
        """Send dead letters again, in order, and record it; return how many.

        From a held stream the event resumes at the head. From a skipped one it is staged anew, marked `replayed`.
        """
        ...

    async def bury(self, event_id: UUID, actor: str, failure: dict[str, Any], policy: str) -> bool:
        """Move an undelivered event to the dead letters; return False if it had left by then.

        Takes the lane from its relay for the moment, so that no verdict in flight can contradict the move.
        """
        ...

    async def discard(self, event_ids: Sequence[UUID], actor: str) -> int:
        """Give dead letters up for good, record it, and let their held streams go on; return how many."""
        ...


class Upkeep(Protocol):
    """What keeps the tables bounded. Several relays may call at once; each duty is done by one."""

    async def sweep(self) -> list[Swept]:
        """Remove dead relays, so that their lanes are free, and say which."""
        ...

    async def take_duty(self, name: str, every_seconds: float) -> bool:
        """Return True to the one caller whose turn it is."""
        ...

    async def prepare(self) -> None:
        """Make room ahead of time (archive partitions)."""
        ...

    async def prune(self, retention: Retention) -> Pruned:
        """Remove what is older than its retention, in bounded steps."""
        ...


class Store(Protocol):
    """What a relay needs. `lanes` is the number per band, fixed when the store was installed."""

    lanes: int
    desk: Desk
    upkeep: Upkeep

    async def beat(self, relay: str, lease_seconds: float, *, joining: bool) -> Pulse | None:
        """Join, or renew a heartbeat that has not lapsed. None: it has, and every lane may be gone."""
        ...

    async def claim(self, relay: str, lanes: Sequence[int]) -> Lease:
        """Take those of the lanes that are free; the epoch of each goes up by one."""
        ...

    async def release(self, lease: Lease) -> None:
        """Give lanes back that have nothing in flight."""
        ...

    async def leave(self, relay: str) -> None:
        """End a heartbeat on a clean stop; whatever the relay still owned is free at once."""
        ...

    async def fetch(self, lease: Lease, quotas: Mapping[int, int]) -> Fetched:
        """Read the start of each lane, up to its quota."""
        ...

    async def blocked(self, streams: Sequence[Stream]) -> set[Stream]:
        """Return which of the streams are blocked."""
        ...

    async def due(self, lease: Lease, events_max: int) -> Due:
        """Return blocked streams whose time has come, longest due first: the head alone, or a run once draining.

        A stream that drains but has nothing waiting comes back empty, for the owner to settle.
        """
        ...

    async def confirm(self, lease: Lease, events: Sequence[StagedEvent]) -> int:
        """Settle fetched events that were all confirmed, none of which was waiting; return how many were applied.

        The same as `settle` would do, without looking at each.
        """
        ...

    async def settle(self, lease: Lease, settlements: Sequence[Settlement], emptied: Sequence[Stream] = ()) -> int:
        """Write outcomes in lanes still owned; return how many were applied.

        A stream whose waiting event was confirmed, and each of `emptied`, goes on draining, or is let go if this very
        write finds nothing of it waiting.
        """
        ...

    async def renew_hold(self, hold: Hold, event_ids: Sequence[UUID]) -> list[StagedEvent]:
        """Lengthen a writer's hold after its commit; only rows still held come back."""
        ...

    async def settle_hold(self, hold: Hold, confirmed: Sequence[UUID], yielded: Sequence[UUID]) -> None:
        """Write what an optimistic writer achieved, in rows that are still its own; the rest becomes pending."""
        ...

    async def hint(self) -> None:
        """Tell relays, after a commit, that there is something to fetch."""
        ...

    def wakeups(self, wake: Callable[[], None]) -> AbstractAsyncContextManager[None]:
        """Call `wake` on every hint while the context is open. Hints may be lost; polling is the floor."""
        ...

    async def examine(self) -> list[Finding]:
        """Say how the database is set up for an outbox, good and bad; changes nothing."""
        ...

    async def close(self) -> None:
        """Let go of connections and threads."""
        ...
