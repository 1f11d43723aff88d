"""Participants: they answer a repeated key with the stored reply, and are unreliable in every other way.

Effects are counted by step and not by key, so that a key that changes between attempts shows as a second effect.
"""

from __future__ import annotations

import random
from collections import Counter
from dataclasses import dataclass, field, replace
from typing import NamedTuple

from outrider.saga.definition.steps import Definition, StepKind, base_name
from outrider.saga.model import Phase

ALWAYS = 99


@dataclass(slots=True)
class Fate:
    """How often a step fails in one phase, by kind of failure."""

    rejects: bool = False
    raises_before: int = 0
    raises_after: int = 0
    silent: int = 0


class Answered(NamedTuple):
    """The participant has answered: yes or no."""

    agreed: bool


class Failed(NamedTuple):
    """The participant raised; the effect may have happened."""


class Down(NamedTuple):
    """The service is down, so the request had no effect."""


Answer = Answered | Failed | Down


class ServiceOutage(NamedTuple):
    """A time in which the service behind some steps is down."""

    steps: frozenset[tuple[str, Phase]] = frozenset()
    begin: float = 0.0
    end: float = 0.0


def random_outage(definition: Definition, rng: random.Random) -> ServiceOutage:
    """Return an outage that outlasts every budget of attempts."""
    steps = (step for step in definition.steps.values() if step.kind in (StepKind.CALL, StepKind.LOCAL))
    places = [(step.name, phase) for step in steps for phase in Phase if phase is Phase.ACTION or step.compensation]
    begin = rng.choice((0.0, 0.0, rng.uniform(0, 60)))
    return ServiceOutage(frozenset(p for p in places if rng.random() < 0.6), begin, begin + rng.uniform(20, 1500))


@dataclass(slots=True)
class Participants:
    """All participants of a saga, and the effects that happened."""

    fates: dict[tuple[str, Phase], Fate]
    effects: Counter[str] = field(default_factory=Counter)
    compensations: Counter[str] = field(default_factory=Counter)
    answers: dict[str, bool] = field(default_factory=dict)
    barred: set[str] = field(default_factory=set)

    def fate(self, step: str, phase: Phase) -> Fate:
        """Return the fate of a step. Each item has the weakness of its step; of the rejections, the second has it."""
        if (step, phase) not in self.fates:
            fate = self.fates[base_name(step), phase]
            self.fates[step, phase] = replace(fate, rejects=fate.rejects and step.endswith("[1]"))
        return self.fates[step, phase]

    def receive(self, step: str, phase: Phase, key: str) -> Answer:
        """Act or compensate under a key, unless the participant fails."""
        fate = self.fate(step, phase)
        if fate.raises_before > 0:
            fate.raises_before -= 1
            return Failed()
        agreed = self._act(step, key) if phase is Phase.ACTION else self._compensate(step, key)
        if fate.raises_after > 0:
            fate.raises_after -= 1
            return Failed()
        return Answered(agreed)

    def is_silent(self, step: str, phase: Phase) -> bool:
        """Tell whether the answer to a request that just arrived is lost at the participant."""
        fate = self.fate(step, phase)
        fate.silent -= (silent := fate.silent > 0)
        return silent

    def _act(self, step: str, key: str) -> bool:
        if key not in self.answers and key in self.barred:
            return False
        if key not in self.answers:
            self.answers[key] = not self.fate(step, Phase.ACTION).rejects
            self.effects[step] += self.answers[key]
        return self.answers[key]

    def _compensate(self, step: str, key: str) -> bool:
        if key not in self.barred:
            self.barred.add(key)
            self.compensations[step] += self.answers.get(key, False)
        return True

    def heal(self) -> None:
        """Repair everything that failed by chance. A participant that rejects still rejects."""
        for step_key, fate in self.fates.items():
            self.fates[step_key] = Fate(rejects=fate.rejects)


def random_participants(definition: Definition, rng: random.Random) -> Participants:
    """Return the participants of a definition, some better than others."""
    fates = {}
    for step in definition.steps:
        fates[step, Phase.ACTION] = _fate(rng, 0.12)
        fates[step, Phase.COMPENSATION] = _fate(rng, 0.0)
    return Participants(fates)


def _fate(rng: random.Random, rejection: float) -> Fate:
    """Return a fate: most steps are sound, most of the others have one weakness, and a few have all of them."""
    times = [rng.choices((1, 2, 3, ALWAYS), (4, 3, 2, 3))[0] for _ in range(3)]
    weakness = rng.choices((None, 0, 1, 2, 3), (60, 10, 10, 10, 10))[0]
    before, after, silent = (n if weakness in (at, 3) else 0 for at, n in enumerate(times))
    return Fate(rng.random() < rejection, before, after, silent)
