"""Running a step's own code: its state is decoded before and encoded after, and whatever it raises becomes a result.

Nothing that the code of a step does reaches the worker as an exception, but cancellation.
"""

from __future__ import annotations

import asyncio
import inspect
import json
from dataclasses import replace
from typing import Any, NamedTuple

from outrider.errors import Misuse, Permanent
from outrider.event import Event
from outrider.saga.definition import Saga
from outrider.saga.errors import BadState
from outrider.saga.news import Absorb, Call, Declined, Local, Raised, Result, Send, Succeeded, TimedOut, Unfit, key_of
from outrider.saga.run import Reply, Run
from outrider.saga.state import decode, encode
from outrider.saga.steps import Act
from outrider.saga_store import Instance, Phase, SagaStore

KEY_HEADER = "saga_key"
PHASE_HEADER = "saga_phase"
"""What a command tells its participant: the idempotency key, and whether to do or to undo."""


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


def act_of(saga: Saga[Any], step: str, phase: Phase) -> Act:
    """Return what is done in a phase of a step."""
    found = saga.definition.steps[step]
    act = found.action if phase is Phase.ACTION else found.undo
    assert act is not None, f"{step} is being undone and has no undo"
    return act


async def call(saga: Saga[Any], instance: Instance, move: Call) -> Acted:
    """Call a step's function, outside any transaction."""
    act = act_of(saga, move.step, move.phase)
    try:
        run = _run(saga, instance, move)
        before = encode(run.state)
    except Exception as error:
        return Acted(move, unfit(move, error))
    limit = asyncio.timeout(act.timeout_seconds)
    try:
        async with limit:
            assert act.function
            result = act.function(run)
            if inspect.isawaitable(result):
                await result
    except Exception as error:
        return Acted(move, failure(move, error, late=limit.expired()))
    return _succeeded(move, run, before)


async def local(store: SagaStore, saga: Saga[Any], instance: Instance, move: Local, tx: Any) -> Acted:
    """Run a step's function in the transaction that saves its result."""
    act = act_of(saga, move.step, move.phase)
    try:
        run = _run(saga, instance, move)
    except Exception as error:
        return Acted(move, unfit(move, error))
    limit = asyncio.timeout(act.timeout_seconds)
    try:
        async with limit:
            assert act.function
            await store.call(act.function, run, tx)
    except Exception as error:
        return Acted(move, failure(move, error, late=limit.expired()))
    return _succeeded(move, run, instance.state)


def absorb(saga: Saga[Any], instance: Instance, move: Absorb) -> Absorbed | Result:
    """Take a reply into the state, or say why that was not possible."""
    function = saga.definition.steps[move.step].takes[move.mail.name]
    key = key_of(instance.saga_id, move.step)
    try:
        state = decode(saga.state_type, instance.state)
        run = Run(state, instance.saga_id, key, 1, instance.correlation_id, move.phase)
        function(run, Reply(move.mail.name, json.loads(move.mail.body)))
        return Absorbed(encode(run.state), tuple(run.staged))
    except BadState as error:
        return unfit(move, error)
    except Exception as error:
        return failure(move, error)


def command(saga: Saga[Any], instance: Instance, move: Send) -> Event | Result:
    """Make the command that a move sends, of the state; or say why that was not possible.

    It has the saga's id for a key, in both phases, so that a compensation cannot overtake its action.
    """
    asked = act_of(saga, move.step, move.phase).command
    assert asked
    try:
        payload = asked.payload(decode(saga.state_type, instance.state)) if asked.payload else {}
    except BadState as error:
        return unfit(move, error)
    except Exception as error:
        return failure(move, error)
    return Event(
        asked.event_type,
        payload,
        topic=asked.topic,
        key=str(instance.saga_id),
        saga_id=str(instance.saga_id),
        headers={KEY_HEADER: move.key, PHASE_HEADER: move.phase.value},
    )


def traced(event: Event, instance: Instance) -> Event:
    """Let an event go on with the trace that the saga was started in, unless it has one of its own."""
    if instance.traceparent is None or event.headers.keys() & {"traceparent", "trace_id"}:
        return event
    return replace(event, headers={**event.headers, "traceparent": instance.traceparent})


def failure(move: Call | Local | Send | Absorb, error: Exception, *, late: bool = False) -> Result:
    """Say what an exception means: it did not happen and will not, it broke, or nobody knows."""
    if late and isinstance(error, TimeoutError):
        return TimedOut(move.step, move.phase)
    kind = Declined if isinstance(error, Permanent) else Raised
    return kind(move.step, move.phase, _told(error))


def unfit(move: Call | Local | Send | Absorb, error: Exception) -> Unfit:
    """Say that the state, or what was staged, is at fault; it would be the next time, too."""
    return Unfit(move.step, move.phase, str(error) if isinstance(error, Misuse) else _told(error))


def _told(error: Exception) -> str:
    text, kind = str(error), type(error).__name__
    return text if text and isinstance(error, Permanent) else f"{kind}: {text}" if text else kind


def _run(saga: Saga[Any], instance: Instance, move: Call | Local) -> Run[Any]:
    state = decode(saga.state_type, instance.state)
    return Run(state, instance.saga_id, move.key, move.attempt, instance.correlation_id, move.phase)


def _succeeded(move: Call | Local, run: Run[Any], before: bytes) -> Acted:
    try:
        after = encode(run.state)
    except Exception as error:
        return Acted(move, unfit(move, error))
    return Acted(move, Succeeded(move.step, move.phase), before, after, tuple(run.staged))
