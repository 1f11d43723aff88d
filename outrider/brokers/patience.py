"""The patience of a publish: the seconds without any answer after which the rest of a wave is left behind.

A fixed limit would be wrong for one of two brokers: a distant broker answers late as a rule, and a near broker that is
silent for a moment has a destination that does not work. The limit therefore follows the time that answers take.

>>> patience = Patience(longest_seconds=2.0)
>>> patience.seconds
0.5
>>> for _ in range(50):
...     patience.learn(0.3)
>>> round(patience.seconds, 1)
1.2
"""

from __future__ import annotations

from dataclasses import dataclass

SHORTEST_SECONDS = 0.5
"""A busy machine pauses for as long, and such a pause should not cost an additional write per event."""

TIMES = 4
"""Answers may take several times as long as usual."""

WEIGHT = 1 / 8
"""The weight of the newest time in the mean. A single late answer changes little."""


@dataclass(slots=True)
class Patience:
    """The mean time of an answer, and the limit that follows from the mean."""

    longest_seconds: float
    mean_seconds: float = 0.0

    @property
    def seconds(self) -> float:
        """Return the seconds without an answer after which a publish returns."""
        return min(self.longest_seconds, max(SHORTEST_SECONDS, TIMES * self.mean_seconds))

    def learn(self, seconds: float) -> None:
        """Record the time that an answer has taken."""
        self.mean_seconds += (min(seconds, self.longest_seconds) - self.mean_seconds) * WEIGHT
