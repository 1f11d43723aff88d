"""The observer contract: engines state facts, observers turn them into logs, metrics and alerts.

A fact is a small value with a constant name (its class) and fields; it never carries a payload.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import ClassVar, Protocol
from uuid import UUID


@dataclass(frozen=True, slots=True)
class Fact:
    """Something worth knowing. `level` is its weight: info, warning or error.

    `counted` names fields that hold many things: how many is worth knowing, which ones only to who looks closely.
    """

    level: ClassVar[str] = "info"
    counted: ClassVar[tuple[str, ...]] = ()


@dataclass(frozen=True, slots=True)
class RelayStarted(Fact):
    """A relay joined."""

    relay: str
    lanes: int


@dataclass(frozen=True, slots=True)
class RelayStopped(Fact):
    """A relay left; everything in flight was settled."""

    relay: str


@dataclass(frozen=True, slots=True)
class LanesClaimed(Fact):
    """Lanes came to this relay."""

    relay: str
    lanes: tuple[int, ...]

    counted: ClassVar[tuple[str, ...]] = ("lanes",)


@dataclass(frozen=True, slots=True)
class LanesReleased(Fact):
    """Lanes went back, for another relay to claim."""

    relay: str
    lanes: tuple[int, ...]

    counted: ClassVar[tuple[str, ...]] = ("lanes",)


@dataclass(frozen=True, slots=True)
class LeaseLost(Fact):
    """This relay was taken for dead; what it had in flight may be published again by another."""

    relay: str
    lanes: tuple[int, ...]

    level: ClassVar[str] = "warning"
    counted: ClassVar[tuple[str, ...]] = ("lanes",)


@dataclass(frozen=True, slots=True)
class RelaySwept(Fact):
    """The watchdog found a relay dead and freed its lanes."""

    relay: str
    lanes: int

    level: ClassVar[str] = "warning"


@dataclass(frozen=True, slots=True)
class Passed(Fact):
    """A relay's pass over some lanes ended."""

    fetched: int
    confirmed: int
    settled: int
    publish_seconds: float
    pass_seconds: float

    level: ClassVar[str] = "debug"


@dataclass(frozen=True, slots=True)
class Retried(Fact):
    """An attempt failed; the event is due again after the delay."""

    event_id: UUID
    topic: str
    attempt: int
    delay_seconds: float
    error: str

    level: ClassVar[str] = "warning"


@dataclass(frozen=True, slots=True)
class Buried(Fact):
    """An event went to the dead letters. This is the alert hook."""

    event_id: UUID
    topic: str
    event_type: str
    reason: str
    policy: str
    error: str

    level: ClassVar[str] = "error"


@dataclass(frozen=True, slots=True)
class BreakerOpened(Fact):
    """A destination is down; its events wait, and nothing is charged. An empty destination is the connection."""

    destination: str
    error: str
    retry_seconds: float

    level: ClassVar[str] = "warning"


@dataclass(frozen=True, slots=True)
class BreakerClosed(Fact):
    """A destination is back."""

    destination: str


@dataclass(frozen=True, slots=True)
class StoreTroubled(Fact):
    """The store does not answer; the relay keeps trying. Told once, until it answers again."""

    relay: str
    error: str

    level: ClassVar[str] = "error"


@dataclass(frozen=True, slots=True)
class StoreRecovered(Fact):
    """The store answers again."""

    relay: str


@dataclass(frozen=True, slots=True)
class UpkeepDone(Fact):
    """Old rows were removed."""

    archived: int
    dead_letters: int
    operations: int


@dataclass(frozen=True, slots=True)
class OptimisticSent(Fact):
    """A writer published straight after its commit: how many it confirmed, how many it left to the relay."""

    confirmed: int
    yielded: int
    seconds: float

    level: ClassVar[str] = "debug"


@dataclass(frozen=True, slots=True)
class ConsumerStarted(Fact):
    """A consumer has begun to receive."""

    consumer: str
    topics: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class ConsumerStopped(Fact):
    """A consumer has stopped; what it had under way is committed and acked, or will be delivered again (unhandled)."""

    consumer: str
    unhandled: int = 0


@dataclass(frozen=True, slots=True)
class Handled(Fact):
    """A consumer's transaction has committed: what became of its messages."""

    consumer: str
    applied: int
    duplicates: int
    dropped: int
    waiting: int
    no_handler: int
    seconds: float

    level: ClassVar[str] = "debug"


@dataclass(frozen=True, slots=True)
class HandlerRetried(Fact):
    """A handler failed and left no trace; the event is due again after the delay, and its key waits for it."""

    consumer: str
    event_id: UUID
    topic: str
    event_type: str
    attempt: int
    delay_seconds: float
    error: str

    level: ClassVar[str] = "warning"


@dataclass(frozen=True, slots=True)
class ConsumerBuried(Fact):
    """An event went to a consumer's dead letters. This is the alert hook. `where` is in the handler's own code."""

    consumer: str
    event_id: UUID
    topic: str
    event_type: str
    reason: str
    policy: str
    kind: str | None
    error: str
    where: str | None
    dead_letter: int | None

    level: ClassVar[str] = "error"


@dataclass(frozen=True, slots=True)
class HandlerCutOff(Fact):
    """A handler took longer than a clean stop waits; what it did is undone, and the event will be delivered again."""

    consumer: str
    event_id: UUID
    topic: str
    key: str
    stop_seconds: float

    level: ClassVar[str] = "warning"


@dataclass(frozen=True, slots=True)
class NoHandler(Fact):
    """Events of this type come on a consumed topic, and nothing handles them: they are acked. Told once per type."""

    consumer: str
    topic: str
    event_type: str


