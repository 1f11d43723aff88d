"""The sagas' side of a store: instances, their journal, their mailbox and the audit trail.

Rules every adapter keeps, and the contract suite checks:

1. Only the holder of an instance's claim writes it: `save` is fenced by worker and epoch and guarded by version.
2. Everything of a turn is written in one transaction, the one its events are staged in.
3. Everybody else posts mail. Mail is kept until it is taken; the same event posted twice is one piece of mail.
4. A claim is a time: `wake_at` is when the instance is next of interest to anybody. Claiming moves it one lease ahead,
   so an instance whose worker has died is due again by itself.
5. The audit trail is append only.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, AbstractContextManager
from dataclasses import dataclass
from datetime import datetime
from enum import StrEnum
from typing import Any, NamedTuple, Protocol
from uuid import UUID


class Status(StrEnum):
    """Where a saga stands."""

    STARTED = "started"
    RUNNING = "running"
    COMPENSATING = "compensating"
    COMPLETED = "completed"
    COMPENSATED = "compensated"
    FAILED = "failed"


ENDED = frozenset({Status.COMPLETED, Status.COMPENSATED, Status.FAILED})
"""Nothing happens in these by itself. A failed one goes on when a person says so."""


class Phase(StrEnum):
    """Doing a step, or undoing it."""

    ACTION = "action"
    COMPENSATION = "compensation"


class Progress(StrEnum):
    """How far a step has come, in one phase.

    `planned`: to be compensated, in the order of its place. `intended`: being done, asked for, or waited for; after a
    crash nobody knows whether it happened. `retrying`: the last attempt did not succeed, the next is due later.
    `done`, `refused` (it did not happen and will not) and `failed` (given up: a person must look) are final.
    """

    PLANNED = "planned"
    INTENDED = "intended"
    RETRYING = "retrying"
    DONE = "done"
    REFUSED = "refused"
    FAILED = "failed"


class MailKind(StrEnum):
    """A reply is an event that a step waits for. An order is what a person tells a saga to do."""

    REPLY = "reply"
    ORDER = "order"


class Undelivered(StrEnum):
    """Where an event is that has not left its store: `waiting` in the outbox, or `buried` among the dead letters."""

    WAITING = "waiting"
    BURIED = "buried"


class NewSaga(NamedTuple):
    """A saga to be started; its id is made of its type and its correlation id, so starting it twice is one start."""

    saga_id: UUID
    saga_type: str
    definition_version: int
    correlation_id: str
    state: bytes
    traceparent: str | None = None
    outline: str = ""
    """The definition in short, by which a change of it is noticed."""


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
    outline: str = ""
    """What its definition was in short when it was started."""


@dataclass(frozen=True, slots=True)
class Entry:
    """A line of the journal: one step in one phase.

    `place` is the order in which actions were first intended, and in which compensations are to be done. `due_at` is
    the next attempt of one that is retrying, and the end of patience for one that is intended.
    """

    step: str
    phase: Phase
    progress: Progress
    place: int
    attempts: int = 0
    due_at: datetime | None = None
    error: str | None = None
    intended_at: datetime | None = None
    ended_at: datetime | None = None
    event_id: UUID | None = None
    """The event that settled it, if one has; the same event answers no other step. Until then, of a step that is asked
    for, the command that was staged last; and of one that cannot take its answer in, that answer.
    """


class Mail(NamedTuple):
    """A piece of mail. `key` is the idempotency key of the step it answers, if the answer names it; `body` is JSON.

    A reply has the event's type for a name; an order has its verb (`retry`, `compensate`, `resume`), and its actor in
    the body.
    """

    mail_id: int
    kind: MailKind
    name: str
    key: str | None
    body: bytes
    event_id: UUID
    posted_at: datetime


class NewMail(NamedTuple):
    """Mail to be posted; with `saga_type`, only if the saga is of that type."""

    saga_id: UUID
    kind: MailKind
    name: str
    key: str | None
    body: bytes
    event_id: UUID
    saga_type: str | None = None


class Note(NamedTuple):
    """A line for the audit trail: what changed, in which step, and by whom; the store adds the time."""

    old_status: Status | None
    new_status: Status
    step: str | None
    what: str
    actor: str
    detail: str = ""


class Record(NamedTuple):
    """Everything that is known of a saga at one moment, by the database's clock."""

    instance: Instance
    journal: tuple[Entry, ...]
    mail: tuple[Mail, ...]
    now: datetime


class Claim(NamedTuple):
    """The proof that a worker may write an instance."""

    worker: str
    saga_id: UUID
    epoch: int


@dataclass(frozen=True, slots=True)
class Turn:
    """One change of a saga. Of the instance, the state, status, step, error, count and attention are written.

    `taken` mail is gone; `seen` mail stays, and wakes nobody again. With `release`, the claim ends, and the instance is
    due after `wake_seconds`, or when mail comes if that is None; without it, the claim goes on.
    """

    instance: Instance
    entries: Sequence[Entry] = ()
    taken: Sequence[int] = ()
    seen: Sequence[int] = ()
    notes: Sequence[Note] = ()
    release: bool = False
    wake_seconds: float | None = None


