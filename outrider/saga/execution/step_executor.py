"""Runs the code of a step: decodes the state, calls the function, encodes the state and turns exceptions into results.

The worker sees no exception of a step except cancellation and a lost transaction.
"""

from __future__ import annotations

import asyncio
import inspect
import json
from collections import Counter
from collections.abc import Awaitable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

from outrider.errors import (
    InvalidEvent,
    InvalidHandler,
    InvalidPayload,
    InvalidState,
    Permanent,
    StepRejected,
    StepUnavailable,
    TransactionLost,
    UsageError,
)
from outrider.event import Event, subject_of
from outrider.payload.payloads import Payloads
from outrider.redaction import ErrorText, Redactor
from outrider.saga.context import Reply, StepContext
from outrider.saga.definition.saga import Saga
from outrider.saga.definition.steps import Step as DefinedStep
from outrider.saga.definition.steps import StepAction, base_name
from outrider.saga.definition.validation import Function
from outrider.saga.model import Instance, MessageKind, Phase, SagaMessage, SagaRecord
from outrider.saga.planner.actions import (
    ApplyReply,
    CallAction,
    InvalidResult,
    LocalAction,
    Raised,
    RejectedResult,
    Result,
    SendCommand,
    Succeeded,
    TimedOut,
    UnavailableResult,
    key_of,
)
from outrider.saga.state.codec import decode
from outrider.saga.state.encryption import load_keys, open_record
from outrider.saga.state.roundtrip import LoadedState, load_state
from outrider.saga.store import SagaStore
from outrider.telemetry.events import Observer, SagaStepRaised, SagaTaskLeaked
from outrider.tracebacks import short_path, summary_of, text_of, traceback_text, user_frame

KEY_HEADER = "saga_key"

PHASE_HEADER = "saga_phase"

ANSWERED_HEADER = "saga_answered"
"""Headers of a command: idempotency key, phase, and whether a reply has confirmed the action to be compensated."""

CANCELLED = "it cancelled itself"

CANCEL_SECONDS = 1.0
"""The time a cancelled call has to end before it counts as a leaked task."""

LEAKED_MAX = 100
"""The number of leaked tasks at which a step is no longer called."""

StepKey = tuple[str, str]

RAISED = (Exception, SystemExit, KeyboardInterrupt, BaseExceptionGroup)
"""Exceptions that code of a step may raise.

SystemExit and KeyboardInterrupt do not end the process from inside a step.
"""

TEXT_CHARACTERS_MAX = 700
"""Less than the error column of the journal holds, so the source location is never cut off."""

INVALID = (InvalidEvent, InvalidHandler, InvalidState)

Step = CallAction | LocalAction | SendCommand | ApplyReply

LAZY = "returned a generator, so that nothing of it has run; take the yield out"

AWAITABLE = "returned something to await, and may only compute; write def, and move slow work into a step"

UNAWAITED = "returned a coroutine that nobody has awaited, so that nothing of it has run; write await before it"

NO_PAYLOAD = "returned None; return what the command is to carry, or {} if it carries nothing"


class StepOutcome(NamedTuple):
    """The result of an action. After a success, also the state before and after and the events to be staged."""

    action: CallAction | LocalAction
    result: Result
    before: bytes = b""
    after: bytes = b""
    staged: tuple[Event, ...] = ()


class AppliedReply(NamedTuple):
    """The state after a reply was applied, the events to be staged, and the result of an item as JSON text."""

    state: bytes
    staged: tuple[Event, ...]
    result: str | None = None


def definition_site(function: Any) -> str:
    """Return the name of a function and the line where the definition starts.

    >>> definition_site(print)
    'print'
    """
    name = getattr(function, "__qualname__", repr(function))
    code = getattr(function, "__code__", None)
    return f"{name} ({short_path(code.co_filename)}:{code.co_firstlineno})" if code else name


def describe(error: BaseException, redactor: Redactor) -> str:
    """Describe an error and its source location, with a redacted text.

    >>> describe(KeyError("order"), Redactor())
    "KeyError: 'order'"
    """
    said = _text(error, redactor)
    if isinstance(error, BaseExceptionGroup):
        said = f"{said}, the first of them {_text(error.exceptions[0], redactor)}"
    place = None if isinstance(error, StepRejected | StepUnavailable) else user_frame(error)
    return f"{said[:TEXT_CHARACTERS_MAX]} ({place})" if place else said[:TEXT_CHARACTERS_MAX]


