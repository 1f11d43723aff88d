"""What the figures are held against. A target is a ratio within one run, never a figure of its own."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from bench import mongo
from bench.brokers import RELAY, Arena, Score
from bench.load import Drain
from bench.staging import Cost

TEXTBOOK_RATIO = 10
ONE_BY_ONE_RATIO = 10
CHECKS_RATIO = 2


class TargetResult(NamedTuple):
    """A target, and whether it was met."""

    target: str
    wanted: float
    found: float

    @property
    def met(self) -> bool:
        """Tell whether it was met."""
        return self.found >= self.wanted

    def __str__(self) -> str:
        return f"target: {self.target}: {'met' if self.met else 'MISSED'} ({self.found:.2f})"


def against_plain(costs: Sequence[Cost], fields: Sequence[Cost]) -> TargetResult:
    """Compare the time that checks at the relay and encryption at staging add with the own time of a plain relay."""
    plain, *_, checked = (cost.microseconds for cost in costs)
    prepared, encrypted, *_ = (cost.microseconds for cost in fields)
    target = (
        "a schema, two rules and two encrypted fields cost less than half of the plain relay's own time: "
        "plain time by time added"
    )
    return TargetResult(target, CHECKS_RATIO, plain / max(checked - plain + encrypted - prepared, 0.001))


def textbook_ratios(drains: Sequence[Drain]) -> dict[str, float]:
    """Every design over the textbook's, row by row, with nothing held open."""
    ours = [drain for drain in drains if drain.open_transaction == "none"]
    textbook = ours[0]
    return {drain.design: round(drain.events_per_second / textbook.events_per_second, 1) for drain in ours}


def against_textbook(ratios: dict[str, float]) -> TargetResult:
    """Every variant of ours must meet it."""
    worst = min(ratio for design, ratio in ratios.items() if design.startswith("outrider"))
    return TargetResult(f"outrider at least {TEXTBOOK_RATIO} times the textbook, row by row", TEXTBOOK_RATIO, worst)


def against_one_by_one(rates: Sequence[mongo.Rate]) -> TargetResult:
    """Every variant of ours must meet it."""
    worst = min(rate.events_per_second for rate in rates if rate.design.startswith(mongo.RELAY))
    target = f"{mongo.RELAY} on MongoDB at least {ONE_BY_ONE_RATIO} times {rates[0].design}"
    return TargetResult(target, ONE_BY_ONE_RATIO, round(worst / rates[0].events_per_second, 1))


def against_rival(arena: Arena, scores: Sequence[Score]) -> list[TargetResult]:
    """One relay process, as it comes, over the broker's own client; also with a core for each, if it was measured."""
    return [
        TargetResult(
            f"{score.what} to {arena.name} at least {arena.target:g} times {arena.rival}",
            arena.target,
            score.times(scores),
        )
        for score in scores
        if score.what.startswith(RELAY) and "--" not in score.what and "keys" not in score.what
    ]
