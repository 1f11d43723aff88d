"""The observer contract: engines emit telemetry events, observers turn them into logs, metrics and alerts.

A telemetry event is a small value with a constant name (its class) and fields, and never carries a payload.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import ClassVar, Protocol
from uuid import UUID


@dataclass(frozen=True, slots=True)
class TelemetryEvent:
    """The base class of telemetry events. `level` is debug, info, warning or error.

    `counted` names fields that hold collections: observers report the size, and the items only at debug level.
    """

    level: ClassVar[str] = "info"
    counted: ClassVar[tuple[str, ...]] = ()


@dataclass(frozen=True, slots=True)
class RelayStarted(TelemetryEvent):
    """A relay has started."""

    relay: str
    lanes: int


@dataclass(frozen=True, slots=True)
class RelayStopped(TelemetryEvent):
    """A relay has stopped, after all events in flight were settled."""

    relay: str


@dataclass(frozen=True, slots=True)
class LanesClaimed(TelemetryEvent):
    """The relay has claimed lanes."""

    relay: str
    lanes: tuple[int, ...]

    counted: ClassVar[tuple[str, ...]] = ("lanes",)


@dataclass(frozen=True, slots=True)
class LanesReleased(TelemetryEvent):
    """The relay has released lanes, for another relay to claim."""

    relay: str
    lanes: tuple[int, ...]

    counted: ClassVar[tuple[str, ...]] = ("lanes",)


@dataclass(frozen=True, slots=True)
class LeaseLost(TelemetryEvent):
    """The lease of the relay has expired; another relay may publish the events in flight again."""

    relay: str
    lanes: tuple[int, ...]

    level: ClassVar[str] = "warning"
    counted: ClassVar[tuple[str, ...]] = ("lanes",)


@dataclass(frozen=True, slots=True)
class RelaySwept(TelemetryEvent):
    """The watchdog found a dead relay and freed the relay's lanes."""

    relay: str
    lanes: int

    level: ClassVar[str] = "warning"


@dataclass(frozen=True, slots=True)
class PassCompleted(TelemetryEvent):
    """A relay's pass over some lanes has ended."""

    fetched: int
    confirmed: int
    settled: int
    publish_seconds: float
    pass_seconds: float

    level: ClassVar[str] = "debug"


@dataclass(frozen=True, slots=True)
class Retried(TelemetryEvent):
    """An attempt failed; the event is due again after the delay."""

    event_id: UUID
    topic: str
    attempt: int
    delay_seconds: float
    error: str

    level: ClassVar[str] = "warning"


@dataclass(frozen=True, slots=True)
class EventDeadLettered(TelemetryEvent):
    """An event was dead-lettered. Use this telemetry event for alerts."""

    event_id: UUID
    topic: str
    event_type: str
    reason: str
    policy: str
    error: str

    level: ClassVar[str] = "error"


@dataclass(frozen=True, slots=True)
class BreakerOpened(TelemetryEvent):
    """A destination is down; its events wait, and no attempt is counted.

    An empty destination is the connection to the broker.
    """

    destination: str
    error: str
    retry_seconds: float
    broker: str

    level: ClassVar[str] = "warning"


@dataclass(frozen=True, slots=True)
class BreakerClosed(TelemetryEvent):
    """A destination works again."""

    destination: str
    broker: str


@dataclass(frozen=True, slots=True)
class SettleFailed(TelemetryEvent):
    """Outcomes could not be written; the lanes publish nothing until the relay has repeated the write.

    Use this telemetry event for alerts when `failures` grows.
    """

    relay: str
    lanes: tuple[int, ...]
    failures: int
    retry_seconds: float
    error: str

    level: ClassVar[str] = "error"
    counted: ClassVar[tuple[str, ...]] = ("lanes",)


@dataclass(frozen=True, slots=True)
class SettleRecovered(TelemetryEvent):
    """Outcomes that could not be written before are written; the lanes publish again."""

    relay: str
    lanes: tuple[int, ...]

    counted: ClassVar[tuple[str, ...]] = ("lanes",)


@dataclass(frozen=True, slots=True)
class StoreUnavailable(TelemetryEvent):
    """The store does not answer; the relay keeps trying. Emitted once per outage."""

    relay: str
    error: str

    level: ClassVar[str] = "error"


@dataclass(frozen=True, slots=True)
class StoreRecovered(TelemetryEvent):
    """The store answers again."""

    relay: str


@dataclass(frozen=True, slots=True)
class ConnectionsScarce(TelemetryEvent):
    """The connection pool of a store is smaller than the concurrency: fewer transactions run at a time than allowed."""

    store: str
    connections_max: int
    concurrency: int
    remedy: str

    level: ClassVar[str] = "warning"


@dataclass(frozen=True, slots=True)
class MaintenanceDone(TelemetryEvent):
    """Old rows were removed."""

    archived: int
    dead_letters: int
    operations: int
    entries: int = 0


