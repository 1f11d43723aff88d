"""Running a step's own code: its state is decoded before and encoded after, and whatever it raises becomes a result.

Nothing that the code of a step does reaches the worker as an exception, but cancellation and a lost transaction.
"""

from __future__ import annotations

import asyncio
import inspect
import json
from collections.abc import Awaitable, Mapping
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

from outrider.errors import TransactionLost, UnfitHandler
from outrider.event import Event
from outrider.observer import Observer
from outrider.saga import faults
from outrider.saga.definition import Saga
from outrider.saga.errors import Refused
from outrider.saga.faults import RAISED, failure, unfit
from outrider.saga.keeping import Opened, opened
from outrider.saga.news import Absorb, Call, Local, Raised, Result, Send, Succeeded, TimedOut, Unfit, key_of
from outrider.saga.returned import computed, payload_of, ran
from outrider.saga.run import Reply, Run
from outrider.saga.state import decode
from outrider.saga.steps import Act, Function
from outrider.saga.strays import Strays
from outrider.saga_store import Instance, Phase, SagaStore

KEY_HEADER = "saga_key"
PHASE_HEADER = "saga_phase"
ANSWERED_HEADER = "saga_answered"
"""What a command tells its participant: the idempotency key, whether to do or to undo, and whether what is to be undone
was answered, so that it has certainly happened.
"""


class Acted(NamedTuple):
    """What came of a move: its result, and, if it succeeded, what it made of the state and wants to be staged."""

    move: Call | Local
    result: Result
    before: bytes = b""
    after: bytes = b""
    staged: tuple[Event, ...] = ()


class Absorbed(NamedTuple):
    """What a reply made of the state, and what is to be staged with it."""

    state: bytes
    staged: tuple[Event, ...]


