"""Random sagas: sequences, parallel groups and looser graphs, every kind of step, with and without a pivot.

Some steps have a condition, which depends on the replies that were applied, and some are run for each item of a list.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from outrider.retry import RetryPolicy
from outrider.saga import Saga, StepContext
from outrider.saga.definition.steps import StepKind
from outrider.saga.model import Phase

KINDS = (
    StepKind.LOCAL,
    StepKind.CALL,
    StepKind.REQUEST,
    StepKind.CALL,
    StepKind.REQUEST,
    StepKind.WAIT,
    StepKind.SLEEP,
)
EFFECTIVE = (StepKind.LOCAL, StepKind.CALL, StepKind.REQUEST)
SAGA_TYPE = "order"
TOPIC = "commands"


@dataclass
class State:
    """The state of a simulated saga: how many replies were applied."""

    replies: int = 0
    results: list[Any] = field(default_factory=list)


class StepCode(Protocol):
    """The code of the steps, supplied by the simulated world."""

    async def call(self, step: str, phase: Phase, key: str) -> None:
        """Run a call."""

    async def run_local(self, step: str, phase: Phase, tx: Any) -> None:
        """Run a local step in its transaction."""

    def apply_reply(self) -> None:
        """Fail, or let the reply be applied."""


def random_saga(rng: random.Random, code: StepCode, *, plain: bool = False) -> Saga[State]:
    """Return a saga of one to nine steps. A plain saga has no deadline, no condition and no list."""
    groups = [rng.choice((1, 1, 1, 2, 3)) for _ in range(rng.randint(1, 4))]
    pivot_at = rng.randrange(len(groups)) if rng.random() < 0.6 else None
    if pivot_at is not None:
        groups[pivot_at] = 1
    seconds = rng.randint(25, 60) if rng.random() < 0.1 else None
    saga = Saga(SAGA_TYPE, State, deadline_seconds=None if plain else seconds)
    shapes = 0.0 if plain else 0.1
    before: tuple[str, ...] = ()
    for at, size in enumerate(groups):
        names = tuple(f"{at}{letter}" for letter in "abc"[:size])
        loose = pivot_at is None and rng.random() < 0.3
        for name in names:
            after = tuple(known for known in before if rng.random() < 0.6) if loose else before
            has_compensation = (pivot_at is None or at < pivot_at) and rng.random() < 0.8
            options = {"pivot": at == pivot_at, "has_compensation": has_compensation}
            _add_step(rng, saga, code, name, after, shapes=shapes, **options)
        before = (*before, *names) if loose else names
    return saga


def _add_step(
    rng: random.Random,
    saga: Saga[State],
    code: StepCode,
    name: str,
    after: tuple[str, ...],
    *,
    shapes: float,
    pivot: bool,
    has_compensation: bool,
) -> None:
    common: dict[str, Any] = {"name": name, "after": after}
    if rng.random() < shapes:
        common["when"] = _condition(rng)
    kind = rng.choice(EFFECTIVE if pivot else KINDS)
    if kind in EFFECTIVE and not pivot and rng.random() < shapes:
        known = any(step.into for step in saga._graph.steps.values())
        into = None if known or rng.random() < 0.5 else "results"
        common |= {"for_each": _items(rng.randint(0, 4)), "parallel_max": rng.randint(1, 3), "into": into}
    match kind:
        case StepKind.LOCAL:
            local = saga.local(**common, **_limits(rng), pivot=pivot)(_local(code, name, Phase.ACTION))
            if has_compensation:
                local.compensate(**_limits(rng))(_local(code, name, Phase.COMPENSATION))
        case StepKind.CALL:
            call = saga.call(**common, **_limits(rng), pivot=pivot)(_call(code, name, Phase.ACTION))
            if has_compensation:
                call.compensate(**_limits(rng))(_call(code, name, Phase.COMPENSATION))
        case StepKind.REQUEST:
            _add_request(rng, saga, code, common, pivot=pivot, has_compensation=has_compensation)
        case StepKind.WAIT:
            limit = None if rng.random() < 0.3 else rng.randint(3, 20)
            saga.wait(f"event.{name}", **common, timeout_seconds=limit)
        case StepKind.SLEEP:
            saga.sleep(rng.randint(3, 20), **common)


def _condition(rng: random.Random) -> Callable[[State], bool]:
    remainder = rng.choice((0, 1))

    def decide(state: State) -> bool:
        return state.replies % 2 == remainder

    return decide


def _items(count: int) -> Callable[[State], Sequence[int]]:
    return lambda state: range(count + state.replies)


def _add_request(
    rng: random.Random,
    saga: Saga[State],
    code: StepCode,
    common: dict[str, Any],
    *,
    pivot: bool,
    has_compensation: bool,
) -> None:
    # Requests that share their types of reply differ by the key alone; the others get replies without a key.
    own = f".{common['name']}" if rng.random() < 0.3 else ""
    compensation: dict[str, Any] = {}
    if has_compensation:
        retry = _limits(rng)["retry"]
        compensation = {"compensate": "compensate", "compensated": f"compensated{own}", "compensation_retry": retry}
    request = saga.request(
        "act",
        topic=TOPIC,
        reply=f"yes{own}",
        rejection=f"no{own}",
        pivot=pivot,
        **common,
        **_limits(rng),
        **compensation,
    )
    if rng.random() < 0.5:
        for reply in (f"yes{own}", f"no{own}"):
            request.on(reply)(_apply(code))


def _limits(rng: random.Random) -> dict[str, Any]:
    retry = RetryPolicy(base_seconds=1, cap_seconds=8, max_attempts=rng.choice((1, 2, 2, 3, 4, 5)))
    return {"retry": retry, "timeout_seconds": rng.randint(3, 20)}


def _call(code: StepCode, name: str, phase: Phase) -> Any:
    async def call(run: StepContext[State]) -> Any:
        await code.call(_named(name, run), phase, run.key)
        return run.item

    return call


def _local(code: StepCode, name: str, phase: Phase) -> Any:
    async def local(run: StepContext[State], tx: Any) -> Any:
        await code.run_local(_named(name, run), phase, tx)
        return run.item

    return local


def _named(name: str, run: StepContext[State]) -> str:
    return name if run.item is None else f"{name}[{run.item}]"


def _apply(code: StepCode) -> Callable[[StepContext[State], Any], Any]:
    def apply(run: StepContext[State], reply: Any) -> Any:
        code.apply_reply()
        run.state.replies += 1
        return run.item

    return apply