@dataclass(frozen=True, slots=True)
class DeadLettersExpired(TelemetryEvent):
    """Maintenance has deleted undelivered events, because the retention of dead letters is limited by a setting."""

    dead_letters: int
    days: float

    level: ClassVar[str] = "warning"


@dataclass(frozen=True, slots=True)
class OptimisticSent(TelemetryEvent):
    """A writer published right after its commit: the number of confirmed events, and of events left to the relay."""

    confirmed: int
    yielded: int
    seconds: float

    level: ClassVar[str] = "debug"


@dataclass(frozen=True, slots=True)
class ConsumerStarted(TelemetryEvent):
    """A consumer has started to receive."""

    consumer: str
    topics: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class ConsumerStopped(TelemetryEvent):
    """A consumer has stopped. Its work is committed and acked, or will be delivered again (unhandled)."""

    consumer: str
    unhandled: int = 0


@dataclass(frozen=True, slots=True)
class Handled(TelemetryEvent):
    """A consumer's transaction has committed: the outcomes of its messages, and the number of events it has staged."""

    consumer: str
    applied: int
    duplicates: int
    dropped: int
    waiting: int
    no_handler: int
    seconds: float
    staged: int = 0
    erased: int = 0

    level: ClassVar[str] = "debug"


@dataclass(frozen=True, slots=True)
class HandlerRetried(TelemetryEvent):
    """A handler failed and was rolled back; the event is due again after the delay, and its key waits."""

    consumer: str
    event_id: UUID
    topic: str
    event_type: str
    attempt: int
    delay_seconds: float
    error: str

    level: ClassVar[str] = "warning"


@dataclass(frozen=True, slots=True)
class ConsumerDeadLettered(TelemetryEvent):
    """A consumer has dead-lettered an event. Use this telemetry event for alerts. `where` is in the handler's code."""

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
class HandlerTimedOut(TelemetryEvent):
    """A handler ran longer than a clean stop waits; its writes are rolled back, and the event is delivered again."""

    consumer: str
    event_id: UUID
    topic: str
    key: str
    shutdown_timeout_seconds: float

    level: ClassVar[str] = "warning"


@dataclass(frozen=True, slots=True)
class NoHandler(TelemetryEvent):
    """Events of the type arrive on a consumed topic and have no handler: they are acked. Emitted once per type."""

    consumer: str
    topic: str
    event_type: str


@dataclass(frozen=True, slots=True)
class ErasedEventSkipped(TelemetryEvent):
    """The subject of an event was erased: its handler was not called, and its receipt is kept."""

    consumer: str
    event_id: UUID | None
    topic: str
    event_type: str


@dataclass(frozen=True, slots=True)
class ConsumerBroken(TelemetryEvent):
    """A handler broke a rule of handlers, and the consumer stops: the code must be changed first."""

    consumer: str
    error: str

    level: ClassVar[str] = "error"


@dataclass(frozen=True, slots=True)
class GapOverdue(TelemetryEvent):
    """Events wait for a missing predecessor longer than the gap timeout. They stay held; an operator should act."""

    consumer: str
    topic: str
    key: str
    seen: int | None
    waiting: int

    level: ClassVar[str] = "error"


@dataclass(frozen=True, slots=True)
class HeldEventsFull(TelemetryEvent):
    """The limit of held events is reached: the next events stay with the broker, and delay the events after them."""

    consumer: str
    topic: str
    key: str
    waiting: int

    level: ClassVar[str] = "error"


@dataclass(frozen=True, slots=True)
class PartitionsRevoked(TelemetryEvent):
    """Partitions go to another process."""

    consumer: str
    partitions: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class ConsumerUnavailable(TelemetryEvent):
    """Store or broker does not answer; the consumer keeps trying and counts no attempt. Emitted once per outage."""

    consumer: str
    error: str

    level: ClassVar[str] = "error"


@dataclass(frozen=True, slots=True)
class ConsumerRecovered(TelemetryEvent):
    """The consumer works again."""

    consumer: str


@dataclass(frozen=True, slots=True)
class InboxMaintenanceDone(TelemetryEvent):
    """Old receipts, dead letters and participant records were removed."""

    consumer: str
    receipts: int
    dead_letters: int
    participants: int = 0


@dataclass(frozen=True, slots=True)
class InvalidPayloadPublished(TelemetryEvent):
    """An invalid payload was staged or is published, because its check only warns."""

    event_id: UUID | None
    event_type: str
    schema_version: str
    problem: str

    level: ClassVar[str] = "warning"


@dataclass(frozen=True, slots=True)
class SchemaSourceUnavailable(TelemetryEvent):
    """A schema cannot be read. Events of the type wait, unless the schema was read before."""

    event_type: str
    schema_version: str
    error: str

    level: ClassVar[str] = "error"


@dataclass(frozen=True, slots=True)
class SagaWorkerStarted(TelemetryEvent):
    """A saga worker has started to claim sagas."""

    worker: str
    definitions: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class SagaWorkerStopped(TelemetryEvent):
    """A saga worker has stopped, and has released the claimed sagas."""

    worker: str


