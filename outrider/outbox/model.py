"""The records of the outbox: states and transitions, outcomes, leases, and the results of store calls.

A **publish result** is the broker's answer for a message. An **outcome** is the relay's decision about the event, which
the store writes under the fence. An `Unknown` result leads to no outcome.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from enum import StrEnum
from typing import Any, NamedTuple
from uuid import UUID

from outrider.brokers.base import CONFIRMED, Confirmed
from outrider.event import DeadLetterReason, OnDeadLetter, OutboxRow, Stream
from outrider.operation_log import content_digest

UNWRITTEN = ("claim", "release")
"""Transitions that write no row: a relay claims events by owning their lane."""


@dataclass(frozen=True, slots=True)
class Retry:
    """A failed attempt; the event is due again after the delay."""

    delay_seconds: float
    failure: dict[str, Any]


@dataclass(frozen=True, slots=True)
class Defer:
    """A delay without an attempt. If no delay is given, the event's own `available_at` decides."""

    delay_seconds: float | None = None


@dataclass(frozen=True, slots=True)
class Park:
    """The event waits behind the head of its stream."""


@dataclass(frozen=True, slots=True)
class DeadLettered:
    """The event is dead-lettered; the policy decides about the stream."""

    reason: DeadLetterReason
    failure: dict[str, Any]
    policy: OnDeadLetter = OnDeadLetter.BLOCK


Outcome = Confirmed | Retry | Defer | Park | DeadLettered


PARK = Park()


class State(StrEnum):
    """The state of an event."""

    PENDING = "pending"
    OPTIMISTIC = "optimistic"
    CLAIMED = "claimed"
    FAILED = "failed"
    DEFERRED = "deferred"
    PARKED = "parked"
    SENT = "sent"
    DEAD_LETTER = "dead_letter"


@dataclass(frozen=True, slots=True)
class Transition:
    """A permitted change of state. A transition without sources creates the event."""

    sources: tuple[State, ...]
    target: State
    description: str


S = State


TRANSITIONS: dict[str, Transition] = {
    "stage": Transition((), S.PENDING, "the business transaction commits"),
    "stage_optimistic": Transition(
        (), S.OPTIMISTIC, "the writer claims the event, to publish it right after the commit"
    ),
    "claim": Transition(
        (S.PENDING, S.OPTIMISTIC, S.FAILED, S.DEFERRED, S.PARKED), S.CLAIMED, "the owner of the lane publishes it"
    ),
    "release": Transition((S.CLAIMED,), S.PENDING, "the owner stops or loses its lease before a publish result"),
    "confirm": Transition((S.CLAIMED,), S.SENT, "the broker has confirmed it"),
    "confirm_optimistic": Transition((S.OPTIMISTIC,), S.SENT, "the broker has confirmed it to the writer"),
    "yield_optimistic": Transition((S.OPTIMISTIC,), S.PENDING, "the writer leaves it to the relay"),
    "retry": Transition((S.CLAIMED,), S.FAILED, "an attempt failed and is due again later"),
    "defer": Transition((S.CLAIMED,), S.DEFERRED, "it is not yet due, or its destination is down"),
    "park": Transition((S.CLAIMED,), S.PARKED, "it waits behind the head of its stream"),
    "dead_letter": Transition(
        (S.CLAIMED, S.PENDING, S.FAILED, S.DEFERRED, S.PARKED),
        S.DEAD_LETTER,
        "no attempt is left, or an operator gave the command",
    ),
    "replay": Transition((S.DEAD_LETTER,), S.PENDING, "an operator replays it, late"),
    "resume": Transition((S.DEAD_LETTER,), S.PARKED, "an operator replays it at the head of its blocked stream"),
}


FETCHABLE = frozenset({S.PENDING, S.OPTIMISTIC})
"""States of events that are found from the start of a lane."""


WAITING = frozenset({S.FAILED, S.DEFERRED, S.PARKED})
"""States of events that are found through their blocked stream."""


STORED = FETCHABLE | WAITING
"""All states of a row in the outbox."""


