"""Sagas in a test: they run until nothing moves, and the test answers, refuses, sends events and lets time pass.

Nothing sleeps, no broker and no participant is needed. Functions of `local` and `call` steps really run; give them a
bank and a stock of yours, or let the test replace these.
"""

from __future__ import annotations

import json
import random
from dataclasses import dataclass
from typing import Any, NamedTuple
from uuid import UUID, uuid4

from outrider.errors import Misuse
from outrider.event import Event
from outrider.saga.acting import KEY_HEADER, PHASE_HEADER
from outrider.saga.definition import Saga, saga_id_of
from outrider.saga.intake import Intake
from outrider.saga.sagas import Sagas
from outrider.saga.settings import SagaSettings
from outrider.saga.state import decode
from outrider.saga.steps import Command
from outrider.saga.why import explain
from outrider.saga.worker import SagaWorker
from outrider.saga_store import MailKind, NewMail, Phase, Record, SagaStore, Status
from outrider.stores.memory import MemorySagas, MemoryStore
from outrider.testing.clock import ManualClock
from outrider.testing.observer import Notebook
from outrider.testing.saga_recorder import SagaRecorder

ROUNDS_MAX = 1000


class _Asked(NamedTuple):
    """A command, and who sent it."""

    event: Event
    saga: Saga[Any]
    command: Command


@dataclass(frozen=True, slots=True)
class SeenSaga:
    """How a saga stands. `why` says in plain words what it waits for, as `outrider saga why` does."""

    status: Status
    state: Any
    current_step: str | None
    last_error: str | None
    needs_attention: bool
    why: tuple[str, ...]