@dataclass(frozen=True, slots=True)
class Acting:
    """Runs the code of one saga's steps."""

    store: SagaStore
    saga: Saga[Any]
    strays: Strays
    observer: Observer

    def act(self, step: str, phase: Phase) -> Act:
        """Return what is done in a phase of a step."""
        found = self.saga.definition.steps[step]
        act = found.action if phase is Phase.ACTION else found.undo
        assert act is not None, f"{step} is being undone and has no undo"
        return act

    async def call(self, instance: Instance, move: Call) -> Acted:
        """Call a step's function, outside any transaction and in a task of its own, which may ignore cancellation."""
        if too_many := self.strays.objection(instance, move):
            return Acted(move, Unfit(move.step, move.phase, too_many))
        prepared = self._prepared(instance, move)
        if isinstance(prepared, Unfit):
            return Acted(move, prepared)
        act, run, before = prepared
        assert act.function
        task = asyncio.create_task(_outcome(_called(act.function, run)))
        late = not await self.strays.within(task, act.timeout_seconds, instance, move)
        if not task.done() or task.cancelled():
            return Acted(move, TimedOut(move.step, move.phase) if late else Raised(move.step, move.phase, CANCELLED))
        if (raised := task.result()) is not None:
            return Acted(move, self._failure(instance, move, raised, late=late))
        return self._succeeded(move, run, before)

    async def local(self, instance: Instance, move: Local, tx: Any) -> Acted:
        """Run a step's function in the transaction that saves its result. Raises TransactionLost."""
        prepared = self._prepared(instance, move)
        if isinstance(prepared, Unfit):
            return Acted(move, prepared)
        act, run, before = prepared
        assert act.function
        within = self._in_place if self.store.one_at_a_time else self._beside
        late, raised = await within(self.store.call(act.function, run, tx), act.timeout_seconds, instance, move, tx)
        if isinstance(raised, TransactionLost):
            raise raised
        if isinstance(raised, UnfitHandler):
            return Acted(move, Unfit(move.step, move.phase, f"{faults.beginning(act.function)} {raised}"))
        if raised is not None:
            return Acted(move, self._failure(instance, move, raised, late=late))
        return self._succeeded(move, run, before)._replace(before=instance.state)

    async def _in_place(
        self, work: Awaitable[Any], seconds: float | None, instance: Instance, move: Local, tx: Any
    ) -> tuple[bool, BaseException | None]:
        """Run a function in this very task, where a store knows by the task who has its only transaction."""
        limit = asyncio.timeout(seconds)
        try:
            async with limit:
                raised = await _outcome(work)
        except TimeoutError as error:
            return True, error
        return False, raised

    async def _beside(
        self, work: Awaitable[Any], seconds: float | None, instance: Instance, move: Local, tx: Any
    ) -> tuple[bool, BaseException | None]:
        """Run a function in a task of its own; one that does not end is cut off from its transaction."""
        task = asyncio.create_task(_outcome(work))
        try:
            late = not await self.strays.within(task, seconds, instance, move)
        finally:
            if not task.done():
                self.store.sever(tx)
        if not task.done() or task.cancelled():
            return late, TimeoutError() if late else asyncio.CancelledError()
        return late, task.result()

    def absorb(self, instance: Instance, move: Absorb) -> Absorbed | Result:
        """Take a reply into the state, or say why that was not possible."""
        function = self.saga.definition.steps[move.step].takes[move.mail.name]
        key = key_of(instance.saga_id, move.step)
        try:
            before = opened(self.saga.state_type, instance.state)
            run = Run(before.state, instance.saga_id, key, move.attempt, instance.correlation_id, move.phase)
            computed(function(run, Reply(move.mail.name, json.loads(move.mail.body))))
            return Absorbed(before.closed(run.state), tuple(run.staged))
        except (*RAISED, asyncio.CancelledError) as error:
            return self._failure(instance, move, error)

    def command(self, instance: Instance, move: Send, *, answered: bool = False) -> Event | Result:
        """Make the command that a move sends, of the state; or say why that was not possible.

        It has the saga's id for a key, in both phases, so that a compensation cannot overtake its action.
        """
        asked = self.act(move.step, move.phase).command
        assert asked
        try:
            state = decode(self.saga.state_type, instance.state) if asked.payload else None
            payload = payload_of(asked.payload(state)) if asked.payload else {}
        except (*RAISED, asyncio.CancelledError) as error:
            return self._failure(instance, move, error)
        return Event(
            asked.event_type,
            payload,
            topic=asked.topic,
            key=str(instance.saga_id),
            saga_id=str(instance.saga_id),
            headers={
                KEY_HEADER: move.key,
                PHASE_HEADER: move.phase.value,
                **({ANSWERED_HEADER: "true"} if answered else {}),
            },
        )

    def unfit_to_stage(self, move: faults.Step, error: BaseException) -> Unfit:
        """Say that an event cannot be staged, and who wanted that."""
        said = faults.described(error)
        function = self._function(move)
        return Unfit(move.step, move.phase, f"{said}; staged for {faults.beginning(function)}" if function else said)

    def spoilt(self, move: Local, error: BaseException) -> Result:
        """Say what a function did to its transaction that only the store has noticed, when it was to be saved."""
        if isinstance(error, UnfitHandler):
            return Unfit(move.step, move.phase, f"{faults.beginning(self._function(move))} {error}")
        return Raised(move.step, move.phase, faults.described(error))

    def _function(self, move: faults.Step) -> Function | None:
        if isinstance(move, Absorb):
            return self.saga.definition.steps[move.step].takes[move.mail.name]
        act = self.act(move.step, move.phase)
        return act.command.payload if act.command else act.function

    def _prepared(self, instance: Instance, move: Call | Local) -> tuple[Act, Run[Any], Opened[Any]] | Unfit:
        """Return what is to be done, and the run with the state for it; or say why the state cannot be read."""
        try:
            before = opened(self.saga.state_type, instance.state)
        except RAISED as error:
            return unfit(move, error)
        run = Run(before.state, instance.saga_id, move.key, move.attempt, instance.correlation_id, move.phase)
        return self.act(move.step, move.phase), run, before

    def _succeeded(self, move: Call | Local, run: Run[Any], before: Opened[Any]) -> Acted:
        try:
            after = before.closed(run.state)
        except RAISED as error:
            return Acted(move, unfit(move, error))
        return Acted(move, Succeeded(move.step, move.phase), before.text, after, tuple(run.staged))

    def _failure(self, instance: Instance, move: faults.Step, error: BaseException, *, late: bool = False) -> Result:
        if not isinstance(error, Refused):
            self.observer.notice(faults.raised(instance, move, error))
        return failure(move, error, late=late)


CANCELLED = "it cancelled itself"


async def _called(function: Function, run: Run[Any]) -> None:
    result = function(run)
    ran(await result if inspect.isawaitable(result) else result)


async def _outcome(work: Awaitable[Any]) -> BaseException | None:
    """Wait for somebody's code, and return what it raised: an exit that left a task would end the event loop."""
    try:
        ran(await work)
    except asyncio.CancelledError as error:
        if _being_cancelled():
            raise
        return error
    except RAISED as error:
        return error
    return None


def _being_cancelled() -> bool:
    """Tell whether it is we who are to end. If not, the code has awaited something that was, and simply failed."""
    task = asyncio.current_task()
    return task is not None and task.cancelling() > 0


def traced(event: Event, instance: Instance) -> Event:
    """Let an event go on with the trace that the saga was started in, unless it has one of its own."""
    if instance.traceparent is None or not isinstance(event.headers, Mapping):
        return event
    if event.headers.keys() & {"traceparent", "trace_id"}:
        return event
    return replace(event, headers={**event.headers, "traceparent": instance.traceparent})