def allowed(state: State) -> dict[str, State]:
    """Return the transitions out of a state, with their targets.

    >>> allowed(State.OPTIMISTIC)["confirm_optimistic"]
    <State.SENT: 'sent'>
    """
    return {name: transition.target for name, transition in TRANSITIONS.items() if state in transition.sources}


def guard(transition: str) -> tuple[State, ...]:
    """Return the stored states of a row from which a transition may be written.

    >>> State.PARKED in guard("confirm")
    True
    """
    sources = TRANSITIONS[transition].sources
    if State.CLAIMED not in sources:
        return sources
    return tuple(dict.fromkeys(s for source in sources for s in _stored(source)))


def _stored(state: State) -> tuple[State, ...]:
    return TRANSITIONS["claim"].sources if state is State.CLAIMED else (state,)


def stored_transitions() -> list[tuple[State, State]]:
    """Return every (from, to) that a row of the outbox may make by an update; the store rejects all others."""
    written = [name for name in TRANSITIONS if name not in UNWRITTEN]
    pairs = {(source, TRANSITIONS[name].target) for name in written for source in guard(name)}
    return sorted((source, target) for source, target in pairs if source in STORED and target in STORED)


def sql_list(states: Iterable[State]) -> str:
    """Write states as a list of SQL literals.

    >>> sql_list(FETCHABLE)
    "'optimistic', 'pending'"
    """
    return ", ".join(f"'{state}'" for state in sorted(states))


def mermaid() -> str:
    """Draw the table as a Mermaid state diagram."""
    lines = ["stateDiagram-v2"]
    for name, transition in TRANSITIONS.items():
        lines += [f"    {source} --> {transition.target}: {name}" for source in transition.sources or ("[*]",)]
    lines.append(f"    {State.SENT} --> [*]")
    return "\n".join(lines)


class NewEvent(NamedTuple):
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
    schema_version: str
    saga_id: str | None
    sequence: int | None
    max_attempts: int | None
    retry: str | None
    created_at: datetime | None
    available_at: datetime | None


class StageRequest(NamedTuple):
    """The events of a call of stage.

    `numbered` events get a sequence number by stream; `supplied` means that the caller chose ids, so the store must
    look for known ids. `ids` has one id per given event, in order.
    """

    plain: list[NewEvent]
    numbered: list[NewEvent]
    supplied: bool
    ids: tuple[UUID, ...] = ()


class StagedRow(NamedTuple):
    """A row that staging has inserted; events with a known id have none."""

    event_id: UUID
    optimistic: bool


CLAIM_SECONDS_MAX = 60.0
"""The maximum of a claim. A claim that ends later than this from now is from before the clock was set back, and has
ended."""


@dataclass(frozen=True, slots=True)
class OptimisticClaim:
    """The claim of a writer that publishes its rows right after the commit; the claim ends after `seconds`."""

    owner: str
    seconds: float


@dataclass(frozen=True, slots=True)
class Lease:
    """The proof that a relay owns lanes: the relay's name, and the epoch of each lane."""

    owner: str
    epochs: Mapping[int, int] = field(default_factory=dict)

    def only(self, lanes: Iterable[int]) -> Lease:
        """Return the lease over the given lanes only."""
        return Lease(self.owner, {lane: self.epochs[lane] for lane in lanes if lane in self.epochs})

    def without(self, lanes: Iterable[int]) -> Lease:
        """Return the lease without the given lanes."""
        dropped = set(lanes)
        return Lease(self.owner, {lane: epoch for lane, epoch in self.epochs.items() if lane not in dropped})


class HeartbeatResult(NamedTuple):
    """The answer to a heartbeat: the number of living relays, and the lanes without an owner."""

    relays: int
    free_lanes: list[int]


class BlockReason(StrEnum):
    """The reason for which a stream is blocked. `draining`: the head is settled, and the held events are published."""

    FAILED = "failed"
    DEAD_LETTER = "dead_letter"
    DEFERRED = "deferred"
    DRAINING = "draining"


