"""The tables of the memory store: dictionaries, with sorted indexes as in the SQL stores."""

from __future__ import annotations

from bisect import bisect_left, insort
from collections import defaultdict
from collections.abc import Callable, Hashable, Iterable, Iterator
from dataclasses import dataclass, field
from datetime import datetime, timedelta
from typing import Any, Generic, NamedTuple, Protocol, Self, TypeVar
from uuid import UUID

from outrider.audit_chain import AuditAnchor, AuditHead, AuditLine
from outrider.event import SKIPPED_TYPE, InboxStream, OutboxRow, ReceivedEvent, Stream, uuid7
from outrider.inbox.model import InboxDeadLettered, StreamState
from outrider.operation_log import OperationHead, OperationLine
from outrider.outbox import model
from outrider.outbox.model import CLAIM_SECONDS_MAX, BlockReason, JournalKind, JournalSwitch, OptimisticClaim, State
from outrider.saga.model import Instance, JournalEntry, Phase, SagaMessage, Status

DEAF = frozenset({Status.COMPLETED, Status.COMPENSATED})
"""A saga in one of these states reads no messages."""

Line = tuple[str, Phase]
"""The key of a journal entry."""

K = TypeVar("K", bound=Hashable)


@dataclass(slots=True)
class OutboxTableRow:
    """One undelivered event with the internal fields of the store."""

    event: OutboxRow
    stream: Stream
    priority: int
    claimed_by: str | None = None
    claimed_until: datetime | None = None
    failure: dict[str, Any] | None = None


@dataclass(slots=True)
class DeadRow:
    """One dead letter."""

    row: OutboxTableRow
    reason: str
    policy: str
    dead_lettered_at: datetime


@dataclass(slots=True)
class BlockRow:
    """The reason of a block, the position of the blocking event, and the due time (None: until an operator acts)."""

    cause: BlockReason
    head: int | None
    until: datetime | None


@dataclass(slots=True)
class LaneRow:
    """The owner and the epoch of a lane."""

    owner: str | None = None
    epoch: int = 0


class Shelf:
    """Positions in order, like a partial index of the SQL stores."""

    def __init__(self) -> None:
        self._positions: list[int] = []

    def add(self, position: int) -> None:
        insort(self._positions, position)

    def remove(self, position: int) -> None:
        at = bisect_left(self._positions, position)
        if at < len(self._positions) and self._positions[at] == position:
            del self._positions[at]

    def first(self, count: int) -> list[int]:
        return self._positions[:count]

    def __len__(self) -> int:
        return len(self._positions)


class JournalRow(NamedTuple):
    """An entry of the journal of the outbox."""

    event_id: UUID
    kind: JournalKind
    number: int
    at: datetime


@dataclass(slots=True)
class OperationTable:
    """The operation log and the head of its chain."""

    head: OperationHead = field(default_factory=OperationHead)
    lines: list[OperationLine] = field(default_factory=list)


@dataclass(slots=True)
class Tables:
    """All tables of the outbox."""

    rows: dict[int, OutboxTableRow] = field(default_factory=dict)
    ids: dict[UUID, int] = field(default_factory=dict)
    fetchable: dict[int, Shelf] = field(default_factory=lambda: defaultdict(Shelf))
    waiting: dict[Stream, Shelf] = field(default_factory=lambda: defaultdict(Shelf))
    blocked: dict[Stream, BlockRow] = field(default_factory=dict)
    archive: dict[UUID, tuple[OutboxTableRow, datetime]] = field(default_factory=dict)
    dead: dict[UUID, DeadRow] = field(default_factory=dict)
    counters: dict[Stream, int] = field(default_factory=dict)
    lanes: dict[int, LaneRow] = field(default_factory=dict)
    relays: dict[str, tuple[datetime, datetime]] = field(default_factory=dict)
    """The time of each relay's last heartbeat less a lease, and plus a lease: it is alive between the two."""
    duties: dict[str, datetime] = field(default_factory=dict)
    operations: OperationTable = field(default_factory=OperationTable)
    last_values: dict[tuple[str, Stream], int] = field(default_factory=dict)
    journal: list[JournalRow] = field(default_factory=list)
    journal_switch: JournalSwitch = field(default_factory=lambda: JournalSwitch(is_on=False))
    journal_number: int = 0
    journal_start: int = 0
    """The last number before the journal was switched."""

    def known(self, event_id: UUID) -> bool:
        return event_id in self.ids or event_id in self.archive or event_id in self.dead

    def put(self, row: OutboxTableRow) -> None:
        self.rows[row.event.position] = row
        self.ids[row.event.event_id] = row.event.position
        self._shelf(row).add(row.event.position)

    def take(self, position: int) -> OutboxTableRow:
        row = self.rows.pop(position)
        del self.ids[row.event.event_id]
        self._shelf(row).remove(position)
        if row.stream in self.waiting and not self.waiting[row.stream]:
            del self.waiting[row.stream]
        return row

    def transition(self, position: int, state: State, **changes: Any) -> None:
        """Change the state of a row and move the row to the index of the new state."""
        row = self.take(position)
        row.event = row.event._replace(state=state, **changes)
        self.put(row)

    def _shelf(self, row: OutboxTableRow) -> Shelf:
        if row.event.state in model.FETCHABLE:
            return self.fetchable[row.event.lane]
        return self.waiting[row.stream]


