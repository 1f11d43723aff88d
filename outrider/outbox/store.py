"""The contract of outbox stores: undelivered events, lanes and their owners, and outcomes.

Every adapter keeps these rules, and the contract suite checks them:

1. Time is database time. A relay is alive until its heartbeat expires; lanes of a dead relay are free.
2. Every `settle` first locks its lanes by owner and epoch, and touches rows of the locked lanes only. A relay that lost
   a lane changes no row in it, even if a statement was already waiting when the lane was taken. `fetch` and `due` read
   rows of owned lanes and take no lock, so that a relay which is frozen while it reads loses its lanes with its lease.
3. `fetch` reads every lane from its start, so an event that commits late is found as well.
4. `fetch` and `due` return rows with a topic. A row without a topic gets the answer of the store's topic rule, for the
   broker, the archive, the dead letters and the blocked streams alike.
5. A stream with a failed, dead-lettered or deferred head is blocked. The events behind the head are held, and leave in
   order of position. Only the fenced write that finds no held event removes the blocked row.
6. An event that leaves the outbox goes to the archive or the dead letters in the same write, or is deleted if the store
   keeps no archive.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager
from typing import Any, Protocol
from uuid import UUID

from outrider.checks import CheckResult
from outrider.event import OutboxRow, Stream, TopicRule
from outrider.operation_log import OperationLog
from outrider.outbox.model import (
    BlockedStream,
    Criteria,
    DeadLetterEdit,
    DeadRelay,
    Due,
    EventPlace,
    Fetched,
    HeartbeatResult,
    JournalPage,
    JournalSwitch,
    Lease,
    OptimisticClaim,
    Pruned,
    Retention,
    Settlements,
)


class OutboxAdmin(Protocol):
    """The operations for operators, behind the command line and the console."""

    async def counts(self, *, sent: bool = True) -> dict[str, int]:
        """Count rows by state, dead letters included. Counting the archive (`sent`) may take long."""
        ...

    async def events(self, criteria: Criteria) -> list[dict[str, Any]]:
        """List undelivered events, oldest first; with state `sent`, archived events, newest first."""
        ...

    async def event(self, event_id: UUID) -> dict[str, Any]:
        """Return an event from outbox, archive or dead letters, or raise NotFound."""
        ...

    async def dead_letters(self, criteria: Criteria) -> list[dict[str, Any]]:
        """List dead letters in replay order."""
        ...

    async def dead_letter_groups(self, criteria: Criteria) -> list[dict[str, Any]]:
        """Count the dead letters that match by reason and topic, largest group first; `limit` is in groups."""
        ...

    async def has_due(self) -> bool:
        """Return whether an event can be published now: an event at the start of a lane, or a blocked stream is due."""
        ...

    async def topics(self, limit: int) -> list[str]:
        """Return topics of undelivered events, sorted; in a large backlog, the topics of the oldest events."""
        ...

    async def relays(self) -> int:
        """Return the number of living relays."""
        ...

    async def lane_owner(self, lane: int) -> str | None:
        """Return the live relay that owns a lane; None if the lane is free."""
        ...

    async def blocked_streams(self, limit: int) -> list[BlockedStream]:
        """List blocked streams; streams with a dead letter come first."""
        ...

    async def replay(self, event_ids: Sequence[UUID], actor: str) -> int:
        """Publish dead letters again, in order, and record the replay; return the number of replayed events.

        An event of a blocked stream resumes at the head. A skipped event is staged anew and marked `replayed`.
        """
        ...

    async def dead_letter(self, event_id: UUID, actor: str, failure: dict[str, Any], policy: str) -> bool:
        """Move an undelivered event to the dead letters; return False if the event has left the outbox.

        The command takes the lane from its relay for a moment, so that no result in flight can contradict the command.
        """
        ...

    async def edit(self, event_id: UUID, actor: str, edit: DeadLetterEdit) -> bool:
        """Change a dead letter before its replay, and record the change; return False if the dead letter is gone.

        A dead letter with a new topic leaves its stream: a blocked stream continues as after a discard, and a replay
        stages the event anew, without a number.
        """
        ...

    async def discard(self, event_ids: Sequence[UUID], actor: str) -> int:
        """Discard dead letters, record the command, and let blocked streams continue; return the number discarded."""
        ...


class OutboxMaintenance(Protocol):
    """Maintenance, which keeps the tables bounded. Several relays may call at once; a single relay does each duty."""

    async def sweep(self) -> list[DeadRelay]:
        """Remove dead relays, which frees their lanes; return the removed relays."""
        ...

    async def take_duty(self, name: str, every_seconds: float) -> bool:
        """Return True to a single caller per interval, which then does the duty."""
        ...

    async def prepare(self) -> None:
        """Create archive partitions ahead of time."""
        ...

    async def prune(self, retention: Retention) -> Pruned:
        """Remove rows older than their retention, in bounded steps.

        A dead letter that is removed leaves a line in the operation log, as if an operator had discarded it.
        """
        ...


class OutboxJournal(Protocol):
    """The journal of a store."""

    async def switch(self) -> JournalSwitch:
        """Return the state of the switch."""
        ...

    async def turn(self, *, on: bool) -> bool:
        """Turn the switch for all writers at once; return False if nothing changed."""
        ...

    async def histories(self, after: UUID | None, limit: int) -> JournalPage:
        """Return events with entries since the journal is on; about `limit` entries, and all entries of an event."""
        ...

    async def unjournaled(self, place: EventPlace, after: UUID | None, limit: int) -> JournalPage:
        """Read at most `limit` events of a table, staged since the journal is on; return those without an entry."""
        ...


class OutboxStore(Protocol):
    """The tables of an outbox, as a relay uses them.

    `lanes` is the number of lanes per band, fixed at installation. `topic_rule` returns the topic of rows that were
    inserted without a topic. `operations` has the commands of operators to all of the store.
    """

    lanes: int
    topic_rule: TopicRule
    admin: OutboxAdmin
    maintenance: OutboxMaintenance
    operations: OperationLog
    journal: OutboxJournal

    async def heartbeat(self, relay: str, lease_seconds: float, *, first: bool) -> HeartbeatResult | None:
        """Join, or renew a heartbeat; return None if the heartbeat had expired: then every lane may be lost."""
        ...

    async def claim(self, relay: str, lanes: Sequence[int]) -> Lease:
        """Claim the free lanes among `lanes`; the epoch of every claimed lane goes up by one."""
        ...

    async def release(self, lease: Lease) -> None:
        """Release lanes without events in flight."""
        ...

    async def leave(self, relay: str) -> None:
        """End a heartbeat on a clean stop; the relay's lanes are free at once."""
        ...

    async def fetch(self, lease: Lease, quotas: Mapping[int, int]) -> Fetched:
        """Read the start of each lane, up to its quota."""
        ...

    async def blocked(self, streams: Sequence[Stream]) -> set[Stream]:
        """Return the blocked streams among `streams`."""
        ...

    async def due(self, lease: Lease, events_max: int) -> Due:
        """Return blocked streams that are due, longest due first: the head alone, or a run for a draining stream.

        A draining stream without held events is returned empty, and the owner settles the stream.
        """
        ...

    async def last_values(self, wanted: Sequence[tuple[str, Stream]]) -> dict[tuple[str, Stream], int]:
        """Return the last published values of increasing fields, by rule and stream; absent without a value."""
        ...

    async def settle(self, lease: Lease, settlements: Settlements) -> int:
        """Write outcomes in lanes that are still owned; return the number of outcomes applied.

        A stream with a confirmed held event, and every stream of `emptied`, continues draining, or is unblocked if the
        same write finds no held event of the stream. The values of increasing fields are written in the same
        transaction: a crash must not leave one without the other.
        """
        ...

    async def renew_claim(self, claim: OptimisticClaim, event_ids: Sequence[UUID]) -> list[OutboxRow]:
        """Renew the claim of a writer after its commit, by one reading of the clock; return the rows still claimed."""
        ...

    async def settle_claim(self, claim: OptimisticClaim, confirmed: Sequence[UUID], yielded: Sequence[UUID]) -> None:
        """Settle rows that a writer still claims: confirmed rows leave the outbox, yielded rows become pending."""
        ...

    async def notify(self) -> None:
        """Wake relays after a commit."""
        ...

    def listen(self, wake: Callable[[], None]) -> AbstractAsyncContextManager[None]:
        """Call `wake` on every notification while the context is open. Notifications may be lost; relays also poll."""
        ...

    async def check(self) -> list[CheckResult]:
        """Check the setup of the database for an outbox, read-only; return good and bad results."""
        ...

    async def close(self) -> None:
        """Close connections and threads."""
        ...