class Fetched(NamedTuple):
    """The result of a fetch: events in lane order, the lanes still owned, and the lanes with blocked streams."""

    events: list[OutboxRow]
    lanes: frozenset[int]
    blocked_lanes: frozenset[int]


class DueStream(NamedTuple):
    """A blocked stream that is due, with its first waiting events in order."""

    stream: Stream
    cause: BlockReason
    events: list[OutboxRow]


class Due(NamedTuple):
    """Blocked streams to work on now, and the seconds until the next stream is due (None: no other)."""

    streams: list[DueStream]
    next_seconds: float | None


class Settlement(NamedTuple):
    """The outcome of an event."""

    event: OutboxRow
    stream: Stream
    outcome: Outcome


class LastValue(NamedTuple):
    """The last value of an increasing field that was published in a stream; `rule` names the rule of the field."""

    rule: str
    stream: Stream
    value: int


@dataclass(frozen=True, slots=True)
class Settlements:
    """The outcomes of a pass, which a store writes together.

    `confirmed` are confirmed events from the start of a lane. A pass without a failure has no other outcomes, and a
    store need not look at the events individually. `others` are all other outcomes, including confirmed events of
    blocked streams. `emptied` are blocked streams without a remaining event. `last_values` are the values of increasing
    fields by event: a store writes those of confirmed events with the outcomes.
    """

    confirmed: Sequence[OutboxRow] = ()
    others: Sequence[Settlement] = ()
    emptied: Sequence[Stream] = ()
    last_values: Mapping[UUID, Sequence[LastValue]] = field(default_factory=dict)

    @classmethod
    def of(cls, settlements: Iterable[Settlement], emptied: Sequence[Stream] = ()) -> Settlements:
        """Sort outcomes into a record."""
        confirmed: list[OutboxRow] = []
        others: list[Settlement] = []
        for settlement in settlements:
            event, _, outcome = settlement
            if isinstance(outcome, Confirmed) and event.state not in WAITING:
                confirmed.append(event)
            else:
                others.append(settlement)
        return cls(confirmed, others, emptied)

    def __bool__(self) -> bool:
        return bool(self.confirmed or self.others or self.emptied)

    @property
    def only_confirmed(self) -> bool:
        """Return whether all outcomes are confirmed events from the start of a lane."""
        return not self.others and not self.emptied

    def repeatable_by_lane(self) -> dict[int, Settlements]:
        """Return the part that may be written twice, by lane: events of streams in which all events are confirmed.

        The first write may have succeeded without an answer. A second write of another outcome would count an attempt
        twice, or end the wait of a stream; the next pass finds those outcomes again.
        """
        mixed = {stream for _, stream, outcome in self.others if not isinstance(outcome, Confirmed)}
        found: dict[int, tuple[list[OutboxRow], list[Settlement]]] = {}
        for event in self.confirmed:
            found.setdefault(event.lane, ([], []))[0].append(event)
        for settlement in self.others:
            if settlement.stream not in mixed:
                found.setdefault(settlement.stream.lane, ([], []))[1].append(settlement)
        return {lane: Settlements(*parts, last_values=self.last_values) for lane, parts in found.items()}

    def raised_values(self, owned: Collection[int]) -> list[LastValue]:
        """Return the highest value of each field and stream among the confirmed events of owned lanes, sorted."""
        if not self.last_values:
            return []
        highest: dict[tuple[str, Stream], int] = {}
        for event, stream, outcome in self.outcomes():
            for rule, _, value in self.last_values.get(event.event_id, ()) if isinstance(outcome, Confirmed) else ():
                if stream.lane in owned:
                    highest[rule, stream] = max(value, highest.get((rule, stream), value))
        return [LastValue(rule, stream, value) for (rule, stream), value in sorted(highest.items())]

    def outcomes(self) -> list[Settlement]:
        """Return every outcome with its event and stream."""
        return [*(Settlement(event, event.stream, CONFIRMED) for event in self.confirmed), *self.others]


