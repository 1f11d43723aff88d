"""A harness for saga tests: runs sagas until they wait, and lets the test send replies, events and operator commands.

The test owns the clock: the harness never sleeps and needs neither a broker nor a participant. The functions of `local`
and `call` steps really run. Give them test doubles, or replace the functions in the test.
"""

from __future__ import annotations

import inspect
import json
import random
from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Callable, Collection, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager, suppress
from dataclasses import dataclass, field, replace
from datetime import datetime
from types import ModuleType
from typing import Any, NamedTuple
from uuid import NAMESPACE_OID, UUID, uuid4, uuid5

import outrider
from outrider.errors import UsageError
from outrider.event import Event
from outrider.handler_transactions import HandlerTransaction, TransactionSource
from outrider.outbox.staging import ASYNC_ONLY, Outbox
from outrider.outbox.store import OutboxStore
from outrider.saga.definition.saga import Saga, SagaRegistry, saga_id_of
from outrider.saga.definition.steps import CommandSpec
from outrider.saga.execution.step_executor import KEY_HEADER, PHASE_HEADER
from outrider.saga.execution.worker import SagaWorker
from outrider.saga.explain import explain
from outrider.saga.model import (
    Claim,
    MessageKind,
    NewSaga,
    NewSagaMessage,
    Phase,
    SagaChange,
    SagaRecord,
    Status,
    StepStatus,
    Undelivered,
)
from outrider.saga.replies import ReplyHandler
from outrider.saga.settings import SagaSettings
from outrider.saga.state.codec import decode
from outrider.saga.state.encryption import open_record
from outrider.saga.store import SagaStore
from outrider.stores.memory import MemorySagas, MemoryStore
from outrider.testing.fakes import ManualClock, RecordingObserver

ROUNDS_MAX = 1000

LEASE_SECONDS = 15.0

ORDER = ("order", 1)

FINGERPRINT = '[["reserve","request","c",[]]]'

TRACE = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"


class _SentCommand(NamedTuple):
    """A command and the saga that sent it."""

    event: Event
    saga: Saga[Any]
    command: CommandSpec


@dataclass(frozen=True, slots=True)
class SagaView:
    """The status of a saga. `reasons` explains in plain words the reason for waiting, like `outrider saga explain`.

    `steps` has the status of each step that has started or was skipped.
    """

    status: Status
    state: Any
    current_step: str | None
    last_error: str | None
    needs_attention: bool
    reasons: tuple[str, ...]
    steps: Mapping[str, StepStatus] = field(default_factory=dict)


