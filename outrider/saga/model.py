"""Records of a saga: instance, journal entry, message, claim and change."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime
from enum import StrEnum
from typing import NamedTuple
from uuid import UUID

from outrider.audit_chain import first_hash


class Status(StrEnum):
    """The status of a saga."""

    STARTED = "started"
    RUNNING = "running"
    COMPENSATING = "compensating"
    COMPLETED = "completed"
    COMPENSATED = "compensated"
    FAILED = "failed"


ENDED = frozenset({Status.COMPLETED, Status.COMPENSATED, Status.FAILED})
"""Statuses in which a saga no longer advances by itself.

An operator command or a late reply can resume a failed saga.
"""


SUSPECT_LOSSES = 2
"""The number of losses in a row from which a saga is a suspect."""

LOSSES_MAX = 20
"""The number of losses in a row after which a saga is failed, for an operator to decide."""


class Phase(StrEnum):
    """The phase of a step: its action or its compensation."""

    ACTION = "action"
    COMPENSATION = "compensation"


class StepStatus(StrEnum):
    """The progress of a step in one phase.

    `planned`: the compensation will run, in the order of its position. `started`: a worker runs the step, has sent its
    command or waits for an event; after a crash the outcome is unknown. `retrying`: the last attempt failed and the
    next attempt is scheduled. `done`, `skipped` (its condition was false), `rejected` (the effect did not happen and
    will not happen) and `failed` (an operator must decide) are final. An action is `planned` while its condition is to
    be computed again.
    """

    PLANNED = "planned"
    STARTED = "started"
    RETRYING = "retrying"
    DONE = "done"
    SKIPPED = "skipped"
    REJECTED = "rejected"
    FAILED = "failed"


PASSED = frozenset({StepStatus.DONE, StepStatus.SKIPPED})
"""Statuses of a step whose followers may start."""


class MessageKind(StrEnum):
    """The kind of a saga message: a reply is an event for a waiting step, an operator command comes from a person."""

    REPLY = "reply"
    OPERATOR = "operator"


class Undelivered(StrEnum):
    """The location of an event that has not left its store: `waiting` in the outbox, or a `dead_letter`."""

    WAITING = "waiting"
    DEAD_LETTER = "dead_letter"


class Uncertainty(StrEnum):
    """The reason why the outcome of a step is not known for certain. Decisions read this value, never the error text.

    `outcome_unknown`: an attempt was made and returned no result. `reply_not_applied`: the reply is stored, but the
    state could not apply the reply. `no_event`: the event of a wait step did not arrive in time. `raised`: an attempt
    at a call has ended with an error, perhaps after its effect; no attempt is still on its way.
    """

    OUTCOME_UNKNOWN = "outcome_unknown"
    REPLY_NOT_APPLIED = "reply_not_applied"
    NO_EVENT = "no_event"
    RAISED = "raised"


class NewSaga(NamedTuple):
    """A saga to be started. The id is derived from type and correlation id, so a second start has no effect."""

    saga_id: UUID
    saga_type: str
    definition_version: int
    correlation_id: str
    state: bytes
    traceparent: str | None = None
    fingerprint: str = ""
    """A short form of the definition, used to detect a changed definition."""
    deadline_seconds: float | None = None
    """The time from the start in which the saga should end. The store keeps the deadline as a time."""
    parent_id: UUID | None = None
    parent_step: str | None = None
    """The step of the parent that started this child, or one of its items."""
    subject: str | None = None
    """The person whose data the saga works with, and the subject of the events that it stages."""


@dataclass(frozen=True, slots=True)
class Instance:
    """A saga as stored. `state` is JSON text."""

    saga_id: UUID
    saga_type: str
    definition_version: int
    correlation_id: str
    state: bytes
    status: Status
    current_step: str | None
    version: int
    last_error: str | None
    retry_count: int
    needs_attention: bool
    traceparent: str | None
    started_at: datetime
    updated_at: datetime
    ended_at: datetime | None
    wake_at: datetime | None
    owner: str | None
    epoch: int
    fingerprint: str = ""
    """The fingerprint of the definition when the saga was started."""
    losses: int = 0
    """The number of workers that were lost in a row while they held the saga. A lost worker costs no attempt."""
    deadline_at: datetime | None = None
    """The time after which the saga compensates, unless it has passed its pivot. Never changed after the start."""
    parent_id: UUID | None = None
    """The saga that started this child and waits for its outcome."""
    parent_step: str | None = None
    """The step of the parent that started this child, or one of its items."""
    audit_lines: int = 1
    """The number of lines of the saga's audit chain."""
    audit_hash: bytes | None = None
    """The hash of the last line; None for the first line, whose hash is not stored."""
    subject: str | None = None
    """The person whose data the saga works with, and the subject of the events that it stages."""

    @property
    def audit_head(self) -> bytes:
        """Return the hash with which the next line of the audit chain continues."""
        return self.audit_hash or first_hash(self.saga_id, self.started_at, self.traceparent)

    @property
    def is_suspect(self) -> bool:
        """Tell whether the saga may be the cause of its losses. A worker runs one suspect at a time.

        A first loss proves nothing: the worker has lost all its sagas at once.
        """
        return self.losses >= SUSPECT_LOSSES


