"""Random definitions: sequences, parallel groups and looser graphs, every kind of step, with and without a pivot."""

from __future__ import annotations

import random
from dataclasses import replace

from outrider.backoff import RetryPolicy
from outrider.saga.steps import Act, Command, Definition, Kind, Step

KINDS = (Kind.LOCAL, Kind.CALL, Kind.REQUEST, Kind.CALL, Kind.REQUEST, Kind.WAIT, Kind.SLEEP)
EFFECTIVE = (Kind.LOCAL, Kind.CALL, Kind.REQUEST)


def nothing(*_: object) -> None:
    """Stand for a function of the user's: the world acts in its place."""


def definition(chance: random.Random) -> Definition:
    """Make a definition of one to eight steps."""
    groups = [chance.choice((1, 1, 1, 2, 3)) for _ in range(chance.randint(1, 4))]
    pivot_at = chance.randrange(len(groups)) if chance.random() < 0.6 else None
    if pivot_at is not None:
        groups[pivot_at] = 1
    steps: dict[str, Step] = {}
    before: tuple[str, ...] = ()
    for at, size in enumerate(groups):
        undoable = pivot_at is None or at < pivot_at
        group = [_step(chance, f"{at}{letter}", undoable=undoable, pivot=at == pivot_at) for letter in "abc"[:size]]
        loose = pivot_at is None and chance.random() < 0.3
        for step in group:
            after = _some(chance, before) if loose else before
            steps[step.name] = replace(step, after=after)
        before = (*before, *(step.name for step in group)) if loose else tuple(step.name for step in group)
    return Definition("order", 1, steps)


def _some(chance: random.Random, names: tuple[str, ...]) -> tuple[str, ...]:
    return tuple(name for name in names if chance.random() < 0.6)


def _step(chance: random.Random, name: str, *, undoable: bool, pivot: bool) -> Step:
    kind = chance.choice(EFFECTIVE if pivot else KINDS)
    # Requests that share their types of reply are told apart by the key alone; the others get replies without one.
    command, undo_command = _commands(kind, name, own=f" {name}" if chance.random() < 0.3 else "")
    takes = {}
    if command and chance.random() < 0.5:
        takes = {str(command.reply): nothing, str(command.refusal): nothing}
    undo = None
    if undoable and kind in EFFECTIVE and chance.random() < 0.8:
        undo = _act(chance, undo_command)
    action = _act(chance, command)
    if kind is Kind.WAIT and chance.random() < 0.3:
        action = replace(action, timeout_seconds=None)
    return Step(name, kind, action, undo, pivot=pivot, takes=takes)


def _commands(kind: Kind, name: str, own: str) -> tuple[Command | None, Command | None]:
    if kind is Kind.REQUEST:
        return Command("do", "t", f"yes{own}", f"no{own}"), Command("undo", "t", f"undone{own}")
    return (Command("", "", f"event {name}") if kind is Kind.WAIT else None), None


def _act(chance: random.Random, command: Command | None) -> Act:
    retry = RetryPolicy(base_seconds=1, cap_seconds=8, max_attempts=chance.choice((1, 2, 2, 3, 4, 5)))
    return Act(nothing, command, retry, timeout_seconds=chance.randint(3, 20))