@dataclass(frozen=True, slots=True)
class StepExecutor:
    """Runs the code of the steps of one saga."""

    store: SagaStore
    saga: Saga[Any]
    leaked: LeakedTasks
    observer: Observer
    payloads: Payloads | None = None
    error_text: ErrorText = ErrorText.REDACTED

    def redactor(self, instance: Instance, action: Step | None = None) -> Redactor:
        """Return the redactor of error texts of a saga: the values of its state, and those that the action got."""
        texts = [instance.state]
        if action is not None:
            texts.append((action.item or "null").encode())
            texts.append(action.message.body if isinstance(action, ApplyReply) else (action.result or "null").encode())
        return Redactor(self.error_text, *texts)

    async def open(self, record: SagaRecord) -> SagaRecord:
        """Return a saga as `opened` does, and read its keys before."""
        await load_keys(self.payloads, [record])
        return self.opened(record)

    def opened(self, record: SagaRecord) -> SagaRecord:
        """Return a saga with plain values, and with its replies as code of the current version reads them.

        A reply that does not open stays as it is: its own step fails, and other steps go on. Raises InvalidPayload or
        KeysUnavailable if the state does not open.
        """
        record = open_record(self.payloads, record)
        if self.payloads is None:
            return record
        return record._replace(messages=tuple(self._opened(message, strict=False) for message in record.messages))

    def _opened(self, message: SagaMessage, *, strict: bool) -> SagaMessage:
        if self.payloads is None or message.kind is not MessageKind.REPLY:
            return message
        before = Event(
            message.name, json.loads(message.body), event_id=message.event_id, schema_version=message.schema_version
        )
        try:
            after = self.payloads.open(before)
        except InvalidPayload:
            if strict:
                raise
            return message
        if after is before:
            return message
        return message._replace(body=json.dumps(after.payload).encode(), schema_version=str(after.schema_version))

    def step(self, name: str) -> DefinedStep:
        """Return the definition of a step or of an item."""
        found = self.saga.definition.find(name)
        assert found is not None, f"{name} is not defined"
        return found

    def action(self, step: str, phase: Phase) -> StepAction:
        """Return the action of a step in a phase."""
        found = self.step(step)
        act = found.action if phase is Phase.ACTION else found.compensation
        assert act is not None, f"{step} is being compensated and has no compensation"
        return act

    async def call(self, instance: Instance, action: CallAction) -> StepOutcome:
        """Call the function of a step outside any transaction.

        The function runs in a separate task, because code may ignore cancellation.
        """
        if too_many := self.leaked.check_handler(instance, action):
            return StepOutcome(action, InvalidResult(action.step, action.phase, too_many))
        prepared = self._prepared(instance, action)
        if isinstance(prepared, InvalidResult):
            return StepOutcome(action, prepared)
        act, run, before = prepared
        assert act.function
        returned: list[Any] = []
        task = asyncio.create_task(_outcome(_called(act.function, run, returned)))
        late = not await self.leaked.wait(task, act.timeout_seconds, instance, action)
        if not task.done() or task.cancelled():
            return StepOutcome(
                action, TimedOut(action.step, action.phase) if late else Raised(action.step, action.phase, CANCELLED)
            )
        if (raised := task.result()) is not None:
            return StepOutcome(action, self._failure(instance, action, raised, late=late))
        return self._succeeded(instance, action, run, before, returned)

    async def local(self, instance: Instance, action: LocalAction, tx: Any) -> StepOutcome:
        """Run the function of a step in the transaction that saves its result. Raises TransactionLost."""
        prepared = self._prepared(instance, action)
        if isinstance(prepared, InvalidResult):
            return StepOutcome(action, prepared)
        act, run, before = prepared
        assert act.function
        run_local = self._run_in_task if self.store.one_at_a_time else self._run_beside
        returned: list[Any] = []
        work = _kept(tx.call(act.function, run), returned)
        late, raised = await run_local(work, act.timeout_seconds, instance, action, tx)
        if isinstance(raised, TransactionLost):
            raise raised
        if isinstance(raised, InvalidHandler):
            return StepOutcome(
                action, InvalidResult(action.step, action.phase, f"{definition_site(act.function)} {raised}")
            )
        if raised is not None:
            return StepOutcome(action, self._failure(instance, action, raised, late=late))
        return self._succeeded(instance, action, run, before, returned)._replace(before=instance.state)

    async def _run_in_task(
        self, work: Awaitable[Any], seconds: float | None, instance: Instance, action: LocalAction, tx: Any
    ) -> tuple[bool, BaseException | None]:
        """Run a function in the current task: the store recognises the owner of its only transaction by the task."""
        limit = asyncio.timeout(seconds)
        try:
            async with limit:
                raised = await _outcome(work)
        except TimeoutError as error:
            return True, error
        return False, raised

    async def _run_beside(
        self, work: Awaitable[Any], seconds: float | None, instance: Instance, action: LocalAction, tx: Any
    ) -> tuple[bool, BaseException | None]:
        """Run a function in a separate task; a task that does not end loses its transaction."""
        task = asyncio.create_task(_outcome(work))
        try:
            late = not await self.leaked.wait(task, seconds, instance, action)
        finally:
            if not task.done():
                tx.abort()
        if not task.done() or task.cancelled():
            return late, TimeoutError() if late else asyncio.CancelledError()
        return late, task.result()

    def apply_reply(self, instance: Instance, action: ApplyReply) -> AppliedReply | Result:
        """Apply a reply to the state, or return the reason of the failure as a result."""
        step = self.step(action.step)
        function = step.reply_functions[action.message.name]
        key = key_of(instance.saga_id, action.step)
        try:
            before = load_state(self.saga.state_type, instance.state)
            run = StepContext(
                before.state, instance.saga_id, key, action.attempt, instance.correlation_id, action.phase
            )
            run.item = _value(action.item)
            opened = action._replace(message=self._opened(action.message, strict=True))
            returned = check_computed(function(run, _given(step, opened)))
            is_result = step.into is not None and action.phase is Phase.ACTION
            result = result_text(returned) if is_result else None
            return AppliedReply(before.dump(run.state), tuple(run.staged), result)
        except (*RAISED, asyncio.CancelledError) as error:
            return self._failure(instance, action, error)

    def command(self, instance: Instance, action: SendCommand, *, answered: bool = False) -> Event | Result:
        """Build the command of an action from the state, or return the reason of the failure as a result.

        The key is the saga id in both phases, so a compensation cannot overtake its action.
        """
        asked = self.action(action.step, action.phase).command
        assert asked
        try:
            state = decode(self.saga.state_type, instance.state) if asked.payload else None
            arguments = (state,) if action.item is None else (state, _value(action.item))
            payload = payload_of(asked.payload(*arguments)) if asked.payload else {}
        except (*RAISED, asyncio.CancelledError) as error:
            return self._failure(instance, action, error)
        return Event(
            asked.event_type,
            payload,
            topic=asked.topic,
            key=str(instance.saga_id),
            saga_id=str(instance.saga_id),
            headers={
                KEY_HEADER: action.key,
                PHASE_HEADER: action.phase.value,
                **({ANSWERED_HEADER: "true"} if answered else {}),
            },
        )

    def cannot_stage(self, instance: Instance, action: Step, error: BaseException) -> InvalidResult:
        """Return the result for an event that cannot be staged. The text names the function that staged the event."""
        said = describe(error, self.redactor(instance, action))
        function = self._function(action)
        return InvalidResult(
            action.step, action.phase, f"{said}; staged for {definition_site(function)}" if function else said
        )

    def failed_on_save(self, instance: Instance, action: LocalAction, error: BaseException) -> Result:
        """Return the result for an error of a local function that the store detected only when saving."""
        if isinstance(error, InvalidHandler):
            return InvalidResult(action.step, action.phase, f"{definition_site(self._function(action))} {error}")
        return Raised(action.step, action.phase, describe(error, self.redactor(instance, action)))

    def _function(self, action: Step) -> Function | None:
        if isinstance(action, ApplyReply):
            return self.step(action.step).reply_functions[action.message.name]
        act = self.action(action.step, action.phase)
        return act.command.payload if act.command else act.function

    def _prepared(
        self, instance: Instance, action: CallAction | LocalAction
    ) -> tuple[StepAction, StepContext[Any], LoadedState[Any]] | InvalidResult:
        """Return the action, the context and the loaded state, or an invalid result if the state cannot be decoded."""
        try:
            before = load_state(self.saga.state_type, instance.state)
        except RAISED as error:
            return invalid(action, error, self.redactor(instance, action))
        run = StepContext(
            before.state, instance.saga_id, action.key, action.attempt, instance.correlation_id, action.phase
        )
        run.item, run.result = _value(action.item), _value(action.result)
        return self.action(action.step, action.phase), run, before

    def _succeeded(
        self,
        instance: Instance,
        action: CallAction | LocalAction,
        run: StepContext[Any],
        before: LoadedState[Any],
        returned: Sequence[Any],
    ) -> StepOutcome:
        is_result = self.step(action.step).into is not None and action.phase is Phase.ACTION
        try:
            after = before.dump(run.state)
            result = result_text(returned[-1] if returned else None) if is_result else None
        except RAISED as error:
            return StepOutcome(action, invalid(action, error, self.redactor(instance, action)))
        return StepOutcome(action, Succeeded(action.step, action.phase, result), before.text, after, tuple(run.staged))

    def _failure(self, instance: Instance, action: Step, error: BaseException, *, late: bool = False) -> Result:
        redactor = self.redactor(instance, action)
        if not isinstance(error, StepRejected | StepUnavailable):
            trace = traceback_text(error, redactor)
            saga = instance.saga_id, instance.saga_type
            self.observer.emit(SagaStepRaised(*saga, action.step, action.phase, trace))
        return failure(action, error, redactor, late=late)


