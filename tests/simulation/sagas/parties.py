"""Participants: they keep the barrier's rules, and are unreliable in every other way.

Effects are counted by step and not by key, so that a key that changes between attempts shows as a second effect.
"""

from __future__ import annotations

import random
from collections import Counter
from dataclasses import dataclass, field
from typing import NamedTuple

from outrider.saga.definition.steps import Definition
from outrider.saga.model import Phase

ALWAYS = 99


@dataclass(slots=True)
class Fate:
    """What will go wrong with a step in one phase: how often, at most."""

    refuses: bool = False
    raises_before: int = 0
    raises_after: int = 0
    silent: int = 0


class Done(NamedTuple):
    """The participant has answered: yes or no."""

    agreed: bool


class Broke(NamedTuple):
    """It raised, or says nothing; it may have happened."""


Reply = Done | Broke


@dataclass(slots=True)
class Parties:
    """Everybody who takes part."""

    fates: dict[tuple[str, Phase], Fate]
    effects: Counter[str] = field(default_factory=Counter)
    compensations: Counter[str] = field(default_factory=Counter)
    kept: dict[str, bool] = field(default_factory=dict)
    barred: set[str] = field(default_factory=set)

    def hear(self, step: str, phase: Phase, key: str) -> Reply:
        """Do, or compensate, what is asked under a key; unless something comes between."""
        fate = self.fates[step, phase]
        if fate.raises_before > 0:
            fate.raises_before -= 1
            return Broke()
        agreed = self.act(step, key) if phase is Phase.ACTION else self.compensate(step, key)
        if fate.raises_after > 0:
            fate.raises_after -= 1
            return Broke()
        return Done(agreed)

    def act(self, step: str, key: str) -> bool:
        if key not in self.kept and key in self.barred:
            return False
        if key not in self.kept:
            self.kept[key] = not self.fates[step, Phase.ACTION].refuses
            self.effects[step] += self.kept[key]
        return self.kept[key]

    def compensate(self, step: str, key: str) -> bool:
        if key not in self.barred:
            self.barred.add(key)
            self.compensations[step] += self.kept.get(key, False)
        return True

    def heal(self) -> None:
        """Let everything that broke by chance work again; who refuses still refuses."""
        for place, fate in self.fates.items():
            self.fates[place] = Fate(refuses=fate.refuses)


def parties(definition: Definition, rng: random.Random) -> Parties:
    """Make participants for a definition, some better than others."""
    fates = {}
    for step in definition.steps:
        fates[step, Phase.ACTION] = _fate(rng, 0.12)
        fates[step, Phase.COMPENSATION] = _fate(rng, 0.0)
    return Parties(fates)


def _fate(rng: random.Random, rejection: float) -> Fate:
    """Some are sound, most of the others have one weakness, and a few have all of them."""
    times = [rng.choices((1, 2, 3, ALWAYS), (4, 3, 2, 3))[0] for _ in range(3)]
    weakness = rng.choices((None, 0, 1, 2, 3), (60, 10, 10, 10, 10))[0]
    before, after, silent = (n if weakness in (at, 3) else 0 for at, n in enumerate(times))
    return Fate(rng.random() < rejection, before, after, silent)