class SagaHarness:
    """Runs sagas step by step in a test, in memory or in a given store.

    Pass a store together with its clock if the store reads the time from a clock. A store with its own clock, such as
    PostgreSQL, is passed without a clock; `advance` is then rejected::

        harness = SagaHarness(SagaRegistry(order))
        await harness.start(order, Order("A-7", 12), "A-7")
        await harness.reply("reserve", {"reservation": "R-1"})
        assert (await harness.saga("A-7")).status == "completed"
    """

    def __init__(
        self,
        sagas: Any,
        store: SagaStore | None = None,
        *,
        clock: ManualClock | None = None,
        seed: int = 0,
        settings: SagaSettings | None = None,
    ) -> None:
        self.sagas, self.observer = SagaRegistry.of(sagas), RecordingObserver()
        self.clock = clock or (ManualClock() if store is None else None)
        self.store: Any = SagaRecorder(store or MemorySagas(MemoryStore(clock=self.clock)))
        self.outbox = RecorderOutbox(recorder=self.store, payloads=self.sagas.payloads)
        self._replies = ReplyHandler(self.sagas, self.outbox, self.observer)
        rng = random.Random(seed)
        self.worker = SagaWorker(
            self.store,
            self.sagas,
            self.store.stage,
            settings or SagaSettings(),
            self.observer,
            clock=self.clock,
            rng=rng,
        )
        self._answered: set[UUID | None] = set()

    @property
    def commands(self) -> list[Event]:
        """Return the commands sent, in order, including the commands of compensations."""
        return [event for event in self.store.staged if PHASE_HEADER in event.headers]

    @property
    def staged(self) -> list[Event]:
        """Return the events that steps have staged, in order, without commands."""
        return [event for event in self.store.staged if PHASE_HEADER not in event.headers]

    async def start(self, saga: Saga[Any], state: Any, correlation_id: str, *, subject: str | None = None) -> UUID:
        """Start a saga and run the sagas until all have ended or wait."""
        async with self.store.transaction() as tx:
            saga_id = await saga.start(tx, state, correlation_id=correlation_id, subject=subject, outbox=self.outbox)
        await self.run()
        return saga_id

    async def run(self) -> None:
        """Run the worker until every saga has ended or waits for a message, an operator or a time."""
        for _ in range(ROUNDS_MAX):
            if not await self.worker.run_once():
                return
            await self.worker.rest()
        raise AssertionError(f"sagas still advance after {ROUNDS_MAX} rounds; is a step retried without a delay?")

    async def reply(self, step: str, payload: Any = None, *, correlation_id: str | None = None) -> None:
        """Answer the last command of a step or of its compensation, as a participant does.

        `correlation_id` selects the saga if several sagas have sent the command::

            await harness.reply("reserve", {"reservation": "R-1"})
        """
        found = self._find_command(step, correlation_id)
        await self._deliver(found, found.command.reply or "", payload)

    async def reject(self, step: str, payload: Any = None, *, correlation_id: str | None = None) -> None:
        """Reject the last command of a step, as a participant does::

        await harness.reject("reserve", {"reason": "sold out"})
        """
        found = self._find_command(step, correlation_id)
        if found.command.rejection is None:
            raise UsageError(f"{found.command.event_type} cannot be rejected; declare rejection=… at the step {step}")
        await self._deliver(found, found.command.rejection, payload)

    async def event(self, event_type: str, payload: Any = None, *, correlation_id: str | None = None) -> bool:
        """Deliver an event that is not a reply to a command; return whether a saga received the event.

        `correlate` of the wait selects the saga; a wait without `correlate` needs the correlation id here::

            assert await harness.event("parcel.collected", {"order": "A-7"})
        """
        got = False
        for saga_type in self._replies.saga_types:
            if event_type in {kind for _, kind in self._replies.replies(saga_type)}:
                saga_id = None if correlation_id is None else str(saga_id_of(saga_type, correlation_id))
                event = Event(event_type, {} if payload is None else payload, saga_id=saga_id, event_id=uuid4())
                async with self.store.transaction() as tx:
                    got |= await self._replies.deliver(saga_type, event, tx)
        await self.run()
        return got

    async def send_command(self, command: str, correlation_id: str, **fields: Any) -> None:
        """Send an operator command: `retry`, `compensate` or `mark_done`; the last can also set fields of the state."""
        body = json.dumps({"actor": "test", **({"set": fields} if fields else {})}).encode()
        saga_id = (await self._record(correlation_id)).instance.saga_id
        async with self.store.transaction() as tx:
            await self.store.deliver(tx, [NewSagaMessage(saga_id, MessageKind.OPERATOR, command, None, body, uuid4())])
        await self.run()

    async def advance(self, *, seconds: float) -> None:
        """Advance the clock and run the sagas that are due::

        await harness.advance(seconds=30)
        """
        if self.clock is None:
            raise UsageError(
                "this store keeps its own time; use the memory store, or give the clock: clock=ManualClock()"
            )
        self.clock.advance(seconds=seconds)
        await self.run()

    async def saga(self, correlation_id: str) -> SagaView:
        """Return the status of a saga, and its state as the steps see it."""
        record = open_record(self.sagas.payloads, await self._record(correlation_id))
        instance = record.instance
        saga = self.sagas.find(instance.saga_type, instance.definition_version)
        assert saga is not None, "it was found among them"
        return SagaView(
            instance.status,
            decode(saga.state_type, instance.state),
            instance.current_step,
            instance.last_error,
            instance.needs_attention,
            explain(record, saga.definition).reasons,
            {entry.step: entry.status for entry in record.journal if entry.phase is Phase.ACTION},
        )

    def _find_command(self, step: str, correlation_id: str | None) -> _SentCommand:
        for event in reversed(self.commands):
            saga_id, _, name = event.headers[KEY_HEADER].partition(":")
            saga, command = self._sender(event, step)
            mine = correlation_id is None or (saga and saga_id == str(saga_id_of(saga.saga_type, correlation_id)))
            if saga and command and name == step and mine and event.event_id not in self._answered:
                return _SentCommand(event, saga, command)
        sent = ", ".join(
            f"{event.event_type} ({event.headers[KEY_HEADER].partition(':')[2]})" for event in self.commands
        )
        raise AssertionError(f"no command of {step} waits for an answer; sent so far: {sent or 'none'}")

    def _sender(self, event: Event, step: str) -> tuple[Saga[Any] | None, CommandSpec | None]:
        compensates = event.headers[PHASE_HEADER] == Phase.COMPENSATION
        for saga in self.sagas:
            found = saga.definition.find(step)
            action = (found.compensation if compensates else found.action) if found else None
            if action and action.command and action.command.event_type == event.event_type:
                return saga, action.command
        return None, None

    async def _deliver(self, found: _SentCommand, event_type: str, payload: Any) -> None:
        self._answered.add(found.event.event_id)
        headers = {KEY_HEADER: found.event.headers[KEY_HEADER]}
        body = {} if payload is None else payload
        event = Event(event_type, body, saga_id=found.event.saga_id, headers=headers, event_id=uuid4())
        async with self.store.transaction() as tx:
            await self._replies.deliver(found.saga.saga_type, event, tx)
        await self.run()

    async def _record(self, correlation_id: str) -> SagaRecord:
        for saga_type in sorted({saga.saga_type for saga in self.sagas}):
            record: SagaRecord | None = await self.store.admin.show(saga_id_of(saga_type, correlation_id))
            if record is not None:
                return record
        raise AssertionError(f"no saga was started with the correlation id {correlation_id!r}")