async def _called(function: Function, run: StepContext[Any], returned: list[Any]) -> None:
    result = function(run)
    returned.append(check_ran(await result if inspect.isawaitable(result) else result))


async def _kept(work: Awaitable[Any], returned: list[Any]) -> Any:
    """Await user code, and keep the value that it returns."""
    value = await work
    returned.append(value)
    return value


def _given(step: DefinedStep, action: ApplyReply) -> Any:
    """Return the second argument of the function that applies a reply: for a child, its final state."""
    if step.child:
        return decode(step.child.saga.state_type, action.message.body)
    return Reply(action.message.name, json.loads(action.message.body))


def _value(text: str | None) -> Any:
    return None if text is None else json.loads(text)


def result_text(value: Any) -> str:
    """Return the result of an item as JSON text. Raises InvalidHandler for a value that is not JSON.

    >>> result_text({"room": 7})
    '{"room": 7}'
    """
    try:
        return json.dumps(value, allow_nan=False)
    except (TypeError, ValueError, RecursionError) as error:
        raise InvalidHandler(
            f"returned a {type(value).__name__}, which is no JSON value ({error}); into= collects JSON values"
        ) from error


async def _outcome(work: Awaitable[Any]) -> BaseException | None:
    """Wait for user code and return the exception. A SystemExit that escapes from a task would end the event loop."""
    try:
        check_ran(await work)
    except asyncio.CancelledError as error:
        if _being_cancelled():
            raise
        return error
    except RAISED as error:
        return error
    return None