def has_claim(row: OutboxTableRow, claim: OptimisticClaim, now: datetime) -> bool:
    """Return whether the optimistic claim of the writer on a row is still valid."""
    return row.claimed_by == claim.owner and is_claimed(row, now)


def is_claimed(row: OutboxTableRow, now: datetime) -> bool:
    """Return whether an optimistic claim on a row is still valid."""
    if row.event.state != State.OPTIMISTIC or row.claimed_until is None:
        return False
    return now < row.claimed_until <= now + timedelta(seconds=CLAIM_SECONDS_MAX)


def skipped_marker(row: OutboxTableRow) -> OutboxTableRow | None:
    """Return the marker of a skipped event: same position and sequence number, no content. None if unnumbered."""
    event = row.event
    if event.sequence is None or event.event_type == SKIPPED_TYPE:
        return None
    marker = event._replace(
        event_id=uuid7(),
        event_type=SKIPPED_TYPE,
        payload=b"null",
        headers=b'{"skipped": "%s"}' % str(event.event_id).encode(),
        attempts=0,
        state=State.FAILED,
        available_at=None,
        suspect=False,
    )
    return OutboxTableRow(marker, row.stream, row.priority)


@dataclass(frozen=True, slots=True)
class Receipt:
    """A receipt: the event was handled."""

    received: ReceivedEvent
    received_at: datetime
    seconds: float | None


@dataclass(frozen=True, slots=True)
class StreamRow:
    """A stream state, and the time since which events wait for the present reason."""

    state: StreamState
    since: datetime


@dataclass(frozen=True, slots=True)
class DeadReceivedEvent:
    """A dead letter of a consumer."""

    consumer: str
    received: ReceivedEvent
    outcome: InboxDeadLettered
    dead_lettered_at: datetime


@dataclass(slots=True)
class InboxTables:
    """All tables of the inbox.

    Held events and dead letters share their numbers, so that a replay keeps the position.
    """

    receipts: dict[tuple[str, UUID], Receipt] = field(default_factory=dict)
    streams: dict[tuple[str, InboxStream], StreamRow] = field(default_factory=dict)
    waiting: dict[int, tuple[str, ReceivedEvent]] = field(default_factory=dict)
    dead: dict[int, DeadReceivedEvent] = field(default_factory=dict)
    number: int = 0

    def next_number(self) -> int:
        """Take the next number."""
        self.number += 1
        return self.number

    def of(self, consumer: str) -> list[tuple[InboxStream, StreamRow]]:
        """Return the streams of a consumer."""
        return [(stream, row) for (name, stream), row in self.streams.items() if name == consumer]

    def waiting_of(self, consumer: str, stream: InboxStream, by_sequence: bool) -> list[ReceivedEvent]:
        """Return the held events of a stream, in order."""
        found = [
            received
            for _, (name, received) in sorted(self.waiting.items())
            if name == consumer and received.stream == stream
        ]
        return sorted(found, key=lambda received: received.sequence or 0) if by_sequence else found

    def park(self, consumer: str, received: ReceivedEvent) -> None:
        """Add a held event, unless present."""
        known = {(name, waiting.event_id) for name, waiting in self.waiting.values()}
        if received.waiting_id is None and (consumer, received.event_id) not in known:
            number = self.next_number()
            self.waiting[number] = (consumer, received._replace(waiting_id=number))