class SagaRecorder:
    """Wraps a saga store and records the events staged in its transactions."""

    def __init__(self, store: SagaStore) -> None:
        self._store = store
        self._open: dict[int, list[Event]] = {}
        self.staged: list[Event] = []

    def __getattr__(self, name: str) -> Any:
        return getattr(self._store, name)

    def transaction(self) -> AbstractAsyncContextManager[Any]:
        """Open a transaction of the store."""
        return self._remembering(self._store.transaction())

    @property
    def transactions(self) -> TransactionSource:
        """The transactions for the functions of steps."""
        return _RememberingSource(self._store.transactions, self._remembering)

    async def stage(self, conn: Any, *events: Event) -> list[UUID]:
        """Stage events; they are recorded after the transaction has committed."""
        ids = await outrider.stage(conn, *events)
        named = [replace(event, event_id=event_id) for event, event_id in zip(events, ids, strict=True)]
        self._open.setdefault(id(conn), []).extend(named)
        return ids

    async def undelivered(self, tx: Any, event_ids: Sequence[UUID]) -> Mapping[UUID, Undelivered]:
        """Report no undelivered events: without a relay, every staged event counts as published."""
        return {}

    @asynccontextmanager
    async def _remembering(self, transaction: AbstractAsyncContextManager[Any]) -> AsyncIterator[Any]:
        mine = 0
        try:
            async with transaction as tx:
                mine = id(tx)
                self._open.pop(mine, None)
                yield tx
            self.staged += self._open.get(mine, [])
        finally:
            self._open.pop(mine, None)


class _RememberingSource:
    """Opens transactions of a source, each inside a context of the recorder."""

    def __init__(self, source: TransactionSource, around: Callable[..., AbstractAsyncContextManager[Any]]) -> None:
        self.vendor, self.check_handler, self.close = source.vendor, source.check_handler, source.close
        self._source, self._around = source, around

    def open(self) -> AbstractAsyncContextManager[Any]:
        return self._around(self._source.open())


def connection_of(tx: Any) -> Any:
    """Return the connection of a handler transaction; return a plain connection unchanged."""
    return tx.connection if isinstance(tx, HandlerTransaction) else tx


@dataclass(frozen=True, slots=True)
class RecorderOutbox(Outbox):
    """An outbox over a recorder: sagas use the clock of the store, and staged events are recorded."""

    recorder: SagaRecorder = field(kw_only=True)

    async def stage(self, conn: Any, *events: Event) -> list[UUID]:
        """Stage events through the recorder."""
        return await self.recorder.stage(conn, *events)

    async def perform(self, conn: Any, operation: str, *arguments: Any, instead: str = ASYNC_ONLY) -> Any:
        """Run an operation of a driver; the store itself starts sagas and delivers messages."""
        if operation == "start_saga":
            return await self.recorder.start(conn, *arguments)
        if operation == "deliver_messages":
            return await self.recorder.deliver(conn, *arguments)
        return await Outbox.perform(self, conn, operation, *arguments, instead=instead)


def new_saga(correlation_id: str = "A-7", saga_type: str = "order", version: int = 1) -> NewSaga:
    """Make a new saga, not yet started. The saga id is derived from type and correlation id.

    >>> new_saga("A-7").saga_id == new_saga("A-7").saga_id
    True
    """
    saga_id = uuid5(NAMESPACE_OID, f"{saga_type}:{correlation_id}")
    return NewSaga(saga_id, saga_type, version, correlation_id, b'{"amount": 12}', TRACE, FINGERPRINT)