def _being_cancelled() -> bool:
    """Tell whether this task is being cancelled. Otherwise the user code awaited a cancelled task and has failed."""
    task = asyncio.current_task()
    return task is not None and task.cancelling() > 0


def traced(event: Event, instance: Instance) -> Event:
    """Add the trace and the subject of the saga to an event that has none."""
    if instance.subject is not None and subject_of(event) is None:
        event = replace(event, subject=instance.subject)
    if instance.traceparent is None or not isinstance(event.headers, Mapping):
        return event
    if event.headers.keys() & {"traceparent", "trace_id"}:
        return event
    return replace(event, headers={**event.headers, "traceparent": instance.traceparent})


@dataclass(slots=True)
class LeakedTasks:
    """Cancelled calls of a worker that still run."""

    observer: Observer
    tasks: set[asyncio.Task[Any]] = field(default_factory=set)
    by_step: Counter[StepKey] = field(default_factory=Counter)

    def check_handler(self, instance: Instance, action: CallAction | LocalAction) -> str | None:
        """Return the reason why a step must not be called again because of its leaked tasks."""
        if (count := self.by_step[instance.saga_type, base_name(action.step)]) < LEAKED_MAX:
            return None
        return (
            f"{count} calls of it ignore that they were cancelled and are still running, so that it is not called any "
            "more; let it end when it is cancelled, restart the worker, and retry the saga"
        )

    async def wait(
        self, task: asyncio.Task[Any], seconds: float | None, instance: Instance, action: CallAction | LocalAction
    ) -> bool:
        """Wait for a call and tell whether the call ended in time.

        A timeout or the caller's cancellation cancels the call.
        """
        try:
            done, _ = await asyncio.wait([task], timeout=seconds)
        except asyncio.CancelledError:
            await self._cancel(task, instance, action)
            raise
        if not done:
            await self._cancel(task, instance, action)
        return bool(done)

    async def _cancel(self, task: asyncio.Task[Any], instance: Instance, action: CallAction | LocalAction) -> None:
        task.cancel()
        try:
            await asyncio.wait([task], timeout=CANCEL_SECONDS)
        finally:
            if not task.done():
                self._keep(task, instance, action)

    def _keep(self, task: asyncio.Task[Any], instance: Instance, action: CallAction | LocalAction) -> None:
        place = instance.saga_type, base_name(action.step)
        self.tasks.add(task)
        self.by_step[place] += 1

        def gone(ended: asyncio.Task[Any]) -> None:
            self.tasks.discard(ended)
            self.by_step[place] -= 1

        task.add_done_callback(gone)
        saga = instance.saga_id, instance.saga_type
        self.observer.emit(SagaTaskLeaked(*saga, action.step, action.phase, action.attempt, len(self.tasks)))