class Copied(Protocol):
    """A row with a copy method."""

    def copy(self) -> Self:
        """Return an independent copy of the row."""
        ...


class WriteLog(Protocol):
    """A transaction as the tables see it."""

    on_commit: list[Callable[[], None]]


R = TypeVar("R", bound=Copied)


class Table(Generic[K, R]):
    """Rows by key. A missing row reads as an empty row."""

    def __init__(self, empty: Callable[[], R]) -> None:
        self.rows: dict[K, R] = {}
        self.empty = empty

    def seen_by(self, tx: WriteLog, key: K) -> R:
        """Return a row as the transaction sees it."""
        row = self.rows[key].copy() if key in self.rows else self.empty()
        for write in tx.on_commit:
            if isinstance(write, Write) and write.table is self and write.key == key:
                write.change(row)
        return row

    def write(self, tx: WriteLog, key: K, change: Callable[[R], None]) -> None:
        """Change a row at the commit of the transaction."""
        tx.on_commit.append(Write(self, key, change))


@dataclass(frozen=True, slots=True)
class Write(Generic[K, R]):
    """A change that waits for its transaction."""

    table: Table[K, R]
    key: K
    change: Callable[[R], None]

    def __call__(self) -> None:
        self.change(self.table.rows.setdefault(self.key, self.table.empty()))


@dataclass(slots=True)
class SagaRow:
    """The instance, journal, messages and audit log of a saga. The audit log outlives the instance."""

    instance: Instance | None = None
    journal: dict[Line, JournalEntry] = field(default_factory=dict)
    messages: dict[int, SagaMessage] = field(default_factory=dict)
    seen: set[int] = field(default_factory=set)
    audit: list[AuditLine] = field(default_factory=list)
    claimed_from: datetime | None = None
    """One lease before the claim, or its last renewal. Before that time, the claim is dead as well."""

    def copy(self) -> SagaRow:
        journal, messages, seen, audit = dict(self.journal), dict(self.messages), set(self.seen), list(self.audit)
        return SagaRow(self.instance, journal, messages, seen, audit, self.claimed_from)

    @property
    def listens(self) -> bool:
        """Return whether the saga still reads messages."""
        return self.instance is not None and self.instance.status not in DEAF

    @property
    def unseen(self) -> list[SagaMessage]:
        """Return the messages that wake a worker, in order of insertion."""
        return [message for message_id, message in sorted(self.messages.items()) if message_id not in self.seen]


class ParticipantRow(NamedTuple):
    """A command to a participant, and the reply."""

    barred: bool
    at: datetime
    reply: bytes | None = None


Passages = dict[Phase, ParticipantRow]


class SagaTables:
    """All tables of sagas."""

    def __init__(self) -> None:
        self.sagas: Table[UUID, SagaRow] = Table(SagaRow)
        self.names: Table[tuple[str, str], set[UUID]] = Table(set)
        self.participants: Table[tuple[str, str], Passages] = Table(dict)
        self.listeners: list[Callable[[], None]] = []
        self.anchors: list[AuditAnchor] = []
        self.heads: list[AuditHead] = []
        self._number = 0

    def add_lines(self, row: SagaRow, lines: Iterable[AuditLine]) -> None:
        """Append lines to the audit log of a saga."""
        row.audit += [line._replace(place=self.next_number()) for line in lines]

    def next_number(self) -> int:
        """Take the next number of a message or an audit line; gaps are harmless."""
        self._number += 1
        return self._number

    def living(self) -> Iterator[tuple[SagaRow, Instance]]:
        """Return all instances with their rows."""
        return ((row, row.instance) for row in self.sagas.rows.values() if row.instance)

    def prune_participants(self, before: datetime) -> int:
        """Remove old replies of participants; return the number of removed commands."""
        removed = 0
        for key, passages in list(self.participants.rows.items()):
            old = [phase for phase, passage in passages.items() if passage.at < before]
            for phase in old:
                del passages[phase]
            removed += len(old)
            if not passages:
                del self.participants.rows[key]
        return removed

    def wake(self) -> None:
        """Notify workers of a possible message."""
        for wake in self.listeners:
            wake()