def reply(saga_id: UUID, name: str = "stock.reserved", event_id: UUID | None = None) -> NewSagaMessage:
    """Make a reply to a saga."""
    return NewSagaMessage(saga_id, MessageKind.REPLY, name, f"{saga_id}:reserve", b'{"ok": true}', event_id or uuid4())


def claim_of(record: SagaRecord) -> Claim:
    """Return the claim under which a record was read."""
    assert record.instance.owner is not None
    return Claim(record.instance.owner, record.instance.saga_id, record.instance.epoch)


class _Changed(Exception):
    """Raised at the end of a transaction to roll back."""


class SagaBench(ABC):
    """A saga store under test. Third parties implement the abstract methods and subclass `SagaContract`.

    `driver` is the module of the driver through which applications use the same tables.
    """

    driver: ModuleType

    def __init__(self, store: SagaStore, clock: ManualClock) -> None:
        self.store, self.clock = store, clock

    @abstractmethod
    def other(self) -> SagaStore:
        """Return a store of another process on the same database."""

    @abstractmethod
    def outside(self) -> AbstractAsyncContextManager[Any]:
        """Open the object that the driver takes, without a transaction."""

    @abstractmethod
    def outbox(self) -> AbstractAsyncContextManager[OutboxStore]:
        """Open the outbox store in the same database as the sagas."""

    async def advance(self, *, seconds: float) -> None:
        """Advance the clock, also for the database."""
        self.clock.advance(seconds=seconds)

    async def commit(self, tx: Any) -> None:
        """Commit directly, as a step function must not do with its transaction."""
        ended = tx.commit() if hasattr(tx, "commit") else tx.execute("COMMIT")
        if inspect.isawaitable(ended):
            await ended

    async def call_driver(self, command: str, tx: Any, *args: Any) -> Any:
        """Call a function of the driver."""
        result = self.driver.run(connection_of(tx), command, args, "outrider")
        return await result if inspect.isawaitable(result) else result

    @asynccontextmanager
    async def rolled_back(self) -> AsyncIterator[Any]:
        """Open a transaction that is rolled back at the end."""
        with suppress(_Changed):
            async with self.store.transaction() as tx:
                yield tx
                raise _Changed

    async def start(self, *sagas: NewSaga) -> list[UUID]:
        """Start sagas in one transaction; return their ids."""
        async with self.store.transaction() as tx:
            for saga in sagas:
                assert await self.store.start(tx, saga)
        return [saga.saga_id for saga in sagas]

    async def deliver(self, *messages: NewSagaMessage) -> int:
        """Deliver messages in a separate transaction."""
        async with self.store.transaction() as tx:
            return await self.store.deliver(tx, messages)

    async def claim(
        self,
        worker: str = "ann",
        definitions: Collection[tuple[str, int]] = (ORDER,),
        limit: int = 10,
        suspects: int = 1,
    ) -> list[SagaRecord]:
        """Claim sagas."""
        limits = {"limit": limit, "suspects": suspects}
        return await self.store.claim(worker, definitions, **limits, lease_seconds=LEASE_SECONDS)

    async def claim_one(self, worker: str = "ann") -> SagaRecord:
        """Claim a saga; exactly one must be claimable."""
        [record] = await self.claim(worker)
        return record

    async def start_and_claim(self, correlation_id: str = "A-7") -> SagaRecord:
        """Start a saga and claim it."""
        await self.start(new_saga(correlation_id))
        return await self.claim_one()

    async def save(self, record: SagaRecord, *, claim: Claim | None = None, **turn: Any) -> datetime:
        """Save a turn in a separate transaction; fields of the instance and of the turn may be passed by name."""
        async with self.store.transaction() as tx:
            return await self.save_in(tx, record, claim=claim, **turn)

    async def save_in(self, tx: Any, record: SagaRecord, *, claim: Claim | None = None, **turn: Any) -> datetime:
        """Save a turn in a given transaction."""
        parts = {name: turn.pop(name) for name in list(turn) if name in SagaChange.__slots__}
        parts.setdefault("at", record.now)
        made = SagaChange(replace(record.instance, **turn), **parts)
        return await self.store.save(tx, claim or claim_of(record), made, LEASE_SECONDS)

    async def release(self, record: SagaRecord, **turn: Any) -> datetime:
        """Save a turn that releases the saga."""
        return await self.save(record, release=True, **turn)

    async def show(self, saga_id: UUID) -> SagaRecord:
        """Return a saga that must exist."""
        record = await self.store.admin.show(saga_id)
        assert record is not None
        return record
