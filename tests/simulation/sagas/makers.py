"""Random definitions: sequences, parallel groups and looser graphs, every kind of step, with and without a pivot."""

from __future__ import annotations

import random
from dataclasses import replace

from outrider.retry import RetryPolicy
from outrider.saga.definition.steps import CommandSpec, Definition, Step, StepAction, StepKind

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


def nothing(*_: object) -> None:
    """Stand for a function of the user's: the world acts in its place."""


def definition(rng: random.Random) -> Definition:
    """Make a definition of one to eight steps."""
    groups = [rng.choice((1, 1, 1, 2, 3)) for _ in range(rng.randint(1, 4))]
    pivot_at = rng.randrange(len(groups)) if rng.random() < 0.6 else None
    if pivot_at is not None:
        groups[pivot_at] = 1
    steps: dict[str, Step] = {}
    before: tuple[str, ...] = ()
    for at, size in enumerate(groups):
        compensable = pivot_at is None or at < pivot_at
        group = [_step(rng, f"{at}{letter}", compensable=compensable, pivot=at == pivot_at) for letter in "abc"[:size]]
        loose = pivot_at is None and rng.random() < 0.3
        for step in group:
            after = _some(rng, before) if loose else before
            steps[step.name] = replace(step, after=after)
        before = (*before, *(step.name for step in group)) if loose else tuple(step.name for step in group)
    return Definition("order", 1, steps)


def _some(rng: random.Random, names: tuple[str, ...]) -> tuple[str, ...]:
    return tuple(name for name in names if rng.random() < 0.6)


def _step(rng: random.Random, name: str, *, compensable: bool, pivot: bool) -> Step:
    kind = rng.choice(EFFECTIVE if pivot else KINDS)
    # Requests that share their types of reply are told apart by the key alone; the others get replies without one.
    command, compensation_command = _commands(kind, name, own=f" {name}" if rng.random() < 0.3 else "")
    takes = {}
    if command and rng.random() < 0.5:
        takes = {str(command.reply): nothing, str(command.rejection): nothing}
    compensate = None
    if compensable and kind in EFFECTIVE and rng.random() < 0.8:
        compensate = _act(rng, compensation_command)
    action = _act(rng, command)
    if kind is StepKind.WAIT and rng.random() < 0.3:
        action = replace(action, timeout_seconds=None)
    return Step(name, kind, action, compensate, pivot=pivot, takes=takes)


def _commands(kind: StepKind, name: str, own: str) -> tuple[CommandSpec | None, CommandSpec | None]:
    if kind is StepKind.REQUEST:
        return CommandSpec("do", "t", f"yes{own}", f"no{own}"), CommandSpec("compensate", "t", f"compensated{own}")
    return (CommandSpec("", "", f"event {name}") if kind is StepKind.WAIT else None), None


def _act(rng: random.Random, command: CommandSpec | None) -> StepAction:
    retry = RetryPolicy(base_seconds=1, cap_seconds=8, max_attempts=rng.choice((1, 2, 2, 3, 4, 5)))
    return StepAction(nothing, command, retry, timeout_seconds=rng.randint(3, 20))