@dataclass(frozen=True, slots=True)
class ConsumerBroken(Fact):
    """A handler did what none may, and the consumer stops: its code must change first."""

    consumer: str
    error: str

    level: ClassVar[str] = "error"


@dataclass(frozen=True, slots=True)
class GapOverdue(Fact):
    """Events have waited for a missing predecessor longer than the gap timeout. They stay; a person should look."""

    consumer: str
    topic: str
    key: str
    seen: int | None
    waiting: int

    level: ClassVar[str] = "error"


@dataclass(frozen=True, slots=True)
class WaitingFull(Fact):
    """So many events of a stream wait that the next ones stay with the broker, and hold up what is behind them."""

    consumer: str
    topic: str
    key: str
    waiting: int

    level: ClassVar[str] = "error"


@dataclass(frozen=True, slots=True)
class ShardsRevoked(Fact):
    """Shards go to another process."""

    consumer: str
    shards: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class ConsumerTroubled(Fact):
    """Store or broker does not answer; the consumer keeps trying, and charges nothing. Told once, until it is over."""

    consumer: str
    error: str

    level: ClassVar[str] = "error"


@dataclass(frozen=True, slots=True)
class ConsumerRecovered(Fact):
    """The consumer works again."""

    consumer: str


@dataclass(frozen=True, slots=True)
class InboxUpkeepDone(Fact):
    """Old receipts, dead letters and barriers were removed."""

    consumer: str
    receipts: int
    dead_letters: int
    barriers: int = 0


@dataclass(frozen=True, slots=True)
class SagaWorkerStarted(Fact):
    """A saga worker has begun to claim."""

    worker: str
    definitions: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class SagaWorkerStopped(Fact):
    """A saga worker has stopped, and given back what it had claimed."""

    worker: str


@dataclass(frozen=True, slots=True)
class SagaWorkerTroubled(Fact):
    """The store does not answer; the worker keeps trying, and charges nothing. Told once, until it answers again."""

    worker: str
    error: str

    level: ClassVar[str] = "error"


@dataclass(frozen=True, slots=True)
class SagaWorkerRecovered(Fact):
    """The store answers again."""

    worker: str


@dataclass(frozen=True, slots=True)
class SagaMoved(Fact):
    """A turn of a saga was saved: where it stands now."""

    saga_id: UUID
    saga_type: str
    status: str
    step: str | None
    retries: int

    level: ClassVar[str] = "debug"


@dataclass(frozen=True, slots=True)
class SagaStepFailed(Fact):
    """An attempt at a step, or at undoing it, did not succeed. `progress` says what follows: retrying or final."""

    saga_id: UUID
    saga_type: str
    step: str
    phase: str
    progress: str
    attempt: int
    error: str

    level: ClassVar[str] = "warning"


@dataclass(frozen=True, slots=True)
class SagaStepRaised(Fact):
    """The code of a step raised: its traceback, for whoever looks closely."""

    saga_id: UUID
    saga_type: str
    step: str
    phase: str
    traceback: str

    level: ClassVar[str] = "debug"


@dataclass(frozen=True, slots=True)
class SagaStepUndone(Fact):
    """The store failed under a local step, in a way that may pass. It is done again; if that goes on, it is charged."""

    saga_id: UUID
    saga_type: str
    step: str
    phase: str
    times: int
    error: str

    level: ClassVar[str] = "warning"


@dataclass(frozen=True, slots=True)
class SagaCallStray(Fact):
    """A call ignores that it was cancelled, and goes on beside whatever comes next. `strays` is how many of them do."""

    saga_id: UUID
    saga_type: str
    step: str
    phase: str
    attempt: int
    strays: int

    level: ClassVar[str] = "error"


@dataclass(frozen=True, slots=True)
class SagaNeedsAttention(Fact):
    """A saga cannot go on without a person. This is the alert hook."""

    saga_id: UUID
    saga_type: str
    correlation_id: str
    error: str

    level: ClassVar[str] = "error"


@dataclass(frozen=True, slots=True)
class SagaEnded(Fact):
    """A saga is completed, compensated or failed."""

    saga_id: UUID
    saga_type: str
    correlation_id: str
    status: str
    seconds: float


@dataclass(frozen=True, slots=True)
class SagaDropped(Fact):
    """A worker let go of a saga in the middle of it; it will be claimed again, and what was under way repeated."""

    worker: str
    saga_id: UUID
    error: str

    level: ClassVar[str] = "warning"


@dataclass(frozen=True, slots=True)
class MailUnknown(Fact):
    """An event came for nobody here: its saga is another's, has ended, or has it already; it was dropped."""

    saga_type: str
    saga_id: UUID | None
    event_id: UUID | None
    event_type: str

    level: ClassVar[str] = "debug"


@dataclass(frozen=True, slots=True)
class MailUnaddressed(Fact):
    """An event of a type that sagas wait for does not say which one it is for; it was dropped."""

    saga_type: str
    event_id: UUID | None
    event_type: str
    remedy: str

    level: ClassVar[str] = "warning"


@dataclass(frozen=True, slots=True)
class SagaUpkeepDone(Fact):
    """Old sagas, lines of the audit trail and barriers were removed."""

    sagas: int
    notes: int
    barriers: int


class Observer(Protocol):
    """Anything that listens."""

    def notice(self, fact: Fact) -> None:
        """Take note of a fact; must not block and must not raise."""
        ...


class Observers:
    """Several observers as one.

    >>> Observers([]).notice(RelayStopped(relay="r1"))
    """

    def __init__(self, observers: Iterable[Observer] = ()) -> None:
        self._observers = tuple(observers)

    def notice(self, fact: Fact) -> None:
        """Pass the fact on to each."""
        for observer in self._observers:
            observer.notice(fact)