EXPIRE_ACTOR, EXPIRE_VERB = "maintenance", "expire"
"""Actor and verb of the record that a dead letter leaves when its retention is over."""


class DeadRelay(NamedTuple):
    """A dead relay, and the number of lanes that it owned."""

    relay: str
    lanes: int


class Pruned(NamedTuple):
    """The number of rows that maintenance removed."""

    archived: int
    dead_letters: int
    operations: int
    entries: int = 0
    """Entries of the journal."""


@dataclass(frozen=True, slots=True)
class Retention:
    """The days for which settled events and operator records are kept.

    A dead letter is an undelivered event, so it is kept until an operator acts, unless `dead_letter_days` is given. An
    entry of the journal is kept longer than `journal_days` while a table holds its event.
    """

    archive_days: float = 7
    dead_letter_days: float | None = None
    operation_days: float = 90
    journal_days: float = 14


@dataclass(frozen=True, slots=True)
class Criteria:
    """A filter for events or dead letters; all given fields must match."""

    event_ids: tuple[UUID, ...] = ()
    state: str | None = None
    event_type: str | None = None
    topic: str | None = None
    key: str | None = None
    reason: str | None = None
    limit: int = 50


class DeadLetterEdit(NamedTuple):
    """Validated changes to a dead letter. A field with None stays unchanged; `headers` are added to the old headers."""

    payload: str | None = None
    headers: Mapping[str, str] = {}
    topic: str | None = None

    def headers_over(self, stored: str | bytes, *, moved: bool) -> str:
        """Return the headers to store. An event that moved to another topic has no number in a gapless stream."""
        kept = {name: value for name, value in json.loads(stored).items() if not (moved and name == "gapless")}
        return json.dumps({**kept, **self.headers}, ensure_ascii=False)

    def changes(self, payload: str | bytes, topic: str) -> dict[str, Any]:
        """Return the details for the operation log: what changed, with digests in place of payloads."""
        found: dict[str, Any] = {}
        if self.payload is not None:
            found["payload"] = {"before": content_digest(payload), "after": content_digest(self.payload)}
        if self.headers:
            found["headers"] = sorted(self.headers)
        if self.topic not in (None, topic):
            found["topic"] = {"before": topic, "after": self.topic}
        return found


class BlockedStream(NamedTuple):
    """A blocked stream, as shown to operators."""

    stream: Stream
    cause: str
    due_at: datetime | None
    waiting: int


class JournalKind(StrEnum):
    """The kind of an entry. `archived` events are delivered and kept; `sent` events are delivered and deleted."""

    STAGED = "staged"
    ARCHIVED = "archived"
    SENT = "sent"
    DEAD_LETTER = "dead_letter"
    DISCARDED = "discarded"
    EXPIRED = "expired"
    RETRACTED = "retracted"
    """The transaction staged a known id and took the row back."""


class EventPlace(StrEnum):
    """The tables that hold events."""

    OUTBOX = "outbox"
    ARCHIVE = "archive"
    DEAD_LETTERS = "dead_letters"


class OutboxJournalEntry(NamedTuple):
    """An entry. A store without transaction ids or a log has None, or a number of its own, as log position."""

    kind: JournalKind
    transaction_id: str | None
    log_position: str | None
    at: datetime


class EventHistory(NamedTuple):
    """The entries of an event in order, and its position in each table that holds the event."""

    event_id: UUID
    entries: Sequence[OutboxJournalEntry]
    places: Mapping[EventPlace, int]


class JournalSwitch(NamedTuple):
    """The switch, the time of its last change, and the last position that was staged before the journal was on.

    Archived events from before `archive_pruned` may have been removed by maintenance.
    """

    is_on: bool
    since: datetime | None = None
    position: int = 0
    archive_pruned: datetime | None = None


class JournalPage(NamedTuple):
    """Some events in order of their ids, with the switch in the same snapshot. `after` is None on the last page."""

    switch: JournalSwitch
    histories: Sequence[EventHistory]
    after: UUID | None
