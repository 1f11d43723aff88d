"""The proof that a simulation notices a missing rule."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from tests.simulation.sagas.world import Unsound

Mutation = Callable[[pytest.MonkeyPatch], None]


def check_some_world_breaks(run: Callable[[int], object], seeds: int, problem: str) -> None:
    """Fail unless a world breaks a guarantee for the given reason."""
    others: list[str] = []
    for seed in range(seeds):
        try:
            run(seed)
        except Unsound as found:
            if problem in str(found):
                return
            others.append(str(found))
    pytest.fail(f"{seeds} worlds did without this rule; they broke only for other reasons: {others[:3]}")