@dataclass(frozen=True, slots=True)
class JournalEntry:
    """A journal entry: one step in one phase.

    `position` is the order in which actions were first started, or in which compensations will run. `due_at` is the
    time of the next attempt of a `retrying` step and the deadline of a `started` step. `error` is for people; no
    decision depends on its wording.
    """

    step: str
    phase: Phase
    status: StepStatus
    position: int
    attempts: int = 0
    due_at: datetime | None = None
    error: str | None = None
    started_at: datetime | None = None
    ended_at: datetime | None = None
    uncertainty: Uncertainty | None = None
    undelivered: Undelivered | None = None
    """The location of the command at its deadline, if the command had not left the store by then."""
    command_event_id: UUID | None = None
    """The id of the last command that was staged."""
    reply_event_id: UUID | None = None
    """The reply or event that settled the step, or that the step could not apply. One event answers only one step."""
    unavailable_since: datetime | None = None
    """The time since which the step waits for an unavailable service."""
    data: str | None = None
    """JSON text: the frozen list of a step with `for_each`, or the result of one of its items."""

    @property
    def is_unresolved(self) -> bool:
        """Tell whether the step has failed without a known outcome. A late reply still settles such a step."""
        return self.status is StepStatus.FAILED and self.uncertainty not in (None, Uncertainty.RAISED)


class SagaMessage(NamedTuple):
    """A message in the mailbox of a saga. `key` names the step that a reply answers; `body` is JSON.

    The name of a reply is the type of its event. The name of an operator command is its verb (`retry`, `compensate`,
    `mark_done`), and its body names the actor. `schema_version` is the version of a reply's payload, as text.
    """

    message_id: int
    kind: MessageKind
    name: str
    key: str | None
    body: bytes
    event_id: UUID
    delivered_at: datetime
    schema_version: str = "1"


class NewSagaMessage(NamedTuple):
    """A message to be delivered. With `saga_type`, the store delivers only to a saga of the given type."""

    saga_id: UUID
    kind: MessageKind
    name: str
    key: str | None
    body: bytes
    event_id: UUID
    saga_type: str | None = None
    schema_version: str = "1"


class AuditEntry(NamedTuple):
    """An entry for the audit log: the change, the step and the actor. The store adds the time and the hash."""

    old_status: Status | None
    new_status: Status
    step: str | None
    what: str
    actor: str
    detail: str = ""


class SagaRecord(NamedTuple):
    """Instance, journal and mailbox of a saga at one moment, by the clock of the database."""

    instance: Instance
    journal: tuple[JournalEntry, ...]
    messages: tuple[SagaMessage, ...]
    now: datetime


class Claim(NamedTuple):
    """The proof that a worker may write an instance."""

    worker: str
    saga_id: UUID
    epoch: int


@dataclass(frozen=True, slots=True)
class SagaChange:
    """One change of a saga.

    The store writes state, status, step, error, retry count, attention and losses of the instance.

    The store deletes `taken` messages. It keeps `seen` messages, which do not wake a worker again. With `release`, the
    claim ends and the instance is due after `wake_seconds`, or when a message arrives if `wake_seconds` is None.
    Without `release`, the worker keeps its claim.
    """

    instance: Instance
    entries: Sequence[JournalEntry] = ()
    taken: Sequence[int] = ()
    seen: Sequence[int] = ()
    notes: Sequence[AuditEntry] = ()
    release: bool = False
    wake_seconds: float | None = None
    at: datetime | None = None
    """The database time of the turn, which its audit lines have; None for the time of the last change."""
    keep_state: bool = False
    """Whether the last audit line of the turn keeps the state."""


@dataclass(frozen=True, slots=True)
class SagaCriteria:
    """The filter of a saga search. All given values must match."""

    ids: tuple[UUID, ...] = ()
    saga_type: str | None = None
    correlation_id: str | None = None
    status: str | None = None
    needs_attention: bool | None = None
    stuck_seconds: float | None = None
    """Return only sagas that have not ended and are overdue by at least this time, so no worker runs them."""
    limit: int = 50
    parent_id: UUID | None = None
    """Return only the children of this saga."""


class ParticipantEntry(NamedTuple):
    """The answer of a participant's table to a command.

    `fresh`: the command is new, so the participant executes the command and stores the reply. `barred`: the command is
    an action whose compensation arrived first, to be ignored, or a compensation whose action never arrived, with
    nothing to compensate. `reply`: the stored reply of an earlier delivery.
    """

    fresh: bool
    barred: bool
    reply: bytes | None = None


@dataclass(frozen=True, slots=True)
class AuditCriteria:
    """The filter of a search in the audit log. All given values must match."""

    saga_id: UUID | None = None
    actor: str | None = None
    since: datetime | None = None
    limit: int = 50


class SagaPruned(NamedTuple):
    """The number of rows that maintenance removed."""

    sagas: int
    notes: int
    participants: int