def failure(action: Step, error: BaseException, redactor: Redactor, *, late: bool = False) -> Result:
    """Return the result of an exception: invalid, declined, unavailable, raised, or unknown after a timeout."""
    # A reply that does not open says nothing about the effect, which must not be taken as rejected.
    if isinstance(error, INVALID) or (isinstance(error, InvalidPayload) and isinstance(action, ApplyReply)):
        return invalid(action, error, redactor)
    if isinstance(error, Permanent):
        return RejectedResult(action.step, action.phase, describe_failure(action, error, redactor))
    if late:
        return TimedOut(action.step, action.phase)
    if isinstance(error, StepUnavailable) and isinstance(action, CallAction | LocalAction):
        text = describe_failure(action, error, redactor)
        return UnavailableResult(action.step, action.phase, text, error.retry_after_seconds or 0.0)
    return Raised(
        action.step, action.phase, describe_failure(action, error, redactor), reply=isinstance(action, ApplyReply)
    )


def invalid(action: Step, error: BaseException, redactor: Redactor) -> InvalidResult:
    """Return the result for an invalid state or invalid events. Another attempt would fail in the same way."""
    return InvalidResult(action.step, action.phase, describe_failure(action, error, redactor))


def describe_failure(action: Step, error: BaseException, redactor: Redactor) -> str:
    """Describe an error, with the function of the step and the source location.

    >>> from outrider.saga.model import Phase
    >>> describe_failure(CallAction("charge", Phase.ACTION, 1, "key"), ValueError("no such card"), Redactor())
    'ValueError: no such card'
    """
    text = describe(error, redactor)
    # A rejection and an outage are messages of the author, not errors.
    return text if isinstance(error, StepRejected | StepUnavailable) else f"{_prefix(action)}{text}"


def _text(error: BaseException, redactor: Redactor) -> str:
    text = text_of(error, redactor)
    if text and isinstance(error, Permanent | UsageError | StepUnavailable):
        return text
    return summary_of(error, redactor)


def _prefix(action: Step) -> str:
    match action:
        case ApplyReply():
            return f'on("{action.message.name}"): '
        case SendCommand():
            return "compensation_payload: " if action.phase == "compensation" else "payload: "
    return ""


def check_ran(result: Any) -> Any:
    """Return the result of a function. Raises InvalidHandler for a generator or coroutine, whose code has not run.

    >>> check_ran(5)
    5
    """
    if inspect.isgenerator(result) or inspect.isasyncgen(result):
        raise InvalidHandler(LAZY)
    if inspect.iscoroutine(result):
        result.close()
        raise InvalidHandler(UNAWAITED)
    return result


def check_computed(result: Any) -> Any:
    """Return the result of a function that must not await.

    >>> check_computed({"order": "A-7"})
    {'order': 'A-7'}
    """
    # The result of `run.stage` is awaitable too, but its work is already done.
    if inspect.iscoroutine(result):
        result.close()
        raise InvalidHandler(AWAITABLE)
    return check_ran(result)


def payload_of(result: Any) -> Any:
    """Return the payload that a function returned. Raises InvalidHandler for None, the result of a missing `return`.

    >>> payload_of({})
    {}
    """
    if check_computed(result) is None:
        raise InvalidHandler(NO_PAYLOAD)
    return result