@dataclass(frozen=True, slots=True)
class SagaCriteria:
    """Which sagas a person asks for; everything given must match."""

    ids: tuple[UUID, ...] = ()
    saga_type: str | None = None
    correlation_id: str | None = None
    status: str | None = None
    needs_attention: bool | None = None
    stuck_seconds: float | None = None
    """Only those that have not ended and are overdue by so much: nobody works on them."""
    limit: int = 50


class Entered(NamedTuple):
    """What a participant's barrier says to a command.

    `fresh`: it came for the first time, so do what it says and keep the reply. `barred`: an action whose compensation
    came before it, to be ignored; or a compensation whose action never came, with nothing to undo. `reply`: what was
    answered when it came before.
    """

    fresh: bool
    barred: bool
    reply: bytes | None = None


class SagaPruned(NamedTuple):
    """What upkeep removed."""

    sagas: int
    notes: int
    barriers: int


class SagaDesk(Protocol):
    """What people ask."""

    async def find(self, criteria: SagaCriteria) -> list[Instance]:
        """List sagas, those that need attention first, then the latest change first."""
        ...

    async def counts(self) -> dict[str, int]:
        """Count sagas by status, and `needs_attention`."""
        ...

    async def show(self, saga_id: UUID) -> Record | None:
        """Return all that is known of one, mail that was seen included."""
        ...

    async def audit(self, saga_id: UUID, limit: int = 1000) -> list[dict[str, Any]]:
        """Return its trail, oldest first: at, old_status, new_status, step, what, actor, detail, traceparent."""
        ...


class SagaStore(Protocol):
    """What a saga worker needs."""

    desk: SagaDesk
    one_at_a_time: bool
    """Whether a transaction that is lent keeps everything else waiting, renewals included."""

    def transaction(self) -> AbstractAsyncContextManager[Any]:
        """Open a transaction; commit when the block ends, roll back when it raises."""
        ...

    def lend(self) -> AbstractAsyncContextManager[Any]:
        """Open a transaction for a step's function. Claims, renewals and turns never wait for one of these to end."""
        ...

    def objection(self, function: Callable[..., Any]) -> str | None:
        """Say why a step's function cannot work in a transaction of this store; None if it can."""
        ...

    async def call(self, function: Callable[..., Any], argument: Any, tx: Any) -> Any:
        """Run a step's function with its argument and the transaction, in the way that suits the driver.

        Raises TransactionLost if the store is to blame, and UnfitHandler if the function did what none may.
        """
        ...

    def sever(self, tx: Any) -> None:
        """Cut a transaction off from a function that does not end: whatever that still does to it is undone."""
        ...

    def telling(self, tx: Any) -> AbstractContextManager[None]:
        """Say what the driver raises inside in our words; for what is staged through a transaction of this store."""
        ...

    async def start(self, tx: Any, saga: NewSaga) -> bool:
        """Insert an instance that is due at once; False if it is there already."""
        ...

    async def post(self, tx: Any, mail: Sequence[NewMail]) -> int:
        """Put mail into the boxes of sagas that exist and have not ended, or have failed; return how many were new.

        What is meant for a saga of another type is not kept.
        """
        ...

    async def claim(
        self, worker: str, definitions: Collection[tuple[str, int]], *, limit: int, lease_seconds: float
    ) -> list[Record]:
        """Take instances of these definitions and versions that are due, or have unseen mail and no owner."""
        ...

    async def renew(self, claims: Sequence[Claim], lease_seconds: float) -> frozenset[UUID]:
        """Move the end of claims ahead; return those that are still held."""
        ...

    async def load(self, tx: Any, saga_id: UUID, *, for_update: bool = False) -> Record | None:
        """Return a saga with its journal and mail; `for_update` locks its row until the transaction ends."""
        ...

    async def save(self, tx: Any, claim: Claim, turn: Turn, lease_seconds: float) -> datetime:
        """Write a turn; return the database's time. Raises ConcurrencyError, and has then written nothing.

        `turn.instance.version` is the one expected; the stored one is one higher afterwards.
        """
        ...

    async def undelivered(self, tx: Any, event_ids: Sequence[UUID]) -> Mapping[UUID, Undelivered]:
        """Return those events that are still in the outbox or among the dead letters; all others have left."""
        ...

    async def prune(self, *, saga_days: float, audit_days: float, barrier_days: float) -> SagaPruned:
        """Remove, in small batches, what ended longer ago. A saga that needs attention stays."""
        ...

    async def hint(self) -> None:
        """Tell workers, after a commit, that there is a saga or mail to look at."""
        ...

    def wakeups(self, wake: Callable[[], None]) -> AbstractAsyncContextManager[None]:
        """Call `wake` when mail or a saga may have arrived, where the store can tell; polling is the floor."""
        ...

    async def close(self) -> None:
        """Let go of connections and threads."""
        ...