class SagaHarness:
    """Drives sagas by hand, in memory or in a store of yours.

    A store that takes its time from a clock can be given with that clock; one that keeps its own, as PostgreSQL does,
    without, and then `advance` is refused::

        harness = SagaHarness(Sagas(order))
        await harness.start(order, Order("A-7", 12), "A-7")
        await harness.reply("reserve", {"reservation": "R-1"})
        assert (await harness.saga("A-7")).status == "completed"
    """

    def __init__(
        self, sagas: Any, store: SagaStore | None = None, *, clock: ManualClock | None = None, seed: int = 0
    ) -> None:
        self.sagas, self.notebook = Sagas.of(sagas), Notebook()
        self.clock = clock or (ManualClock() if store is None else None)
        self.store: Any = SagaRecorder(store or MemorySagas(MemoryStore(clock=self.clock)))
        self._intake = Intake(self.sagas, self.store, self.notebook)
        chance = random.Random(seed)
        self.worker = SagaWorker(
            self.store, self.sagas, self.store.stage, SagaSettings(), self.notebook, clock=self.clock, chance=chance
        )
        self._answered: set[UUID | None] = set()

    @property
    def commands(self) -> list[Event]:
        """Return the commands that went out, in order, those that undo among them."""
        return [event for event in self.store.staged if PHASE_HEADER in event.headers]

    @property
    def staged(self) -> list[Event]:
        """Return the events that steps have staged, in order, without commands."""
        return [event for event in self.store.staged if PHASE_HEADER not in event.headers]

    async def start(self, saga: Saga[Any], state: Any, correlation_id: str) -> UUID:
        """Start a saga, and let it come as far as it comes."""
        async with self.store.transaction() as tx:
            saga_id = await saga.start(tx, state, correlation_id=correlation_id, outbox=self.store)
        await self.run()
        return saga_id

    async def run(self) -> None:
        """Let the worker work until nothing moves: everything has ended, or waits for somebody or for time to pass."""
        for _ in range(ROUNDS_MAX):
            if not await self.worker.work():
                return
            await self.worker.rest()
        raise AssertionError(f"sagas still move after {ROUNDS_MAX} rounds; does a step put itself off without a delay?")

    async def reply(self, step: str, payload: Any = None, *, correlation_id: str | None = None) -> None:
        """Answer the last command of a step, as a participant does; the one that undoes it is answered in the same way.

        `correlation_id` says whose, if several sagas have asked::

            await harness.reply("reserve", {"reservation": "R-1"})
        """
        asked = self._asked(step, correlation_id)
        await self._arrives(asked, asked.command.reply or "", payload)

    async def refuse(self, step: str, payload: Any = None, *, correlation_id: str | None = None) -> None:
        """Refuse the last command of a step, as a participant does::

        await harness.refuse("reserve", {"reason": "sold out"})
        """
        asked = self._asked(step, correlation_id)
        if asked.command.refusal is None:
            raise Misuse(f"{asked.command.event_type} cannot be refused; declare refusal=… at the step {step}")
        await self._arrives(asked, asked.command.refusal, payload)

    async def event(self, event_type: str, payload: Any = None, *, correlation_id: str | None = None) -> bool:
        """Let an event come in that nobody was asked for; tell whether a saga got it.

        Whose it is, `correlate` says; a wait without it needs the correlation id here::

            assert await harness.event("parcel.collected", {"order": "A-7"})
        """
        got = False
        for saga_type in self._intake.saga_types:
            if event_type in {kind for _, kind in self._intake.replies(saga_type)}:
                saga_id = None if correlation_id is None else str(saga_id_of(saga_type, correlation_id))
                event = Event(event_type, {} if payload is None else payload, saga_id=saga_id, event_id=uuid4())
                async with self.store.transaction() as tx:
                    got |= await self._intake.deliver(saga_type, event, tx)
        await self.run()
        return got

    async def order(self, verb: str, correlation_id: str, **fields: Any) -> None:
        """Order `retry`, `compensate` or `resume`, as a person does; fields are put into the state by `resume`."""
        body = json.dumps({"actor": "test", **({"set": fields} if fields else {})}).encode()
        saga_id = (await self._record(correlation_id)).instance.saga_id
        async with self.store.transaction() as tx:
            await self.store.post(tx, [NewMail(saga_id, MailKind.ORDER, verb, None, body, uuid4())])
        await self.run()

    async def advance(self, *, seconds: float) -> None:
        """Let time pass, and sagas do what is due then::

        await harness.advance(seconds=30)
        """
        if self.clock is None:
            raise Misuse("this store keeps its own time; use the memory store, or give the clock: clock=ManualClock()")
        self.clock.advance(seconds=seconds)
        await self.run()

    async def saga(self, correlation_id: str) -> SeenSaga:
        """Return how a saga stands, with its state as the steps see it."""
        record = await self._record(correlation_id)
        instance = record.instance
        saga = self.sagas.find(instance.saga_type, instance.definition_version)
        assert saga is not None, "it was found among them"
        return SeenSaga(
            instance.status,
            decode(saga.state_type, instance.state),
            instance.current_step,
            instance.last_error,
            instance.needs_attention,
            explain(record, saga.definition).reasons,
        )

    def _asked(self, step: str, correlation_id: str | None) -> _Asked:
        for event in reversed(self.commands):
            saga_id, _, name = event.headers[KEY_HEADER].partition(":")
            saga, command = self._sender(event, step)
            mine = correlation_id is None or (saga and saga_id == str(saga_id_of(saga.saga_type, correlation_id)))
            if saga and command and name == step and mine and event.event_id not in self._answered:
                return _Asked(event, saga, command)
        sent = ", ".join(
            f"{event.event_type} ({event.headers[KEY_HEADER].partition(':')[2]})" for event in self.commands
        )
        raise AssertionError(f"no command of {step} waits for an answer; sent so far: {sent or 'none'}")

    def _sender(self, event: Event, step: str) -> tuple[Saga[Any] | None, Command | None]:
        undoes = event.headers[PHASE_HEADER] == Phase.COMPENSATION
        for saga in self.sagas:
            found = saga.definition.steps.get(step)
            act = (found.undo if undoes else found.action) if found else None
            if act and act.command and act.command.event_type == event.event_type:
                return saga, act.command
        return None, None

    async def _arrives(self, asked: _Asked, event_type: str, payload: Any) -> None:
        self._answered.add(asked.event.event_id)
        headers = {KEY_HEADER: asked.event.headers[KEY_HEADER]}
        body = {} if payload is None else payload
        event = Event(event_type, body, saga_id=asked.event.saga_id, headers=headers, event_id=uuid4())
        async with self.store.transaction() as tx:
            await self._intake.deliver(asked.saga.saga_type, event, tx)
        await self.run()

    async def _record(self, correlation_id: str) -> Record:
        for saga_type in sorted({saga.saga_type for saga in self.sagas}):
            record: Record | None = await self.store.desk.show(saga_id_of(saga_type, correlation_id))
            if record is not None:
                return record
        raise AssertionError(f"no saga was started with the correlation id {correlation_id!r}")
