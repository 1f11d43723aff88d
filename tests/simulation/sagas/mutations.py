"""The proof that a simulation notices a missing rule."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import pytest

from tests.simulation.sagas.world import Unsound

Mutation = Callable[[pytest.MonkeyPatch], None]


class Breaks(NamedTuple):
    """What goes wrong in a world without a rule, and the seed of such a world, which is tried first.

    The seed only saves time: if that world has changed and breaks no longer, the others are searched.
    """

    problem: str
    likely: int


def check_some_world_breaks(run: Callable[[int], object], seeds: int, expected: Breaks) -> None:
    """Fail unless a world breaks a guarantee for the given reason."""
    others: list[str] = []
    for seed in (expected.likely, *range(seeds)):
        try:
            run(seed)
        except Unsound as found:
            if expected.problem in str(found):
                return
            others.append(str(found))
    pytest.fail(f"{seeds} worlds did without this rule; they broke only for other reasons: {others[:3]}")