@dataclass(frozen=True, slots=True)
class SagaWorkerUnavailable(TelemetryEvent):
    """The store does not answer; the worker keeps trying and counts no attempt. Emitted once per outage."""

    worker: str
    error: str

    level: ClassVar[str] = "error"


@dataclass(frozen=True, slots=True)
class SagaWorkerRecovered(TelemetryEvent):
    """The store answers again."""

    worker: str


@dataclass(frozen=True, slots=True)
class SagaAdvanced(TelemetryEvent):
    """A turn of a saga was committed; the fields have the new state, and the number of events that were staged."""

    saga_id: UUID
    saga_type: str
    status: str
    step: str | None
    retries: int
    staged: int = 0

    level: ClassVar[str] = "debug"


@dataclass(frozen=True, slots=True)
class SagaStepFailed(TelemetryEvent):
    """An attempt to run or compensate a step failed. `status` is the consequence: retrying or final."""

    saga_id: UUID
    saga_type: str
    step: str
    phase: str
    status: str
    attempt: int
    error: str

    level: ClassVar[str] = "warning"


@dataclass(frozen=True, slots=True)
class SagaStepRaised(TelemetryEvent):
    """The code of a step raised; the traceback is for debugging."""

    saga_id: UUID
    saga_type: str
    step: str
    phase: str
    traceback: str

    level: ClassVar[str] = "debug"


@dataclass(frozen=True, slots=True)
class SagaStepRolledBack(TelemetryEvent):
    """The store failed briefly during a local step. The step runs again; repeated failures count as attempts."""

    saga_id: UUID
    saga_type: str
    step: str
    phase: str
    times: int
    error: str

    level: ClassVar[str] = "warning"


@dataclass(frozen=True, slots=True)
class SagaStepUnavailable(TelemetryEvent):
    """The service of a step is unavailable: the circuit breaker of the step has opened, and sagas wait at the step.

    No attempt is counted. A probe follows after `retry_seconds`, and then at growing intervals.
    """

    saga_type: str
    step: str
    phase: str
    error: str
    retry_seconds: float

    level: ClassVar[str] = "warning"


@dataclass(frozen=True, slots=True)
class SagaStepAvailable(TelemetryEvent):
    """The service of a step works again, after so many seconds: the circuit breaker of the step has closed."""

    saga_type: str
    step: str
    phase: str
    seconds: float


@dataclass(frozen=True, slots=True)
class SagaTaskLeaked(TelemetryEvent):
    """A call ignores its cancellation and continues beside later work. `tasks` is the number of leaked tasks."""

    saga_id: UUID
    saga_type: str
    step: str
    phase: str
    attempt: int
    tasks: int

    level: ClassVar[str] = "error"


@dataclass(frozen=True, slots=True)
class SagaNeedsAttention(TelemetryEvent):
    """A saga cannot continue without an operator, or is late after its pivot. Use this telemetry event for alerts."""

    saga_id: UUID
    saga_type: str
    correlation_id: str
    error: str

    level: ClassVar[str] = "error"


@dataclass(frozen=True, slots=True)
class SagaEnded(TelemetryEvent):
    """A saga is completed, compensated or failed."""

    saga_id: UUID
    saga_type: str
    correlation_id: str
    status: str
    seconds: float


@dataclass(frozen=True, slots=True)
class SagaReleased(TelemetryEvent):
    """A worker released a saga in mid-turn; another claim will follow, and the work in progress is repeated."""

    worker: str
    saga_id: UUID
    error: str

    level: ClassVar[str] = "warning"


@dataclass(frozen=True, slots=True)
class ReplyOfUnknownSaga(TelemetryEvent):
    """An event was dropped: its saga runs elsewhere, has ended, or has received the event already."""

    saga_type: str
    saga_id: UUID | None
    event_id: UUID | None
    event_type: str

    level: ClassVar[str] = "debug"


@dataclass(frozen=True, slots=True)
class ReplyWithoutSaga(TelemetryEvent):
    """An event of a type that sagas wait for does not name its saga, and was dropped."""

    saga_type: str
    event_id: UUID | None
    event_type: str
    remedy: str

    level: ClassVar[str] = "warning"


@dataclass(frozen=True, slots=True)
class SagaMaintenanceDone(TelemetryEvent):
    """Old sagas, audit log lines and participant records were removed."""

    sagas: int
    notes: int
    participants: int


class Observer(Protocol):
    """Gets telemetry events."""

    def emit(self, event: TelemetryEvent) -> None:
        """Handle a telemetry event; must not block and must not raise."""
        ...


class Observers:
    """Combines several observers.

    >>> Observers([]).emit(RelayStopped(relay="r1"))
    """

    def __init__(self, observers: Iterable[Observer] = ()) -> None:
        self._observers = tuple(observers)

    def emit(self, event: TelemetryEvent) -> None:
        """Pass the telemetry event to all observers."""
        for observer in self._observers:
            observer.emit(event)
